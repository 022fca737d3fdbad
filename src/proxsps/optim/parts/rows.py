"""Blocks whose regulariser depends only on the norms of rows, on the host without the kernels, in two passes.

Tensors of one shape are stacked, so that hundreds of small tensors take a few calls; a long tensor is not copied, and
is processed in slices that fit into the cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.model import RowSums, row_heights, row_moves_sq, row_ray_heights
from proxsps.optim.blocks import Block
from proxsps.optim.numbers import Numbers
from proxsps.optim.parts.base import Curve, relaxed
from proxsps.optim.passes import widened
from proxsps.regularizers.structure import Rows, Scalar

SLICE = 1 << 16  # entries that are passed over at a time
SMALL = 1 << 15  # entries up to which tensors of one shape are stacked
KEPT = 1 << 20  # entries of stacks that are kept from the first pass to the last


@dataclass
class Stack:
    """Tensors of one shape and block as matrices, one row for each group of entries."""

    block: int
    params: list[Tensor]
    slopes: list[Tensor]
    order: tuple[int, ...]  # dims of a stack: tensor, counted dims, normed dims
    length: int  # entries per row
    rows: int
    psi: Scalar
    matrices: tuple[Tensor, Tensor] | None = None  # parameters and slopes, if they are kept

    def matrix(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors as one matrix; a view of a single tensor where it has the rows in order."""
        x = tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))
        return widened(x.permute(self.order).reshape(self.rows, self.length))

    def tensors(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `matrix`."""
        shape = (len(self.params), *self.params[0].shape)
        moved = matrix.reshape([shape[d] for d in self.order])
        return moved.permute(sorted(range(len(self.order)), key=self.order.__getitem__)).unbind()


def stacks(block: Block, place: int, structures: Sequence[Rows]) -> Iterator[Stack]:
    """The tensors of a block by shape; large tensors alone."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, x in enumerate(block.params):
        alone = i if x.numel() > SMALL else -1
        found[x.shape, x.dtype, alone].append(i)
    for members in found.values():
        first, rows = block.params[members[0]], structures[members[0]]
        ndim = first.dim()
        normed = range(ndim) if rows.dims is None else sorted(d % ndim for d in rows.dims)
        counted = [d for d in range(ndim) if d not in normed]
        length = math.prod(first.shape[d] for d in normed)
        order = (0, *(d + 1 for d in counted), *(d + 1 for d in normed))
        count = len(members) * math.prod(first.shape[d] for d in counted)
        xs, ds = ([part[i] for i in members] for part in (block.params, block.slopes))
        yield Stack(place, xs, ds, order, length, count, rows.psi)


class RowsOfTensors(Curve):
    """Rows by torch operations on the host; `exact` sums up in doubles."""

    def __init__(
        self,
        numbers: Numbers,
        blocks: Sequence[Block],
        places: Sequence[int],
        structures: Sequence[Sequence[Rows]],
        exact: bool = False,
    ) -> None:
        super().__init__(numbers, blocks, places)
        pairs = zip(blocks, structures, strict=True)
        self._stacks = [s for i, (block, own) in enumerate(pairs) for s in stacks(block, i, own)]
        self._exact = exact
        self._room = KEPT

    def sums(self, points: bool) -> Array:
        """Three sums per row, kept for the search, and added up over each block."""
        rows = self._row_sums()
        if not self._exact and not (np.isfinite(rows).all() and rows[0].max(initial=1.0) < 1e30):
            # One row that leaves the range of f32 is enough; tiny rows do not matter beside others.
            self._exact = True
            rows = self._row_sums()
        self._rows = RowSums(*rows)
        self._alpha, self._psi = row_constants(
            [(self.blocks[s.block].alpha, s.psi, s.rows) for s in self._stacks], self._rows.d_sq
        )
        self.points = row_points(len(self._rows.d_sq))
        sums, start = np.zeros((3, len(self.blocks))), 0
        for block, members in groupby(self._stacks, attrgetter("block")):
            end = start + sum(stack.rows for stack in members)
            sums[:, block] = rows[::-1, start:end].sum(axis=1)
            start = end
        return sums

    def _row_sums(self) -> Array:
        """||x||^2, <d, x> and ||d||^2 of each row, (3, rows); squares may be infinite in f32."""
        found = []
        for stack in self._stacks:
            xs, ds = self._matrices(stack)
            wide = self._exact and xs.dtype is not torch.float64
            for x, d in zip(*(self._slices(stack, part) for part in (xs, ds)), strict=True):
                if wide:
                    x, d = x.double(), d.double()
                norms = [torch.linalg.vector_norm(part, dim=1) for part in (x, d)]
                found.append(torch.stack([norms[0], torch.linalg.vecdot(x, d), norms[1]]))
        rows = torch.cat(found, dim=1).double().numpy()
        with np.errstate(over="ignore"):
            rows[::2] **= 2
        return rows

    def _matrices(self, stack: Stack) -> tuple[Tensor, Tensor]:
        """Parameters and slopes of a stack; those of the first pass are kept for the write, copies up to a limit."""
        if stack.matrices is not None:
            return stack.matrices
        found = stack.matrix(stack.params), stack.matrix(stack.slopes)
        sources = stack.params[0], stack.slopes[0]
        copied = any(x.data_ptr() != source.data_ptr() for x, source in zip(found, sources, strict=True))
        if not copied or found[0].numel() <= self._room:
            stack.matrices = found
            self._room -= found[0].numel() * copied
        return found

    @staticmethod
    def _slices(stack: Stack, matrix: Tensor) -> Sequence[Tensor]:
        slices: Sequence[Tensor] = matrix.split(max(1, SLICE // max(1, stack.length)))
        return slices

    def _heights(self, u: Array) -> tuple[Array, Array]:
        return row_heights(self._rows, self._psi, self.scaled(self._alpha), u)

    def ray_heights(self, s: Array, every: int = 1) -> Array:
        """From the sums of the rows."""
        return row_ray_heights(self._rows, self._psi, self._alpha, s)[0]

    def products_sq(self) -> Array:
        """The three sums are rounded once, and h is the same function of them at all u."""
        return self.numbers.scalar(0.0)

    def moves_sq(self, u: Array) -> Array:
        """By the sums of the rows alone."""
        return row_moves_sq(self._rows, self._psi, self.scaled(self._alpha), u)

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """Each row times its factor, whose norm is taken from the row itself: differences of sums may cancel."""
        for stack in self._stacks if ok else ():
            alpha = self.cap(stack.block)
            # Squares of a long move leave the range of f32, and so may thresholds.
            wide = self._exact or alpha * max(float(u) * self._rows.d_sq.max() ** 0.5, stack.psi.l1) > 1e15
            xs, ds = self._matrices(stack)
            for x, d in zip(*(self._slices(stack, part) for part in (xs, ds)), strict=True):
                z = torch.add(x.double() if wide else x, d, alpha=-float(u) * alpha)
                norm = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min_(torch.finfo(z.dtype).tiny)
                factor = stack.psi.prox(norm, alpha).div_(norm)
                if s == 1 and z.dtype == x.dtype:
                    torch.mul(z, factor, out=x)
                else:
                    x.copy_(relaxed(x, z.mul_(factor), s))
            if xs.data_ptr() != stack.params[0].data_ptr():  # a copy, not a view
                torch._foreach_copy_(stack.params, list(stack.tensors(xs)))


def row_stretches(
    blocks: Sequence[Block], structures: Sequence[Sequence[Rows]]
) -> list[tuple[int, Tensor | float, Scalar, int]]:
    """For each tensor in order: its block, the cap and function of its rows, and their number."""
    found = []
    for i, (block, own) in enumerate(zip(blocks, structures, strict=True)):
        for x, rows in zip(block.params, own, strict=True):
            normed = range(x.dim()) if rows.dims is None else {d % x.dim() for d in rows.dims}
            count = math.prod(x.shape[d] for d in range(x.dim()) if d not in normed)  # of empty rows too
            found.append((i, block.alpha, rows.psi, count))
    return found


def row_points(rows: int) -> int:
    """Points of a round of the search: NumPy's calls cost more than the numbers of few rows."""
    return 3 if rows <= 4096 else 1


def row_constants(stretches: Sequence[tuple[Tensor | float, Scalar, int]], like: Array) -> tuple[Array | float, Scalar]:
    """Caps and functions of all rows, from those of stretches of rows: numbers where all are equal, else arrays.

    A stretch has its cap, its function and its number of rows.
    """
    first = stretches[0]
    caps = {id(alpha) if isinstance(alpha, Tensor) else alpha for alpha, *_ in stretches}
    if len(caps) == 1 and all(psi == first[1] for _, psi, *_ in stretches):
        return first[0], first[1]
    xp = array_namespace(like)
    blank, lengths = xp.zeros_like(like[:1]), [rows for _, _, rows in stretches]

    def spread(values: Sequence[Tensor | float]) -> Array:
        return xp.concat([xp.broadcast_to(blank + value, (n,)) for value, n in zip(values, lengths, strict=True)])

    columns = zip(*(psi for _, psi, *_ in stretches), strict=True)
    return spread([alpha for alpha, *_ in stretches]), Scalar(*map(spread, columns))
