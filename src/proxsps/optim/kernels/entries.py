"""Passes for blocks whose prox acts on each entry by itself: h and its slope at several u, and one write.

With z = x - s d, s = u alpha, the new point is y = prox(z) entry by entry, and h = <d, y - x>. Entries where the prox
moves with z are called inside. There y - x is computed without y, which may agree with x in all its digits but a few:

    (1 + alpha l2) (x - y) = s d + clip(z, -alpha l1, alpha l1) + alpha l2 x      inside,
    x - y with y exactly 0, lower or upper                                        elsewhere.

Where the slope is an average of gradients, its new value is computed run by run in every pass, into memory that stays
in the cache, and stored by the write alone (as in `proxsps.optim.kernels.moments`). In Adam's metric each entry has its
own alpha (`proxsps.optim.kernels.metric`).

Sums are taken in the type of the entries over a run of them, then in doubles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, Memory, pointer, run, sampled
from proxsps.optim.kernels.metric import move_sq_metric, reduce_metric, write_metric
from proxsps.optim.kernels.moments import NOWHERE, Averages, averaged
from proxsps.optim.kernels.sampling import moved_sq, sample_end
from proxsps.optim.kernels.scalar import Psi, prox

SOFT, BOX, GENERAL = 0, 1, 2  # l1 > 0 without bounds; bounds alone; everything
FURTHER = 4  # sums that only averages need: see `Further`
NO_WEIGHTS = np.empty((4, 0))


class Further(NamedTuple):
    """What the first pass of a step with averages makes beside the sums of `reduce`, one number per block."""

    d_dot_x: np.ndarray  # <d, x>, bitwise <g, x> where d = g
    g_dot_x: np.ndarray
    g_sq: np.ndarray  # ||D^-1 g||^2
    moved_sq: np.ndarray  # ||x - x_0||^2, estimated from the sample; 0 without a start


@numba.njit
def typed(like, constants, b):
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


@numba.njit(fastmath=ENTRYWISE)
def _slopes(g, d, old, new, out):
    """The new averages of a run."""
    for k in range(len(g)):
        out[k] = averaged(old, d[k], new, g[k])
    return out[: len(g)]


@numba.njit(fastmath=ENTRYWISE)
def _store_slopes(g, d, old, new):
    for k in range(len(g)):
        d[k] = averaged(old, d[k], new, g[k])


@numba.njit(fastmath=REORDER)
def _further(x, g, d, zero):
    dx, gx, gg = zero, zero, zero
    for k in range(len(x)):
        dx += d[k] * x[k]
        gx += g[k] * x[k]
        gg += g[k] * g[k]
    return dx, gx, gg


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _reduce(
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
                ds = _slopes(g[low : low + RUN], ds, of(weights[0, j]), of(weights[1, j]), fresh)
            for c in range(len(steps)):
                psi, s, out = typed(like, constants[c], b), steps[c, b], partial[i, c * width : (c + 1) * width]
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


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _move_sq(
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
        psi, s = typed(like, constants, b), of(steps[b])
        partial[0, i] = 0
        for low in range(0, n, RUN):
            ds = d[low : low + RUN]
            if averages:
                ds = _slopes(g[low : low + RUN], ds, of(weights[0, j]), of(weights[1, j]), fresh)
            partial[0, i] += _change_sq(x[low : low + RUN], ds, s, psi)


@numba.njit(nogil=True, cache=True, fastmath=ENTRYWISE)
def _write(
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
        threshold, _, _, _, shrink, lower, upper, _ = typed(like, constants, b)
        s = of(steps[b])
        for low in range(0, n, RUN):
            xs, ds = x[low : low + RUN], d[low : low + RUN]
            if len(g_at):
                g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] + low :]
                _store_slopes(g[: len(xs)], ds, of(weights[0, j]), of(weights[1, j]))
            if relax == 1:
                for k in range(len(xs)):
                    xs[k] = prox(xs[k] - s * ds[k], threshold, shrink, lower, upper)
            else:
                for k in range(len(xs)):
                    xs[k] += part * (prox(xs[k] - s * ds[k], threshold, shrink, lower, upper) - xs[k])


def _constants(psi: Psi, alpha: np.ndarray) -> np.ndarray:
    """Rows, one column per block: threshold, edge, curvature, 1 + curvature and its inverse, lower, upper.

    Entries with |z| above the edge move with z: all of them where there is no threshold.
    """
    threshold, curvature = alpha * psi.l1, alpha * psi.l2
    edge = np.where(psi.l1 > 0, threshold, -1.0)
    return np.array([threshold, edge, curvature, 1 + curvature, 1 / (1 + curvature), psi.lower, psi.upper])


def _kinds(psi: Psi, in_metric: bool = False) -> np.ndarray:
    free = (psi.lower == -np.inf) & (psi.upper == np.inf)
    soft = (psi.l1 > 0) & free & (psi.l2 == 0 if in_metric else True)
    unpenalised = (psi.l1 == 0) & (psi.l2 == 0)
    return np.where(unpenalised, BOX, np.where(soft, SOFT, GENERAL))


def _in_metric(at: Memory | Averages) -> bool:
    return isinstance(at, Averages) and len(at.v_at) > 0


def reduce(at: Memory | Averages, psi: Psi, alpha: np.ndarray, u: np.ndarray, every: int = 1) -> np.ndarray:
    """The sums of a search at P values of u, from one pass over memory: [3 + 2 P, blocks].

    Rows: ||d||^2; <d, x>; the sum of (d x)^2, whose root times eps is the rounding noise of h; P rows
    h(u) = <d, y(u) - x>; P rows dh/du = -alpha sum of d^2 prox'(z). In Adam's metric d^2 is d D^-1 d.

    Args:
        at: the memory of parameters and slopes, or of parameters, gradients and averages.
        psi: one set of constants per block.
        alpha: one number per block.
        u: the P dual variables.
        every: above 1 only a sample of about one entry in `every` is read, and the sums are scaled up to estimates of
            those of whole blocks. Tensors of the same sizes give the same sample.
    """
    return _pass(at, psi, alpha[None], u, every)[0][0]


def first_reduce(at: Averages, psi: Psi, alpha: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, Further]:
    """The sums of `reduce`, and those that only a step with averages needs."""
    sums, further = _pass(at, psi, alpha[None], u, further=True)
    return sums[0], Further(*further)


def ray(at: Memory | Averages, psi: Psi, alphas: np.ndarray, every: int = 1) -> np.ndarray:
    """h(1) for several caps of each block, (points, blocks), from one pass over memory."""
    return _pass(at, psi, alphas, np.ones(1), every)[0][:, 3]


def _pass(
    at: Memory | Averages, psi: Psi, alphas: np.ndarray, u: np.ndarray, every: int = 1, further: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of `reduce` for several sets of caps, (sets, rows, blocks), and those of `Further`."""
    if not len(u):
        raise ValueError("u must have at least one point: the loops have no form without.")
    layout, scale = (at.layout, 1.0) if every == 1 else sampled(at.layout, every)
    chunks, sets, points = layout.chunks, len(alphas), len(u)
    constants = np.array([_constants(psi, alpha) for alpha in alphas])
    steps = np.multiply.outer(alphas, u)
    width = sets * (3 + 2 * points)
    partial = np.empty((len(chunks.sizes), width + FURTHER))
    in_metric = _in_metric(at)
    args = (*_sources(at), _kinds(psi, in_metric), constants, steps.astype(at.like.dtype), partial, further)
    kernel, weight = (reduce_metric, 3.0) if in_metric else (_reduce, 1.0)
    run(kernel, chunks, at.like, *chunks.columns, *args, weight=weight + sets * points)
    columns = partial.T * scale
    if further:
        columns[width:] = _counted(at, columns[width:])
    found = layout.per_block(columns)
    out = found[:width].reshape(sets, -1, layout.count)
    out[:, 3:] /= -1.0 if in_metric else -constants[:, 3:4]
    out[:, 3 + points :] *= alphas[:, None]
    return out, found[width:]


