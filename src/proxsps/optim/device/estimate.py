"""From loss value and gradients to the value m and the slopes d of the linear model of a step on a device.

Averages of gradients are made on tensors that are joined into long vectors, so that a step takes few launches. They are
made before the step and written only where it is taken, so that a skipped step leaves everything as it was; in place,
so that a captured step finds them again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
from proxsps.optim.last_step import Chosen
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

    Blocks get their slopes.
    """

    known: Sequence[Array] = ()  # <d, p> and <d, x>, if the model has them for affine blocks without a centre

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers) -> None:
        self._rule, self._blocks, self._numbers = rule, blocks, numbers
        if rule.coupled:
            self._penalties = numbers.vector([0.0 if value is None else value for value in map(couple, blocks)])

    def extras(self) -> list[Array]:
        """Further sums on this rank: rows with one number per block; a row of zeros may be the number 0."""
        return [self._penalties] if self._rule.coupled else []

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The model, from the loss and sums over all ranks."""
        m = coupled_value(f + extras[0].sum(), sums.x_sq, lam) if self._rule.coupled else f
        return Estimated(m, sums.d_sq, sums)

    def finish(self, step: Chosen, alpha: Tensor, ok: Tensor) -> dict[str, tuple[Array, Array]]:
        """Write new averages, if the step was taken; returns numbers in the groups, after and before it."""
        return {}


class Vector(NamedTuple):
    """Tensors of one dtype that are treated alike, as one vector."""

    members: list[tuple[int, int]]  # the block of each tensor, and its place there
    sizes: list[int]
    spans: dict[int, slice]  # the part of each block
    keys: tuple[str, ...]  # of averages in the state
    columns: dict[str, list[Tensor]]  # these, gradients and points

    def joined(self, *names: str) -> list[Tensor]:
        """Columns as vectors, in at least f32."""
        return list(map(widened, join_all([self.columns[name] for name in names])))

    def products(self, slope: Tensor, scale: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Products of a slope with vectors, block by block; divided by its norm, it stays in the range of f32."""
        scaled = slope / scale
        dots = [torch.dot(scaled[span], t[span]) for t in others for span in self.spans.values()]
        found = torch.stack(dots) if len(dots) > 1 else dots[0][None]
        return (found * scale[None]).view(len(others), -1)


