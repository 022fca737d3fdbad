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

from proxsps.optim.kernels.averages import new_slopes, store_slopes, typed_weights
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import CHUNK, ENTRYWISE, REORDER, Chunks, pointer, run
from proxsps.optim.kernels.row_layout import RowMemory, memory
from proxsps.optim.kernels.scalar import Psi, prox

# ||z||^2 from the three sums must be at least this part of ||x||^2 + ||s d||^2, or it has lost too many digits.
SAFE = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 0.1}


@inlined(fastmath=REORDER)
def _row_sums(x, d):
    xx, xd, dd = 0.0, 0.0, 0.0
    for k in range(len(x)):
        a, b = np.float64(x[k]), np.float64(d[k])
        xx += a * a
        xd += a * b
        dd += b * b
    return xx, xd, dd


@inlined(fastmath=REORDER)
def _row_norm_sq(x, d, s):
    zz = 0.0
    for k in range(len(x)):
        z = np.float64(x[k] - s * d[k])
        zz += z * z
    return zz


@inlined(fastmath=REORDER)
def _add_sums(x, d, xx, xd, dd):
    for k in range(len(x)):
        a, b = np.float64(x[k]), np.float64(d[k])
        xx[k] += a * a
        xd[k] += a * b
        dd[k] += b * b


@inlined(fastmath=REORDER)
def _add_norm_sq(x, d, s, zz):
    for k in range(len(x)):
        z = np.float64(x[k] - s * d[k])
        zz[k] += z * z


@inlined(fastmath=ENTRYWISE)
def _scale_row(x, d, s, factor, relax, zero):
    """x <- factor (x - s d), or a part of the way there."""
    if relax != 1:
        for k in range(len(x)):
            x[k] += relax * (factor * (x[k] - s * d[k]) - x[k])
    elif factor == 0:
        x[:] = zero
    else:
        for k in range(len(x)):
            x[k] = factor * (x[k] - s * d[k])


@inlined(fastmath=ENTRYWISE)
def _scale_columns(x, d, s, factor, relax, zero):
    """The same with one factor per entry."""
    for k in range(len(x)):
        y = factor[k] * (x[k] - s * d[k]) if factor[k] != zero else zero
        x[k] = y if relax == 1 else x[k] + relax * (y - x[k])


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


@compiled(fastmath=REORDER)
def _sums(
    like, tensor, start, count, height, stride, slot, x_at, d_at, g_at, weights, partial, further, first, last
):  # fmt: skip
    """||x||^2, <x, d> and ||d||^2 of each slot; with averages <g, x> and ||g||^2 of each chunk."""
    averages, fresh = len(g_at) > 0, np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        j, n, m, at = tensor[i], count[i], height[i], slot[i]
        end = start[i] + (n * m if stride[i] == 1 else (m - 1) * stride[i] + n)
        x = numba.carray(pointer(x_at[j], like), end)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), end)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), end)[start[i] :] if averages else x
        own = typed_weights(like, weights, 0.0, 0.0, j)
        lines, length, apart = (n, m, m) if stride[i] == 1 else (m, n, stride[i])
        for k in range(lines):
            low, high = k * apart, k * apart + length
            xs, ds = x[low:high], d[low:high]
            if averages:
                ds = new_slopes(g[low:high], ds, own, fresh)
                _add_further(xs, g[low:high], further[i])
            if stride[i] == 1:
                partial[0, at + k], partial[1, at + k], partial[2, at + k] = _row_sums(xs, ds)
            else:
                _add_sums(xs, ds, partial[0, at : at + n], partial[1, at : at + n], partial[2, at : at + n])


@compiled(fastmath=REORDER)
def _norm_sq(
    like, tensor, start, count, height, stride, slot, x_at, d_at, g_at, weights, group, steps, partial, first, last
):
    """||x - s d||^2 of each slot."""
    of, averages, fresh = like.dtype.type, len(g_at) > 0, np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        j, n, m, at = tensor[i], count[i], height[i], slot[i]
        end = start[i] + (n * m if stride[i] == 1 else (m - 1) * stride[i] + n)
        x = numba.carray(pointer(x_at[j], like), end)[start[i] :]
        d = numba.carray(pointer(d_at[j], like), end)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), end)[start[i] :] if averages else x
        own = typed_weights(like, weights, 0.0, 0.0, j)
        lines, length, apart = (n, m, m) if stride[i] == 1 else (m, n, stride[i])
        for k in range(lines):
            low, high = k * apart, k * apart + length
            xs, ds = x[low:high], d[low:high]
            if averages:
                ds = new_slopes(g[low:high], ds, own, fresh)
            if stride[i] == 1:
                partial[at + k] = _row_norm_sq(xs, ds, of(steps[group[at + k]]))
            else:  # the columns of a tensor have one alpha
                _add_norm_sq(xs, ds, of(steps[group[at]]), partial[at : at + n])


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
    upper, u, factors, relax, first, last,
):  # fmt: skip
    """x <- x + relax (y - x) in each chunk; with the factors given, if any, where a row is not whole.

    New averages are stored.
    """
    of, averages = like.dtype.type, len(g_at) > 0
    part, zero = of(relax), of(0)
    for i in range(first, last):
        t, n, m, at = tensor[i], count[i], height[i], slot[i]
        end = start[i] + (n * m if stride[i] == 1 else (m - 1) * stride[i] + n)
        x = numba.carray(pointer(x_at[t], like), end)[start[i] :]
        d = numba.carray(pointer(d_at[t], like), end)[start[i] :]
        fresh = numba.carray(pointer(g_at[t], like), end)[start[i] :] if averages else x
        own = typed_weights(like, weights, 0.0, 0.0, t)
        if stride[i] == 1:
            for j in range(n):
                low, high, g = j * m, (j + 1) * m, group[at + j]
                xs, ds, s = x[low:high], d[low:high], of(u * alpha[g])
                if averages:
                    store_slopes(fresh[low:high], ds, own)
                if whole[i]:
                    factor = _factor(_row_norm_sq(xs, ds, s), alpha[g], l1[g], l2[g], lower[g], upper[g])
                else:
                    factor = factors[g]
                _scale_row(xs, ds, s, of(factor), part, zero)
        else:
            s = of(u * alpha[group[at]])
            scales = np.empty(n, like.dtype)
            for j in range(n):
                scales[j] = of(factors[group[at + j]])
            for k in range(m):
                low, high = k * stride[i], k * stride[i] + n
                if averages:
                    store_slopes(fresh[low:high], d[low:high], own)
                _scale_columns(x[low:high], d[low:high], s, scales, part, zero)


