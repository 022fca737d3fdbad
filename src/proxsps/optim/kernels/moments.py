"""Two passes for affine blocks whose slope is an average of gradients, in the identity metric or in Adam's.

The new averages are not kept between the passes, because a skipped step must leave the state as it was. Both
passes compute them entry by entry from the state and the gradient:

    d' = old d + new g,    v' = old_v v + new_v g^2,    D = max{sqrt(v') + eps, least}.

The first pass only reads and adds up; the second one stores d' and v', and writes x <- keep x + move D^-1 d'. A sample
of the entries is compared with their values at the start of the run while a chunk is in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from proxsps.optim.kernels.caching import compiled
from proxsps.optim.kernels.layout import (
    ENTRYWISE,
    REORDER,
    RUN,
    Layout,
    addresses,
    contiguous_addresses,
    layout,
    pointer,
    run,
    turns,
)
from proxsps.optim.kernels.sampling import NO_START, Start, moved_sq, sample_end

NOWHERE, NO_WEIGHTS = np.empty(0, np.int64), np.empty((4, 0))


class Sums(NamedTuple):
    """What the first pass computes, one number per block; r = D^-1 d' is the direction of the step."""

    d_sq: np.ndarray  # <d', r>
    d_dot_x: np.ndarray  # <d', x>
    x_sq: np.ndarray  # ||x||^2
    g_dot_x: np.ndarray  # <g, x>
    g_sq: np.ndarray  # ||D^-1 g||^2
    step_sq: np.ndarray  # ||r||^2
    step_dot_x: np.ndarray  # <r, x>
    moved_sq: np.ndarray  # ||x - x_0||^2, estimated from the sample; 0 without a start


class Averages(NamedTuple):
    """Where parameters, gradients and their averages lie, with the weights of this step; valid while tensors live."""

    like: np.ndarray
    layout: Layout
    x_at: np.ndarray
    g_at: np.ndarray
    d_at: np.ndarray
    v_at: np.ndarray  # empty in the identity metric
    start: Start
    weights: np.ndarray  # old, new, old_v, new_v as rows, one column per tensor
    eps: float
    least: float
    turns: Iterator[bool]  # whether the next pass goes backwards


@numba.njit(fastmath=ENTRYWISE)
def averaged(old, average, new, g):
    """The new d of an entry."""
    return old * average + new * g


@numba.njit(fastmath=ENTRYWISE)
def averaged_square(old, average, new, g):
    """The new v of an entry."""
    return old * average + (new * g) * g  # in this order a weight of 0 wins over a square that overflows


@numba.njit(fastmath=ENTRYWISE)
def metric(square, eps, least):
    """D of an entry."""
    return max(np.sqrt(square) + eps, least)


@numba.njit(fastmath=ENTRYWISE)
def new_slopes(g, d, old, new, out):
    """The new d of some entries, in memory for at least this many."""
    for k in range(len(g)):
        out[k] = averaged(old, d[k], new, g[k])
    return out[: len(g)]


@numba.njit(fastmath=ENTRYWISE)
def store_slopes(g, d, old, new):
    """d <- the new d."""
    for k in range(len(g)):
        d[k] = averaged(old, d[k], new, g[k])


@numba.njit
def overflows(g):
    """Whether the square of an entry leaves the range of its type: v may too, and infinity does not show in sums."""
    return not np.isfinite(g * g).all()


@numba.njit(fastmath=REORDER)
def _add_average(x, g, d, old, new):
    """The sums of a run in the identity metric."""
    dd, dx, xx, gx, gg = old - old, old - old, old - old, old - old, old - old
    for k in range(len(x)):
        slope = averaged(old, d[k], new, g[k])
        dd += slope * slope
        dx += slope * x[k]
        xx += x[k] * x[k]
        gx += g[k] * x[k]
        gg += g[k] * g[k]
    return dd, dx, xx, gx, gg


