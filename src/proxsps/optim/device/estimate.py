"""From loss value and gradients to the value m and the slopes d of the linear model of a step on a device.

An estimate prepares new averages before the step (`proxsps.optim.device.joined`) and writes them only where the step
is taken, so that a skipped step leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.estimate import (
    Averages,
    averaged_value,
    corrected_weights,
    coupled_value,
    momentum_weights,
    update_averages,
)
from proxsps.optim.blocks import Block, couple
from proxsps.optim.device.joined import BlockAverages
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.lists import LAUNCH, bundles, join, widened
from proxsps.optim.memory import State, entries
from proxsps.optim.reduce import Sums, further_rows
from proxsps.optim.rule import Rule

KEYS = ("model_value", "model_offset", "k")  # in the groups


class Estimated(NamedTuple):
    """What a step needs of a model besides its slopes."""

    m: Array  # its value at x
    g_sq: Array  # ||D_j^-1 g_j||^2 of the gradient g of this step, one number per block
    moves: Sums  # the sums from which the Euclidean length of a move follows


class Estimate:
    """The loss and its gradient as they are; for coupled methods with the regulariser in both.

    Blocks get their slopes.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers) -> None:
        self.known: Mapping[int, Sequence[list[Tensor]]] = {}  # sums of affine blocks (`AffinePart`)
        self._coupled = rule.coupled
        if rule.coupled:
            self._penalties = numbers.vector([0.0 if value is None else value for value in map(couple, blocks)])

    def extras(self) -> list[Array]:
        """Further sums on this rank: rows with one number per block; a row of zeros may be the number 0."""
        return [self._penalties] if self._coupled else []

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The model, from the loss and sums over all ranks."""
        m = coupled_value(f + extras[0].sum(), sums.x_sq, lam) if self._coupled else f
        return Estimated(m, sums.d_sq, sums)

    def follow(self, step: Any, alpha: Tensor, ok: Tensor) -> None:
        """What else moves after the step: nothing, but in the schedule-free form."""

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """Numbers in the groups that a step changes: their values after and before it."""
        return {}

    def commit(self, ok: Tensor) -> None:
        """Write the new averages if the step was taken."""


class Remembered(Estimate):
    """A model that is made of averages, `own`; numbers in the groups that it changes are `before` the step."""

    def __init__(
        self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, before: dict[str, Tensor], own: Sequence[Any]
    ) -> None:
        self._rule, self._blocks, self._numbers, self._before, self._own = rule, blocks, numbers, before, own
        self._after: dict[str, Array] = {}
        sums = {i: sums for part in own for i, sums in part.sums.items()}
        self._sums = [sums[i] for i in range(len(blocks))]
        self.known = {i: sums[i][:2] for i, block in enumerate(blocks) if not block.centered}

    def extras(self) -> list[Array]:
        """<g, x>, ||D^-1 g||^2, <d, center>, and for lengths of moves in a metric ||p||^2 and <p, x>.

        The third completes <d, x>, because sums of blocks with a centre have <d, x - center>.
        """
        total = self._numbers.total
        rows = [[total(own[row]) if own[row] else 0.0 for own in self._sums] for row in (2, 3, 4, 5)]
        rows.insert(2, [])
        if self._rule.beta2 is None:
            rows[3:] = [], []
        self._complete(rows)
        return [self._numbers.vector(row) if row else 0.0 for row in rows[: further_rows(self._rule)]]

    def _complete(self, rows: list[list[Tensor | float]]) -> None:
        """Add what is not in the sums of the averages."""

    def _moves(self, extras: Sequence[Array], sums: Sums) -> Sums:
        """In a metric, a move is along D^-1 d."""
        in_metric = self._rule.beta2 is not None and self._rule.max_move is not None
        return Sums(extras[3], extras[4], sums.x_sq) if in_metric else sums

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the averages."""
        return {key: (after, self._before[key]) for key, after in self._after.items()}

    def commit(self, ok: Tensor) -> None:
        """Write the new averages if the step was taken, and count one more gradient for each parameter."""
        for own in self._own:
            own.commit(ok)


class Averaged(Remembered):
    """The average of all linear models so far, with the gradient's second moments as a metric if the rule has one.

    State of a parameter: `average` is d, and in the metric `square` is v and `steps` the number of gradients so far.
    The numbers fbar, gamma and k are in the groups.

    Args: those of `Estimate`, and the optimizer's state.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, state: State) -> None:
        before = {key: numbers.scalar(blocks[0].group[key]) for key in KEYS}
        # Adam's averages start from zeros, with a correction; without a metric, they start from the first value.
        form = momentum_weights if rule.beta2 is None else corrected_weights
        self._state, self._weights = state, form(before["k"], rule.beta)
        own = [BlockAverages(rule, {i: block}, numbers, state, self._weights.new) for i, block in enumerate(blocks)]
        super().__init__(rule, blocks, numbers, before, own)

    def _at_rest(self, block: Block) -> Tensor | float:
        """<d, x> over the tensors of a block that rest; 0 if there are none."""
        owners = [block.group["params"][i] for i in block.resting]
        owners = [owner for owner in owners if "average" in self._state.get(owner, {})]
        if not owners:
            return 0.0
        averages = [entries(self._state[owner]["average"], block.gathered) for owner in owners]
        points = [widened(entries(x.detach().resolve_conj(), block.gathered)) for x in owners]
        found = bundles((averages, points), LAUNCH)
        return self._numbers.total([torch.dot(join(ds), join(xs)) for ds, xs in found])

    def _complete(self, rows: list[list[Tensor | float]]) -> None:
        """Products with centres, and <d, x> of tensors that rest, which is in both products."""
        if any(block.resting or block.centered for block in self._blocks):
            rows[2] = list(map(self._at_center, self._blocks))
        if any(block.resting for block in self._blocks):
            resting = list(map(self._at_rest, self._blocks))
            for row in (0, 2):
                rows[row] = [number + own for number, own in zip(rows[row], resting, strict=True)]

    def _at_center(self, block: Block) -> Tensor | float:
        """<d, center>."""
        pairs = zip(block.slopes, block.centers, strict=True) if block.centered and block.quadratic else ()
        products = [(d * c).sum() for d, c in pairs if c is not None]
        return self._numbers.total(products) if products else 0.0

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The average of the linear models at the current point."""
        d_dot_x = over_blocks(sums.d_dot_x)
        if not isinstance(extras[2], float):
            d_dot_x = d_dot_x + over_blocks(extras[2])
        before = Averages(*self._before.values())
        after = update_averages(before, f, over_blocks(extras[0]), self._weights)
        self._after = dict(zip(KEYS, after, strict=True))
        return Estimated(averaged_value(f, after, d_dot_x), extras[1], self._moves(extras, sums))
