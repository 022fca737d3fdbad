"""Models and their properties (Lemma on the truncated model), and the steps of the full model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from proxsps.core.models import (
    full_logistic_step,
    full_squared_step,
    linear_model,
    prox_sps_model,
    proximal_objective,
    sps_model,
    truncated_model,
)

seeds = st.integers(0, 999)


def logistic(x, a):
    return np.logaddexp(0, -a @ x)


def logistic_gradient(x, a):
    return -a / (1 + np.exp(a @ x))


def phase_loss(x, a, b):
    """|<a, x>^2 - b|: weakly convex with rho = 2 ||a||^2, not convex."""
    return abs((a @ x) ** 2 - b)


def phase_gradient(x, a, b):
    return 2 * np.sign((a @ x) ** 2 - b) * (a @ x) * a


@given(seeds)
def test_truncated_model_is_convex_and_exact_at_its_point(seed):
    rng = np.random.default_rng(seed)
    x, d, y, z = rng.standard_normal((4, 5))
    m, C, t = 1.3, 0.4, rng.uniform()
    model = lambda point: truncated_model(m, d, C, x, point)  # noqa: E731
    assert model(t * y + (1 - t) * z) <= t * model(y) + (1 - t) * model(z) + 1e-13
    assert model(x) == m
    assert model(y) == max(linear_model(m, d, x, y), C)


@given(seeds)
def test_truncated_model_lies_below_a_convex_loss(seed):
    rng = np.random.default_rng(seed)
    x, y, a = 3 * rng.standard_normal((3, 4))
    model = truncated_model(logistic(x, a), logistic_gradient(x, a), 0.0, x, y)
    assert model <= logistic(y, a) * (1 + 1e-12) + 1e-13


@given(seeds)
def test_truncated_model_exceeds_a_weakly_convex_loss_by_at_most_its_curvature(seed):
    rng = np.random.default_rng(seed)
    x, y, a = rng.standard_normal((3, 4))
    b, rho = rng.uniform(0, 2), 2 * a @ a
    model = truncated_model(phase_loss(x, a, b), phase_gradient(x, a, b), 0.0, x, y)
    bound = phase_loss(y, a, b) + rho / 2 * (y - x) @ (y - x)
    assert model <= bound * (1 + 1e-12)


def test_weak_convexity_bound_is_needed():
    """Without the curvature term the inequality above fails: the loss is not convex."""
    a, b, x, y = np.ones(1), 1.0, np.array([0.1]), np.array([-0.5])
    assert truncated_model(phase_loss(x, a, b), phase_gradient(x, a, b), 0.0, x, y) > phase_loss(y, a, b)


def test_models_of_the_sum_differ_by_what_is_truncated():
    x, y, d = np.array([1.0, 2.0]), np.array([-3.0, -3.0]), np.array([1.0, 1.0])
    phi = lambda point: 0.5 * point @ point  # noqa: E731
    assert prox_sps_model(1.0, d, 0.0, x, y, phi) == 0.0 + phi(y)
    assert sps_model(1.0 + phi(x), d + x, 0.0, x, y) == 0.0
    assert proximal_objective(2.0, x, y, 0.5) == 2.0 + (y - x) @ (y - x)


@pytest.mark.parametrize("lam", [0.0, 0.7])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e3])
def test_full_squared_step_solves_its_normal_equations(alpha, lam):
    rng = np.random.default_rng(0)
    x, a = rng.standard_normal((2, 5))
    b = 0.8
    new = full_squared_step(x, a, b, alpha, lam)
    hessian = np.outer(a, a) + (lam + 1 / alpha) * np.eye(5)
    np.testing.assert_allclose(new, np.linalg.solve(hessian, a * b + x / alpha), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("label", [-1.0, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.7])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e4])
def test_full_logistic_step_is_stationary(alpha, lam, label):
    rng = np.random.default_rng(1)
    x, a = 2 * rng.standard_normal((2, 5))
    new = full_logistic_step(x, a, label, alpha, lam)

    def objective(y):
        return np.logaddexp(0, -label * a @ y) + lam / 2 * y @ y + (y - x) @ (y - x) / (2 * alpha)

    gradient = -label * a / (1 + np.exp(label * a @ new)) + lam * new + (new - x) / alpha
    # (new - x) / alpha carries the rounding of new, eps |x| / alpha.
    np.testing.assert_allclose(gradient, 0, atol=1e-14 * (1 + np.abs(x).max() / alpha) * 20)
    assert objective(new) <= minimize(objective, x).fun + 1e-9


@pytest.mark.parametrize("step", [full_squared_step, full_logistic_step])
def test_full_steps_of_many_runs_are_those_of_each(step):
    rng = np.random.default_rng(2)
    x, a = rng.standard_normal((2, 4, 3))
    b, alpha = np.where(rng.random((4, 1)) < 0.5, -1.0, 1.0), 10.0 ** rng.uniform(-2, 2, (4, 1))
    together = step(x, a, b, alpha, 0.3)
    for i in range(4):
        np.testing.assert_allclose(together[i], step(x[i], a[i], b[i, 0], alpha[i, 0], 0.3), rtol=1e-13)
