"""Blocks whose regulariser acts on each entry: few launches, and bounded memory.

Tensors are joined into a few long ones. A search needs only h from them, at all points of a round together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.device.refine import POINTS
from proxsps.optim.device.searched import Searched, masked, relaxed, resting, stepping
from proxsps.optim.lists import bundles, join, spread, widened
from proxsps.regularizers.structure import Prox, Scalar

ROOM = 32 << 20  # bytes that the search over entries may use, or twice those of the parameters, if that is more


class Bucket(NamedTuple):
    """Tensors of one dtype and block that are processed together."""

    block: int
    xs: list[Tensor]
    others: list[list[Tensor]]  # d; in a metric also D^-1 d and D

    def vectors(self) -> tuple[Tensor, ...]:
        """All entries of x and d as vectors, in at least f32; in a metric also of D^-1 d and D^-1."""
        x, d, *metric = (widened(join(tensors)) for tensors in (self.xs, *self.others))
        return (x, d, metric[0], metric[1].reciprocal()) if metric else (x, d)


class SearchedEntries(Searched):
    """Blocks whose regulariser acts on each entry, in the identity metric or in Adam's.

    Each round of the search needs one vector of entries for each of its points, so it works on pieces of the entries
    for which there is room. If there is room for them too, joined copies of x and d are kept for all rounds; in a
    metric also of D^-1 d and D^-1.

    Caps are tensors if they are `scaled`: multiplied by a number that is known after the sums.
    """

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> None:
        super().__init__(numbers, blocks, places)
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
        self._buckets = list(_buckets(blocks, entries if self._keeps else loose))
        self._kept: list[tuple[Tensor, ...]] = []
        self._factors: tuple[Array | float, list[Array]] | None = None
        self._psi = []
        for block in blocks:
            psi = block.entries.psi
            self._psi.append(resting(psi, block.alpha) if isinstance(psi, Scalar) else psi)

    def sums(self, points: bool) -> Array:
        """The sums, in doubles; slopes are divided by their common norm, so that products stay in the range of f32."""
        wide = self.numbers.dtype
        vectors = [bucket.vectors() for bucket in self._buckets] if self._keeps else []
        slopes = (d for _, d, *_ in vectors) if self._keeps else (bucket.vectors()[1] for bucket in self._buckets)
        norms = [torch.linalg.vector_norm(d, dtype=wide) for d in slopes]
        self._scale = scale_of(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
        self._factors = None
        self._kept = [self._shrunk(*parts) for parts in vectors]
        squares, dots = [norm.square() for norm in norms], []
        for j, (_, x, d, *metric) in enumerate(self._vectors()):
            dots.append(torch.dot(d, x))
            if metric:
                squares[j] = torch.dot(d, metric[0]) * self._scale.square()
        columns = []
        for i in range(len(self.blocks)):
            own = [j for j, bucket in enumerate(self._buckets) if bucket.block == i]
            columns += [
                self.numbers.total([squares[j] for j in own]),
                self.numbers.total([dots[j] for j in own]) * self._scale,
            ]
        zeros = torch.zeros(len(self.blocks), 1, dtype=wide, device=self._scale.device)
        return torch.cat([torch.stack(columns).reshape(-1, 2), zeros], dim=1).T

    def _shrunk(self, x: Tensor, d: Tensor, *metric: Tensor) -> tuple[Tensor, ...]:
        """The vectors with d and D^-1 d over the common norm; not in place: they may be views of the gradient."""
        if not metric:
            return x, d / self._scale
        return x, d / self._scale, metric[0] / self._scale, metric[1]

    def _vectors(self) -> Iterator[tuple[Any, ...]]:
        """Each bucket with x and the scaled d; in a metric also the scaled D^-1 d, and D^-1."""
        for i, bucket in enumerate(self._buckets):
            yield bucket, *(self._kept[i] if self._keeps else self._shrunk(*bucket.vectors()))

    def _pieces(self, points: int) -> Iterator[tuple[Any, ...]]:
        """Pieces for which there is room at this number of points; one point needs fewer and longer ones."""
        for bucket, *vectors in self._vectors():
            size = max(1, self._piece * POINTS // points if self._keeps else vectors[0].numel())
            for parts in zip(*(vector.split(size) for vector in vectors), strict=True):
                yield bucket.block, *parts

    def heights(self, u: Array) -> Array:
        """One pass."""
        blocks = range(len(self.blocks))
        return self._sums_at([u * self._along(i) for i in blocks], list(map(self.cap, blocks)))

    def ray_heights(self, s: Array) -> Array:
        """All points in one pass, if the prox takes one step size for each of them."""
        if not all(isinstance(psi, Scalar) for psi in self._psi):
            return super().ray_heights(s)
        caps = [s * block.alpha for block in self.blocks]
        sizes = [cap.to(self._dtype)[:, None] for cap in caps]
        return self._sums_at([cap * -self._scale for cap in caps], sizes)

    def _along(self, i: int) -> Array:
        """The factor on the scaled slopes of a block at u = 1."""
        if self._factors is None or self._factors[0] is not self.reach:
            self._factors = (self.reach, [self._scale * -self.cap(j) for j in range(len(self.blocks))])
        return self._factors[1][i]

    def _sums_at(self, steps: Sequence[Array], sizes: Sequence[Tensor | float]) -> Array:
        """sum <d, y - x> at several points: from factors on the scaled slopes and step sizes of the prox, by block."""
        columns = [step.to(self._dtype)[:, None] for step in steps]
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for i, x, d, *metric in self._pieces(len(steps[0])):
            found[i].append(_products(x, d, columns[i].to(x.dtype), self._psi[i], sizes[i], *metric))
        own = [_added(parts, steps[0].dtype) for parts in found if parts]
        return self._scale * sum(own[1:], start=own[0])

    def move_sq(self, u: Array) -> Array:
        """One pass."""
        moves = [torch.linalg.vector_norm(y - x, dtype=self.numbers.dtype) for _, x, y in self._written(u)]
        return torch.stack(moves).square().sum()

    def _written(self, u: Array) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        """x and y(u) of each bucket."""
        for bucket, x, d, *metric in self._vectors():
            cap = self.cap(bucket.block)
            z = torch.addcmul(x, metric[0] if metric else d, (u * self._along(bucket.block)).to(x.dtype))
            yield bucket, x, _prox(z, self._psi[bucket.block], cap * metric[1] if metric else cap)

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass."""
        for bucket, x, y in self._written(u):
            y = masked(relaxed(x, y, s), x, ok, self.cap(bucket.block)).to(bucket.xs[0].dtype)
            spread(y, bucket.xs)


