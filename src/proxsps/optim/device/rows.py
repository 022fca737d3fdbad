"""Blocks whose regulariser depends only on the norms of rows: three sums per row, and one write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.core.model import RowSums, row_values
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.refine import POINTS
from proxsps.optim.device.searched import Searched, per_point, written
from proxsps.optim.lists import spread_all
from proxsps.optim.proxes import RowStack, row_stacks
from proxsps.regularizers.structure import Scalar

LADDER = 256  # points of the first round if there are only rows: their three sums are few numbers
NUMBERS = 1 << 20  # limit on points times rows of a round


class SearchedRows(Searched):
    """Blocks whose regulariser depends on rows only through their norms."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> None:
        super().__init__(numbers, blocks, places, scaled)
        self._stacks = [
            stack for i, block in enumerate(blocks) for stack in row_stacks(block, i, [block.params, block.slopes])
        ]

    def sums(self) -> list[Sequence[Tensor]]:
        """Three sums per row, kept for the search, and added up over each block."""
        wide = self.numbers.dtype
        norms, dots = [], []
        for stack in self._stacks:
            x, d = both = _matrices(stack)
            norms.append(torch.linalg.vector_norm(both, dim=2, dtype=wide))
            dots.append((x.to(wide) * d).sum(1))
        x_sq, d_sq = torch.cat(norms, dim=1).square()
        self._counts = [len(part) for part in dots]
        self._rows = RowSums(x_sq, torch.cat(dots), d_sq)
        self._constants()
        self.points = max(POINTS, min(LADDER, NUMBERS // len(d_sq)))
        counts = [(stack.block, count) for stack, count in zip(self._stacks, self._counts, strict=True)]
        lengths = [sum(count for j, count in counts if j == i) for i in range(len(self.blocks))]
        parts = zip(d_sq.split(lengths), self._rows.d_dot_x.split(lengths), strict=True)
        return [[part.sum() for part in own] for own in parts]

    def _constants(self) -> None:
        """Caps and functions of all rows: numbers where all are equal, else one entry per row."""
        columns: list[Sequence[Tensor | float]] = [[self.blocks[stack.block].alpha for stack in self._stacks]]
        columns += zip(*(stack.psi for stack in self._stacks), strict=True)
        self._alpha, *psi = (self._spread(column) for column in columns)
        if isinstance(psi[2], Tensor) != isinstance(psi[3], Tensor):  # torch clips to two numbers or to two tensors
            psi[2:] = [self._rows.d_sq.new_full((), bound) if isinstance(bound, float) else bound for bound in psi[2:]]
        self._psi = Scalar(*psi)

    def _spread(self, values: Sequence[Tensor | float]) -> Tensor | float:
        first = values[0]
        if all(value is first or (isinstance(value, float) and value == first) for value in values):
            return first
        like = self._rows.d_sq
        parts = zip(values, self._counts, strict=True)
        return torch.cat([like.new_full((n,), v) if isinstance(v, (int, float)) else v.expand(n) for v, n in parts])

    def heights(self, u: Array, reach: Array | float) -> Array:
        """From the sums of the rows."""
        reach = reach[:, None] if per_point(reach) else reach
        return row_values(self._rows, self._psi, times(reach, self._alpha), u)

    def write(self, u: Array, reach: Array | float, ok: Array) -> None:
        """Each row times its factor, whose norm is taken from the row itself: differences of sums may cancel."""
        caps = [times(reach, block.alpha) for block in self.blocks]
        steps = [u * -cap for cap in caps]
        xs, zs = [], []
        for stack in self._stacks:
            x, d = _matrices(stack)
            xs.append(x)
            zs.append(torch.addcmul(x, d, steps[stack.block]))
        norms = torch.cat([torch.linalg.vector_norm(z, dim=1, dtype=self.numbers.dtype) for z in zs])
        norms = norms.clamp(torch.finfo(self.numbers.dtype).tiny)
        factors = (self._psi.prox(norms, times(reach, self._alpha)) / norms).split(self._counts)
        vectors = []
        for stack, x, z, factor in zip(self._stacks, xs, zs, factors, strict=True):
            y = z * factor.to(z.dtype)[:, None]
            vectors.append(stack.vector(written(x, y, ok, caps[stack.block])))
        spread_all(vectors, [stack.columns[0] for stack in self._stacks])


def _matrices(stack: RowStack) -> Tensor:
    """x and d stacked: (2, rows, length)."""
    if len({tensors[0].dtype for tensors in stack.columns}) > 1:
        return torch.stack([stack.matrix(0), stack.matrix(1)])
    return stack.matrix(0, 1).view(2, -1, stack.length)
