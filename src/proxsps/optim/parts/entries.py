"""Blocks whose regulariser acts on each entry, by torch alone on the host.

Entries are processed in buckets: slices of long tensors, or short tensors joined. A bucket fits into the cache, so that
intermediate results never reach memory.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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

BUCKET = 1 << 18  # entries: few enough for the cache, and enough that the time of calls does not matter
MANY = 1 << 20  # entries from which on only the first evaluation of a search has a slope: then secants are enough
KEPT = 16  # buckets of joined tensors that are kept from pass to pass: 32 MB in f32
SHORT = 1 << 10  # entries below which a tensor is left out of a sample
SAMPLE = 16  # one bucket in 16 shows how large the products of entries are


class Slices(Protocol):
    """Slices of the tensors of one block that are passed over together."""

    @property
    def block(self) -> int:
        """The place of the block."""

    @property
    def xs(self) -> list[Tensor]:
        """The slices of the parameters."""


B = TypeVar("B", bound=Slices)


class Bucket(NamedTuple):
    """Slices of parameters and slopes."""

    block: int
    xs: list[Tensor]
    ds: list[Tensor]

    def vectors(self) -> tuple[Tensor, Tensor]:
        """All entries of x and of d as vectors, in at least f32."""
        return widened(join(self.xs)), widened(join(self.ds))


def buckets(params: Sequence[Tensor], slopes: Sequence[Tensor], place: int, size: int) -> Iterator[Bucket]:
    """The tensors of a block in buckets of at most `size` entries, each of one dtype."""
    for xs, ds in bundles((params, slopes), size):
        yield Bucket(place, xs, ds)


def bundles(columns: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[list[Tensor]]]:
    """Lists of tensors, cut in the same way: parts of long tensors, short tensors together, at most `size` entries."""
    found: list[tuple[Tensor, ...]] = []
    room = size
    for tensors in zip(*columns, strict=True):
        length = tensors[0].numel()
        if found and (length > room or any([t.dtype != f.dtype for t, f in zip(tensors, found[0], strict=True)])):
            yield list(map(list, zip(*found, strict=True)))
            found, room = [], size
        if length > size:
            yield from ([[part] for part in parts] for parts in _cut(tensors, size))
        elif length:
            found.append(tensors)
            room -= length
    if found:
        yield list(map(list, zip(*found, strict=True)))


def _cut(tensors: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of long tensors, cut in the same way into parts of at most `size` entries."""
    x = tensors[0]
    if all([t.is_contiguous() for t in tensors]):
        yield from zip(*(t.view(-1).split(size) for t in tensors), strict=True)
        return
    # As a vector, this tensor may be a copy, and a write to a copy is lost.
    dim = max(range(x.dim()), key=x.shape.__getitem__)
    length = max(1, size * x.shape[dim] // x.numel())
    for parts in zip(*(t.split(length, dim) for t in tensors), strict=True):
        if parts[0].numel() > size:
            yield from _cut(parts, size)
        else:
            yield parts


class EntriesInBuckets(Curve, Generic[B]):
    """Entries by torch operations on the host, for any kind of bucket.

    Args:
        numbers: the numbers of the step.
        blocks: the blocks.
        places: their positions among all blocks.
        structures: the structure of each block's regulariser.
        exact: compute in doubles, because squares leave the range of f32.
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
        self._buckets = [bucket for i, block in enumerate(blocks) for bucket in self._cut(block, i)]
        self._psi = [own.psi for own in structures]
        self._evaluated = False
        self._sample: list[B] | None = None
        self._known_dots: dict[int, tuple[float, float]] = {}
        self._joined: dict[int, Any] = {}  # what `_vectors` keeps of a bucket
        self._memory: dict[object, list[Tensor]] = {}

    @abstractmethod
    def _cut(self, block: Block, place: int) -> Iterator[B]:
        """The buckets of a block."""

    @abstractmethod
    def _cut_sample(self, block: Block, place: int, every: int) -> Iterator[B]:
        """The first part of each tensor of a block that is not short."""

    @abstractmethod
    def _vectors(self, chosen: Sequence[B] | None = None) -> Iterator[tuple[B, Tensor, Tensor]]:
        """Each bucket, or each of the chosen ones, with x and d as vectors."""

    def _room(self, x: Tensor) -> list[Tensor]:
        """Two vectors of memory that is used for one bucket after the other."""
        if x.dtype not in self._memory:
            self._memory[x.dtype] = [torch.empty(min(BUCKET, self.entries), dtype=x.dtype) for _ in range(2)]
        return [part if part.numel() == x.numel() else part[: x.numel()] for part in self._memory[x.dtype]]

    def sums(self, points: bool) -> Array:
        """One pass, which also computes h at the points of `ahead`."""
        sums, heights, slopes = np.zeros((3, len(self.blocks))), *np.zeros((2, len(self.ahead)))
        self._products = 0.0
        seen = range(0, len(self._buckets), min(SAMPLE, len(self._buckets)))
        for i, (bucket, x, d) in enumerate(self._vectors()):
            sums[1::-1, bucket.block] += self._dots(bucket, x, d)  # longer ones would lose digits of f32
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
        """From the first entries of each tensor that is not short."""
        chosen, share = self._sampled_buckets(every)
        h, slope = self._pass(u, np.zeros_like(u), chosen)
        return share * h, share * slope

    def _sampled_buckets(self, every: int) -> tuple[Sequence[B] | None, float]:
        """Buckets of a sample, and the factor for sums over them; None for all buckets if there is no sample."""
        if self._sample is None:
            self._sample = [b for i, block in enumerate(self.blocks) for b in self._cut_sample(block, i, every)]
        if not self._sample:
            return None, 1.0
        return self._sample, self.entries / sum(x.numel() for bucket in self._sample for x in bucket.xs)

    def _pass(self, u: Array, slopes: Array | None, chosen: Sequence[B] | None = None) -> tuple[Array, Array]:
        """h and its slope at the points, from all buckets or some."""
        heights = np.zeros_like(u)
        for bucket, x, d in self._vectors(chosen):
            self._add(bucket, x, d, u.tolist(), heights, slopes)
        return heights, np.full_like(u, math.nan) if slopes is None else slopes

    def _add(self, bucket: B, x: Tensor, d: Tensor, points: list[float], heights: Array, slopes: Array | None) -> None:
        """Add the contribution of a bucket to h and h' at the points."""
        alpha, psi = self.cap(bucket.block), self._psi[bucket.block]
        evaluate: Callable[..., tuple[float, float]] = _plain
        dots: tuple[float, ...] = ()
        if isinstance(psi, Scalar):
            evaluate, dots = (_bounded, ()) if psi.bounded else (_shrunk, self._dots(bucket, x, d)[:1])
        for i, u in enumerate(points):
            h, bend = evaluate(x, d, u * alpha, psi, alpha, slopes is not None, *self._room(x), *dots)
            heights[i] += h
            if slopes is not None:
                slopes[i] -= alpha * bend

    def _dots(self, bucket: B, x: Tensor, d: Tensor) -> tuple[float, float]:
        """<d, x> and ||d||^2 of a bucket, calculated once."""
        key = id(bucket)
        if key not in self._known_dots:  # two dots read d once from memory
            self._known_dots[key] = torch.dot(d, x).item(), torch.dot(d, d).item()
        return self._known_dots[key]

    def products_sq(self) -> Array:
        """From some of the buckets."""
        return np.float64(self._products)

    def moves_sq(self, u: Array) -> Array:
        """One pass."""
        return self.numbers.total(
            [(self._point(bucket, x, d, u) - x).square_().sum() for bucket, x, d in self._vectors()]
        )

    def _point(self, bucket: B, x: Tensor, d: Tensor, u: Array, out: Tensor | None = None) -> Tensor:
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


class EntriesOfTensors(EntriesInBuckets[Bucket]):
    """Entries with slopes that are in memory."""

    _joined: dict[int, tuple[Tensor, Tensor]]

    def _cut(self, block: Block, place: int) -> Iterator[Bucket]:
        yield from buckets(block.params, block.slopes, place, BUCKET)

    def _cut_sample(self, block: Block, place: int, every: int) -> Iterator[Bucket]:
        chosen = [i for i, x in enumerate(block.params) if x.numel() >= SHORT]
        xs, ds = ([ts[i].reshape(-1)[: ts[i].numel() // every] for i in chosen] for ts in (block.params, block.slopes))
        yield from buckets(xs, ds, place, BUCKET)

    def _vectors(self, chosen: Sequence[Bucket] | None = None) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        for bucket in self._buckets if chosen is None else chosen:
            x, d = self._joined.get(id(bucket)) or bucket.vectors()
            if len(bucket.xs) > 1 and len(self._joined) < KEPT:
                self._joined[id(bucket)] = x, d
            yield (bucket, x.double(), d.double()) if self._exact else (bucket, x, d)


def _plain(
    x: Tensor, d: Tensor, tau: float, psi: Prox, alpha: float, sloped: bool, z: Tensor, room: Tensor
) -> tuple[float, float]:
    """<d, y - x> and <d, y'> for any function of an entry."""
    torch.add(x, d, alpha=-tau, out=z)
    y = psi.prox(z, alpha)
    tangent = psi.prox_jvp(z, y, d, alpha) if sloped else None
    bend = math.nan if tangent is None else torch.dot(d, tangent).item()
    return torch.dot(d, torch.sub(y, x, out=room)).item(), bend


def _bounded(
    x: Tensor, d: Tensor, tau: float, psi: Scalar, alpha: float, sloped: bool, z: Tensor, room: Tensor
) -> tuple[float, float]:
    """The same for functions of the family `Scalar`, with bounds."""
    torch.add(x, d, alpha=-tau, out=z)
    bend = torch.dot(_tangent(z, d, psi, alpha, room), d).item() / (1 + alpha * psi.l2) if sloped else 0.0
    return torch.dot(d, torch.sub(_prox(z, psi, alpha, room), x, out=room)).item(), bend


def _shrunk(
    x: Tensor,
    d: Tensor,
    tau: float,
    psi: Scalar,
    alpha: float,
    sloped: bool,
    z: Tensor,
    room: Tensor,
    d_dot_x: float,
) -> tuple[float, float]:
    """The same without bounds.

    Then y = k s, s being z with the threshold taken off, so that y - x = k (s - x) - (1 - k) x. Each difference is
    taken entry by entry: an entry that the l1 norm holds at 0 adds nothing, however large its slope is.
    """
    torch.add(x, d, alpha=-tau, out=z)
    keep = 1 / (1 + alpha * psi.l2)
    bend = keep * torch.dot(_tangent(z, d, psi, alpha, room), d).item() if sloped else 0.0
    s = torch.ops.aten.softshrink.out(z, _threshold(z, psi, alpha), out=room)
    return keep * torch.dot(d, torch.sub(s, x, out=room)).item() - (1 - keep) * d_dot_x, bend


def _threshold(z: Tensor, psi: Scalar, alpha: float) -> float:
    """What the l1 norm takes off each entry; at most the largest number of the dtype, beyond which torch raises."""
    return min(alpha * psi.l1, torch.finfo(z.dtype).max)


def _tangent(z: Tensor, d: Tensor, psi: Scalar, alpha: float, out: Tensor) -> Tensor:
    """d where the prox moves with z, else 0; functions of torch's backward passes select the entries in one pass."""
    if psi.l1 or not psi.bounded:
        d = torch.ops.aten.softshrink_backward.grad_input(d, z, _threshold(z, psi, alpha), grad_input=out)
    if not psi.bounded:
        return d
    if psi.l1:
        z = torch.nn.functional.softshrink(z, _threshold(z, psi, alpha))
    scale = 1 + alpha * psi.l2
    low, high = psi.lower * scale, psi.upper * scale
    torch.ops.aten.hardtanh_backward.grad_input(d, z, low, high, grad_input=out)
    return out


def _prox(z: Tensor, psi: Scalar, alpha: float, out: Tensor) -> Tensor:
    """The prox, in `out`; the memory of z is used for intermediate results."""
    last = not (psi.l2 or psi.bounded)
    if psi.l1 or last:  # a threshold of 0 copies z
        torch.ops.aten.softshrink.out(z, _threshold(z, psi, alpha), out=out if last else z)
    if psi.l2:
        torch.div(z, 1 + alpha * psi.l2, out=z if psi.bounded else out)
    return torch.clamp(z, psi.lower, psi.upper, out=out) if psi.bounded else out
