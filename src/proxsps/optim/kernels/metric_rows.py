"""Passes for rows whose norm is penalised, in Adam's metric: h at several points, and one write.

With r = 1/D of an entry, z = x - s r d and thresholds t = alpha l1 r, the new row is 0 if ||z / t|| <= 1, and else
y = z R / (R + t) with R = ||y|| the root of ||z / (R + t)|| = 1 (`proxsps.regularizers._diagonal`). A few sums of a row
do not give R, so each point takes some Newton steps; the row stays in the cache, and R of the last point is where the
next ones start. The new d and r are computed in every pass; only the write stores d and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import numpy as np

from proxsps.optim.kernels.averages import new_metric, new_slopes, overflows, store_metric, store_slopes, typed_weights
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.entrywise import Sources
from proxsps.optim.kernels.layout import CHUNK, ENTRYWISE, REORDER, RUN, pointer, run, run_memory
from proxsps.optim.kernels.row_layout import RowLayout, RowMemory
from proxsps.optim.kernels.sampling import moved_sq

ROUNDS = 100  # Newton steps at most; some five are usual
SUMS = 6  # <d, r d>, <d, x>, sum of (d x)^2, <g, x>, ||r g||^2, ||x - x_0||^2


class MetricRows(NamedTuple):
    """How rows lie in memory, and the norm of each new row at the last point of a pass."""

    like: np.ndarray
    layout: RowLayout
    norms: np.ndarray
    turns: Iterator[bool]


def memory(rows: RowMemory) -> MetricRows | None:
    """The memory of rows, or None if some do not lie in memory as one piece that fits into a chunk."""
    if not rows.layout.whole.all() or not rows.layout.in_order:
        return None
    return MetricRows(rows.like, rows.layout, np.zeros(rows.layout.rows), rows.turns)


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
    total = 0.0
    for k in range(len(x)):
        total += np.float64(d[k]) * np.float64(y[k] - x[k])
    return total


@inlined(fastmath=REORDER)
def _move_sq(x, y):
    total = 0.0
    for k in range(len(x)):
        move = np.float64(y[k] - x[k])
        total += move * move
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


@inlined(fastmath=REORDER)
def _sums(x, g, d, r, zero):
    """The sums of a run but the last one, and ||g||^2."""
    de, dx, noise, gx, gg, size = zero, zero, zero, zero, zero, zero
    for k in range(len(x)):
        product, scaled = d[k] * x[k], r[k] * g[k]
        de += d[k] * (r[k] * d[k])
        dx += product
        noise += product * product
        gx += g[k] * x[k]
        gg += scaled * scaled
        size += g[k] * g[k]
    return de, dx, noise, gx, gg, size


@inlined()
def _add_sums(x, g, d, r, out):
    """The same of a row; NaN if a square of g overflows."""
    for low in range(0, len(x), RUN):
        high = low + RUN
        found = _sums(x[low:high], g[low:high], d[low:high], r[low:high], x.dtype.type(0))
        for row in range(SUMS - 1):
            out[row] += found[row]
        if not np.isfinite(found[5]) and overflows(g[low:high]):
            out[0] = np.nan


@compiled()
def _pass(
    like, tensor, start, count, height, stride, slot, x_at, d_at, g_at, v_at, start_at, weights, eps, least, l1, caps,
    u, moves, summing, norms, partial, first, last,
):  # fmt: skip
    """The sums of each chunk, and h, or with `moves` ||y - x||^2, at points with caps and dual variables."""
    of, points = like.dtype.type, len(u)
    slope, inverse = np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype)
    z, t, places = np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype), numba.carray(run_memory(np.uint32), RUN)
    for i in range(first, last):
        j, n = tensor[i], height[i]
        end = start[i] + count[i] * n
        x = numba.carray(pointer(x_at[j], like), end)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), end)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), end)[start[i] :]
        v = numba.carray(pointer(v_at[j], like), end)[start[i] :]
        own = typed_weights(like, weights, eps, least, j)
        partial[i, :] = 0
        for row in range(count[i]):
            low, high, at = row * n, row * n + n, slot[i] + row
            xs, gs = x[low:high], g[low:high]
            ds, rs = new_slopes(gs, d[low:high], own, slope), new_metric(gs, v[low:high], own, inverse)
            if summing:
                _add_sums(xs, gs, ds, rs, partial[i])
                if len(start_at):
                    partial[i, SUMS - 1] += moved_sq(like, start_at, j, xs, start[i] + low, places)
            for p in range(points):
                y = _new_row(xs, ds, rs, of(u[p] * caps[p, at]), of(caps[p, at] * l1[at]), norms, at, z, t)
                partial[i, SUMS + p] += _move_sq(xs, y) if moves else _height(xs, ds, y)


@compiled()
def _write(
    like, tensor, start, count, height, stride, slot, x_at, d_at, g_at, v_at, weights, eps, least, l1, caps, u, relax,
    norms, first, last,
):  # fmt: skip
    """Store d and v, and x <- x + relax (y - x), with y itself where relax is 1."""
    of = like.dtype.type
    inverse, z, t = np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype), np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        j, n = tensor[i], height[i]
        end = start[i] + count[i] * n
        x = numba.carray(pointer(x_at[j], like), end)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), end)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), end)[start[i] :]
        v = numba.carray(pointer(v_at[j], like), end)[start[i] :]
        own = typed_weights(like, weights, eps, least, j)
        for row in range(count[i]):
            low, high, at = row * n, row * n + n, slot[i] + row
            xs, ds = x[low:high], d[low:high]
            rs = store_metric(g[low:high], v[low:high], own, inverse)
            store_slopes(g[low:high], ds, own)
            y = _new_row(xs, ds, rs, of(u * caps[at]), of(caps[at] * l1[at]), norms, at, z, t)
            if relax == 1:
                xs[:] = y
            else:
                for k in range(n):
                    xs[k] += of(relax) * (y[k] - xs[k])


def reduce(
    rows: MetricRows,
    at: Sources,
    l1: np.ndarray,
    caps: np.ndarray,
    u: np.ndarray,
    moves: bool = False,
    summing: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The sums as rows, one column per tensor (0 unless `summing`), and h at each point, or ||y - x||^2.

    Args:
        rows: how the rows lie in memory.
        at: where they lie, with their averages.
        l1: the weight of each row's norm.
        caps: one row per point, one column per row of the tensors.
        u: the dual variable of each point.
        moves: whether squared lengths are wanted instead of h.
        summing: whether the sums are wanted; this is the first pass of a step.
    """
    chunks = rows.layout.chunks
    if summing:
        rows.norms[:] = 0  # a step does not depend on the one before
    partial = np.empty((len(chunks.sizes), SUMS + len(u)))
    args: tuple[Any, ...] = (at.x_at, at.d_at, at.g_at, at.v_at, at.start_at, at.weights, at.eps, at.least)
    args += (l1, np.ascontiguousarray(caps), u, moves, summing, rows.norms, partial)
    weight = 3.0 + 12 * len(u)
    run(_pass, chunks, rows.like, *chunks.columns, *args, weight=weight, backwards=next(rows.turns))
    sums = np.array([np.bincount(chunks.columns[0], row, len(at.x_at)) for row in partial[:, :SUMS].T])
    if len(at.start_at):
        sums[5] *= at.start_scale
    return sums, partial[:, SUMS:].sum(axis=0)


def write(rows: MetricRows, at: Sources, l1: np.ndarray, caps: np.ndarray, u: float, relax: float) -> None:
    """x <- x + relax (y(u) - x); where relax is 1 exactly y(u), with exact zeros. Stores new averages."""
    chunks = rows.layout.chunks
    args = (at.x_at, at.d_at, at.g_at, at.v_at, at.weights, at.eps, at.least, l1, caps, u, relax, rows.norms)
    run(_write, chunks, rows.like, *chunks.columns, *args, weight=15.0, backwards=next(rows.turns))


__all__ = ["MetricRows", "memory", "reduce", "write"]
