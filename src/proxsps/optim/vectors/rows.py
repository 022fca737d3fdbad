"""Blocks whose regulariser depends only on the norms of rows: matrices of rows, and heights from three sums per row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.core.model import RowSums, row_heights, row_values
from proxsps.optim.blocks import Block
from proxsps.optim.lists import join, spread
from proxsps.optim.vectors.lots import Lot, Step, resting, wide
from proxsps.regularizers.structure import Scalar


@dataclass
class RowStack(Lot):
    """Tensors of one block whose rows have one length, as matrices with one row for each group of entries."""

    order: tuple[int, ...] | None  # dims of tensors of one shape: tensor, counted dims, normed dims; None: in order
    length: int
    psi: Scalar
    fresh = True

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.size // self.length

    def gather(self, tensors: Sequence[Tensor], exact: bool = False) -> Tensor:
        """Tensors of one dtype one below the other; a view of a single tensor with rows in order."""
        if self.order is None:
            return wide(join(tensors).view(-1, self.length), exact)
        stacked = tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
        return wide(stacked.permute(self.order).reshape(-1, self.length), exact)

    def pair(self) -> Tensor:
        """x and d, in few operations: (2, rows, length)."""
        xs, ds = self.columns[:2]
        if xs[0].dtype != ds[0].dtype:
            return torch.stack([self.gather(xs), self.gather(ds)])
        return self.gather([*xs, *ds]).view(2, -1, self.length)

    def vector(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix in the order of the tensors of a column."""
        if self.order is None:
            return matrix.reshape(-1)
        shape = (len(self.columns[0]), *self.columns[0][0].shape)
        moved = matrix.view([shape[d] for d in self.order])
        return moved.permute(sorted(range(len(self.order)), key=self.order.__getitem__)).reshape(-1)

    def scatter(self, y: Tensor, tensors: list[Tensor]) -> None:
        """From a matrix."""
        spread(self.vector(y).to(tensors[0].dtype), tensors)

    def prox(self, z: Tensor, step: Step) -> Tensor:
        """Each row times its factor, whose norm is taken from the row itself: differences of sums may cancel."""
        norm = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min_(torch.finfo(z.dtype).tiny)
        return z.mul_(self.psi.prox(norm, step).div_(norm))


def row_stacks(block: Block, place: int, columns: Sequence[Sequence[Tensor]], size: float) -> Iterator[RowStack]:
    """The tensors of a block by the length of their rows, and by shape if these are not in order.

    Args:
        block: the block.
        place: its position.
        columns: lists of its tensors: parameters, slopes and averages.
        size: entries of a stack at most, where tensors can be cut between rows.
    """
    found: dict[object, RowStack] = {}
    for i, (x, rows) in enumerate(zip(block.params, block.rows, strict=True)):
        if x.numel() == 0:
            continue
        ndim = x.dim()
        normed = range(ndim) if rows.dims is None else sorted(dim % ndim for dim in rows.dims)
        counted = [dim for dim in range(ndim) if dim not in normed]
        length = math.prod([x.shape[dim] for dim in normed])  # a list, which compilers can trace
        ordered = [*counted, *normed] == list(range(ndim))
        order = None if ordered else (0, *(dim + 1 for dim in counted), *(dim + 1 for dim in normed))
        own = [tensors[i] for tensors in columns]
        pieces: Any = [own]
        if x.numel() > size and counted:
            most = max(1, int(size * x.shape[counted[0]]) // x.numel())
            pieces = zip(*(t.split(most, counted[0]) for t in own), strict=True)
        for piece in pieces:
            dtypes = tuple([t.dtype for t in piece])
            key = length, dtypes, rows.psi, None if ordered else (order, piece[0].shape)
            if key in found and found[key].size + piece[0].numel() > size:
                yield found.pop(key)
            if key not in found:
                found[key] = RowStack(place, [[] for _ in piece], order, length, resting(rows.psi, block.alpha))
            for tensors, t in zip(found[key].columns, piece, strict=True):
                tensors.append(t)
    yield from found.values()


class RowHeights:
    """Heights of blocks from the sums of their rows.

    Args:
        sums: the sums, row after row of all stacks.
        stacks: the stacks, block after block.
        blocks: how many blocks there are.
    """

    def __init__(self, sums: RowSums, stacks: Sequence[RowStack], blocks: int) -> None:
        self.sums, self.counts = sums, [stack.rows for stack in stacks]
        owners = [stack.block for stack in stacks]
        self._lengths = [sum([n for j, n in zip(owners, self.counts, strict=True) if j == i]) for i in range(blocks)]
        psi = [self._by_row(column, self.counts) for column in zip(*(stack.psi for stack in stacks), strict=True)]
        if isinstance(psi[2], Tensor) != isinstance(psi[3], Tensor):  # torch clips to two numbers or to two tensors
            psi[2:] = [sums.d_sq.new_full((), bound) if isinstance(bound, float) else bound for bound in psi[2:]]
        self.psi = Scalar(*psi)
        self._caps: tuple[list[Any], Any] = ([], None)  # of the blocks, and by row

    def _by_row(self, values: Sequence[Tensor | float], counts: Sequence[int]) -> Any:
        """A number where all are equal, else one entry per row."""
        first, like = values[0], self.sums.d_sq
        if all([value is first or (isinstance(value, float) and value == first) for value in values]):
            return first
        parts = zip(values, counts, strict=True)
        return torch.cat([v.expand(n) if isinstance(v, Tensor) else like.new_full((n,), v) for v, n in parts])

    def by_block(self) -> list[tuple[Tensor, Tensor]]:
        """||d||^2 and <d, x> of each block."""
        rows = zip(self.sums.d_sq.split(self._lengths), self.sums.d_dot_x.split(self._lengths), strict=True)
        return [(d_sq.sum(), d_dot_x.sum()) for d_sq, d_dot_x in rows]

    def alpha(self, caps: Sequence[Any], reach: Array | float) -> Any:
        """Caps of blocks times `reach`, by row; they are spread over the rows only when they are new."""
        if list(map(id, caps)) != list(map(id, self._caps[0])):
            self._caps = list(caps), self._by_row(caps, self._lengths)
        return times(reach, self._caps[1])

    def heights(self, caps: Sequence[Any], u: Tensor, reach: Array | float = 1.0) -> Array:
        """sum <d, y(u) - x> at the points u, where caps are those of the blocks times `reach`."""
        own = reach[:, None] if isinstance(reach, Tensor) and reach.ndim else reach
        return row_values(self.sums, self.psi, self.alpha(caps, own), u)

    def with_slopes(self, caps: Sequence[Any], u: Tensor) -> tuple[Array, Array]:
        """The same with derivatives, in more operations."""
        return row_heights(self.sums, self.psi, self.alpha(caps, 1.0), u)
