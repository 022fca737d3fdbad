"""Blocks that need a search: their sums, heights of the model along the ray, and the write.

This module has blocks of which heights need all entries: any regulariser, by its prox, and regularisers that act on
each entry. For these, tensors are joined into a few long ones, and all points of a round take one pass over them, with
few launches and bounded memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.device.refine import POINTS
from proxsps.optim.lists import bundles, join, spread, widened
from proxsps.optim.proxes import entry_move, entry_prox, piles, resting, stepping
from proxsps.regularizers.structure import Prox, Scalar

ROOM = 32 << 20  # bytes that the search over entries may use, or twice those of the parameters, if that is more


class Searched(ABC):
    """Blocks of one kind whose prox is not affine, with their places in the step; as many ranks hold each of them.

    With the cap alpha = reach w of a block, where w is its `alpha`, y(u) = prox_{alpha phi}(x - u alpha D^-1 d).
    """

    share = 1.0  # weight of its sums on this rank when all ranks are added up
    points = POINTS  # of the first round of a search

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> None:
        """Caps are tensors if they are `scaled`: multiplied by a number that is known after the sums."""
        self.numbers, self.blocks, self.places = numbers, blocks, places

    @abstractmethod
    def sums(self) -> list[Sequence[Tensor]]:
        """||d||^2 (in a metric <d, D^-1 d>) and <d, x> of each block."""

    @abstractmethod
    def heights(self, u: Array, reach: Array | float) -> Array:
        """sum <d, y(u) - x> at the points u; `reach` is one number, or one for each of them."""

    @abstractmethod
    def write(self, u: Array, reach: Array | float, ok: Array) -> None:
        """x <- y(u) where `ok`."""


class Part(NamedTuple):
    """Tensors of a block as one, in at least f32."""

    block: int
    x: Tensor
    d: Tensor
    e: Tensor  # D^-1 d; d itself in the identity metric
    inverse: Tensor | None  # D^-1

    def shrunk(self, scale: Tensor) -> Part:
        """The same with slopes over a number; not in place: they may be views of the gradient."""
        d = self.d / scale
        return self._replace(d=d, e=d if self.e is self.d else self.e / scale)

    def sizes(self, cap: Any) -> Any:
        """The step size of the prox, in a metric one for each entry."""
        return cap if self.inverse is None else cap * self.inverse


def part_of(block: int, x: Tensor, d: Tensor, e: Tensor | None = None, metric: Tensor | None = None) -> Part:
    """A part, in the identity metric if there is no other one."""
    return Part(block, x, d, d if e is None else e, None if metric is None else metric.reciprocal())


class SearchedParts(Searched):
    """Blocks in parts, which are kept for all rounds if there is room for them.

    Slopes are divided by their common norm `_scale`, so that products stay in the range of f32.
    """

    _count: int  # of parts
    _keeps = True

    @abstractmethod
    def _load(self, k: int) -> Part:
        """The k-th part, with slopes as they are."""

    @abstractmethod
    def _prox(self, k: int, z: Tensor, cap: Any, part: Part) -> Tensor:
        """The prox of the k-th part; may use the memory of z."""

    @abstractmethod
    def _store(self, k: int, y: Tensor) -> None:
        """Write the k-th part into the parameters."""

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.to(self.numbers.dtype) * right).sum()

    def _parts(self) -> Iterator[Part]:
        """The parts with scaled slopes."""
        for k in range(self._count):
            yield self._kept[k] if self._keeps else self._load(k).shrunk(self._scale)

    def sums(self) -> list[Sequence[Tensor]]:
        """Norms in doubles, then products."""
        every = range(self._count)
        loaded = list(map(self._load, every)) if self._keeps else []
        slopes = (loaded[k].d if self._keeps else self._load(k).d for k in every)
        norms = [torch.linalg.vector_norm(d, dtype=self.numbers.dtype) for d in slopes]
        self._scale = scale_of(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
        self._kept = [part.shrunk(self._scale) for part in loaded]
        squares: list[list[Tensor]] = [[] for _ in self.blocks]
        dots: list[list[Tensor]] = [[] for _ in self.blocks]
        for norm, part in zip(norms, self._parts(), strict=True):
            in_metric = part.inverse is not None
            square = self._dot(part.d, part.e) * self._scale.square() if in_metric else norm.square()
            squares[part.block].append(square)
            dots[part.block].append(self._dot(part.d, part.x))
        total = self.numbers.total
        return [(total(square), total(dot) * self._scale) for square, dot in zip(squares, dots, strict=True)]

    def _at(self, k: int, part: Part, u: Array, reach: Array | float) -> Tensor:
        """y(u) of the k-th part."""
        cap = times(reach, self.blocks[part.block].alpha)
        return self._prox(k, torch.addcmul(part.x, part.e, u * (self._scale * -cap)), cap, part)

    def heights(self, u: Array, reach: Array | float) -> Array:
        """Every point takes one prox of all parts."""
        found = []
        for i in range(len(u)):
            own = reach[i] if per_point(reach) else reach
            at = ((part, self._at(k, part, u[i], own)) for k, part in enumerate(self._parts()))
            found.append(self.numbers.total([self._dot(part.d, y - part.x) for part, y in at]))
        return self._scale * self.numbers.vector(found)

    def write(self, u: Array, reach: Array | float, ok: Array) -> None:
        """x <- y(u) where `ok`."""
        for k, part in enumerate(self._parts()):
            cap = times(reach, self.blocks[part.block].alpha)
            self._store(k, written(part.x, self._at(k, part, u, reach), ok, cap))


class SearchedProxes(SearchedParts):
    """Any regulariser, by its prox: on whole tensors, and on tensors of one shape together if that is allowed."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> None:
        super().__init__(numbers, blocks, places, scaled)
        self._piles = [pile for i, block in enumerate(blocks) for pile in piles(block, i)]
        self._count = len(self._piles)

    def _load(self, k: int) -> Part:
        pile = self._piles[k]
        block = self.blocks[pile.block]
        columns = [block.params, block.slopes, *([block.along, block.metrics] if block.in_metric else [])]
        return part_of(pile.block, *(pile.gather([widened(ts[i]) for i in pile.members]) for ts in columns))

    def _prox(self, k: int, z: Tensor, cap: Any, part: Part) -> Tensor:
        y = self._piles[k].prox(z, part.sizes(stepping(cap)))
        return torch.where(cap == 0, z, y) if isinstance(cap, Tensor) else y

    def _store(self, k: int, y: Tensor) -> None:
        pile = self._piles[k]
        xs = [self.blocks[pile.block].params[i] for i in pile.members]
        torch._foreach_copy_(xs, pile.split(y, xs))


