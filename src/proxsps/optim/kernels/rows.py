"""Passes for blocks whose prox depends on each row through its norm: three sums per row, and one write.

A row is a group of entries that share a norm: a row of a matrix, a filter, a column, a whole tensor. With
z = x - s d, s = u alpha, the new row is y = c z with c = prox(||z||) / ||z||. The sums ||x||^2, <x, d>, ||d||^2 of each
row give ||z|| and <d, y - x> for every u. Products and sums are doubles: the search takes differences of them.

A slope that is an average of gradients is computed row by row in every pass, and stored only by the write (as in
`proxsps.optim.kernels.entrywise`).
"""

from __future__ import annotations

import numba
import numpy as np

from proxsps.optim.kernels.averages import new_averages
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.heights import prox
from proxsps.optim.kernels.layout import CHUNK, ENTRYWISE, REORDER, fold, run_memory
from proxsps.optim.kernels.parts import Floats, Memory, Part, cut, tensors, weights
from proxsps.optim.kernels.row_layout import WIDTH, RowGroups
from proxsps.optim.rule import Heights

# ||z||^2 from the three sums must be at least this part of ||x||^2 + ||s d||^2, or it has lost too many digits.
SAFE = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 0.1}
MANY = 1 << 17  # entries


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
    """The parts of a chunk without gaps: their number, length and distance. Columns are read line by line."""
    return (count, height, height) if stride == 1 else (height, count, stride)


@compiled(fastmath=REORDER)
def sum_rows(at, pieces, group, steps, partial, further, first, last):
    """||z||^2, <z, d> and ||d||^2 of each slot, z = x - s d; with averages <g, x> and ||g||^2 of each chunk."""
    like, x_at, g_at, d_at, v_at, y_at, _, _, _, _, shares, eps, least = at
    tensor, start, count, height, stride, slot, _ = pieces
    of, fresh = like.dtype.type, np.empty(CHUNK, like.dtype)
    for i in range(first, last):
        lines, length, apart = _lines(count[i], height[i], stride[i])
        j, size = tensor[i], (lines - 1) * apart + length
        x, g, d, _, _ = tensors(like, x_at, g_at, d_at, v_at, y_at, j, start[i], size)
        own = weights(like, shares, eps, least, j)
        for k in range(lines):
            low, high, to = k * apart, k * apart + length, slot[i]
            xs, ds = x[low:high], g[low:high]
            if d is not None:
                _add_further(xs, ds, further[i])
                ds = new_averages(ds, cut(d, low, high), None, own, fresh, None)
            if stride[i] == 1:
                to += k
                partial[0, to], partial[1, to], partial[2, to] = _row_sums(xs, ds, of(steps[group[to]]))
            else:  # the columns of a tensor have one alpha
                end = to + length
                _add_sums(xs, ds, of(steps[group[to]]), partial[0, to:end], partial[1, to:end], partial[2, to:end])


@inlined()
def _factor(norm_sq, alpha, psi, g):
    """The c of y = c z, for a group with this ||z||^2."""
    if norm_sq == 0:
        return 0.0
    norm, shrink = np.sqrt(norm_sq), 1.0 if psi[1, g] == 0 else 1 / (1 + alpha[g] * psi[1, g])
    return prox(norm, alpha[g] * psi[0, g], shrink, psi[2, g], psi[3, g]) / norm


@compiled()
def _factors(norm_sq, alpha, psi):
    out = np.empty(len(alpha))
    for g in range(len(out)):
        out[g] = _factor(norm_sq[g], alpha, psi, g)
    return out


@compiled()
def write_rows(at, pieces, group, given, psi, alpha, u, factors, moves, first, last):
    """x <- y in each chunk if it `moves`; with the factors of groups, if all are `given`, or a group is not whole.

    New averages are stored.
    """
    like, x_at, g_at, d_at, v_at, y_at, _, _, _, _, shares, eps, least = at
    tensor, start, count, height, stride, slot, whole = pieces
    of, scales = like.dtype.type, numba.carray(run_memory(like), WIDTH)
    for i in range(first, last):
        lines, length, apart = _lines(count[i], height[i], stride[i])
        j, size = tensor[i], (lines - 1) * apart + length
        x, gradients, d, _, _ = tensors(like, x_at, g_at, d_at, v_at, y_at, j, start[i], size)
        own = weights(like, shares, eps, least, j)
        if moves and stride[i] != 1:
            for k in range(length):
                scales[k] = of(factors[group[slot[i] + k]])
        for k in range(lines):
            low, high, g = k * apart, k * apart + length, group[slot[i] + k if stride[i] == 1 else slot[i]]
            xs, ds, s = x[low:high], gradients[low:high], of(u * alpha[g])
            if d is not None:
                ds = new_averages(ds, cut(d, low, high), None, own, None, None)
            if not moves:
                continue
            if stride[i] != 1:
                _scale_columns(xs, ds, s, scales, of(0))
            elif whole[i] and not given:
                factor = _factor(_row_sums(xs, ds, s)[0], alpha, psi, g)
                _scale_row(xs, ds, s, of(factor), of(0))
            else:
                _scale_row(xs, ds, s, of(factors[g]), of(0))


