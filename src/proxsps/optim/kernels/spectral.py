"""Passes over blocks with spectral directions, which torch has computed: sums, and one write of d, z and y."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

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
from proxsps.optim.kernels.layout import REORDER, RUN, addresses, entries, fold, layout, run, run_memory
from proxsps.optim.kernels.sampling import NO_START, moved_sq, start_of
from proxsps.optim.rule import Heights, Rule
from proxsps.optim.spreading import directions_of
from proxsps.optim.vectors.spectral import SpectralPart

Floats = Sequence[float]
COLUMNS = D_SQ, D_DOT_X, G_DOT_X, G_SQ  # of the sums of a run; the last one is ||p||^2 first


@inlined(fastmath=REORDER)
def _sums(z, g, y, d, p, old, new, zero):
    """<d', p>, <d', z>, <g, z - y>, ||p||^2."""
    dp, dz, gap, pp = zero, zero, zero, zero
    for k in range(len(z)):
        slope = old * d[k] + new * g[k]
        dp += slope * p[k]
        dz += slope * z[k]
        gap += g[k] * (z[k] - y[k])
        pp += p[k] * p[k]
    return dp, dz, gap, pp


@compiled()
def _reduce(
    like, block, tensor, origin, length, z_at, g_at, y_at, d_at, p_at, mu, start_at, start_scale, b, partial, first,
    last,
):  # fmt: skip
    """The sums of each chunk."""
    of = like.dtype.type
    old, new, mix, zero, places = of(mu), of(1 - mu), of(b), of(0), numba.carray(run_memory(np.uint32), RUN)
    for i in range(first, last):
        j, low, n, out = tensor[i], origin[i], length[i], partial[i]
        z, y, p = entries(like, z_at, j, low, n), entries(like, y_at, j, low, n), entries(like, p_at, j, low, n)
        g, d = entries(like, g_at, j, low, n), entries(like, d_at, j, low, n)
        out[:] = 0
        for at in range(0, n, RUN):
            end = at + RUN
            found = _sums(z[at:end], g[at:end], y[at:end], d[at:end], p[at:end], old, new, zero)
            for row in range(len(COLUMNS)):
                out[COLUMNS[row]] += found[row]
        if len(start_at):
            out[MOVED_SQ] = start_scale[j] * moved_sq(like, start_at, j, z[:n], low, places, y[:n], mix)


@compiled()
def _write(like, block, tensor, origin, length, z_at, g_at, y_at, d_at, p_at, mu, keep, move, b, share, first, last):
    """d <- d', z <- keep z + move p, and the next y."""
    of = like.dtype.type
    old, new, mix, part = of(mu), of(1 - mu), of(b), of(share)
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        z, y, p = entries(like, z_at, j, low, n), entries(like, y_at, j, low, n), entries(like, p_at, j, low, n)
        g, d = entries(like, g_at, j, low, n), entries(like, d_at, j, low, n)
        kept, moved = of(keep[block[i]]), of(move[block[i]])
        for k in range(n):
            d[k] = old * d[k] + new * g[k]
            mean = averaged_point(y[k], z[k], mix)
            z[k] = kept * z[k] + moved * p[k]
            y[k] = gradient_point(mean, z[k], mix, part)


class CompiledSpectralPart(SpectralPart):
    """Spectral blocks in dense memory."""

    # Memory that is allocated in large blocks stays with the process: new pages for all directions would take 5 % of a
    # step.
    most = 1 << 22

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
        start = start_of(zs, [plan.start(p, self._opt) for p in owners], found[0])
        plan.apart += owners if start is None else []  # measured apart
        self._start = start or NO_START
        self._like, (self._z_at, self._g_at, self._y_at, self._d_at) = found
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in blocks])
        self._layout = layout(sizes, torch.get_num_threads())
        firsts = np.cumsum([0, *map(len, sizes)])
        self._places = [firsts[i] + j for i, pile in self._piles for j in pile]
        self._p_at = np.zeros_like(self._z_at)
        self._dtype = torch.float32 if self._like.dtype == np.float32 else torch.float64
        return True

    def bind(self, gradients: Sequence[int]) -> None:
        """Use gradients at other addresses."""
        self._g_at[:] = gradients
        for block in self._blocks:
            block.slopes = [p.grad for p in block.owners if p.grad is not None]

    def set_weights(self, k: float, rule: Rule) -> None:
        """Nothing: the weights of old gradients depend on the number of steps."""

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with directions, which are kept for the write."""
        self._moves = [self._directions(i, pile) for i, pile in self._piles]
        self._p_at[self._places] = [p.data_ptr() for moves in self._moves for p in moves]
        chunks = self._layout
        partial = np.empty((len(chunks.sizes), SUMS))
        self._points = (self._z_at, self._g_at, self._y_at, self._d_at, self._p_at, self._plan.momentum[0])
        args = (*self._points, *self._start, self._plan.rule.mix, partial)
        run(_reduce, chunks, self._like, *chunks.columns, *args, weight=2.0)
        rows = fold(partial.T, chunks.columns[0], len(self._blocks)).tolist()
        rows[G_SQ] = self._counted(rows[G_SQ])
        return rows, Heights([], [])

    def _directions(self, i: int, pile: Sequence[int]) -> list[Tensor]:
        """The directions of a pile, which may be in the memory of its slopes: the kernels compute these again."""
        mu, squares = self._plan.momentum
        old, gs, *_ = self._columns(i, pile)
        sizes = [d.numel() for d in old]
        room = torch.empty(sum(sizes), dtype=self._dtype).split(sizes)
        slopes = [torch.lerp(d, g, 1 - mu, out=t.view(d.shape)) for d, g, t in zip(old, gs, room, strict=False)]
        found = directions_of(self._blocks[i], slopes, math.sqrt(squares), self._opt, reuse=True)
        return [p.contiguous() for p in found]

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """z <- keep z + move p, and y; stores new averages."""
        chunks = self._layout
        args = (*self._points, np.array(keep), np.array(move), self._plan.rule.mix, self._share)
        run(_write, chunks, self._like, *chunks.columns, *args, weight=2.0)
        self._moves = []


def make_spectral(plan: Any, opt: Any, places: Sequence[int]) -> CompiledSpectralPart | None:
    """The part of spectral blocks, or None if the kernels do not apply."""
    part = CompiledSpectralPart(plan, opt, places)
    return part if part.fits() else None
