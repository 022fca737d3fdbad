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

One template makes the kernels of the three kinds of slopes. Sums are taken in the type of the entries over a run of
them, then in doubles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from proxsps.optim.kernels.averages import (
    averaged_points,
    gradient_points,
    metric_sums,
    new_metric,
    new_slopes,
    overflows,
    second_metric_sums,
    second_sums,
    store_metric,
    store_slopes,
    typed_mix,
    typed_weights,
    write_in_metric,
    write_second_in_metric,
)
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.heights import LINE, add_heights, general_change, typed_psi
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, entries, run_memory
from proxsps.optim.kernels.sampling import moved_sq
from proxsps.optim.kernels.scalar import prox

# The sums of a first pass, in the order of its columns. Heights follow, then their slopes.
D_SQ, D_DOT_X, NOISE, X_SQ, G_DOT_X, G_SQ, P_SQ, P_DOT_X, MOVED_SQ = range(9)
SUMS = 9
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


@inlined(fastmath=ENTRYWISE)
def _coupled_slopes(x, g, lam, fresh):
    """g + lam x of a run."""
    if lam != 0:
        for k in range(len(g)):
            fresh[k] = g[k] + lam * x[k]
        return fresh[: len(g)]
    return g


@inlined(fastmath=REORDER)
def _sums(x, g, d, r, zero, one):
    """<d, p>, <d, x>, and for averages <g, x>, ||r g||^2 and in a metric ||g||^2."""
    dp, dx, gx, gg, size = zero, zero, zero, zero, zero
    for k in range(len(x)):
        dp += d[k] * ((one if r is None else r[k]) * d[k])
        dx += d[k] * x[k]
        if g is not None:
            scaled = (one if r is None else r[k]) * g[k]
            gx += g[k] * x[k]
            gg += scaled * scaled
            if r is not None:
                size += g[k] * g[k]
    return dp, dx, gx, gg, size


@inlined(fastmath=REORDER)
def _noise(x, d, zero):
    total = zero
    for k in range(len(x)):
        product = d[k] * x[k]
        total += product * product
    return total


@inlined(fastmath=REORDER)
def _add_lengths(x, d, r, zero, one, out):
    """Add ||x||^2, ||p||^2 and <p, x> of a run."""
    xx, pp, px = zero, zero, zero
    for k in range(len(x)):
        p = (one if r is None else r[k]) * d[k]
        xx += x[k] * x[k]
        pp += p * p
        px += p * x[k]
    out[X_SQ] += xx
    out[P_SQ] += pp
    out[P_DOT_X] += px


@inlined(fastmath=REORDER)
def _change_sq(x, d, r, s, psi):
    total = psi[-1]
    for k in range(len(x)):
        change, _ = general_change(x[k], d[k], psi[-2] if r is None else r[k], s, psi)
        total += change * change
    return total


@inlined(fastmath=ENTRYWISE)
def _write_line(x, d, r, keep, move, one):
    for k in range(len(x)):
        x[k] = keep * x[k] + move * ((one if r is None else r[k]) * d[k])


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def _write_prox(x, d, r, s, psi, relax):
    threshold, _, curvature, lower, upper, one, _ = psi
    for k in range(len(x)):
        scale = one if r is None else r[k]
        shrink = one if curvature == 0 else one / (one + scale * curvature)
        y = prox(x[k] - s * (scale * d[k]), scale * threshold, shrink, lower, upper)
        x[k] = y if relax == one else x[k] + relax * (y - x[k])


@inlined()
def _add_sums(found, noise, g, metric, out):
    """Add the sums of a run; NaN if the square of a gradient overflows in a metric."""
    out[D_SQ] += found[0]
    out[D_DOT_X] += found[1]
    out[G_DOT_X] += found[2]
    out[G_SQ] += found[3]
    out[NOISE] += noise
    if metric and not np.isfinite(found[4]) and overflows(g):
        out[D_SQ] = np.nan


# The constants of these three are all that a kernel closes over: the cache on disk is keyed by them, and functions
# would have a new key in every process. Slopes are gradients, averages, averages in Adam's metric, or gradients at y.


