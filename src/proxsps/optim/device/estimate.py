"""From loss value and gradients to the value m and the slopes d of the linear model of a step on a device.

An estimate prepares new averages before the step and writes them only where the step is taken, so that a skipped step
leaves everything as it was. Tensors are joined into long vectors, and state is written in place, so that a captured
step finds it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.estimate import (
    Averages,
    averaged_value,
    corrected_weight,
    corrected_weights,
    coupled_value,
    metric,
    momentum_weights,
    update_averages,
)
from proxsps.optim.blocks import LINES, Block, couple
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.lists import LAUNCH, bundles, join, join_all, spread_all, widened
from proxsps.optim.memory import State, entries, least_metric, replace, start_averages
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

    Args:
        rule: the rule of the method.
        blocks: the blocks of the step, whose slopes are set.
        numbers: the numbers of the step.
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


class Averaged(Estimate):
    """The average of all linear models so far, with the gradient's second moments as a metric if the rule has one.

    State of a parameter: `average` is d, and in the metric `square` is v and `steps` the number of gradients so far.
    The numbers fbar, gamma and k are in the groups.

    Args: those of `Estimate`, and the optimizer's state.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, state: State) -> None:
        self._rule, self._blocks, self._numbers, self._state = rule, blocks, numbers, state
        self._before = Averages(*(numbers.scalar(blocks[0].group[key]) for key in KEYS))
        # Adam's averages start from zeros, with a correction; without a metric, they start from the first value.
        form = momentum_weights if rule.beta2 is None else corrected_weights
        self._weights = form(self._before.taken, rule.beta)
        self._at_rest = list(map(self._resting, blocks))
        self._averages = [BlockAverages(rule, block, numbers, state, self._weights.new) for block in blocks]
        self.known = {i: own.line for i, own in enumerate(self._averages) if not blocks[i].centered}

    def _resting(self, block: Block) -> Tensor | float:
        """<d, x> over the tensors of a block that rest; 0 if there are none."""
        owners = [block.group["params"][i] for i in block.resting]
        owners = [owner for owner in owners if "average" in self._state.get(owner, {})]
        if not owners:
            return 0.0
        averages = [entries(self._state[owner]["average"], block.gathered) for owner in owners]
        points = [widened(entries(x.detach().resolve_conj(), block.gathered)) for x in owners]
        found = bundles((averages, points), LAUNCH)
        return self._numbers.total([torch.dot(join(ds), join(xs)) for ds, xs in found])

    def extras(self) -> list[Array]:
        """The sums of `BlockAverages`, as rows with one number per block."""
        rows: list[Any] = [list(row) for row in zip(*(own.extras() for own in self._averages), strict=True)]
        if any(block.resting for block in self._blocks):  # their <d, x> is in both products
            for row in (rows[0], rows[2]):
                row[:] = [number + own for number, own in zip(row, self._at_rest, strict=True)]
        elif not any(block.centered for block in self._blocks):
            rows[2] = []
        if self._rule.beta2 is None:
            rows[3:] = [], []
        rows = rows[: further_rows(self._rule)]
        return [self._numbers.vector(row) if row else 0.0 for row in rows]

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The average of the linear models at the current point; in a metric, a move is along D^-1 d."""
        d_dot_x = over_blocks(sums.d_dot_x)
        if not isinstance(extras[2], float):
            d_dot_x = d_dot_x + over_blocks(extras[2])
        self._after = update_averages(self._before, f, over_blocks(extras[0]), self._weights)
        m = averaged_value(f, self._after, d_dot_x)
        in_metric = self._rule.beta2 is not None and self._rule.max_move is not None
        return Estimated(m, extras[1], Sums(extras[3], extras[4], sums.x_sq) if in_metric else sums)

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the model."""
        return dict(zip(KEYS, zip(self._after, self._before, strict=True), strict=True))

    def commit(self, ok: Tensor) -> None:
        """Write the new averages if the step was taken, and count one more gradient for each parameter."""
        for own in self._averages:
            own.keep(ok)


