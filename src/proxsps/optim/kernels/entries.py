"""Passes for blocks whose prox acts on each entry by itself: h and its slope at several u, and one write.

With z = x - s d, s = u alpha, the new point is y = prox(z) entry by entry, and h = <d, y - x>. Entries where the prox
moves with z are called inside. There y - x is computed without y, which may agree with x in all but a few digits:

    (1 + alpha l2) (x - y) = s d + clip(z, -alpha l1, alpha l1) + alpha l2 x      inside,
    x - y with y exactly 0, lower or upper                                        elsewhere.

In Adam's metric each entry has its own alpha (`proxsps.optim.kernels.metric`). A slope that is an average of gradients
is updated in the same pass.

Sums are taken in the type of the entries over a run of them, then in doubles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from proxsps.optim.kernels.entry_loops import BOX, FURTHER, GENERAL, SOFT, move_sq_plain, reduce_plain, write_plain
from proxsps.optim.kernels.layout import Memory, run, sampled
from proxsps.optim.kernels.metric import move_sq_metric, reduce_metric, write_metric
from proxsps.optim.kernels.moments import NO_WEIGHTS, NOWHERE, Averages
from proxsps.optim.kernels.sampling import NO_START
from proxsps.optim.kernels.scalar import Psi


class Further(NamedTuple):
    """Sums that the first pass of a step with averages computes besides those of `reduce`, one number per block."""

    d_dot_x: np.ndarray  # <d, x>, bitwise <g, x> where d = g
    g_dot_x: np.ndarray
    g_sq: np.ndarray  # ||D^-1 g||^2
    moved_sq: np.ndarray  # ||x - x_0||^2, estimated from the sample; 0 without a start


def _constants(psi: Psi, alpha: np.ndarray) -> np.ndarray:
    """Rows, one column per block: threshold, edge, curvature, 1 + curvature and its inverse, lower, upper.

    Entries with |z| above the edge move with z: all of them where there is no threshold.
    """
    threshold, curvature = alpha * psi.l1, alpha * psi.l2
    edge = np.where(psi.l1 > 0, threshold, -1.0)
    return np.array([threshold, edge, curvature, 1 + curvature, 1 / (1 + curvature), psi.lower, psi.upper])


def _kinds(psi: Psi, in_metric: bool = False) -> np.ndarray:
    free = (psi.lower == -np.inf) & (psi.upper == np.inf)
    soft = (psi.l1 > 0) & free & (psi.l2 == 0 if in_metric else True)
    unpenalised = (psi.l1 == 0) & (psi.l2 == 0)
    return np.where(unpenalised, BOX, np.where(soft, SOFT, GENERAL))


def _in_metric(at: Memory | Averages) -> bool:
    return isinstance(at, Averages) and len(at.v_at) > 0


def reduce(at: Memory | Averages, psi: Psi, alpha: np.ndarray, u: np.ndarray, every: int = 1) -> np.ndarray:
    """The sums of a search at P values of u, from one pass over memory: [3 + 2 P, blocks].

    Rows: ||d||^2; <d, x>; the sum of (d x)^2, whose root times eps is the rounding noise of h; P rows
    h(u) = <d, y(u) - x>; P rows dh/du = -alpha sum of d^2 prox'(z). In Adam's metric d^2 is d D^-1 d.

    Args:
        at: the memory of parameters and slopes, or of parameters, gradients and averages.
        psi: one set of constants per block.
        alpha: one number per block.
        u: the P dual variables.
        every: above 1 only a sample of about one entry in `every` is read, and the sums are scaled up to estimates of
            those of whole blocks. Tensors of the same sizes give the same sample.
    """
    sums, _ = _pass(at, psi, alpha[None], u, every)
    first: np.ndarray = sums[0]
    return first


def first_reduce(
    at: Averages, psi: Psi, alpha: np.ndarray, u: np.ndarray, every: int = 1
) -> tuple[np.ndarray, Further]:
    """The sums of `reduce`, and those that only a step with averages needs; a sample has no distances."""
    sums, further = _pass(at if every == 1 else at._replace(start=NO_START), psi, alpha[None], u, every, further=True)
    return sums[0], Further(*further)


def ray(at: Memory | Averages, psi: Psi, alphas: np.ndarray, every: int = 1) -> np.ndarray:
    """h(1) for several caps of each block, (points, blocks), from one pass over memory."""
    return _pass(at, psi, alphas, np.ones(1), every)[0][:, 3]


def _pass(
    at: Memory | Averages, psi: Psi, alphas: np.ndarray, u: np.ndarray, every: int = 1, further: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of `reduce` for several sets of caps, (sets, rows, blocks), and those of `Further`."""
    if not len(u):
        raise ValueError("u must have at least one point.")
    layout, scale = (at.layout, 1.0) if every == 1 else sampled(at.layout, every)
    chunks, sets, points = layout.chunks, len(alphas), len(u)
    constants = np.array([_constants(psi, alpha) for alpha in alphas])
    steps = np.multiply.outer(alphas, u)
    width = sets * (3 + 2 * points)
    partial = np.empty((len(chunks.sizes), width + FURTHER))
    in_metric = _in_metric(at)
    args = (*_sources(at), _kinds(psi, in_metric), constants, steps.astype(at.like.dtype), partial, further)
    kernel, weight = (reduce_metric, 3.0) if in_metric else (reduce_plain, 1.0)
    backwards = every == 1 and next(at.turns)
    run(kernel, chunks, at.like, *chunks.columns, *args, weight=weight + sets * points, backwards=backwards)
    columns = partial.T * scale
    if further and isinstance(at, Averages):
        columns[width:] = _counted(at, columns[width:])
    found = layout.per_block(columns)
    out = found[:width].reshape(sets, -1, layout.count)
    out[:, 3:] /= -1.0 if in_metric else -constants[:, 3:4]
    out[:, 3 + points :] *= alphas[:, None]
    return out, found[width:]