class Joined(Estimate):
    """A model that is made of averages, on joined tensors.

    Args: those of `Estimate`, and
        state: the optimizer's state.
        before: numbers in the groups that the model changes, before the step.
        keys: of the averages of each block in the state.
        apart: one number per block; only blocks with the same number share vectors.
    """

    def __init__(
        self,
        rule: Rule,
        blocks: Sequence[Block],
        numbers: Numbers,
        state: State,
        before: dict[str, Tensor],
        keys: Sequence[tuple[str, ...]],
        apart: Sequence[int],
    ) -> None:
        super().__init__(rule, blocks, numbers)
        self._state, self._before, self._keys = state, before, keys
        self._after: dict[str, Array] = {}
        self._vectors = list(map(self._vector, self._together(apart)))
        self._rows: list[tuple[Iterable[int], dict[str, Tensor]]] = []  # places of blocks, and sums over them
        self._counts: list[tuple[list[Tensor], Tensor]] = []  # of squares so far, in the state and as one tensor
        # By places of vectors: averages after the step, and what blocks get, by the names of their attributes.
        self._new: dict[int, dict[str, Tensor]] = {}
        self._made: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def _columns(self, j: int, i: int) -> dict[str, Tensor]:
        """The gradient of a tensor of a block, its point, and its averages, which are created if they are missing."""
        block = self._blocks[j]
        own = self._state[block.owner(i)]
        start_averages(own, block.owner(i), self._keys[j])
        held = {key: entries(own[key], block.gathered) for key in self._keys[j]}
        return {"g": block.slopes[i], "x": block.params[i], **held}

    def _together(self, apart: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        """Places of tensors that are joined."""
        found: dict[object, list[tuple[int, int]]] = {}
        room: dict[object, int] = {}
        for j, block in enumerate(self._blocks):
            for i, (x, g) in enumerate(zip(block.params, block.slopes, strict=True)):
                key = x.dtype, g.dtype, apart[j]
                if key in found and x.numel() > room[key]:
                    yield found.pop(key)
                if key not in found:
                    found[key], room[key] = [], LAUNCH
                found[key].append((j, i))
                room[key] -= x.numel()
        yield from found.values()

    def _vector(self, members: list[tuple[int, int]]) -> Vector:
        sizes = [self._blocks[j].params[i].numel() for j, i in members]
        spans: dict[int, slice] = {}
        last = 0
        for (j, _), size in zip(members, sizes, strict=True):
            spans[j] = slice(spans[j].start if j in spans else last, last + size)
            last += size
        rows, keys = [self._columns(*place) for place in members], self._keys[members[0][0]]
        return Vector(members, sizes, spans, keys, {name: [row[name] for row in rows] for name in rows[0]})

    def _shaped(self, j: int, vectors: Mapping[int, Tensor]) -> list[Tensor]:
        """The parts of the tensors of a block, in their shapes and in their order, from its vectors."""
        found = {}
        for k, vector in vectors.items():
            own = self._vectors[k]
            for (place, i), g, part in zip(own.members, own.columns["g"], vector.split(own.sizes), strict=True):
                if place == j:
                    found[i] = part.view(g.shape)
        return [found[i] for i in sorted(found)]

    def _hand_out(self) -> None:
        """Let blocks have their parts of what was made; affine blocks as vectors, if parameters are parts, too."""
        for j, block in enumerate(self._blocks):
            flat = "params" in self._made and block.kind == LINES
            for name, vectors in self._made.items():
                own = {k: vector for k, vector in vectors.items() if j in self._vectors[k].spans}
                parts = [vector[self._vectors[k].spans[j]] for k, vector in own.items()]
                setattr(block, name, parts if flat else self._shaped(j, own))
        self.known = self._row("d_sq"), self._row("d_dot_x")

    def _squares(self, own: Vector, g: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """The new average of squares, and the metric D."""
        # A tensor that gets its first gradient late has its own count.
        steps = [self._state[self._blocks[j].owner(i)]["steps"] for j, i in own.members]
        counts = torch.stack(steps)
        self._counts.append((steps, counts))
        weights = corrected_weight(counts.to(old.dtype), self._rule.beta2).unbind()
        new = torch.cat([weight.expand(size) for weight, size in zip(weights, own.sizes, strict=True)])
        v, eps, least = torch.lerp(old, g * g, new), self._rule.eps, least_metric(old.dtype)
        D: Tensor = metric(v, eps)
        D = D.clamp_min(least) if eps < least else D
        # Where the square of a gradient overflows, NaN reaches the sums that are checked; infinity would not.
        return v, torch.nan_to_num(D, nan=math.nan, posinf=math.nan)

    def _sum(
        self, own: Vector, squares: Mapping[str, Tensor], products: Sequence[tuple[Tensor, Mapping[str, Tensor]]]
    ) -> dict[str, Tensor]:
        """Squares of norms, and products of slopes with vectors, block by block."""
        spans = list(own.spans.values())
        vectors = {id(t): t for t in (*(slope for slope, _ in products), *squares.values())}
        norms = torch.stack(
            torch._foreach_norm([t[span] for t in vectors.values() for span in spans], 2, self._numbers.dtype)
        ).view(len(vectors), -1)
        scales = scale_of(norms[:, 0] if len(spans) == 1 else torch.linalg.vector_norm(norms, dim=1))
        scale_by, square_by = (dict(zip(vectors, numbers, strict=True)) for numbers in (scales, norms.square()))
        rows = {name: square_by[id(t)] for name, t in squares.items()}
        for slope, others in products:
            found = own.products(slope, scale_by[id(slope)], list(others.values()))
            rows |= zip(others, found, strict=True)
        self._rows.append((own.spans, rows))
        return rows

    def _row(self, name: str) -> Array:
        """A sum over each block."""
        parts = [(places, rows[name]) for places, rows in self._rows if name in rows]
        if len(parts) == 1 and len(parts[0][1]) == len(self._blocks):
            return parts[0][1]  # without a launch
        found: list[list[Tensor]] = [[] for _ in self._blocks]
        for places, numbers in parts:
            for j, number in zip(places, numbers, strict=True):
                found[j].append(number)
        return self._numbers.vector([self._numbers.total(own) if own else 0.0 for own in found])

    def extras(self) -> list[Array]:
        """<g, x>, ||D^-1 g||^2, <d, center>, and for lengths of moves in a metric ||p||^2 and <p, x>.

        The third completes <d, x>, because sums of blocks with a centre have <d, x - center>.
        """
        names = ("p_sq", "p_dot_x")[: further_rows(self._rule) - 3]
        moves = [0.0 if self._rule.beta2 is None else self._row(name) for name in names]
        return [self._row("g_dot_x"), self._row("g_sq"), 0.0, *moves]

    def _moves(self, extras: Sequence[Array], sums: Sums) -> Sums:
        """In a metric, a move is along D^-1 d."""
        in_metric = self._rule.beta2 is not None and self._rule.max_move is not None
        return Sums(extras[3], extras[4], sums.x_sq) if in_metric else sums

    def _write(self, own: Vector, new: Mapping[str, Tensor]) -> None:
        """Write vectors into columns of tensors; those of whole tensors are cut into shards again."""
        spread_all(list(new.values()), [own.columns[key] for key in new])
        for place, (j, i) in enumerate(own.members):
            block = self._blocks[j]
            state = self._state[block.owner(i)]
            for key in new if block.gathered else ():
                if key in state:
                    replace(block.owner(i), state, key, own.columns[key][place], True)

    def finish(self, step: Chosen, alpha: Tensor, ok: Tensor) -> dict[str, tuple[Array, Array]]:
        """Count one more square of all tensors."""
        for steps, counts in self._counts:  # to add one tensor to all counts, torch would read it
            torch._foreach_copy_(steps, (counts + ok).unbind())
        return {key: (after, self._before[key]) for key, after in self._after.items()}


class Averaged(Joined):
    """The average of all linear models so far, with the gradient's second moments as a metric if the rule has one.

    State of a parameter: `average` is d, and in the metric `square` is v and `steps` the number of gradients so far.
    The numbers fbar, gamma and k are in the groups.

    Args: those of `Estimate`, and the optimizer's state.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, state: State) -> None:
        before = {key: numbers.scalar(blocks[0].group[key]) for key in KEYS}
        # Adam's averages start from zeros, with a correction; without a metric, they start from the first value.
        form = momentum_weights if rule.beta2 is None else corrected_weights
        self._weights = form(before["k"], rule.beta)
        keys = ("average",) if rule.beta2 is None else ("average", "square")
        super().__init__(rule, blocks, numbers, state, before, [keys] * len(blocks), range(len(blocks)))
        for k, own in enumerate(self._vectors):
            self._average(k, own, *(blocks[j] for j in own.spans))
        self._hand_out()

    def _average(self, k: int, own: Vector, block: Block) -> None:
        """Make new averages of a vector of a block, and sums."""
        lines = block.kind == LINES and not block.centered
        x, g, old, *square = own.joined("x", "g", *own.keys)
        g = g.to(old.dtype)
        d = self._made["slopes"][k] = torch.lerp(old, g, self._weights.new.to(old.dtype))
        self._new[k] = {"average": d}
        squares, along_d = {"g_sq": g}, {"d_dot_x": x}
        products = [(g, {"g_dot_x": x}), *([(d, along_d)] if lines else [])]
        if square:
            self._new[k]["square"], D = self._squares(own, g, square[0])
            p = self._made["directions"][k] = along_d["d_sq"] = d / D
            squares["g_sq"] = g / D
            if not lines:
                self._made["metrics"][k] = D
            if self._rule.max_move is not None:
                squares["p_sq"] = p
                products.append((p, {"p_dot_x": x}))
        elif lines:
            squares["d_sq"] = d
        self._sum(own, squares, products)

    def extras(self) -> list[Array]:
        """Those of all averages, with centres, and with <d, x> of tensors that rest in both products."""
        rows, vector = super().extras(), self._numbers.vector
        if any(block.centered for block in self._blocks):
            rows[2] = vector(list(map(self._at_center, self._blocks)))
        if any(block.resting for block in self._blocks):
            at_rest = vector(list(map(self._at_rest, self._blocks)))
            rows[0], rows[2] = rows[0] + at_rest, rows[2] + at_rest
        return rows

    def _at_rest(self, block: Block) -> Tensor | float:
        """<d, x> over the tensors of a block that rest; 0 if there are none."""
        owners = [block.group["params"][i] for i in block.resting]
        owners = [owner for owner in owners if "average" in self._state.get(owner, {})]
        averages = [entries(self._state[owner]["average"], block.gathered) for owner in owners]
        points = [widened(entries(x.detach().resolve_conj(), block.gathered)) for x in owners]
        found = bundles((averages, points), LAUNCH)
        return self._numbers.total([torch.dot(join(ds), join(xs)) for ds, xs in found])

    def _at_center(self, block: Block) -> Tensor | float:
        """<d, center>."""
        pairs = zip(block.slopes, block.centers, strict=True) if block.quadratic else ()
        return self._numbers.total([(d * c).sum() for d, c in pairs if c is not None])

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The average of the linear models at the current point."""
        d_dot_x = over_blocks(sums.d_dot_x)
        if not isinstance(extras[2], float):
            d_dot_x = d_dot_x + over_blocks(extras[2])
        before = Averages(*self._before.values())
        after = update_averages(before, f, over_blocks(extras[0]), self._weights)
        self._after = dict(zip(KEYS, after, strict=True))
        return Estimated(averaged_value(f, after, d_dot_x), extras[1], self._moves(extras, sums))

    def finish(self, step: Chosen, alpha: Tensor, ok: Tensor) -> dict[str, tuple[Array, Array]]:
        """Write the new averages, and count one more gradient for each parameter."""
        for own, new in zip(self._vectors, self._new.values(), strict=True):
            old = dict(zip(new, own.joined(*new), strict=True))
            self._write(own, {key: torch.where(ok, new[key], old[key]) for key in new})
        return super().finish(step, alpha, ok)
