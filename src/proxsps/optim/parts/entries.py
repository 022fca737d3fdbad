"""Blocks whose regulariser acts on each entry, by torch alone on the host.

Entries are taken in buckets, slices of long tensors and short ones joined. A bucket fits into the cache, so that what
is calculated from it never reaches memory.
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
from proxsps.optim.numbers import Numbers
from proxsps.optim.parts.base import Curve, relaxed
from proxsps.optim.passes import widened
from proxsps.regularizers.structure import Entries, Prox, Scalar

BUCKET = 1 << 16  # entries
MANY = 1 << 20  # entries from which on only the first evaluation of a search has a slope: secants do for the others
SAMPLE = 16  # one bucket in so many tells how large the products of entries are


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
    """Entries by torch operations on the host.

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
        self._exact = exact
        self.entries = sum(x.numel() for block in blocks for x in block.params)
        self._buckets = [bucket for i, block in enumerate(blocks) for bucket in buckets(block, i, BUCKET)]
        self._psi = [own.psi for own in structures]
        self._evaluated = False
        self._memory: dict[torch.dtype, list[Tensor]] = {}

    def _vectors(self, every: int = 1) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        for bucket in self._buckets[::every]:
            x, d = bucket.vectors()
            yield (bucket, x.double(), d.double()) if self._exact else (bucket, x, d)

    def _room(self, x: Tensor) -> list[Tensor]:
        """Two vectors of memory that is used for one bucket after the other."""
        if x.dtype not in self._memory:
            self._memory[x.dtype] = [torch.empty(min(BUCKET, self.entries), dtype=x.dtype) for _ in range(2)]
        return [part if part.numel() == x.numel() else part[: x.numel()] for part in self._memory[x.dtype]]

    def sums(self, points: bool) -> Array:
        """One pass, which answers h at the points of `ahead` as well."""
        sums, heights, slopes = np.zeros((3, len(self.blocks))), *np.zeros((2, len(self.ahead)))
        self._products = 0.0
        seen = range(0, len(self._buckets), min(SAMPLE, len(self._buckets)))
        for i, (bucket, x, d) in enumerate(self._vectors()):
            # Two dots read d once from memory; longer ones than a bucket would lose digits of f32.
            sums[1::-1, bucket.block] += torch.dot(d, x).item(), torch.dot(d, d).item()
            if i in seen:
                self._products += len(self._buckets) / len(seen) * (d * x).square().sum(dtype=torch.float64).item()
            self._add(bucket, x, d, self.ahead.tolist(), heights, slopes)
        self.answered = (self.ahead, heights, slopes)
        self._evaluated = len(self.ahead) > 0
        return sums

    def _heights(self, u: Array) -> tuple[Array, Array]:
        slopes = np.zeros_like(u) if self.entries < MANY or not self._evaluated else None
        self._evaluated = True
        return self._pass(u, slopes)

    def sampled(self, u: Array, every: int) -> tuple[Array, Array]:
        """Some of the buckets."""
        return self._pass(u, np.zeros_like(u), every)

    def _pass(self, u: Array, slopes: Array | None, every: int = 1) -> tuple[Array, Array]:
        """h and its slope at the points, from every so-manieth bucket, scaled up to all."""
        heights = np.zeros_like(u)
        for bucket, x, d in self._vectors(every):
            self._add(bucket, x, d, u.tolist(), heights, slopes)
        seen = sum(x.numel() for bucket in self._buckets[::every] for x in bucket.xs)
        share = self.entries / seen if every > 1 else 1.0
        return share * heights, np.full_like(u, math.nan) if slopes is None else share * slopes

    def _add(
        self, bucket: Bucket, x: Tensor, d: Tensor, points: list[float], heights: Array, slopes: Array | None
    ) -> None:
        """Add to h and h' at the points what a bucket contributes."""
        alpha, psi = self.cap(bucket.block), self._psi[bucket.block]
        for i, u in enumerate(points):
            evaluate = _known if isinstance(psi, Scalar) else _plain
            h, bend = evaluate(x, d, u * alpha, psi, alpha, slopes is not None, *self._room(x))
            heights[i] += h
            if slopes is not None:
                slopes[i] -= alpha * bend

    def products_sq(self) -> Array:
        """From some of the buckets."""
        return np.float64(self._products)

    def moves_sq(self, u: Array) -> Array:
        """One pass."""
        return self.numbers.total(
            [(self._point(bucket, x, d, u) - x).square_().sum() for bucket, x, d in self._vectors()]
        )

    def _point(self, bucket: Bucket, x: Tensor, d: Tensor, u: Array, out: Tensor | None = None) -> Tensor:
        """y(u) of a bucket, in `out` or in memory that is used again."""
        alpha, psi = self.cap(bucket.block), self._psi[bucket.block]
        z, room = self._room(x)
        torch.add(x, d, alpha=-float(u) * alpha, out=z)
        return _prox(z, psi, alpha, room if out is None else out) if isinstance(psi, Scalar) else psi.prox(z, alpha)

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass."""
        if self.numbers.refuses(ok):
            return
        for bucket, x, d in self._vectors():
            place = x if x.data_ptr() == bucket.xs[0].data_ptr() and s == 1 else None  # a view of the parameter
            y = self._point(bucket, x, d, u, place)
            if y is not place:
                spread(relaxed(x, y, s), bucket.xs)


def _plain(
    x: Tensor, d: Tensor, tau: float, psi: Prox, alpha: float, sloped: bool, z: Tensor, room: Tensor
) -> tuple[float, float]:
    """<d, y - x> and <d, y'> for any function of an entry."""
    torch.add(x, d, alpha=-tau, out=z)
    y = psi.prox(z, alpha)
    tangent = psi.prox_jvp(z, y, d, alpha) if sloped else None
    bend = math.nan if tangent is None else torch.dot(d, tangent).item()
    return torch.dot(d, torch.sub(y, x, out=room)).item(), bend


def _known(
    x: Tensor, d: Tensor, tau: float, psi: Scalar, alpha: float, sloped: bool, z: Tensor, room: Tensor
) -> tuple[float, float]:
    """The same for the family of functions that we know."""
    torch.add(x, d, alpha=-tau, out=z)
    keep = 1 / (1 + alpha * psi.l2)
    bend = keep * torch.dot(_tangent(z, d, psi, alpha), d).item() if sloped else 0.0
    return torch.dot(d, torch.sub(_prox(z, psi, alpha, room), x, out=room)).item(), bend


def _tangent(z: Tensor, d: Tensor, psi: Scalar, alpha: float) -> Tensor:
    """d where the prox moves with z, else 0; torch's own backward passes choose entries in one go."""
    if not psi.bounded:
        return torch.ops.aten.softshrink_backward(d, z, alpha * psi.l1)
    if psi.l1:
        d = torch.ops.aten.softshrink_backward(d, z, alpha * psi.l1)
        z = torch.nn.functional.softshrink(z, alpha * psi.l1)
    scale = 1 + alpha * psi.l2
    return torch.ops.aten.hardtanh_backward(d, z, psi.lower * scale, psi.upper * scale)


def _prox(z: Tensor, psi: Scalar, alpha: float, out: Tensor) -> Tensor:
    """The prox; the memory of z is used for what comes in between."""
    if psi.l1:
        last = not (psi.l2 or psi.bounded)
        torch.ops.aten.softshrink.out(z, alpha * psi.l1, out=out if last else z)
    if psi.l2:
        torch.div(z, 1 + alpha * psi.l2, out=z if psi.bounded else out)
    return torch.clamp(z, psi.lower, psi.upper, out=out) if psi.bounded else out