class SearchedEntries(SearchedParts):
    """Blocks whose regulariser acts on each entry, in the identity metric or in Adam's.

    Each round of the search needs one vector of entries for each of its points, so it works on pieces of the entries
    for which there is room. If there is room for them too, joined copies of x and d are kept for all rounds; in a
    metric also of D^-1 d and D^-1.
    """

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> None:
        super().__init__(numbers, blocks, places, scaled)
        params = [x for block in blocks for x in block.params]
        entries = sum(x.numel() for x in params)
        self._dtype = torch.float64 if any(x.dtype is torch.float64 for x in params) else torch.float32
        room = max(2 * sum(x.numel() * x.dtype.itemsize for x in params), ROOM) // self._dtype.itemsize
        in_metric = any(block.in_metric for block in blocks)
        twice = scaled or in_metric or any(isinstance(block.alpha, Tensor) for block in blocks)
        rows, kept = POINTS * (2 if twice else 1), 4 if in_metric else 2
        self._piece, loose = (room - kept * entries) // rows, room // (rows + kept)
        # Seven operations on a piece that has to be joined first, four on one that is kept.
        self._keeps = self._piece > 0 and math.ceil(entries / self._piece) <= 2 * math.ceil(entries / loose)
        self._lists: list[tuple[int, list[list[Tensor]]]] = []
        for i, block in enumerate(blocks):
            metric = (block.along, block.metrics) if block.in_metric else ()
            found = bundles((block.params, block.slopes, *metric), entries if self._keeps else loose)
            self._lists += [(i, lists) for lists in found]
        self._count = len(self._lists)
        self._psi = [resting(block.entries.psi, block.alpha) for block in blocks]

    def _load(self, k: int) -> Part:
        i, lists = self._lists[k]
        return part_of(i, *(widened(join(tensors)) for tensors in lists))

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.dot(left, right)  # in one launch

    def _pieces(self, points: int) -> Iterator[Part]:
        """Pieces for which there is room at this number of points; one point needs fewer and longer ones."""
        for block, *vectors, inverse in self._parts():
            size = max(1, self._piece * POINTS // points if self._keeps else vectors[0].numel())
            columns = [vector.split(size) for vector in vectors]
            inverses = [None] * len(columns[0]) if inverse is None else inverse.split(size)
            yield from (Part(block, *parts) for parts in zip(*columns, inverses, strict=True))

    def heights(self, u: Array, reach: Array | float) -> Array:
        """All points in one pass, if the prox takes one step size for each of them."""
        several = per_point(reach)
        if several and not all(isinstance(psi, Scalar) for psi in self._psi):
            return super().heights(u, reach)
        caps = [times(reach, block.alpha) for block in self.blocks]
        steps = [(u * (self._scale * -cap)).to(self._dtype)[:, None] for cap in caps]
        sizes = [cap.to(self._dtype)[:, None] for cap in caps] if several else caps
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for part in self._pieces(len(u)):
            i = part.block
            found[i].append(_products(part, steps[i].to(part.x.dtype), self._psi[i], sizes[i]))
        own = [self.numbers.total(parts) for parts in found if parts]
        return self._scale * sum(own[1:], start=own[0])

    def _prox(self, k: int, z: Tensor, cap: Any, part: Part) -> Tensor:
        return entry_prox(self._psi[part.block], z, part.sizes(cap))

    def _store(self, k: int, y: Tensor) -> None:
        _, (xs, *_) = self._lists[k]
        spread(y.to(xs[0].dtype), xs)


def _products(part: Part, steps: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """<d, y - x> for each of the steps, a column."""
    y = entry_prox(psi, torch.addcmul(part.x, part.e, steps), part.sizes(alpha))  # one row per step
    return entry_move(psi, part.x, y) @ part.d


def per_point(reach: Any) -> TypeGuard[Tensor]:
    """Whether each point of a round has its own number."""
    return isinstance(reach, Tensor) and reach.ndim > 0


def written(x: Tensor, y: Tensor, ok: Tensor, cap: Tensor | float) -> Tensor:
    """y where `ok` and the block moves; else x. A cap as a number is not 0."""
    return torch.where(ok & (cap > 0) if isinstance(cap, Tensor) else ok, y, x)
