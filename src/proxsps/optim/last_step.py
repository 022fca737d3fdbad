"""What a step did, kept as the numbers it was solved with and read when they are needed."""

from __future__ import annotations

import torch

from proxsps.core.array import Array
from proxsps.core.outcome import Report, Solution
from proxsps.core.outcome import report as core_report


class LastStep(Report):
    """What the last step did, as tensors on the device it ran on; only `branch_name` and `cap_name` wait for it."""


def report(alpha: Array, solution: Solution) -> LastStep:
    """The report of a step with the caps alpha, one entry per group."""
    return LastStep(*map(torch.as_tensor, core_report(alpha, solution)))


__all__ = ["LastStep", "Solution", "report"]
