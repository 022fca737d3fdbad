"""Passes for rows whose norm is penalised, in Adam's metric: h at several points, and one write.

With r = 1/D of an entry, z = x - s r d and thresholds t = alpha l1 r, the new row is 0 if ||z / t|| <= 1, and else
y = z R / (R + t) with R = ||y|| the root of ||z / (R + t)|| = 1 (`proxsps.regularizers._diagonal`). A few sums of a row
do not give R, so each point takes some Newton steps; the row stays in the cache, and R of the last point is where the
next ones start. The new d and r are computed in every pass; only the write stores d and v.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from proxsps.optim.kernels.averages import MOVED_SQ, SUMS, add_sums, new_averages, typed_weights
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import CHUNK, ENTRYWISE, REORDER, RUN, entries, fold, run, run_memory
from proxsps.optim.kernels.parts import Floats, RowPart
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
def _new_row(x, d, r, s, threshold, norms, at, z, t):
    """y of a row, in the memory of z; its norm is kept."""
    y, own, of = z[: len(x)], t[: len(x)], z.dtype.type
    _start(x, d, r, s, threshold, of(np.finfo(z.dtype).tiny), y, own)
    norms[at] = _radius(y, own, norms[at])
    if norms[at] == 0:
        y[:] = 0
    else:
        _point(y, own, of(norms[at]))
    return y


@compiled()
def reduce(
    like, tensor, start, count, height, stride, slot, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights,
    eps, least, l1, norms, caps, u, summing, partial, first, last,
):  # fmt: skip
    """The sums of each chunk, and h at points with caps and dual variables."""
    of, places = like.dtype.type, numba.carray(run_memory(np.uint32), RUN)
    slope, inverse = np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype)
    z, t = np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        j, n, size, out = tensor[i], height[i], count[i] * height[i], partial[i]
        x, g = entries(like, x_at, j, start[i], size), entries(like, g_at, j, start[i], size)
        d, v = entries(like, d_at, j, start[i], size), entries(like, v_at, j, start[i], size)
        own, ds, rs = typed_weights(like, weights, eps, least, j), slope[:n], inverse[:n]
        out[:] = 0
        for row in range(count[i]):
            low, high, at = row * n, row * n + n, slot[i] + row
            xs = x[low:high]
            if summing:
                for k in range(low, high, RUN):
                    end = min(k + RUN, high)
                    add_sums(x[k:end], g[k:end], d[k:end], v[k:end], None, own, ds[k - low :], rs[k - low :], True, out)
                if len(start_at):
                    out[MOVED_SQ] += start_scale[j] * moved_sq(like, start_at, j, xs, start[i] + low, places)
            else:
                new_averages(g[low:high], d[low:high], v[low:high], own, ds, rs)
            for p in range(len(u)):
                y = _new_row(xs, ds, rs, of(u[p] * caps[p, at]), of(caps[p, at] * l1[at]), norms, at, z, t)
                out[SUMS + p] += _height(xs, ds, y)


@compiled()
def write(
    like, tensor, start, count, height, stride, slot, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights,
    eps, least, l1, norms, caps, u, moves, first, last,
):  # fmt: skip
    """Store d and v, and x <- y if it `moves`."""
    of = like.dtype.type
    inverse, z, t = np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        j, n, size = tensor[i], height[i], count[i] * height[i]
        x, g = entries(like, x_at, j, start[i], size), entries(like, g_at, j, start[i], size)
        d, v = entries(like, d_at, j, start[i], size), entries(like, v_at, j, start[i], size)
        own, rs = typed_weights(like, weights, eps, least, j), inverse[:n]
        for row in range(count[i]):
            low, high, at = row * n, row * n + n, slot[i] + row
            xs, ds = x[low:high], d[low:high]
            new_averages(g[low:high], ds, v[low:high], own, None, rs)
            if moves:
                xs[:] = _new_row(xs, ds, rs, of(u * caps[at]), of(caps[at] * l1[at]), norms, at, z, t)


class MetricRowPart(RowPart):
    """Rows whose norm is penalised, in Adam's metric: every point takes a pass."""

    points = 1

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        self._norms = np.zeros(len(self._owners))  # of the new rows at the last point, where Newton's method begins
        partial = self._pass(np.outer(np.ones(len(u)), alpha), u, summing=True)
        of_chunks = self._tensors[self._memory.layout.chunks.columns[0]]
        found: list[list[float]] = fold(partial[:, :SUMS].T, of_chunks, self._blocks).tolist()
        return found, Heights(_heights(partial), [math.nan] * len(u))

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """One pass."""
        return Heights(_heights(self._pass(np.outer(np.ones(len(u)), alpha), u)), [math.nan] * len(u))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """One pass for all points."""
        return _heights(self._pass(np.outer(s, share), [1.0] * len(s)))

    def _pass(self, caps: np.ndarray, u: Floats, summing: bool = False) -> np.ndarray:
        """Sums, then h at each point, one row per chunk; one row of caps per point."""
        partial = np.empty((len(self._memory.layout.chunks.sizes), SUMS + len(u)))
        args = (np.ascontiguousarray(caps[:, self._owners]), np.array(u, np.float64), summing, partial)
        self._run(reduce, 3.0 + 12 * len(u), *args)
        return partial

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """One pass."""
        self._run(write, 15.0, np.array(alpha)[self._owners], u, moves)

    def _run(self, kernel: Any, weight: float, *args: Any) -> None:
        memory, chunks = self._memory, self._memory.layout.chunks
        args = (memory.like, *chunks.columns, *self.at, self._psi.l1, self._norms, *args)
        run(kernel, chunks, *args, weight=weight, backwards=next(memory.turns))


def _heights(partial: np.ndarray) -> list[float]:
    found: list[float] = partial[:, SUMS:].sum(axis=0).tolist()
    return found
