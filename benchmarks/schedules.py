"""Schedules and factors on the steps of ProxSPSAdam without a learning rate, beside AdamW at its best constant lr.

    python benchmarks/schedules.py [--task regression] [--seeds 2]

A perceptron on Friedman's regression problem (1,000 steps, test error) and a small transformer on letters (300 steps,
validation loss). Prints the table of docs/without-a-learning-rate.md; takes about three minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from proxsps import CoolDown, PolyakOptimizer, ProxSPSAdam
from proxsps.experiments.no_lr.text import TextTask

RATES = (1e-3, 3e-3, 1e-2)  # of AdamW


def warm_up(opt: Optimizer, steps: int) -> LRScheduler:
    """Linear over 5 % of the steps, then a cosine."""
    first = steps // 20
    parts = [LinearLR(opt, 0.01, total_iters=first), CosineAnnealingLR(opt, steps - first)]
    return SequentialLR(opt, parts, [first])


def one_cycle(opt: Optimizer, steps: int) -> LRScheduler:
    """Up to the lr that the optimizer has, which is 1 without a learning rate."""
    return OneCycleLR(opt, opt.param_groups[0]["lr"], total_steps=steps + 1, cycle_momentum=False)


SCHEDULES: dict[str, Callable[[Optimizer, int], LRScheduler] | float] = {
    "constant": 1.0,
    "`CoolDown`": CoolDown,
    "cosine to 0": CosineAnnealingLR,
    "warm-up over 5 %, cosine": warm_up,
    "`OneCycleLR(max_lr=1)`": one_cycle,
    "constant factor 0.3": 0.3,
}


class Regression:
    """Friedman's function of 5 of 10 features, with noise of a tenth of its deviation, by a perceptron."""

    title, steps = "regression: test error", 1_000

    def __init__(self, samples: int = 8_000) -> None:
        generator = torch.Generator().manual_seed(0)
        u = torch.rand(samples + 2_000, 10, generator=generator)
        y = 10 * torch.sin(math.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
        y = (y - y.mean()) / y.std() + 0.1 * torch.randn(len(y), generator=generator)
        x = (u - 0.5) * 12**0.5
        self.train, self.test = (x[:samples], y[:samples]), (x[samples:], y[samples:])

    def model(self, seed: int) -> nn.Module:
        """Two hidden layers."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Samples in a new order, epoch by epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(self.train[0]), generator=generator).split(64):
                yield tuple(part[chosen] for part in self.train)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean squared error."""
        x, y = batch
        return mse_loss(model(x)[:, 0], y)

    def measure(self, model: nn.Module) -> float:
        """The error on the test samples; 0.01 is noise."""
        return self.loss(model, self.test).item()


def train(task: Any, make: Callable[[Any], Optimizer], schedule: Any, seed: int) -> float:
    """What is measured at the end of a run."""
    model = task.model(seed)
    opt = make(model.parameters())
    scheduler = None
    if isinstance(schedule, float):
        for group in opt.param_groups:
            group["lr"] *= schedule
    else:
        scheduler = schedule(opt, task.steps)
    for _, batch in zip(range(task.steps), task.batches(seed), strict=False):
        opt.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        if isinstance(opt, PolyakOptimizer):
            opt.step(loss=loss)
        else:
            opt.step()
        if scheduler is not None:
            scheduler.step()
    with torch.no_grad():
        return float(task.measure(model))


def table(task: Any, title: str, seeds: int) -> None:
    """Print the rows of a task, means over seeds."""

    def mean(label: str, make: Callable[[Any], Optimizer], schedule: Any) -> float:
        print(f"\r{title}: {label:60}", end="", file=sys.stderr, flush=True)
        return statistics.mean(train(task, make, schedule, seed) for seed in range(seeds))

    def adamw(lr: float) -> Callable[[Any], Optimizer]:
        return lambda params: AdamW(params, lr, weight_decay=0.0)

    constant = {lr: mean(f"AdamW, lr={lr:g}", adamw(lr), 1.0) for lr in RATES}
    best = min(constant, key=constant.__getitem__)
    print(f"\r{'':80}\r", end="", file=sys.stderr)
    print(f"\n| {title} | `ProxSPSAdam()` | AdamW, lr={best:g} |\n| --- | ---: | ---: |", flush=True)
    for name, schedule in SCHEDULES.items():
        ours = mean(f"ProxSPSAdam, {name}", ProxSPSAdam, schedule)
        theirs = constant[best] if name == "constant" else mean(f"AdamW, {name}", adamw(best), schedule)
        print(f"\r{'':80}\r", end="", file=sys.stderr)
        print(f"| {name} | {ours:.4g} | {theirs:.4g} |", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["regression", "transformer"], help="only this one")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.task != "transformer":
        table(Regression(), Regression.title, options.seeds)
    if options.task != "regression":
        table(TextTask(), "transformer: validation loss", options.seeds)


if __name__ == "__main__":
    main()
