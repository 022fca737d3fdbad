"""Optimizers to compare with that no package has in this form: Muon with AdamW for the rest, and ScheduleFree+."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` for groups with the spectral metric, AdamW for the others, with one lr for both.

    Muon scales its steps so that they have the size of AdamW's ("match_rms_adamw"). It takes matrices only: it gets
    filters as matrices with one row per output channel, which share their memory.
    """

    def __init__(self, params: list[dict[str, Any]], lr: float, weight_decay: float = 0.0) -> None:
        groups: list[dict[str, Any]] = [
            {key: group[key] for key in ("params", "metric") if key in group} for group in params
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "metric": "adam"})
        self.wide, rest = (
            [p for group in self.param_groups if (group["metric"] == "spectral") == is_wide for p in group["params"]]
            for is_wide in (True, False)
        )
        self.matrices = [matrix_view(p.detach()) for p in self.wide]
        self.inner: tuple[Optimizer, ...] = (
            Muon(self.matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(rest, lr, weight_decay=weight_decay),
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for p, matrix in zip(self.wide, self.matrices, strict=True):
            matrix.grad = None if p.grad is None else matrix_view(p.grad)
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            optimizer.step()
        return loss


def matrix_view(p: Tensor) -> Tensor:
    """A tensor as a matrix with the same rows and the same memory; the order of columns may differ."""
    return (p if p.is_contiguous() else p.movedim(1, -1)).view(len(p), -1)


class ScheduleFreePlus(Optimizer):
    """ScheduleFree+ (Defazio, arXiv:2605.19095) with its authors' defaults: schedule-free Adam with a Polyak step.

    With loss f and gradient g at y, the step is alpha = lr max(0, f + beta <g, z - x>) / (sqrt(pi/2) ||g||_1). Momentum
    is inside: z moves along Adam's direction m / (sqrt(v) + eps). Weight decay is multiplied by alpha^2. x is the
    average of z with weights that are the square of the largest alpha so far. The defaults have no annealing of beta
    and no averaging of ||g||_1. During a warm-up, alpha has a factor that rises to 1, and x is z.
    """

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, warmup_steps: int = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.beta, self.betas, self.eps = 0.9, (0.9, 0.95), 1e-8
        self.k, self.total, self.longest, self.warmup_steps = 0, 0.0, 0.0, warmup_steps
        self.params: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        for p in self.params:
            self.state[p] = {"z": p.detach().clone(), "x": p.detach().clone()}
            self.state[p] |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        """One step, with the loss whose gradients are there."""
        first, second = self.betas
        group, moved = self.param_groups[0], [p for p in self.params if p.grad is not None]
        ahead = sum(float((p.grad * (self.state[p]["z"] - self.state[p]["x"])).sum()) for p in moved)
        norm = math.sqrt(math.pi / 2) * sum(float(p.grad.abs().sum()) for p in moved if p.grad is not None)
        self.k += 1
        factor = group["lr"] * min(1.0, self.k / max(1, self.warmup_steps))
        alpha = factor * max(0.0, float(loss) + self.beta * ahead) / norm if norm else 0.0
        self.longest = max(self.longest, alpha)
        self.total += self.longest**2
        share = self.longest**2 / self.total if self.total and self.k > self.warmup_steps else 1.0
        for p in moved:
            x, z, m, v = (self.state[p][name] for name in "xzmv")
            m.lerp_(p.grad, 1 - first)
            v.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            z.sub_(p, alpha=alpha**2 * group["weight_decay"])
            scale = (v / (1 - second**self.k)).sqrt_().add_(self.eps)
            z.addcdiv_(m, scale, value=-alpha / (1 - first**self.k))
            x.lerp_(z, share)
            torch.lerp(z, x, self.beta, out=p)

    @torch.no_grad()
    def train(self) -> None:
        """Put y into the parameters."""
        for p in self.params:
            p.copy_(torch.lerp(self.state[p]["z"], self.state[p]["x"], self.beta))

    @torch.no_grad()
    def eval(self) -> None:
        """Put x, the average, into the parameters."""
        for p in self.params:
            p.copy_(self.state[p]["x"])
