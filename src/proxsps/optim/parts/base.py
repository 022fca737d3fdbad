"""A part of a step: all blocks of one kind, which compute h and h' at several u and are written together."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import PROXES, Block
from proxsps.optim.numbers import Numbers
from proxsps.regularizers.structure import Scalar


class Sums(NamedTuple):
    """Reductions over the blocks, one entry per block."""

    d_sq: Array  # ||d||^2
    d_dot_x: Array  # <d, x - center>
    x_sq: Array  # ||x - center||^2; only if needed


class Part(ABC):
    """The blocks of one kind, with their positions among all blocks of the step."""

    moved_sq: Array | None = None  # ||x - x_0||^2, one number per block, if the part compares the sample in its pass

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int]) -> None:
        self.numbers = numbers
        self.blocks = blocks
        self.places = places

    @abstractmethod
    def sums(self, points: bool) -> Array:
        """||d||^2, <d, x> and, for `points`, ||x||^2, as rows with one column per block.

        In a metric the first row is <d, D^-1 d>.
        """

    def rows(self, points: bool) -> Sequence[Array | float]:
        """The same, row by row; rows that were not requested may be exactly 0."""
        return list(self.sums(points))

    def extras(self) -> list[list[Array]]:
        """The further sums of blocks with averages, block by block: see `Moments.extras`."""
        return [block.known_moments.extras(self.numbers, block) for block in self.blocks]


class Curve(Part):
    """Blocks whose prox is not affine; all are held by the same number of ranks."""

    kind = PROXES
    share = 1.0  # weight of its sums on this rank when all ranks are added up
    points = 1  # per round of the search: as many as cost little more than one
    entries = 0  # entries that a pass over a sample would not have to read
    reach: Array | float = 1.0  # the caps of the blocks are their `alpha` times this number
    ahead: Array = np.empty(0)  # points to evaluate in the pass that computes the sums
    answered: tuple[Array, Array, Array] | None = None

    @property
    def eps(self) -> float:
        """Relative rounding of the coarsest parameters, half precision counting as f32."""
        dtypes = {x.dtype for block in self.blocks for x in block.params}
        return max(torch.finfo(dtype if dtype is torch.float64 else torch.float32).eps for dtype in dtypes)

    def heights(self, u: Array) -> tuple[Array, Array | None]:
        """sum <d, y(u) - x> and its derivative at the points u.

        NaN for a derivative that is not known; None on a device, whose search needs no derivative.
        """
        if self.answered is not None and np.array_equal(self.answered[0], u):
            return self.answered[1:]
        return self._heights(u)

    @abstractmethod
    def _heights(self, u: Array) -> tuple[Array, Array | None]:
        """The same, calculated."""

    def cap(self, i: int) -> Any:
        """The cap of a block."""
        return self.scaled(self.blocks[i].alpha)

    def scaled(self, alpha: Any) -> Any:
        """Caps times `reach`; as they are if `reach` is exactly 1."""
        return alpha if isinstance(self.reach, float) and self.reach == 1 else alpha * self.reach

    def ray_heights(self, s: Array, every: int = 1) -> Array:
        """sum <d, x+(s) - x> on the ray of the matched cap, where step and prox have the size s times `alpha`.

        Points on it are the points at u = 1 with other caps. Every point takes one pass, unless a subclass is faster.
        For `every` above 1, a part of the entries may be enough.
        """
        before, one, found = self.reach, self.numbers.vector([1.0]), []
        for i in range(len(s)):
            self.reach = self.numbers.factor(s[i])
            found.append((self._heights(one) if every == 1 else self.sampled(one, every))[0][0])
        self.reach = before
        return self.numbers.vector(found)

    def sampled(self, u: Array, every: int) -> tuple[Array, Array]:
        """The same, estimated from a part of the entries if that saves reading."""
        return self.heights(u)

    def sampled_dots(self, every: int) -> tuple[Array, Array, Array]:
        """<g, x>, <d, x> and ||d * x||^2 of a part with averages, estimated from a part of the entries."""
        raise NotImplementedError

    @abstractmethod
    def products_sq(self) -> Array:
        """||d * x||^2, from which the rounding error of h follows."""

    @abstractmethod
    def moves_sq(self, u: Array) -> Array:
        """||y(u) - x||^2 at one u."""

    @abstractmethod
    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- x + s (y(u) - x) where `ok`; exactly y(u) if s is exactly 1."""


def stepping(alpha: Any) -> Any:
    """A cap to divide by, 1 if it is 0: a block with cap 0 does not move."""
    if isinstance(alpha, Tensor):
        return torch.where(alpha == 0, torch.ones_like(alpha), alpha)
    return alpha or 1.0


def resting(psi: Scalar, alpha: Tensor | float) -> Scalar:
    """The function without its bounds where the cap is 0, so that entries outside of them stay where they are."""
    if not isinstance(alpha, Tensor) or not psi.bounded:
        return psi  # on the host, blocks that do not move are lines
    moves, inf = alpha > 0, torch.full_like(alpha, math.inf)
    return psi._replace(lower=torch.where(moves, psi.lower, -inf), upper=torch.where(moves, psi.upper, inf))


def relaxed(x: Tensor, y: Tensor, s: Tensor | float) -> Tensor:
    """x + s (y - x); y itself if s is exactly 1."""
    return y if isinstance(s, float) and s == 1 else y + (1 - s) * (x - y)


def masked(y: Tensor, x: Tensor, ok: Tensor, alpha: Tensor | float) -> Tensor:
    """y where `ok` and the block moves, else x; a cap that is a number is known not to be 0."""
    moves = ok & (alpha > 0) if isinstance(alpha, Tensor) else ok
    return torch.where(moves, y, x)