@numba.njit(fastmath=REORDER, error_model="numpy")
def _add_adam(x, g, d, v, old, new, old_v, new_v, eps, least, one):
    """The sums of a run in Adam's metric, and ||g||^2."""
    zero = one - one
    size = zero
    dr, dx, xx, gx, gg, rr, rx = zero, zero, zero, zero, zero, zero, zero
    for k in range(len(x)):
        slope = averaged(old, d[k], new, g[k])
        inverse = one / metric(averaged_square(old_v, v[k], new_v, g[k]), eps, least)
        direction, scaled = slope * inverse, g[k] * inverse
        dr += slope * direction
        dx += slope * x[k]
        xx += x[k] * x[k]
        gx += g[k] * x[k]
        gg += scaled * scaled
        rr += direction * direction
        rx += direction * x[k]
        size += g[k] * g[k]
    return dr, dx, xx, gx, gg, rr, rx, size


@compiled()
def _sum_average(
    like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, weights, eps, least, partial, first, last
):
    """The sums of each chunk in the identity metric; direction and slope have the same sums."""
    of = like.dtype.type
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        x = numba.carray(pointer(x_at[j], like), low + n)[low:]
        g = numba.carray(pointer(g_at[j], like), low + n)[low:]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        old, new, out = of(weights[0, j]), of(weights[1, j]), partial[i]
        start = numba.carray(pointer(start_at[j], like), sample_end(low + n)) if len(start_at) else x
        out[:] = 0
        for at in range(0, n, RUN):
            sums = _add_average(x[at : at + RUN], g[at : at + RUN], d[at : at + RUN], old, new)
            for row in range(5):
                out[row] += sums[row]
            if len(start_at):
                out[7] += moved_sq(x[at : at + RUN], start, low + at)
        out[5], out[6] = out[0], out[1]


@compiled()
def _sum_adam(
    like, block, tensor, origin, length, x_at, g_at, d_at, v_at, start_at, weights, eps, least, partial, first, last
):
    """The sums of each chunk in Adam's metric."""
    of = like.dtype.type
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        x = numba.carray(pointer(x_at[j], like), low + n)[low:]
        g = numba.carray(pointer(g_at[j], like), low + n)[low:]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        v = numba.carray(pointer(v_at[j], like), low + n)[low:]
        old, new, old_v, new_v = of(weights[0, j]), of(weights[1, j]), of(weights[2, j]), of(weights[3, j])
        start = numba.carray(pointer(start_at[j], like), sample_end(low + n)) if len(start_at) else x
        out = partial[i]
        out[:] = 0
        for at in range(0, n, RUN):
            end = at + RUN
            sums = _add_adam(
                x[at:end], g[at:end], d[at:end], v[at:end], old, new, old_v, new_v, of(eps), of(least), of(1)
            )
            for row in range(7):
                out[row] += sums[row]
            if not np.isfinite(sums[7]) and overflows(g[at:end]):
                out[0] = np.nan
            if len(start_at):
                out[7] += moved_sq(x[at:end], start, low + at)


@compiled(fastmath=ENTRYWISE)
def _write_average(
    like, block, tensor, origin, length, x_at, g_at, d_at, v_at, weights, eps, least, keep, move, first, last
):
    """d <- d', x <- keep x + move d' in each chunk."""
    of = like.dtype.type
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        x = numba.carray(pointer(x_at[j], like), low + n)[low:]
        g = numba.carray(pointer(g_at[j], like), low + n)[low:]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        old, new = of(weights[0, j]), of(weights[1, j])
        a, b = of(keep[block[i]]), of(move[block[i]])
        for k in range(n):
            slope = averaged(old, d[k], new, g[k])
            d[k] = slope
            x[k] = a * x[k] + b * slope


@compiled(fastmath=ENTRYWISE, error_model="numpy")
def _write_adam(
    like, block, tensor, origin, length, x_at, g_at, d_at, v_at, weights, eps, least, keep, move, first, last
):
    """d <- d', v <- v', x <- keep x + move D^-1 d' in each chunk."""
    of = like.dtype.type
    for i in range(first, last):
        j, low, n = tensor[i], origin[i], length[i]
        x = numba.carray(pointer(x_at[j], like), low + n)[low:]
        g = numba.carray(pointer(g_at[j], like), low + n)[low:]
        d = numba.carray(pointer(d_at[j], like), low + n)[low:]
        v = numba.carray(pointer(v_at[j], like), low + n)[low:]
        old, new, old_v, new_v = of(weights[0, j]), of(weights[1, j]), of(weights[2, j]), of(weights[3, j])
        a, b, added, floor = of(keep[block[i]]), of(move[block[i]]), of(eps), of(least)
        for k in range(n):
            slope = averaged(old, d[k], new, g[k])
            square = averaged_square(old_v, v[k], new_v, g[k])
            d[k], v[k] = slope, square
            x[k] = a * x[k] + b * (slope / metric(square, added, floor))


