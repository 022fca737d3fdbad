"""Rows by the compiled kernels, for dense CPU tensors of f32 or f64 in one memory order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from proxsps.core.array import Array
from proxsps.core.model import RowSums, row_heights, row_moves_sq, row_ray_heights
from proxsps.optim.blocks import UNITS, Block
from proxsps.optim.numbers import Numbers
from proxsps.optim.parts.base import Curve
from proxsps.optim.parts.compiled import known_kernels, load_kernels, start_of
from proxsps.optim.parts.rows import row_constants, row_points, row_stretches
from proxsps.regularizers.structure import Rows, Scalar, Structure


class CompiledRows(Curve):
    """Rows, or groups of them, by the kernels.

    Args:
        numbers: the numbers of the step.
        blocks: the blocks.
        places: their positions among all blocks.
        memory: where the rows lie.
        alpha: caps; a number, or one per group of rows.
        psi: functions of the groups' norms; numbers, or one per group.
        owners: the block of each group.
    """

    def __init__(
        self,
        numbers: Numbers,
        blocks: Sequence[Block],
        places: Sequence[int],
        memory: Any,
        alpha: Array | float,
        psi: Scalar,
        owners: np.ndarray,
    ) -> None:
        super().__init__(numbers, blocks, places)
        self._memory, self._alpha, self._psi, self._owners = memory, alpha, psi, owners
        self.points = row_points(len(owners))

    def sums(self, points: bool) -> Array:
        """One pass; three sums per group are kept for the search."""
        self._known, self._further = known_kernels().rows.first_sums(self._memory)
        self._rows = RowSums(*self._known)
        x_sq, d_dot_x, d_sq = (np.bincount(self._owners, part, len(self.blocks)) for part in self._known)
        return np.stack([d_sq, d_dot_x, x_sq])

    def _heights(self, u: Array) -> tuple[Array, Array]:
        return row_heights(self._rows, self._psi, self.scaled(self._alpha), u)

    def ray_heights(self, s: Array, every: int = 1) -> Array:
        """From the sums of the groups."""
        return row_ray_heights(self._rows, self._psi, self._alpha, s)[0]

    def products_sq(self) -> Array:
        """Sums in doubles are hardly rounded."""
        return np.float64(0.0)

    def moves_sq(self, u: Array) -> Array:
        """By the sums of the rows alone."""
        return row_moves_sq(self._rows, self._psi, self.scaled(self._alpha), u)

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass."""
        if not ok:
            return
        kernels, groups = known_kernels(), len(self._owners)
        alpha = np.ascontiguousarray(np.broadcast_to(np.float64(self.scaled(self._alpha)), (groups,)))
        psi = kernels.Psi.of(groups, *self._psi)
        kernels.rows.write(self._memory, psi, alpha, float(u), float(s), self._known)


class CompiledAveragedRows(CompiledRows):
    """Rows whose slopes are averages, which are updated in the passes of the step."""

    def extras(self) -> list[list[Array]]:
        """From the pass that makes the sums."""
        owners = np.repeat(np.arange(len(self.blocks)), [len(block.params) for block in self.blocks])
        pairs = zip(*(np.bincount(owners, part, len(self.blocks)) for part in self._further), strict=True)
        return [[*pair, *np.zeros(3)] for pair in pairs]

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass, which stores the new averages too."""
        super().write(u, s, ok)
        for block in self.blocks if ok else ():
            block.known_moments.written = True


class CompiledMetricRows(Curve):
    """Rows in Adam's metric by the kernels, whose passes update the averages.

    Args:
        numbers: the numbers of the step.
        blocks: the blocks.
        places: their positions among all blocks.
        memory: where the rows and their averages lie.
        alpha: caps, one per row.
        l1: the weights of the rows' norms.
    """

    def __init__(
        self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], memory: Any, alpha: Array, l1: Array
    ) -> None:
        super().__init__(numbers, blocks, places)
        self._memory, self._alpha, self._l1 = memory, alpha, l1

    def sums(self, points: bool) -> Array:
        """One pass, which computes `extras` too."""
        start = start_of(self.blocks, self._memory.averages)
        if start is not None:
            self._memory = self._memory._replace(averages=self._memory.averages._replace(start=start))
        found, _ = self._pass(np.empty((0, len(self._alpha))), np.empty(0), summing=True)
        owners = np.repeat(np.arange(len(self.blocks)), [len(block.params) for block in self.blocks])
        d_sq, d_dot_x, products, *self._further, moved_sq = (
            np.bincount(owners, row, len(self.blocks)) for row in found
        )
        self._products, self.moved_sq = products.sum(), None if start is None else moved_sq
        return np.stack([d_sq, d_dot_x, np.zeros(len(self.blocks))])

    def _pass(self, caps: Array, u: Array, **options: bool) -> tuple[Array, Array]:
        found: tuple[Array, Array] = known_kernels().metric_rows.reduce(self._memory, self._l1, caps, u, **options)
        return found

    def _caps(self, points: int) -> Array:
        return np.broadcast_to(self.scaled(self._alpha), (points, len(self._alpha)))

    def _heights(self, u: Array) -> tuple[Array, Array]:
        return self._pass(self._caps(len(u)), u)[1], np.full(len(u), math.nan)

    def ray_heights(self, s: Array, every: int = 1) -> Array:
        """One pass for all points."""
        return self._pass(np.multiply.outer(s, self._alpha), np.ones(len(s)))[1]

    def products_sq(self) -> Array:
        """From the first pass."""
        return self._products

    def moves_sq(self, u: Array) -> Array:
        """One pass."""
        return self._pass(self._caps(1), np.array([float(u)]), moves=True)[1][0]

    def extras(self) -> list[list[Array]]:
        """From the pass that makes the sums."""
        return [[*pair, *np.zeros(3)] for pair in zip(*self._further, strict=True)]

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass, which stores the new averages too."""
        if not ok:
            return
        known_kernels().metric_rows.write(self._memory, self._l1, self._caps(1)[0].copy(), float(u), float(s))
        for block in self.blocks:
            block.known_moments.written = True


