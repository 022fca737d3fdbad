"""The parts of a plan: blocks that compiled kernels process together, in dense f32 or f64 memory on the CPU.

Affine blocks and those whose prox acts on each entry are one part, rows in the identity
metric and rows in Adam's metric one each. Numbers that go in and out are Python floats, one per block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from proxsps.optim.kernels import averages, entrywise, metric_rows, rows
from proxsps.optim.kernels.entrywise import BOX, GENERAL, LINE, SOFT, SUMS, Sources
from proxsps.optim.kernels.layout import Layout, fold, run, sampled, turns
from proxsps.optim.kernels.metric_rows import MetricRows
from proxsps.optim.kernels.row_layout import RowMemory
from proxsps.optim.kernels.sampling import NO_START
from proxsps.optim.kernels.scalar import Psi
from proxsps.optim.plan import Heights
from proxsps.regularizers.structure import Scalar

Floats = Sequence[float]


class Averaging:
    """What parts have in common: the numbers with which a step changes averages and slopes."""

    at: Sources
    _counts_at: np.ndarray

    def set_weights(self, new: float, beta2: float | None) -> None:
        """The weight of new values in averages, and by the numbers of gradients in averages of squares."""
        self.at.weights[:, 0], self.at.weights[:, 1] = 1 - new, new
        if beta2 is not None:
            averages.correct_weights(self._counts_at, beta2, self.at.weights)

    def set_coupling(self, lam: Floats) -> None:
        """How much of x is in the slopes of coupled methods."""
        self.at.coupling[:] = lam

    def count(self) -> None:
        """Count one more gradient of each tensor."""
        averages.count(self._counts_at)


class EntryPart(Averaging):
    """Affine blocks, and those whose prox acts on each entry.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        counts_at: where the numbers of gradients lie, in a metric.
        like: an array of the type of the entries.
        layout: of all blocks.
        psi: the function of each block; None for an affine one.
    """

    points = 3

    def __init__(
        self, at: Sources, counts_at: np.ndarray, like: np.ndarray, layout: Layout, psi: Sequence[Scalar | None]
    ) -> None:
        self._counts_at = counts_at
        self.at, self._like, self._layout, self._turns = at, like, layout, turns()
        kind = (len(at.d_at) > 0) + (len(at.v_at) > 0)
        self._reduce, self._move_sq, self._write = (entrywise.PLAIN, entrywise.AVERAGED, entrywise.ADAM)[kind]
        self._kinds = np.array([_kind(one) for one in psi])
        self._psi = np.array([one or Scalar() for one in psi], np.float64).reshape(-1, 4).T.copy()
        self._weight = (1.0, 1.5, 3.0)[kind]
        self.curved = bool((self._kinds != LINE).any())
        self._curves = layout.of_blocks(np.flatnonzero(self._kinds != LINE)) if self.curved else layout
        self.entries = self._curves.chunks.total if self.curved else 0
        self._no_steps = np.empty((1, len(psi), 0), like.dtype)
        self._constants_of_lines = np.zeros((1, 5, len(psi)))
        self._room = np.empty((len(layout.chunks.sizes), SUMS))  # of a pass without points

    def sums(self, alpha: Floats, u: Floats, moving: bool) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        found = self._pass(self._layout, [alpha], u, summing=True, moving=moving)
        if not u:
            return found.tolist(), Heights([], [])
        return found[:SUMS].tolist(), self._heights(found, alpha, len(u))

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u."""
        return self._heights(self._pass(self._curves, [alpha], u, every), alpha, len(u))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        found = self._pass(self._curves, np.multiply.outer(s, share), (1.0,), every)
        heights: list[float] = (-found[SUMS::2].sum(axis=1)).tolist()
        return heights

    def sampled_sums(self, every: int) -> list[list[float]]:
        """The sums of a step, estimated from a sample."""
        found: list[list[float]] = self._pass(self._layout, [[1.0] * len(self._kinds)], (), every, True).tolist()
        return found

    def _heights(self, found: np.ndarray, alpha: Floats, points: int) -> Heights:
        h, slope = found[SUMS : SUMS + points].sum(axis=1), found[SUMS + points :] @ np.asarray(alpha)
        return Heights((-h).tolist(), (-slope).tolist())

    def _pass(
        self, layout: Layout, alphas: Any, u: Floats, every: int = 1, summing: bool = False, moving: bool = False
    ) -> np.ndarray:
        """Sums, then heights and slopes for each set of caps, as rows with one column per block."""
        layout, scale = (layout, None) if every == 1 else sampled(layout, every)
        chunks, sets, points = layout.chunks, len(alphas), len(u)
        if points:
            caps = np.asarray(alphas)
            steps, constants = np.multiply.outer(caps, u).astype(self._like.dtype), self._constants(caps)
            partial = np.empty((len(chunks.sizes), SUMS + 2 * sets * points))
        else:
            steps, constants = self._no_steps, self._constants_of_lines
            partial = self._room if layout is self._layout else np.empty((len(chunks.sizes), SUMS))
        at = self.at if every == 1 else self.at._replace(start_at=NO_START.at)
        backwards = every == 1 and next(self._turns)
        args = (*at, self._kinds, constants, steps, summing, moving, partial)
        weight = self._weight + sets * points
        run(self._reduce, chunks, self._like, *chunks.columns, *args, weight=weight, backwards=backwards)
        if scale is not None:
            partial *= scale[:, None]
        return fold(partial, chunks.columns[0], layout.count)

    def _constants(self, alphas: np.ndarray) -> np.ndarray:
        """Threshold, edge, curvature, lower and upper of each block, for sets of caps: (sets, 5, blocks).

        Entries with |z| above the edge move with z: all of them where there is no threshold.
        """
        l1, l2, lower, upper = self._psi
        out = np.empty((len(alphas), 5, len(l1)))
        out[:, 0], out[:, 2], out[:, 3], out[:, 4] = alphas * l1, alphas * l2, lower, upper
        out[:, 1] = np.where(l1 > 0, out[:, 0], -1.0)
        return out

    def move_sq(self, alpha: Floats, u: float) -> float:
        """||y(u) - x||^2 of the blocks that are not affine."""
        chunks, caps = self._curves.chunks, np.array([alpha])
        partial = np.empty((len(chunks.sizes), 1))
        args = (*self.at, self._constants(caps)[0], u * caps[0], partial)
        run(self._move_sq, chunks, self._like, *chunks.columns, *args, weight=2.0, backwards=next(self._turns))
        return float(partial.sum())

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, relax: float) -> None:
        """x <- keep x + move p for affine blocks, x + relax (y(u) - x) for the others; stores new averages."""
        chunks, caps = self._layout.chunks, np.array([alpha])
        constants = self._constants(caps) if self.curved else self._constants_of_lines
        args = (*self.at, self._kinds, np.array(keep), np.array(move), constants[0], u * caps[0], relax)
        run(self._write, chunks, self._like, *chunks.columns, *args, weight=2.0, backwards=next(self._turns))


