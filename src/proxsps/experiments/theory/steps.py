"""One-step inequalities in exact expectation: at points of runs, a step is taken with every sample there is.

With finitely many samples an expectation is a mean, so that nothing here is estimated. For each problem the row of the
point with the largest quotient left / right is kept: K is the number of inequalities that were evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pandas as pd

from proxsps import runs, theory
from proxsps.core import schedules
from proxsps.core.models import truncated_model
from proxsps.experiments.theory.rates import (
    box_envelope,
    drift_to_wall,
    noisy_shrinkage,
    pure_shrinkage,
    smooth_envelope,
    soft_landing,
)
from proxsps.experiments.theory.runs import prox_sps, run
from proxsps.problems.composite import (
    PROBLEMS,
    Composite,
    Constants,
    box_least_squares,
    cauchy_regression,
    phase_retrieval,
    ridge,
    robust_regression,
    sparse_logistic,
)
from proxsps.problems.losses import Absolute
from proxsps.regularizers import Zero
from proxsps.theory.moreau import square

POINTS, STEPS = 40, 200  # points at which steps are tried, and the length of the runs they come from


def visited(problem: Composite, alpha: float) -> np.ndarray:
    """Points of a few runs with alpha / sqrt(k + 1), and the solution: (POINTS, n)."""
    path = run(problem, prox_sps(problem), partial(schedules.sqrt_decay, alpha=alpha), STEPS, seeds=3)
    along = path.points[np.linspace(0, STEPS, POINTS // 3, dtype=int)].reshape(-1, problem.A.shape[1])
    return np.concatenate([problem.solution[None], along])


def all_steps(problem: Composite, x: np.ndarray, alpha: float) -> np.ndarray:
    """x+ for every point and every sample: (points, N, n)."""
    gap = problem.losses(x) - problem.lower_bound
    rows = np.repeat(x, problem.size, axis=0)
    g = problem.gradients(x).reshape(rows.shape)
    y = runs.step(rows, gap.ravel(), g, np.full(len(rows), alpha), problem.phi).points
    return y.reshape(*x.shape[:-1], problem.size, -1)


def worst(problem: str, sides: theory.Sides) -> pd.DataFrame:
    """The row of the largest quotient of all that were evaluated."""
    left, right = np.broadcast_arrays(sides.left, sides.right)
    quotient = left / np.maximum(right, 1e-300)
    # If both sides are rounding errors, a quotient means nothing.
    quotient = np.where(np.maximum(np.abs(left), np.abs(right)) > 1e-6, quotient, 0.0)
    at = np.unravel_index(int(np.argmax(quotient)), quotient.shape)
    columns = {"problem": problem, "K": left.size, "measured": float(left[at]), "half": 0.0, "bound": float(right[at])}
    return pd.DataFrame([columns | {"truncated": np.nan}])


def joined(sides: list[theory.Sides]) -> theory.Sides:
    """Many evaluations of one inequality as one."""
    return theory.Sides(*(np.concatenate([np.ravel(side) for side in part]) for part in zip(*sides, strict=True)))


def _steps_to_try(problem: Composite) -> tuple[float, ...]:
    """From well below the theorems' limit 1/L to close to it; for losses that are not smooth, around 1."""
    L = problem.constants.L
    scale = 1 / L if 0.05 < L < np.inf else 1.0
    return (0.05 * scale, 0.4 * scale, 0.9 * scale)


def model_inequality(seeds: int) -> pd.DataFrame:
    """Lemma on the truncated model: f_x(y; s) <= f(y; s) + rho_s/2 ||y - x||^2, sample by sample."""

    def sides(problem: Composite, x: np.ndarray) -> theory.Sides:
        models = _models(problem, x)
        rho = problem.loss.weak * (problem.A**2).sum(1)
        return theory.Sides(models, problem.losses(x)[None] + rho / 2 * _pairwise(x)[:, :, None])

    return _model_rows(sides, PROBLEMS.values())


