"""The passes of `proxsps.optim.kernels.entries` in Adam's metric, where each entry has its own alpha.

With r = 1/D of an entry, its prox has the step size alpha r, and it moves along e = r d:

    z = x - s e,    threshold alpha l1 r,    y = prox(z),    h = <d, y - x>.

The new d, and r from the new v, are computed run by run into memory that stays in the cache; only the write stores d
and v. Factors 1 / (1 + alpha l2 r) differ by entry, so they are part of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from proxsps.optim.kernels.caching import compiled
from proxsps.optim.kernels.entry_loops import BOX, FURTHER, SOFT
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, pointer
from proxsps.optim.kernels.moments import averaged, averaged_square, metric, overflows
from proxsps.optim.kernels.sampling import moved_sq, sample_end
from proxsps.optim.kernels.scalar import prox


@numba.njit
def _typed(like, constants, b):
    """Threshold, edge, curvature, lower, upper of block b before r, then 1 and 0, in the type of the entries."""
    of = like.dtype.type
    threshold, edge, curvature = constants[0, b], constants[1, b], constants[2, b]
    return of(threshold), of(edge), of(curvature), of(constants[5, b]), of(constants[6, b]), of(1), of(0)


@numba.njit(fastmath=ENTRYWISE)
def _soft_change(x, d, r, s, psi):
    """x - y for l1 alone, and dy/dz along e."""
    threshold, _, _, _, _, _, zero = psi
    e, edge = r * d, r * threshold
    z = x - s * e
    c = min(max(z, -edge), edge)
    inside = z != c
    return s * e + c if inside else x, e if inside else zero


@numba.njit(fastmath=ENTRYWISE)
def _box_change(x, d, r, s, psi):
    """x - y for bounds alone, and dy/dz along e."""
    _, _, _, lower, upper, _, zero = psi
    e = r * d
    z = x - s * e
    inside = (z > lower) & (z < upper)
    return s * e if inside else x - min(max(z, lower), upper), e if inside else zero


@numba.njit(fastmath=ENTRYWISE, error_model="numpy")
def _change(x, d, r, s, psi):
    """x - y, and dy/dz along e."""
    threshold, edge, curvature, lower, upper, one, zero = psi
    e, most, bend = r * d, r * threshold, r * curvature
    z, shrink = x - s * e, one / (one + bend)
    c = min(max(z, -most), most)
    y = min(max((z - c) * shrink, lower), upper)
    inside = (abs(z) > r * edge) & (y > lower) & (y < upper)
    return shrink * (s * e + c + bend * x) if inside else x - y, shrink * e if inside else zero


def _loops(change: Callable[..., Any]) -> Any:
    """As in `entry_loops`: the sums with h and slope at one u, the same at three u, or one u alone."""

    @numba.njit(fastmath=REORDER)
    def first(x, d, r, s, psi):
        de, dx, noise, h, slope = psi[-1], psi[-1], psi[-1], psi[-1], psi[-1]
        for k in range(len(x)):
            product = d[k] * x[k]
            de += d[k] * (r[k] * d[k])
            dx += product
            noise += product * product
            move, inside = change(x[k], d[k], r[k], s, psi)
            h += d[k] * move
            slope += d[k] * inside
        return de, dx, noise, h, slope

    @numba.njit(fastmath=REORDER)
    def three(x, d, r, s, t, v, psi):
        de, dx, noise = psi[-1], psi[-1], psi[-1]
        h_s, h_t, h_v, slope_s, slope_t, slope_v = psi[-1], psi[-1], psi[-1], psi[-1], psi[-1], psi[-1]
        for k in range(len(x)):
            product = d[k] * x[k]
            de += d[k] * (r[k] * d[k])
            dx += product
            noise += product * product
            move, inside = change(x[k], d[k], r[k], s, psi)
            h_s += d[k] * move
            slope_s += d[k] * inside
            move, inside = change(x[k], d[k], r[k], t, psi)
            h_t += d[k] * move
            slope_t += d[k] * inside
            move, inside = change(x[k], d[k], r[k], v, psi)
            h_v += d[k] * move
            slope_v += d[k] * inside
        return de, dx, noise, h_s, h_t, h_v, slope_s, slope_t, slope_v

    @numba.njit(fastmath=REORDER)
    def one(x, d, r, s, psi):
        h, slope = psi[-1], psi[-1]
        for k in range(len(x)):
            move, inside = change(x[k], d[k], r[k], s, psi)
            h += d[k] * move
            slope += d[k] * inside
        return h, slope

    @numba.njit
    def add(x, d, r, steps, psi, out):
        points = len(steps)
        done = 3 if points >= 3 else 1
        if done == 3:
            sums = three(x, d, r, steps[0], steps[1], steps[2], psi)
            for p in range(3):
                out[p] += sums[p]
                out[3 + p] += sums[3 + p]
                out[3 + points + p] += sums[6 + p]
        else:
            start = first(x, d, r, steps[0], psi)
            for row in range(4):
                out[row] += start[row]
            out[3 + points] += start[4]
        for p in range(done, points):
            h, slope = one(x, d, r, steps[p], psi)
            out[3 + p] += h
            out[3 + points + p] += slope

    return add


_add_soft, _add_box, _add_general = _loops(_soft_change), _loops(_box_change), _loops(_change)


@numba.njit(fastmath=REORDER)
def _change_sq(x, d, r, s, psi):
    total = psi[-1]
    for k in range(len(x)):
        change, _ = _change(x[k], d[k], r[k], s, psi)
        total += change * change
    return total


@numba.njit(fastmath=ENTRYWISE, error_model="numpy")
def slopes(g, d, v, weights, eps, least, one, slope, inverse):
    """The new d and r of a run."""
    old, new, old_v, new_v = weights
    for k in range(len(g)):
        slope[k] = averaged(old, d[k], new, g[k])
        inverse[k] = one / metric(averaged_square(old_v, v[k], new_v, g[k]), eps, least)
    return slope[: len(g)], inverse[: len(g)]


@numba.njit(fastmath=ENTRYWISE, error_model="numpy")
def store_metric(g, d, v, weights, eps, least, one, inverse):
    """The same, with d and v stored."""
    old, new, old_v, new_v = weights
    for k in range(len(g)):
        square = averaged_square(old_v, v[k], new_v, g[k])
        d[k], v[k] = averaged(old, d[k], new, g[k]), square
        inverse[k] = one / metric(square, eps, least)


@numba.njit(fastmath=REORDER)
def _further(x, g, d, r, zero):
    """<d, x>, <g, x>, ||r g||^2 and ||g||^2."""
    dx, gx, gg, size = zero, zero, zero, zero
    for k in range(len(x)):
        scaled = r[k] * g[k]
        dx += d[k] * x[k]
        gx += g[k] * x[k]
        gg += scaled * scaled
        size += g[k] * g[k]
    return dx, gx, gg, size


@numba.njit
def new_weights(like, weights, j):
    """The weights of old and new values of a tensor, in the type of the entries."""
    of = like.dtype.type
    return of(weights[0, j]), of(weights[1, j]), of(weights[2, j]), of(weights[3, j])


@compiled(fastmath=REORDER)
def reduce_metric(
    like, block, tensor, start, length, x_at, d_at, g_at, v_at, start_at, weights, eps, least, kinds, constants, steps,
    partial, further, first, last,
):  # fmt: skip
    """As `entry_loops.reduce_plain`; h and its slope have all their factors but the sign and alpha."""
    of, width = like.dtype.type, 3 + 2 * steps.shape[2]
    slope, inverse = np.empty(RUN, like.dtype), np.empty(RUN, like.dtype)
    for i in range(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        v = numba.carray(pointer(v_at[j], like), start[i] + n)[start[i] :]
        own = new_weights(like, weights, j)
        partial[i, :] = 0
        for low in range(0, n, RUN):
            end = low + RUN
            xs, gs = x[low:end], g[low:end]
            ds, rs = slopes(gs, d[low:end], v[low:end], own, of(eps), of(least), of(1), slope, inverse)
            for c in range(len(steps)):
                psi, s, out = _typed(like, constants[c], b), steps[c, b], partial[i, c * width : (c + 1) * width]
                if kinds[b] == SOFT:
                    _add_soft(xs, ds, rs, s, psi, out)
                elif kinds[b] == BOX:
                    _add_box(xs, ds, rs, s, psi, out)
                else:
                    _add_general(xs, ds, rs, s, psi, out)
            if further:
                sums = _further(xs, gs, ds, rs, of(0))
                for row in range(3):
                    partial[i, row - FURTHER] += sums[row]
                if not np.isfinite(sums[3]) and overflows(gs):
                    partial[i, 1 - FURTHER] = np.nan
                if len(start_at):
                    begin = numba.carray(pointer(start_at[j], like), sample_end(start[i] + n))
                    partial[i, -1] += moved_sq(xs, begin, start[i] + low)


@compiled(fastmath=REORDER)
def move_sq_metric(
    like, block, tensor, start, length, x_at, d_at, g_at, v_at, start_at, weights, eps, least, constants, steps,
    partial, first, last,
):  # fmt: skip
    """||y - x||^2 of each chunk, a Euclidean length."""
    of = like.dtype.type
    slope, inverse = np.empty(RUN, like.dtype), np.empty(RUN, like.dtype)
    for i in range(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        v = numba.carray(pointer(v_at[j], like), start[i] + n)[start[i] :]
        psi, s, own = _typed(like, constants, b), of(steps[b]), new_weights(like, weights, j)
        partial[0, i] = 0
        for low in range(0, n, RUN):
            end = low + RUN
            ds, rs = slopes(g[low:end], d[low:end], v[low:end], own, of(eps), of(least), of(1), slope, inverse)
            partial[0, i] += _change_sq(x[low:end], ds, rs, s, psi)


@compiled(fastmath=ENTRYWISE, error_model="numpy")
def write_metric(
    like, block, tensor, start, length, x_at, d_at, g_at, v_at, start_at, weights, eps, least, constants, steps, relax,
    first, last,
):  # fmt: skip
    """Store d and v, and x <- x + relax (y - x) in each chunk, with y itself where relax is 1."""
    of = like.dtype.type
    part, one, inverse = of(relax), of(1), np.empty(RUN, like.dtype)
    for i in range(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        v = numba.carray(pointer(v_at[j], like), start[i] + n)[start[i] :]
        threshold, _, curvature, lower, upper, _, _ = _typed(like, constants, b)
        s, own = of(steps[b]), new_weights(like, weights, j)
        for low in range(0, n, RUN):
            xs, ds = x[low : low + RUN], d[low : low + RUN]
            store_metric(g[low : low + RUN], ds, v[low : low + RUN], own, of(eps), of(least), one, inverse)
            for k in range(len(xs)):
                r = inverse[k]
                z, shrink = xs[k] - s * (r * ds[k]), one if curvature == 0 else one / (one + r * curvature)
                y = prox(z, r * threshold, shrink, lower, upper)
                xs[k] = y if relax == 1 else xs[k] + part * (y - xs[k])


__all__ = ["move_sq_metric", "new_weights", "reduce_metric", "slopes", "store_metric", "write_metric"]
