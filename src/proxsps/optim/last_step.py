"""What a step did, kept as the numbers of its solution; what only the report needs is computed when it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from proxsps.core.array import Array
from proxsps.core.outcome import Report, Solution
from proxsps.core.outcome import report as core_report
from proxsps.core.rules import Decision


class LastStep(Report):
    """What the last step did, as tensors on the device it ran on; only `branch_name` and `cap_name` wait for it."""


class Chosen(NamedTuple):
    """A step that was chosen: block j goes u alpha_j reach along its direction, with a prox of size alpha_j reach."""

    decision: Any  # a `Decision`, or something whose method `decision` makes it when it is read
    u: Array | float
    reach: Array | float = 1.0
    caps: Array | float = 1.0  # caps divided by `alpha`, including factors on the step
    distance: Array | float = math.nan  # the distance cap
    longest: Array | float = math.nan  # caps divided by `alpha`, before factors
    memory: Sequence[Array | float] = ()  # of DecSPS after the step, one number per block


class Taken(NamedTuple):
    """A step that was solved and written, or skipped."""

    alpha: Array  # caps, or shares of `Chosen.caps`; one entry per group
    ok: Array | bool  # whether loss and gradients allowed a step
    gap: Array
    step: Chosen | None = None  # None if there was no step
    relaxation: Array | float = 1.0


def report(taken: Taken) -> LastStep:
    """The report of a step."""
    alpha, ok, gap, step, s = taken
    if isinstance(alpha, list):
        alpha, gap = np.array(alpha), np.float64(gap)
    if step is None:
        solution = Solution.skipped(gap)
    else:
        decision: Decision = step.decision if isinstance(step.decision, Decision) else step.decision.decision()
        solution = Solution(ok, gap, *decision, s, step.distance, step.longest)
        alpha = step.caps * alpha
    return LastStep(*map(torch.as_tensor, core_report(alpha, solution)))


__all__ = ["LastStep", "Taken", "report"]