def _kind(psi: Scalar | None) -> int:
    if psi is None:
        return LINE
    if psi.l1 == 0 and psi.l2 == 0:
        return BOX
    return SOFT if psi.l2 == 0 and not psi.bounded else GENERAL


class RowPart(Averaging):
    """Rows, or groups of them, in the identity metric: three sums per group tell the heights at all points.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        memory: how they form rows.
        psi: functions of the groups' norms, as arrays.
        owners: the block of each group.
        tensors: the block of each tensor.
        blocks: the number of blocks.
    """

    curved, points, entries = True, 3, 0

    def __init__(
        self, at: Sources, memory: RowMemory, psi: Psi, owners: np.ndarray, tensors: np.ndarray, blocks: int
    ) -> None:
        averaged = len(at.d_at) > 0
        self.at = at
        self._memory = memory._replace(
            x_at=at.x_at,
            d_at=at.d_at if averaged else at.g_at,
            g_at=at.g_at if averaged else entrywise.NOWHERE,
            weights=at.weights,
        )
        self._psi, self._owners, self._tensors, self._blocks = psi, owners, tensors, blocks
        self._known = np.empty((3, 0))

    def sums(self, alpha: Floats, u: Floats, moving: bool) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        self._known, further = rows.first_sums(self._memory)
        x_sq, d_dot_x, d_sq = (np.bincount(self._owners, part, self._blocks).tolist() for part in self._known)
        g_dot_x, g_sq = (np.bincount(self._tensors, part, self._blocks).tolist() for part in further)
        nothing = [0.0] * self._blocks
        found = [d_sq, d_dot_x, nothing, x_sq, g_dot_x, g_sq, d_sq, d_dot_x, nothing]
        return found, self.heights(alpha, u) if u else Heights([], [])

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """From the sums of the groups."""
        h, slope, _ = self._at_points(alpha, u, [1.0] * len(u))
        return Heights(h.tolist(), slope.tolist())

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """From the sums of the groups."""
        heights: list[float] = self._at_points(share, s, s)[0].tolist()
        return heights

    def move_sq(self, alpha: Floats, u: float) -> float:
        """From the sums of the groups."""
        return float(self._at_points(alpha, [u], [1.0])[2, 0])

    def _at_points(self, alpha: Floats, steps: Floats, caps: Floats) -> np.ndarray:
        points = (np.asarray(part, np.float64) for part in (steps, caps))
        return rows.heights(self._known, np.array(alpha)[self._owners], self._psi, *points)

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, relax: float) -> None:
        """One pass."""
        rows.write(self._memory, self._psi, np.array(alpha)[self._owners], u, relax, self._known)


