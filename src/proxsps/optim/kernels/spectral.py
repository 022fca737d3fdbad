"""Passes over blocks with spectral directions: new averages of gradients, sums, and one write of d, z and y.

Between the first two passes torch orthogonalises the averages (`proxsps.optim.spectral`). A direction is a scale times
the orthogonal matrix, which is multiplied here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from proxsps.optim.kernels.averages import gradient_points
from proxsps.optim.kernels.caching import compiled
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, addresses, fold, layout, pointer, run
from proxsps.optim.kernels.sampling import NO_START, moved_sq, start_of
from proxsps.optim.rule import Heights
from proxsps.optim.spectral import SpectralPart, orthogonal

SUMS = 9  # the rows of `Table`
D_SQ, D_DOT_X, NOISE, X_SQ, G_DOT_X, G_SQ, P_SQ, P_DOT_X, MOVED_SQ = range(SUMS)
Floats = Sequence[float]


@compiled(fastmath=ENTRYWISE)
def _blend(like, block, tensor, origin, length, d_at, g_at, new_at, mu, first, last):
    """d' = mu d + (1 - mu) g."""
    old, new = like.dtype.type(mu), like.dtype.type(1 - mu)
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        g = numba.carray(pointer(g_at[j], like), low + n)[low:]
        out = numba.carray(pointer(new_at[j], like), low + n)[low:]
        for k in range(n):
            out[k] = old * d[k] + new * g[k]


@numba.njit(fastmath=REORDER)
def _sums(z, g, y, d, p, scale, zero):
    """<d, p>, <d, z>, <g, z - y>."""
    dp, dz, gap = zero, zero, zero
    for k in range(len(z)):
        dp += d[k] * (scale * p[k])
        dz += d[k] * z[k]
        gap += g[k] * (z[k] - y[k])
    return dp, dz, gap


@numba.njit(fastmath=REORDER)
def _lengths(z, p, scale, zero):
    """||z||^2, ||p||^2, <p, z>."""
    zz, pp, pz = zero, zero, zero
    for k in range(len(z)):
        move = scale * p[k]
        zz += z[k] * z[k]
        pp += move * move
        pz += move * z[k]
    return zz, pp, pz


@compiled()
def _reduce(
    like, block, tensor, origin, length, z_at, g_at, y_at, d_at, p_at, scales, start_at, start_scale, b, moving,
    partial, first, last,
):  # fmt: skip
    """The sums of each chunk."""
    of = like.dtype.type
    mix, zero = of(b), of(0)
    for i in range(first, last):
        j, low, n, out = tensor[i], origin[i], length[i], partial[i]
        z = numba.carray(pointer(z_at[j], like), low + n)[low:]
        g = numba.carray(pointer(g_at[j], like), low + n)[low:]
        y = numba.carray(pointer(y_at[j], like), low + n)[low:]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        p = numba.carray(pointer(p_at[j], like), low + n)[low:]
        scale = of(scales[j])
        out[:] = 0
        for at in range(0, n, RUN):
            end = at + RUN
            found = _sums(z[at:end], g[at:end], y[at:end], d[at:end], p[at:end], scale, zero)
            out[D_SQ] += found[0]
            out[D_DOT_X] += found[1]
            out[G_DOT_X] += found[2]
            if len(start_at):
                out[MOVED_SQ] += moved_sq(like, start_at, j, z[at:end], low + at, y[at:end], mix)
            if moving:
                squares = _lengths(z[at:end], p[at:end], scale, zero)
                out[X_SQ] += squares[0]
                out[P_SQ] += squares[1]
                out[P_DOT_X] += squares[2]
        out[G_SQ] = n
        if len(start_at):
            out[MOVED_SQ] *= start_scale[j]


@compiled()
def _write(
    like, block, tensor, origin, length, z_at, y_at, d_at, new_at, p_at, scales, keep, move, b, share, first, last
):
    """d <- d', z <- keep z + move p, and the next y."""
    of = like.dtype.type
    mix, part, least, most, fresh = of(b), of(share), of(-np.inf), of(np.inf), np.empty(RUN, like.dtype)
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        z = numba.carray(pointer(z_at[j], like), low + n)[low:]
        y = numba.carray(pointer(y_at[j], like), low + n)[low:]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        new = numba.carray(pointer(new_at[j], like), low + n)[low:]
        p = numba.carray(pointer(p_at[j], like), low + n)[low:]
        kept, moved = of(keep[block[i]]), of(move[block[i]] * scales[j])
        for at in range(0, n, RUN):
            end = min(at + RUN, n)
            for k in range(at, end):
                d[k] = new[k]
                fresh[k - at] = z[k] + (y[k] - z[k]) / mix
                z[k] = kept * z[k] + moved * p[k]
            gradient_points(fresh[: end - at], z[at:end], mix, part, least, most, y[at:end])


