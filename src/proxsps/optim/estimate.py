"""The first part of a step: from loss value and gradients to the value m and the slopes d of a linear model.

An estimate owns the state of its averages. It prepares that state before the step and commits it only if the step is
taken, so that a skipped step leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.estimate import (
    Averages,
    Weights,
    averaged_value,
    corrected_weights,
    coupled_value,
    momentum_weights,
    update_averages,
)
from proxsps.optim.blocks import Block
from proxsps.optim.memory import State, blank, entries, replace
from proxsps.optim.moments import ROWS, DeviceMoments, Moments
from proxsps.optim.numbers import Device, Numbers
from proxsps.optim.parts import Part, Sums
from proxsps.optim.passes import COPIES, bucketed, widened
from proxsps.regularizers import Zero
from proxsps.regularizers.base import subgradient_all, value_all


class Estimate:
    """The loss and its gradient as they are."""

    plain = True  # whether the value of the model is the loss, which is known before any sum
    rows = 0  # of `extras`
    coupled = False  # whether the squared l2 norm is part of the slope; the passes add it while they read

    def prepare(self, blocks: Sequence[Block], numbers: Numbers) -> None:
        """Set the slopes of the blocks, or how to compute them."""

    def start(self, owner: Tensor) -> None:
        """Create the state of a parameter, if there is none."""

    def extras(self, parts: Iterable[Part]) -> list[Array]:
        """Further sums on this rank, after those of the slopes: rows with one number per block."""
        return []

    def value(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Array:
        """The value of the model at x, from the loss and sums over all ranks."""
        return f

    def expected(self, f: Array, g_dot_x: Array, d_dot_x: Array) -> Array:
        """The value of the model from inner products over all blocks, which may be estimates."""
        return f

    def move_sums(self, extras: Sequence[Array], sums: Sums) -> Sums:
        """The sums from which the Euclidean length of a move follows."""
        return sums

    def g_sq(self, extras: Sequence[Array], sums: Sums) -> Array:
        """||D_j^-1 g_j||^2 of the gradient g of this step, one number per block."""
        return sums.d_sq

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """Numbers in the groups that a step changes: their values after and before it."""
        return {}

    def commit(self, ok: Array) -> None:
        """Keep the prepared tensors if the step was taken."""


class Coupled(Estimate):
    """Loss and regulariser together, with the gradient of both."""

    plain, coupled, rows = False, True, 1

    def prepare(self, blocks: Sequence[Block], numbers: Numbers) -> None:
        """Add subgradients of regularisers other than the squared l2 norm."""
        penalties: list[Tensor | float] = [0.0] * len(blocks)
        for i, block in enumerate(blocks):
            if not block.params or block.quadratic:
                continue
            xs = [widened(x) for x in block.params]
            penalties[i] = value_all(block.phi, xs, block.indices)
            slopes = subgradient_all(block.phi, xs, block.indices)
            block.slopes = [widened(g) + s for g, s in zip(block.slopes, slopes, strict=True)]
            block.phi = Zero()
        self._penalties = numbers.vector(penalties)

    def extras(self, parts: Iterable[Part]) -> list[Array]:
        """Values of these regularisers."""
        return [self._penalties]

    def value(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Array:
        """The regularised loss."""
        return coupled_value(f + extras[0].sum(), sums.x_sq, lam)


class Averaged(Estimate):
    """The average of all linear models so far, with the gradient's second moments as a metric if `beta2` is given.

    State of a parameter: `average` is d, and in the metric `square` is v and `steps` the number of gradients so far.
    The numbers fbar, gamma and k are in the groups.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        beta: the weight of the old d.
        beta2: the weight of the old v; None for the identity metric.
        eps: epsilon of the metric.
        moves: whether the Euclidean length of the move is needed.
    """

    plain, rows = False, ROWS
    keys = ("model_value", "model_offset", "k")

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: State,
        beta: float,
        beta2: float | None = None,
        eps: float = 0.0,
        moves: bool = False,
    ) -> None:
        self._groups, self._state = groups, state
        self._beta, self._beta2, self._eps, self._moves = beta, beta2, eps, moves
        self.rows = ROWS if moves else ROWS - 2

    def prepare(self, blocks: Sequence[Block], numbers: Numbers) -> None:
        """Give each block a record of its averages and of the weights with which they change."""
        self._blocks, self._numbers = blocks, numbers
        self._before = Averages(*(numbers.scalar(self._groups[0][key]) for key in self.keys))
        # Adam's averages start from zeros, with a correction; without a metric, they start from the first value.
        form = momentum_weights if self._beta2 is None else corrected_weights
        self._weights = form(self._before.taken, self._beta)
        weights = Weights(*map(numbers.factor, self._weights))
        device = isinstance(numbers, Device)
        for block in blocks:
            owners = block.owners
            if device:  # which writes state in place
                for owner in owners:
                    self.start(owner)
            # Looked up once: with hundreds of tensors, hashing them takes as long as the arithmetic.
            block.owns = owns = [self._state.get(owner, {}) for owner in owners]
            moments = (DeviceMoments if device else Moments)(block.slopes, _held(block, owns, "average"), weights)
            moments.moves, moments.eps = self._moves, self._eps
            moments.sizes = self._groups[0].get("distance_cap", True)
            moments.in_place = not block.gathered
            moments.fresh = any(["average" not in own for own in owns])
            if self._beta2 is not None:
                moments.squares = _held(block, owns, "square")
                if isinstance(moments, DeviceMoments):
                    moments.beta2 = self._beta2
                    moments.steps = [own["steps"] for own in owns]
                else:
                    moments.square_weights = self._square_weights(owns)
            block.moments = moments
        self._at_rest = list(map(self._resting, blocks))

    def start(self, owner: Tensor) -> None:
        """Make the state of a parameter, where there is none."""
        own = self._state[owner]
        if "average" not in own:
            own["average"] = blank(owner)
        if self._beta2 is not None and "square" not in own:
            own["square"] = blank(owner)
            own["steps"] = torch.zeros((), dtype=torch.float32, device=owner.device)

    def _resting(self, block: Block) -> Array | float:
        """<d, x> over the tensors of a block that rest; 0 if there are none."""
        owners = [block.group["params"][i] for i in block.resting]
        averages = [self._state.get(owner, {}).get("average") for owner in owners]
        pairs = [
            (entries(d, block.gathered), widened(entries(x.detach().resolve_conj(), block.gathered)))
            for d, x in zip(averages, owners, strict=True)
            if d is not None
        ]
        return self._numbers.total([torch.dot(d, x) for d, x in bucketed(pairs, *COPIES)]) if pairs else 0.0

    def _square_weights(self, owns: Sequence[dict[str, Any]]) -> list[Weights]:
        """The weights of each tensor, which has its own count."""
        counts = [float(own["steps"]) if "steps" in own else 0.0 for own in owns]
        known = {count: corrected_weights(self._numbers.scalar(count), self._beta2) for count in set(counts)}
        weights = {count: Weights(*map(self._numbers.factor, pair)) for count, pair in known.items()}
        return [weights[count] for count in counts]

    def extras(self, parts: Iterable[Part]) -> list[Array]:
        """See `Moments.extras`, as rows with one number per block."""
        rows: list[list[Array]] = [[0.0] * len(self._blocks) for _ in range(self.rows)]
        for part in parts:
            for place, column in zip(part.places, part.extras(), strict=True):
                for row, number in zip(rows, column, strict=False):  # the last ones are of moves
                    row[place] = number
        if any(block.resting for block in self._blocks):  # their <d, x> is in both products
            for row in (rows[0], rows[2]):
                row[:] = [number + own for number, own in zip(row, self._at_rest, strict=True)]
        elif not any(block.centered for block in self._blocks):
            rows[2] = []
        return [self._numbers.vector(row) if row else 0.0 for row in rows]

    def value(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Array:
        """The average of the linear models at the current point."""
        d_dot_x = over_blocks(sums.d_dot_x)
        if not isinstance(extras[2], float):
            d_dot_x = d_dot_x + over_blocks(extras[2])
        return self._value(f, over_blocks(extras[0]), d_dot_x)

    def expected(self, f: Array, g_dot_x: Array, d_dot_x: Array) -> Array:
        """The same, from inner products over the tensors that move."""
        resting = sum(self._at_rest)
        return self._value(f, g_dot_x + resting, d_dot_x + resting)

    def _value(self, f: Array, g_dot_x: Array, d_dot_x: Array) -> Array:
        with self._numbers.unchecked():  # what is not finite is skipped
            self._after = update_averages(self._before, f, g_dot_x, self._weights)
            return averaged_value(f, self._after, d_dot_x)

    def move_sums(self, extras: Sequence[Array], sums: Sums) -> Sums:
        """In a metric, the sums of D^-1 d instead of those of d."""
        return sums if self._beta2 is None or not self._moves else Sums(extras[3], extras[4], sums.x_sq)

    def g_sq(self, extras: Sequence[Array], sums: Sums) -> Array:
        """The same of the gradient alone, in the metric."""
        return extras[1]

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the model."""
        return dict(zip(self.keys, zip(self._after, self._before, strict=True), strict=True))

    def commit(self, ok: Array) -> None:
        """Keep the new averages."""
        for block in self._blocks:
            own = block.known_moments
            if not own.written:
                own.make(block, self._numbers)  # in a step of length 0, nothing is written
            own.keep(ok, partial(self._replace, block))
        if self._beta2 is not None:
            self._count(ok)

    def _count(self, ok: Array) -> None:
        """Count one more gradient for each parameter of the step, if it is taken."""
        if isinstance(self._numbers, Device):
            self._count_on_device(ok)
            return
        counts = []
        for block in self._blocks:
            owns = [self._state[owner] for owner in block.owners] if block.owns is None else block.owns
            for owner, own in zip(block.owners, owns, strict=True):
                own = own or self._state[owner]
                if "steps" not in own:
                    own["steps"] = torch.zeros((), dtype=torch.float32)
                counts.append(own["steps"])
        if counts:  # a tensor with alpha, because torch takes far longer for hundreds of sums with a number
            torch._foreach_add_(counts, torch.ones(()), alpha=1.0)

    def _count_on_device(self, ok: Array) -> None:
        """Count without reading `ok`: to add one tensor to all counts, torch would read it."""
        old: list[Tensor] = []
        new: list[Tensor] = []
        for own in (block.moments for block in self._blocks if block.params):
            if isinstance(own, DeviceMoments) and own.counts is not None:
                old += own.steps
                new += (own.counts + ok).unbind()
        if old:
            torch._foreach_copy_(old, new)

    def _replace(self, block: Block, i: int, key: str, new: Tensor) -> None:
        owner = block.group["params"][block.indices[i]]
        replace(owner, self._state[owner], key, new, block.gathered)


def _held(block: Block, owns: Sequence[dict[str, Any]], key: str) -> list[Tensor]:
    """State of a block in the form of its parameters; zeros if there is none yet."""
    found: list[Any] = [own.get(key) for own in owns]
    if any([held is None for held in found]):
        found = [blank(owner) if held is None else held for owner, held in zip(block.owners, found, strict=True)]
    if set(map(type, found)) <= {Tensor} and not any(dtype.is_complex for dtype in {held.dtype for held in found}):
        return found
    return [entries(held, block.gathered) for held in found]
