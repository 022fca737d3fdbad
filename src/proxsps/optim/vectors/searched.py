"""Blocks that need a search: their sums, heights of the model along the ray, and the write.

The formulas are the same on devices, where numbers are tensors that are never read back, and on the host, where they
are floats.
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
from proxsps.regularizers.structure import Scalar

Floats = Sequence[float]


class Searched(ABC):
    """Blocks of one kind whose prox is not affine.

    With the cap alpha = reach w of a block, where w is its `alpha`, y(u) = prox_{alpha phi}(x - u alpha D^-1 d).
    """

    points = POINTS  # of the first round of a search
    host_points = 1  # of each round of a search on the host

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], scaled: bool) -> None:
        """Caps are tensors if they are `scaled`: multiplied by a number that is known after the sums."""
        self.numbers, self.blocks = numbers, blocks

    @abstractmethod
    def sums(self) -> list[Sequence[Tensor]]:
        """||d||^2 (in a metric <d, D^-1 d>) and <d, x> of each block."""

    @abstractmethod
    def heights(self, u: Array, reach: Array | float) -> Array:
        """sum <d, y(u) - x> at the points u; `reach` is one number, or one for each of them."""

    def noise_sq(self) -> list[float]:
        """The sum of (d x)^2 over each block, whose rounding reaches the heights; sums of rows are in doubles."""
        return [0.0] * len(self.blocks)

    @abstractmethod
    def write(self, u: Array | float, reach: Array | float, ok: Array | bool) -> None:
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

    def _at(self, k: int, part: Part, u: Array | float, reach: Array | float) -> Tensor:
        """y(u) of the k-th part."""
        cap = times(reach, self.blocks[part.block].alpha)
        return self._prox(k, moved(part.x, part.e, u * (self._scale * -cap)), cap, part)

    def _height(self, u: Array | float, reach: Array | float) -> Tensor:
        found = [self._dot(part.d, self._at(k, part, u, reach) - part.x) for k, part in enumerate(self._parts())]
        return self.numbers.total(found)

    def heights(self, u: Array, reach: Array | float) -> Array:
        """Every point takes one prox of all parts."""
        reaches = reach if per_point(reach) else [reach] * len(u)
        return self._scale * self.numbers.vector([self._height(u[i], reaches[i]) for i in range(len(u))])

    def write(self, u: Array | float, reach: Array | float, ok: Array | bool) -> None:
        """x <- y(u) where `ok`."""
        for k, part in enumerate(self._parts()):
            y = self._at(k, part, u, reach)
            self._store(k, written(part.x, y, ok, times(reach, self.blocks[part.block].alpha)))


def per_point(reach: Any) -> TypeGuard[Tensor]:
    """Whether each point of a round has its own number."""
    return isinstance(reach, Tensor) and reach.ndim > 0


def moved(x: Tensor, e: Tensor, step: Tensor | float) -> Tensor:
    """x + step e."""
    return torch.addcmul(x, e, step) if isinstance(step, Tensor) else torch.add(x, e, alpha=step)


def written(x: Tensor, y: Tensor, ok: Array | bool, cap: Tensor | float) -> Tensor:
    """y where `ok` and the block moves; else x. A cap as a number is not 0."""
    where: Any = ok & (cap > 0) if isinstance(cap, Tensor) else ok
    return y if where is True else torch.where(where, y, x)


def stepping(alpha: Any) -> Any:
    """A cap to divide by, 1 if it is 0: a block with cap 0 does not move."""
    if isinstance(alpha, Tensor):
        return torch.where(alpha == 0, torch.ones_like(alpha), alpha)
    return alpha or 1.0


def resting(psi: Any, alpha: Tensor | float) -> Any:
    """The function without its bounds where the cap is 0, so that entries outside of them stay where they are."""
    if not (isinstance(alpha, Tensor) and isinstance(psi, Scalar) and psi.bounded):
        return psi  # blocks whose cap is known to be 0 are affine
    moves, inf = alpha > 0, torch.full_like(alpha, math.inf)
    return psi._replace(lower=torch.where(moves, psi.lower, -inf), upper=torch.where(moves, psi.upper, inf))