class CompiledSpectralPart(SpectralPart):
    """Spectral blocks in dense memory."""

    mixes = True

    def set_mix(self, b: float, share: float) -> None:
        """The constants of the schedule-free form in this step."""
        self._mix = b, share

    def fits(self, starts: Sequence[Tensor]) -> bool:
        """Whether the kernels apply; `starts` are the sampled entries of x_0."""
        zs, ys, grads = ([t for block in self._blocks for t in ts(block)] for ts in (_zs, _ys, _grads))
        averages = [t for ts in self._averages for t in ts]
        found = addresses(zs, grads, ys, averages)
        if found is None or not all([t.is_contiguous() for t in (*zs, *grads, *ys, *averages)]):
            return False
        self._start = start_of(zs, starts, found.like) or NO_START
        self._like, (self._z_at, self._g_at, self._y_at, self._d_at) = found
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in self._blocks])
        self._layout = layout(sizes, torch.get_num_threads())
        firsts = np.cumsum([0, *map(len, sizes)])
        self._places = [[firsts[stack.block] + i for i in stack.members] for stack in self._stacks]
        return True

    @property
    def measures(self) -> bool:
        """Whether the sums contain distances from the start."""
        return len(self._start.at) > 0

    def bind(self, gradients: Sequence[int]) -> None:
        """Use gradients at other addresses."""
        self._g_at[:] = gradients

    def sums(self, alpha: Floats, u: Floats, moving: bool) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with new averages and directions, which are kept for the write."""
        mu, squares = self._plan.momentum
        self._new_at, self._p_at, scales = (
            np.zeros_like(self._z_at),
            np.zeros_like(self._z_at),
            np.zeros(len(self._z_at)),
        )
        dtype = torch.float32 if self._like.dtype == np.float32 else torch.float64
        slopes = [torch.empty(len(stack.members), *stack.shape, dtype=dtype) for stack in self._stacks]
        for places, own in zip(self._places, slopes, strict=True):
            self._new_at[places] = _rows_at(own)
        chunks = self._layout.chunks
        run(_blend, chunks, self._like, *chunks.columns, self._d_at, self._g_at, self._new_at, mu, weight=1.5)
        alone = self._plan.ranks == 1
        scaled = [] if alone else self._directions(slopes, math.sqrt(squares))
        found = [own.contiguous() for own in scaled or [orthogonal(own.flatten(0, 1)) for own in slopes]]
        for stack, places, own in zip(self._stacks, self._places, found, strict=True):
            self._p_at[places] = _rows_at(own.view(len(places), -1))
            scales[places] = math.sqrt(squares * max(stack.shape[1:])) if alone else 1.0
        self._new, self._scales = list(zip(slopes, found, strict=True)), scales
        partial = np.empty((len(chunks.sizes), SUMS))
        args = (self._z_at, self._g_at, self._y_at, self._new_at, self._p_at, scales, *self._start, self._mix[0])
        run(_reduce, chunks, self._like, *chunks.columns, *args, moving, partial, weight=2.0)
        return fold(partial, self._layout, SUMS).tolist(), Heights([], [])

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, relax: float) -> None:
        """z <- keep z + move p, and y; stores new averages."""
        chunks = self._layout.chunks
        args = (self._z_at, self._y_at, self._d_at, self._new_at, self._p_at, self._scales, np.array(keep))
        run(_write, chunks, self._like, *chunks.columns, *args, np.array(move), *self._mix, weight=2.0)
        self._new = []


def _rows_at(stacked: Tensor) -> Any:
    """The addresses of the tensors of a stack."""
    return stacked.data_ptr() + np.arange(len(stacked)) * (stacked[0].numel() * stacked.element_size())


def _zs(block: Any) -> list[Tensor]:
    return block.params  # type: ignore[no-any-return]


def _ys(block: Any) -> list[Tensor]:
    return block.ys  # type: ignore[no-any-return]


def _grads(block: Any) -> list[Tensor]:
    return block.slopes  # type: ignore[no-any-return]


def make_spectral(plan: Any, opt: Any, places: Sequence[int]) -> CompiledSpectralPart | None:
    """The part of spectral blocks, or None if the kernels do not apply."""
    part = CompiledSpectralPart(plan, opt, places)
    blocks = [plan.blocks[i] for i in places]
    if any([block.gathered or block.afterwards or block.sharded for block in blocks]):
        return None
    owners = [p for block in blocks for p in block.owners]
    if not part.fits([plan.start(p, opt) for p in owners]):
        return None
    plan.apart += [] if part.measures else owners
    return part
