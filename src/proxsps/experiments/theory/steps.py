"""One-step inequalities in exact expectation: at points of runs, a step is taken with every sample there is.

With finitely many samples an expectation is a mean, so that nothing here is estimated. For each problem the row of the
point with the largest quotient left / right is kept: K is the number of inequalities that were evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from proxsps import runs, theory
from proxsps.core import schedules
from proxsps.core.models import truncated_model
from proxsps.experiments.theory.checks import Sided, exact
from proxsps.experiments.theory.line import drift_to_wall, noisy_shrinkage, pure_shrinkage, soft_landing
from proxsps.experiments.theory.rates import box_envelope, smooth_envelope
from proxsps.experiments.theory.runs import prox_sps, run
from proxsps.problems.composite import (
    PROBLEMS,
    Composite,
    box_least_squares,
    cauchy_regression,
    phase_retrieval,
    ridge,
    robust_regression,
    sparse_logistic,
)
from proxsps.problems.losses import Absolute, Floats
from proxsps.regularizers import Zero
from proxsps.theory.moreau import square

POINTS, STEPS = 40, 200  # points at which steps are tried, and the length of the runs they come from


def visited(problem: Composite, alpha: float) -> Floats:
    """Points of a few runs with alpha / sqrt(k + 1), and the solution: (POINTS, n)."""
    path = run(problem, prox_sps(problem), partial(schedules.sqrt_decay, alpha=alpha), STEPS, seeds=3)
    along = path.points[np.linspace(0, STEPS, POINTS // 3, dtype=int)].reshape(-1, problem.A.shape[1])
    return np.concatenate([problem.solution[None], along])


def all_steps(problem: Composite, x: Floats, alpha: float) -> Floats:
    """x+ for every point and every sample: (points, N, n)."""
    gap = problem.losses(x) - problem.lower_bound
    rows = np.repeat(x, problem.size, axis=0)
    g = problem.gradients(x).reshape(rows.shape)
    y = runs.step(rows, gap.ravel(), g, np.full(len(rows), alpha), problem.phi).points
    found: Floats = y.reshape(*x.shape[:-1], problem.size, -1)
    return found


def at_targets(problem: Composite, x: Floats, z: Floats, new: Floats, inequality: Callable[..., theory.Sides]) -> Sided:
    """A basic inequality for steps from z with models at x: at the solution, the start and another point of a run."""
    next_model = sample_models(problem, x, new) + problem.penalty(new)
    for target in (problem.solution, problem.start, z[-1]):
        yield (
            problem.name,
            inequality(
                lam=problem.constants.lam,
                distance_sq=square(z - target)[:, None],
                next_distance_sq=square(new - target),
                move_sq=square(new - z[:, None]),
                model=sample_models(problem, x, np.broadcast_to(target, new.shape)) + problem.penalty(target),
                next_model=next_model,
            ),
        )


def _steps_to_try(problem: Composite) -> tuple[float, ...]:
    """From well below the theorems' limit 1/L to close to it; for losses that are not smooth, around 1."""
    L = problem.constants.L
    scale = 1 / L if 0.05 < L < np.inf else 1.0
    return (0.05 * scale, 0.4 * scale, 0.9 * scale)


@exact("model", "Lemma on the truncated model")
def model_inequality() -> Sided:
    """f_x(y; s) <= f(y; s) + rho_s/2 ||y - x||^2.

    Needs f(.; s) rho_s-weakly convex, C(s) <= inf f(.; s).
    """
    for problem in (make() for make in PROBLEMS.values()):
        x = visited(problem, 0.5)[::4]
        rho = problem.loss.weak * (problem.A**2).sum(1)
        right = problem.losses(x)[None] + rho / 2 * _pairwise(x)[:, :, None]
        yield problem.name, theory.Sides(_models(problem, x), right)


@exact("model-slope", "Proposition on bounded subgradients, (B4)")
def model_slope() -> Sided:
    """f_x(x; s) - f_x(y; s) <= G_s ||x - y||.

    Needs subgradients of f(.; s) bounded by G_s.
    """
    for problem in (box_least_squares(), sparse_logistic(), robust_regression(), phase_retrieval()):
        x = visited(problem, 0.5)[::4]
        fall = np.maximum(problem.losses(x)[:, None] - _models(problem, x), 0)
        yield problem.name, theory.Sides(fall, problem.slopes * np.sqrt(_pairwise(x))[:, :, None])


