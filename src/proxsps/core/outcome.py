"""What a step did: the numbers of its solution, and the report that front ends make from them."""

from __future__ import annotations

import math
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace

CAPS = {-1: "skipped", 0: "polyak", 1: "lr", 2: "distance"}
BRANCHES = {-1: "skipped", 0: "truncated", 1: "inside", 2: "capped"}


class Solution(NamedTuple):
    """A step that was solved and written."""

    ok: Array  # whether loss and gradients allowed a step
    gap: Array
    root: Array
    u: Array
    model_gap: Array
    evaluations: Array | float = 0.0
    relaxation: Array | float = 1.0
    distance: Array | float = math.nan  # the distance cap, if there is one
    longest: Array | float = math.nan  # the cap of the block with the largest step size, before a factor on the step

    @classmethod
    def skipped(cls, gap: Array) -> Solution:
        """No step."""
        return cls(False, gap, math.nan, math.nan, math.nan)


class Report(NamedTuple):
    """What a step did; fields have shape (...), or (..., blocks) if they have one entry per block."""

    tau: Array  # step along the gradient, alpha_j u times `relaxation`, one entry per block
    zeta: Array  # the step that the loss alone would have allowed, before the cap alpha_j; one entry per block
    u: Array  # dual variable in [0, 1]
    gap: Array  # m - C: how far the loss was above its lower bound
    model_gap: Array  # how far the linear model is above C at the new point; 0 inside, negative where truncated
    branch: Array  # -1 skipped, 0 truncated (u = 0), 1 inside, 2 capped (u = 1)
    evaluations: Array  # prox evaluations of a search; 0 if the step has a closed form
    relaxation: Array  # factor by which a limit on its length shortened the move; 1 without
    cap: Array = -1  # what set the step: -1 skipped, 0 the model and its bound, 1 the learning rate, 2 the distance cap
    distance_cap: Array = math.nan  # the distance cap A_k; NaN if there is none

    @property
    def branch_name(self) -> str:
        """The branch in one word."""
        return BRANCHES[int(self.branch)]

    @property
    def cap_name(self) -> str:
        """What set the step, in one word: "polyak" for the model and its bound, "lr", "distance", or "skipped"."""
        return CAPS[int(self.cap)]

    def __str__(self) -> str:
        try:
            steps = sorted({f"{float(step):.3g}" for step in self.tau}, key=float)
            shown = steps[0] if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
            return f"tau {shown}, cap {self.cap_name}, gap {float(self.gap):.3g}"
        except (TypeError, RuntimeError):  # many runs, or numbers that are not known while a function is traced
            return repr(self)


def report(alpha: Array, solution: Solution) -> Report:
    """The report of a step with the caps alpha, one entry per block; NaN where there was no step."""
    xp = array_namespace(alpha)
    ok, gap, root, u, model_gap, evaluations, s, distance, longest = (xp.asarray(field) for field in solution)
    blank = xp.where(ok, xp.zeros_like(u), xp.full_like(u, math.nan))
    branch = xp.where(u <= 0, 0, xp.where(u >= 1, 2, 1))
    return Report(
        tau=alpha * xp.where(ok, s * u, xp.zeros_like(u)),
        zeta=alpha * xp.maximum(root, xp.zeros_like(root)) + blank,
        u=u + blank,
        gap=gap,
        model_gap=model_gap + (1 - s) * (gap - model_gap) + blank,
        branch=xp.where(ok, branch, -1),
        evaluations=evaluations,
        relaxation=s + blank,
        cap=xp.where(ok, xp.where(u >= 1, xp.where(distance <= longest, 2, 1), 0), -1),
        distance_cap=distance + blank,
    )
