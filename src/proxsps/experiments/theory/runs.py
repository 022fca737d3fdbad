"""Many seeds as one array program: a step of `proxsps.runs` moves all of them, on one fresh sample each.

The theorems are about single samples drawn with replacement and steps alpha_k that change with every k; sweeps shuffle
epochs instead. Runs are rows: x has shape (runs, n).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from proxsps import runs
from proxsps.core import rules
from proxsps.core.averaging import Average, start_average, update_average
from proxsps.core.models import full_logistic_step, full_squared_step
from proxsps.problems.composite import Composite
from proxsps.problems.losses import Floats, Logistic, Squared
from proxsps.regularizers import Zero

Schedule = Callable[[int], float]


class Step(Protocol):
    """One step of all runs: the new points, and the dual variables u (1 where the model was not truncated)."""

    def __call__(self, x: Floats, i: np.ndarray, alpha: Floats) -> tuple[Floats, Floats]:
        """x (runs, n), samples i (runs,), step sizes alpha (runs,)."""


@dataclass(frozen=True)
class Path:
    """All points of all runs, and how often the model was truncated."""

    points: Floats  # (K + 1, runs, n)
    alphas: Floats  # (K,)
    truncated: float  # share of the steps with u < 1


def run(
    problem: Composite, step: Step, schedule: Schedule, steps: int, seeds: int, scales: Floats | None = None
) -> Path:
    """K steps of as many runs as there are seeds; each run draws its samples from its own generator.

    `scales` runs every seed with several multiples of the schedule: the rows of the first multiple come first.
    """
    scales = np.ones(1) if scales is None else scales
    draws = [np.random.default_rng([2023, seed]).integers(problem.size, size=steps) for seed in range(seeds)]
    samples = np.tile(np.stack(draws), (len(scales), 1))
    factors = np.repeat(scales, seeds)
    x = np.tile(problem.start, (len(factors), 1))
    points, alphas, below = [x], np.array([schedule(k) for k in range(steps)]), 0
    for k in range(steps):
        x, u = step(x, samples[:, k], alphas[k] * factors)
        below += int((u < 1).sum())
        points.append(x)
    return Path(np.stack(points), alphas, below / (steps * len(factors)))


def prox_sps(problem: Composite) -> Step:
    """ProxSPS on the problem's loss and regulariser."""
    return partial(_step, problem, rules.truncated)


def prox_sgd(problem: Composite) -> Step:
    """The linear model: u = 1 always."""
    return partial(_step, problem, rules.linear)


def _step(
    problem: Composite, rule: runs.Rule, x: Floats, i: np.ndarray, alpha: Floats, coupled: bool = False
) -> tuple[Floats, Floats]:
    """A step on the problem, or on f_i + phi without a prox, where phi is the squared l2 norm."""
    (value, g), phi = problem.sample(x, i), problem.phi
    if coupled:
        (value, g), phi = runs.coupled(value, g, x, phi.strong_convexity), Zero()
    points, decision = runs.step(x, value - problem.lower_bound, g, alpha, phi, rule)
    return points, decision.u


def full_model(problem: Composite) -> Step:
    """Stochastic proximal point, for the squared and the logistic loss with the squared l2 norm."""
    solve = {Squared: full_squared_step, Logistic: full_logistic_step}[type(problem.loss)]
    lam = problem.phi.strong_convexity

    def step(x: Floats, i: np.ndarray, alpha: Floats) -> tuple[Floats, Floats]:
        return solve(x, problem.A[i], problem.b[i, None], alpha[:, None], lam), np.ones(len(x))

    return step


def sps_max(problem: Composite) -> Step:
    """SPS_max with c = 1 on f_i + lam/2 ||.||^2, with the lower bound of f_i: the paper's baseline."""
    return partial(_step, problem, rules.sps_max, coupled=True)


class DecSPS:
    """DecSPS with c_k = sqrt(k + 1) on f_i + lam/2 ||.||^2; alpha is the bound gamma_b of its first step."""

    def __init__(self, problem: Composite) -> None:
        self._problem = problem
        self._memory: rules.StepMemory | None = None

    def __call__(self, x: Floats, i: np.ndarray, alpha: Floats) -> tuple[Floats, Floats]:
        """One step."""
        return _step(self._problem, self._rule, x, i, alpha, coupled=True)

    def _rule(self, model: rules.Model) -> rules.Decision:
        memory = self._memory or rules.start_memory(model.alpha)
        decision, self._memory = rules.dec_sps(model, memory, np.isfinite(model.gap))
        return decision


def averages(points: Floats, weights: Floats, at: np.ndarray) -> Floats:
    """Weighted means of the first k points for k in `at`, which is sorted: (len(at), runs, n)."""
    average: Average = start_average(points[0])
    wanted, means = set(at.tolist()), []
    for k, (x, weight) in enumerate(zip(points, weights, strict=True), 1):
        average = update_average(average, x, weight)
        if k in wanted:
            means.append(average.mean)
    return np.stack(means)


def checkpoints(steps: int, count: int = 13) -> Floats:
    """Numbers of steps from 1 to `steps`, evenly on a logarithmic scale."""
    return np.unique(np.geomspace(1, steps, count).round().astype(int))