def _counted(at: Averages, columns: np.ndarray) -> np.ndarray:
    """The further sums of chunks: nothing for missing gradients, and the sample scaled up."""
    tensor = at.layout.chunks.columns[1]
    columns[1:3, ~at.seen[tensor]] = 0
    if len(at.start.at):
        columns[3] *= at.start.scale[tensor]
    return columns


def _sources(at: Memory | Averages) -> tuple[Any, ...]:
    """What the kernels read entries from."""
    if isinstance(at, Averages):
        return at.x_at, at.d_at, at.g_at, at.v_at, at.start.at, at.weights, at.eps, at.least
    return at.x_at, at.d_at, NOWHERE, NOWHERE, NO_START.at, NO_WEIGHTS, 0.0, 0.0


def move_sq(at: Memory | Averages, psi: Psi, alpha: np.ndarray, u: float) -> np.ndarray:
    """||y(u) - x||^2 of each block."""
    chunks, constants = at.layout.chunks, _constants(psi, alpha)
    partial, in_metric = np.empty((1, len(chunks.sizes))), _in_metric(at)
    args = (*_sources(at), constants, u * alpha, partial)
    kernel = move_sq_metric if in_metric else move_sq_plain
    run(kernel, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
    found: np.ndarray = at.layout.per_block(partial)[0] / (1.0 if in_metric else constants[3] ** 2)
    return found


def write(at: Memory | Averages, psi: Psi, alpha: np.ndarray, u: float, relax: float = 1.0) -> None:
    """x <- x + relax (y(u) - x); where relax is 1 exactly y(u), with exact zeros and bounds. Stores new averages."""
    chunks, constants = at.layout.chunks, _constants(psi, alpha)
    args = (*_sources(at), constants, u * alpha, float(relax))
    kernel = write_metric if _in_metric(at) else write_plain
    run(kernel, chunks, at.like, *chunks.columns, *args, weight=2.0, backwards=next(at.turns))
