"""Passes over blocks with spectral directions: new averages of gradients, sums, and one write of d, z and y.

Between the first two passes torch orthogonalises the averages (`proxsps.optim.spectral`), in their own memory: later
passes compute them again. A direction is a scale times the orthogonal matrix, which is multiplied here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from proxsps.core.schedule_free import counted
from proxsps.optim.kernels.averages import (
    D_DOT_X,
    D_SQ,
    G_DOT_X,
    G_SQ,
    MOVED_SQ,
    SUMS,
    averaged_point,
    gradient_point,
)
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, addresses, entries, fold, layout, run, run_memory
from proxsps.optim.kernels.sampling import NO_START, moved_sq, start_of
from proxsps.optim.rule import Heights
from proxsps.optim.spectral import SpectralPart, orthogonal

Floats = Sequence[float]
COLUMNS = D_SQ, D_DOT_X, G_DOT_X, G_SQ  # of the sums of a run; the last one is ||p||^2 first


@compiled(fastmath=ENTRYWISE)
def _blend(like, block, tensor, origin, length, d_at, g_at, new_at, mu, first, last):
    """d' = mu d + (1 - mu) g."""
    old, new = like.dtype.type(mu), like.dtype.type(1 - mu)
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        g, d, out = entries(like, g_at, j, low, n), entries(like, d_at, j, low, n), entries(like, new_at, j, low, n)
        for k in range(n):
            out[k] = old * d[k] + new * g[k]


@inlined(fastmath=REORDER)
def _sums(z, g, y, d, p, old, new, scale, zero):
    """<d', p>, <d', z>, <g, z - y>, ||p||^2."""
    dp, dz, gap, pp = zero, zero, zero, zero
    for k in range(len(z)):
        slope, move = old * d[k] + new * g[k], scale * p[k]
        dp += slope * move
        dz += slope * z[k]
        gap += g[k] * (z[k] - y[k])
        pp += move * move
    return dp, dz, gap, pp


@compiled()
def _reduce(
    like, block, tensor, origin, length, z_at, g_at, y_at, d_at, p_at, mu, scales, start_at, start_scale, b, partial,
    first, last,
):  # fmt: skip
    """The sums of each chunk."""
    of = like.dtype.type
    old, new, mix, zero, places = of(mu), of(1 - mu), of(b), of(0), numba.carray(run_memory(np.uint32), RUN)
    for i in range(first, last):
        j, low, n, out = tensor[i], origin[i], length[i], partial[i]
        z, y, p = entries(like, z_at, j, low, n), entries(like, y_at, j, low, n), entries(like, p_at, j, low, n)
        g, d = entries(like, g_at, j, low, n), entries(like, d_at, j, low, n)
        scale = of(scales[j])
        out[:] = 0
        for at in range(0, n, RUN):
            end = at + RUN
            found = _sums(z[at:end], g[at:end], y[at:end], d[at:end], p[at:end], old, new, scale, zero)
            for row in range(len(COLUMNS)):
                out[COLUMNS[row]] += found[row]
        if len(start_at):
            out[MOVED_SQ] = start_scale[j] * moved_sq(like, start_at, j, z[:n], low, places, y[:n], mix)


@compiled()
def _write(
    like, block, tensor, origin, length, z_at, g_at, y_at, d_at, p_at, mu, scales, keep, move, b, share, first, last
):
    """d <- d', z <- keep z + move p, and the next y."""
    of = like.dtype.type
    old, new, mix, part = of(mu), of(1 - mu), of(b), of(share)
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        z, y, p = entries(like, z_at, j, low, n), entries(like, y_at, j, low, n), entries(like, p_at, j, low, n)
        g, d = entries(like, g_at, j, low, n), entries(like, d_at, j, low, n)
        kept, moved = of(keep[block[i]]), of(move[block[i]] * scales[j])
        for k in range(n):
            d[k] = old * d[k] + new * g[k]
            mean = averaged_point(y[k], z[k], mix)
            z[k] = kept * z[k] + moved * p[k]
            y[k] = gradient_point(mean, z[k], mix, part)


