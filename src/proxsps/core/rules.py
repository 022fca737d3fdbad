"""How a method chooses its step: from a model of the loss, and a small memory, to the dual variable u.

Every front end builds a `Model` and calls one of these functions. They differ only in what they compare with the cap:
the truncated model's own root (ProxSPS), that of SPS_max with its constant c, that of DecSPS with its memory, or
nothing (proximal SGD).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace
from proxsps.core.dual import Found, unclipped_root
from proxsps.core.step import Line, line_dual


class Model(NamedTuple):
    """The linear model of a step. Blocks are on the last axis, runs on the leading ones."""

    gap: Array  # m - C, shape (...)
    d_sq: Array  # ||d_j||^2, shape (..., blocks)
    alpha: Array  # caps, shape (..., blocks)
    line: Line  # height above C along the ray, of the blocks whose prox is affine
    find: Callable[[Line], Found] | None = None  # the search, if some prox is not affine
    top: Callable[[Line], Array] | None = None  # h(1), if some prox is not affine


class Decision(NamedTuple):
    """The step that a rule chose, shape (...)."""

    root: Array  # where the linear model reaches C: below 0 the model is truncated at once, above 1 never
    u: Array
    height: Array  # of the linear model above C at the new point
    evaluations: Array | float = 0.0


class StepMemory(NamedTuple):
    """The memory of DecSPS."""

    taken: Array  # steps so far, without those that were skipped; shape (...)
    previous: Array  # c_{k-1} tau_j of the step before, infinity at the first; shape (..., blocks)


def truncated(model: Model) -> Decision:
    """ProxSPS: the minimiser of max{linear model, C} plus regulariser plus proximity (Lemmas on the update)."""
    if model.find is None:
        dual = line_dual(model.line)
        return Decision(*dual, model.line.start - model.line.fall * dual.u)
    found = model.find(model.line)
    return Decision(unclipped_root(found), found.u, found.h, found.evaluations)


def linear(model: Model) -> Decision:
    """Proximal SGD: nothing is truncated, and the step is the cap."""
    one = array_namespace(model.gap).ones_like(model.gap)
    height = model.line.start - model.line.fall if model.top is None else model.top(model.line)
    return Decision(one, one, height)


def sps_max(model: Model, c: Array | float = 1.0) -> Decision:
    """SPS (Algorithm 1, c = 1) and SPS_max; with one block alpha u = min{alpha, gap / (c ||d||^2)}."""
    fall = _fall(model)
    dual = line_dual(Line(model.gap, c * fall))
    return Decision(*dual, model.gap - dual.u * fall)


def dec_sps(model: Model, memory: StepMemory, ok: Array, c0: Array | float = 1.0) -> tuple[Decision, StepMemory]:
    """DecSPS, whose step c_k gamma_k never grows, c_k = c_0 sqrt(k + 1) (Orvieto, Lacoste-Julien and Loizou, 2022).

    With one block alpha u = min{gap / (c_k ||d||^2), c_{k-1} gamma_{k-1} / c_k, alpha}: the published rule, where alpha
    is the bound gamma_b of its first step and, if it is lowered later, of all others. If not `ok`, the step will be
    skipped, and the memory stays as it was.
    """
    xp = array_namespace(model.d_sq)
    alpha, fall = model.alpha, _fall(model)
    c = c0 * xp.sqrt(memory.taken + 1)
    dual = line_dual(Line(model.gap, c * fall))
    resting = alpha <= 0  # this block does not move, for any u
    limit = xp.where(resting, xp.full_like(alpha, math.inf), memory.previous / xp.where(resting, 1.0, alpha))
    u = xp.where(fall > 0, dual.u, xp.ones_like(dual.u))  # where d = 0, nothing limits the step
    u = xp.minimum(u, xp.min(limit, axis=-1) / c)
    previous = xp.where(ok[..., None] & ~resting, (c * u)[..., None] * alpha, memory.previous)
    taken = xp.where(ok, memory.taken + 1, memory.taken)
    return Decision(dual.root, u, model.gap - u * fall), StepMemory(taken, previous)


def start_memory(alpha: Array) -> StepMemory:
    """The memory of DecSPS before its first step, for caps of shape (..., blocks)."""
    xp = array_namespace(alpha)
    return StepMemory(xp.zeros_like(alpha[..., 0]), xp.full_like(alpha, math.inf))


def _fall(model: Model) -> Array:
    """How far the linear model falls from u = 0 to u = 1 along the slope itself."""
    return array_namespace(model.d_sq).sum(model.alpha * model.d_sq, axis=-1)
