"""Entries and rows on a device: few launches, bounded memory, and no number that is read back.

Tensors are joined into few long ones. What a search needs of them is h alone, at the points of a round in one go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.model import RowSums, row_moves_sq, row_values
from proxsps.optim.blocks import Block
from proxsps.optim.lists import join, spread, spread_all
from proxsps.optim.numbers import Device
from proxsps.optim.parts.base import Curve, masked, relaxed, resting, stepping
from proxsps.optim.parts.entries import Bucket, buckets
from proxsps.optim.passes import scale_of, widened
from proxsps.optim.refine import POINTS
from proxsps.regularizers.structure import Entries, Prox, Rows, Scalar

ROOM = 32 << 20  # bytes that the search over entries may use, or twice those of the parameters where they have more
LADDER = 256  # points of the first round where only rows are searched over: their three sums are few numbers
NUMBERS = 1 << 20  # of all points and rows of a round


class DeviceEntries(Curve):
    """Blocks whose regulariser acts on each entry.

    Each round of the search needs one vector of entries for each of its points. So it goes over pieces of the entries
    that leave room for that, and where there is room for it too, joined copies of x and d are kept for all rounds.
    """

    points = POINTS

    def __init__(
        self, numbers: Device, blocks: Sequence[Block], places: Sequence[int], structures: Sequence[Entries]
    ) -> None:
        super().__init__(numbers, blocks, places)
        params = [x for block in blocks for x in block.params]
        entries = sum(x.numel() for x in params)
        self._dtype = torch.float64 if any(x.dtype is torch.float64 for x in params) else torch.float32
        room = max(2 * sum(x.numel() * x.dtype.itemsize for x in params), ROOM) // self._dtype.itemsize
        rows = POINTS * (2 if any(block.scaled or isinstance(block.alpha, Tensor) for block in blocks) else 1)
        self._piece, loose = (room - 2 * entries) // rows, room // (rows + 2)
        # Seven operations over a piece that has to be joined first, four over one that is there.
        self._keeps = self._piece > 0 and math.ceil(entries / self._piece) <= 2 * math.ceil(entries / loose)
        size = entries if self._keeps else loose
        self._buckets = [b for i, block in enumerate(blocks) for b in buckets(block.params, block.slopes, i, size)]
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._factors: tuple[Array | float, list[Array]] | None = None
        self._psi = [
            resting(own.psi, block.alpha) if isinstance(own.psi, Scalar) else own.psi
            for own, block in zip(structures, blocks, strict=True)
        ]

    def sums(self, points: bool) -> Array:
        """The sums, in doubles; slopes are divided by their common norm, so that products stay in the range of f32."""
        wide = self.numbers.dtype
        vectors = [bucket.vectors() for bucket in self._buckets] if self._keeps else []
        slopes = (d for _, d in vectors) if self._keeps else (bucket.vectors()[1] for bucket in self._buckets)
        norms = [torch.linalg.vector_norm(d, dtype=wide) for d in slopes]
        self._scale = scale_of(norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))
        self._factors = None
        self._kept = [(x, d / self._scale) for x, d in vectors]
        dots = [torch.dot(d, x) for _, x, d in self._vectors()]
        columns = []
        for i in range(len(self.blocks)):
            own = [j for j, bucket in enumerate(self._buckets) if bucket.block == i]
            columns += [
                self.numbers.total([norms[j].square() for j in own]),
                self.numbers.total([dots[j] for j in own]) * self._scale,
            ]
        zeros = torch.zeros(len(self.blocks), 1, dtype=wide, device=self._scale.device)
        return torch.cat([torch.stack(columns).reshape(-1, 2), zeros], dim=1).T

    def _vectors(self) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        """Each bucket with x and the scaled d."""
        for i, bucket in enumerate(self._buckets):
            if self._keeps:
                yield bucket, *self._kept[i]
            else:
                x, d = bucket.vectors()
                d = d / self._scale  # not in place: it may be a view of the gradient
                yield bucket, x, d

    def _pieces(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Pieces for which there is room at all points of a round."""
        for bucket, x, d in self._vectors():
            size = self._piece if self._keeps else max(1, x.numel())
            for pair in zip(x.split(size), d.split(size), strict=True):
                yield bucket.block, *pair

    def _heights(self, u: Array) -> tuple[Array, None]:
        blocks = range(len(self.blocks))
        return self._sums_at([u * self._along(i) for i in blocks], [stepping(self.cap(i)) for i in blocks]), None

    def ray_heights(self, s: Array) -> Array:
        """All points in one pass, where the prox takes one step size for each of them."""
        if not all(isinstance(psi, Scalar) for psi in self._psi):
            return super().ray_heights(s)
        caps = [s * block.alpha for block in self.blocks]
        sizes = [stepping(cap.to(self._dtype))[:, None] for cap in caps]
        return self._sums_at([cap * -self._scale for cap in caps], sizes)

    def _along(self, i: int) -> Array:
        """The factor on the scaled slopes of a block at u = 1."""
        if self._factors is None or self._factors[0] is not self.reach:
            self._factors = (self.reach, [-self._scale * self.cap(j) for j in range(len(self.blocks))])
        return self._factors[1][i]

    def _sums_at(self, steps: Sequence[Array], sizes: Sequence[Tensor | float]) -> Array:
        """sum <d, y - x> at several points: from factors on the scaled slopes and step sizes of the prox, by block."""
        columns = [step.to(self._dtype)[:, None] for step in steps]
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for i, x, d in self._pieces():
            found[i].append(_products(x, d, columns[i].to(x.dtype), self._psi[i], sizes[i]))
        own = [_added(parts, steps[0].dtype) for parts in found if parts]
        return self._scale * sum(own[1:], start=own[0])

    def products_sq(self) -> Array:
        """Not needed where a search stops by rounds."""
        return self.numbers.scalar(0.0)

    def moves_sq(self, u: Array) -> Array:
        """One pass."""
        moves = [torch.linalg.vector_norm(y - x, dtype=self.numbers.dtype) for _, x, y in self._written(u)]
        return torch.stack(moves).square().sum()

    def _written(self, u: Array) -> Iterator[tuple[Bucket, Tensor, Tensor]]:
        """x and y(u) of each bucket."""
        for bucket, x, d in self._vectors():
            cap = self.cap(bucket.block)
            z = torch.addcmul(x, d, (u * self._along(bucket.block)).to(x.dtype))
            yield bucket, x, _prox(z, self._psi[bucket.block], stepping(cap))

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass."""
        for bucket, x, y in self._written(u):
            y = masked(relaxed(x, y, s), x, ok, self.cap(bucket.block)).to(bucket.xs[0].dtype)
            spread(y, bucket.xs)


def _products(x: Tensor, d: Tensor, steps: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """<d, y - x> for each of the steps, a column."""
    z = torch.addcmul(x, d, steps)  # one row per step
    if not isinstance(psi, Scalar):
        moves: Tensor = psi.prox(z, alpha) - x
    else:
        moves = _prox(z, psi, alpha).sub_(x)
    return moves @ d


def _prox(z: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """The prox, in the memory of z where psi is known."""
    if not isinstance(psi, Scalar):
        y: Tensor = psi.prox(z, alpha)
        return y
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


@dataclass
class Stack:
    """Tensors of one block whose rows have one length, as a matrix with one row for each group of entries."""

    block: int
    params: list[Tensor]
    slopes: list[Tensor]
    order: tuple[int, ...] | None  # dims of tensors of one shape: tensor, counted dims, normed dims; None: in order
    length: int
    psi: Scalar

    def matrices(self) -> Tensor:
        """x and d one behind the other, in f32 at least: (2, rows, length)."""
        if self.params[0].dtype != self.slopes[0].dtype:
            return torch.stack([self._matrix(self.params), self._matrix(self.slopes)])
        return self._matrix([*self.params, *self.slopes]).view(2, -1, self.length)

    def _matrix(self, tensors: list[Tensor]) -> Tensor:
        if self.order is None:
            return widened(join(tensors).view(-1, self.length))
        return widened(torch.stack(tensors).permute(self.order).reshape(-1, self.length))

    def vector(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix in the order of the parameters."""
        if self.order is None:
            return matrix.reshape(-1)
        shape = (len(self.params), *self.params[0].shape)
        moved = matrix.view([shape[d] for d in self.order])
        return moved.permute(sorted(range(len(self.order)), key=self.order.__getitem__)).reshape(-1)


