"""Heights of the model for blocks whose prox acts on each entry: h and its slope at several steps, run by run.

The formulas are those in the head of `proxsps.optim.kernels.entrywise`. With a fixed cap, the prox of an entry is one
affine function of the step on each of a few branches, which follow each other: an entry that is on the same branch at
two steps is on it at all steps between them.
"""

from __future__ import annotations

from typing import Any

from proxsps.optim.kernels.caching import inlined
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER

# Of the function psi of each entry: affine; l1 alone; bounds alone; everything.
LINE, SOFT, BOX, GENERAL = range(4)


@inlined(fastmath=ENTRYWISE)
def prox(z, threshold, shrink, lower, upper):
    """prox of alpha psi at z (`proxsps.regularizers.structure.Scalar`), with alpha l1 and 1 / (1 + alpha l2)."""
    return min(max((z - min(max(z, -threshold), threshold)) * shrink, lower), upper)


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
    """Threshold, edge, curvature, lower and upper of a block with this cap, then 1 and 0, in the type of `like`.

    Entries with |z| above the edge move with z: all of them where there is no threshold.
    """
    of, threshold = like.dtype.type, alpha * psi[0, b]
    edge = threshold if psi[0, b] > 0 else -1.0
    return of(threshold), of(edge), of(alpha * psi[1, b]), of(psi[2, b]), of(psi[3, b]), of(1), of(0)


def _heights(change: Any) -> Any:
    @inlined(fastmath=REORDER)
    def heights(x, d, r, s, psi):
        """<d, x - y> of a run, and -1/alpha times its derivative."""
        h, slope = psi[-1], psi[-1]
        for k in range(len(x)):
            move, inside, _ = change(x[k], d[k], psi[-2] if r is None else r[k], s, psi)
            h += d[k] * move
            slope += d[k] * inside
        return h, slope

    return heights


_soft, _box, _general = map(_heights, (soft_change, box_change, general_change))


@inlined()
def add_heights(x, d, r, kind, psi, caps, b, u, out):
    """Add h at the points u and its slopes, for each set of caps, of a run of a block that is not affine."""
    points = len(u)
    for c in range(len(caps)):
        cap, typed = caps[c, b], typed_psi(x, psi, b, caps[c, b])
        for p in range(points):
            s = x.dtype.type(cap * u[p])
            if kind == SOFT:
                h, slope = _soft(x, d, r, s, typed)
            elif kind == BOX:
                h, slope = _box(x, d, r, s, typed)
            else:
                h, slope = _general(x, d, r, s, typed)
            out[2 * c * points + p] -= h
            out[(2 * c + 1) * points + p] -= cap * slope
