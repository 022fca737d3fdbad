"""Blocks whose prox is affine, by torch alone: sums in few calls, and x <- keep x + move d + pull center."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.step import Affine
from proxsps.optim.blocks import Block, plain, stored
from proxsps.optim.lists import spread
from proxsps.optim.moments import DeviceMoments
from proxsps.optim.numbers import Device
from proxsps.optim.parts.base import Part
from proxsps.optim.parts.entries import buckets
from proxsps.optim.passes import (
    COPIES,
    LAUNCHES,
    combined,
    moved_sq,
    pair_sums,
    update,
    update_masked,
    vectors,
    wide_sums,
)


class Lines(Part):
    """The part of a step that has a closed form; for coupled methods d = g + lam (x - center)."""

    coupled = False

    def rows(self, points: bool) -> Sequence[Array | float]:
        """The sums row by row."""
        return self._device_rows(points) if isinstance(self.numbers, Device) else list(self.sums(points))

    def sums(self, points: bool) -> Array:
        """The sums, in doubles if squares leave the range of f32."""
        if isinstance(self.numbers, Device):
            d_sq, d_dot_x, x_sq = self._device_rows(points)
            return torch.stack([d_sq, d_dot_x, x_sq if points else torch.zeros_like(d_sq)])
        self.measure()
        return self.checked(np.array([self._torch_sums(block, points, exact=False) for block in self.blocks]).T, points)

    def measure(self) -> None:
        """Compare with the sample of the start, if all blocks have one."""
        moved = [moved_sq(block) for block in self.blocks]
        if not any(number is None for number in moved):
            self.moved_sq = np.array(moved)

    def checked(self, sums: Array, points: bool) -> Array:
        """The sums; blocks whose squares overflowed or vanished in f32 are summed again in f64."""
        for i in np.flatnonzero(~np.isfinite(sums).all(axis=0) | (sums[0] < 1e-20)).tolist():
            sums[:, i] = self._torch_sums(self.blocks[i], points, exact=True)
        return sums

    def _torch_sums(self, block: Block, points: bool, exact: bool) -> list[Array]:
        pairs = vectors(block, self.coupled, *COPIES)
        if exact:
            pairs = (tuple(map(Tensor.double, pair)) for pair in pairs)
        return [self.numbers.total(parts) for parts in pair_sums(pairs, points)]

    def _device_rows(self, points: bool) -> list[Array]:
        columns = []
        for block in self.blocks:
            if not points and isinstance(block.moments, DeviceMoments) and not block.centered:
                found: Sequence[list[Tensor]] = block.moments.line_sums()
            else:
                found = wide_sums(vectors(block, self.coupled, *LAUNCHES), points, self.numbers.dtype)
            columns.append([self.numbers.total(part) for part in found[: 3 if points else 2]])
        return [*map(self.numbers.vector, zip(*columns, strict=True)), *([] if points else [0.0])]

    def move(self, update: Affine, ok: Array) -> None:
        """x <- keep x + move d + pull center where `ok`."""
        for block, keep, move, pull in zip(self.blocks, *update, strict=True):
            if not block.params:
                continue
            if isinstance(self.numbers, Device):
                self._move_masked(block, keep, move, pull, ok)
            elif ok:
                self._move(block, float(keep), float(move), float(pull))

    def _move(self, block: Block, keep: float, move: float, pull: float) -> None:
        if block.centered or not block.aligned:
            for x, y in zip(block.params, combined(block, keep, move, pull), strict=True):
                x.copy_(y)
            return
        update(block, keep, move)

    def _move_masked(self, block: Block, keep: Tensor, move: Tensor, pull: Tensor, ok: Tensor) -> None:
        fuses = not block.centered and block.aligned and not block.double and not torch.compiler.is_compiling()
        if fuses and stored(block.along):
            update_masked(block, keep.float(), move.float(), ok)
        elif not block.centered and plain(block.params, block.along):
            for bucket in buckets(block.params, block.along, 0, LAUNCHES[1]):
                x, d = bucket.vectors()
                y = self.numbers.masked(x, keep * x + move * d, ok)
                spread(y.to(bucket.xs[0].dtype), bucket.xs)
        else:
            self.numbers.assign(block.params, list(combined(block, keep, move, pull)), ok)