def stacks(block: Block, place: int, structures: Sequence[Rows]) -> Iterator[Stack]:
    """The tensors of a block by the length of their rows; those whose rows are not in order by shape as well."""
    found: dict[tuple[object, ...], Stack] = {}
    for x, d, rows in zip(block.params, block.slopes, structures, strict=True):
        if x.numel() == 0:
            continue
        ndim = x.dim()
        normed = range(ndim) if rows.dims is None else sorted(dim % ndim for dim in rows.dims)
        counted = [dim for dim in range(ndim) if dim not in normed]
        length = math.prod([x.shape[dim] for dim in normed])  # a list, which compilers can trace
        ordered = [*counted, *normed] == list(range(ndim))
        order = None if ordered else (0, *(dim + 1 for dim in counted), *(dim + 1 for dim in normed))
        key = (length, x.dtype, d.dtype, rows.psi, None if ordered else (order, x.shape))
        if key not in found:
            found[key] = Stack(place, [], [], order, length, resting(rows.psi, block.alpha))
        found[key].params.append(x)
        found[key].slopes.append(d)
    yield from found.values()


class DeviceRows(Curve):
    """Blocks whose regulariser depends on rows only through their norms: three sums per row are enough."""

    def __init__(
        self, numbers: Device, blocks: Sequence[Block], places: Sequence[int], structures: Sequence[Sequence[Rows]]
    ) -> None:
        super().__init__(numbers, blocks, places)
        pairs = zip(blocks, structures, strict=True)
        self._stacks = [s for i, (block, own) in enumerate(pairs) for s in stacks(block, i, own)]

    def sums(self, points: bool) -> Array:
        """Three sums per row, kept for the search, and added up over each block."""
        wide = self.numbers.dtype
        norms, dots = [], []
        for stack in self._stacks:
            x, d = both = stack.matrices()
            norms.append(torch.linalg.vector_norm(both, dim=2, dtype=wide))
            dots.append((x.to(wide) * d).sum(1))
        x_sq, d_sq = torch.cat(norms, dim=1).square()
        rows = torch.stack([d_sq, torch.cat(dots), x_sq])
        self._counts = [len(part) for part in dots]
        self._rows = RowSums(x_sq, rows[1], d_sq)
        self._constants()
        self.points = max(POINTS, min(LADDER, NUMBERS // len(d_sq)))
        lengths = [0] * len(self.blocks)
        for stack, count in zip(self._stacks, self._counts, strict=True):
            lengths[stack.block] += count
        return torch.stack([part.sum(1) for part in rows.split(lengths, dim=1)], dim=1)

    def _constants(self) -> None:
        """Caps and functions of all rows: numbers where all are equal, else one entry per row."""
        columns: list[Sequence[Tensor | float]] = [[self.blocks[stack.block].alpha for stack in self._stacks]]
        columns += zip(*(stack.psi for stack in self._stacks), strict=True)
        self._alpha, *psi = (self._spread(column) for column in columns)
        self._psi = Scalar(*psi)

    def _spread(self, values: Sequence[Tensor | float]) -> Tensor | float:
        first = values[0]
        if all(value is first or (isinstance(value, float) and value == first) for value in values):
            return first
        like = self._rows.d_sq
        parts = zip(values, self._counts, strict=True)
        return torch.cat([like.new_full((n,), v) if isinstance(v, (int, float)) else v.expand(n) for v, n in parts])

    def _heights(self, u: Array) -> tuple[Array, None]:
        return row_values(self._rows, self._psi, self.scaled(self._alpha), u), None

    def ray_heights(self, s: Array) -> Array:
        """From the sums of the rows."""
        return row_values(self._rows, self._psi, stepping(s[:, None] * self._alpha), torch.ones_like(s))

    def products_sq(self) -> Array:
        """Not needed where a search stops by rounds."""
        return self.numbers.scalar(0.0)

    def moves_sq(self, u: Array) -> Array:
        """By the sums of the rows alone."""
        return row_moves_sq(self._rows, self._psi, self.scaled(self._alpha), u)

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """Each row times its factor, whose norm is taken from the row itself: differences of sums may cancel."""
        xs, zs, norms = [], [], []
        dtypes = [block.params[0].dtype for block in self.blocks]
        steps = [(u * -self.cap(i)).to(torch.promote_types(dtype, torch.float32)) for i, dtype in enumerate(dtypes)]
        for stack in self._stacks:
            x, d = stack.matrices()
            z = torch.addcmul(x, d, steps[stack.block].to(x.dtype))
            xs.append(x)
            zs.append(z)
            norms.append(torch.linalg.vector_norm(z, dim=1, dtype=self.numbers.dtype))
        norm = torch.cat(norms).clamp(torch.finfo(self.numbers.dtype).tiny)
        factors = self._psi.prox(norm, stepping(self.scaled(self._alpha))) / norm
        factors = factors.to(xs[0].dtype).split(self._counts)
        vectors = []
        for stack, x, z, c in zip(self._stacks, xs, zs, factors, strict=True):
            y = relaxed(x, z * c.to(z.dtype)[:, None], s)
            vectors.append(stack.vector(masked(y, x, ok, self.cap(stack.block))))
        spread_all(vectors, [stack.params for stack in self._stacks])