@compiled(error_model="numpy", fastmath=REORDER)
def _heights(known, alpha, psi, steps, caps, out):
    """For each point p of all groups, with s = steps[p] alpha and a = caps[p] alpha: h and dh/ds alpha.

    y = c z with c = prox_{a psi}(||z||) / ||z||; see `proxsps.core.model.row_heights`.
    """
    for p in range(len(steps)):
        height, slope = 0.0, 0.0
        for g in range(len(alpha)):
            xx, xd, dd = known[0, g], known[1, g], known[2, g]
            l1, l2, lower, upper = psi[0, g], psi[1, g], psi[2, g], psi[3, g]
            s, a = steps[p] * alpha[g], caps[p] * alpha[g]
            along, square = xd - s * dd, xx - s * (2 * xd - s * dd)
            norm = np.sqrt(max(square, 0.0))
            inverse = 1 / norm if norm > 0 else 1.0
            shrink = 1 / (1 + a * l2)
            r = min(max((norm - min(norm, a * l1)) * shrink, lower), upper)
            bend = shrink if norm > a * l1 and lower < r < upper else 0.0
            c, turn = r * inverse, along * inverse
            height += c * along - xd
            slope -= alpha[g] * ((bend - c) * turn * turn + c * dd)
        out[0, p], out[1, p] = height, slope


class RowPart(Part):
    """Rows, or groups of them, in the identity metric: three sums per group tell the heights at all points.

    Args:
        at: where the entries lie; its arrays are those of the current step.
        groups: the rows, or groups of them.
        of_tensors: the block of each tensor.
    """

    curved, points, entries = True, 3, 0

    def __init__(self, at: Memory, groups: RowGroups, of_tensors: np.ndarray) -> None:
        super().__init__(at)
        self._groups, self._layout, self._blocks = groups, groups.layout, len(at.coupling)
        self._of_chunks = of_tensors[self._layout.chunks.columns[0]]
        # Whether norms come from sums: with few entries, rows tell their own norms sooner.
        self._given = groups.joined or bool(self._layout.cut.any()) or self._layout.chunks.total > MANY
        self._known: np.ndarray | None = None  # ||x||^2, <x, d> and ||d||^2 as rows, one column per group

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        groups, count = self._groups, len(self._groups.blocks)
        partial, further = self._reduce(np.zeros(count))
        whole = self._layout.in_order and not groups.joined
        self._known = partial if whole else fold(partial, groups.at, count)
        _, d_dot_x, d_sq = fold(self._known, groups.blocks, self._blocks).tolist()
        g_dot_x = g_sq = nothing = [0.0] * self._blocks
        if self.at.d_at is not None:
            g_dot_x, g_sq = fold(further, self._of_chunks, self._blocks).tolist()
        return [d_sq, d_dot_x, nothing, g_dot_x, g_sq, nothing], self.heights(alpha, u) if u else Heights([], [])

    def _reduce(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sums of `sum_rows` as rows, one column per slot, and one per chunk."""
        partial, further = np.zeros((3, len(self._groups.at))), np.zeros((len(self._of_chunks), 2))
        self._run(sum_rows, self._layout.chunks, 2.0, self._groups.at, steps, partial, further)
        return partial, further.T

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """From the sums of the groups."""
        h, slope = self._at_points(alpha, u, [1.0] * len(u))
        return Heights(h.tolist(), slope.tolist())

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """From the sums of the groups."""
        heights: list[float] = self._at_points(share, s, s)[0].tolist()
        return heights

    def _at_points(self, alpha: Floats, steps: Floats, caps: Floats) -> np.ndarray:
        """h and its slope as rows, one column per point."""
        points, out = [np.array(part, np.float64) for part in (steps, caps)], np.empty((2, len(steps)))
        _heights(self._known, np.array(alpha)[self._groups.blocks], self._groups.psi, *points, out)
        return out

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- y(u), in one pass; stores new averages."""
        at, psi, caps = self._groups.at, self._groups.psi, np.array(alpha)[self._groups.blocks]
        factors, given = np.empty(0), False
        if moves and self._given:
            norms, given = self._norms_sq(u * caps)
            factors = _factors(norms, caps, psi)
        self._run(write_rows, self._layout.chunks, 3.0, at, given, psi, caps, float(u), factors, moves)

    def _norms_sq(self, steps: np.ndarray) -> tuple[np.ndarray, bool]:
        """||x - s d||^2 of each group, and whether of all; else of those whose entries lie in several chunks."""
        groups = self._groups
        if self._known is not None:
            xx, xd, dd = self._known
            most = xx + steps**2 * dd
            out: np.ndarray = most - 2 * steps * xd
            fine = out >= SAFE[self.at.like.dtype] * most
            if fine.all() or (not groups.joined and fine[groups.at[self._layout.cut]].all()):
                return out, bool(fine.all())
        partial, _ = self._reduce(steps)
        return np.bincount(groups.at, partial[0], len(steps)), True
