"""Matrix factorisation with ProxSPS, SPS and SGD side by side (the paper's `matrix-fac1`, constant step sizes).

Two bias-free linear layers W2 W1 learn a badly conditioned matrix A from samples A y, with lambda/2 ||W||^2 added.
The question the table answers: how much does the result depend on the step size one happens to choose?

    python examples/demo.py [--epochs 30] [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from proxsps import SPS, ProxSPS

P, Q, RANK, SAMPLES, BATCH = 6, 10, 4, 1000, 20
SPREAD = (10.0, 1e-5)  # the diagonal of D in A = D B, from first to last
LAMBDA = 1e-3
BASE_SEED = 12345678

METHODS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[float, ...]]] = {
    "ProxSPS": (ProxSPS, (0.5, 1.0, 2.0)),
    "SPS": (SPS, (0.5, 1.0, 2.0)),
    "SGD": (torch.optim.SGD, (0.125, 0.41, 0.7)),
}


@dataclass(frozen=True)
class Data:
    """Inputs and targets, samples in rows."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """How a run ended."""

    method: str
    alpha: float
    objective: float  # train loss + lambda/2 ||W||^2
    validation: float  # relative error ||A y - W2 W1 y|| / ||A y|| over the validation samples
    norm: float  # ||W||

    @property
    def diverged(self) -> bool:
        """Whether the weights or the objective left the finite numbers."""
        return not math.isfinite(self.objective)


def make_data(seed: int) -> Data:
    """The published data: train inputs are the same for all seeds, validation inputs are not."""
    A = np.diag(np.geomspace(*SPREAD, Q)) @ np.random.RandomState(BASE_SEED).rand(Q, P)

    def sample(state: int) -> tuple[Tensor, Tensor]:
        y = np.random.RandomState(state).randn(P, SAMPLES).T
        return torch.tensor(y, dtype=torch.float32), torch.tensor(y @ A.T, dtype=torch.float32)

    return Data(sample(BASE_SEED), sample(BASE_SEED + 2 + seed))


def make_model() -> nn.Module:
    """W2 W1, always from the same start."""
    torch.manual_seed(BASE_SEED)
    return nn.Sequential(nn.Linear(P, RANK, bias=False), nn.Linear(RANK, Q, bias=False))


def train(method: str, alpha: float, data: Data, epochs: int, seed: int) -> Run:
    """One run with a constant step size alpha."""
    model = make_model()
    optimizer = METHODS[method][0](model.parameters(), lr=alpha, weight_decay=LAMBDA)
    x, y = data.train
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(SAMPLES, generator=shuffle)
        for batch in order[: SAMPLES - SAMPLES % BATCH].split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[batch]), y[batch])
            loss.backward()
            if not math.isfinite(loss.item()):
                return Run(method, alpha, math.inf, math.inf, math.inf)
            if method == "SGD":
                optimizer.step()
            else:
                optimizer.step(loss=loss)
    return measure(method, alpha, model, data)


@torch.no_grad()
def measure(method: str, alpha: float, model: nn.Module, data: Data) -> Run:
    """The figures of a trained model."""
    (x, y), (x_val, y_val) = data.train, data.validation
    norm_sq = float(sum(p.square().sum() for p in model.parameters()))
    objective = float(nn.functional.mse_loss(model(x), y)) + LAMBDA / 2 * norm_sq
    error = float((model(x_val) - y_val).norm() / y_val.norm())
    return Run(method, alpha, objective, error, math.sqrt(norm_sq))


def table(runs: list[Run]) -> str:
    """A row a run."""
    head = f"{'method':<9}{'alpha_0':>9}{'objective':>13}{'val. error':>13}{'||W||':>9}"
    rows = []
    for run in runs:
        figures = f"{run.objective:>13.6f}{run.validation:>13.5f}{run.norm:>9.3f}"
        rows.append(f"{run.method:<9}{run.alpha:>9.3g}" + (f"{'diverged':>13}" if run.diverged else figures))
    return "\n".join([head, "-" * len(head), *rows])


def reading(runs: list[Run]) -> list[str]:
    """What the figures say, worked out from them."""
    finite = [run for run in runs if not run.diverged]
    if not finite:
        return ["Every run diverged."]
    best = min(finite, key=lambda run: run.objective)
    lines = [f"Lowest objective: {best.objective:.6f}, {best.method} with alpha_0 = {best.alpha:g}."]
    for method in METHODS:
        own = [run for run in runs if run.method == method]
        worst = max(own, key=lambda run: run.objective)
        if worst.diverged:
            count = sum(run.diverged for run in own)
            lines.append(f"{method}: {count} of {len(own)} runs diverged.")
        else:
            over = 100 * (worst.objective / best.objective - 1)
            lines.append(f"{method}: its worst run (alpha_0 = {worst.alpha:g}) ended {over:.1f} % above the lowest.")
    return lines


def main() -> None:
    """Run all settings and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {arguments.epochs}")

    torch.set_num_threads(1)  # tensors of 24 and 40 entries: more threads only wait for each other
    data = make_data(arguments.seed)
    settings = [(method, alpha) for method, (_, alphas) in METHODS.items() for alpha in alphas]
    print(
        f"Matrix factorisation, {SAMPLES} samples, rank {RANK}, batch {BATCH}, lambda = {LAMBDA:g}, "
        f"{arguments.epochs} epochs, constant step size alpha_0.\n"
        "objective: train loss + lambda/2 ||W||^2; val. error: ||W2 W1 y - A y|| / ||A y|| on fresh samples.\n"
    )
    start, runs = time.perf_counter(), []
    for i, (method, alpha) in enumerate(settings, 1):
        if sys.stdout.isatty():
            print(f"\r\033[Krun {i} of {len(settings)}: {method}, alpha_0 = {alpha:g}", end="", flush=True)
        runs.append(train(method, alpha, data, arguments.epochs, arguments.seed))
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    print(table(runs), *reading(runs), sep="\n")
    print(f"({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    main()