def model_slope(seeds: int) -> pd.DataFrame:
    """Property (B4): f_x(x; s) - f_x(y; s) <= G_s ||x - y|| for points where iterates can be."""

    def sides(problem: Composite, x: np.ndarray) -> theory.Sides:
        fall = np.maximum(problem.losses(x)[:, None] - _models(problem, x), 0)
        return theory.Sides(fall, problem.slopes * np.sqrt(_pairwise(x))[:, :, None])

    return _model_rows(sides, (box_least_squares, sparse_logistic, robust_regression, phase_retrieval))


def _model_rows(
    sides: Callable[[Composite, np.ndarray], theory.Sides], makers: Iterable[Callable[[], Composite]]
) -> pd.DataFrame:
    problems = [make() for make in makers]
    return pd.concat([worst(problem.name, sides(problem, visited(problem, 0.5)[::4])) for problem in problems])


def _models(problem: Composite, x: np.ndarray) -> np.ndarray:
    """f_x(y; s) for all pairs of points and all samples: (points x, points y, N)."""
    shape = (len(x), problem.size, x.shape[1])
    return np.stack([sample_models(problem, x, np.broadcast_to(y, shape)) for y in x], axis=1)


def sample_models(problem: Composite, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """f_x(y; s) with one point y for each x and each sample: y (points, N, n) to (points, N)."""
    values, gradients = problem.losses(x), problem.gradients(x)
    models = [
        truncated_model(values[j, i], gradients[j, i], problem.lower_bound, x[j], y[j, i])
        for j, i in np.ndindex(values.shape)
    ]
    return np.reshape(models, values.shape)


def _pairwise(x: np.ndarray) -> np.ndarray:
    return square(x[:, None] - x[None])


def basic_inequality(seeds: int) -> pd.DataFrame:
    """The basic inequality, for each sample, with x the solution, the start and another point of a run."""
    rows = []
    for make in PROBLEMS.values():
        problem = make()
        parts = []
        for alpha in _steps_to_try(problem):
            x = visited(problem, alpha)[::5]
            y = all_steps(problem, x, alpha)
            next_model = sample_models(problem, x, y) + problem.penalty(y)
            parts += [
                theory.basic_inequality(
                    alpha=alpha,
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


def convex_recursion(seeds: int) -> pd.DataFrame:
    """The recursion of the smooth convex theorem."""

    def sides(c: Constants, alpha: float, distances: dict[str, np.ndarray]) -> theory.Sides:
        theta = theory.smallest_theta(alpha, c.L)
        return theory.convex_recursion(alpha=alpha, lam=c.lam, theta=theta, beta=c.beta, **distances)

    makers = (ridge, box_least_squares, sparse_logistic, noisy_shrinkage, drift_to_wall, soft_landing)
    return _recursion_rows(sides, makers)


def kink() -> Composite:
    """|x| on the line, from just beside its kink, with a lower bound far below: tight in the noise of the corollary."""
    A, b = np.ones((1, 1)), np.zeros(1)
    return Composite("kink", A, b, Absolute(), Zero(), np.array([1e-4]), planted=np.zeros(1), lower_bound=-1e3)


def bounded_recursion(seeds: int) -> pd.DataFrame:
    """The recursion behind the strongly convex corollary."""

    def sides(c: Constants, alpha: float, distances: dict[str, np.ndarray]) -> theory.Sides:
        return theory.bounded_recursion(alpha=alpha, lam=c.lam, G=c.G, **distances)

    return _recursion_rows(sides, (robust_regression, box_least_squares, kink))


def _recursion_rows(
    sides: Callable[[Constants, float, dict[str, np.ndarray]], theory.Sides], makers: Iterable[Callable[[], Composite]]
) -> pd.DataFrame:
    rows = []
    for problem in (make() for make in makers):
        parts = [sides(problem.constants, alpha, _distances(problem, alpha)) for alpha in _steps_to_try(problem)]
        rows.append(worst(problem.name, joined(parts)))
    return pd.concat(rows)


def _distances(problem: Composite, alpha: float) -> dict[str, np.ndarray]:
    """||x - x*||^2, E ||x+ - x*||^2 and E psi(x+) - psi* at visited points."""
    x = visited(problem, alpha)
    y = all_steps(problem, x, alpha)
    return {
        "distance_sq": square(x - problem.solution),
        "next_distance_sq": square(y - problem.solution).mean(-1),
        "next_gap": problem.objective(y).mean(-1) - problem.optimum,
    }


def bounded_envelope_recursion(seeds: int) -> pd.DataFrame:
    """The recursion behind the weakly convex corollary."""
    problem = phase_retrieval()
    c = problem.constants
    eta = 1 / (2 * c.rho)
    parts = []
    for alpha in (0.02 * eta, 0.2 * eta, 0.8 * eta):
        x = visited(problem, alpha)
        near = box_envelope(problem, x, eta).prox
        after = square(all_steps(problem, x, alpha) - near[:, None]).mean(-1)
        parts.append(
            theory.bounded_envelope_recursion(
                alpha=alpha, rho=c.rho, eta=eta, G=c.G, distance_sq=square(x - near), next_distance_sq=after
            )
        )
    return worst(problem.name, joined(parts))


def envelope_recursion(seeds: int) -> pd.DataFrame:
    """The recursion of the smooth weakly convex theorem."""
    rows = []
    for problem, eta in ((cauchy_regression(), 1.0), (noisy_shrinkage(), 40.0), (pure_shrinkage(), 40.0)):
        c = problem.constants
        limit = theory.envelope_alpha(L=c.L, theta=1e6, eta=eta, lam=c.lam, rho=c.rho)
        parts = []
        for alpha in (0.02 * limit, 0.3 * limit, 0.95 * limit):
            x = visited(problem, alpha)
            y = all_steps(problem, x, alpha)
            here = smooth_envelope(problem, x, eta)
            there = smooth_envelope(problem, y, eta)
            parts.append(
                theory.envelope_recursion(
                    alpha=alpha,
                    lam=c.lam,
                    rho=c.rho,
                    eta=eta,
                    theta=theory.smallest_theta(alpha, c.L + 1 / eta),
                    beta=c.beta,
                    gap=here.value - problem.optimum,
                    next_gap=there.value.mean(-1) - problem.optimum,
                    gradient_sq=square(here.gradient),
                )
            )
        rows.append(worst(problem.name, joined(parts)))
    return pd.concat(rows)


SMOOTH = (ridge, box_least_squares, sparse_logistic, cauchy_regression)


def gradient_mapping_lower(seeds: int) -> pd.DataFrame:
    """1/4 ||grad env|| <= ||gradient mapping||."""
    return _mapping(lambda norm, mapping: theory.Sides(theory.gradient_mapping_range(norm).lower, mapping))


def gradient_mapping_upper(seeds: int) -> pd.DataFrame:
    """||gradient mapping|| <= 3/2 (1 + 1/sqrt(2)) ||grad env||."""
    return _mapping(lambda norm, mapping: theory.Sides(mapping, theory.gradient_mapping_range(norm).upper))


def _mapping(sides: Callable[[np.ndarray, np.ndarray], theory.Sides]) -> pd.DataFrame:
    rows = []
    for problem in (make() for make in SMOOTH):
        L = problem.constants.L
        x = visited(problem, 0.5)[1:]
        norm = np.sqrt(square(smooth_envelope(problem, x, 1 / (2 * L)).gradient))
        mapping = theory.gradient_mapping(x, problem.gradient(x), problem.phi.prox, 1 / L)
        rows.append(worst(problem.name, sides(norm, np.sqrt(square(mapping)))))
    return pd.concat(rows)


def norm_identity(seeds: int) -> pd.DataFrame:
    """||grad psi(p)|| = ||x - p|| / eta = ||grad env(x)||: the largest is at most 1 + 1e-8 times the smallest."""
    rows = []
    for problem in (ridge(), cauchy_regression()):
        eta, x = 1.0, visited(problem, 0.5)[1:]

        def gradient(y: np.ndarray, problem: Composite = problem) -> np.ndarray:
            return problem.gradient(y) + problem.phi.subgradient(y)

        def prox(z: np.ndarray, eta: float, problem: Composite = problem) -> np.ndarray:
            return smooth_envelope(problem, z, eta).prox

        norms = np.stack(theory.norm_identity(gradient, prox, x, eta))
        rows.append(worst(problem.name, theory.Sides(norms.max(0), norms.min(0) * (1 + 1e-8))))
    return pd.concat(rows)
