"""The parts of a plan: blocks that compiled kernels process together, in dense f32 or f64 memory on the CPU.

Affine blocks and those whose prox acts on each entry are one part, and rows in the identity metric another one; rows in
Adam's metric are in `proxsps.optim.kernels.metric_rows`. Numbers that go in and out are Python floats, one per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from proxsps.core import plain
from proxsps.optim.kernels import entrywise, rows
from proxsps.optim.kernels.averages import SUMS
from proxsps.optim.kernels.between import Between, Lists
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.entrywise import Sources
from proxsps.optim.kernels.heights import BOX, GENERAL, LINE, SOFT
from proxsps.optim.kernels.layout import Layout, fold, pointer, run, sampled, turns
from proxsps.optim.kernels.row_layout import RowMemory
from proxsps.optim.kernels.sampling import NO_START
from proxsps.optim.kernels.scalar import Psi
from proxsps.optim.rule import Heights, Rule
from proxsps.regularizers.structure import Scalar

Floats = Sequence[float]

_corrected = inlined()(plain.corrected_weight)


@compiled()
def _set_weights(counts_at, k, beta, beta2, mix, weights):
    """Set the weights of old and new values in averages, and b of the schedule-free form; returns that of a new value.

    In a metric, averages have Adam's correction, and those of squares depend on the number of gradients of a tensor.
    """
    like = np.empty(0, np.float32)
    new = _corrected(k, beta) if len(counts_at) else 1 - beta * min(k, 1.0)
    weights[:, 0], weights[:, 1], weights[:, 4] = 1 - new, new, mix
    for j in range(len(counts_at)):
        of_squares = _corrected(numba.carray(pointer(counts_at[j], like), 1)[0], beta2)
        weights[j, 2], weights[j, 3] = 1 - of_squares, of_squares
    return new


@compiled()
def _count(counts_at):
    """One gradient more for each tensor."""
    like = np.empty(0, np.float32)
    for j in range(len(counts_at)):
        numba.carray(pointer(counts_at[j], like), 1)[0] += like.dtype.type(1)


class Averaging:
    """What parts have in common: the numbers with which a step changes averages and slopes."""

    at: Sources
    mixes = False  # whether a write moves the parameters of the schedule-free form too
    l1: Sequence[float] | None = None  # strengths of the l1 norm, if blocks that are not affine have that alone
    _counts_at = entrywise.NOWHERE

    def bind(self, gradients: Sequence[int]) -> None:
        """Use gradients at other addresses."""
        self.at.g_at[:] = gradients

    def set_weights(self, k: float, rule: Rule) -> float:
        """Set the weights of averages for step number k; returns that of new values."""
        new: float = _set_weights(
            self._counts_at, k, rule.beta or 0.0, rule.beta2 or 0.0, rule.mix or 0.0, self.at.weights
        )
        return new

    def set_share(self, share: float) -> None:
        """The share of the new point in the average of the schedule-free form."""
        self.at.weights[:, 5] = share

    def set_coupling(self, lam: Floats) -> None:
        """How much of x is in the slopes of coupled methods."""
        self.at.coupling[:] = lam

    def count(self) -> None:
        """Count one more gradient of each tensor."""
        _count(self._counts_at)


class EntryPart(Averaging):
    """Affine blocks, and those whose prox acts on each entry.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        counts_at: where the numbers of gradients lie, in a metric.
        like: an array of the type of the entries.
        layout: of all blocks.
        psi: the function of each block; None for an affine one.
        second: whether steps are schedule-free, with the parameters beside the points that move.
    """

    points = 3

    def __init__(
        self,
        at: Sources,
        counts_at: np.ndarray,
        like: np.ndarray,
        layout: Layout,
        psi: Sequence[Scalar | None],
        second: bool = False,
    ) -> None:
        self._counts_at, self.mixes = counts_at, second
        self.at, self._like, self._layout, self._turns = at, like, layout, turns()
        kind = (len(at.d_at) > 0) + (len(at.v_at) > 0)
        kernels = (entrywise.PLAIN, entrywise.AVERAGED, entrywise.ADAM)[kind]
        self._reduce, self._write = entrywise.SECOND if second else kernels
        self._kinds = np.array([_kind(one) for one in psi])
        self._psi = np.array([one or Scalar() for one in psi], np.float64).reshape(-1, 4).T.copy()
        self._weight = (1.0, 1.5, 3.0)[kind]
        self.curved = bool((self._kinds != LINE).any())
        if set(self._kinds.tolist()) <= {LINE, SOFT}:
            self.l1 = self._psi[0].tolist()
        self._curves = layout.of_blocks(np.flatnonzero(self._kinds != LINE)) if self.curved else layout
        self.entries = self._curves.chunks.total if self.curved else 0
        count = len(psi)
        self._caps, self._keep, self._move = np.zeros((1, count)), np.zeros(count), np.zeros(count)
        self._room = np.empty((len(layout.chunks.sizes), SUMS))  # of a pass without points
        own = (like, *layout.chunks.columns, *at)
        self._no_lists = self._lists = Lists.of(like, 0)
        self._between: Between | None = None
        self._sum_args = (*own, self._kinds, self._psi, self._caps, np.empty(0), True, self._room, *self._no_lists[::2])
        self._heights = np.zeros(len(layout.chunks.sizes))  # of each chunk where it was written
        self._write_args = (*own, self._keep, self._move, self._psi)

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        u, layout, listed = u if self.curved else (), self._layout, self._no_lists
        if len(u) == 2 and u[0] < u[1]:  # on either side of a root
            if not len(self._lists.at):
                self._lists = Lists.of(self._like, len(layout.chunks.sizes))
            listed = self._lists
        partial = self._pass(layout, [alpha], u, summing=True, listed=listed)
        found = fold(partial[:, :SUMS].T, layout.chunks.columns[0], layout.count).tolist()
        heights = _at_points(partial) if u else Heights([], [])
        between = Between(layout, listed, self._kinds, self._psi, alpha, u, heights) if len(listed.at) else None
        self._between = between
        return found, heights

    # Where all blocks are affine

    @property
    def lines(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the coefficients keep and move of each block are written, before `write_lines`."""
        return self._keep, self._move

    def chunk_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of a step, one row per chunk, and the block of each chunk."""
        chunks = self._layout.chunks
        run(self._reduce, chunks, *self._sum_args, weight=self._weight, backwards=next(self._turns))
        return self._room, chunks.columns[0]

    def write_lines(self, share: float) -> None:
        """x <- keep x + move p, with this share of the new point in the average of the schedule-free form."""
        if self.mixes:
            self.set_share(share)
        self._run_write(self._kinds, 1.0)
        if len(self._counts_at):
            self.count()

    # Where some are not

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u."""
        if every == 1 and self._between is not None and self._between.covers(alpha, u):
            return self._between.heights(u)
        if every == 1 and len(u) == 2:  # the first round of a search
            return self.sums(alpha, u)[1]
        return _at_points(self._pass(self._curves, [alpha], u, every))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        partial = self._pass(self._curves, [[v * w for w in share] for v in s], (1.0,), every)
        heights: list[float] = partial[:, SUMS::2].sum(axis=0).tolist()
        return heights

    def sampled_sums(self, every: int) -> list[list[float]]:
        """The sums of a step, estimated from a sample."""
        partial = self._pass(self._layout, [[1.0] * len(self._kinds)], (), every, True)
        found: list[list[float]] = fold(partial.T, self._layout.chunks.columns[0], self._layout.count).tolist()
        return found

    def _pass(
        self,
        layout: Layout,
        caps: Any,
        u: Floats,
        every: int = 1,
        summing: bool = False,
        listed: Lists | None = None,
    ) -> np.ndarray:
        """Sums, then heights and slopes for each set of caps, one row per chunk."""
        layout, scale = (layout, None) if every == 1 else sampled(layout, every)
        chunks, sets, points = layout.chunks, len(caps), len(u)
        if sets == 1:
            self._caps[:] = caps
        all_caps = self._caps if sets == 1 else np.array(caps)
        if points or layout is not self._layout:
            partial = np.empty((len(chunks.sizes), SUMS + 2 * sets * points))
        else:
            partial = self._room
        at = self.at if every == 1 else self.at._replace(start_at=NO_START.at)
        backwards = every == 1 and next(self._turns)
        args = (*at, self._kinds, self._psi, all_caps, np.array(u, np.float64), summing, partial)
        lists, weight = (listed or self._no_lists)[::2], self._weight + sets * points
        run(self._reduce, chunks, self._like, *chunks.columns, *args, *lists, weight=weight, backwards=backwards)
        if scale is not None:
            partial *= scale[:, None]
        return partial

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- keep x + move p for affine blocks, y(u) for the others; stores new averages."""
        self._keep[:], self._move[:], self._caps[0] = keep, move, alpha
        self._run_write(self._kinds if moves else np.full_like(self._kinds, LINE), u)

    def _run_write(self, kinds: np.ndarray, u: float) -> None:
        args = (*self._write_args, kinds, self._caps[0], u, self._heights)
        run(self._write, self._layout.chunks, *args, weight=2.0, backwards=next(self._turns))

    @property
    def height(self) -> float:
        """<d, move> of the last write, over the blocks that are not affine."""
        return float(self._heights.sum())


def _at_points(partial: np.ndarray) -> Heights:
    """Heights and slopes at all points, from one row per chunk."""
    heights, slopes = fold(partial[:, SUMS:].T, np.zeros(len(partial), np.int64), 1).reshape(2, -1).tolist()
    return Heights(heights, slopes)


def _kind(psi: Scalar | None) -> int:
    if psi is None:
        return LINE
    if psi.l1 == 0 and psi.l2 == 0:
        return BOX
    return SOFT if psi.l2 == 0 and not psi.bounded else GENERAL


class RowGroups(NamedTuple):
    """Groups of entries that share a norm."""

    memory: RowMemory  # how they lie in memory
    psi: Psi  # the functions of their norms
    owners: np.ndarray  # their blocks


class RowPart(Averaging):
    """Rows, or groups of them, in the identity metric: three sums per group tell the heights at all points.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        counts_at: where the numbers of gradients lie, in a metric.
        groups: the rows, or groups of them.
        tensors: the block of each tensor.
        blocks: the number of blocks.
    """

    curved, points, entries = True, 3, 0

    def __init__(self, at: Sources, counts_at: np.ndarray, groups: RowGroups, tensors: np.ndarray, blocks: int) -> None:
        averaged = len(at.d_at) > 0
        self.at, self._counts_at, self._tensors, self._blocks = at, counts_at, tensors, blocks
        memory, self._psi, self._owners = groups
        self._memory = memory._replace(
            x_at=at.x_at,
            d_at=at.d_at if averaged else at.g_at,
            g_at=at.g_at if averaged else entrywise.NOWHERE,
            weights=at.weights,
        )
        self._known = np.empty((3, 0))

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        self._known, further = rows.first_sums(self._memory)
        _, d_dot_x, d_sq = fold(self._known, self._owners, self._blocks).tolist()
        nothing = [0.0] * self._blocks
        g_dot_x = g_sq = nothing
        if len(self.at.d_at):
            g_dot_x, g_sq = fold(further, self._tensors, self._blocks).tolist()
        found = [d_sq, d_dot_x, nothing, g_dot_x, g_sq, nothing]
        return found, self.heights(alpha, u) if u else Heights([], [])

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """From the sums of the groups."""
        h, slope = self._at_points(alpha, u, [1.0] * len(u))
        return Heights(h.tolist(), slope.tolist())

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """From the sums of the groups."""
        heights: list[float] = self._at_points(share, s, s)[0].tolist()
        return heights

    def _at_points(self, alpha: Floats, steps: Floats, caps: Floats) -> np.ndarray:
        points = (np.asarray(part, np.float64) for part in (steps, caps))
        return rows.heights(self._known, np.array(alpha)[self._owners], self._psi, *points)

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """One pass."""
        rows.write(self._memory, self._psi, np.array(alpha)[self._owners], u, moves, self._known)
