"""Passes over blocks with spectral directions: new averages of gradients, sums, and one write of d, z and y.

Between the first two passes torch orthogonalises the averages (`proxsps.optim.spectral`), in their own memory: later
passes compute them again. A direction is a scale times the orthogonal matrix, which is multiplied here.
"""

from __future__ import annotations

import numba
import numpy as np

from proxsps.optim.kernels.averages import (
    D_DOT_X,
    D_SQ,
    G_DOT_X,
    MOVED_SQ,
    P_DOT_X,
    P_SQ,
    X_SQ,
    averaged_point,
    gradient_point,
)
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, entries, run_memory
from proxsps.optim.kernels.sampling import moved_sq


@compiled(fastmath=ENTRYWISE)
def blend(like, block, tensor, origin, length, d_at, g_at, new_at, mu, first, last):
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


@inlined(fastmath=REORDER)
def _lengths(z, p, scale, zero):
    """||z||^2, <p, z>."""
    zz, pz = zero, zero
    for k in range(len(z)):
        zz += z[k] * z[k]
        pz += scale * p[k] * z[k]
    return zz, pz


@compiled()
def reduce(
    like, block, tensor, origin, length, z_at, g_at, y_at, d_at, p_at, mu, scales, start_at, start_scale, b, moving,
    partial, first, last,
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
            out[D_SQ] += found[0]
            out[D_DOT_X] += found[1]
            out[G_DOT_X] += found[2]
            out[P_SQ] += found[3]
            if moving:
                squares = _lengths(z[at:end], p[at:end], scale, zero)
                out[X_SQ] += squares[0]
                out[P_DOT_X] += squares[1]
        if len(start_at):
            out[MOVED_SQ] = start_scale[j] * moved_sq(like, start_at, j, z[:n], low, places, y[:n], mix)


@compiled()
def write(
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