def _counted(at: Averages, columns: np.ndarray) -> np.ndarray:
    """The further sums of chunks: nothing for gradients that are not there, and the sample scaled up."""
    tensor = at.layout.chunks.columns[1]
    columns[1:3, ~at.seen[tensor]] = 0
    if len(at.start.at):
        columns[3] *= at.start.scale[tensor]
    return columns


def _sources(at: Memory | Averages) -> tuple[Any, ...]:
    """What the kernels read entries from."""
    if isinstance(at, Averages):
        return at.x_at, at.d_at, at.g_at, at.v_at, at.start.at, at.weights, at.eps, at.least
    return at.x_at, at.d_at, NOWHERE, NOWHERE, NOWHERE, NO_WEIGHTS, 0.0, 0.0


def move_sq(at: Memory | Averages, psi: Psi, alpha: np.ndarray, u: float) -> np.ndarray:
    """||y(u) - x||^2 of each block."""
    chunks, constants = at.layout.chunks, _constants(psi, alpha)
    partial, in_metric = np.empty((1, len(chunks.sizes))), _in_metric(at)
    args = (*_sources(at), constants, u * alpha, partial)
    run(move_sq_metric if in_metric else _move_sq, chunks, at.like, *chunks.columns, *args, weight=2.0)
    return at.layout.per_block(partial)[0] / (1.0 if in_metric else constants[3] ** 2)


def write(at: Memory | Averages, psi: Psi, alpha: np.ndarray, u: float, relax: float = 1.0) -> None:
    """x <- x + relax (y(u) - x); where relax is 1 exactly y(u), with exact zeros and bounds. Stores new averages."""
    chunks, constants = at.layout.chunks, _constants(psi, alpha)
    args = (*_sources(at), constants, u * alpha, float(relax))
    run(write_metric if _in_metric(at) else _write, chunks, at.like, *chunks.columns, *args, weight=2.0)
