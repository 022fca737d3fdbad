"""What a step did, kept as the numbers of its solution; what only the report needs is computed when it is read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from proxsps.core.array import Array, over_blocks
from proxsps.core.caps import Matched, l2_matched_height, matched_decision
from proxsps.core.outcome import Report, Solution
from proxsps.core.outcome import report as core_report
from proxsps.core.plain_step import Step
from proxsps.core.rules import Decision


class LastStep(Report):
    """What the last step did, as tensors on the device it ran on; only `branch_name` and `cap_name` wait for it."""


class Chosen(NamedTuple):
    """A step on a device: block j goes u alpha_j reach along its direction, with a prox of size alpha_j reach."""

    decision: Any  # a `Decision`, or something whose method `decision` makes it when it is read
    u: Array | float
    reach: Array | float = 1.0
    caps: Array | float = 1.0  # caps divided by `alpha`, including factors on the step
    distance: Array | float = math.nan  # the distance cap
    longest: Array | float = math.nan  # caps divided by `alpha`, before factors


class L2Step(NamedTuple):
    """A step of the matched cap with weight decay: its size s, and the numbers for its report, as arrays."""

    gap: Array
    d_sq: Array
    d_dot_x: Array
    share: Array
    lam: Array | float
    longest: Array
    s: Array

    def decision(self) -> Decision:
        """The full report of a step, which takes more operations than the step itself."""
        gap, d_sq, d_dot_x, share, lam, longest, s = self
        found = Matched(s, l2_matched_height(gap, d_sq, d_dot_x, share, lam, s))
        return matched_decision(gap, over_blocks(share * d_sq), found, longest)


class Taken(NamedTuple):
    """A step that was solved and written, or skipped."""

    alpha: Array  # caps, or shares of `Chosen.caps` or `Step.caps`; one entry per group
    ok: Array | bool  # whether loss and gradients allowed a step
    gap: Array
    step: Chosen | Step | None = None  # None if there was no step
    relaxation: Array | float = 1.0  # of a `Chosen`


def report(taken: Taken) -> LastStep:
    """The report of a step."""
    alpha, ok, gap, step, s = taken
    if not isinstance(alpha, torch.Tensor):
        alpha, gap = np.array(alpha), np.float64(gap)
    if step is None:
        solution = Solution.skipped(gap)
    else:
        if isinstance(step, Step):
            decided, s = Decision(step.root, step.dual, step.height, step.evaluations), step.relaxation
        else:
            decided = step.decision if isinstance(step.decision, Decision) else step.decision.decision()
        solution = Solution(ok, gap, *decided, s, step.distance, step.longest)
        alpha = step.caps * alpha
    return LastStep(*map(torch.as_tensor, core_report(alpha, solution)))
