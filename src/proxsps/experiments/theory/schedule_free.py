"""Checks of the schedule-free form, at points of its runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core.schedule_free import Averaging, gradient_point, next_share, noise_growth
from proxsps.experiments.theory.caps import CAPS, CONVEX, matched_step
from proxsps.experiments.theory.rates import distance_sq, table
from proxsps.experiments.theory.runs import checkpoints
from proxsps.experiments.theory.steps import joined, sample_models, worst
from proxsps.problems.composite import PROBLEMS, Composite, robust_regression
from proxsps.problems.losses import Absolute
from proxsps.regularizers import Box
from proxsps.theory.moreau import square

STEPS = 60
MIXES = (0.5, 0.9)
POWERS = (0.0, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class FreePath:
    """All points of all runs, (K + 1, runs, n), and the weight of each z in its average, (K + 1, runs)."""

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray
    weights: np.ndarray  # those of the starts are 0
    truncated: float  # share of the steps that are shorter than their cap


def free_run(
    problem: Composite, cap: float, mix: float, steps: int, seeds: int, power: float = 1.0, by_step: bool = True
) -> FreePath:
    """K schedule-free steps with a constant cap, on one fresh sample each.

    `by_step` weighs points by the square of the longest step so far, too.
    """
    draws = [np.random.default_rng([2024, seed]).integers(problem.size, size=steps) for seed in range(seeds)]
    x = y = z = np.tile(problem.start, (seeds, 1))
    zero = np.zeros(seeds)
    numbers, caps, below = Averaging(zero, zero), np.full(seeds, cap), 0
    points, weights = [(x, y, z)], [zero]
    for k in range(steps):
        value, g = problem.sample(y, np.array([own[k] for own in draws]))
        gap = value + (g * (z - y)).sum(-1) - problem.lower_bound
        z, tau = matched_step(z, gap, g, caps, problem.phi)
        below += int((tau < cap).sum())
        share, after = next_share(numbers, np.full(seeds, float(k)), tau if by_step else np.ones(seeds), power)
        x = x + share[:, None] * (z - x)
        y = gradient_point(x, z, mix)
        points.append((x, y, z))
        weights.append(after.total - numbers.total)
        numbers = after
    xs, ys, zs = (np.stack(part) for part in zip(*points, strict=True))
    return FreePath(xs, ys, zs, np.stack(weights), below / (steps * seeds))


def free_step(
    problem: Composite, y: np.ndarray, z: np.ndarray, cap: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """m - C (points, N), z+ (points, N, n) and tau (points, N), for every pair of points and every sample."""
    g = problem.gradients(y)
    gap = problem.losses(y) + (g * (z - y)[:, None]).sum(-1) - problem.lower_bound
    rows = np.repeat(z, problem.size, axis=0)
    new, tau = matched_step(rows, gap.ravel(), g.reshape(rows.shape), np.full(len(rows), cap), problem.phi)
    return gap, new.reshape(g.shape), tau.reshape(gap.shape)


def step_inequality(seeds: int) -> pd.DataFrame:
    """The basic inequality with z in place of x, at the solution, the start and a point of a run."""
    rows = []
    for problem in (make() for make in PROBLEMS.values()):
        parts = []
        for cap, mix in ((CAPS[1], 0.9), (CAPS[3], 0.5)):
            path = free_run(problem, cap, mix, 40, 1)
            y, z = (part[::5, 0] for part in (path.y, path.z))
            _, new, tau = free_step(problem, y, z, cap)
            next_model = sample_models(problem, y, new) + problem.penalty(new)
            parts += [
                theory.matched_inequality(
                    tau=tau,
                    lam=problem.constants.lam,
                    distance_sq=square(z - u)[:, None],
                    next_distance_sq=square(new - u),
                    move_sq=square(new - z[:, None]),
                    model=sample_models(problem, y, np.broadcast_to(u, new.shape)) + problem.penalty(u),
                    next_model=next_model,
                )
                for u in (problem.solution, problem.start, z[-1])
            ]
        rows.append(worst(problem.name, joined(parts)))
    return pd.concat(rows)


def average_inequality(seeds: int) -> pd.DataFrame:
    """What the average inherits from the model at z, for every sample and every step of runs."""
    rows = []
    for problem in (make() for make in (*CONVEX, robust_regression)):
        parts = []
        for mix in MIXES:
            path, C = free_run(problem, CAPS[2], mix, 40, 3), problem.lower_bound
            y, z = path.y[1:], path.z[1:]
            models = problem.losses(y) + (problem.gradients(y) * (z - y)[..., None, :]).sum(-1)
            gaps = problem.losses(path.x) - C
            parts.append(
                theory.average_inequality(
                    weight=path.weights[1:, :, None],
                    total=path.weights.cumsum(0)[1:, :, None],
                    gap=gaps[1:],
                    last_gap=gaps[:-1],
                    model_gap=models - C,
                )
            )
        rows.append(worst(problem.name, joined(parts)))
    return pd.concat(rows)


def interpolated() -> Composite:
    """Absolute loss in a box, without noise, so that all samples are 0 at one point; 12 samples, 4 variables."""
    rng = np.random.default_rng(8)
    A, truth = rng.standard_normal((12, 4)), np.array([0.8, -0.5, 1.0, 0.2])
    A /= np.sqrt(square(A))[:, None]
    return Composite("interpolated", A, A @ truth, Absolute(), Box(-1.0, 1.0), np.zeros(4), truth)


def neighbourhood(seeds: int) -> pd.DataFrame:
    """f at the average, with a cap that is often, and one that is rarely, the step."""
    rows, K = [], checkpoints(STEPS)
    for problem, cap in ((interpolated(), 2.0), (robust_regression(), 2.0), (robust_regression(), 0.05)):
        path, at = free_run(problem, cap, 0.9, STEPS, seeds, by_step=False), problem.solution
        bound = theory.schedule_free_neighbourhood(
            K,
            cap=cap,
            G=problem.constants.G,
            sigma_sq=float(problem.value(at)) - problem.lower_bound,
            penalty=float(problem.penalty(at)),
            D_sq=distance_sq(problem),
        )
        samples = problem.value(path.x[K]) - problem.lower_bound
        rows.append(table(f"{problem.name}, cap {cap:g}", K, samples, bound, path.truncated))
    return pd.concat(rows)


def noise(seeds: int) -> pd.DataFrame:
    """||x - x_0||^2 over the sum of all squared steps, against its limit V(r).

    Steps are orthogonal to each other and of one length, as those of pure noise are on average, so nothing is drawn.
    """
    rows = []
    for power in POWERS:
        length, one = 2000, np.ones(1)
        z, x, numbers = np.zeros(length), np.zeros(length), Averaging(0 * one, 0 * one)
        for k in range(length):
            z[k] = 1.0
            share, numbers = next_share(numbers, k * one, one, power)
            x += share * (z - x)
        off = abs(float(square(x)) / length - noise_growth(power))
        row = {"problem": f"r = {power:g}", "K": length, "measured": off, "half": 0.0, "bound": (1 + power) / length}
        rows.append(row | {"truncated": np.nan})
    return pd.DataFrame(rows)
