"""Passes for blocks whose prox depends on each row through its norm: three sums per row, and one write.

A row is a group of entries that share a norm: a row of a matrix, a filter, a column, a whole tensor. With
z = x - s d, s = u alpha, the new row is y = c z with c = prox(||z||) / ||z||. The sums ||x||^2, <x, d>, ||d||^2 of each
row give ||z|| and <d, y - x> for every u. Products and sums are doubles: the search takes differences of them.

A slope that is an average of gradients is computed row by row in every pass, and stored only by the write (as in
`proxsps.optim.kernels.entrywise`).
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from proxsps.optim.kernels.averages import new_averages, typed_weights
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import CHUNK, ENTRYWISE, REORDER, Chunks, entries, fold, run, run_memory
from proxsps.optim.kernels.row_layout import WIDTH, RowMemory, memory
from proxsps.optim.kernels.scalar import Psi, prox

# ||z||^2 from the three sums must be at least this part of ||x||^2 + ||s d||^2, or it has lost too many digits.
SAFE = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 0.1}


@inlined(fastmath=REORDER)
def _row_sums(x, d, s):
    """||z||^2, <z, d> and ||d||^2 of a row, with z = x - s d."""
    zz, zd, dd = 0.0, 0.0, 0.0
    for k in range(len(x)):
        a, b = np.float64(x[k] - s * d[k]), np.float64(d[k])
        zz += a * a
        zd += a * b
        dd += b * b
    return zz, zd, dd


@inlined(fastmath=REORDER)
def _add_sums(x, d, s, zz, zd, dd):
    """The same of columns, entry by entry."""
    for k in range(len(x)):
        a, b = np.float64(x[k] - s * d[k]), np.float64(d[k])
        zz[k] += a * a
        zd[k] += a * b
        dd[k] += b * b


@inlined(fastmath=ENTRYWISE)
def _scale_row(x, d, s, factor, zero):
    """x <- factor (x - s d)."""
    if factor == 0:
        x[:] = zero
    else:
        for k in range(len(x)):
            x[k] = factor * (x[k] - s * d[k])


@inlined(fastmath=ENTRYWISE)
def _scale_columns(x, d, s, factor, zero):
    """The same with one factor per entry."""
    for k in range(len(x)):
        x[k] = factor[k] * (x[k] - s * d[k]) if factor[k] != zero else zero


@inlined(fastmath=REORDER)
def _add_further(x, g, out):
    """<g, x> and ||g||^2."""
    gx, gg = 0.0, 0.0
    for k in range(len(x)):
        a, b = np.float64(x[k]), np.float64(g[k])
        gx += a * b
        gg += b * b
    out[0] += gx
    out[1] += gg


@inlined()
def _lines(count, height, stride):
    """The pieces of a chunk without gaps: their number, length and distance. Columns are read line by line."""
    return (count, height, height) if stride == 1 else (height, count, stride)


@compiled(fastmath=REORDER)
def _sums(
    like, tensor, start, count, height, stride, slot, x_at, d_at, g_at, weights, group, steps, partial, further, first,
    last,
):  # fmt: skip
    """||z||^2, <z, d> and ||d||^2 of each slot, z = x - s d; with averages <g, x> and ||g||^2 of each chunk."""
    of, averages, fresh = like.dtype.type, len(g_at) > 0, np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        j, n, at = tensor[i], count[i], slot[i]
        lines, length, apart = _lines(n, height[i], stride[i])
        size = (lines - 1) * apart + length
        x, d = entries(like, x_at, j, start[i], size), entries(like, d_at, j, start[i], size)
        g = entries(like, g_at, j, start[i], size) if averages else x
        own = typed_weights(like, weights, 0.0, 0.0, j)
        for k in range(lines):
            low, high = k * apart, k * apart + length
            xs, ds = x[low:high], d[low:high]
            if averages:
                new_averages(g[low:high], ds, None, own, fresh, None)
                ds = fresh[:length]
                _add_further(xs, g[low:high], further[i])
            if stride[i] == 1:
                partial[0, at + k], partial[1, at + k], partial[2, at + k] = _row_sums(xs, ds, of(steps[group[at + k]]))
            else:  # the columns of a tensor have one alpha
                end = at + n
                _add_sums(xs, ds, of(steps[group[at]]), partial[0, at:end], partial[1, at:end], partial[2, at:end])


@inlined()
def _factor(norm_sq, alpha, l1, l2, lower, upper):
    """The c of y = c z, for a group with this ||z||^2."""
    if norm_sq == 0:
        return 0.0
    norm, shrink = np.sqrt(norm_sq), 1.0 if l2 == 0 else 1 / (1 + alpha * l2)
    return prox(norm, alpha * l1, shrink, lower, upper) / norm


@compiled()
def _factors(norm_sq, alpha, l1, l2, lower, upper, out):
    for g in range(len(out)):
        out[g] = _factor(norm_sq[g], alpha[g], l1[g], l2[g], lower[g], upper[g])


@compiled()
def _write(
    like, tensor, start, count, height, stride, slot, whole, x_at, d_at, g_at, weights, group, alpha, l1, l2, lower,
    upper, u, factors, moves, first, last,
):  # fmt: skip
    """x <- y in each chunk if it `moves`; with the factors given, if any, where a row is not whole.

    New averages are stored.
    """
    of, averages, scales = like.dtype.type, len(g_at) > 0, numba.carray(run_memory(like), WIDTH)
    for i in range(first, last):
        j, n, at = tensor[i], count[i], slot[i]
        lines, length, apart = _lines(n, height[i], stride[i])
        size = (lines - 1) * apart + length
        x, d = entries(like, x_at, j, start[i], size), entries(like, d_at, j, start[i], size)
        fresh = entries(like, g_at, j, start[i], size) if averages else x
        own = typed_weights(like, weights, 0.0, 0.0, j)
        for k in range(n if moves and stride[i] != 1 else 0):
            scales[k] = of(factors[group[at + k]])
        for k in range(lines):
            low, high, g = k * apart, k * apart + length, group[at + k if stride[i] == 1 else at]
            xs, ds, s = x[low:high], d[low:high], of(u * alpha[g])
            if averages:
                new_averages(fresh[low:high], ds, None, own, None, None)
            if not moves:
                continue
            if stride[i] != 1:
                _scale_columns(xs, ds, s, scales, of(0))
            elif whole[i]:
                factor = _factor(_row_sums(xs, ds, s)[0], alpha[g], l1[g], l2[g], lower[g], upper[g])
                _scale_row(xs, ds, s, of(factor), of(0))
            else:
                _scale_row(xs, ds, s, of(factors[g]), of(0))


@compiled(error_model="numpy", fastmath=REORDER)
def _heights(known, alpha, l1, l2, lower, upper, steps, caps, out):
    """For each point p of all groups, with s = steps[p] alpha and a = caps[p] alpha: h and dh/ds alpha.

    y = c z with c = prox_{a psi}(||z||) / ||z||; see `proxsps.core.model.row_heights`.
    """
    for p in range(len(steps)):
        height, slope = 0.0, 0.0
        for g in range(len(alpha)):
            xx, xd, dd = known[0, g], known[1, g], known[2, g]
            s, a = steps[p] * alpha[g], caps[p] * alpha[g]
            along, square = xd - s * dd, xx - s * (2 * xd - s * dd)
            norm = np.sqrt(max(square, 0.0))
            inverse = 1 / norm if norm > 0 else 1.0
            shrink = 1 / (1 + a * l2[g])
            r = min(max((norm - min(norm, a * l1[g])) * shrink, lower[g]), upper[g])
            bend = shrink if norm > a * l1[g] and lower[g] < r < upper[g] else 0.0
            c, turn = r * inverse, along * inverse
            height += c * along - xd
            slope -= alpha[g] * ((bend - c) * turn * turn + c * dd)
        out[0, p], out[1, p] = height, slope


def heights(known: np.ndarray, alpha: np.ndarray, psi: Psi, steps: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """h and its slope as rows, one column per point, from the sums of the groups."""
    out = np.empty((2, len(steps)))
    kernel: Callable[..., None] = _heights
    kernel(known, alpha, *psi, steps, caps, out)
    return out


def _reduced(at: RowMemory, chunks: Chunks, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums of `_sums` as rows, one column per slot, and <g, x> and ||g||^2, one column per chunk."""
    partial, further = np.zeros((3, len(at.layout.owner))), np.zeros((len(chunks.sizes), 2))
    args = (at.x_at, at.d_at, at.g_at, at.weights, at.group, steps, partial, further)
    run(_sums, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
    return partial, further.T


def first_sums(at: RowMemory) -> tuple[np.ndarray, np.ndarray]:
    """||x||^2, <x, d> and ||d||^2 as rows, one column per group; with averages <g, x> and ||g||^2, one per tensor."""
    chunks = at.layout.chunks
    partial, further = _reduced(at, chunks, np.zeros(at.groups))
    of_tensors = fold(further, chunks.columns[0], len(at.x_at)) if len(at.g_at) else np.empty((2, 0))
    return partial if at.layout.in_order and not at.joined else fold(partial, at.group, at.groups), of_tensors


def norm_sq(at: RowMemory, steps: np.ndarray, chunks: Chunks | None = None) -> np.ndarray:
    """||x - s d||^2 of each group, with one s per group; 0 for groups outside the chunks, if these are given."""
    partial, _ = _reduced(at, at.layout.chunks if chunks is None else chunks, steps)
    return np.bincount(at.group, partial[0], at.groups)


def write(
    at: RowMemory, psi: Psi, alpha: np.ndarray, u: float, moves: bool = True, known: np.ndarray | None = None
) -> None:
    """x <- y(u). Stores new averages.

    Args:
        at: the memory of parameters and slopes.
        psi: one set of constants per group.
        alpha: one number per group, the same for all columns of one tensor.
        u: the dual variable.
        moves: whether x moves at all.
        known: the sums of the same x and d, which save a pass over groups that are in several chunks.
    """
    alpha, *constants = (np.ascontiguousarray(c, np.float64) for c in (alpha, *psi))
    chunks, whole, factors = at.layout.chunks, at.layout.whole, np.empty(0)
    if moves and (known is not None or at.joined or len(at.layout.cut.sizes)):
        norms, safe = _norms_sq(at, u * alpha, known)
        factors = np.empty(at.groups)
        kernel: Callable[..., None] = _factors  # numba's own type of it takes no arguments
        kernel(norms, alpha, *constants, factors)
        if at.joined or safe:
            whole = np.zeros_like(whole)
    args = (at.x_at, at.d_at, at.g_at, at.weights, at.group, alpha, *constants, float(u), factors, moves)
    run(_write, chunks, at.like, *chunks.columns, whole, *args, weight=3.0, backwards=next(at.turns))


def _norms_sq(at: RowMemory, steps: np.ndarray, known: np.ndarray | None) -> tuple[np.ndarray, bool]:
    """||x - s d||^2 of each group, and whether of all; else of those whose entries lie in several chunks."""
    if known is not None:
        xx, xd, dd = known
        most = xx + steps**2 * dd
        out: np.ndarray = most - 2 * steps * xd
        fine = out >= SAFE[at.like.dtype] * most
        if fine.all():
            return out, True
        if fine[at.group if at.joined else at.group[at.layout.cut_slots]].all():
            return out, False
    return norm_sq(at, steps, None if at.joined else at.layout.cut), False


__all__ = ["RowMemory", "first_sums", "heights", "memory", "norm_sq", "write"]
