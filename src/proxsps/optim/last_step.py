"""What a step did, kept as the numbers of its solution; what only the report needs is computed when it is read."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
import torch

from proxsps.core.array import Array
from proxsps.core.outcome import Report, Solution
from proxsps.core.outcome import report as core_report
from proxsps.core.rules import Decision


class LastStep(Report):
    """What the last step did, as tensors on the device it ran on; only `branch_name` and `cap_name` wait for it."""


class Decided(Protocol):
    """A decision that is worked out when it is read."""

    def decision(self) -> Decision:
        """The decision."""


class Step(NamedTuple):
    """A step that was chosen: block j goes u alpha_j reach along its direction, with a prox of size alpha_j reach."""

    decision: Decision | Decided
    u: Array | float
    reach: Array | float = 1.0
    caps: Array | float = 1.0  # caps divided by `alpha`, including factors on the step
    distance: Array | float = math.nan  # the distance cap
    longest: Array | float = math.nan  # caps divided by `alpha`, before factors


class Taken(NamedTuple):
    """A step that was solved and written, or skipped."""

    alpha: Array  # caps, or shares of `Step.caps`; one entry per group
    ok: Array | bool  # whether loss and gradients allowed a step
    gap: Array
    step: Step | None = None  # None if there was no step
    relaxation: Array | float = 1.0


def report(taken: Taken) -> LastStep:
    """The report of a step."""
    alpha, ok, gap, step, s = taken
    if isinstance(alpha, list):
        alpha, gap = np.array(alpha), np.float64(gap)
    if step is None:
        solution = Solution.skipped(gap)
    else:
        decision = step.decision if isinstance(step.decision, Decision) else step.decision.decision()
        solution = Solution(ok, gap, *decision, s, step.distance, step.longest)
        alpha = step.caps * alpha
    return LastStep(*map(torch.as_tensor, core_report(alpha, solution)))


__all__ = ["LastStep", "Taken", "report"]
