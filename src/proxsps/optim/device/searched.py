"""Blocks that need a search: their sums, heights of the model along the ray, and the write.

With the cap alpha = reach w of a block, where w is its `alpha`, y(u) = prox_{alpha phi}(x - u alpha D^-1 d). Both
classes have the same methods and `points`, the number of points of the first round:

    sums            ||d||^2 (in a metric <d, D^-1 d>) and <d, x> of each block
    heights         sum <d, y(u) - x> at the points u; `reach` is one number, or one for each of them
    write           x <- y(u) where `ok`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.core.model import RowSums
from proxsps.optim.blocks import ENTRIES, Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.device.refine import POINTS
from proxsps.optim.lists import bundles, spread_all
from proxsps.optim.vectors.lots import Bundle, Lot, piles, resting
from proxsps.optim.vectors.rows import RowHeights, row_stacks

ROOM = 32 << 20  # bytes that the search over entries may use, or twice those of the parameters, if that is more
LADDER = 256  # points of the first round if there are only rows: their three sums are few numbers
NUMBERS = 1 << 20  # limit on points times rows of a round


class SearchedRows:
    """Blocks whose regulariser depends on rows only through their norms."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block]) -> None:
        self.numbers, self.blocks = numbers, blocks

    def sums(self) -> Sequence[Sequence[Tensor]]:
        """Three sums per row, kept for the search, and added up over each block."""
        blocks, wide = enumerate(self.blocks), self.numbers.dtype
        self._stacks = [s for i, b in blocks for s in row_stacks(b, i, (b.params, b.slopes), math.inf)]
        norms, dots = [], []
        for stack in self._stacks:
            x, d = both = stack.pair()
            norms.append(torch.linalg.vector_norm(both, dim=2, dtype=wide))
            dots.append((x.to(wide) * d).sum(1))
        x_sq, d_sq = torch.cat(norms, dim=1).square()
        self._rows = RowHeights(RowSums(x_sq, torch.cat(dots), d_sq), self._stacks, len(self.blocks))
        self.points = max(POINTS, min(LADDER, NUMBERS // len(d_sq)))
        return self._rows.by_block()

    def heights(self, u: Array, reach: Array | float) -> Array:
        """From the sums of the rows."""
        return self._rows.heights([block.alpha for block in self.blocks], u, reach)

    def write(self, u: Array, reach: Array | float, ok: Array) -> None:
        """`RowStack.prox` for all rows at once."""
        alphas = [block.alpha for block in self.blocks]
        caps = [times(reach, alpha) for alpha in alphas]
        steps = [u * -cap for cap in caps]
        xs, zs = [], []
        for stack in self._stacks:
            x, d = stack.pair()
            xs.append(x)
            zs.append(torch.addcmul(x, d, steps[stack.block]))
        norms = torch.cat([torch.linalg.vector_norm(z, dim=1, dtype=self.numbers.dtype) for z in zs])
        norms = norms.clamp(torch.finfo(self.numbers.dtype).tiny)
        factors = (self._rows.psi.prox(norms, self._rows.alpha(alphas, reach)) / norms).split(self._rows.counts)
        vectors = []
        for stack, x, z, factor in zip(self._stacks, xs, zs, factors, strict=True):
            y = z * factor.to(z.dtype)[:, None]
            vectors.append(stack.vector(written(x, y, ok, caps[stack.block])))
        spread_all(vectors, [stack.columns[0] for stack in self._stacks])


class Part(NamedTuple):
    """A lot as tensors, in at least f32."""

    lot: Lot
    x: Tensor
    d: Tensor
    e: Tensor  # D^-1 d; d itself in the identity metric
    inverse: Tensor | None  # D^-1

    def shrunk(self, scale: Tensor) -> Part:
        """The same with slopes over a number; not in place: they may be views of the gradient."""
        d = self.d / scale
        return self._replace(d=d, e=d if self.e is self.d else self.e / scale)

    def move(self, step: Array, cap: Any) -> Tensor:
        """y - x with a step along D^-1 d, and a prox of size `cap`."""
        y = self.at(step, cap)
        return y.sub_(self.x) if self.lot.fresh else y - self.x

    def at(self, step: Array, cap: Any) -> Tensor:
        """y."""
        z = torch.addcmul(self.x, self.e, step)
        return self.lot.prox(z, cap if self.inverse is None else cap * self.inverse)


class SearchedLots:
    """Blocks whose regulariser acts on each entry, or is known by its prox only; in Adam's metric or in the identity.

    Each round of the search over entries needs one vector for each of its points, so it works on pieces of the entries
    for which there is room. If there is room for them too, joined copies of x and d are kept for all rounds; in a
    metric also of D^-1 d and D^-1. Slopes are divided by their common norm `_scale`, so that products stay in the range
    of f32.
    """

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], kind: str, scaled: bool) -> None:
        """Caps are tensors if they are `scaled`: multiplied by a number that is known after the sums."""
        self.numbers, self.blocks, self.points = numbers, blocks, POINTS
        self._joined, self._keeps = kind == ENTRIES, True
        self._lots: list[Lot] = []
        if self._joined:
            in_metric = any(block.in_metric for block in blocks)
            twice = scaled or in_metric or any(isinstance(block.alpha, Tensor) for block in blocks)
            limit = self._plan_room(POINTS * (2 if twice else 1), 4 if in_metric else 2)
        for i, block in enumerate(blocks):
            columns = [block.params, block.slopes, *([block.along, block.metrics] if block.in_metric else [])]
            if self._joined:
                psi = resting(block.entries.psi, block.alpha)
                self._lots += [Bundle(i, lists, psi) for lists in bundles(columns, limit)]
            else:
                self._lots += piles(block, i, columns, ())

    def _plan_room(self, rows: int, kept: int) -> int:
        """Choose pieces, from how many vectors a round and copies take; returns the entries of a lot."""
        params = [x for block in self.blocks for x in block.params]
        entries = sum(x.numel() for x in params)
        self._dtype = torch.float64 if any(x.dtype is torch.float64 for x in params) else torch.float32
        room = max(2 * sum(x.numel() * x.dtype.itemsize for x in params), ROOM) // self._dtype.itemsize
        self._piece, loose = (room - kept * entries) // rows, room // (rows + kept)
        # Seven operations on a piece that has to be joined first, four on one that is kept.
        self._keeps = self._piece > 0 and math.ceil(entries / self._piece) <= 2 * math.ceil(entries / loose)
        return entries if self._keeps else loose

    def _load(self, lot: Lot) -> Part:
        x, d, *metric = (lot.gather(tensors) for tensors in lot.columns)
        return Part(lot, x, d, *([metric[0], metric[1].reciprocal()] if metric else [d, None]))

    def _parts(self) -> Iterator[Part]:
        """The parts with scaled slopes."""
        yield from self._kept if self._keeps else (self._load(lot).shrunk(self._scale) for lot in self._lots)

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Of entries in one launch."""
        return torch.dot(left, right) if self._joined else (left.to(self.numbers.dtype) * right).sum()

    def sums(self) -> Sequence[Sequence[Tensor]]:
        """Norms in doubles, then products."""
        loaded = list(map(self._load, self._lots)) if self._keeps else []
        slopes = (part.d for part in loaded) if self._keeps else (self._load(lot).d for lot in self._lots)
        norms = [torch.linalg.vector_norm(d, dtype=self.numbers.dtype) for d in slopes]
        self._scale = scale_of(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
        self._kept = [part.shrunk(self._scale) for part in loaded]
        squares: list[list[Tensor]] = [[] for _ in self.blocks]
        dots: list[list[Tensor]] = [[] for _ in self.blocks]
        for norm, part in zip(norms, self._parts(), strict=True):
            in_metric = part.inverse is not None
            square = self._dot(part.d, part.e) * self._scale.square() if in_metric else norm.square()
            squares[part.lot.block].append(square)
            dots[part.lot.block].append(self._dot(part.d, part.x))
        total = self.numbers.total
        return [(total(square), total(dot) * self._scale) for square, dot in zip(squares, dots, strict=True)]

    def _caps(self, reach: Array | float) -> list[tuple[Any, Any]]:
        """Steps along the slopes at u = 1 and caps of the blocks."""
        caps = [times(reach, block.alpha) for block in self.blocks]
        return [(self._scale * -cap, cap) for cap in caps]

    def heights(self, u: Array, reach: Array | float) -> Array:
        """All points in one pass over entries, if the prox takes one step size for each of them."""
        several = isinstance(reach, Tensor) and reach.ndim > 0
        if self._joined and (not several or all([lot.fresh for lot in self._lots])):
            return self._scale * self._together(u, self._caps(reach), several)
        reaches: Any = reach if several else [reach] * len(u)
        return self._scale * self.numbers.vector([self._one(u[i], self._caps(reaches[i])) for i in range(len(u))])

    def _one(self, u: Array, caps: Sequence[tuple[Any, Any]]) -> Tensor:
        """The height at one point, from a prox of all parts."""
        blocks = ((part, *caps[part.lot.block]) for part in self._parts())
        return self.numbers.total([self._dot(part.d, part.move(u * step, cap)) for part, step, cap in blocks])

    def _together(self, u: Array, caps: Sequence[tuple[Any, Any]], several: bool) -> Array:
        """The heights at all points, one row of entries for each of them."""
        columns = [(u * step).to(self._dtype)[:, None] for step, _ in caps]
        sizes = [cap.to(self._dtype)[:, None] if several else cap for _, cap in caps]
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for part in self._pieces(len(u)):
            i = part.lot.block
            found[i].append(part.move(columns[i].to(part.x.dtype), sizes[i]) @ part.d)
        own = [self.numbers.total(parts) for parts in found if parts]
        return sum(own[1:], start=own[0])

    def _pieces(self, points: int) -> Iterator[Part]:
        """Pieces for which there is room at this number of points; one point needs fewer and longer ones."""
        for lot, *vectors, inverse in self._parts():
            size = max(1, self._piece * POINTS // points if self._keeps else vectors[0].numel())
            columns = [vector.split(size) for vector in vectors]
            inverses = [None] * len(columns[0]) if inverse is None else inverse.split(size)
            yield from (Part(lot, *parts) for parts in zip(*columns, inverses, strict=True))

    def write(self, u: Array, reach: Array | float, ok: Array) -> None:
        """x <- y(u) where `ok`."""
        caps = self._caps(reach)
        for part in self._parts():
            step, cap = caps[part.lot.block]
            part.lot.scatter(written(part.x, part.at(u * step, cap), ok, cap), part.lot.columns[0])


def written(x: Tensor, y: Tensor, ok: Tensor, cap: Tensor | float) -> Tensor:
    """y where `ok` and the block moves; else x. A cap as a number is not 0."""
    return torch.where(ok & (cap > 0) if isinstance(cap, Tensor) else ok, y, x)


Searched = SearchedRows | SearchedLots
