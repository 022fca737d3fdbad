"""Passes over blocks whose prox is affine or acts on each entry: sums, heights of the model at several points, a write.

With r = 1/D the inverse metric of an entry, which is 1 in the identity metric, and p = r d its direction,

    z = x - s p,    y = prox(z) with threshold alpha l1 r, factor 1 / (1 + alpha l2 r) and bounds,    h = <d, y - x>.

Entries where the prox moves with z are called inside. There x - y is computed without y, which may agree with x in all
but a few digits:

    (1 + alpha l2 r) (x - y) = s p + clip(z, -alpha l1 r, alpha l1 r) + alpha l2 r x      inside,
    x - y with y exactly 0, lower or upper                                               elsewhere.

The slope d is the gradient, the gradient plus lam x (coupled methods), or an average of gradients. New averages are not
kept between the passes, because a skipped step must leave the state as it was: every pass computes them from state and
gradient, run by run, into memory that stays in the first cache; only the write stores them,

    d' = old d + new g,    v' = old_v v + new_v g^2,    D = max{sqrt(v') + eps, least}.

One template makes the kernels of all kinds of slopes. Sums are taken in the type of the entries over a run of
them, then in doubles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from proxsps.optim.kernels.averages import (
    MOVED_SQ,
    SUMS,
    X_SQ,
    add_sums,
    add_sums_and_heights,
    averaged_point,
    gradient_point,
    inverse_metric,
    new_averages,
    new_slope,
    new_square,
    typed_weights,
)
from proxsps.optim.kernels.between import ROOM, list_marked
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.heights import LINE, add_heights, typed_psi
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, entries, run_memory
from proxsps.optim.kernels.sampling import moved_sq
from proxsps.optim.kernels.scalar import prox

NOWHERE = np.empty(0, np.int64)


class Sources(NamedTuple):
    """Where the entries of tensors lie, and what makes slopes of them; valid while the tensors live."""

    x_at: np.ndarray
    g_at: np.ndarray
    d_at: np.ndarray  # averages; empty without. In the schedule-free form x is z, and d are the parameters y
    v_at: np.ndarray  # averages of squares; empty in the identity metric
    start_at: np.ndarray  # see `sampling.Start`
    start_scale: np.ndarray
    coupling: np.ndarray  # lam of each block whose slope is g + lam x
    weights: np.ndarray  # old, new, old_v, new_v of each tensor, b and the share of a new point; one row per tensor
    eps: float
    least: float


@inlined(fastmath=REORDER)
def _couple(x, g, lam, slopes):
    """g + lam x of a run, and ||x||^2."""
    total = lam - lam
    for k in range(len(g)):
        slopes[k] = g[k] + lam * x[k]
        total += x[k] * x[k]
    return total


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def _new_point(x, p, r, s, psi):
    """y of an entry."""
    threshold, _, curvature, lower, upper, one, _ = psi
    shrink = one if curvature == 0 else one / (one + r * curvature)
    return prox(x - s * p, r * threshold, shrink, lower, upper)


@inlined(fastmath=False)
def _on_line(x, p, keep, move):
    """keep x + move p, without fused operations: all kinds of slopes round alike, also at the end of a tensor."""
    return keep * x + move * p


@inlined(fastmath=REORDER)
def _added(total, number):
    return total + number


@inlined(fastmath=ENTRYWISE)
def _write(x, g, d, v, y, own, line, curve, mix):
    """Store new averages, and move x: by the numbers of a prox if there are any, else of a line; then the next y.

    The average of the schedule-free form stays between the bounds of its prox, also in rounding. Returns <d', move> of
    a prox.
    """
    height = own[6] - own[6]
    for k in range(len(x)):
        slope, r = g[k], own[6]
        if d is not None:
            slope = new_slope(g[k], d[k], own)
            d[k] = slope
        if v is not None:
            square = new_square(g[k], v[k], own)
            v[k], r = square, inverse_metric(square, own)
        if curve is None:
            new = _on_line(x[k], r * slope, line[0], line[1])
        else:
            new = _new_point(x[k], r * slope, r, curve[0], curve[1])
            height = _added(height, slope * (new - x[k]))
        if y is not None:
            mean = averaged_point(y[k], x[k], mix[0])
            if curve is None:
                y[k] = gradient_point(mean, new, mix[0], mix[1])
            else:
                lower, upper = curve[1][3], curve[1][4]
                mean = min(max(mean, lower), upper)
                y[k] = min(max(gradient_point(mean, new, mix[0], mix[1]), lower), upper)
        x[k] = new
    return height


# The constants of these two are all that a kernel closes over: the cache on disk is keyed by them, and functions would
# have a new key in every process. Slopes are gradients, averages, averages in Adam's metric, or gradients at y.


def _reduce_kernel(average: bool, metric: bool, second: bool) -> Any:
    @compiled()
    def reduce(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, kinds, psi, caps, u, summing, partial, listed, listed_at, first, last,
    ):  # fmt: skip
        """Sums of each chunk if `summing`; h and its slope at u, per row of caps.

        The entries that change their branch between two points are listed, if there is memory for them.
        """
        of, steps = like.dtype.type, numba.carray(run_memory(like), len(u))
        fresh, places = numba.carray(run_memory(like), RUN), numba.carray(run_memory(np.uint32), RUN)
        inverse, marks = numba.carray(run_memory(like), RUN) if metric else None, run_memory(np.uint8)
        for i in range(first, last):
            j, low, n, b, out = tensor[i], origin[i], length[i], block[i], partial[i]
            x, g = entries(like, x_at, j, low, n), entries(like, g_at, j, low, n)
            d = entries(like, d_at, j, low, n) if average or second else g
            v = entries(like, v_at, j, low, n) if metric else g
            own, mix = typed_weights(like, weights, eps, least, j), of(weights[j, 4]) if second else None
            curved = kinds[b] != LINE
            out[:] = 0
            count, room = 0, entries(like, listed_at, 0, 3 * ROOM * i, 3 * ROOM) if len(listed_at) else x
            for at in range(0, n, RUN):
                end = at + RUN
                xs, gs, ys = x[at:end], g[at:end], d[at:end] if second else None
                old, squares = d[at:end] if average else None, v[at:end] if metric else None
                if summing and len(start_at):
                    out[MOVED_SQ] += moved_sq(like, start_at, j, xs, low + at, places, ys, mix)
                if not average and not second and coupling[b] != 0:
                    out[X_SQ] += _couple(xs, gs, of(coupling[b]), fresh)
                    gs = fresh[: len(xs)]
                if summing and not (curved and len(u)):  # nothing else is wanted
                    add_sums(xs, gs, old, squares, ys, own, None, None, curved, out)
                    continue
                if not second and summing and len(u) < 3:  # in one loop, which is faster
                    cap, typed = caps[0, b], typed_psi(like, psi, b, caps[0, b])
                    s, t = of(u[0] * cap), of(u[-1] * cap)
                    marked = numba.carray(marks, RUN)
                    add_sums_and_heights(xs, gs, old, squares, own, kinds[b], s, t, typed, cap, marked, out)
                    if len(listed_at):
                        count = list_marked(xs, gs, old, squares, own, marks, count, room)
                    continue
                if summing:
                    add_sums(xs, gs, old, squares, ys, own, fresh, inverse, curved, out)
                else:
                    new_averages(gs, old, squares, own, fresh, inverse)
                ds = fresh[: len(xs)] if average else gs
                if curved and len(u):
                    add_heights(like, xs, ds, inverse, kinds[b], psi, caps, b, u, steps, out[SUMS:])
            if len(start_at):
                out[MOVED_SQ] *= start_scale[j]
            if len(listed_at):
                listed[i] = count

    return reduce


def _write_kernel(average: bool, metric: bool, second: bool) -> Any:
    @compiled()
    def write(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, keep, move, psi, kinds, caps, u, heights, first, last,
    ):  # fmt: skip
        """Store new averages, and x <- keep x + move p, or y.

        For blocks that are not affine, `heights` gets <d', move> of each chunk.
        """
        of = like.dtype.type
        for i in range(first, last):
            j, low, n, b = tensor[i], origin[i], length[i], block[i]
            x, g = entries(like, x_at, j, low, n), entries(like, g_at, j, low, n)
            d = entries(like, d_at, j, low, n) if average else None
            v = entries(like, v_at, j, low, n) if metric else None
            y = entries(like, d_at, j, low, n) if second else None
            own = typed_weights(like, weights, eps, least, j)
            mix = (of(weights[j, 4]), of(weights[j, 5])) if second else None
            line, curve = (of(keep[b]), of(move[b])), (of(u * caps[b]), typed_psi(like, psi, b, caps[b]))
            if kinds[b] == LINE:
                _write(x, g, d, v, y, own, line, None, mix)
                continue
            height = 0.0
            for at in range(0, n, RUN):
                end = at + RUN
                ds, vs = d[at:end] if average else None, v[at:end] if metric else None
                ys = y[at:end] if second else None
                height += _write(x[at:end], g[at:end], ds, vs, ys, own, line, curve, mix)
            heights[i] = height

    return write


def _kernels(average: bool, metric: bool, second: bool = False) -> tuple[Any, Any]:
    """The two passes for one kind of slopes."""
    return _reduce_kernel(average, metric, second), _write_kernel(average, metric, second)


PLAIN, AVERAGED, ADAM, SECOND = (
    _kernels(False, False),
    _kernels(True, False),
    _kernels(True, True),
    _kernels(False, True, True),
)