class MetricRowPart(Averaging):
    """Rows whose norm is penalised, in Adam's metric: every point takes a pass.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        counts_at: where the numbers of gradients lie.
        memory: how they form rows, and the norms of rows at the last point.
        l1: the weights of the rows' norms.
        owners: the block of each row.
        tensors: the block of each tensor.
        blocks: the number of blocks.
    """

    curved, points, entries = True, 1, 0

    def __init__(
        self,
        at: Sources,
        counts_at: np.ndarray,
        memory: MetricRows,
        l1: np.ndarray,
        owners: np.ndarray,
        tensors: np.ndarray,
        blocks: int,
    ) -> None:
        self._counts_at = counts_at
        self.at, self._memory, self._l1 = at, memory, l1
        self._owners, self._tensors, self._blocks = owners, tensors, blocks

    def sums(self, alpha: Floats, u: Floats, moving: bool) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        found, h = self._pass(np.outer(np.ones(len(u)), alpha), u, summing=True)
        d_sq, d_dot_x, noise, g_dot_x, g_sq, moved = (
            np.bincount(self._tensors, row, self._blocks).tolist() for row in found
        )
        nothing = [0.0] * self._blocks
        sums = [d_sq, d_dot_x, noise, nothing, g_dot_x, g_sq, nothing, nothing, moved]
        return sums, Heights(h, [math.nan] * len(u))

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """One pass."""
        return Heights(self._pass(np.outer(np.ones(len(u)), alpha), u)[1], [math.nan] * len(u))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """One pass for all points."""
        return self._pass(np.outer(s, share), [1.0] * len(s))[1]

    def move_sq(self, alpha: Floats, u: float) -> float:
        """One pass."""
        return self._pass(np.array([alpha]), [u], moves=True)[1][0]

    def _pass(self, caps: np.ndarray, u: Floats, **options: bool) -> tuple[np.ndarray, list[float]]:
        sums, h = metric_rows.reduce(
            self._memory, self.at, self._l1, caps[:, self._owners], np.array(u, np.float64), **options
        )
        return sums, h.tolist()

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, relax: float) -> None:
        """One pass."""
        metric_rows.write(self._memory, self.at, self._l1, np.array(alpha)[self._owners], u, relax)