def _models(problem: Composite, x: Floats) -> Floats:
    """f_x(y; s) for all pairs of points and all samples: (points x, points y, N)."""
    shape = (len(x), problem.size, x.shape[1])
    return np.stack([sample_models(problem, x, np.broadcast_to(y, shape)) for y in x], axis=1)


def sample_models(problem: Composite, x: Floats, y: Floats) -> Floats:
    """f_x(y; s) with one point y for each x and each sample: y (points, N, n) to (points, N)."""
    values, gradients = problem.losses(x), problem.gradients(x)
    models = [
        truncated_model(values[j, i], gradients[j, i], problem.lower_bound, x[j], y[j, i])
        for j, i in np.ndindex(values.shape)
    ]
    return np.reshape(models, values.shape)


def _pairwise(x: Floats) -> Floats:
    found: Floats = square(x[:, None] - x[None])
    return found


@exact("basic-inequality", "Lemma, basic inequality")
def basic_inequality() -> Sided:
    """(1 + alpha lam) ||x+ - x||^2 <= ||x^k - x||^2 - ||x+ - x^k||^2 + 2 alpha (psi_k(x) - psi_k(x+)).

    Needs phi lam-strongly convex; any alpha.
    """
    for problem in (make() for make in PROBLEMS.values()):
        for alpha in _steps_to_try(problem):
            x = visited(problem, alpha)[::5]
            inequality = partial(theory.basic_inequality, alpha=alpha)
            yield from at_targets(problem, x, x, all_steps(problem, x, alpha), inequality)


@exact("convex-recursion", "Smooth convex theorem, recursion")
def convex_recursion() -> Sided:
    """(1 + alpha lam) E ||x+ - x*||^2 + 2 alpha E (psi(x+) - psi*) <= ||x - x*||^2 + theta beta alpha^2.

    Needs f(.; s) convex, f L-smooth; alpha <= (1 - 1/theta)/L.
    """
    for make in (ridge, box_least_squares, sparse_logistic, noisy_shrinkage, drift_to_wall, soft_landing):
        problem = make()
        c = problem.constants
        for alpha in _steps_to_try(problem):
            theta, distances = theory.smallest_theta(alpha, c.L), _distances(problem, alpha)
            sides = theory.convex_recursion(alpha=alpha, lam=c.lam, theta=theta, beta=c.beta, **distances)
            yield problem.name, sides


def kink() -> Composite:
    """|x| on the line, from just beside its kink, with a lower bound far below: tight in the noise of the corollary."""
    A, b = np.ones((1, 1)), np.zeros(1)
    return Composite("kink", A, b, Absolute(), Zero(), np.array([1e-4]), planted=np.zeros(1), lower_bound=-1e3)


@exact("bounded-recursion", "Strongly convex corollary, its recursion")
def bounded_recursion() -> Sided:
    """(1 + alpha lam) E ||x+ - x*||^2 + 2 alpha E (psi(x+) - psi*) <= ||x - x*||^2 + 4 alpha^2 G^2.

    Needs f(.; s) convex with subgradients bounded by G_s; any alpha.
    """
    for problem in (robust_regression(), box_least_squares(), kink()):
        c = problem.constants
        for alpha in _steps_to_try(problem):
            sides = theory.bounded_recursion(alpha=alpha, lam=c.lam, G=c.G, **_distances(problem, alpha))
            yield problem.name, sides


def _distances(problem: Composite, alpha: float) -> dict[str, Floats]:
    """||x - x*||^2, E ||x+ - x*||^2 and E psi(x+) - psi* at visited points."""
    x = visited(problem, alpha)
    y = all_steps(problem, x, alpha)
    return {
        "distance_sq": square(x - problem.solution),
        "next_distance_sq": square(y - problem.solution).mean(-1),
        "next_gap": problem.objective(y).mean(-1) - problem.optimum,
    }