@compiled(error_model="numpy")
def _heights(known, alpha, l1, l2, lower, upper, steps, caps, out):
    """For each point p of all groups, with s = steps[p] alpha and a = caps[p] alpha: h, dh/ds alpha, ||y - x||^2.

    y = c z with c = prox_{a psi}(||z||) / ||z||; see `proxsps.core.model.row_heights`.
    """
    for p in range(len(steps)):
        height, slope, moved = 0.0, 0.0, 0.0
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
            moved += (c - 1) * ((c - 1) * xx - 2 * c * s * xd) + (c * s) ** 2 * dd
        out[0, p], out[1, p], out[2, p] = height, slope, moved


def heights(known: np.ndarray, alpha: np.ndarray, psi: Psi, steps: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """h, its slope and ||y - x||^2 as rows, one column per point, from the sums of the groups."""
    out = np.empty((3, len(steps)))
    kernel: Callable[..., None] = _heights
    kernel(known, alpha, *psi, steps, caps, out)
    return out


def first_sums(at: RowMemory) -> tuple[np.ndarray, np.ndarray]:
    """||x||^2, <x, d> and ||d||^2 as rows, one column per group; with averages <g, x> and ||g||^2, one per tensor."""
    chunks, layout = at.layout.chunks, at.layout
    partial, further = np.zeros((3, len(layout.owner))), np.zeros((len(chunks.sizes), 2))
    args = (at.x_at, at.d_at, at.g_at, at.weights, partial, further)
    run(_sums, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
    of_tensors = np.empty((2, 0))
    if len(at.g_at):
        of_tensors = np.array([np.bincount(chunks.columns[0], row, len(at.x_at)) for row in further.T])
    if layout.in_order and not at.joined:
        return partial, of_tensors
    return np.array([np.bincount(at.group, row, at.groups) for row in partial]), of_tensors


@compiled()
def _per_block(numbers, owners, out):
    for g in range(len(owners)):
        for row in range(len(out)):
            out[row, owners[g]] += numbers[row, g]


def per_block(numbers: np.ndarray, owners: np.ndarray, blocks: int) -> list[list[float]]:
    """Numbers of groups, or of tensors, added up over the blocks that own them."""
    out = np.zeros((len(numbers), blocks))
    kernel: Callable[..., None] = _per_block
    kernel(numbers, owners, out)
    found: list[list[float]] = out.tolist()
    return found


def norm_sq(at: RowMemory, steps: np.ndarray, chunks: Chunks | None = None) -> np.ndarray:
    """||x - s d||^2 of each group, with one s per group; 0 for groups outside the chunks, if these are given."""
    chunks = at.layout.chunks if chunks is None else chunks
    partial = np.zeros(len(at.layout.owner))
    args = (at.x_at, at.d_at, at.g_at, at.weights, at.group, steps, partial)
    run(_norm_sq, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
    return np.bincount(at.group, partial, at.groups)


def write(
    at: RowMemory, psi: Psi, alpha: np.ndarray, u: float, relax: float = 1.0, known: np.ndarray | None = None
) -> None:
    """x <- x + relax (y(u) - x); where relax is 1 exactly y(u), with exact zeros. Stores new averages.

    Args:
        at: the memory of parameters and slopes.
        psi: one set of constants per group.
        alpha: one number per group, the same for all columns of one tensor.
        u: the dual variable.
        relax: the part of the way to y(u).
        known: the sums of the same x and d, which save a pass over groups that are in several chunks.
    """
    alpha, *constants = (np.ascontiguousarray(c, np.float64) for c in (alpha, *psi))
    chunks, whole, factors = at.layout.chunks, at.layout.whole, np.empty(0)
    if at.joined or len(at.layout.cut.sizes):
        factors = np.empty(at.groups)
        kernel: Callable[..., None] = _factors  # numba's own type of it takes no arguments
        kernel(_norms_sq(at, u * alpha, known), alpha, *constants, factors)
    if at.joined:
        whole = np.zeros_like(whole)
    args = (at.x_at, at.d_at, at.g_at, at.weights, at.group, alpha, *constants, float(u), factors, float(relax))
    run(_write, chunks, at.like, *chunks.columns, whole, *args, weight=3.0, backwards=next(at.turns))


def _norms_sq(at: RowMemory, steps: np.ndarray, known: np.ndarray | None) -> np.ndarray:
    """||x - s d||^2 of each group whose entries lie in several chunks; other groups have any number."""
    if known is not None:
        xx, xd, dd = known
        most = xx + steps**2 * dd
        out: np.ndarray = most - 2 * steps * xd
        apart = at.group if at.joined else at.group[at.layout.cut_slots]
        if (out >= SAFE[at.like.dtype] * most)[apart].all():
            return out
    return norm_sq(at, steps, None if at.joined else at.layout.cut)


__all__ = ["RowMemory", "first_sums", "heights", "memory", "norm_sq", "write"]
