"""Many seeds as one array program: a step moves all runs, by the formulas of `core`, on one fresh sample each.

The theorems are about single samples drawn with replacement and steps alpha_k that change with every k; sweeps shuffle
epochs instead. Runs are rows: x has shape (runs, n).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from proxsps.core.array import Array
from proxsps.core.averaging import Average, start_average, update_average
from proxsps.core.dual import Search, search_dual
from proxsps.core.models import full_logistic_step, full_squared_step
from proxsps.core.step import dec_sps_dual, l2_dual, prox_coefficients, sps_dual
from proxsps.problems.composite import Composite
from proxsps.problems.losses import Logistic, Squared
from proxsps.regularizers import L2, Regularizer, Zero

Schedule = Callable[[int], float]


class Step(Protocol):
    """One step of all runs: the new points, and the dual variables u (1 where the model was not truncated)."""

    def __call__(self, x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (runs, n), samples i (runs,), step sizes alpha (runs,)."""


@dataclass(frozen=True)
class Path:
    """All points of all runs, and how often the model was truncated."""

    points: np.ndarray  # (K + 1, runs, n)
    alphas: np.ndarray  # (K,)
    truncated: float  # share of the steps with u < 1


def run(
    problem: Composite, step: Step, schedule: Schedule, steps: int, seeds: int, scales: np.ndarray | None = None
) -> Path:
    """K steps of as many runs as there are seeds; run s draws its samples from a generator of its own.

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

    def step(x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, g = problem.sample(x, i)
        return prox_sps_step(x, value - problem.lower_bound, g, alpha, problem.phi)

    return step


def prox_sps_step(
    x: np.ndarray, gap: np.ndarray, g: np.ndarray, alpha: np.ndarray, phi: Regularizer
) -> tuple[np.ndarray, np.ndarray]:
    """The new points and dual variables: in closed form for the squared l2 norm, else by a search for all runs at once.

    Args:
        x: points (rows, n).
        gap: f_i(x) - C_i, (rows,).
        g: gradients (rows, n).
        alpha: step sizes (rows,).
        phi: a regulariser that acts per entry.
    """
    if isinstance(phi, (L2, Zero)):
        lam = phi.strong_convexity
        sums = [(part * g).sum(-1, keepdims=True) for part in (g, x)]
        u = l2_dual(gap, *sums, alpha[:, None], np.full_like(alpha, lam)[:, None]).u
        keep, move, _ = prox_coefficients(u[:, None], alpha[:, None], lam)
        return keep * x + move * g, u

    column = alpha[:, None]

    def evaluate(u: Array) -> tuple[Array, Array]:
        z = x - u[:, None] * column * g
        y = phi.prox_diagonal(z, column)
        slope = -alpha * (g * phi.prox_jvp(z, y, g, column)).sum(-1)
        return gap + (g * (y - x)).sum(-1), slope

    # A gap of the size of rounding is as good as none: relative to the gap, and to the products that h is summed from.
    tolerance = 1e-13 * gap + 1e-15 * np.abs(g * x).sum(-1)
    u = search_dual(evaluate, gap, tolerance, 1e-15, 200, _until_done).u
    return phi.prox_diagonal(x - u[:, None] * column * g, column), u


def _until_done(condition: Callable[[Search], Array], body: Callable[[Search], Search], state: Search) -> Search:
    while condition(state).any():
        state = body(state)
    return state


def prox_sgd(problem: Composite) -> Step:
    """The linear model: u = 1 always."""

    def step(x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, g = problem.sample(x, i)
        return problem.phi.prox_diagonal(x - alpha[:, None] * g, alpha[:, None]), np.ones(len(x))

    return step


def full_model(problem: Composite) -> Step:
    """Stochastic proximal point, for the squared and the logistic loss with the squared l2 norm."""
    solve = {Squared: full_squared_step, Logistic: full_logistic_step}[type(problem.loss)]
    lam = problem.phi.strong_convexity

    def step(x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return solve(x, problem.A[i], problem.b[i, None], alpha[:, None], lam), np.ones(len(x))

    return step


def sps_max(problem: Composite) -> Step:
    """SPS_max with c = 1 on f_i + lam/2 ||.||^2, with the lower bound of f_i: the paper's baseline."""
    regularised = _regularised(problem)

    def step(x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        gap, d = regularised(x, i)
        u = sps_dual(gap, (d * d).sum(-1, keepdims=True), alpha[:, None]).u
        return x - (alpha * u)[:, None] * d, u

    return step


class DecSPS:
    """DecSPS with c_k = sqrt(k + 1) on f_i + lam/2 ||.||^2; alpha is the bound gamma_b of its first step."""

    def __init__(self, problem: Composite) -> None:
        self._regularised = _regularised(problem)
        self._previous: np.ndarray | None = None
        self._count = 0

    def __call__(self, x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step."""
        previous = np.full((len(x), 1), np.inf) if self._previous is None else self._previous
        gap, d = self._regularised(x, i)
        self._count += 1
        c = np.sqrt(self._count)
        u = dec_sps_dual(gap, (d * d).sum(-1, keepdims=True), alpha[:, None], c, previous).u
        self._previous = (c * alpha * u)[:, None]
        return x - (alpha * u)[:, None] * d, u


def _regularised(problem: Composite) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """f_i + phi - C_i and its gradient, for the squared l2 norm."""
    lam = problem.phi.strong_convexity

    def evaluate(x: np.ndarray, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, g = problem.sample(x, i)
        return value + lam / 2 * (x * x).sum(-1) - problem.lower_bound, g + lam * x

    return evaluate


def averages(points: np.ndarray, weights: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Weighted means of the first k points for k in `at`, which is sorted: (len(at), runs, n)."""
    average: Average = start_average(points[0])
    wanted, means = set(at.tolist()), []
    for k, (x, weight) in enumerate(zip(points, weights, strict=True), 1):
        average = update_average(average, x, weight)
        if k in wanted:
            means.append(average.mean)
    return np.stack(means)


def checkpoints(steps: int, count: int = 13) -> np.ndarray:
    """Numbers of steps from 1 to `steps`, evenly on a logarithmic scale."""
    return np.unique(np.geomspace(1, steps, count).round().astype(int))
