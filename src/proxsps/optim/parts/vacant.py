"""Blocks of which this rank has no entries, although other ranks have shards of them."""

from __future__ import annotations

import numpy as np
import torch

from proxsps.core.array import Array, array_namespace
from proxsps.optim.numbers import Device
from proxsps.optim.parts.base import Curve


class Vacant(Curve):
    """A part that adds nothing, so that this rank takes part in the search of the others."""

    def sums(self, points: bool) -> Array:
        """Zeros."""
        shape = (3, len(self.blocks))
        if isinstance(self.numbers, Device):
            return torch.zeros(shape, dtype=self.numbers.dtype, device=self.blocks[0].params[0].device)
        return np.zeros(shape)

    def _heights(self, u: Array) -> tuple[Array, Array]:
        zeros = array_namespace(u).zeros_like(u)
        return zeros, zeros

    def ray_heights(self, s: Array, every: int = 1) -> Array:
        """Zeros."""
        return array_namespace(s).zeros_like(s)

    def products_sq(self) -> Array:
        """Zero."""
        return self.numbers.scalar(0.0)

    def moves_sq(self, u: Array) -> Array:
        """Zero."""
        return self.numbers.scalar(0.0)

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """Nothing to write."""
