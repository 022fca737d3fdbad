"""Passes for rows whose norm is penalised, in Adam's metric: h at several points, and one write.

With r = 1/D of an entry, z = x - s r d and thresholds t = alpha l1 r, the new row is 0 if ||z / t|| <= 1, and else
y = z R / (R + t) with R = ||y|| the root of ||z / (R + t)|| = 1 (`proxsps.regularizers._diagonal`). A few sums of a row
do not give R, so each point takes some Newton steps; the row stays in the cache, and R of the last point is where the
next ones start. The new d and r are computed in every pass; only the write stores d and v.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from proxsps.optim.kernels.averages import MOVED_SQ, SUMS, add_sums, new_averages
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import CHUNK, ENTRYWISE, REORDER, RUN, fold, run_memory
from proxsps.optim.kernels.parts import Floats, tensors, weights
from proxsps.optim.kernels.rows import RowPart
from proxsps.optim.kernels.sampling import moved_sq
from proxsps.optim.rule import Heights

ROUNDS = 100  # Newton steps at most; some five are usual


@inlined(fastmath=ENTRYWISE)
def _start(x, d, r, s, threshold, tiny, z, t):
    """z and t of a row; a positive t spares the cases without a threshold."""
    for k in range(len(x)):
        z[k] = x[k] - s * (r[k] * d[k])
        t[k] = max(threshold * r[k], tiny)


@inlined(fastmath=REORDER, error_model="numpy")
def _run_norm_and_slope(z, t, radius, one):
    norm_sq, slope = one - one, one - one
    for k in range(len(z)):
        inverse = one / (radius + t[k])
        quotient = z[k] * inverse
        square = quotient * quotient
        norm_sq += square
        slope += square * inverse
    return norm_sq, slope


@inlined()
def _norm_and_slope(z, t, radius):
    """||z / (R + t)||^2, and minus half of its derivative."""
    norm_sq, slope, of = 0.0, 0.0, z.dtype.type
    for low in range(0, len(z), RUN):
        found = _run_norm_and_slope(z[low : low + RUN], t[low : low + RUN], of(radius), of(1))
        norm_sq += found[0]
        slope += found[1]
    return norm_sq, slope


@inlined(error_model="numpy")
def _radius(z, t, guess):
    """The root R by Newton's method, 0 if there is none.

    A step from below the root, such as the one from 0, does not pass it; one from above leads below it.
    """
    norm_sq, slope = _norm_and_slope(z, t, 0.0)
    if norm_sq <= 1:
        return 0.0
    least = (np.sqrt(norm_sq) - 1) * norm_sq / slope
    if not np.isfinite(norm_sq * slope) or not least > 0:  # squares overflow; at the root no entry of z exceeds R + t
        least = max(float(np.max(np.abs(z) - t)), float(np.finfo(z.dtype).tiny))
    # The error after a step is about the square of the step.
    radius, small = max(least, guess), np.sqrt(np.finfo(z.dtype).eps) / 2
    for _ in range(ROUNDS):
        norm_sq, slope = _norm_and_slope(z, t, radius)
        before, radius = radius, max(least, radius + (np.sqrt(norm_sq) - 1) * norm_sq / slope)
        if not abs(radius - before) > small * radius:
            break
    return radius


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def _point(z, t, radius):
    """z <- y of a row that is not 0."""
    for k in range(len(z)):
        z[k] *= radius / (radius + t[k])


@inlined(fastmath=REORDER)
def _height(x, d, y):
    """<d, y - x>."""
    total = 0.0
    for k in range(len(x)):
        total += np.float64(d[k]) * np.float64(y[k] - x[k])
    return total


@inlined()
def _new_row(x, d, r, s, threshold, norms, at, spare):
    """y of a row, in spare memory; its norm is kept."""
    y, t, of = spare[0, : len(x)], spare[1, : len(x)], spare.dtype.type
    _start(x, d, r, s, threshold, of(np.finfo(spare.dtype).tiny), y, t)
    norms[at] = _radius(y, t, norms[at])
    if norms[at] == 0:
        y[:] = 0
    else:
        _point(y, t, of(norms[at]))
    return y


@compiled()
def _reduce(at, pieces, l1, norms, caps, u, summing, partial, first, last):
    """The sums of each chunk, and h at points with caps and dual variables."""
    like, x_at, g_at, d_at, v_at, y_at, _, start_at, start_scale, _, shares, eps, least = at
    tensor, start, count, height, _, slot, _ = pieces
    of, spare, places = like.dtype.type, np.empty((4, CHUNK), like.dtype), numba.carray(run_memory(np.uint32), RUN)
    for i in range(first, last):
        j, n, out = tensor[i], height[i], partial[i]
        x, g, d, v, _ = tensors(like, x_at, g_at, d_at, v_at, y_at, j, start[i], count[i] * n)
        own, ds, rs = weights(like, shares, eps, least, j), spare[2, :n], spare[3, :n]
        out[:] = 0
        for row in range(count[i]):
            low, high, to = row * n, row * n + n, slot[i] + row
            xs = x[low:high]
            new_averages(g[low:high], d[low:high], v[low:high], own, ds, rs)
            if summing:
                for k in range(low, high, RUN):
                    end = min(k + RUN, high)
                    add_sums(x[k:end], g[k:end], d[k:end], v[k:end], None, own, True, None, out)
                if len(start_at):
                    out[MOVED_SQ] += start_scale[j] * moved_sq(like, start_at, j, xs, start[i] + low, places)
            for p in range(len(u)):
                y = _new_row(xs, ds, rs, of(u[p] * caps[p, to]), of(caps[p, to] * l1[to]), norms, to, spare)
                out[SUMS + p] += _height(xs, ds, y)


@compiled()
def _write(at, pieces, l1, norms, caps, u, moves, first, last):
    """Store d and v, and x <- y if it `moves`."""
    like, x_at, g_at, d_at, v_at, y_at, _, _, _, _, shares, eps, least = at
    tensor, start, count, height, _, slot, _ = pieces
    of, spare = like.dtype.type, np.empty((3, CHUNK), like.dtype)
    for i in range(first, last):
        j, n = tensor[i], height[i]
        x, g, d, v, _ = tensors(like, x_at, g_at, d_at, v_at, y_at, j, start[i], count[i] * n)
        own = weights(like, shares, eps, least, j)
        for row in range(count[i]):
            low, high, to = row * n, row * n + n, slot[i] + row
            xs, rs = x[low:high], spare[2, :n]
            ds = new_averages(g[low:high], d[low:high], v[low:high], own, None, rs)
            if moves:
                xs[:] = _new_row(xs, ds, rs, of(u * caps[to]), of(caps[to] * l1[to]), norms, to, spare)


class MetricRowPart(RowPart):
    """Rows whose norm is penalised, in Adam's metric: every point takes a pass."""

    points = 1

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        self._norms = np.zeros(len(self._groups.blocks))  # of the rows at the last point, where Newton's method begins
        partial, h = self._pass(np.outer(np.ones(len(u)), alpha), u, summing=True)
        found: list[list[float]] = fold(partial[:, :SUMS].T, self._of_chunks, self._blocks).tolist()
        return found, Heights(h, [math.nan] * len(u))

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """One pass."""
        return Heights(self._pass(np.outer(np.ones(len(u)), alpha), u)[1], [math.nan] * len(u))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """One pass for all points."""
        return self._pass(np.outer(s, share), [1.0] * len(s))[1]

    def _pass(self, caps: np.ndarray, u: Floats, summing: bool = False) -> tuple[np.ndarray, list[float]]:
        """The sums, one row per chunk, and h at each point; one row of caps per point."""
        chunks, psi = self._layout.chunks, self._groups.psi
        partial, caps = np.empty((len(chunks.sizes), SUMS + len(u))), caps.take(self._groups.blocks, axis=1)
        args = (psi[0], self._norms, caps, np.array(u, np.float64), summing, partial)
        self._run(_reduce, chunks, 3.0 + 12 * len(u), *args)
        return partial, partial[:, SUMS:].sum(axis=0).tolist()

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """One pass."""
        args = (self._groups.psi[0], self._norms, np.array(alpha)[self._groups.blocks], u, moves)
        self._run(_write, self._layout.chunks, 15.0, *args)
