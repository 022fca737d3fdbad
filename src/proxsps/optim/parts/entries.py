"""Blocks whose regulariser acts on each entry, by torch alone: passes over pieces of memory.

Entries are taken in buckets: slices of long tensors, and short ones joined. On the host a bucket fits into the cache,
so that what is calculated from it never reaches memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.lists import join, spread
from proxsps.optim.numbers import Device, Numbers
from proxsps.optim.parts.base import Curve, relaxed, resting, stepping
from proxsps.optim.passes import widened
from proxsps.optim.refine import POINTS
from proxsps.regularizers.structure import Entries, Prox, Scalar

BUCKET = 1 << 16  # entries on the host
ROOM = 1 << 23  # entries of memory that a round may use on a device, or twice the parameters where they have more


class Bucket(NamedTuple):
    """Slices of tensors that are passed over together."""

    block: int
    xs: list[Tensor]
    ds: list[Tensor]

    def vectors(self) -> tuple[Tensor, Tensor]:
        """All entries of x and of d as vectors, in f32 at least."""
        return widened(join(self.xs)), widened(join(self.ds))


def buckets(block: Block, place: int, size: int) -> Iterator[Bucket]:
    """The tensors of a block in buckets of at most `size` entries, each of one dtype."""
    xs: list[Tensor] = []
    ds: list[Tensor] = []
    room = size
    for x, d in zip(block.params, block.slopes, strict=True):
        length = x.numel()
        if xs and (length > room or x.dtype != xs[0].dtype or d.dtype != ds[0].dtype):
            yield Bucket(place, xs, ds)
            xs, ds, room = [], [], size
        if length > size:
            for pair in zip(x.reshape(-1).split(size), d.reshape(-1).split(size), strict=True):
                yield Bucket(place, *([part] for part in pair))
        elif length:
            xs.append(x)
            ds.append(d)
            room -= length
    if xs:
        yield Bucket(place, xs, ds)


class EntriesOfTensors(Curve):
    """Entries by torch operations, on the host or on a device.

    Args:
        numbers: those of the step.
        blocks: the blocks.
        places: their places among all blocks.
        structures: what each block's regulariser says of itself.
        exact: calculate in doubles, because squares leave the range of f32.
    """

    def __init__(
        self,
        numbers: Numbers,
        blocks: Sequence[Block],
        places: Sequence[int],
        structures: Sequence[Entries],
        exact: bool = False,
    ) -> None:
        super().__init__(numbers, blocks, places)
        self._device = isinstance(numbers, Device)
        self._exact = exact
        self.entries = sum(x.numel() for block in blocks for x in block.params)
        size = max(2 * self.entries, ROOM) // (POINTS + 2) if self._device else BUCKET
        self._buckets = [bucket for i, block in enumerate(blocks) for bucket in buckets(block, i, size)]
        pairs = zip(structures, blocks, strict=True)
        self._psi = [resting(own.psi, block.alpha) if isinstance(own.psi, Scalar) else own.psi for own, block in pairs]
        self._products: Array | None = None

    def _vectors(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        x, d = bucket.vectors()
        return (x.double(), d.double()) if self._exact else (x, d)

    def sums(self, points: bool) -> Array:
        """One pass; the products of entries, which tell how much h is rounded, are kept on the host."""
        if self._device:
            return self._device_sums()
        sums, *heights = self.pass_over(self.ahead)
        self.answered = (self.ahead, *heights)
        return sums

    def _device_sums(self) -> Array:
        wide = self.numbers.dtype
        columns = [[self.numbers.scalar(0.0)] * 3 for _ in self.blocks]
        for bucket in self._buckets:
            x, d = bucket.vectors()
            own = columns[bucket.block]
            own[0] = own[0] + torch.linalg.vector_norm(d, dtype=wide).square()
            own[1] = own[1] + torch.dot(d, x)
        self._block_sums = torch.stack([torch.stack(own) for own in columns], dim=1)
        square = self._block_sums[0].sum()
        # Slopes over a common scale, lest their squares leave the range of f32.
        self._scale = torch.where(square > 0, square, torch.ones_like(square)).sqrt()
        return self._block_sums

    def _heights(self, u: Array) -> tuple[Array, Array]:
        return self._device_heights(u) if self._device else self.pass_over(u)[1:]

    def sampled(self, u: Array, every: int) -> tuple[Array, Array]:
        """Some of the buckets."""
        return self.pass_over(u, every)[1:]

    def pass_over(self, u: Array, every: int = 1) -> tuple[Array, Array, Array]:
        """The sums by block, and h and its slope at the points u, from every so-manieth bucket, scaled up to all."""
        sums, products = np.zeros((3, len(self.blocks))), 0.0
        h, slope = np.zeros_like(u), np.zeros_like(u)
        for bucket in self._buckets[::every]:
            x, d = self._vectors(bucket)
            alpha, psi = self.blocks[bucket.block].alpha, self._psi[bucket.block]
            if every == 1 and self._products is None:
                product = d * x
                sums[:2, bucket.block] += torch.dot(d, d).item(), product.sum(dtype=torch.float64).item()
                products += torch.dot(product, product).item()
            for i, point in enumerate(u.tolist()):
                z = torch.add(x, d, alpha=-point * alpha)
                y = psi.prox(z, alpha)
                tangent = psi.prox_jvp(z, y, d, alpha)
                h[i] += torch.dot(d, y - x).item()
                slope[i] -= math.nan if tangent is None else alpha * torch.dot(d, tangent).item()
        if every == 1 and self._products is None:
            self._products = np.float64(products)
        return sums, every * h, every * slope

    def _device_heights(self, u: Array) -> tuple[Array, Array]:
        h = slope = torch.zeros_like(u)
        for bucket in self._buckets:
            x, d = bucket.vectors()
            alpha, psi = self.blocks[bucket.block].alpha, self._psi[bucket.block]
            d = d / self._scale.to(d.dtype)
            steps = (u * (-alpha * self._scale)).to(d.dtype)[:, None]
            z = torch.addcmul(x, d, steps)  # one row per point
            own, bend = (
                _thrifty(z, x, d, psi, stepping(alpha)) if isinstance(psi, Scalar) else _plain(z, x, d, psi, alpha)
            )
            h = h + own
            slope = slope - alpha * bend
        return self._scale * h, self._scale**2 * slope

    def products_sq(self) -> Array:
        """From the first pass; a device stops by rounds, and does not need them."""
        return self.numbers.scalar(0.0) if self._device else self._products

    def moves_sq(self, u: Array) -> Array:
        """One pass."""
        return self.numbers.total([(y - x).square().sum() for _, x, y in self._points(u)])

    def _points(self, u: Array) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        """x and y(u) of each bucket."""
        for bucket in self._buckets:
            x, d = self._vectors(bucket)
            alpha = self.blocks[bucket.block].alpha
            tau = self.numbers.factor(u * alpha)
            yield bucket, x, self._psi[bucket.block].prox(x - tau * d, self.numbers.factor(stepping(alpha)))

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass."""
        if self.numbers.refuses(ok):
            return
        for bucket, x, y in self._points(u):
            y = relaxed(x, y, s).to(bucket.xs[0].dtype)
            if self._device:
                moves = ok & (self.numbers.scalar(self.blocks[bucket.block].alpha) > 0)
                y = torch.where(moves, y, x.to(y.dtype))
            spread(y, bucket.xs)


def _plain(z: Tensor, x: Tensor, d: Tensor, psi: Prox, alpha: Tensor | float) -> tuple[Tensor, Tensor | float]:
    """<d, y - x> and <d, y'>, one entry per row of z, for any function of an entry."""
    y = psi.prox(z, stepping(alpha))
    tangent = psi.prox_jvp(z, y, d.expand_as(z), stepping(alpha))
    return (y - x) @ d, math.nan if tangent is None else tangent @ d


def _thrifty(z: Tensor, x: Tensor, d: Tensor, psi: Scalar, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
    """The same for the family of functions that we know, in the memory of z."""
    keep = 1 / (1 + alpha * psi.l2)
    if psi.bounded:
        y = psi.prox(z, alpha)
        h = (y - x) @ d
        z = torch.mul(d, psi.prox_jvp(z, y, torch.ones_like(d), alpha), out=y)
        return h, z @ d
    threshold = alpha * psi.l1
    inside = z @ d
    z.clamp_(-threshold, threshold)
    h = keep * (inside - z @ d) - x @ d
    outside = z.abs_().ge_(threshold).mul_(d)
    return h, keep * (outside @ d)
