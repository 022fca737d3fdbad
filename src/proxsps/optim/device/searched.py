"""Blocks of one kind that need a search: their sums, heights of the model along the ray, and the write."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.refine import POINTS
from proxsps.regularizers.structure import Scalar


class Searched(ABC):
    """Blocks of one kind whose prox is not affine, with their places in the step; as many ranks hold each of them."""

    share = 1.0  # weight of its sums on this rank when all ranks are added up
    points = POINTS  # of the first round of a search
    reach: Array | float = 1.0  # the caps of the blocks are their `alpha` times this number

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int]) -> None:
        self.numbers, self.blocks, self.places = numbers, blocks, places

    @abstractmethod
    def sums(self, points: bool) -> Array:
        """||d||^2 (in a metric <d, D^-1 d>), <d, x> and, for `points`, ||x||^2, as rows with one column per block."""

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
