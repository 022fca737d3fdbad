"""New averages of gradients, run by run.

    d' = old d + new g,    v' = old_v v + new_v g^2,    r = 1 / max{sqrt(v') + eps, least}

Passes that only read compute them into memory that stays in the first cache; the write stores them.
"""

from __future__ import annotations

import numpy as np

from proxsps.optim.kernels.caching import inlined
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER


@inlined()
def typed_weights(like, weights, eps, least, j):
    """old, new, old_v, new_v of a tensor, eps, least and 1 in the type of the entries."""
    of = like.dtype.type
    return of(weights[j, 0]), of(weights[j, 1]), of(weights[j, 2]), of(weights[j, 3]), of(eps), of(least), of(1)


@inlined(fastmath=ENTRYWISE)
def _square(old, v, new, g):
    return old * v + (new * g) * g  # in this order a weight of 0 wins over a square that overflows


@inlined(fastmath=ENTRYWISE)
def new_slopes(g, d, own, out):
    """d' of a run, in memory for at least as many entries."""
    old, new, _, _, _, _, _ = own
    for k in range(len(g)):
        out[k] = old * d[k] + new * g[k]
    return out[: len(g)]


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def new_metric(g, v, own, out):
    """r of a run."""
    _, _, old_v, new_v, eps, least, one = own
    for k in range(len(g)):
        out[k] = one / max(np.sqrt(_square(old_v, v[k], new_v, g[k])) + eps, least)
    return out[: len(g)]


@inlined(fastmath=ENTRYWISE)
def store_slopes(g, d, own):
    """d <- d'."""
    old, new, _, _, _, _, _ = own
    for k in range(len(g)):
        d[k] = old * d[k] + new * g[k]


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def store_metric(g, v, own, out):
    """v <- v', and r."""
    _, _, old_v, new_v, eps, least, one = own
    for k in range(len(g)):
        v[k] = _square(old_v, v[k], new_v, g[k])
        out[k] = one / max(np.sqrt(v[k]) + eps, least)
    return out[: len(g)]


@inlined(fastmath=REORDER, error_model="numpy")
def metric_sums(x, g, d, v, own):
    """<d', r d'>, <d', x>, <g, x>, ||r g||^2, ||g||^2 and the sum of (d' x)^2 of a run, without memory in between.

    <d', x> is made of two sums: it is bitwise <g, x> where d' is g.
    """
    old, new, old_v, new_v, eps, least, one = own
    dp, dx, gx, gg, size, noise = one - one, one - one, one - one, one - one, one - one, one - one
    for k in range(len(x)):
        slope = old * d[k] + new * g[k]
        r = one / max(np.sqrt(_square(old_v, v[k], new_v, g[k])) + eps, least)
        scaled, along = r * g[k], slope * x[k]
        dp += slope * (r * slope)
        dx += d[k] * x[k]
        gx += g[k] * x[k]
        gg += scaled * scaled
        size += g[k] * g[k]
        noise += along * along
    return dp, old * dx + new * gx, gx, gg, size, noise


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def write_in_metric(x, g, d, v, own, keep, move):
    """d <- d', v <- v', x <- keep x + move r d', in one loop."""
    old, new, old_v, new_v, eps, least, one = own
    for k in range(len(x)):
        slope, square = old * d[k] + new * g[k], _square(old_v, v[k], new_v, g[k])
        d[k], v[k] = slope, square
        x[k] = keep * x[k] + move * (one / max(np.sqrt(square) + eps, least) * slope)


@inlined()
def typed_mix(like, weights, j):
    """b and the share of the new point in the average, in the type of the entries."""
    of = like.dtype.type
    return of(weights[j, 4]), of(weights[j, 5])


@inlined(fastmath=REORDER, error_model="numpy")
def second_sums(z, g, y, r, one):
    """<g, r g>, <g, z>, <g, z - y>, ||r g||^2 and ||g||^2 of a run of the schedule-free form."""
    dp, dx, gx, gg, size = one - one, one - one, one - one, one - one, one - one
    for k in range(len(z)):
        scaled = r[k] * g[k]
        dp += g[k] * scaled
        dx += g[k] * z[k]
        gx += g[k] * (z[k] - y[k])
        gg += scaled * scaled
        size += g[k] * g[k]
    return dp, dx, gx, gg, size


@inlined(fastmath=REORDER, error_model="numpy")
def second_metric_sums(z, g, y, v, own):
    """The same and the sum of (g z)^2, without memory in between."""
    _, _, old_v, new_v, eps, least, one = own
    dp, dx, gx, gg, size, noise = one - one, one - one, one - one, one - one, one - one, one - one
    for k in range(len(z)):
        scaled = g[k] / max(np.sqrt(_square(old_v, v[k], new_v, g[k])) + eps, least)
        dp += g[k] * scaled
        along = g[k] * z[k]
        dx += along
        gx += g[k] * (z[k] - y[k])
        gg += scaled * scaled
        size += g[k] * g[k]
        noise += along * along
    return dp, dx, gx, gg, size, noise


# No operation of these two may be fused with another one: torch computes the same numbers when modes are switched.


@inlined(error_model="numpy")
def averaged_points(y, z, b, out):
    """x of a run (`proxsps.core.schedule_free.average`)."""
    for k in range(len(y)):
        out[k] = z[k] + (y[k] - z[k]) / b
    return out[: len(y)]


@inlined()
def gradient_points(x, z, b, share, lower, upper, y):
    """y <- the next point of gradients, from the last x and the new z; x stays between its bounds, also in rounding."""
    for k in range(len(x)):
        mean = min(max(x[k], lower), upper)
        mean = mean + share * (z[k] - mean)
        y[k] = min(max(z[k] + (mean - z[k]) * b, lower), upper)


@inlined(error_model="numpy")
def write_second_in_metric(z, g, y, v, own, keep, move, b, share):
    """v <- v', z <- keep z + move r g, and the next y, in one loop."""
    _, _, old_v, new_v, eps, least, _ = own
    for k in range(len(z)):
        square = _square(old_v, v[k], new_v, g[k])
        v[k] = square
        mean = z[k] + (y[k] - z[k]) / b
        new = keep * z[k] + move * (g[k] / max(np.sqrt(square) + eps, least))
        mean = mean + share * (new - mean)
        z[k] = new
        y[k] = new + (mean - new) * b


@inlined()
def overflows(g):
    """Whether the square of an entry leaves the range of its type: v may too, and infinity does not show in sums."""
    return not np.isfinite(g * g).all()
