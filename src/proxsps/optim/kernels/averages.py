"""New averages of gradients, and the sums of a step, run by run.

    d' = old d + new g,    v' = old_v v + new_v g^2,    r = 1 / max{sqrt(v') + eps, least}

Passes that only read compute them into memory that stays in the first cache; the write stores them. Arguments that are
None stand for what a kind of slopes does not have: the averages d, the averages of squares v with r, and the points y
of the schedule-free form. numba drops the branches for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from proxsps.optim.kernels.caching import inlined
from proxsps.optim.kernels.heights import BOX, SOFT, box_change, changed, general_change, soft_change
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER

# The sums of a first pass, in the order of its columns. Heights follow, then their slopes.
D_SQ, D_DOT_X, NOISE, G_DOT_X, G_SQ, MOVED_SQ, P_ABS, X_SQ = range(8)
SUMS = 8


@inlined(fastmath=ENTRYWISE)
def new_slope(g, d, own):
    """d' of an entry."""
    return own[0] * d + own[1] * g


@inlined(fastmath=ENTRYWISE)
def new_square(g, v, own):
    """v' of an entry; in this order a weight of 0 wins over a square that overflows."""
    return own[2] * v + (own[3] * g) * g


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def inverse_metric(square, own):
    """r of an entry with this v'."""
    return own[6] / max(np.sqrt(square) + own[4], own[5])


@inlined(fastmath=ENTRYWISE)
def new_averages(g, d, v, own, slopes, inverse):
    """The new slopes of a run, and r, in memory; without memory for slopes d' and v' are stored."""
    for k in range(len(g)):
        if d is not None:
            slope = new_slope(g[k], d[k], own)
            if slopes is None:
                d[k] = slope
            else:
                slopes[k] = slope
        if v is not None:
            square = new_square(g[k], v[k], own)
            inverse[k] = inverse_metric(square, own)
            if slopes is None:
                v[k] = square
    if d is None:
        return g
    return d if slopes is None else slopes[: len(g)]


def _sums_with(change: Any) -> Any:
    """A function that makes the sums of a run; with a psi also heights and slopes at the steps s and t.

    `marks` then gets whether entries change their branch between the two.
    """

    @inlined(fastmath=REORDER)
    def sums(x, g, d, v, y, own, s, t, psi, marks):
        """<d', r d'>, <d', x>, the sum of (d' x)^2, <g, x> or <g, x - y>, ||r g||^2, ||g||^2 and ||r d'||_1, and these.

        <d', x> is made of two sums: it is bitwise <g, x> where d' is g.
        """
        one, zero = own[6], own[6] - own[6]
        dp, dx, noise, gx, gg, size, length = zero, zero, zero, zero, zero, zero, zero
        h_s, h_t, slope_s, slope_t = zero, zero, zero, zero
        for k in range(len(x)):
            slope = g[k] if d is None else new_slope(g[k], d[k], own)
            r = one if v is None else inverse_metric(new_square(g[k], v[k], own), own)
            scaled, along = r * g[k], slope * x[k]
            dp += slope * (r * slope)
            length += abs(r * slope)
            dx += (g[k] if d is None else d[k]) * x[k]
            noise += along * along
            gx += g[k] * (x[k] if y is None else x[k] - y[k])
            gg += scaled * scaled
            size += g[k] * g[k]
            if psi is not None:
                move_s, bend_s, branch_s = change(x[k], slope, r, s, psi)
                move_t, bend_t, branch_t = change(x[k], slope, r, t, psi)
                h_s += slope * move_s
                h_t += slope * move_t
                slope_s += slope * bend_s
                slope_t += slope * bend_t
                marks[k] = changed(branch_s, branch_t)
        dx = dx if d is None else own[0] * dx + own[1] * gx
        return (dp, dx, noise, gx, gg, size, length), (h_s, h_t, slope_s, slope_t)

    return sums


_sums_soft, _sums_box, _sums_general = map(_sums_with, (soft_change, box_change, general_change))


@inlined()
def add_sums(x, g, d, v, y, own, curved, ends, out):
    """Add the sums of a run.

    With a kind of psi and two steps as `ends` also heights and slopes there; entries that change their branch are
    marked. NaN if the square of a gradient overflows in a metric: where the square of an entry leaves the range of its
    type, v may too, and infinity does not show in sums.
    """
    if ends is None:
        found, _ = _sums_soft(x, g, d, v, y, own, own[6], own[6], None, None)
    else:
        kind, s, t, psi, cap, marks = ends
        if kind == SOFT:
            found, heights = _sums_soft(x, g, d, v, y, own, s, t, psi, marks)
        elif kind == BOX:
            found, heights = _sums_box(x, g, d, v, y, own, s, t, psi, marks)
        else:
            found, heights = _sums_general(x, g, d, v, y, own, s, t, psi, marks)
        points = (len(out) - SUMS) // 2
        for q in range(points):
            out[SUMS + q] -= heights[q]
            out[SUMS + points + q] -= cap * heights[2 + q]
    dp, dx, noise, gx, gg, size, length = found
    out[D_SQ] += dp
    out[D_DOT_X] += dx
    if curved:
        out[NOISE] += noise
        out[P_ABS] += length
    if d is not None or y is not None:
        out[G_DOT_X] += gx
        out[G_SQ] += gg
    if v is not None and not np.isfinite(size) and not np.isfinite(g * g).all():
        out[D_SQ] = np.nan


# No operation of these two may be fused with another one: torch computes the same numbers when modes are switched. A
# function without its own `fastmath` would have that of the function that calls it.


@inlined(fastmath=False, error_model="numpy")
def averaged_point(y, z, b):
    """x of an entry of the schedule-free form (`proxsps.core.schedule_free.average`)."""
    return z + (y - z) / b


@inlined(fastmath=False)
def gradient_point(x, z, b, share):
    """The next point of gradients, from the last x and the new z."""
    mean = x + share * (z - x)
    return z + (mean - z) * b