def _reduce_kernel(average: bool, metric: bool, second: bool) -> Any:
    @compiled()
    def reduce(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, kinds, psi, caps, u, summing, moving, partial, first, last,
    ):  # fmt: skip
        """Sums of each chunk if `summing`, lengths of its move if `moving`; h and its slope at u, per row of caps."""
        zero, one, steps = like.dtype.type(0), like.dtype.type(1), numba.carray(run_memory(like), len(u))
        fresh, places = numba.carray(run_memory(like), RUN), numba.carray(run_memory(np.uint32), RUN)
        inverse = numba.carray(run_memory(like), RUN) if metric else None
        for i in range(first, last):
            j, low, n, b, out = tensor[i], origin[i], length[i], block[i], partial[i]
            x, g = entries(like, x_at, j, low, n), entries(like, g_at, j, low, n)
            d = entries(like, d_at, j, low, n) if average or second else g
            v = entries(like, v_at, j, low, n) if metric else g
            own, mix = typed_weights(like, weights, eps, least, j), typed_mix(like, weights, j)
            curved = kinds[b] != LINE
            out[:] = 0
            for at in range(0, n, RUN):
                end = at + RUN
                xs, gs, ds, vs = x[at:end], g[at:end], d[at:end], v[at:end]
                if summing and len(start_at):
                    out[MOVED_SQ] += moved_sq(like, start_at, j, xs, low + at, places, ds if second else None, mix[0])
                if metric and not moving and not (curved and len(u)):  # nothing but sums is wanted
                    found = second_metric_sums(xs, gs, ds, vs, own) if second else metric_sums(xs, gs, ds, vs, own)
                    _add_sums(found, found[5] if curved else zero, gs, metric, out)
                    continue
                ys, ds = ds, gs if second else ds
                if average:
                    ds = new_slopes(gs, ds, own, fresh)
                elif not second:
                    ds = _coupled_slopes(xs, gs, like.dtype.type(coupling[b]), fresh)
                if metric:
                    new_metric(gs, vs, own, inverse)
                if summing:
                    if second:
                        found = second_sums(xs, gs, ys, inverse, one)
                    else:
                        found = _sums(xs, gs if average else None, ds, inverse, zero, one)
                    _add_sums(found, _noise(xs, ds, zero) if curved else zero, gs, metric, out)
                if moving:
                    _add_lengths(xs, ds, inverse, zero, one, out)
                if curved and len(u):
                    add_heights(like, xs, ds, inverse, kinds[b], psi, caps, b, u, steps, out[SUMS:])
            if len(start_at):
                out[MOVED_SQ] *= start_scale[j]

    return reduce


def _move_kernel(average: bool, metric: bool, second: bool) -> Any:
    @compiled()
    def move_sq(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, psi, caps, u, partial, first, last,
    ):  # fmt: skip
        """||y - x||^2 of each chunk."""
        fresh = numba.carray(run_memory(like), RUN)
        inverse = numba.carray(run_memory(like), RUN) if metric else None
        for i in range(first, last):
            j, low, n, b = tensor[i], origin[i], length[i], block[i]
            x, g = entries(like, x_at, j, low, n), entries(like, g_at, j, low, n)
            d = entries(like, d_at, j, low, n) if average else g
            v = entries(like, v_at, j, low, n) if metric else g
            own, typed = typed_weights(like, weights, eps, least, j), typed_psi(like, psi, b, caps[b])
            partial[i, 0] = 0
            for at in range(0, n, RUN):
                end = at + RUN
                xs, gs = x[at:end], g[at:end]
                ds = new_slopes(gs, d[at:end], own, fresh) if average else gs
                if metric:
                    new_metric(gs, v[at:end], own, inverse)
                partial[i, 0] += _change_sq(xs, ds, inverse, like.dtype.type(u * caps[b]), typed)

    return move_sq


def _write_kernel(average: bool, metric: bool, second: bool) -> Any:
    @compiled()
    def write(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, kinds, keep, move, psi, caps, u, relax, first, last,
    ):  # fmt: skip
        """Store new averages, and x <- keep x + move p, or x + relax (y - x) with y itself where relax is 1."""
        of, fresh = like.dtype.type, numba.carray(run_memory(like), RUN)
        inverse = numba.carray(run_memory(like), RUN) if metric else None
        for i in range(first, last):
            j, low, n, b = tensor[i], origin[i], length[i], block[i]
            x, g = entries(like, x_at, j, low, n), entries(like, g_at, j, low, n)
            d = entries(like, d_at, j, low, n) if average or second else g
            v = entries(like, v_at, j, low, n) if metric else g
            own, typed = typed_weights(like, weights, eps, least, j), typed_psi(like, psi, b, caps[b])
            mix, share = typed_mix(like, weights, j)
            kept, moved, size = of(keep[b]), of(move[b]), of(u * caps[b])
            for at in range(0, n, RUN):
                end = at + RUN
                xs, gs, ds, vs = x[at:end], g[at:end], d[at:end], v[at:end]
                if second and kinds[b] == LINE:
                    write_second_in_metric(xs, gs, ds, vs, own, kept, moved, mix, share)
                elif second:
                    averaged_points(ds, xs, mix, fresh)
                    store_metric(gs, vs, own, inverse)
                    _write_prox(xs, gs, inverse, size, typed, of(relax))
                    gradient_points(fresh[: len(xs)], xs, mix, share, typed[3], typed[4], ds)
                elif metric and kinds[b] == LINE:
                    write_in_metric(xs, gs, ds, vs, own, kept, moved)
                else:
                    if metric:
                        store_metric(gs, vs, own, inverse)
                    if average:
                        store_slopes(gs, ds, own)
                    if kinds[b] == LINE:
                        _write_line(xs, ds, inverse, kept, moved, of(1))
                    else:
                        _write_prox(xs, ds, inverse, size, typed, of(relax))

    return write


def _kernels(average: bool, metric: bool, second: bool = False) -> tuple[Any, Any, Any]:
    """The three passes for one kind of slopes."""
    kind = average, metric, second
    return _reduce_kernel(*kind), _move_kernel(*kind), _write_kernel(*kind)


PLAIN, AVERAGED, ADAM, SECOND = (
    _kernels(False, False),
    _kernels(True, False),
    _kernels(True, True),
    _kernels(False, True, True),
)