def _buckets(blocks: Sequence[Block], size: int) -> Iterator[Bucket]:
    """The tensors of all blocks in buckets of at most `size` entries."""
    for i, block in enumerate(blocks):
        metric = (block.along, block.metrics) if block.in_metric else ()
        for xs, *others in bundles((block.params, block.slopes, *metric), size):
            yield Bucket(i, xs, others)


def _products(
    x: Tensor,
    d: Tensor,
    steps: Tensor,
    psi: Scalar | Prox,
    alpha: Tensor | float,
    e: Tensor | None = None,
    inverse: Tensor | float = 1.0,
) -> Tensor:
    """<d, y - x> for each of the steps, a column; in a metric along e = D^-1 d, with D^-1 for each entry."""
    z = torch.addcmul(x, d if e is None else e, steps)  # one row per step
    y = _prox(z, psi, alpha if e is None else alpha * inverse)
    return (y.sub_(x) if isinstance(psi, Scalar) else y - x) @ d


def _prox(z: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """The prox, in the memory of z if psi is known; z itself where alpha is 0."""
    if not isinstance(psi, Scalar):
        y: Tensor = psi.prox(z, stepping(alpha))
        return torch.where(alpha == 0, z, y) if isinstance(alpha, Tensor) else y
    if psi.l1:
        z = _shrink(z, alpha * psi.l1)
    if psi.l2:
        z.div_(1 + alpha * psi.l2)
    return z.clamp_(psi.lower, psi.upper) if psi.bounded else z


def _shrink(z: Tensor, threshold: Tensor | float) -> Tensor:
    """Soft thresholding in the memory of z; with a threshold on the device in twice as much."""
    if isinstance(threshold, Tensor):
        return z.sub_(z.clamp(-threshold, threshold))
    if torch.compiler.is_compiling():
        return torch.nn.functional.softshrink(z, threshold)
    torch.ops.aten.softshrink.out(z, threshold, out=z)
    return z


def _added(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].to(dtype) if len(parts) == 1 else torch.stack(list(parts)).sum(0, dtype=dtype)
