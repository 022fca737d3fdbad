"""Compiled loops over entries in the identity metric; `proxsps.optim.kernels.entries` says what they are for.

Where the slope is an average of gradients, its new value is computed run by run in every pass, into memory that stays
in the cache, and stored by the write alone (as in `proxsps.optim.kernels.moments`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from proxsps.optim.kernels.caching import compiled
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, pointer
from proxsps.optim.kernels.moments import new_slopes, store_slopes
from proxsps.optim.kernels.sampling import moved_sq, sample_end
from proxsps.optim.kernels.scalar import prox

SOFT, BOX, GENERAL = 0, 1, 2  # l1 > 0 without bounds, in a metric also without l2; bounds alone; everything
FURTHER = 4  # sums that only averages need: see `entries.Further`


@numba.njit
def _typed(like, constants, b):
    """The constants of block b in the type of the entries."""
    of = like.dtype.type
    threshold, edge, curvature, whole = constants[0, b], constants[1, b], constants[2, b], constants[3, b]
    shrink, lower, upper = constants[4, b], constants[5, b], constants[6, b]
    return of(threshold), of(edge), of(curvature), of(whole), of(shrink), of(lower), of(upper), of(0)


@numba.njit(fastmath=ENTRYWISE)
def _soft_change(x, d, s, psi):
    """(1 + alpha l2) (x - y) without bounds, and d inside, 0 elsewhere."""
    threshold, _, curvature, whole, _, _, _, zero = psi
    z = x - s * d
    c = min(max(z, -threshold), threshold)
    inside = z != c
    return s * d + c + curvature * x if inside else whole * x, d if inside else zero


@numba.njit(fastmath=ENTRYWISE)
def _box_change(x, d, s, psi):
    """x - y for bounds alone, and d inside, 0 elsewhere."""
    _, _, _, _, _, lower, upper, zero = psi
    z = x - s * d
    inside = (z > lower) & (z < upper)
    return s * d if inside else x - min(max(z, lower), upper), d if inside else zero


@numba.njit(fastmath=ENTRYWISE)
def _change(x, d, s, psi):
    """(1 + alpha l2) (x - y), and d inside, 0 elsewhere."""
    threshold, edge, curvature, whole, shrink, lower, upper, zero = psi
    z = x - s * d
    c = min(max(z, -threshold), threshold)
    y = min(max((z - c) * shrink, lower), upper)
    inside = (abs(z) > edge) & (y > lower) & (y < upper)
    return s * d + c + curvature * x if inside else whole * (x - y), d if inside else zero


def _loops(change: Callable[..., Any]) -> Any:
    """Loops over a run of entries: the plain sums with h and slope at one u, the same at three u, or one u alone.

    One loop for a whole usual round overlaps arithmetic with waiting for memory; further u find the run in the cache.
    """

    @numba.njit(fastmath=REORDER)
    def first(x, d, s, psi):
        dd, dx, noise, h, slope = psi[-1], psi[-1], psi[-1], psi[-1], psi[-1]
        for k in range(len(x)):
            product = d[k] * x[k]
            dd += d[k] * d[k]
            dx += product
            noise += product * product
            move, inside = change(x[k], d[k], s, psi)
            h += d[k] * move
            slope += inside * inside
        return dd, dx, noise, h, slope

    @numba.njit(fastmath=REORDER)
    def three(x, d, s, t, v, psi):
        dd, dx, noise = psi[-1], psi[-1], psi[-1]
        h_s, h_t, h_v, slope_s, slope_t, slope_v = psi[-1], psi[-1], psi[-1], psi[-1], psi[-1], psi[-1]
        for k in range(len(x)):
            product = d[k] * x[k]
            dd += d[k] * d[k]
            dx += product
            noise += product * product
            move, inside = change(x[k], d[k], s, psi)
            h_s += d[k] * move
            slope_s += inside * inside
            move, inside = change(x[k], d[k], t, psi)
            h_t += d[k] * move
            slope_t += inside * inside
            move, inside = change(x[k], d[k], v, psi)
            h_v += d[k] * move
            slope_v += inside * inside
        return dd, dx, noise, h_s, h_t, h_v, slope_s, slope_t, slope_v

    @numba.njit(fastmath=REORDER)
    def one(x, d, s, psi):
        h, slope = psi[-1], psi[-1]
        for k in range(len(x)):
            move, inside = change(x[k], d[k], s, psi)
            h += d[k] * move
            slope += inside * inside
        return h, slope

    @numba.njit
    def add(x, d, steps, psi, out):
        """Add the sums of a run to those of its chunk."""
        points = len(steps)
        done = 3 if points >= 3 else 1
        if done == 3:
            sums = three(x, d, steps[0], steps[1], steps[2], psi)
            for p in range(3):
                out[p] += sums[p]
                out[3 + p] += sums[3 + p]
                out[3 + points + p] += sums[6 + p]
        else:
            start = first(x, d, steps[0], psi)
            for row in range(4):
                out[row] += start[row]
            out[3 + points] += start[4]
        for p in range(done, points):
            h, slope = one(x, d, steps[p], psi)
            out[3 + p] += h
            out[3 + points + p] += slope

    return add


_add_soft, _add_box, _add_general = _loops(_soft_change), _loops(_box_change), _loops(_change)


@numba.njit(fastmath=REORDER)
def _change_sq(x, d, s, psi):
    total = psi[-1]
    for k in range(len(x)):
        change, _ = _change(x[k], d[k], s, psi)
        total += change * change
    return total


@numba.njit(fastmath=REORDER)
def _further(x, g, d, zero):
    dx, gx, gg = zero, zero, zero
    for k in range(len(x)):
        dx += d[k] * x[k]
        gx += g[k] * x[k]
        gg += g[k] * g[k]
    return dx, gx, gg


@compiled(fastmath=REORDER)
def reduce_plain(
    like, block, tensor, start, length, x_at, d_at, g_at, v_at, start_at, weights, eps, least, kinds, constants, steps,
    partial, further, first, last,
):  # fmt: skip
    """The sums of `reduce` as one row per chunk, those of h and its slope without their common factors.

    There is one set of constants and steps after the other, all for a run while it is in the cache.
    """
    of, width = like.dtype.type, 3 + 2 * steps.shape[2]
    averages, fresh = len(g_at) > 0, np.empty(RUN, like.dtype)
    for i in range(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :] if averages else x
        partial[i, :] = 0
        for low in range(0, n, RUN):
            xs, ds = x[low : low + RUN], d[low : low + RUN]
            if averages:
                ds = new_slopes(g[low : low + RUN], ds, of(weights[0, j]), of(weights[1, j]), fresh)
            for c in range(len(steps)):
                psi, s, out = _typed(like, constants[c], b), steps[c, b], partial[i, c * width : (c + 1) * width]
                if kinds[b] == SOFT:
                    _add_soft(xs, ds, s, psi, out)
                elif kinds[b] == BOX:
                    _add_box(xs, ds, s, psi, out)
                else:
                    _add_general(xs, ds, s, psi, out)
            if further:
                sums = _further(xs, g[low : low + RUN], ds, of(0))
                for row in range(3):
                    partial[i, row - FURTHER] += sums[row]
                if len(start_at):
                    begin = numba.carray(pointer(start_at[j], like), sample_end(start[i] + n))
                    partial[i, -1] += moved_sq(xs, begin, start[i] + low)


@compiled(fastmath=REORDER)
def move_sq_plain(
    like, block, tensor, start, length, x_at, d_at, g_at, v_at, start_at, weights, eps, least, constants, steps,
    partial, first, last,
):  # fmt: skip
    """||y - x||^2 of each chunk, times (1 + alpha l2)^2."""
    of = like.dtype.type
    averages, fresh = len(g_at) > 0, np.empty(RUN, like.dtype)
    for i in range(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :] if averages else x
        psi, s = _typed(like, constants, b), of(steps[b])
        partial[0, i] = 0
        for low in range(0, n, RUN):
            ds = d[low : low + RUN]
            if averages:
                ds = new_slopes(g[low : low + RUN], ds, of(weights[0, j]), of(weights[1, j]), fresh)
            partial[0, i] += _change_sq(x[low : low + RUN], ds, s, psi)


@compiled(fastmath=ENTRYWISE)
def write_plain(
    like, block, tensor, start, length, x_at, d_at, g_at, v_at, start_at, weights, eps, least, constants, steps, relax,
    first, last,
):  # fmt: skip
    """x <- x + relax (y - x) in each chunk, with y itself where relax is 1; new averages are stored."""
    of = like.dtype.type
    part = of(relax)
    for i in range(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        threshold, _, _, _, shrink, lower, upper, _ = _typed(like, constants, b)
        s = of(steps[b])
        for low in range(0, n, RUN):
            xs, ds = x[low : low + RUN], d[low : low + RUN]
            if len(g_at):
                g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] + low :]
                store_slopes(g[: len(xs)], ds, of(weights[0, j]), of(weights[1, j]))
            if relax == 1:
                for k in range(len(xs)):
                    xs[k] = prox(xs[k] - s * ds[k], threshold, shrink, lower, upper)
            else:
                for k in range(len(xs)):
                    xs[k] += part * (prox(xs[k] - s * ds[k], threshold, shrink, lower, upper) - xs[k])


__all__ = ["BOX", "FURTHER", "GENERAL", "SOFT", "move_sq_plain", "reduce_plain", "write_plain"]
