"""Blocks whose regulariser depends only on the norms of rows: three sums per row, and one write.

On a device all rows are processed at once, in few operations. On the host tensors are joined, or cut between rows, into
stacks that fit into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.core.model import RowSums, row_values
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.refine import POINTS
from proxsps.optim.lists import join, spread_all
from proxsps.optim.vectors.searched import Floats, Searched, moved, per_point, resting, written
from proxsps.regularizers.structure import Scalar

LADDER = 256  # points of the first round if there are only rows: their three sums are few numbers
NUMBERS = 1 << 20  # limit on points times rows of a round
SLICE = 1 << 16  # entries that are processed at a time on the host


class RowStack(NamedTuple):
    """Tensors of one block whose rows have one length, as matrices with one row for each group of entries."""

    block: int
    xs: list[Tensor]
    ds: list[Tensor]
    order: tuple[int, ...] | None  # dims of tensors of one shape: tensor, counted dims, normed dims; None: in order
    length: int
    psi: Scalar

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum([x.numel() for x in self.xs]) // self.length

    def matrices(self, numbers: Numbers) -> Tensor:
        """x and d stacked: (2, rows, length)."""
        if self.xs[0].dtype != self.ds[0].dtype:
            return torch.stack([numbers.entries(self._matrix(ts)) for ts in (self.xs, self.ds)])
        return numbers.entries(self._matrix([*self.xs, *self.ds])).view(2, -1, self.length)

    def _matrix(self, tensors: list[Tensor]) -> Tensor:
        """Tensors of one dtype one below the other."""
        if self.order is None:
            return join(tensors).view(-1, self.length)
        stacked = tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
        return stacked.permute(self.order).reshape(-1, self.length)

    def vector(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix in the order of the tensors."""
        if self.order is None:
            return matrix.reshape(-1)
        shape = (len(self.xs), *self.xs[0].shape)
        moved = matrix.view([shape[d] for d in self.order])
        return moved.permute(sorted(range(len(self.order)), key=self.order.__getitem__)).reshape(-1)


