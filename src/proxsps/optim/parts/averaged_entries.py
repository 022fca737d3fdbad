"""Entries whose slopes are averages of gradients, on the host without the kernels, in the identity or Adam's metric.

Every pass computes the new averages of a bucket in memory that stays in the cache; only the write stores them. The
compiled kernels do the same (`proxsps.optim.kernels.entries`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import Weights
from proxsps.optim.blocks import Block
from proxsps.optim.lists import join, spread
from proxsps.optim.parts.averaged_sums import block_sums, new_metric
from proxsps.optim.parts.base import relaxed
from proxsps.optim.parts.entries import BUCKET, KEPT, SHORT, EntriesInBuckets, bundles


class AveragedBucket(NamedTuple):
    """Slices of tensors that are passed over together."""

    block: int
    xs: list[Tensor]
    gs: list[Tensor]
    ds: list[Tensor]  # averages before the step
    vs: list[Tensor]  # and those of squares; none in the identity metric
    weights: Weights | None  # of old v and new g^2


class AveragedEntriesOfTensors(EntriesInBuckets[AveragedBucket]):
    """Entries by torch operations that update averages in the passes of the step."""

    _summing = False
    _joined: dict[int, tuple[Tensor, Tensor, Tensor | None]]
    _inverse: Tensor | None

    def _cut(self, block: Block, place: int) -> Iterator[AveragedBucket]:
        yield from self._bundled(block, place, range(len(block.params)))

    def _cut_sample(self, block: Block, place: int, every: int) -> Iterator[AveragedBucket]:
        long = [i for i, x in enumerate(block.params) if x.numel() >= SHORT]
        yield from self._bundled(block, place, long, every)

    def _bundled(self, block: Block, place: int, chosen: Sequence[int], every: int = 1) -> Iterator[AveragedBucket]:
        own = block.known_moments
        columns = [block.params, own.grads, own.averages, *([] if own.squares is None else [own.squares])]
        weights: Sequence[Weights | None] = own.square_weights or [None] * len(block.params)
        for pair in dict.fromkeys(weights):  # tensors may have their own counts
            members = [i for i in chosen if weights[i] == pair]
            lists = [[column[i] for i in members] for column in columns]
            if every > 1:
                lists = [[t.reshape(-1)[: t.numel() // every] for t in ts] for ts in lists]
            for xs, gs, ds, *vs in bundles(lists, BUCKET):
                yield AveragedBucket(place, xs, gs, ds, vs[0] if vs else [], pair)

    def _vectors(
        self, chosen: Sequence[AveragedBucket] | None = None
    ) -> Iterator[tuple[AveragedBucket, Tensor, Tensor]]:
        """Each bucket with x and the new d; 1/D is available too while the bucket is processed."""
        for bucket in self._buckets if chosen is None else chosen:
            if id(bucket) not in self._joined:
                kept = len(bucket.xs) > 1 and len(self._joined) < KEPT
                found = self._made(bucket, kept)
                if kept:
                    self._joined[id(bucket)] = found
            else:
                found = self._joined[id(bucket)]
            x, d, self._inverse = found
            if self._summing:
                self._add_gradients(bucket, x)
            yield bucket, x, d

    def _made(self, bucket: AveragedBucket, kept: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """x, the new d and 1/D, in their own memory if they are kept."""
        own = self.blocks[bucket.block].known_moments
        x, g, d = (join(ts) for ts in (bucket.xs, bucket.gs, bucket.ds))
        room: Sequence[Tensor | None] = [None, None] if kept else self._fresh(x)
        slope = torch.lerp(d, g, own.weights.new, out=room[0])
        if bucket.weights is None:
            return x, slope, None
        square = torch.mul(join(bucket.vs), bucket.weights.old, out=room[1])
        square.addcmul_(g, g, value=bucket.weights.new)
        return x, slope, new_metric(square, own.eps, square.dtype).reciprocal_()

    def _fresh(self, x: Tensor) -> list[Tensor]:
        """Memory for d and 1/D of one bucket after the other."""
        key = (x.dtype, "averages")
        if key not in self._memory:
            self._memory[key] = [torch.empty(min(BUCKET, self.entries), dtype=x.dtype) for _ in range(2)]
        return [part[: x.numel()] for part in self._memory[key]]

    # Sums

    def sums(self, points: bool) -> Array:
        """One pass, which makes `extras` too."""
        self._gradients, self._summing = np.zeros((2, len(self.blocks))), True
        found = super().sums(points)
        self._summing = False
        return found

    def _add_gradients(self, bucket: AveragedBucket, x: Tensor) -> None:
        g = join(bucket.gs)
        scaled = g if self._inverse is None else g * self._inverse
        product = torch.dot(g, x).item()
        if scaled is not g and not math.isfinite(torch.dot(g, g).item()):
            product = math.nan  # v may overflow, and infinity there would not show in the other sums
        self._gradients[:, bucket.block] += product, torch.dot(scaled, scaled).item()

    def extras(self) -> list[list[Array]]:
        """From the same pass; blocks whose sums leave the range of f32 are summed again in f64."""
        g_dot_x, g_sq = self._gradients
        for i in np.flatnonzero(~np.isfinite(g_dot_x + g_sq) | (g_sq < 1e-20)).tolist():
            *_, g_dot_x[i], g_sq[i], _, _ = block_sums(self.blocks[i], points=False, exact=True)
        return [[*pair, *np.zeros(3)] for pair in zip(g_dot_x, g_sq, strict=True)]

    def sampled_dots(self, every: int) -> tuple[Array, Array, Array]:
        """From the first entries of each tensor that is not short."""
        self._gradients, self._summing = np.zeros((2, len(self.blocks))), True
        chosen, share = self._sampled_buckets(every)
        dots = np.zeros(2)
        for _, x, d in self._vectors(chosen):
            dots += torch.dot(d, x).item(), (d * x).square_().sum(dtype=torch.float64).item()
        self._summing = False
        return share * self._gradients[0].sum(), share * dots[0], share * dots[1]

    def _dots(self, bucket: AveragedBucket, x: Tensor, d: Tensor) -> tuple[float, float]:
        """<d, x> and <d, D^-1 d> of a bucket, calculated once."""
        if self._inverse is None:
            return super()._dots(bucket, x, d)
        key = id(bucket)
        if key not in self._known_dots:
            self._known_dots[key] = torch.dot(d, x).item(), torch.dot(d, d * self._inverse).item()
        return self._known_dots[key]

    # In Adam's metric, where each entry has its own step size

    def _add(
        self, bucket: AveragedBucket, x: Tensor, d: Tensor, points: list[float], heights: Array, slopes: Array | None
    ) -> None:
        if self._inverse is None or not points:
            super()._add(bucket, x, d, points, heights, slopes)
            return
        alpha, psi = self.cap(bucket.block), self._psi[bucket.block]
        along, sizes = d * self._inverse, alpha * self._inverse
        z, room = self._room(x)
        for i, u in enumerate(points):
            torch.add(x, along, alpha=-u * alpha, out=z)
            y = psi.prox(z, sizes)
            heights[i] += torch.dot(d, torch.sub(y, x, out=room)).item()
            if slopes is not None:
                tangent = psi.prox_jvp(z, y, along, sizes)
                slopes[i] -= alpha * (math.nan if tangent is None else torch.dot(d, tangent).item())

    def _point(self, bucket: AveragedBucket, x: Tensor, d: Tensor, u: Array, out: Tensor | None = None) -> Tensor:
        if self._inverse is None:
            return super()._point(bucket, x, d, u, out)
        alpha, z = self.cap(bucket.block), self._room(x)[0]
        torch.addcmul(x, d, self._inverse, value=-float(u) * alpha, out=z)
        y: Tensor = self._psi[bucket.block].prox(z, alpha * self._inverse)
        return y

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass, which stores the new averages too."""
        if self.numbers.refuses(ok):
            return
        for bucket, x, d in self._vectors():
            spread(relaxed(x, self._point(bucket, x, d, u), s), bucket.xs)
            spread(d, bucket.ds)
            if bucket.weights is not None:
                torch._foreach_mul_(bucket.vs, bucket.weights.old)
                torch._foreach_addcmul_(bucket.vs, bucket.gs, bucket.gs, bucket.weights.new)
        for block in self.blocks:
            block.known_moments.written = True
