"""Blocks of one kind that need a search: their sums, heights of the model along the ray, and the write."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.device.refine import POINTS
from proxsps.optim.lists import widened
from proxsps.optim.vectors.proxes import piles
from proxsps.regularizers.structure import Scalar


class Searched(ABC):
    """Blocks of one kind whose prox is not affine, with their places in the step; as many ranks hold each of them."""

    share = 1.0  # weight of its sums on this rank when all ranks are added up
    points = POINTS  # of the first round of a search
    reach: Array | float = 1.0  # the caps of the blocks are their `alpha` times this number

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int]) -> None:
        self.numbers, self.blocks, self.places = numbers, blocks, places

    @abstractmethod
    def sums(self) -> list[Sequence[Tensor]]:
        """||d||^2 (in a metric <d, D^-1 d>) and <d, x> of each block."""

    @abstractmethod
    def heights(self, u: Array) -> Array:
        """sum <d, y(u) - x> at the points u."""

    def ray_heights(self, s: Array) -> Array:
        """sum <d, x+(s) - x> on the ray of the matched cap, where step and prox have the size s times `alpha`.

        Points on it are the points at u = 1 with other caps. Every point takes one pass, unless a subclass is faster.
        """
        before, one, found = self.reach, self.numbers.vector([1.0]), []
        for i in range(len(s)):
            self.reach = s[i]
            found.append(self.heights(one)[0])
        self.reach = before
        return self.numbers.vector(found)

    @abstractmethod
    def move_sq(self, u: Array) -> Array:
        """||y(u) - x||^2 at one u."""

    @abstractmethod
    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- x + s (y(u) - x) where `ok`; exactly y(u) if s is exactly 1."""

    def cap(self, i: int) -> Any:
        """The cap of a block."""
        return self.scaled(self.blocks[i].alpha)

    def scaled(self, alpha: Any) -> Any:
        """Caps times `reach`; as they are if `reach` is exactly 1."""
        return alpha if isinstance(self.reach, float) and self.reach == 1 else alpha * self.reach


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


def part_of(block: int, x: Tensor, d: Tensor, e: Tensor | None = None, metric: Tensor | None = None) -> Part:
    """A part, in the identity metric if there is no other one."""
    return Part(block, x, d, d if e is None else e, None if metric is None else metric.reciprocal())


class SearchedParts(Searched):
    """Tensors of which h needs all entries, in parts.

    Slopes are divided by their common norm `_scale`, so that products stay in the range of f32.
    """

    _count: int  # of parts
    _keeps = True  # whether there is room for copies of all of them

    @abstractmethod
    def _load(self, k: int) -> Part:
        """The k-th part, with slopes as they are."""

    @abstractmethod
    def _prox(self, k: int, z: Tensor, inverse: Tensor | None) -> Tensor:
        """The prox of the k-th part, with its cap, in the metric; may use the memory of z."""

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
            squares[part.block].append(self._dot(part.d, part.e) * self._scale.square() if in_metric else norm.square())
            dots[part.block].append(self._dot(part.d, part.x))
        total = self.numbers.total
        return [(total(square), total(dot) * self._scale) for square, dot in zip(squares, dots, strict=True)]

    def _along(self, i: int, u: Array) -> Array:
        """The factor on the scaled slopes of a block at u."""
        return u * -self.cap(i) * self._scale

    def _points(self, u: Array) -> Iterator[tuple[Part, Tensor]]:
        """The parts with y(u)."""
        for k, part in enumerate(self._parts()):
            z = torch.addcmul(part.x, part.e, self._along(part.block, u).to(part.x.dtype))
            yield part, self._prox(k, z, part.inverse)

    def heights(self, u: Array) -> Array:
        """Every point takes one prox of all parts."""
        points = ([self._dot(part.d, y - part.x) for part, y in self._points(u[i])] for i in range(len(u)))
        return self._scale * self.numbers.vector([self.numbers.total(own) for own in points])

    def move_sq(self, u: Array) -> Array:
        """From y(u)."""
        moves = [torch.linalg.vector_norm(y - part.x, dtype=self.numbers.dtype) for part, y in self._points(u)]
        return torch.stack(moves).square().sum()

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- y(u), or part of the way."""
        for k, (part, y) in enumerate(self._points(u)):
            self._store(k, masked(relaxed(part.x, y, s), part.x, ok, self.cap(part.block)))


class SearchedProxes(SearchedParts):
    """Any regulariser, by its prox: on whole tensors, and on tensors of one shape together if that is allowed."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int]) -> None:
        super().__init__(numbers, blocks, places)
        self._piles = [pile for i, block in enumerate(blocks) for pile in piles(block, i)]
        self._count = len(self._piles)

    def _load(self, k: int) -> Part:
        pile = self._piles[k]
        block = self.blocks[pile.block]
        columns = [block.params, block.slopes, *([block.along, block.metrics] if block.in_metric else [])]
        return part_of(pile.block, *(pile.gather([widened(ts[i]) for i in pile.members]) for ts in columns))

    def _prox(self, k: int, z: Tensor, inverse: Tensor | None) -> Tensor:
        pile, alpha = self._piles[k], self.cap(self._piles[k].block)
        y = pile.prox(z, stepping(alpha) if inverse is None else stepping(alpha) * inverse)
        return torch.where(alpha == 0, z, y) if isinstance(alpha, Tensor) else y

    def _store(self, k: int, y: Tensor) -> None:
        pile = self._piles[k]
        xs = [self.blocks[pile.block].params[i] for i in pile.members]
        torch._foreach_copy_(xs, pile.split(y, xs))


def stepping(alpha: Any) -> Any:
    """A cap to divide by, 1 if it is 0: a block with cap 0 does not move."""
    if isinstance(alpha, Tensor):
        return torch.where(alpha == 0, torch.ones_like(alpha), alpha)
    return alpha or 1.0


def resting(psi: Scalar, alpha: Tensor | float) -> Scalar:
    """The function without its bounds where the cap is 0, so that entries outside of them stay where they are."""
    if not isinstance(alpha, Tensor) or not psi.bounded:
        return psi  # blocks whose cap is known to be 0 are affine
    moves, inf = alpha > 0, torch.full_like(alpha, math.inf)
    return psi._replace(lower=torch.where(moves, psi.lower, -inf), upper=torch.where(moves, psi.upper, inf))


def relaxed(x: Tensor, y: Tensor, s: Tensor | float) -> Tensor:
    """x + s (y - x); y itself if s is exactly 1."""
    return y if isinstance(s, float) and s == 1 else y + (1 - s) * (x - y)


def masked(y: Tensor, x: Tensor, ok: Tensor, alpha: Tensor | float) -> Tensor:
    """y where `ok` and the block moves, else x; a cap that is a number is known not to be 0."""
    moves = ok & (alpha > 0) if isinstance(alpha, Tensor) else ok
    return torch.where(moves, y, x)
