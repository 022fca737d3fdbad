"""Every alpha_k of the paper, and a cool-down, as torch schedulers: call `step()` once per epoch, or once per step.

The formulas are those of `proxsps.core.schedules`; a scheduler only keeps count. `last_epoch` is as in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from proxsps.core import schedules
from proxsps.optim.optimizer import PolyakOptimizer


class _Formula(LRScheduler):
    """A scheduler whose values follow from the count and the base lr of a group."""

    def _alpha(self, base: Any) -> Any:
        raise NotImplementedError

    def get_lr(self) -> list[float | Tensor]:
        """The values for the current count."""
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:  # added after the scheduler was made
            lr = group["lr"]
            self.base_lrs.append(group.setdefault("initial_lr", lr.clone() if isinstance(lr, Tensor) else lr))
        return [self._alpha(base) for base in self.base_lrs]


class SqrtLR(_Formula):
    r"""$\alpha_k = \alpha_0 / \sqrt{k+1}$.

    With `step()` once per epoch it is the paper's `sqrt` schedule, with `step()` once per step that of its theorems.
    """

    def _alpha(self, base: Any) -> Any:
        return schedules.sqrt_decay(self.last_epoch, base)


class HorizonLR(_Formula):
    r"""$\alpha_k = \alpha_0 / \sqrt{K}$ throughout, for a number $K$ of steps known beforehand."""

    def __init__(self, optimizer: Optimizer, total_steps: int, last_epoch: int = -1) -> None:
        schedules.check_horizon(total_steps)
        self.total_steps = total_steps
        super().__init__(optimizer, last_epoch)

    def _alpha(self, base: Any) -> Any:
        return schedules.horizon(self.last_epoch, base, self.total_steps)


class StronglyConvexLR(_Formula):
    r"""$\alpha_k = 1/(\lambda(k+k_0))$, or with `bounded=True` $2/(\lambda(k+1))$; the base lr does not matter.

    Args:
        lam: strong convexity of the regulariser, for instance `weight_decay`.
        k_0: offset of the first form; large enough that alpha_0 meets the step condition of the smooth convex theorem.
        bounded: use the second form, for losses with bounded subgradients.
    """

    def __init__(
        self, optimizer: Optimizer, lam: float, k_0: float = 1.0, bounded: bool = False, last_epoch: int = -1
    ) -> None:
        if not lam > 0:
            raise ValueError(f"lam must be positive (the schedule is for strongly convex regularisers), got {lam}.")
        if not k_0 >= 1:
            raise ValueError(f"k_0 must be at least 1, got {k_0}.")
        _check_lr(self, optimizer)
        self.lam, self.k_0, self.bounded = lam, k_0, bounded
        super().__init__(optimizer, last_epoch)

    def _alpha(self, base: Any) -> Any:
        if self.bounded:
            return schedules.strongly_convex_bounded(self.last_epoch, self.lam)
        return schedules.strongly_convex(self.last_epoch, self.lam, self.k_0)


class CoolDown(_Formula):
    r"""$\alpha_k = \alpha_0$, then linearly to 0 over the last part of training. Call `step()` once per step.

    Most of the gain from smaller steps comes from the last quarter of training. Without a learning rate (`lr=None`) the
    `lr` of a group is a factor on the step size that the optimizer chooses, and starts at 1: the factor falls to 0, and
    only the number of steps has to be chosen.

    Args:
        total_steps: steps of the whole training; from then on the lr is 0.
        fraction: the part of these steps over which the lr falls.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, fraction: float = 0.25, last_epoch: int = -1) -> None:
        schedules.check_horizon(total_steps, fraction)
        self.total_steps, self.fraction = total_steps, fraction
        super().__init__(optimizer, last_epoch)

    def _alpha(self, base: Any) -> Any:
        return schedules.cool_down(self.last_epoch, base, self.total_steps, self.fraction)


class AdaptiveLR(LRScheduler):
    r"""$\alpha$ of the next epoch = median adaptive step $\zeta_k$ of the last one, at most the base lr.

    The paper's remedy for a $\zeta_k$ that has fallen far below $\alpha_k$, where every step shrinks the weights much
    more than it moves them along the gradient. Call `step()` once per epoch; a hook observes the steps in between.

    Args:
        optimizer: an optimizer of this package.
        factor: multiplies the median.
    """

    def __init__(self, optimizer: PolyakOptimizer, factor: float = 1.0, last_epoch: int = -1) -> None:
        if not isinstance(optimizer, PolyakOptimizer):
            raise TypeError(f"AdaptiveLR reads last_step.zeta, which {type(optimizer).__name__} does not report.")
        if not factor > 0:
            raise ValueError(f"factor must be positive, got {factor}.")
        _check_lr(self, optimizer)
        self.factor = factor
        self.zetas: list[Tensor] = []
        optimizer.register_step_post_hook(self._observe)
        super().__init__(optimizer, last_epoch)

    def _observe(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if (last := optimizer.last_step) is not None:
            self.zetas.append(last.zeta)

    def get_lr(self) -> list[float | Tensor]:
        """The values for the next epoch."""
        zetas, self.zetas = self.zetas, []
        seen = torch.nn.utils.rnn.pad_sequence(zetas, True, math.nan).T if zetas else torch.empty(0)
        out = []
        for i, group in enumerate(self.optimizer.param_groups):
            base, lr = group.setdefault("initial_lr", group["lr"]), group["lr"]
            taken = seen[i][~seen[i].isnan()].tolist() if i < len(seen) else []  # a skipped step reports NaN
            out.append(min(base, self.factor * schedules.adaptive(taken, lr / self.factor)) if taken else lr)
        return out

    def state_dict(self) -> dict[str, Any]:
        """As in torch; what was observed in an unfinished epoch is part of it."""
        return {**super().state_dict(), "zetas": [zeta.tolist() for zeta in self.zetas]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch."""
        super().load_state_dict(state_dict)
        self.zetas = [torch.tensor(zeta, dtype=torch.float64) for zeta in state_dict["zetas"]]


def _check_lr(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Raise an error if the lr of the optimizer is a factor, for a scheduler that sets step sizes."""
    if optimizer.param_groups[0].get("lr_is_factor"):
        name = type(scheduler).__name__
        raise ValueError(
            f"{name} sets step sizes, but {type(optimizer).__name__} was constructed with lr=None: its lr is a factor "
            "on the step, which starts at 1. Use CoolDown or a scheduler of torch that scales the lr."
        )
