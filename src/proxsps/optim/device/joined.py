"""Tensors of blocks joined into long vectors, so that averages and sums of a step on a device take few launches.

Averages are made before the step and written only where it is taken, so that a skipped step leaves everything as it
was; in place, so that a captured step finds them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import corrected_weight
from proxsps.optim.blocks import LINES, Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.last_step import Chosen
from proxsps.optim.lists import LAUNCH, join_all, spread_all, widened
from proxsps.optim.memory import State, entries, replace, start_state
from proxsps.optim.reduce import Sums
from proxsps.optim.rule import Rule
from proxsps.optim.vectors.averages import new_metric

Columns = dict[str, Tensor]
NOTHING: dict[int, Tensor] = {}


class Estimated(NamedTuple):
    """What a step needs of a model besides its slopes."""

    m: Array  # its value at x
    g_sq: Array  # ||D_j^-1 g_j||^2 of the gradient g of this step, one number per block


class Vector(NamedTuple):
    """Tensors of one dtype that are treated alike, as one vector."""

    members: list[tuple[int, int]]  # the block of each tensor, and its place there
    sizes: list[int]
    spans: dict[int, slice]  # the part of each block
    keys: tuple[str, ...]  # of averages in the state
    columns: dict[str, list[Tensor]]  # these, gradients "g", points "x", and centres "c" if there are any

    def joined(self, *names: str) -> list[Tensor]:
        """Columns as vectors, in at least f32."""
        return list(map(widened, join_all([self.columns[name] for name in names])))

    def from_center(self, x: Tensor) -> Tensor:
        """x - center."""
        return x - self.joined("c")[0] if "c" in self.columns else x


class Estimate:
    """A linear model, made from tensors of blocks that are joined into vectors.

    Args:
        rule: the rule of the method.
        blocks: the blocks, which get their slopes.
        numbers: the numbers of the step.
        state: the optimizer's state.
        before: numbers in the groups that the model changes, before the step.
        apart: of each block; only blocks for which these are equal share vectors. Without it there are none.
    """

    def __init__(
        self,
        rule: Rule,
        blocks: Sequence[Block],
        numbers: Numbers,
        state: State,
        before: dict[str, Tensor],
        apart: Sequence[object] | None,
    ) -> None:
        self.rule, self.blocks, self.numbers = rule, blocks, numbers
        self._state, self._before = state, before
        self._keys = [rule.averages(block.spectral) for block in blocks]  # of averages in the state
        self.kinds = [block.kind for block in blocks]
        self._centers: list[Sequence[Any]] = [
            block.centers if block.centered and block.quadratic else () for block in blocks
        ]
        self._vectors = [] if apart is None else list(map(self._vector, self._together(apart)))
        self._rows: list[tuple[Iterable[int], dict[str, Tensor]]] = []  # places of blocks, and sums over them
        self._counts: list[tuple[list[Tensor], Tensor]] = []  # of squares so far, in the state and as one tensor
        self._new: list[Columns] = [{} for _ in self._vectors]  # averages after the step
        self._after: dict[str, Array] = {}  # numbers in the groups after the step

    # Vectors

    def _columns(self, j: int, i: int) -> Columns:
        """The gradient of a tensor of a block, its point, and its averages, which are created if they are missing."""
        block = self.blocks[j]
        start_state(self._state, block.owner(i), self.rule, block.spectral)
        own, center = self._state[block.owner(i)], self._centers[j]
        held = {key: entries(own[key], block.gathered) for key in self._keys[j]}
        return {"g": block.slopes[i], "x": block.params[i], **({"c": center[i]} if center else {}), **held}

    def _together(self, apart: Sequence[object]) -> Iterator[list[tuple[int, int, Columns]]]:
        """Places and columns of tensors that are joined."""
        found: dict[object, list[tuple[int, int, Columns]]] = {}
        room: dict[object, int] = {}
        for j, block in enumerate(self.blocks):
            for i, (x, g) in enumerate(zip(block.params, block.slopes, strict=True)):
                key = x.dtype, g.dtype, apart[j]
                if key in found and x.numel() > room[key]:
                    yield found.pop(key)
                if key not in found:
                    found[key], room[key] = [], LAUNCH
                found[key].append((j, i, self._columns(j, i)))
                room[key] -= x.numel()
        yield from found.values()

    def _vector(self, tensors: list[tuple[int, int, Columns]]) -> Vector:
        sizes = [own["x"].numel() for *_, own in tensors]
        spans: dict[int, slice] = {}
        last = 0
        for (j, *_), size in zip(tensors, sizes, strict=True):
            spans[j] = slice(spans[j].start if j in spans else last, last + size)
            last += size
        columns = {name: [own[name] for *_, own in tensors] for name in tensors[0][2]}
        return Vector([(j, i) for j, i, _ in tensors], sizes, spans, self._keys[tensors[0][0]], columns)

    def _shaped(self, j: int, vectors: Mapping[int, Tensor]) -> list[Tensor]:
        """The parts of the tensors of a block, in their shapes and in their order, from its vectors."""
        found = {}
        for k, vector in vectors.items():
            own = self._vectors[k]
            for (place, i), g, part in zip(own.members, own.columns["g"], vector.split(own.sizes), strict=True):
                if place == j:
                    found[i] = part.view(g.shape)
        return [found[i] for i in sorted(found)]

    def _hand_out(self, made: Mapping[str, Mapping[int, Tensor]], flat: bool = False) -> None:
        """Let blocks have their parts of vectors as attributes of these names; if `flat`, affine blocks as vectors."""
        for j, block in enumerate(self.blocks):
            for name, vectors in made.items():
                own = {k: vector for k, vector in vectors.items() if j in self._vectors[k].spans}
                parts = [vector[self._vectors[k].spans[j]] for k, vector in own.items()]
                setattr(block, name, parts if flat and self.kinds[j] == LINES else self._shaped(j, own))

    def _squares(self, own: Vector, g: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """The new average of squares, and the metric D."""
        # A tensor that gets its first gradient late has its own count.
        steps = [self._state[self.blocks[j].owner(i)]["steps"] for j, i in own.members]
        counts = torch.stack(steps)
        self._counts.append((steps, counts))
        weights = corrected_weight(counts.to(old.dtype), self.rule.beta2).unbind()
        new = torch.cat([weight.expand(size) for weight, size in zip(weights, own.sizes, strict=True)])
        v, D = new_metric(old, g, new, self.rule.eps, old.dtype)
        # Where the square of a gradient overflows, NaN reaches the sums that are checked; infinity would not.
        return v, torch.nan_to_num(D, nan=math.nan, posinf=math.nan)

    # Sums

    def _sum(
        self, blocks: Mapping[int, slice], squares: Columns, products: Sequence[tuple[Tensor, Columns]]
    ) -> Columns:
        """Squares of norms, and products of slopes with vectors, block by block; `blocks` are the parts of vectors."""
        spans = list(blocks.values())
        vectors = {id(t): t for t in (*(slope for slope, _ in products), *squares.values())}
        norms = torch.stack(
            torch._foreach_norm([t[span] for t in vectors.values() for span in spans], 2, self.numbers.dtype)
        ).view(len(vectors), -1)
        scales = scale_of(norms[:, 0] if len(spans) == 1 else torch.linalg.vector_norm(norms, dim=1))
        scale_by, square_by = (dict(zip(vectors, numbers, strict=True)) for numbers in (scales, norms.square()))
        rows = {name: square_by[id(t)] for name, t in squares.items()}
        for slope, others in products:
            found = _products(slope, scale_by[id(slope)], list(others.values()), spans)
            rows |= zip(others, found, strict=True)
        self._rows.append((blocks, rows))
        return rows

    def row(self, name: str, others: Mapping[int, Tensor | float] = NOTHING) -> Array:
        """A sum over each block; `others` are those of blocks that are summed elsewhere."""
        parts = [(places, rows[name]) for places, rows in self._rows if name in rows]
        if not others and len(parts) == 1 and len(parts[0][1]) == len(self.blocks):
            return parts[0][1]  # without a launch
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for places, numbers in parts:
            for j, number in zip(places, numbers, strict=True):
                found[j] += [] if j in others else [number]
        totals = {j: self.numbers.total(own) for j, own in enumerate(found) if own}
        known: dict[int, Tensor | float] = {**totals, **others}
        return self.numbers.vector([known.get(j, 0.0) for j in range(len(self.blocks))])

    def extras(self) -> list[Array]:
        """<g, x>, ||D^-1 g||^2, and <d, center>.

        The last one completes <d, x>, because sums of blocks with a centre have <d, x - center>.
        """
        return [self.row("g_dot_x"), self.row("g_sq"), self.row("d_dot_c") if any(self._centers) else 0.0]

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The model, from the loss and sums over all ranks."""
        raise NotImplementedError

    # After the step

    def _write(self, own: Vector, new: Columns) -> None:
        """Write vectors into columns of tensors; those of whole tensors are cut into shards again."""
        spread_all(list(new.values()), [own.columns[key] for key in new])
        for place, (j, i) in enumerate(own.members):
            block = self.blocks[j]
            state = self._state[block.owner(i)]
            for key in new if block.gathered else ():
                if key in state:
                    replace(block.owner(i), state, key, own.columns[key][place], True)

    def finish(self, step: Chosen, alpha: Tensor, ok: Tensor) -> dict[str, tuple[Array, Array]]:
        """Write new averages, if the step was taken; returns numbers in the groups, after and before it."""
        for steps, counts in self._counts:  # to add one tensor to all counts, torch would read it
            torch._foreach_copy_(steps, (counts + ok).unbind())
        return {key: (after, self._before[key]) for key, after in self._after.items()}


def _products(slope: Tensor, scale: Tensor, others: Sequence[Tensor], spans: Sequence[slice]) -> Tensor:
    """Products of parts of a slope with vectors; divided by its norm, it stays in the range of f32."""
    scaled = slope / scale
    dots = [torch.dot(scaled[span], t[span]) for t in others for span in spans]
    found = torch.stack(dots) if len(dots) > 1 else dots[0][None]
    return (found * scale[None]).view(len(others), -1)
