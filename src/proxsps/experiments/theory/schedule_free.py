"""Checks of the schedule-free form, at points of its runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core.schedule_free import Averaging, gradient_point, next_share, noise_growth
from proxsps.experiments.theory.caps import CAPS, CONVEX, all_matched_steps, matched_step
from proxsps.experiments.theory.checks import Sided, exact, rate, row
from proxsps.experiments.theory.rates import at_solution, table
from proxsps.experiments.theory.runs import checkpoints
from proxsps.experiments.theory.steps import at_targets
from proxsps.problems.composite import PROBLEMS, Composite, robust_regression
from proxsps.problems.losses import Absolute, Floats
from proxsps.regularizers import Box
from proxsps.theory.moreau import square

STEPS = 60
MIXES = (0.5, 0.9)
POWERS = (0.0, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class FreePath:
    """All points of all runs, (K + 1, runs, n), and the weight of each z in its average, (K + 1, runs)."""

    x: Floats
    y: Floats
    z: Floats
    weights: Floats  # those of the starts are 0
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


@exact("free-inequality", "Schedule-free form, basic inequality")
def step_inequality() -> Sided:
    """(1 + tau lam) ||z+ - u||^2 <= ||z - u||^2 - ||z+ - z||^2 + 2 tau (psi_y(u) - psi_y(z+)).

    Needs phi lam-strongly convex; any cap; gradients at y.
    """
    for problem in (make() for make in PROBLEMS.values()):
        for cap, mix in ((CAPS[1], 0.9), (CAPS[3], 0.5)):
            path = free_run(problem, cap, mix, 40, 1)
            y, z = (part[::5, 0] for part in (path.y, path.z))
            new, tau = all_matched_steps(problem, y, z, cap)
            yield from at_targets(problem, y, z, new, partial(theory.matched_inequality, tau=tau))


@exact("free-average", "Schedule-free form, the average")
def average_inequality() -> Sided:
    """W (f(x; s) - C) <= (W - w) (f(x'; s) - C) + w (m - C), m the model at z.

    Needs f(.; s) convex; any steps and weights.
    """
    for problem in (make() for make in (*CONVEX, robust_regression)):
        for mix in MIXES:
            path, C = free_run(problem, CAPS[2], mix, 40, 3), problem.lower_bound
            y, z = path.y[1:], path.z[1:]
            models = problem.losses(y) + (problem.gradients(y) * (z - y)[..., None, :]).sum(-1)
            gaps = problem.losses(path.x) - C
            sides = theory.average_inequality(
                weight=path.weights[1:, :, None],
                total=path.weights.cumsum(0)[1:, :, None],
                gap=gaps[1:],
                last_gap=gaps[:-1],
                model_gap=models - C,
            )
            yield problem.name, sides


def interpolated() -> Composite:
    """Absolute loss in a box, without noise, so that all samples are 0 at one point; 12 samples, 4 variables."""
    rng = np.random.default_rng(8)
    A, truth = rng.standard_normal((12, 4)), np.array([0.8, -0.5, 1.0, 0.2])
    A /= np.sqrt(square(A))[:, None]
    return Composite("interpolated", A, A @ truth, Absolute(), Box(-1.0, 1.0), np.zeros(4), truth)


@rate("free-neighbourhood", "Schedule-free form, its neighbourhood", r"$\mathbb{E}\,f(x^K) - C$")
def neighbourhood(seeds: int) -> Iterator[pd.DataFrame]:
    """E f(x^K) - C <= (G sqrt(S sum w^2) + max w S/(2A))/sum w, S = ||x^0 - u||^2 + 2A(K+1)(E f(u) - C + phi(u)).

    Needs f_i convex, subgradients bounded by G, phi >= 0; weights k + 1, any cap A.

    f at the average, with a cap that is often, and one that is rarely, the step.
    """
    K = checkpoints(STEPS)
    for problem, cap in ((interpolated(), 2.0), (robust_regression(), 2.0), (robust_regression(), 0.05)):
        path = free_run(problem, cap, 0.9, STEPS, seeds, by_step=False)
        bound = theory.schedule_free_neighbourhood(
            K,
            cap=cap,
            G=problem.constants.G,
            **at_solution(problem),
        )
        samples = problem.value(path.x[K]) - problem.lower_bound
        yield table(f"{problem.name}, cap {cap:g}", K, samples, bound, path.truncated)


@rate("free-noise", "Schedule-free form, growth in noise", "", exact=True)
def noise(seeds: int) -> Iterator[pd.DataFrame]:
    """||x - x_0||^2 over the sum of squared steps differs from V(r) by at most (1 + r)/K.

    Needs orthogonal steps of one length.

    Steps are orthogonal to each other and of one length, as those of pure noise are on average, so nothing is drawn.
    """
    for power in POWERS:
        length, one = 2000, np.ones(1)
        z, x, numbers = np.zeros(length), np.zeros(length), Averaging(0 * one, 0 * one)
        for k in range(length):
            z[k] = 1.0
            share, numbers = next_share(numbers, k * one, one, power)
            x += share * (z - x)
        off = abs(float(square(x)) / length - noise_growth(power))
        yield row(f"r = {power:g}", length, off, (1 + power) / length)
