"""Checks of the matched cap and of the distance as a bound, for every sample at points of runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core import schedules
from proxsps.core.caps import find_matched, l2_matched
from proxsps.core.dual import Evaluate, Found, height_off, search_dual, shared_loop
from proxsps.core.model import entry_ray_heights
from proxsps.core.step import Line, line_dual
from proxsps.experiments.theory.rates import distance_sq, table
from proxsps.experiments.theory.runs import Step, averages, checkpoints, run
from proxsps.experiments.theory.steps import joined, sample_models, visited, worst
from proxsps.problems.composite import PROBLEMS, Composite, box_least_squares, ridge, sparse_logistic
from proxsps.regularizers import Regularizer
from proxsps.regularizers.structure import Entries
from proxsps.theory.moreau import square

CAPS = (0.05, 0.4, 3.0, 1e4)  # from below 1/(2L) to no cap at all
STEPS = 300
CONVEX = (ridge, box_least_squares, sparse_logistic)


def matched_step(
    x: np.ndarray, gap: np.ndarray, g: np.ndarray, cap: np.ndarray, phi: Regularizer
) -> tuple[np.ndarray, np.ndarray]:
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

    def step(x: np.ndarray, i: np.ndarray, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, g = problem.sample(x, i)
        points, tau = matched_step(x, value - problem.lower_bound, g, alpha, problem.phi)
        return points, tau / alpha

    return step


def all_matched_steps(problem: Composite, x: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray]:
    """x+ (points, N, n) and tau (points, N) for every point and every sample."""
    gap = (problem.losses(x) - problem.lower_bound).ravel()
    rows = np.repeat(x, problem.size, axis=0)
    g = problem.gradients(x).reshape(rows.shape)
    y, tau = matched_step(rows, gap, g, np.full(len(rows), cap), problem.phi)
    return y.reshape(*x.shape[:-1], problem.size, -1), tau.reshape(-1, problem.size)


def matched_inequality(seeds: int) -> pd.DataFrame:
    """The basic inequality of the matched cap, at the solution, the start and a point of a run."""
    rows = []
    for make in PROBLEMS.values():
        problem = make()
        parts = []
        x = visited(problem, 0.5)[::5]
        for cap in CAPS:
            y, tau = all_matched_steps(problem, x, cap)
            next_model = sample_models(problem, x, y) + problem.penalty(y)
            parts += [
                theory.matched_inequality(
                    tau=tau,
                    lam=problem.constants.lam,
                    distance_sq=square(x - target)[:, None],
                    next_distance_sq=square(y - target),
                    move_sq=square(y - x[:, None]),
                    model=sample_models(problem, x, np.broadcast_to(target, y.shape)) + problem.penalty(target),
                    next_model=next_model,
                )
                for target in (problem.solution, problem.start, x[-1])
            ]
        rows.append(worst(problem.name, joined(parts)))
    return pd.concat(rows)


def matched_recursion(seeds: int) -> pd.DataFrame:
    """The recursion of the matched cap, at the solution and at the point itself, where it can be an equation."""
    rows = []
    for problem in (make() for make in CONVEX):
        parts = []
        x = visited(problem, 0.5)[::2]
        values, smooth = problem.losses(x), problem.loss.smooth * (problem.A**2).sum(1)
        for cap in CAPS:
            y, tau = all_matched_steps(problem, x, cap)
            parts += [
                theory.matched_recursion(
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
                for target in (problem.solution[None], x)
            ]
        rows.append(worst(problem.name, joined(parts)))
    return pd.concat(rows)


def matched_neighbourhood(seeds: int) -> pd.DataFrame:
    """f at the mean of all points, with a cap that is often, and one that is never, the step."""
    rows, K = [], checkpoints(STEPS)
    for problem in (ridge(), sparse_logistic()):
        at = problem.solution
        for cap in (0.2, 1e3):
            path = run(problem, matched(problem), partial(schedules.constant, alpha=cap), STEPS, seeds)
            samples = problem.value(averages(path.points[:-1], np.ones(STEPS), K)) - problem.lower_bound
            bound = theory.matched_neighbourhood(
                K,
                cap=cap,
                L_max=problem.constants.L_max,
                sigma_sq=float(problem.value(at)) - problem.lower_bound,
                penalty=float(problem.penalty(at)),
                D_sq=distance_sq(problem),
            )
            rows.append(table(f"{problem.name}, cap {cap:g}", K, samples, bound, path.truncated))
    return pd.concat(rows)


def distance_bound(seeds: int) -> pd.DataFrame:
    """A step with the bound max{C, m - r ||d||} minimises the truncated model in the ball of radius r, phi = 0.

    Three rows for each problem: its objective against that of many other points of the ball, its length against r, and,
    for convex losses, the raised bound against f(x*), with r the distance of the solution.
    """
    rows = []
    for make in PROBLEMS.values():
        problem = make()
        x = visited(problem, 0.5)[1::6]
        ball = [_in_ball(problem, x, alpha, share) for alpha in (0.3, 30.0) for share in (0.1, 0.7, 3.0)]
        rows.append(worst(problem.name, joined([objective for objective, _ in ball])))
        rows.append(worst(f"{problem.name}, length", joined([length for _, length in ball])))
        if problem.loss.weak == 0:
            radius = np.sqrt(square(x - problem.solution))[:, None]
            slope = np.sqrt(square(problem.gradients(x)))
            values, C = problem.losses(x), problem.lower_bound
            raised = theory.raised_bound(value=values, C=C, slope=slope, radius=radius) - C
            at_solution = np.broadcast_to(problem.losses(problem.solution) - C, raised.shape)
            rows.append(worst(f"{problem.name}, at x*", theory.Sides(raised, at_solution)))
    return pd.concat(rows)


def _in_ball(problem: Composite, x: np.ndarray, alpha: float, share: float) -> tuple[theory.Sides, theory.Sides]:
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

    def objective(v: np.ndarray) -> np.ndarray:
        return np.maximum(values + (g * v).sum(-1), C) - C + (metric * v * v).sum(-1) / (2 * alpha)

    def length(v: np.ndarray) -> np.ndarray:
        return np.sqrt((metric * v * v).sum(-1))

    def shortened(v: np.ndarray) -> np.ndarray:
        return v * np.minimum(1, radius / np.maximum(length(v), 1e-300))[..., None]

    others = _candidates(rng, move, g / metric, radius, shortened)
    return theory.Sides(objective(move), np.min([objective(v) for v in others], axis=0)), theory.Sides(
        length(move), radius
    )


def _candidates(
    rng: np.random.Generator,
    move: np.ndarray,
    direction: np.ndarray,
    radius: np.ndarray,
    shortened: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """Moves within the ball: along the slope, in all directions, and close to the one that is judged."""
    unit = direction / np.maximum(np.sqrt(square(direction)), 1e-300)[..., None]
    along = [shortened(-2 * part * radius[..., None] * unit) for part in np.linspace(0, 1, 41)]
    drawn = [shortened(radius[..., None] * rng.standard_normal(move.shape)) for _ in range(40)]
    near = [shortened(move + 0.01 * radius[..., None] * rng.standard_normal(move.shape)) for _ in range(40)]
    return [*along, *drawn, *near]
