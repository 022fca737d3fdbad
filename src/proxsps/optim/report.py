"""What a step did, kept as the numbers it was solved with and read when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.report import BRANCHES, Solution
from proxsps.core.report import report as core_report


@dataclass(frozen=True)
class LastStep:
    """What the last step did, as tensors on the device it ran on; only `branch_name` waits for the device."""

    tau: Tensor  # step along the gradient, alpha_j u times `relaxation`, an entry a parameter group
    zeta: Tensor  # the step that the loss alone would have allowed, before the cap alpha_j; an entry a group
    u: Tensor  # dual variable in [0, 1]
    gap: Tensor  # m - C: how far the loss was above its lower bound
    model_gap: Tensor  # how far the linear model is above C at the new point; 0 inside, negative where truncated
    branch: Tensor  # -1 skipped, 0 truncated (u = 0), 1 inside, 2 capped (u = 1)
    evaluations: Tensor  # prox evaluations of a search; 0 where the step has a closed form
    relaxation: Tensor  # factor on the move that max_move asked for; 1 where it did not

    @property
    def branch_name(self) -> str:
        """The branch in a word."""
        return BRANCHES[int(self.branch)]


def report(alpha: Array, solution: Solution) -> LastStep:
    """The report of a step with the caps alpha, an entry a group."""
    return LastStep(*map(torch.as_tensor, core_report(alpha, solution)))


__all__ = ["LastStep", "Solution", "report"]
