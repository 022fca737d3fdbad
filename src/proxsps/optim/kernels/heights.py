"""Heights of the model for blocks whose prox acts on each entry: h and its slope at several steps, run by run.

The formulas are those in the head of `proxsps.optim.kernels.entrywise`. With a fixed cap, the prox of an entry is one
affine function of the step on each of a few branches, which follow each other: an entry that is on the same branch at
two steps is on it at all steps between them.
"""

from __future__ import annotations

from typing import Any

from proxsps.optim.kernels.caching import inlined
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER

LINE, SOFT, BOX, GENERAL = range(4)  # affine; l1 alone; bounds alone; everything


@inlined(fastmath=ENTRYWISE)
def soft_change(x, d, r, s, psi):
    """x - y for l1 alone, dy/dz along p, and what tells the branch."""
    threshold, _, _, _, _, _, zero = psi
    p, edge = r * d, r * threshold
    z = x - s * p
    c = min(max(z, -edge), edge)
    inside = z != c
    return s * p + c if inside else x, p if inside else zero, (z > edge, z < -edge, True, True)


@inlined(fastmath=ENTRYWISE)
def box_change(x, d, r, s, psi):
    """x - y for bounds alone, dy/dz along p, and what tells the branch."""
    _, _, _, lower, upper, _, zero = psi
    p = r * d
    z = x - s * p
    above, below = z > lower, z < upper
    inside = above & below
    return s * p if inside else x - min(max(z, lower), upper), p if inside else zero, (above, below, True, True)


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def general_change(x, d, r, s, psi):
    """x - y, dy/dz along p, and what tells the branch."""
    threshold, edge, curvature, lower, upper, one, zero = psi
    p, most, bend = r * d, r * threshold, r * curvature
    z, shrink = x - s * p, one / (one + bend)
    c = min(max(z, -most), most)
    y = min(max((z - c) * shrink, lower), upper)
    above, below = y > lower, y < upper
    inside = (abs(z) > r * edge) & above & below
    change = shrink * (s * p + c + bend * x) if inside else x - y
    return change, shrink * p if inside else zero, (z > most, z < -most, above, below)


@inlined()
def changed(one, other):
    """Whether two branches differ."""
    return (one[0] != other[0]) | (one[1] != other[1]) | (one[2] != other[2]) | (one[3] != other[3])


@inlined()
def typed_psi(like, psi, b, alpha):
    """Threshold, edge, curvature, lower and upper of a block with this cap, then 1 and 0, in the type of the entries.

    Entries with |z| above the edge move with z: all of them where there is no threshold.
    """
    of, threshold = like.dtype.type, alpha * psi[0, b]
    edge = threshold if psi[0, b] > 0 else -1.0
    return of(threshold), of(edge), of(alpha * psi[1, b]), of(psi[2, b]), of(psi[3, b]), of(1), of(0)


def _heights(change: Any) -> Any:
    """A function that adds h and its slope at several steps, for a run of entries; three at a time are cheap."""

    @inlined(fastmath=REORDER)
    def added(h, slope, x, d, r, s, psi):
        move, inside, _ = change(x, d, r, s, psi)
        return h + d * move, slope + d * inside

    @inlined(fastmath=REORDER)
    def one(x, d, r, s, psi):
        h, slope = psi[-1], psi[-1]
        for k in range(len(x)):
            h, slope = added(h, slope, x[k], d[k], psi[-2] if r is None else r[k], s, psi)
        return h, slope

    @inlined(fastmath=REORDER)
    def three(x, d, r, s, t, v, psi):
        h_s, h_t, h_v, slope_s, slope_t, slope_v = psi[-1], psi[-1], psi[-1], psi[-1], psi[-1], psi[-1]
        for k in range(len(x)):
            scale = psi[-2] if r is None else r[k]
            h_s, slope_s = added(h_s, slope_s, x[k], d[k], scale, s, psi)
            h_t, slope_t = added(h_t, slope_t, x[k], d[k], scale, t, psi)
            h_v, slope_v = added(h_v, slope_v, x[k], d[k], scale, v, psi)
        return h_s, h_t, h_v, slope_s, slope_t, slope_v

    @inlined()
    def add(x, d, r, steps, psi, cap, heights, slopes):
        p = 0
        while p + 3 <= len(steps):
            found = three(x, d, r, steps[p], steps[p + 1], steps[p + 2], psi)
            for q in range(3):
                heights[p + q] -= found[q]
                slopes[p + q] -= cap * found[3 + q]
            p += 3
        while p < len(steps):
            h, slope = one(x, d, r, steps[p], psi)
            heights[p] -= h
            slopes[p] -= cap * slope
            p += 1

    return add


_add_soft, _add_box, _add_general = (_heights(change) for change in (soft_change, box_change, general_change))


@inlined()
def add_heights(like, x, d, r, kind, psi, caps, b, u, steps, out):
    """Add h at the points u and its slopes, for each set of caps, of a run of a block that is not affine."""
    points = len(u)
    for c in range(len(caps)):
        heights, bends = out[2 * c * points : (2 * c + 1) * points], out[(2 * c + 1) * points : 2 * (c + 1) * points]
        typed = typed_psi(like, psi, b, caps[c, b])
        for p in range(points):
            steps[p] = like.dtype.type(caps[c, b] * u[p])
        if kind == SOFT:
            _add_soft(x, d, r, steps, typed, caps[c, b], heights, bends)
        elif kind == BOX:
            _add_box(x, d, r, steps, typed, caps[c, b], heights, bends)
        else:
            _add_general(x, d, r, steps, typed, caps[c, b], heights, bends)
