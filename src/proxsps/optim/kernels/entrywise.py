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
from proxsps.optim.kernels.heights import add_box, add_general, add_soft, general_change, typed_psi
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, RUN, pointer
from proxsps.optim.kernels.sampling import moved_sq
from proxsps.optim.kernels.scalar import prox

LINE, SOFT, BOX, GENERAL = range(4)  # affine; l1 alone; bounds alone; everything
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
def _lengths(x, d, r, zero, one):
    """||x||^2, ||p||^2, <p, x>."""
    xx, pp, px = zero, zero, zero
    for k in range(len(x)):
        p = (one if r is None else r[k]) * d[k]
        xx += x[k] * x[k]
        pp += p * p
        px += p * x[k]
    return xx, pp, px


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


def _kernels(average: bool, metric: bool, second: bool = False) -> tuple[Any, Any, Any]:
    """The three passes for slopes that are gradients, averages, averages in Adam's metric, or gradients at y in it.

    These three constants are all that the functions close over: the cache on disk is keyed by them, and functions would
    have a new key in every process.
    """

    @compiled()
    def reduce(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, kinds, psi, caps, u, summing, moving, partial, first, last,
    ):  # fmt: skip
        """The sums of each chunk if `summing`, the lengths of its move if `moving`, and h with its slope at points u.

        There is one set of heights for each row of caps.
        """
        of, points = like.dtype.type, len(u)
        zero, one, steps = of(0), of(1), np.empty(len(u), like.dtype)
        fresh, inverse = np.empty(RUN, like.dtype), np.empty(RUN, like.dtype) if metric else None
        for i in range(first, last):
            j, low, n, b = tensor[i], origin[i], length[i], block[i]
            x = numba.carray(pointer(x_at[j], like), low + n)[low:]
            g = numba.carray(pointer(g_at[j], like), low + n)[low:]
            d = numba.carray(pointer(d_at[j], like), low + n)[low:] if average or second else g
            v = numba.carray(pointer(v_at[j], like), low + n)[low:] if metric else g
            own, mix = typed_weights(like, weights, eps, least, j), typed_mix(like, weights, j)
            lam, out = of(coupling[b]), partial[i]
            out[:] = 0
            for at in range(0, n, RUN):
                end = at + RUN
                xs, gs = x[at:end], g[at:end]
                alone = metric and kinds[b] == LINE and not moving  # nothing but sums is wanted
                ds = gs
                if average and not alone:
                    ds = new_slopes(gs, d[at:end], own, fresh)
                elif not (average or second):
                    ds = _coupled_slopes(xs, gs, lam, fresh)
                if metric and not alone:
                    new_metric(gs, v[at:end], own, inverse)
                if summing:
                    if second and alone:
                        found = second_metric_sums(xs, gs, d[at:end], v[at:end], own)
                    elif second:
                        found = second_sums(xs, gs, d[at:end], inverse, one)
                    elif alone:
                        found = metric_sums(xs, gs, d[at:end], v[at:end], own)
                    else:
                        found = _sums(xs, gs if average else None, ds, inverse, zero, one)
                    out[D_SQ] += found[0]
                    out[D_DOT_X] += found[1]
                    out[G_DOT_X] += found[2]
                    out[G_SQ] += found[3]
                    if metric and not np.isfinite(found[4]) and overflows(gs):
                        out[D_SQ] = np.nan
                    if kinds[b] != LINE:
                        out[NOISE] += _noise(xs, ds, zero)
                    if len(start_at):
                        ys = d[at:end] if second else None
                        out[MOVED_SQ] += moved_sq(like, start_at, j, xs, low + at, ys, mix[0])
                if moving:
                    squares = _lengths(xs, ds, inverse, zero, one)
                    out[X_SQ] += squares[0]
                    out[P_SQ] += squares[1]
                    out[P_DOT_X] += squares[2]
                if kinds[b] != LINE and points:
                    for c in range(len(caps)):
                        place = SUMS + 2 * c * points
                        heights, bends = out[place : place + points], out[place + points : place + 2 * points]
                        typed = typed_psi(like, psi, b, caps[c, b])
                        for p in range(points):
                            steps[p] = of(caps[c, b] * u[p])
                        if kinds[b] == SOFT:
                            add_soft(xs, ds, inverse, steps, typed, heights, bends)
                        elif kinds[b] == BOX:
                            add_box(xs, ds, inverse, steps, typed, heights, bends)
                        else:
                            add_general(xs, ds, inverse, steps, typed, heights, bends)
            if len(start_at):
                out[MOVED_SQ] *= start_scale[j]

    @compiled()
    def move_sq(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, psi, caps, u, partial, first, last,
    ):  # fmt: skip
        """||y - x||^2 of each chunk."""
        of = like.dtype.type
        fresh, inverse = np.empty(RUN, like.dtype), np.empty(RUN, like.dtype) if metric else None
        for i in range(first, last):
            j, low, n, b = tensor[i], origin[i], length[i], block[i]
            x = numba.carray(pointer(x_at[j], like), low + n)[low:]
            g = numba.carray(pointer(g_at[j], like), low + n)[low:]
            d = numba.carray(pointer(d_at[j], like), low + n)[low:] if average or second else g
            v = numba.carray(pointer(v_at[j], like), low + n)[low:] if metric else g
            own, typed = typed_weights(like, weights, eps, least, j), typed_psi(like, psi, b, caps[b])
            partial[i, 0] = 0
            for at in range(0, n, RUN):
                end = at + RUN
                xs, gs = x[at:end], g[at:end]
                ds = new_slopes(gs, d[at:end], own, fresh) if average else gs
                if metric:
                    new_metric(gs, v[at:end], own, inverse)
                partial[i, 0] += _change_sq(xs, ds, inverse, of(u * caps[b]), typed)

    @compiled()
    def write(
        like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, start_scale, coupling, weights, eps,
        least, kinds, keep, move, psi, caps, u, relax, first, last,
    ):  # fmt: skip
        """Store new averages, and x <- keep x + move p, or x + relax (y - x) with y itself where relax is 1."""
        of = like.dtype.type
        one, inverse = of(1), np.empty(RUN, like.dtype) if metric else None
        fresh = np.empty(RUN, like.dtype) if second else None
        for i in range(first, last):
            j, low, n, b = tensor[i], origin[i], length[i], block[i]
            x = numba.carray(pointer(x_at[j], like), low + n)[low:]
            g = numba.carray(pointer(g_at[j], like), low + n)[low:]
            d = numba.carray(pointer(d_at[j], like), low + n)[low:] if average or second else g
            v = numba.carray(pointer(v_at[j], like), low + n)[low:] if metric else g
            own, typed = typed_weights(like, weights, eps, least, j), typed_psi(like, psi, b, caps[b])
            mix, share = typed_mix(like, weights, j)
            for at in range(0, n, RUN):
                xs, ds = x[at : at + RUN], d[at : at + RUN]
                if second:
                    gs, vs = g[at : at + RUN], v[at : at + RUN]
                    if kinds[b] == LINE:
                        write_second_in_metric(xs, gs, ds, vs, own, of(keep[b]), of(move[b]), mix, share)
                        continue
                    averaged_points(ds, xs, mix, fresh)
                    store_metric(gs, vs, own, inverse)
                    _write_prox(xs, gs, inverse, of(u * caps[b]), typed, of(relax))
                    gradient_points(fresh[: len(xs)], xs, mix, share, typed[3], typed[4], ds)
                    continue
                if metric and kinds[b] == LINE:
                    write_in_metric(xs, g[at : at + RUN], ds, v[at : at + RUN], own, of(keep[b]), of(move[b]))
                    continue
                if metric:
                    store_metric(g[at : at + RUN], v[at : at + RUN], own, inverse)
                if average:
                    store_slopes(g[at : at + RUN], ds, own)
                if kinds[b] == LINE:
                    _write_line(xs, ds, inverse, of(keep[b]), of(move[b]), one)
                else:
                    _write_prox(xs, ds, inverse, of(u * caps[b]), typed, of(relax))

    return reduce, move_sq, write


PLAIN, AVERAGED, ADAM, SECOND = (
    _kernels(False, False),
    _kernels(True, False),
    _kernels(True, True),
    _kernels(False, True, True),
)