@exact("bounded-envelope-recursion", "Weakly convex corollary, its recursion")
def bounded_envelope_recursion() -> Sided:
    """E ||x+ - p||^2 <= (1 - alpha (1/eta - rho)) ||x - p||^2 + 4 alpha^2 G^2 / (1 - alpha/eta).

    Needs subgradients bounded by G_s; alpha < eta < 1/rho.
    """
    problem = phase_retrieval()
    c = problem.constants
    eta = 1 / (2 * c.rho)
    for alpha in (0.02 * eta, 0.2 * eta, 0.8 * eta):
        x = visited(problem, alpha)
        near = box_envelope(problem, x, eta).prox
        after = square(all_steps(problem, x, alpha) - near[:, None]).mean(-1)
        distances = {"distance_sq": square(x - near), "next_distance_sq": after}
        yield problem.name, theory.bounded_envelope_recursion(alpha=alpha, rho=c.rho, eta=eta, G=c.G, **distances)


@exact("envelope-recursion", "Smooth weakly convex theorem, recursion")
def envelope_recursion() -> Sided:
    """E env(x+) + alpha/2 (1 - eta (rho - lam)) ||grad env(x)||^2 <= env(x) + alpha^2 theta beta / (2 eta).

    Needs f L-smooth; rho < 1/eta + lam; alpha <= (1 - 1/theta)/(L + 1/eta) and <= 1/(1/eta + 2 lam - rho).
    """
    for problem, eta in ((cauchy_regression(), 1.0), (noisy_shrinkage(), 40.0), (pure_shrinkage(), 40.0)):
        c = problem.constants
        limit = theory.envelope_alpha(L=c.L, theta=1e6, eta=eta, lam=c.lam, rho=c.rho)
        for alpha in (0.02 * limit, 0.3 * limit, 0.95 * limit):
            x = visited(problem, alpha)
            here = smooth_envelope(problem, x, eta)
            there = smooth_envelope(problem, all_steps(problem, x, alpha), eta)
            sides = theory.envelope_recursion(
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
            yield problem.name, sides


@exact("mapping-lower", "Lemma on the gradient mapping, left")
def gradient_mapping_lower() -> Sided:
    """1/4 ||grad env^{1/(2L)}|| <= ||gradient mapping||.

    Needs f L-smooth, phi convex.
    """
    for name, norm, mapping in _mappings():
        yield name, theory.Sides(theory.gradient_mapping_range(norm).lower, mapping)


@exact("mapping-upper", "Lemma on the gradient mapping, right")
def gradient_mapping_upper() -> Sided:
    """||gradient mapping|| <= 3/2 (1 + 1/sqrt(2)) ||grad env^{1/(2L)}||.

    Needs f L-smooth, phi convex.
    """
    for name, norm, mapping in _mappings():
        yield name, theory.Sides(mapping, theory.gradient_mapping_range(norm).upper)


def _mappings() -> Iterator[tuple[str, Floats, Floats]]:
    """Problems, and the norms of the envelope's gradient and of the gradient mapping at visited points."""
    for problem in (ridge(), box_least_squares(), sparse_logistic(), cauchy_regression()):
        L = problem.constants.L
        x = visited(problem, 0.5)[1:]
        norm = np.sqrt(square(smooth_envelope(problem, x, 1 / (2 * L)).gradient))
        mapping = theory.gradient_mapping(x, problem.gradient(x), problem.phi.prox, 1 / L)
        yield problem.name, norm, np.sqrt(square(mapping))


@exact("norm-identity", "Identity of the envelope's gradient")
def norm_identity() -> Sided:
    """||grad psi(p)||, ||x - p||/eta and ||grad env(x)|| differ by less than 1e-8 of themselves.

    Needs psi differentiable, p = prox_{eta psi}(x).
    """
    for problem in (ridge(), cauchy_regression()):
        eta, x = 1.0, visited(problem, 0.5)[1:]

        def gradient(y: Floats, problem: Composite = problem) -> Floats:
            found: Floats = problem.gradient(y) + problem.phi.subgradient(y)
            return found

        def prox(z: Floats, eta: float, problem: Composite = problem) -> Floats:
            found: Floats = smooth_envelope(problem, z, eta).prox
            return found

        norms = np.stack(theory.norm_identity(gradient, prox, x, eta))
        yield problem.name, theory.Sides(norms.max(0), norms.min(0) * (1 + 1e-8))
