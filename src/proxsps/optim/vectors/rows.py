"""Blocks whose regulariser depends only on the norms of rows, by torch on the host: three sums per row, and one write.

Tensors of one shape are stacked, so that hundreds of small tensors take a few calls; a long tensor is not copied, and
is processed in slices that fit into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxsps.core.model import RowSums, row_heights, row_ray_heights
from proxsps.optim.lists import spread
from proxsps.optim.proxes import RowStack, row_stacks
from proxsps.optim.rule import Heights
from proxsps.regularizers.structure import Scalar

SLICE = 1 << 16  # entries that are processed at a time
SMALL = 1 << 15  # entries up to which tensors of one shape are stacked

Floats = Sequence[float]


class RowPart:
    """Rows in the identity metric."""

    curved, mixes, points, entries = True, False, 3, 0

    def __init__(self, plan: Any, places: Sequence[int]) -> None:
        self._plan, self._exact, self._blocks = plan, plan.exact, [plan.blocks[i] for i in places]
        self._stacks: list[RowStack] = []
        for i, block in enumerate(self._blocks):
            held = [[plan.entries_of(block, j, name) for j in range(len(block.params))] for name in plan.averages]
            self._stacks += row_stacks(block, i, [block.params, block.slopes, *held], SMALL)
        counts = [stack.rows for stack in self._stacks]
        self._owners = np.repeat([stack.block for stack in self._stacks], counts).astype(np.int64)
        columns = zip(*(stack.psi for stack in self._stacks), strict=True)
        self._psi = Scalar(*(np.repeat(np.array(column, np.float64), counts) for column in columns))

    def _matrices(self, stack: RowStack) -> tuple[Tensor, Tensor, Tensor]:
        """x, g and the new d."""
        x, g, *held = [stack.matrix(i) for i in range(len(stack.columns))]
        if self._exact:
            x, g, *held = [t.double() for t in (x, g, *held)]
        if not held or self._plan.weight == 1:
            return x, g, g
        return x, g, torch.lerp(held[0], g, self._plan.weight)

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """Three sums per row, kept for the search, and added up over each block; heights at the points u."""
        found, blocks = [], len(self._blocks)
        g_dot_x, g_sq = [0.0] * blocks, [0.0] * blocks
        for stack in self._stacks:
            x, g, d = self._matrices(stack)
            for a, b in _slices(x, d):
                norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in (a, b)]
                found.append(torch.stack([norms[0], torch.linalg.vecdot(a, b).double(), norms[1]]))
            if self._plan.averages:
                g_dot_x[stack.block] += float(torch.sum(g * x, dtype=torch.float64))
                g_sq[stack.block] += float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
        rows = torch.cat(found, dim=1).numpy() if found else np.zeros((3, 0))
        rows[::2] **= 2
        self._rows = RowSums(*rows)
        _, d_dot_x, d_sq = (np.bincount(self._owners, row, blocks).tolist() for row in rows)
        nothing = [0.0] * blocks
        sums = [d_sq, d_dot_x, nothing, g_dot_x, g_sq, nothing]
        return sums, self.heights(alpha, u)

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """From the sums of the rows."""
        if not u:
            return Heights([], [])
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is skipped
            h, slope = row_heights(self._rows, self._psi, np.array(alpha)[self._owners], np.array(u))
        return Heights(h.tolist(), slope.tolist())

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """From the sums of the rows."""
        h, _ = row_ray_heights(self._rows, self._psi, np.array(share)[self._owners], np.array(s))
        return list(h.tolist())

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """Each row times its factor, whose norm is taken from the row itself: differences of sums may cancel."""
        for stack in self._stacks:
            x, _, d = self._matrices(stack)
            cap, out = alpha[stack.block], torch.empty_like(x)
            for a, b, y in _slices(x, d, out) if moves else ():
                z = torch.add(a, b, alpha=-u * cap)
                norm = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min_(torch.finfo(z.dtype).tiny)
                torch.mul(z, stack.psi.prox(norm, cap).div_(norm), out=y)
            if self._plan.averages:
                spread(stack.vector(d), stack.columns[2])
            if moves:
                spread(stack.vector(out), stack.columns[0])


def _slices(*matrices: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matrices, cut in the same way into slices that fit into the cache."""
    return zip(*(matrix.split(max(1, SLICE // matrix.shape[1])) for matrix in matrices), strict=True)