class SquareWeights:
    """How much of the averages of squares is new: a tensor that gets its first gradient late has its own count.

    Args:
        rule: the rule of the method.
        owners: the parameters.
        state: the optimizer's state.
    """

    def __init__(self, rule: Rule, owners: Sequence[Tensor], state: State) -> None:
        for owner in owners:
            start_averages(state[owner], owner, ["square"])
        self._steps = [state[owner]["steps"] for owner in owners]
        if not owners:
            return
        self._counts = torch.stack(self._steps)
        wide = any(state[owner]["square"].dtype is torch.float64 for owner in owners)
        self._weights = corrected_weight(self._counts.double() if wide else self._counts, rule.beta2)

    def spread(self, tensors: Sequence[Tensor], members: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The weight of each entry of some tensors, which are the `members` of all."""
        own = self._weights.to(dtype).unbind()
        return torch.cat([own[i].expand(t.numel()) for i, t in zip(members, tensors, strict=True)])

    def count(self, ok: Tensor) -> None:
        """Count one more gradient of all tensors if the step was taken."""
        if self._steps:  # to add one tensor to all counts, torch would read it
            torch._foreach_copy_(self._steps, (self._counts + ok).unbind())


def metric_of(v: Tensor, eps: float) -> Tensor:
    """D of one vector."""
    D: Tensor = metric(v, eps)
    if eps < least_metric(v.dtype):
        D = D.clamp_min(least_metric(v.dtype))
    # Where the square of a gradient overflows, NaN reaches the sums that are checked; infinity would not.
    return torch.nan_to_num(D, nan=math.nan, posinf=math.nan)


class BlockAverages:
    """The new averages of one block, which become its slopes, directions and metric; and sums over them.

    Args:
        rule: the rule of the method.
        block: the block.
        numbers: the numbers of the step.
        state: the optimizer's state.
        weight: of new gradients in averages.
    """

    def __init__(self, rule: Rule, block: Block, numbers: Numbers, state: State, weight: Tensor) -> None:
        self._rule, self._block, self._numbers, self._state, self._weight = rule, block, numbers, state, weight
        self._keys = ("average",) if rule.beta2 is None else ("average", "square")
        for owner in block.owners:
            start_averages(state[owner], owner, self._keys)
        self._squares = None if rule.beta2 is None else SquareWeights(rule, block.owners, state)
        self._held = [[entries(state[p][key], block.gathered) for p in block.owners] for key in self._keys]
        self.line: list[list[Tensor]] = [[], []]  # <d, D^-1 d> and <d, x> of an affine block, to be added up
        self._sums: list[list[Tensor]] = [[] for _ in range(5)]  # of `extras`
        self._views: list[dict[int, Tensor]] = [{}, {}, {}]  # slopes, directions and metrics of the tensors
        self._new: list[tuple[list[int], list[Tensor]]] = []  # members of each vector, and new averages
        self._affine, self._grads = block.kind == LINES, block.slopes
        for members in vectors_of(block.params, block.slopes):
            self._make(members)
        size = range(len(block.params))
        block.slopes, directions, metrics = ([views[i] for i in size if i in views] for views in self._views)
        if rule.beta2 is not None:
            block.directions, block.metrics = directions, metrics

    def _make(self, members: list[int]) -> None:
        """The averages of one vector, its views, and its sums."""
        columns = [self._block.params, self._grads, *self._held]
        x, g, d, *squares = map(widened, join_all([[ts[i] for i in members] for ts in columns]))
        g = g.to(d.dtype)
        d = torch.lerp(d, g, self._weight.to(d.dtype))
        self._spread(0, members, d)
        self._new.append((members, [d]))
        if self._squares is None:
            self._add_up(x, g, d)
            return
        weights = self._squares.spread([self._grads[i] for i in members], members, d.dtype)
        v = torch.lerp(squares[0], g * g, weights)
        D = metric_of(v, self._rule.eps)
        e = d / D
        self._spread(1, members, e)
        if not self._affine:
            self._spread(2, members, D)
        self._new[-1][1].append(v)
        self._add_up(x, g, d, e, g / D)

    def _spread(self, column: int, members: Sequence[int], vector: Tensor) -> None:
        """Keep the parts of a vector in the shapes of the tensors."""
        shapes = [self._grads[i].shape for i in members]
        parts = vector.split([math.prod(shape) for shape in shapes])
        for i, part, shape in zip(members, parts, shapes, strict=True):
            self._views[column][i] = part.view(shape)

    def _add_up(self, x: Tensor, g: Tensor, d: Tensor, *over: Tensor) -> None:
        """The sums of one vector; in a metric, D^-1 d and D^-1 g are `over` it."""
        line, moves = self._affine and not self._block.centered, self._rule.max_move is not None
        slopes = [g, d] if line else [g]
        lengths = [*slopes, *(over if moves else over[1:])]
        norms = torch.stack(torch._foreach_norm(lengths, 2, self._numbers.dtype))
        scales, squares = scale_of(norms), norms.square()
        # Divided by their norms, so that products stay in the range of f32.
        scaled = [t / scale for t, scale in zip(slopes, scales, strict=False)]
        dots = torch.stack([torch.dot(t, x) for t in scaled]) * scales[: len(scaled)]
        self._sums[0].append(dots[0])
        self._sums[1].append(squares[-1] if over else squares[0])
        if line:
            self.line[0].append(torch.dot(scaled[1], over[0]) * scales[1] if over else squares[1])
            self.line[1].append(dots[1])
        if moves and over:
            self._sums[3].append(squares[-2])
            self._sums[4].append(torch.dot(over[0], x))

    def extras(self) -> list[Array | float]:
        """<g, x>, ||D^-1 g||^2, <d, center>, and for lengths of moves in a metric ||D^-1 d||^2 and <D^-1 d, x>.

        The third completes <d, x>, because sums of blocks with a centre have <d, x - center>.
        """
        block = self._block
        if block.centered and block.quadratic:
            pairs = zip(block.slopes, block.centers, strict=True)
            self._sums[2] = [(d * c).sum() for d, c in pairs if c is not None]
        return [self._numbers.total(parts) if parts else 0.0 for parts in self._sums]

    def keep(self, ok: Tensor) -> None:
        """Write the new averages if the step is taken, and count one more gradient."""
        if self._squares is not None:
            self._squares.count(ok)
        for members, vectors in self._new:
            held = [[column[i] for i in members] for column in self._held]
            chosen = [torch.where(ok, new, old) for new, old in zip(vectors, join_all(held), strict=True)]
            if not self._block.gathered:
                spread_all(chosen, held)
                continue
            for key, vector, tensors in zip(self._keys, chosen, held, strict=True):
                parts = vector.split([t.numel() for t in tensors])
                for i, part, t in zip(members, parts, tensors, strict=True):
                    owner = self._block.owners[i]
                    replace(owner, self._state[owner], key, part.view(t.shape), True)


def vectors_of(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Iterator[list[int]]:
    """Places of tensors of one dtype that are joined."""
    found: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    room: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for i, (x, g) in enumerate(zip(params, grads, strict=True)):
        key = x.dtype, g.dtype
        if key in found and x.numel() > room[key]:
            yield found.pop(key)
        if key not in found:
            found[key], room[key] = [], LAUNCH
        found[key].append(i)
        room[key] -= x.numel()
    yield from found.values()