class CompiledSpectralPart(SpectralPart):
    """Spectral blocks in dense memory."""

    mixes = True

    def set_share(self, share: float) -> None:
        """The share of the new point in the average."""
        self._mix = self._plan.rule.mix, share

    def fits(self) -> bool:
        """Whether the kernels apply."""
        blocks, plan = self._blocks, self._plan
        if any([block.gathered or block.afterwards or block.sharded for block in blocks]):
            return False
        names = "params", "slopes", "ys"
        zs, grads, ys = ([t for block in blocks for t in getattr(block, name)] for name in names)
        averages, owners = [t for ts in self._averages for t in ts], [p for block in blocks for p in block.owners]
        found = addresses(zs, grads, ys, averages)
        if found is None or not all([t.is_contiguous() for t in (*zs, *grads, *ys, *averages)]):
            return False
        self.set_share(0.0)
        start = start_of(zs, [plan.start(p, self._opt) for p in owners], found[0])
        plan.apart += owners if start is None else []  # measured apart
        self._start = start or NO_START
        self._like, (self._z_at, self._g_at, self._y_at, self._d_at) = found
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in blocks])
        self._entries = list(map(sum, sizes))
        self._layout = layout(sizes, torch.get_num_threads())
        firsts = np.cumsum([0, *map(len, sizes)])
        self._places = [[firsts[stack.block] + i for i in stack.members] for stack in self._stacks]
        return True

    def bind(self, gradients: Sequence[int]) -> None:
        """Use gradients at other addresses."""
        self._g_at[:] = gradients

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with new averages and directions, which are kept for the write."""
        mu, squares = self._plan.momentum
        self._p_at, scales = np.zeros_like(self._z_at), np.zeros(len(self._z_at))
        dtype = torch.float32 if self._like.dtype == np.float32 else torch.float64
        slopes = [torch.empty(len(stack.members), *stack.shape, dtype=dtype) for stack in self._stacks]
        for places, own in zip(self._places, slopes, strict=True):
            self._p_at[places] = _rows_at(own)
        chunks = self._layout
        run(_blend, chunks, self._like, *chunks.columns, self._d_at, self._g_at, self._p_at, mu, weight=1.5)
        alone = self._plan.ranks == 1
        scaled = [] if alone else self._directions(slopes, math.sqrt(squares))
        found = scaled or [orthogonal(own.flatten(0, 1), reuse=True) for own in slopes]
        self._found = [own.contiguous() for own in found]
        for stack, places, own in zip(self._stacks, self._places, self._found, strict=True):
            self._p_at[places] = _rows_at(own.view(len(places), -1))
            scales[places] = math.sqrt(squares * max(stack.shape[1:])) if alone else 1.0
        partial = np.empty((len(chunks.sizes), SUMS))
        self._points = (self._z_at, self._g_at, self._y_at, self._d_at, self._p_at, mu, scales)
        args = (*self._points, *self._start, self._mix[0], partial)
        run(_reduce, chunks, self._like, *chunks.columns, *args, weight=2.0)
        rows = fold(partial.T, chunks.columns[0], len(self._blocks)).tolist()
        rows[G_SQ] = [counted(p_sq / squares, n) for p_sq, n in zip(rows[G_SQ], self._entries, strict=True)]
        return rows, Heights([], [])

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """z <- keep z + move p, and y; stores new averages."""
        chunks = self._layout
        args = (*self._points, np.array(keep), np.array(move), *self._mix)
        run(_write, chunks, self._like, *chunks.columns, *args, weight=2.0)
        self._found = []


def _rows_at(stacked: Tensor) -> Any:
    """The addresses of the tensors of a stack."""
    return stacked.data_ptr() + np.arange(len(stacked)) * (stacked[0].numel() * stacked.element_size())


def make_spectral(plan: Any, opt: Any, places: Sequence[int]) -> CompiledSpectralPart | None:
    """The part of spectral blocks, or None if the kernels do not apply."""
    part = CompiledSpectralPart(plan, opt, places)
    return part if part.fits() else None
