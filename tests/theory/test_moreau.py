"""Envelopes against closed forms, finite differences, scipy and cvxpy; the gradient mapping on both sides."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from proxsps import L1, L2, Box, theory
from proxsps.problems.composite import (
    box_least_squares,
    cauchy_regression,
    phase_retrieval,
    ridge,
    robust_regression,
    sparse_logistic,
)
from proxsps.theory import AssumptionError
from proxsps.theory.moreau import MAPPING_LOWER, MAPPING_UPPER, square


def rows(phi):
    return lambda y: np.array([float(phi.value(row)) for row in y])


def test_envelope_of_the_l1_norm_is_hubers_function():
    lam, eta = 0.7, 0.4
    x = np.linspace(-2, 2, 41)[:, None]
    envelope = theory.moreau_envelope(rows(L1(lam)), L1(lam).prox, x, eta)
    inside = np.abs(x[:, 0]) <= eta * lam
    huber = np.where(inside, x[:, 0] ** 2 / (2 * eta), lam * np.abs(x[:, 0]) - eta * lam**2 / 2)
    np.testing.assert_allclose(envelope.value, huber, atol=1e-15)
    np.testing.assert_allclose(envelope.gradient, np.clip(x / eta, -lam, lam), atol=1e-15)


def test_envelope_of_a_constraint_is_half_the_squared_distance():
    x = np.random.default_rng(0).normal(size=(20, 3)) * 2
    envelope = theory.moreau_envelope(rows(Box(-1.0, 1.0)), Box(-1.0, 1.0).prox, x, 0.3)
    distance_sq = (np.maximum(np.abs(x) - 1, 0) ** 2).sum(1)
    np.testing.assert_allclose(envelope.value, distance_sq / 0.6, atol=1e-14)


def test_envelope_takes_tensors():
    x = torch.randn(5, 3, dtype=torch.float64)
    envelope = theory.moreau_envelope(lambda y: 0.25 * square(y), L2(0.5).prox, x, 2.0)
    torch.testing.assert_close(envelope.gradient, x / 4)
    torch.testing.assert_close(envelope.value, square(x) / 8)


SMOOTH = [ridge, box_least_squares, sparse_logistic, cauchy_regression]


def prox_of(problem):
    c = problem.constants
    return lambda x, eta: theory.prox_by_gradient(
        problem.gradient, problem.phi.prox, x, eta, L=c.L, rho=c.rho, lam=c.lam
    )


@pytest.mark.parametrize("make", SMOOTH)
def test_gradient_of_the_envelope_by_finite_differences(make):
    problem, eta, h = make(), 1.3, 1e-5
    x = np.random.default_rng(1).normal(size=(4, problem.A.shape[1]))
    envelope = theory.moreau_envelope(problem.objective, prox_of(problem), x, eta)
    for i in range(x.shape[1]):
        shift = h * np.eye(x.shape[1])[i]
        up, down = (
            theory.moreau_envelope(problem.objective, prox_of(problem), x + s, eta).value for s in (shift, -shift)
        )
        np.testing.assert_allclose((up - down) / (2 * h), envelope.gradient[:, i], atol=1e-8)


def test_prox_by_gradient_against_cvxpy():
    problem, eta = sparse_logistic(), 2.0
    x = np.random.default_rng(2).normal(size=5)
    y = cp.Variable(5)
    loss = cp.sum(cp.logistic(-cp.multiply(problem.b, problem.A @ y))) / problem.size
    cp.Problem(cp.Minimize(loss + 0.05 * cp.norm1(y) + cp.sum_squares(y - x) / (2 * eta))).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12
    )
    np.testing.assert_allclose(prox_of(problem)(x, eta), y.value, atol=1e-6)


def test_prox_by_gradient_of_a_nonconvex_loss_against_scipy():
    problem, eta = cauchy_regression(), 4.0
    for x in np.random.default_rng(3).normal(size=(3, 2)) * 2:
        found = minimize(lambda y, x=x: problem.objective(y) + (y - x) @ (y - x) / (2 * eta), x, tol=1e-12).x
        np.testing.assert_allclose(prox_of(problem)(x, eta), found, atol=1e-6)


def cut(problem):
    """psi in a box, or with the squared l2 norm."""

    def oracle(y):
        if isinstance(problem.phi, L2):
            return theory.Cut(problem.objective(y), problem.gradient(y) + problem.phi.subgradient(y))
        outward = y - problem.phi.prox(y, 1.0)
        inside = ~outward.any(-1)
        value = np.where(inside, problem.value(y), np.inf)
        return theory.Cut(value, np.where(inside[:, None], problem.gradient(y), outward))

    return oracle


def test_prox_by_cuts_against_cvxpy():
    problem, eta = robust_regression(), 0.8
    x = np.random.default_rng(4).normal(size=(3, 3)) * 2
    found = theory.prox_by_cuts(cut(problem), x, eta, rho=0.0, radius=10.0)
    for point, target in zip(x, found, strict=True):
        y = cp.Variable(3)
        loss = cp.norm1(problem.A @ y - problem.b) / problem.size + 0.1 * cp.sum_squares(y)
        cp.Problem(cp.Minimize(loss + cp.sum_squares(y - point) / (2 * eta))).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(target, y.value, atol=2e-5)


def test_prox_by_cuts_of_a_weakly_convex_loss_in_a_box_against_a_grid():
    problem = phase_retrieval()
    c = problem.constants
    eta = 1 / (2 * c.rho)
    x = np.array([[1.4, 1.5], [0.1, -0.2], [1.0, -0.6]])
    found = theory.prox_by_cuts(cut(problem), x, eta, rho=c.rho, radius=2 * eta * c.G)
    axis = np.linspace(-1.5, 1.5, 601)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    values = problem.value(grid)
    for point, target in zip(x, found, strict=True):
        objective = values + square(grid - point) / (2 * eta)
        at = problem.objective(target) + square(target - point) / (2 * eta)
        assert at <= objective.min() + 1e-12
        np.testing.assert_allclose(target, grid[objective.argmin()], atol=0.05)
    np.testing.assert_allclose(found[2], x[2], atol=1e-6)  # the solution is its own proximal point


def test_prox_by_cuts_on_the_line_is_bisection():
    lam, eta = 0.7, 0.4
    x = np.linspace(-2, 2, 9)[:, None]
    found = theory.prox_by_cuts(
        lambda y: theory.Cut(lam * np.abs(y[:, 0]), lam * np.sign(y)), x, eta, rho=0.0, radius=2.0
    )
    np.testing.assert_allclose(found, L1(lam).prox(x, eta), atol=2e-6)


def test_solvers_say_when_they_give_up():
    problem = ridge()
    with pytest.raises(RuntimeError, match="from the solution after 3 steps"):
        theory.prox_by_gradient(problem.gradient, problem.phi.prox, np.ones(4), 5.0, L=1.0, rho=0.0, limit=3)
    with pytest.raises(RuntimeError, match="in 3 cuts"):
        theory.prox_by_cuts(cut(robust_regression()), np.ones((1, 3)), 1.0, rho=0.0, radius=5.0, limit=3)


def test_envelopes_that_do_not_exist_are_refused():
    problem = cauchy_regression()
    with pytest.raises(AssumptionError, match=r"rho < 1/eta \+ lam.*eta must be below"):
        prox_of(problem)(np.zeros((1, 2)), 100.0)
    with pytest.raises(AssumptionError, match="needs 0 < eta"):
        theory.moreau_envelope(problem.objective, prox_of(problem), np.zeros((1, 2)), -1.0)
    with pytest.raises(AssumptionError, match="Ball around x"):
        theory.prox_by_cuts(cut(problem), np.zeros((1, 2)), 1.0, rho=0.125, radius=0.0)


@pytest.mark.parametrize("make", [ridge, cauchy_regression])
def test_norm_identity(make):
    problem = make()
    x = np.random.default_rng(5).normal(size=(6, problem.A.shape[1]))
    norms = theory.norm_identity(lambda y: problem.gradient(y) + problem.phi.subgradient(y), prox_of(problem), x, 0.9)
    np.testing.assert_allclose(norms.gradient_at_prox, norms.envelope_gradient, rtol=1e-9)
    np.testing.assert_allclose(norms.scaled_distance, norms.envelope_gradient, rtol=1e-12)
    assert not np.allclose(norms.gradient_at_prox, np.sqrt(square(problem.gradient(x) + problem.phi.subgradient(x))))


def mapping_ratios(c, lam, x):
    """||G_{1/L}|| / ||grad env^{1/(2L)}|| for f = c/2 y^2 with |c| <= L = 1 and phi = lam |y|, at points x."""
    phi = L1(lam)
    mapping = theory.gradient_mapping(x, c * x, phi.prox, 1.0)
    prox = theory.prox_by_gradient(lambda y: c * y, phi.prox, x, 0.5, L=1.0, rho=max(-c, 0.0))
    return np.abs(mapping[:, 0]), np.abs(x - prox)[:, 0] / 0.5


def test_gradient_mapping_lies_in_its_range_and_the_upper_end_is_tight_within_a_factor_of_two():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(50, 1)) * 2
    quotients = []
    for c in np.linspace(-1, 1, 9):
        for lam in (0.0, 0.3, 1.5):
            mapping, envelope = mapping_ratios(c, lam, x)
            lower, upper = theory.gradient_mapping_range(envelope)
            assert (lower <= mapping + 1e-12).all()
            assert (mapping <= upper + 1e-12).all()
            moving = envelope > 1e-9
            quotients.append(mapping[moving] / envelope[moving])
    quotients = np.concatenate(quotients)
    assert (0.25, pytest.approx(2.5607, abs=1e-4)) == (MAPPING_LOWER, MAPPING_UPPER)
    assert quotients.max() == pytest.approx(1.5)  # a half of the upper constant would be refuted
    assert quotients.max() > MAPPING_UPPER / 2
    assert quotients.min() == pytest.approx(0.5)  # twice the lower constant would not: it is attained, not passed