def compiled_metric_rows(
    numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], averages: Any
) -> CompiledMetricRows | None:
    """Rows in Adam's metric whose norm is penalised; None if the kernels do not apply."""
    structures = [block.structures for block in blocks]
    rows = [[one for one in own if _only_norms(one)] for own in structures]
    if rows != structures or not all(own and len({one.dims for one in own}) == 1 for own in rows):
        return None
    memory = known_kernels().metric_rows.memory(
        averages, [block.params for block in blocks], [own[0].dims for own in rows]
    )
    if memory is None:
        return None
    stretches = row_stretches(blocks, rows)
    count = sum(own[-1] for own in stretches)
    alpha, psi = row_constants([own[1:] for own in stretches], np.zeros(count))
    alpha, l1 = (np.ascontiguousarray(np.broadcast_to(np.float64(c), (count,))) for c in (alpha, psi.l1))
    return CompiledMetricRows(numbers, blocks, places, memory, alpha, l1)


def _only_norms(structure: Structure | None) -> TypeGuard[Rows]:
    """Whether the regulariser is a multiple of the norm of each row."""
    return isinstance(structure, Rows) and structure.psi == Scalar(l1=structure.psi.l1)


def compiled_rows(
    numbers: Numbers,
    blocks: Sequence[Block],
    places: Sequence[int],
    structures: Sequence[Sequence[Rows]],
    averages: Any = None,
) -> CompiledRows | None:
    """The rows of blocks, each by itself; None if the kernels do not apply."""
    kernels = load_kernels()
    if kernels is None:
        return None
    tensors = ([block.params for block in blocks], [block.slopes for block in blocks])
    memory = kernels.rows.memory(*tensors, [own[0].dims for own in structures], averages=averages)
    if memory is None:
        return None
    stretches = row_stretches(blocks, structures)
    owners = np.repeat(*np.array([[i, rows] for i, *_, rows in stretches]).T)
    alpha, psi = row_constants([own[1:] for own in stretches], np.zeros(len(owners)))
    kind = CompiledRows if averages is None else CompiledAveragedRows
    return kind(numbers, blocks, places, memory, alpha, psi, owners)


def compiled_units(numbers: Numbers, block: Block, places: Sequence[int], averages: Any = None) -> CompiledRows | None:
    """Groups of slices of several tensors; None if the kernels do not apply."""
    kernels, structure = load_kernels(), block.phi.joint_structure([x.shape for x in block.params])
    if kernels is None or structure is None:
        return None
    count = int(structure.groups.max()) + 1
    free = structure.groups < 0
    # Slices without a penalty are one more group, without a function.
    ids = np.where(free, count, structure.groups)
    extra = int(free.any())
    blank = Scalar()
    psi = Scalar(
        *(np.append(np.broadcast_to(c, (count,)), [b] * extra) for c, b in zip(structure.psi, blank, strict=True))
    )
    tensors = ([[x] for x in block.params], [[d] for d in block.slopes])
    memory = kernels.rows.memory(*tensors, structure.dims, ids, averages)
    if memory is None:
        return None
    kind = CompiledRows if averages is None else CompiledAveragedRows
    part = kind(numbers, [block], places, memory, block.alpha, psi, np.zeros(count + extra, np.int64))
    part.kind = UNITS
    return part
