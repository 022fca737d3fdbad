"""Passes for blocks whose prox acts on each entry by itself: h and its slope at several u, and one write.

With z = x - s d, s = u alpha, the new point is y = prox(z) entry by entry, and h = <d, y - x>. Entries where the prox
moves with z are called inside. There y - x is computed without y, which may agree with x in all its digits but a few:

    (1 + alpha l2) (x - y) = s d + clip(z, -alpha l1, alpha l1) + alpha l2 x      inside,
    x - y with y exactly 0, lower or upper                                        elsewhere.

Sums are taken in the type of the entries over a run of them, then in doubles.
"""

from __future__ import annotations

import numba
import numpy as np

from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, Memory, pointer, run, sampled, walk
from proxsps.optim.kernels.scalar import Psi, prox

SOFT, BOX, GENERAL = 0, 1, 2  # l1 > 0 without bounds; bounds alone; everything


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


def _loops(change):
    """Loops over a run of entries: the plain sums with h and slope at one u, the same at three u, or one u alone.

    One loop for all of a usual round overlaps arithmetic and waiting for memory; further u find the run in the cache.
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


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _reduce(like, block, tensor, start, length, x_at, d_at, kinds, constants, steps, partial, first, last):
    """The sums of `reduce` as one row per chunk, those of h and its slope without their common factors."""
    for i in walk(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        psi, s, out = _typed(like, constants, b), steps[b].astype(like.dtype), partial[i]
        out[:] = 0
        for low in range(0, n, RUN):
            xs, ds = x[low : low + RUN], d[low : low + RUN]
            if kinds[b] == SOFT:
                _add_soft(xs, ds, s, psi, out)
            elif kinds[b] == BOX:
                _add_box(xs, ds, s, psi, out)
            else:
                _add_general(xs, ds, s, psi, out)


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _move_sq(like, block, tensor, start, length, x_at, d_at, constants, steps, partial, first, last):
    """||y - x||^2 of each chunk, times (1 + alpha l2)^2."""
    for i in walk(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        psi, s = _typed(like, constants, b), like.dtype.type(steps[b])
        partial[0, i] = 0
        for low in range(0, n, RUN):
            partial[0, i] += _change_sq(x[low : low + RUN], d[low : low + RUN], s, psi)


@numba.njit(nogil=True, cache=True, fastmath=ENTRYWISE)
def _write(like, block, tensor, start, length, x_at, d_at, constants, steps, relax, first, last):
    """x <- x + relax (y - x) in each chunk, with y itself where relax is 1."""
    part = like.dtype.type(relax)
    for i in walk(first, last):
        j, n, b = tensor[i], length[i], block[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), start[i] + n)[start[i] :]
        threshold, _, _, _, shrink, lower, upper, _ = _typed(like, constants, b)
        s = like.dtype.type(steps[b])
        if relax == 1:
            for k in range(n):
                x[k] = prox(x[k] - s * d[k], threshold, shrink, lower, upper)
        else:
            for k in range(n):
                x[k] += part * (prox(x[k] - s * d[k], threshold, shrink, lower, upper) - x[k])


def _constants(psi: Psi, alpha: np.ndarray) -> np.ndarray:
    """Rows, one column per block: threshold, edge, curvature, 1 + curvature and its inverse, lower, upper.

    Entries with |z| above the edge move with z: all of them where there is no threshold.
    """
    threshold, curvature = alpha * psi.l1, alpha * psi.l2
    edge = np.where(psi.l1 > 0, threshold, -1.0)
    return np.array([threshold, edge, curvature, 1 + curvature, 1 / (1 + curvature), psi.lower, psi.upper])


def _kinds(psi: Psi) -> np.ndarray:
    free = (psi.lower == -np.inf) & (psi.upper == np.inf)
    unpenalised = (psi.l1 == 0) & (psi.l2 == 0)
    return np.where(unpenalised, BOX, np.where((psi.l1 > 0) & free, SOFT, GENERAL))


def reduce(at: Memory, psi: Psi, alpha: np.ndarray, u: np.ndarray, every: int = 1) -> np.ndarray:
    """The sums of a search at P values of u, from one pass over memory: [3 + 2 P, blocks].

    Rows: ||d||^2; <d, x>; the sum of (d x)^2, whose root times eps is the rounding noise of h; P rows
    h(u) = <d, y(u) - x>; P rows dh/du = -alpha sum of d^2 prox'(z).

    Args:
        at: the memory of parameters and slopes.
        psi: one set of constants per block.
        alpha: one number per block.
        u: the P dual variables.
        every: above 1 only a sample of about one entry in `every` is read, and the sums are scaled up to estimates of
            those of whole blocks. Tensors of the same sizes give the same sample.
    """
    if not len(u):
        raise ValueError("u must have at least one point: the loops have no form without.")
    layout, scale = (at.layout, 1.0) if every == 1 else sampled(at.layout, every)
    backwards = every == 1 and next(at.turns)
    points, chunks = len(u), layout.chunks
    constants, steps = _constants(psi, alpha), np.multiply.outer(alpha, u)
    partial = np.empty((len(chunks.sizes), 3 + 2 * points))
    args = (at.like, *chunks.columns, at.x_at, at.d_at, _kinds(psi), constants, steps, partial)
    run(_reduce, chunks, *args, weight=1.0 + points, backwards=backwards)
    out = layout.per_block(partial.T * scale)
    out[3:] /= -constants[3]
    out[3 + points :] *= alpha
    return out


def move_sq(at: Memory, psi: Psi, alpha: np.ndarray, u: float) -> np.ndarray:
    """||y(u) - x||^2 of each block."""
    chunks, constants = at.layout.chunks, _constants(psi, alpha)
    partial = np.empty((1, len(chunks.sizes)))
    args = (at.x_at, at.d_at, constants, u * alpha, partial)
    run(_move_sq, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
    return at.layout.per_block(partial)[0] / constants[3] ** 2


def write(at: Memory, psi: Psi, alpha: np.ndarray, u: float, relax: float = 1.0) -> None:
    """x <- x + relax (y(u) - x); where relax is 1 exactly y(u), with exact zeros and bounds."""
    chunks, constants = at.layout.chunks, _constants(psi, alpha)
    args = (at.x_at, at.d_at, constants, u * alpha, float(relax))
    run(_write, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
