"""Passes over blocks whose prox is affine or acts on each entry: sums, heights of the model at several points, a write.

With r = 1/D the inverse metric of an entry, which is 1 in the identity metric, and p = r d its direction,

    z = x - s p,    y = prox(z) with threshold alpha l1 r, factor 1 / (1 + alpha l2 r) and bounds,    h = <d, y - x>.

Entries where the prox moves with z are called inside. There x - y is computed without y, which may agree with x in all
but a few digits:

    (1 + alpha l2 r) (x - y) = s p + clip(z, -alpha l1 r, alpha l1 r) + alpha l2 r x      inside,
    x - y with y exactly 0, lower or upper                                               elsewhere.

The slope d is the gradient, the gradient plus lam x (coupled methods), or an average of gradients. New averages are not
kept between the passes, because a skipped step must leave the state as it was: every pass computes them from state and
gradient, run by run, into memory that stays in the first cache; only the write stores them,

    d' = old d + new g,    v' = old_v v + new_v g^2,    D = max{sqrt(v') + eps, least}.

Sums are taken in the type of the entries over a run of them, then in doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from proxsps.optim.kernels.averages import (
    MOVED_SQ,
    SUMS,
    X_SQ,
    add_sums,
    averaged_point,
    gradient_point,
    inverse_metric,
    new_averages,
    new_slope,
    new_square,
)
from proxsps.optim.kernels.between import Between, list_marked
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.heights import BOX, GENERAL, LINE, SOFT, add_heights, prox, typed_psi
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, Chunks, fold, run, run_memory, sampled
from proxsps.optim.kernels.parts import Floats, Memory, Part, cut, tensors, weights
from proxsps.optim.kernels.sampling import NO_START, moved_sq
from proxsps.optim.rule import Heights
from proxsps.regularizers.structure import Scalar


@inlined(fastmath=REORDER)
def _couple(x, g, lam, slopes):
    """g + lam x of a run, and ||x||^2."""
    total = lam - lam
    for k in range(len(g)):
        slopes[k] = g[k] + lam * x[k]
        total += x[k] * x[k]
    return total


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def _new_point(x, p, r, s, psi):
    """y of an entry."""
    threshold, _, curvature, lower, upper, one, _ = psi
    shrink = one if curvature == 0 else one / (one + r * curvature)
    return prox(x - s * p, r * threshold, shrink, lower, upper)


@inlined(fastmath=False)
def _on_line(x, p, keep, move):
    """keep x + move p, without fused operations: all kinds of slopes round alike, also at the end of a tensor."""
    return keep * x + move * p


@inlined(fastmath=REORDER)
def _added(total, number):
    return total + number


@inlined(fastmath=ENTRYWISE)
def _write(x, g, d, v, y, own, line, curve, mix):
    """Store new averages, and move x: by the numbers of a prox if there are any, else of a line; then the next y.

    The average of the schedule-free form stays between the bounds of its prox, also in rounding. Returns <d', move> of
    a prox.
    """
    height = own[6] - own[6]
    for k in range(len(x)):
        slope, r = g[k], own[6]
        if d is not None:
            slope = new_slope(g[k], d[k], own)
            d[k] = slope
        if v is not None:
            square = new_square(g[k], v[k], own)
            v[k], r = square, inverse_metric(square, own)
        if curve is None:
            new = _on_line(x[k], r * slope, line[0], line[1])
        else:
            new = _new_point(x[k], r * slope, r, curve[0], curve[1])
            height = _added(height, slope * (new - x[k]))
        if y is not None:
            mean = averaged_point(y[k], x[k], mix[0])
            if curve is None:
                y[k] = gradient_point(mean, new, mix[0], mix[1])
            else:
                lower, upper = curve[1][3], curve[1][4]
                mean = min(max(mean, lower), upper)
                y[k] = min(max(gradient_point(mean, new, mix[0], mix[1]), lower), upper)
        x[k] = new
    return height


@inlined()
def _if_any(memory, entries):
    """Memory for numbers of entries that there may not be."""
    return None if entries is None else memory


@compiled()
def reduce(at, pieces, kinds, psi, caps, u, summing, partial, counts, listed, first, last):
    """Sums of each chunk if `summing`; h and its slope at u, per row of caps.

    The entries that change their branch between two points are listed, if there is memory for them.
    """
    like, x_at, g_at, d_at, v_at, y_at, _, start_at, start_scale, coupling, shares, eps, least = at
    (block, tensor, origin, length), of = pieces, like.dtype.type
    fresh, inverse = numba.carray(run_memory(like), RUN), numba.carray(run_memory(like), RUN)
    places, marks = numba.carray(run_memory(np.uint32), RUN), numba.carray(run_memory(np.uint8), RUN)
    for i in range(first, last):
        j, low, n, b, out = tensor[i], origin[i], length[i], block[i], partial[i]
        x, g, d, v, y = tensors(like, x_at, g_at, d_at, v_at, y_at, j, low, n)
        own, mix, curved, count = weights(like, shares, eps, least, j), of(shares[j, 4]), kinds[b] != LINE, 0
        both = summing and curved and 0 < len(u) < 3  # sums and heights in one loop, which is faster
        out[:] = 0
        for k in range(0, n if curved or summing else 0, RUN):
            end = k + RUN
            xs, gs, old, squares, ys = cut(x, k, end), cut(g, k, end), cut(d, k, end), cut(v, k, end), cut(y, k, end)
            if summing and len(start_at):
                out[MOVED_SQ] += moved_sq(like, start_at, j, xs, low + k, places, ys, mix)
            if coupling[b] != 0:
                out[X_SQ] += _couple(xs, gs, of(coupling[b]), fresh)
                gs = fresh[: len(xs)]
            if both:
                cap, typed = caps[0, b], typed_psi(like, psi, b, caps[0, b])
                ends = (kinds[b], of(u[0] * cap), of(u[-1] * cap), typed, cap, marks)
                add_sums(xs, gs, old, squares, ys, own, True, ends, out)
                if len(listed):
                    count = list_marked(xs, gs, old, squares, own, marks, count, listed[i])
            elif summing:
                add_sums(xs, gs, old, squares, ys, own, curved, None, out)
            if curved and len(u) and not both:
                rs = _if_any(inverse, squares)
                ds = new_averages(gs, old, squares, own, fresh, rs)
                add_heights(xs, ds, rs, kinds[b], psi, caps, b, u, out[SUMS:])
        if len(start_at):
            out[MOVED_SQ] *= start_scale[j]
        if len(listed):
            counts[i] = count


@compiled()
def write(at, pieces, keep, move, psi, kinds, caps, u, heights, first, last):
    """Store new averages, and x <- keep x + move p, or y.

    For blocks that are not affine, `heights` gets <d', move> of each chunk.
    """
    like, x_at, g_at, d_at, v_at, y_at, _, _, _, _, shares, eps, least = at
    (block, tensor, origin, length), of = pieces, like.dtype.type
    for i in range(first, last):
        j, b = tensor[i], block[i]
        x, g, d, v, y = tensors(like, x_at, g_at, d_at, v_at, y_at, j, origin[i], length[i])
        own, mix = weights(like, shares, eps, least, j), (of(shares[j, 4]), of(shares[j, 5]))
        line, curve = (of(keep[b]), of(move[b])), (of(u * caps[b]), typed_psi(like, psi, b, caps[b]))
        if kinds[b] == LINE:
            _write(x, g, d, v, y, own, line, None, mix)
            continue
        heights[i] = 0.0
        for k in range(0, length[i], RUN):
            end = k + RUN
            xs, gs, ds, vs, ys = cut(x, k, end), cut(g, k, end), cut(d, k, end), cut(v, k, end), cut(y, k, end)
            heights[i] += _write(xs, gs, ds, vs, ys, own, line, curve, mix)


class EntryPart(Part):
    """Affine blocks, and those whose prox acts on each entry.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        chunks: of all blocks.
        psi: the function of each block; None for an affine one.
    """

    points = 3

    def __init__(self, at: Memory, chunks: Chunks, psi: Sequence[Scalar | None]) -> None:
        super().__init__(at)
        self._chunks, self._block, count = chunks, chunks.columns[0], len(psi)
        self._weight = 3.0 if at.v_at is not None else 1.0 if at.d_at is None else 1.5
        self._kinds = np.array([_kind(one) for one in psi])
        self._psi = np.array([one or Scalar() for one in psi], np.float64).reshape(-1, 4).T.copy()
        curved = self._kinds != LINE
        self.curved, self.entries = bool(curved.any()), int(chunks.sizes[curved[self._block]].sum())
        if set(self._kinds.tolist()) <= {LINE, SOFT}:
            self.l1 = self._psi[0].tolist()
        # Where all blocks are affine, keep and move of each of them are written here, before `write_lines`.
        self.lines = np.zeros(count), np.zeros(count)
        self._caps = np.zeros((1, count))
        self._heights = np.zeros(len(chunks.sizes))  # of each chunk where it was written
        self._no_lists = np.zeros(0, np.int64), np.empty((0, 3, 0), at.like.dtype)
        self._room = np.empty((len(chunks.sizes), SUMS))  # of `chunk_sums`
        self._sum_args = (self._kinds, self._psi, self._caps, np.empty(0), True, self._room, *self._no_lists)
        self._between: Between | None = None
        self._covered = False  # whether it has the heights of this step

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        u, between, lists = u if self.curved else (), None, self._no_lists
        if len(u) == 2 and u[0] < u[1]:  # on either side of a root
            between = self._between or Between(self.at.like, self._block, self._kinds, self._psi)
            self._between, lists = between, (between.counts, between.entries)
        partial = self._pass([alpha], u, 1, True, lists)
        found = fold(partial[:, :SUMS].T, self._block, len(self._kinds)).tolist()
        heights = _at_points(partial) if u else Heights([], [])
        self._covered = between is not None and between.begin(alpha, u, heights)
        return found, heights

    # Where all blocks are affine

    def chunk_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """The sums of a step, one row per chunk, and the block of each chunk."""
        self._run(reduce, self._chunks, self._weight, *self._sum_args)
        return self._room, self._block

    def write_lines(self, share: float) -> None:
        """x <- keep x + move p, with this share of the new point in the average of the schedule-free form."""
        if self.mixes:
            self.set_share(share)
        self._write(self._kinds, 1.0)
        if len(self.at.counts_at):
            self.count()

    # Where some are not

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u."""
        if every == 1 and self._covered and self._between is not None and self._between.covers(alpha, u):
            return self._between.heights(u)
        if every == 1 and len(u) == 2:  # the first round of a search
            return self.sums(alpha, u)[1]
        return _at_points(self._pass([alpha], u, every))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        partial = self._pass([[v * w for w in share] for v in s], (1.0,), every)
        heights: list[float] = partial[:, SUMS::2].sum(axis=0).tolist()
        return heights

    def sampled_sums(self, every: int) -> list[list[float]]:
        """The sums of a step, estimated from a sample."""
        partial = self._pass(self._caps, (), every, True)
        found: list[list[float]] = fold(partial.T, self._block, len(self._kinds)).tolist()
        return found

    def _pass(self, caps: Any, u: Floats, every: int = 1, summing: bool = False, lists: Any = None) -> np.ndarray:
        """Sums, then heights and slopes for each set of caps, one row per chunk."""
        at, chunks, points = self._memory, self._chunks, len(caps) * len(u)
        if every > 1:
            (chunks, scale), at = sampled(chunks, every), tuple(self.at._replace(start_at=NO_START.at))
        backwards = every == 1 and next(self._turns)
        partial = np.empty((len(chunks.sizes), SUMS + 2 * points))
        args = (self._kinds, self._psi, np.array(caps, np.float64), np.array(u, np.float64), summing, partial)
        lists, weight = lists or self._no_lists, self._weight + points
        run(reduce, chunks, at, chunks.columns, *args, *lists, weight=weight, backwards=backwards)
        return partial if every == 1 else partial * scale[:, None]

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- keep x + move p for affine blocks, y(u) for the others; stores new averages."""
        self.lines[0][:], self.lines[1][:], self._caps[0] = keep, move, alpha
        self._write(self._kinds if moves else np.full_like(self._kinds, LINE), u)

    def _write(self, kinds: np.ndarray, u: float) -> None:
        self._run(write, self._chunks, 2.0, *self.lines, self._psi, kinds, self._caps[0], u, self._heights)

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
