"""Rates against runs: each theorem's schedule over many seeds, and its quantity, measured, beside its bound.

Every function takes a number of seeds and gives the rows of one check: for each problem and number of steps K the mean
over runs, the half width of its 99 % confidence interval, and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core import schedules
from proxsps.core.array import Array
from proxsps.core.averaging import draw_iterate
from proxsps.experiments.theory.runs import DecSPS, Path, Step, averages, checkpoints, prox_sps, run, sps_max
from proxsps.problems.composite import (
    Composite,
    box_least_squares,
    cauchy_regression,
    phase_retrieval,
    ridge,
    robust_regression,
    scalar_quadratic,
    sparse_logistic,
)
from proxsps.regularizers import L1, L2, NonNegative, Regularizer

QUANTILE = 2.576  # of the normal distribution: 99 % of it lie within
STEPS = 1000
RARE = (0.5, 0.5, 0.5, 0.5, -2.0)  # of variance 1: many short steps down, a few long ones up
HORIZONS = (10, 30, 100, 300)


def table(problem: str, K: np.ndarray, samples: np.ndarray, bound: np.ndarray, truncated: float) -> pd.DataFrame:
    """Rows of one problem; samples (len(K), runs)."""
    half = QUANTILE * samples.std(1, ddof=1) / math.sqrt(samples.shape[1]) if samples.shape[1] > 1 else np.nan
    return pd.DataFrame(
        {"problem": problem, "K": K, "measured": samples.mean(1), "half": half, "bound": bound, "truncated": truncated}
    )


def gaps(problem: Composite, path: Path, K: np.ndarray, weights: np.ndarray, first: int = 1) -> np.ndarray:
    """psi - psi* at weighted means of the points from x^first on: (len(K), runs)."""
    points = path.points[first : first + len(weights)]
    return problem.objective(averages(points, weights, K)) - problem.optimum


def distance_sq(problem: Composite) -> float:
    """||x^0 - x*||^2."""
    return float(((problem.start - problem.solution) ** 2).sum())


# Worst cases on the line, where the bounds are tight


@dataclass(frozen=True)
class Wall(Regularizer):
    """phi(x) = lam/2 x^2 for x >= 0, infinity below; prox(z) = max(z, 0) / (1 + alpha lam). Acts per entry."""

    lam: float
    separable: ClassVar[bool] = True

    @property
    def strong_convexity(self) -> float:
        """The weight lam."""
        return self.lam

    def value(self, x: Array) -> Array:
        """lam/2 x^2 on the right side."""
        return NonNegative().value(x) + L2(self.lam).value(x)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Projection, then shrinkage."""
        return self.prox_diagonal(z, alpha)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """Projection, then shrinkage by 1 + alpha_i lam."""
        return L2(self.lam).prox_diagonal(NonNegative().prox(z, 1.0), alpha)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The direction over 1 + alpha lam where z > 0."""
        return L2(self.lam).prox_jvp(z, y, NonNegative().prox_jvp(z, y, v, alpha), alpha)


def drift_to_wall(lam: float = 0.0) -> Composite:
    """A noisy, almost linear loss pushes x against a wall: means of points have no smaller gap than the points.

    Tight in the noise of (b), and with a small lam > 0 in that of (a).
    """
    return scalar_quadratic(Wall(lam), name="drift to a wall", curvature=1e-4, slope=0.3, noise=RARE, start=0.0)


def noisy_shrinkage(start: float = 2.0) -> Composite:
    """A noisy, almost flat loss beside the squared l2 norm: tight in both terms of (c)."""
    return scalar_quadratic(L2(1.0), name="noisy shrinkage", curvature=1e-4, slope=0.0, noise=(-1.0, 1.0), start=start)


def pure_shrinkage() -> Composite:
    """The same without noise: tight in the start of (a) and of the weakly convex theorem."""
    return scalar_quadratic(L2(1.0), name="pure shrinkage", curvature=1e-4, slope=0.0, noise=(0.0,), start=1.0)


def soft_landing() -> Composite:
    """An almost flat loss beside the l1 norm, which carries x to 0 in some 100 steps: tight in the start of (b)."""
    return scalar_quadratic(L1(0.054), name="soft landing", curvature=1e-4, slope=0.0, noise=(0.0,), start=1.0)


# The checks


def smooth_strongly_convex(seeds: int) -> pd.DataFrame:
    """Part (a)."""
    parts = []
    for problem, k_0 in ((ridge(), 3.5), (drift_to_wall(lam=0.1), 1.0), (pure_shrinkage(), 5.0)):
        c, K = problem.constants, checkpoints(STEPS)
        schedule = partial(schedules.strongly_convex, lam=c.lam, k_0=k_0)
        path = run(problem, prox_sps(problem), schedule, STEPS, seeds)
        bound = theory.smooth_strongly_convex(K, lam=c.lam, k_0=k_0, L=c.L, beta=c.beta, D_sq=distance_sq(problem))
        parts.append(table(problem.name, K, gaps(problem, path, K, np.ones(STEPS)), bound, path.truncated))
    return pd.concat(parts)


def smooth_convex(seeds: int) -> pd.DataFrame:
    """Part (b)."""
    parts = []
    cases = ((sparse_logistic(), 1.0), (box_least_squares(), 0.5), (drift_to_wall(), 1.0), (soft_landing(), 1.0))
    for problem, alpha in cases:
        c = problem.constants
        path = run(problem, prox_sps(problem), partial(schedules.sqrt_decay, alpha=alpha), STEPS // 2, seeds)
        K = checkpoints(STEPS // 2)
        bound = theory.smooth_convex(K, alpha=alpha, L=c.L, beta=c.beta, D_sq=distance_sq(problem))
        parts.append(table(problem.name, K, gaps(problem, path, K, path.alphas), bound, path.truncated))
    return pd.concat(parts)


def smooth_constant_step(seeds: int) -> pd.DataFrame:
    """Part (c)."""
    parts = []
    for problem, alpha in ((ridge(), 0.3), (noisy_shrinkage(), 0.1)):
        c = problem.constants
        path = run(problem, prox_sps(problem), partial(schedules.constant, alpha=alpha), STEPS // 5, seeds)
        K = checkpoints(STEPS // 5)
        samples = ((path.points[K] - problem.solution) ** 2).sum(-1)
        bound = theory.smooth_constant_step(
            K, alpha=alpha, L=c.L, mu=c.mu, lam=c.lam, beta=c.beta, D_sq=distance_sq(problem)
        )
        parts.append(table(problem.name, K, samples, bound, path.truncated))
    return pd.concat(parts)


def bounded_strongly_convex(seeds: int) -> pd.DataFrame:
    """The corollary for convex losses with bounded subgradients."""
    problem, K = robust_regression(), checkpoints(STEPS)
    c = problem.constants
    path = run(problem, prox_sps(problem), partial(schedules.strongly_convex_bounded, lam=c.lam), STEPS, seeds)
    samples = gaps(problem, path, K, np.arange(2.0, STEPS + 2))
    bound = theory.bounded_strongly_convex(K, lam=c.lam, G=c.G, D_sq=distance_sq(problem))
    return table(problem.name, K, samples, bound, path.truncated)


def bounded_weakly_convex(seeds: int) -> pd.DataFrame:
    """The corollary for weakly convex losses with bounded subgradients: one run for each K."""
    problem = phase_retrieval()
    c = problem.constants
    eta = 1 / (2 * c.rho)
    Delta = float(box_envelope(problem, problem.start[None], eta).value[0]) - problem.optimum
    constants = {"rho": c.rho, "G": c.G, "Delta": Delta}
    rows, truncated = [], []
    for K in (*HORIZONS, STEPS):
        alpha = theory.bounded_weakly_convex_alpha(K=K, **constants)
        path = run(problem, prox_sps(problem), partial(schedules.constant, alpha=alpha), K, seeds)
        rows.append((box_envelope(problem, drawn(path), eta).gradient ** 2).sum(-1))
        truncated.append(path.truncated)
    bound = theory.bounded_weakly_convex((*HORIZONS, STEPS), **constants)
    return table(problem.name, np.array([*HORIZONS, STEPS]), np.stack(rows), bound, float(np.mean(truncated)))


def drawn(path: Path) -> np.ndarray:
    """A point of x^0 ... x^{K-1} for each run, drawn uniformly: (runs, n)."""
    rng = np.random.default_rng(2023)
    x = path.points[0]
    for k, point in enumerate(path.points[:-1]):
        x = draw_iterate(x, point, k, rng.random((len(point), 1)))
    return x


def box_envelope(problem: Composite, x: np.ndarray, eta: float) -> theory.Envelope:
    """The envelope of a problem in a box, at points of the box."""
    box, c = problem.phi, problem.constants

    def oracle(y: np.ndarray) -> theory.Cut:
        outward = y - box.prox(y, 1.0)
        inside = ~outward.any(-1)
        return theory.Cut(
            np.where(inside, problem.value(y), np.inf), np.where(inside[:, None], problem.gradient(y), outward)
        )

    def prox(z: np.ndarray, eta: float) -> np.ndarray:
        return theory.prox_by_cuts(oracle, z, eta, rho=c.rho, radius=2 * eta * c.G)

    return theory.moreau_envelope(problem.objective, prox, x, eta)


def smooth_envelope(problem: Composite, x: np.ndarray, eta: float) -> theory.Envelope:
    """The envelope of a problem with a smooth loss."""
    c = problem.constants

    def prox(z: np.ndarray, eta: float) -> np.ndarray:
        return theory.prox_by_gradient(problem.gradient, problem.phi.prox, z, eta, L=c.L, rho=c.rho, lam=c.lam)

    return theory.moreau_envelope(problem.objective, prox, x, eta)


def _weakly_convex_cases(scalar: Composite) -> list[tuple[Composite, float, float, dict[str, float]]]:
    """Problem, alpha, eta and the constants of the weakly convex theorem."""
    cases = []
    for problem, alpha, eta in ((cauchy_regression(), 0.3, 1.0), (scalar, 0.45, 20.0)):
        c = problem.constants
        Delta = float(smooth_envelope(problem, problem.start[None], eta).value[0]) - problem.optimum
        constants = {"L": c.L, "rho": c.rho, "lam": c.lam, "eta": eta, "beta": c.beta, "Delta": Delta}
        cases.append((problem, alpha, eta, constants))
    return cases


def _gradient_squares(problem: Composite, path: Path, eta: float) -> np.ndarray:
    """||grad env||^2 at x^0 ... x^{K-1}: (K, runs)."""
    points = path.points[:-1]
    flat = smooth_envelope(problem, points.reshape(-1, points.shape[-1]), eta).gradient
    return (flat**2).sum(-1).reshape(points.shape[:-1])


def envelope_sum(seeds: int) -> pd.DataFrame:
    """The weakly convex theorem as a sum, with constant steps."""
    parts = []
    for problem, alpha, eta, constants in _weakly_convex_cases(pure_shrinkage()):
        schedule = partial(schedules.constant, alpha=alpha)
        path = run(problem, prox_sps(problem), schedule, HORIZONS[-1], seeds)
        K = checkpoints(HORIZONS[-1])
        sums = np.cumsum(path.alphas[:, None] * _gradient_squares(problem, path, eta), axis=0)
        bound = theory.envelope_sum(path.alphas, **constants)
        parts.append(table(problem.name, K, sums[K - 1], bound[K - 1], path.truncated))
    return pd.concat(parts)


def envelope_sqrt(seeds: int) -> pd.DataFrame:
    """The weakly convex theorem for the best of K expectations."""
    parts = []
    for problem, alpha, eta, constants in _weakly_convex_cases(noisy_shrinkage()):
        schedule = partial(schedules.sqrt_decay, alpha=alpha)
        path = run(problem, prox_sps(problem), schedule, HORIZONS[-1], seeds)
        K = checkpoints(HORIZONS[-1])
        squares = _gradient_squares(problem, path, eta)
        best = [int(squares.mean(1)[:k].argmin()) for k in K]
        bound = theory.envelope_sqrt(K, alpha=alpha, **constants)
        parts.append(table(problem.name, K, squares[best], bound, path.truncated))
    return pd.concat(parts)


def envelope_horizon(seeds: int) -> pd.DataFrame:
    """The weakly convex theorem for a drawn point and alpha / sqrt(K): one run for each K."""
    parts = []
    for problem, alpha, eta, constants in _weakly_convex_cases(pure_shrinkage()):
        rows, truncated = [], []
        for K in HORIZONS:
            schedule = partial(schedules.horizon, alpha=2 * alpha, K=K)
            path = run(problem, prox_sps(problem), schedule, K, seeds)
            rows.append((smooth_envelope(problem, drawn(path), eta).gradient ** 2).sum(-1))
            truncated.append(path.truncated)
        bound = np.array([theory.envelope_horizon(K, alpha=2 * alpha, **constants) for K in HORIZONS])
        parts.append(table(problem.name, np.array(HORIZONS), np.stack(rows), bound, float(np.mean(truncated))))
    return pd.concat(parts)


def sps_max_neighbourhood(seeds: int) -> pd.DataFrame:
    """SPS_max on the regularised loss, lower bound 0, gamma_b = 1."""
    return _published(seeds, sps_max, sps_max_bound)


def sps_max_bound(K: np.ndarray, problem: Composite, gamma_b: float = 1.0) -> np.ndarray:
    """The neighbourhood bound of SPS_max on f_i + lam/2 ||.||^2."""
    c, at_solution = problem.constants, regularised_losses(problem)
    return theory.sps_max_neighbourhood(
        K,
        L_max=c.L_max + c.lam,
        gamma_b=gamma_b,
        sigma_sq=theory.interpolation_constant(at_solution, problem.lower_bound),
        D_sq=distance_sq(problem),
    )


def dec_sps_rate(seeds: int) -> pd.DataFrame:
    """DecSPS on the regularised loss, lower bound 0, gamma_b = 1, c_k = sqrt(k + 1)."""
    return _published(seeds, DecSPS, dec_sps_bound)


def dec_sps_bound(K: np.ndarray, problem: Composite, gamma_b: float = 1.0) -> np.ndarray:
    """The rate of DecSPS on f_i + lam/2 ||.||^2, each of which is lam-strongly convex."""
    c, at_solution = problem.constants, regularised_losses(problem)
    radius_sq = theory.dec_sps_radius(
        mu=c.lam,
        gamma_b=gamma_b,
        worst_gap=float(at_solution.max()) - problem.lower_bound,
        D_sq=distance_sq(problem),
    )
    sigma_sq = theory.interpolation_constant(at_solution, problem.lower_bound)
    return theory.dec_sps_rate(
        K, c_0=1.0, L_max=c.L_max + c.lam, gamma_b=gamma_b, sigma_sq=sigma_sq, radius_sq=radius_sq
    )


def regularised_losses(problem: Composite) -> np.ndarray:
    """f_i(x*) + phi(x*) for all samples."""
    return problem.losses(problem.solution) + problem.penalty(problem.solution)


def _published(
    seeds: int, method: Callable[[Composite], Step], bound: Callable[[np.ndarray, Composite], np.ndarray]
) -> pd.DataFrame:
    problem, K = ridge(), checkpoints(STEPS)
    path = run(problem, method(problem), partial(schedules.constant, alpha=1.0), STEPS, seeds)
    samples = gaps(problem, path, K, np.ones(STEPS), first=0)
    return table(problem.name, K, samples, bound(K, problem), path.truncated)
