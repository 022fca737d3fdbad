"""Rates against runs: each theorem's schedule over many seeds, and its quantity, measured, beside its bound.

Every function takes a number of seeds and gives the rows of one check: for each problem and number of steps K the mean
over runs, the half width of its 99 % confidence interval, and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core import schedules
from proxsps.core.averaging import draw_iterate
from proxsps.experiments.theory.checks import rate
from proxsps.experiments.theory.line import drift_to_wall, noisy_shrinkage, pure_shrinkage, soft_landing
from proxsps.experiments.theory.runs import DecSPS, Path, Step, averages, checkpoints, prox_sps, run, sps_max
from proxsps.problems.composite import (
    Composite,
    box_least_squares,
    cauchy_regression,
    phase_retrieval,
    ridge,
    robust_regression,
    sparse_logistic,
)
from proxsps.problems.losses import Floats

QUANTILE = 2.576  # of the normal distribution: 99 % of it lie within
STEPS = 1000
HORIZONS = (10, 30, 100, 300)
GAP = r"$\mathbb{E}\,\psi(\bar x^K) - \psi^*$"
ENVELOPE = r"$\mathbb{E}\,\|\nabla \mathrm{env}(x_\sim^K)\|^2$"


def table(problem: str, K: np.ndarray, samples: Floats, bound: Floats, truncated: float) -> pd.DataFrame:
    """Rows of one problem; samples (len(K), runs)."""
    half = QUANTILE * samples.std(1, ddof=1) / math.sqrt(samples.shape[1]) if samples.shape[1] > 1 else np.nan
    return pd.DataFrame(
        {"problem": problem, "K": K, "measured": samples.mean(1), "half": half, "bound": bound, "truncated": truncated}
    )


def gaps(problem: Composite, path: Path, K: np.ndarray, weights: Floats, first: int = 1) -> Floats:
    """psi - psi* at weighted means of the points from x^first on: (len(K), runs)."""
    points = path.points[first : first + len(weights)]
    return problem.objective(averages(points, weights, K)) - problem.optimum


def distance_sq(problem: Composite) -> float:
    """||x^0 - x*||^2."""
    return float(((problem.start - problem.solution) ** 2).sum())


def at_solution(problem: Composite) -> dict[str, float]:
    """Constants of the neighbourhoods of steps without a learning rate."""
    at = problem.solution
    excess = float(problem.value(at)) - problem.lower_bound
    return {"sigma_sq": excess, "penalty": float(problem.penalty(at)), "D_sq": distance_sq(problem)}


@rate("bounded-weakly-convex", "Corollary, weakly convex case", ENVELOPE)
def bounded_weakly_convex(seeds: int) -> Iterator[pd.DataFrame]:
    """E ||grad env(drawn x)||^2 <= 8 rho Delta/K + 16 G sqrt(rho Delta/K).

    Needs subgradients bounded; alpha = 1/(2 rho + sqrt(4 rho G^2 K/Delta)).
    """
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
    yield table(problem.name, np.array([*HORIZONS, STEPS]), np.stack(rows), bound, float(np.mean(truncated)))


@rate("bounded-strongly-convex", "Corollary, (strongly) convex case", GAP)
def bounded_strongly_convex(seeds: int) -> Iterator[pd.DataFrame]:
    """E psi((k+1)-weighted mean) - psi* <= lam/(K+1)^2 ||x^0 - x*||^2 + 8 G^2/(lam (K+1)).

    Needs subgradients bounded, lam > 0; alpha_k = 2/(lam (k+1)).
    """
    problem, K = robust_regression(), checkpoints(STEPS)
    c = problem.constants
    path = run(problem, prox_sps(problem), partial(schedules.strongly_convex_bounded, lam=c.lam), STEPS, seeds)
    samples = gaps(problem, path, K, np.arange(2.0, STEPS + 2))
    bound = theory.bounded_strongly_convex(K, lam=c.lam, G=c.G, D_sq=distance_sq(problem))
    yield table(problem.name, K, samples, bound, path.truncated)


@rate("smooth-a", "Smooth convex theorem (a)", GAP)
def smooth_strongly_convex(seeds: int) -> Iterator[pd.DataFrame]:
    """E psi(mean) - psi* <= lam k_0/(2K) ||x^0 - x*||^2 + theta beta (1 + ln K)/(2 lam K).

    Needs f L-smooth, noise beta, lam > 0; alpha_k = 1/(lam (k + k_0)) <= (1 - 1/theta)/L.
    """
    for problem, k_0 in ((ridge(), 3.5), (drift_to_wall(lam=0.1), 1.0), (pure_shrinkage(), 5.0)):
        c, K = problem.constants, checkpoints(STEPS)
        schedule = partial(schedules.strongly_convex, lam=c.lam, k_0=k_0)
        path = run(problem, prox_sps(problem), schedule, STEPS, seeds)
        bound = theory.smooth_strongly_convex(K, lam=c.lam, k_0=k_0, L=c.L, beta=c.beta, D_sq=distance_sq(problem))
        yield table(problem.name, K, gaps(problem, path, K, np.ones(STEPS)), bound, path.truncated)


@rate("smooth-b", "Smooth convex theorem (b)", GAP)
def smooth_convex(seeds: int) -> Iterator[pd.DataFrame]:
    """E psi(alpha-weighted mean) - psi* <= (||x^0 - x*||^2/alpha + theta beta alpha (1 + ln K))/(4 sqrt(K+1) - 4).

    Needs f L-smooth, noise beta; alpha_k = alpha/sqrt(k+1), alpha <= (1 - 1/theta)/L.
    """
    cases = ((sparse_logistic(), 1.0), (box_least_squares(), 0.5), (drift_to_wall(), 1.0), (soft_landing(), 1.0))
    for problem, alpha in cases:
        c = problem.constants
        path = run(problem, prox_sps(problem), partial(schedules.sqrt_decay, alpha=alpha), STEPS // 2, seeds)
        K = checkpoints(STEPS // 2)
        bound = theory.smooth_convex(K, alpha=alpha, L=c.L, beta=c.beta, D_sq=distance_sq(problem))
        yield table(problem.name, K, gaps(problem, path, K, path.alphas), bound, path.truncated)


@rate("smooth-c", "Smooth convex theorem (c)", r"$\mathbb{E}\,\|x^K - x^*\|^2$")
def smooth_constant_step(seeds: int) -> Iterator[pd.DataFrame]:
    """E ||x^K - x*||^2 <= (1 + alpha (mu + 2 lam))^{-K} ||x^0 - x*||^2 + theta beta alpha/(mu + 2 lam).

    Needs f L-smooth, noise beta, mu + lam > 0; alpha <= (1 - 1/theta)/L.
    """
    for problem, alpha in ((ridge(), 0.3), (noisy_shrinkage(), 0.1)):
        c = problem.constants
        path = run(problem, prox_sps(problem), partial(schedules.constant, alpha=alpha), STEPS // 5, seeds)
        K = checkpoints(STEPS // 5)
        samples = ((path.points[K] - problem.solution) ** 2).sum(-1)
        bound = theory.smooth_constant_step(
            K, alpha=alpha, L=c.L, mu=c.mu, lam=c.lam, beta=c.beta, D_sq=distance_sq(problem)
        )
        yield table(problem.name, K, samples, bound, path.truncated)


def drawn(path: Path) -> Floats:
    """A point of x^0 ... x^{K-1} for each run, drawn uniformly: (runs, n)."""
    rng = np.random.default_rng(2023)
    x = path.points[0]
    for k, point in enumerate(path.points[:-1]):
        x = draw_iterate(x, point, k, rng.random((len(point), 1)))
    found: Floats = x
    return found


def box_envelope(problem: Composite, x: Floats, eta: float) -> theory.Envelope:
    """The envelope of a problem in a box, at points of the box."""
    box, c = problem.phi, problem.constants

    def oracle(y: Floats) -> theory.Cut:
        outward = y - box.prox(y, 1.0)
        inside = ~outward.any(-1)
        return theory.Cut(
            np.where(inside, problem.value(y), np.inf), np.where(inside[:, None], problem.gradient(y), outward)
        )

    def prox(z: Floats, eta: float) -> Floats:
        return theory.prox_by_cuts(oracle, z, eta, rho=c.rho, radius=2 * eta * c.G)

    return theory.moreau_envelope(problem.objective, prox, x, eta)


def smooth_envelope(problem: Composite, x: Floats, eta: float) -> theory.Envelope:
    """The envelope of a problem with a smooth loss."""
    c = problem.constants

    def prox(z: Floats, eta: float) -> Floats:
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


def _gradient_squares(problem: Composite, path: Path, eta: float) -> Floats:
    """||grad env||^2 at x^0 ... x^{K-1}: (K, runs)."""
    points = path.points[:-1]
    flat = smooth_envelope(problem, points.reshape(-1, points.shape[-1]), eta).gradient
    found: Floats = (flat**2).sum(-1).reshape(points.shape[:-1])
    return found


@rate(
    "envelope-sum",
    "Smooth weakly convex theorem, sum",
    r"$\sum_k \alpha_k\, \mathbb{E}\,\|\nabla \mathrm{env}(x^k)\|^2$",
)
def envelope_sum(seeds: int) -> Iterator[pd.DataFrame]:
    """sum_k alpha_k E ||grad env(x^k)||^2 <= (2 Delta + theta beta/eta sum_k alpha_k^2)/(1 - eta (rho - lam)).

    Needs as envelope-recursion, at all steps.
    """
    for problem, alpha, eta, constants in _weakly_convex_cases(pure_shrinkage()):
        schedule = partial(schedules.constant, alpha=alpha)
        path = run(problem, prox_sps(problem), schedule, HORIZONS[-1], seeds)
        K = checkpoints(HORIZONS[-1])
        sums = np.cumsum(path.alphas[:, None] * _gradient_squares(problem, path, eta), axis=0)
        bound = theory.envelope_sum(path.alphas, **constants)
        yield table(problem.name, K, sums[K - 1], bound[K - 1], path.truncated)


@rate(
    "envelope-sqrt",
    "Smooth weakly convex theorem, alpha/sqrt(k+1)",
    r"$\min_k\, \mathbb{E}\,\|\nabla \mathrm{env}(x^k)\|^2$",
)
def envelope_sqrt(seeds: int) -> Iterator[pd.DataFrame]:
    """min_k E ||grad env(x^k)||^2 <= (Delta/alpha + theta beta alpha (1 + ln K)/(2 eta))/((1 - eta (rho - lam))
    (sqrt(K+1) - 1)).

    Needs as envelope-recursion, at alpha.
    """  # noqa: D205
    for problem, alpha, eta, constants in _weakly_convex_cases(noisy_shrinkage()):
        schedule = partial(schedules.sqrt_decay, alpha=alpha)
        path = run(problem, prox_sps(problem), schedule, HORIZONS[-1], seeds)
        K = checkpoints(HORIZONS[-1])
        squares = _gradient_squares(problem, path, eta)
        best = [int(squares.mean(1)[:k].argmin()) for k in K]
        bound = theory.envelope_sqrt(K, alpha=alpha, **constants)
        yield table(problem.name, K, squares[best], bound, path.truncated)


@rate("envelope-horizon", "Smooth weakly convex theorem, alpha/sqrt(K)", ENVELOPE)
def envelope_horizon(seeds: int) -> Iterator[pd.DataFrame]:
    """E ||grad env(drawn x)||^2 <= (2 Delta/alpha + theta beta alpha/eta)/((1 - eta (rho - lam)) sqrt(K)).

    Needs as envelope-recursion, at alpha/sqrt(K).
    """
    for problem, alpha, eta, constants in _weakly_convex_cases(pure_shrinkage()):
        rows, truncated = [], []
        for K in HORIZONS:
            schedule = partial(schedules.horizon, alpha=2 * alpha, K=K)
            path = run(problem, prox_sps(problem), schedule, K, seeds)
            rows.append((smooth_envelope(problem, drawn(path), eta).gradient ** 2).sum(-1))
            truncated.append(path.truncated)
        bound = np.array([theory.envelope_horizon(K, alpha=2 * alpha, **constants) for K in HORIZONS])
        yield table(problem.name, np.array(HORIZONS), np.stack(rows), bound, float(np.mean(truncated)))


@rate("sps-max", "SPS_max, published neighbourhood", GAP)
def sps_max_neighbourhood(seeds: int) -> Iterator[pd.DataFrame]:
    """E f(mean) - f* <= ||x^0 - x*||^2/(alpha K) + 2 gamma_b sigma^2/alpha, alpha = min{1/(2 c L_max), gamma_b}.

    Needs f_i convex and L_i-smooth; c >= 1, any gamma_b.
    """
    return _published(seeds, sps_max, sps_max_bound)


def sps_max_bound(K: np.ndarray, problem: Composite, gamma_b: float = 1.0) -> Floats:
    """The neighbourhood bound of SPS_max on f_i + lam/2 ||.||^2."""
    c, at_solution = problem.constants, regularised_losses(problem)
    found: Floats = theory.sps_max_neighbourhood(
        K,
        L_max=c.L_max + c.lam,
        gamma_b=gamma_b,
        sigma_sq=theory.interpolation_constant(at_solution, problem.lower_bound),
        D_sq=distance_sq(problem),
    )
    return found


@rate("dec-sps", "DecSPS, published rate", GAP)
def dec_sps_rate(seeds: int) -> Iterator[pd.DataFrame]:
    """E f(mean) - f* <= (2 c_0 max{L_max, 1/(2 c_0 gamma_b)} D^2 + 2 sigma^2/c_0)/sqrt(K).

    Needs f_i strongly convex and L_i-smooth; c_k = c_0 sqrt(k+1), c_0 >= 1.
    """
    return _published(seeds, DecSPS, dec_sps_bound)


def dec_sps_bound(K: np.ndarray, problem: Composite, gamma_b: float = 1.0) -> Floats:
    """The rate of DecSPS on f_i + lam/2 ||.||^2, each of which is lam-strongly convex."""
    c, at_solution = problem.constants, regularised_losses(problem)
    radius_sq = theory.dec_sps_radius(
        mu=c.lam,
        gamma_b=gamma_b,
        worst_gap=float(at_solution.max()) - problem.lower_bound,
        D_sq=distance_sq(problem),
    )
    sigma_sq = theory.interpolation_constant(at_solution, problem.lower_bound)
    found: Floats = theory.dec_sps_rate(
        K, c_0=1.0, L_max=c.L_max + c.lam, gamma_b=gamma_b, sigma_sq=sigma_sq, radius_sq=radius_sq
    )
    return found


def regularised_losses(problem: Composite) -> Floats:
    """f_i(x*) + phi(x*) for all samples."""
    return problem.losses(problem.solution) + problem.penalty(problem.solution)


def _published(
    seeds: int, method: Callable[[Composite], Step], bound: Callable[[Floats, Composite], Floats]
) -> Iterator[pd.DataFrame]:
    """A method on the regularised loss, with lower bound 0 and gamma_b = 1; for DecSPS c_k = sqrt(k + 1)."""
    problem, K = ridge(), checkpoints(STEPS)
    path = run(problem, method(problem), partial(schedules.constant, alpha=1.0), STEPS, seeds)
    samples = gaps(problem, path, K, np.ones(STEPS), first=0)
    yield table(problem.name, K, samples, bound(K, problem), path.truncated)