def row_stacks(block: Block, place: int, size: float) -> Iterator[RowStack]:
    """The tensors of a block by the length of their rows, and by shape if these are not in order.

    Args:
        block: the block.
        place: its position.
        size: entries of a stack at most, where tensors can be cut.
    """
    found: dict[object, RowStack] = {}
    for x, d, rows in zip(block.params, block.slopes, block.rows, strict=True):
        if x.numel() == 0:
            continue
        ndim = x.dim()
        normed = range(ndim) if rows.dims is None else sorted(dim % ndim for dim in rows.dims)
        counted = [dim for dim in range(ndim) if dim not in normed]
        length = math.prod([x.shape[dim] for dim in normed])  # a list, which compilers can trace
        ordered = [*counted, *normed] == list(range(ndim))
        order = None if ordered else (0, *(dim + 1 for dim in counted), *(dim + 1 for dim in normed))
        pieces = [(x, d)]
        if x.numel() > size and counted:
            most = max(1, int(size * x.shape[counted[0]]) // x.numel())
            pieces = list(zip(x.split(most, counted[0]), d.split(most, counted[0]), strict=True))
        for own_x, own_d in pieces:
            key = length, x.dtype, d.dtype, rows.psi, None if ordered else (order, own_x.shape)
            if key in found and sum([t.numel() for t in found[key].xs]) + own_x.numel() > size:
                yield found.pop(key)
            if key not in found:
                found[key] = RowStack(place, [], [], order, length, resting(rows.psi, block.alpha))
            found[key].xs.append(own_x)
            found[key].ds.append(own_d)
    yield from found.values()


class Rows(Searched):
    """Blocks whose regulariser depends on rows only through their norms."""

    host_points = 3

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], scaled: bool) -> None:
        super().__init__(numbers, blocks, scaled)
        size = SLICE if numbers.host else math.inf
        self._stacks = [stack for i, block in enumerate(blocks) for stack in row_stacks(block, i, size)]
        self._counts = [stack.rows for stack in self._stacks]
        counts = list(zip(self._stacks, self._counts, strict=True))
        self._lengths = [sum([count for stack, count in counts if stack.block == i]) for i in range(len(blocks))]
        self._caps: tuple[list[Any], Any] = ([], None)  # of the blocks, and by row

    def sums(self) -> list[Sequence[Tensor]]:
        """Three sums per row, kept for the search, and added up over each block."""
        wide = self.numbers.dtype
        norms, dots = [], []
        for stack in self._stacks:
            x, d = both = stack.matrices(self.numbers)
            norms.append(torch.linalg.vector_norm(both, dim=2, dtype=wide))
            # On the host, a step whose numbers need doubles has them.
            dots.append(torch.linalg.vecdot(x, d).to(wide) if self.numbers.host else (x.to(wide) * d).sum(1))
        x_sq, d_sq = torch.cat(norms, dim=1).square()
        self._rows = RowSums(x_sq, torch.cat(dots), d_sq)
        self.points = max(POINTS, min(LADDER, NUMBERS // len(d_sq)))
        psi = [
            self._by_row(column, self._counts) for column in zip(*(stack.psi for stack in self._stacks), strict=True)
        ]
        if isinstance(psi[2], Tensor) != isinstance(psi[3], Tensor):  # torch clips to two numbers or to two tensors
            psi[2:] = [d_sq.new_full((), bound) if isinstance(bound, float) else bound for bound in psi[2:]]
        self._psi = Scalar(*psi)
        parts = zip(d_sq.split(self._lengths), self._rows.d_dot_x.split(self._lengths), strict=True)
        return [[part.sum() for part in own] for own in parts]

    def _by_row(self, values: Sequence[Tensor | float], counts: Sequence[int]) -> Any:
        """A number where all are equal, else one entry per row."""
        first, like = values[0], self._rows.d_sq
        if all([value is first or (isinstance(value, float) and value == first) for value in values]):
            return first
        parts = zip(values, counts, strict=True)
        return torch.cat([v.expand(n) if isinstance(v, Tensor) else like.new_full((n,), v) for v, n in parts])

    def _alpha(self, reach: Array | float) -> Any:
        """The caps by row; those of the blocks are spread over the rows only when they are new."""
        caps = [block.alpha for block in self.blocks]
        if [*map(id, caps)] != [*map(id, self._caps[0])]:
            self._caps = caps, self._by_row(caps, self._lengths)
        return times(reach, self._caps[1])

    def heights(self, u: Array, reach: Array | float) -> Array:
        """From the sums of the rows."""
        return row_values(self._rows, self._psi, self._alpha(reach[:, None] if per_point(reach) else reach), u)

    def host_heights(self, u: Floats, reach: Floats, slopes: bool) -> tuple[list[float], list[float]]:
        """The same on numbers; the search needs no slopes, because points cost next to nothing."""
        h = self.heights(*(torch.tensor(numbers, dtype=self.numbers.dtype) for numbers in (u, reach)))
        return h.tolist(), [math.nan] * len(u)

    def write(self, u: Array | float, reach: Array | float, ok: Array | bool) -> None:
        """Each row times its factor; on the host stack by stack, else all of them in few operations."""
        caps = [times(reach, block.alpha) for block in self.blocks]
        if not self.numbers.host:
            self._write(self._stacks, self._psi, self._alpha(reach), caps, u, ok)
            return
        for stack in self._stacks:
            self._write([stack], stack.psi, caps[stack.block], caps, u, ok)

    def _write(
        self, stacks: Sequence[RowStack], psi: Scalar, alpha: Any, caps: Sequence[Any], u: Any, ok: Array | bool
    ) -> None:
        xs, zs = [], []
        steps = [u * -cap for cap in caps]
        for stack in stacks:
            x, d = stack.matrices(self.numbers)
            xs.append(x)
            zs.append(moved(x, d, steps[stack.block]))
        # The norm is taken from the row itself: differences of sums may cancel.
        norms = torch.cat([torch.linalg.vector_norm(z, dim=1, dtype=self.numbers.dtype) for z in zs])
        norms = norms.clamp(torch.finfo(self.numbers.dtype).tiny)
        factors = (psi.prox(norms, alpha) / norms).split([len(z) for z in zs])
        vectors = []
        for stack, x, z, factor in zip(stacks, xs, zs, factors, strict=True):
            y = z * factor.to(z.dtype)[:, None]
            vectors.append(stack.vector(written(x, y, ok, caps[stack.block])))
        spread_all(vectors, [stack.xs for stack in stacks])