def averages(
    params: Sequence[Sequence[Tensor]],
    grads: Sequence[Sequence[Tensor]],
    first: Sequence[Sequence[Tensor]],
    second: Sequence[Sequence[Tensor]] | None,
    weights: np.ndarray,
    eps: float = 0.0,
    least: float = 0.0,
) -> Averages | None:
    """The memory of a step with averages, or None if the kernels do not apply.

    They need tensors without gaps, all of one tensor in the same order, all f32 or all f64, whose memory is their own.
    A start (`start_of`) is not included: if there is one, put it in place of `NO_START`.

    Args:
        params: one list per block.
        grads: in the same form.
        first: d, in the same form.
        second: v, in the same form, or None for the identity metric.
        weights: old, new and, with `second`, old_v, new_v as rows, one column per tensor.
        eps: added to the root of v.
        least: a lower bound for D; entries that never had a gradient need it if eps is 0.
    """
    xs, gs, *states = [list(itertools.chain(*ts)) for ts in (params, grads, first, second) if ts is not None]
    sizes = tuple([tuple(map(Tensor.numel, block)) for block in params])
    found = _state_addresses(xs, gs, states, tuple(itertools.chain(*sizes)))
    if found is None:
        return None
    like, x_at, g_at, d_at, v_at = found
    whole = layout(sizes, torch.get_num_threads())
    places = (x_at, g_at, d_at, v_at, NO_START)
    return Averages(like, whole, *places, weights, float(eps), float(least), turns())


def _state_addresses(
    xs: list[Tensor], gs: list[Tensor], states: list[list[Tensor]], sizes: tuple[int, ...]
) -> tuple[np.ndarray, ...] | None:
    """An array of the type of the tensors, and the addresses of x, g, d and v."""
    known = [one for one in map(contiguous_addresses, states) if one is not None]
    if len(known) == len(states) and all(map(Tensor.is_contiguous, xs)):
        at = addresses(xs, gs)
        if at is None or any([one.like is not at.like or one.sizes != sizes for one in known]):
            return None
        return (at.like, *at.at, *[one.at for one in known], NOWHERE)[:5]
    at = addresses(xs, gs, *states)
    if at is None or any([tuple(map(Tensor.numel, state)) != sizes for state in states]):
        return None
    return (at.like, *at.at, NOWHERE)[:5]


def sums(at: Averages) -> Sums:
    """The sums of a step; nothing is written."""
    chunks, adam = at.layout.chunks, len(at.v_at) > 0
    partial = np.empty((len(chunks.sizes), len(Sums._fields)))
    args = (at.x_at, at.g_at, at.d_at, at.v_at, at.start.at, at.weights, at.eps, at.least, partial)
    kernel, weight = (_sum_adam, 3.0) if adam else (_sum_average, 1.5)
    run(kernel, chunks, at.like, *chunks.columns, *args, weight=weight, backwards=next(at.turns))
    columns, tensor = partial.T, chunks.columns[1]
    if len(at.start.at):
        columns[7] *= at.start.scale[tensor]
    return Sums(*at.layout.per_block(columns))


def write(at: Averages, keep: np.ndarray, move: np.ndarray) -> None:
    """Store the new averages, and x <- keep x + move D^-1 d', with one number keep and one number move per block."""
    chunks, adam = at.layout.chunks, len(at.v_at) > 0
    args = (at.x_at, at.g_at, at.d_at, at.v_at, at.weights, at.eps, at.least, keep, move)
    kernel, weight = (_write_adam, 3.0) if adam else (_write_average, 1.5)
    run(kernel, chunks, at.like, *chunks.columns, *args, weight=weight, backwards=next(at.turns))


__all__ = ["Averages", "Sums", "averages", "sums", "write"]
