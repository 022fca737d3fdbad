"""Checks of the matched cap and of the distance as a bound, for every sample at points of runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core import schedules
from proxsps.core.caps import find_matched, l2_matched
from proxsps.core.dual import Evaluate, Found, height_off, search_dual, shared_loop
from proxsps.core.model import entry_ray_heights
from proxsps.core.step import Line, line_dual
from proxsps.experiments.theory.checks import Sided, exact, rate
from proxsps.experiments.theory.rates import at_solution, table
from proxsps.experiments.theory.runs import Step, averages, checkpoints, run
from proxsps.experiments.theory.steps import at_targets, visited
from proxsps.problems.composite import PROBLEMS, Composite, box_least_squares, ridge, sparse_logistic
from proxsps.problems.losses import Floats
from proxsps.regularizers import Regularizer
from proxsps.regularizers.structure import Entries
from proxsps.theory.moreau import square

CAPS = (0.05, 0.4, 3.0, 1e4)  # from below 1/(2L) to no cap at all
STEPS = 300
CONVEX = (ridge, box_least_squares, sparse_logistic)


def matched_step(x: Floats, gap: Floats, g: Floats, cap: Floats, phi: Regularizer) -> tuple[Floats, Floats]:
    """The new points (rows, n) and the step sizes (rows,) of the matched cap, for rows x, g and gaps f - C."""
    structure = phi.structure(x.shape[1:])
    if not isinstance(structure, Entries):
        lam = phi.strong_convexity
        d_sq, d_dot_x = ((part * g).sum(-1, keepdims=True) for part in (g, x))
        tau = l2_matched(gap, d_sq, d_dot_x, np.ones((1, 1)), np.full((1, 1), lam), cap, shared_loop).s
        return (x - tau[:, None] * g) / (1 + tau[:, None] * lam), tau
    psi = structure.psi
    tolerance, noise = 1e-14 * gap, 1e-16 * np.abs(g * x).sum(-1)

    def find(evaluate: Evaluate) -> Found:
        return search_dual(
            evaluate, gap, tolerance, 1e-15, 200, shared_loop, noise, certificate=height_off, at_zero=gap
        )

    tau = find_matched(partial(entry_ray_heights, x, g, psi, 1.0), gap, square(g), cap, find).s
    return np.where(tau[:, None] > 0, psi.prox(x - tau[:, None] * g, tau[:, None]), x), tau


def matched(problem: Composite) -> Step:
    """The matched cap on the problem's loss and regulariser; alpha is the cap."""

    def step(x: Floats, i: np.ndarray, alpha: Floats) -> tuple[Floats, Floats]:
        value, g = problem.sample(x, i)
        points, tau = matched_step(x, value - problem.lower_bound, g, alpha, problem.phi)
        return points, tau / alpha

    return step


def all_matched_steps(problem: Composite, y: Floats, z: Floats, cap: float) -> tuple[Floats, Floats]:
    """z+ (points, N, n) and tau (points, N) for every sample, by its model at y, which is z or another point."""
    g = problem.gradients(y)
    gap = problem.losses(y) + (g * (z - y)[:, None]).sum(-1) - problem.lower_bound
    rows = np.repeat(z, problem.size, axis=0)
    new, tau = matched_step(rows, gap.ravel(), g.reshape(rows.shape), np.full(len(rows), cap), problem.phi)
    return new.reshape(g.shape), tau.reshape(gap.shape)


@exact("matched-inequality", "Matched cap, basic inequality")
def matched_inequality() -> Sided:
    """(1 + tau lam) ||x+ - z||^2 <= ||x - z||^2 - ||x+ - x||^2 + 2 tau (psi_x(z) - psi_x(x+)).

    Needs phi lam-strongly convex; any cap.
    """
    for problem in (make() for make in PROBLEMS.values()):
        x = visited(problem, 0.5)[::5]
        for cap in CAPS:
            new, tau = all_matched_steps(problem, x, x, cap)
            yield from at_targets(problem, x, x, new, partial(theory.matched_inequality, tau=tau))


@exact("matched-recursion", "Matched cap, its recursion")
def matched_recursion() -> Sided:
    """(1 + tau lam) ||x+ - z||^2 + theta (f(x) - C) + 2 tau phi(x+) <= ||x - z||^2 + 2 tau (f(z) - C + phi(z)).

    Needs f(.; s) convex and L_s-smooth; theta = 2A(1 - L_s A) for caps A <= 1/(2 L_s), else 1/(2 L_s).

    At the solution and at the point itself, where it can be an equation.
    """
    for problem in (make() for make in CONVEX):
        x = visited(problem, 0.5)[::2]
        values, smooth = problem.losses(x), problem.loss.smooth * (problem.A**2).sum(1)
        for cap in CAPS:
            y, tau = all_matched_steps(problem, x, x, cap)
            for target in (problem.solution[None], x):
                sides = theory.matched_recursion(
                    tau=tau,
                    cap=cap,
                    L=smooth,
                    lam=problem.constants.lam,
                    distance_sq=square(x - target)[:, None],
                    next_distance_sq=square(y - target[:, None]),
                    gap=values - problem.lower_bound,
                    target_gap=problem.losses(target) - problem.lower_bound,
                    penalty=problem.penalty(target)[:, None],
                    next_penalty=problem.penalty(y),
                )
                yield problem.name, sides


