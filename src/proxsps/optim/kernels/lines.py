"""Two passes for blocks with an affine step: the sums that a step needs, then x <- keep x + move d."""

from __future__ import annotations

import numba
import numpy as np

from proxsps.optim.kernels.caching import compiled
from proxsps.optim.kernels.layout import REORDER, RUN, Memory, pointer, run
from proxsps.optim.kernels.sampling import NO_START, Start, moved_sq, sample_end


@compiled(fastmath=REORDER)
def _sum_two(like, block, tensor, start, length, x_at, g_at, start_at, partial, first, last):
    """||g||^2 and <g, x> of each chunk, and ||x - x_0||^2 over its sample."""
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :]
        begin = numba.carray(pointer(start_at[j], like), sample_end(start[i] + n)) if len(start_at) else x
        gg, gx, moved = 0.0, 0.0, 0.0
        for low in range(0, n, RUN):
            a, b = like.dtype.type(0), like.dtype.type(0)
            xs, gs = x[low : low + RUN], g[low : low + RUN]  # an index that starts at 0 lets the loop be vectorised
            for k in range(len(xs)):
                a += gs[k] * gs[k]
                b += gs[k] * xs[k]
            gg += a
            gx += b
            if len(start_at):
                moved += moved_sq(xs, begin, start[i] + low)
        partial[0, i], partial[1, i], partial[2, i], partial[3, i] = gg, gx, 0.0, moved


@compiled(fastmath=REORDER)
def _sum_three(like, block, tensor, start, length, x_at, g_at, start_at, lam, partial, first, last):
    """||d||^2, <d, x> and ||x||^2 of each chunk, for d = g + lam x, and ||x - x_0||^2 over its sample."""
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :]
        coupling = like.dtype.type(lam[block[i]])
        begin = numba.carray(pointer(start_at[j], like), sample_end(start[i] + n)) if len(start_at) else x
        dd, dx, xx, moved = 0.0, 0.0, 0.0, 0.0
        for low in range(0, n, RUN):
            a, b, c = like.dtype.type(0), like.dtype.type(0), like.dtype.type(0)
            xs, gs = x[low : low + RUN], g[low : low + RUN]
            for k in range(len(xs)):
                d = gs[k] + coupling * xs[k]
                a += d * d
                b += d * xs[k]
                c += xs[k] * xs[k]
            dd += a
            dx += b
            xx += c
            if len(start_at):
                moved += moved_sq(xs, begin, start[i] + low)
        partial[0, i], partial[1, i], partial[2, i], partial[3, i] = dd, dx, xx, moved


@compiled(fastmath=REORDER)
def _write(like, block, tensor, start, length, x_at, g_at, keep, move, first, last):
    """x <- keep x + move g in each chunk."""
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(pointer(g_at[j], like), start[i] + n)[start[i] :]
        a, b = like.dtype.type(keep[block[i]]), like.dtype.type(move[block[i]])
        for k in range(n):
            x[k] = a * x[k] + b * g[k]


def sums(at: Memory, lam: np.ndarray, points: bool, start: Start = NO_START) -> np.ndarray:
    """||d||^2, <d, x> and ||x||^2 as rows, one column per block, for d = g + lam x, g the slope in memory.

    Without `points` d = g, and the last row is left at 0. With a start there is a fourth row, ||x - x_0||^2.
    """
    chunks = at.layout.chunks
    partial = np.empty((4, len(chunks.sizes)))
    kernel, coupling = (_sum_three, (lam,)) if points else (_sum_two, ())
    args = (at.x_at, at.d_at, start.at, *coupling, partial)
    run(kernel, chunks, at.like, *chunks.columns, *args, backwards=next(at.turns))
    if not len(start.at):
        return at.layout.per_block(partial[:3])
    partial[3] *= start.scale[chunks.columns[1]]
    return at.layout.per_block(partial)


def write(at: Memory, keep: np.ndarray, move: np.ndarray) -> None:
    """x <- keep x + move d, with one number keep and one number move per block."""
    chunks = at.layout.chunks
    run(_write, chunks, at.like, *chunks.columns, at.x_at, at.d_at, keep, move, backwards=next(at.turns))