@rate("matched-neighbourhood", "Matched cap, its neighbourhood", r"$\mathbb{E}\,f(\bar x^K) - C$")
def matched_neighbourhood(seeds: int) -> Iterator[pd.DataFrame]:
    """E f(mean) - C <= ||x^0 - z||^2/(theta K) + 2 A/theta (E f(z) - C + phi(z)).

    Needs f_i convex and L_i-smooth, phi >= 0; any cap A.

    f at the mean of all points, with a cap that is often, and one that is never, the step.
    """
    K = checkpoints(STEPS)
    for problem in (ridge(), sparse_logistic()):
        for cap in (0.2, 1e3):
            path = run(problem, matched(problem), partial(schedules.constant, alpha=cap), STEPS, seeds)
            samples = problem.value(averages(path.points[:-1], np.ones(STEPS), K)) - problem.lower_bound
            bound = theory.matched_neighbourhood(
                K,
                cap=cap,
                L_max=problem.constants.L_max,
                **at_solution(problem),
            )
            yield table(f"{problem.name}, cap {cap:g}", K, samples, bound, path.truncated)


@exact("distance-bound", "A distance is a lower bound")
def distance_bound() -> Sided:
    """the step with the bound max{C, m - r ||d||} is the best one within r, and that bound is below f(x*; s).

    Needs phi = 0; for the last part f(.; s) convex and r = ||x - x*||.

    Three rows for each problem: its objective against that of many other points of the ball, its length against r, and,
    for convex losses, the raised bound against f(x*), with r the distance of the solution.
    """
    for problem in (make() for make in PROBLEMS.values()):
        x = visited(problem, 0.5)[1::6]
        for alpha, share in itertools.product((0.3, 30.0), (0.1, 0.7, 3.0)):
            objective, length = _in_ball(problem, x, alpha, share)
            yield problem.name, objective
            yield f"{problem.name}, length", length
        if problem.loss.weak == 0:
            radius = np.sqrt(square(x - problem.solution))[:, None]
            slope = np.sqrt(square(problem.gradients(x)))
            values, C = problem.losses(x), problem.lower_bound
            raised = theory.raised_bound(value=values, C=C, slope=slope, radius=radius) - C
            yield f"{problem.name}, at x*", theory.Sides(raised, problem.losses(problem.solution) - C)


def _in_ball(problem: Composite, x: Floats, alpha: float, share: float) -> tuple[theory.Sides, theory.Sides]:
    """Objective and length of the step with a raised bound, in a diagonal metric; r is a share of the Polyak step."""
    C, n = problem.lower_bound, x.shape[1]
    rng = np.random.default_rng(0)
    metric = rng.uniform(0.5, 2, n)
    values, g = problem.losses(x), problem.gradients(x)
    slope = np.sqrt((g * g / metric).sum(-1))
    moving = slope > 1e-9
    radius = np.where(moving, share * (values - C) / np.where(moving, slope, 1.0), 1.0)
    raised = theory.raised_bound(value=values, C=C, slope=slope, radius=radius)
    tau = alpha * line_dual(Line(values - raised, alpha * slope**2)).u
    move = -tau[..., None] * g / metric

    def objective(v: Floats) -> Floats:
        found: Floats = np.maximum(values + (g * v).sum(-1), C) - C + (metric * v * v).sum(-1) / (2 * alpha)
        return found

    def length(v: Floats) -> Floats:
        found: Floats = np.sqrt((metric * v * v).sum(-1))
        return found

    def shortened(v: Floats) -> Floats:
        return v * np.minimum(1, radius / np.maximum(length(v), 1e-300))[..., None]

    others = _candidates(rng, move, g / metric, radius, shortened)
    return theory.Sides(objective(move), np.min([objective(v) for v in others], axis=0)), theory.Sides(
        length(move), radius
    )


def _candidates(
    rng: np.random.Generator,
    move: Floats,
    direction: Floats,
    radius: Floats,
    shortened: Callable[[Floats], Floats],
) -> list[Floats]:
    """Moves within the ball: along the slope, in all directions, and close to the one that is judged."""
    unit = direction / np.maximum(np.sqrt(square(direction)), 1e-300)[..., None]
    along = [shortened(-2 * part * radius[..., None] * unit) for part in np.linspace(0, 1, 41)]
    drawn = [shortened(radius[..., None] * rng.standard_normal(move.shape)) for _ in range(40)]
    near = [shortened(move + 0.01 * radius[..., None] * rng.standard_normal(move.shape)) for _ in range(40)]
    return [*along, *drawn, *near]
