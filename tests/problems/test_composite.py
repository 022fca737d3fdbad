"""Small problems: constants against brute force, solutions against cvxpy, gradients by differences."""

import cvxpy as cp
import numpy as np
import pytest
from scipy.optimize import minimize

from proxsps import L1, L2, Box, Zero
from proxsps.problems.composite import (
    PROBLEMS,
    Composite,
    box_least_squares,
    cauchy_regression,
    easy_classification,
    easy_regression,
    phase_retrieval,
    ridge,
    robust_regression,
    scalar_quadratic,
    sparse_logistic,
)
from proxsps.problems.losses import Absolute, Cauchy, Logistic, Phase, Squared

LOSSES = {"squared": Squared(), "logistic": Logistic(), "absolute": Absolute(), "cauchy": Cauchy(), "phase": Phase()}
EVERY = [*PROBLEMS.values(), easy_regression, easy_classification]


@pytest.fixture(params=EVERY, ids=lambda make: make.__name__)
def problem(request) -> Composite:
    return request.param()


def inside(problem: Composite, count: int, seed: int = 0) -> np.ndarray:
    """Points where iterates can be."""
    x = np.random.default_rng(seed).normal(size=(count, problem.A.shape[1]))
    if isinstance(problem.phi, Box):
        return np.clip(x, problem.phi.lower, problem.phi.upper)
    radius = min(problem.constants.radius, 5.0)
    return x * (radius * np.random.default_rng(seed + 1).random((count, 1)) / np.linalg.norm(x, axis=1, keepdims=True))


@pytest.mark.parametrize("name", LOSSES)
def test_shape_of_the_losses(name):
    """Second differences on a fine grid attain the bounds that a loss claims, and do not pass them."""
    loss, b, h = LOSSES[name], np.array(1.0), 1e-3
    t = np.linspace(-6, 6, 4001)
    second = (loss.value(t + h, b) - 2 * loss.value(t, b) + loss.value(t - h, b)) / h**2
    assert second.max() <= loss.smooth + 1e-5
    if np.isfinite(loss.smooth):
        assert second.max() == pytest.approx(loss.smooth, abs=1e-4)
    assert second.min() == pytest.approx(loss.strong - loss.weak, abs=3e-3)
    assert loss.value(t, b).min() >= 0
    assert loss.value(t, b).min() == pytest.approx(0, abs=3e-3)
    slopes = np.abs(loss.slope(t, b))
    assert slopes.max() == pytest.approx(float(loss.steepest(np.array(6.0), b)), rel=1e-3)
    smooth = np.abs(np.diff(np.sign(loss.slope(t, b)), prepend=0)) < 2  # away from kinks
    numeric = (loss.value(t + h, b) - loss.value(t - h, b)) / (2 * h)
    assert np.abs(numeric - loss.slope(t, b))[smooth].max() < 5e-3


def test_gradients_by_finite_differences(problem):
    x, h = inside(problem, 5), 1e-6
    for i in range(x.shape[1]):
        shift = h * np.eye(x.shape[1])[i]
        numeric = (problem.losses(x + shift) - problem.losses(x - shift)) / (2 * h)
        np.testing.assert_allclose(numeric, problem.gradients(x)[..., i], atol=1e-5)
    np.testing.assert_allclose(problem.gradient(x), problem.gradients(x).mean(-2), atol=1e-14)
    i = np.arange(5) % problem.size
    value, g = problem.sample(x, i)
    np.testing.assert_allclose(value, problem.losses(x)[np.arange(5), i], rtol=1e-12)
    np.testing.assert_allclose(g, problem.gradients(x)[np.arange(5), i], atol=1e-15)
    plain = np.array([problem.value(row) + float(problem.phi.value(row)) for row in x])
    np.testing.assert_allclose(problem.objective(x), plain, rtol=1e-14)


def power_iteration(A: np.ndarray) -> float:
    v = np.ones(A.shape[1])
    for _ in range(3000):
        v = A.T @ (A @ v)
        v /= np.linalg.norm(v)
    return float(v @ (A.T @ (A @ v)) / len(A))


def test_smoothness_and_convexity(problem):
    c = problem.constants
    if not np.isfinite(c.L):
        return
    assert pytest.approx(problem.loss.smooth * power_iteration(problem.A)) == c.L
    assert c.L_max == pytest.approx(problem.loss.smooth * (problem.A**2).sum(1).max())
    x = inside(problem, 40)
    slope = ((problem.gradient(x)[:, None] - problem.gradient(x)[None]) ** 2).sum(-1) ** 0.5
    distance = ((x[:, None] - x[None]) ** 2).sum(-1) ** 0.5 + np.eye(40)
    assert (slope <= c.L * distance + 1e-12).all()
    product = ((problem.gradient(x)[:, None] - problem.gradient(x)[None]) * (x[:, None] - x[None])).sum(-1)
    assert (product >= (c.mu - c.rho) * distance**2 - np.eye(40) - 1e-12).all()
    if isinstance(problem.loss, Squared):
        shifted = c.L * np.eye(problem.A.shape[1]) - problem.A.T @ problem.A / problem.size
        values = np.linalg.eigvalsh(shifted)
        assert c.mu == pytest.approx(c.L - values[-1])


def test_noise_and_slopes_are_bounded_where_iterates_can_be(problem):
    c, x = problem.constants, inside(problem, 300)
    norms = np.linalg.norm(problem.gradients(x), axis=-1)
    if np.isfinite(c.G):
        assert (norms <= problem.slopes * (1 + 1e-12)).all()
        assert pytest.approx(float((problem.slopes**2).mean()) ** 0.5) == c.G
    if not np.isfinite(c.beta):
        return
    assert (problem.noise(x) <= c.beta * (1 + 1e-12)).all()
    # The largest noise that a search finds is not far below: the bound is not idle.
    box = problem.phi if isinstance(problem.phi, Box) else None
    reach = min(c.radius, 100.0)

    def within(y):
        return box.prox(y, 1.0) if box else y * min(1.0, reach / max(np.linalg.norm(y), 1e-300))

    found = max(-minimize(lambda y: -float(problem.noise(within(y))), start).fun for start in 20 * x[:6])
    assert c.beta / 5 <= found <= c.beta * (1 + 1e-9)


def test_noise_of_equal_rows_is_exact():
    problem = scalar_quadratic(Zero(), name="line", curvature=0.3, slope=0.7, noise=(-1.0, 0.5, 0.5), start=2.0)
    x = np.array([[-5.0], [0.0], [7.0]])
    np.testing.assert_allclose(problem.noise(x), 0.5)
    assert problem.constants.beta == pytest.approx(0.5)
    np.testing.assert_allclose(problem.gradient(np.zeros(1)), 0.7)
    np.testing.assert_allclose(problem.gradient(np.ones(1)), 1.0)
    general = Composite("rows", np.array([[1.0], [2.0]]), np.ones(2), Squared(), Zero(), np.zeros(1))
    assert general.constants.beta == np.inf  # no region, and a noise that grows


@pytest.mark.parametrize("make", [ridge, box_least_squares, sparse_logistic, robust_regression])
def test_solutions_against_cvxpy(make):
    problem = make()
    y = cp.Variable(problem.A.shape[1])
    t = problem.A @ y
    losses = {
        Squared: lambda: cp.sum_squares(t - problem.b) / 2,
        Logistic: lambda: cp.sum(cp.logistic(-cp.multiply(problem.b, t))),
        Absolute: lambda: cp.norm1(t - problem.b),
    }
    objective, limits = losses[type(problem.loss)]() / problem.size, []
    match problem.phi:
        case L2(lam=lam):
            objective += lam / 2 * cp.sum_squares(y)
        case L1(lam=lam):
            objective += lam * cp.norm1(y)
        case Box(lower=lower, upper=upper):
            limits = [y >= lower, y <= upper]
    cp.Problem(cp.Minimize(objective), limits).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(problem.solution, y.value, atol=1e-4)
    assert problem.optimum <= float(problem.objective(np.clip(y.value, -10, 10))) + 1e-12
    assert problem.optimum == pytest.approx(objective.value, abs=1e-8)


def test_solutions_are_stationary(problem):
    """A step of proximal gradient does not move them; for losses with kinks, no direction goes down."""
    x = problem.solution
    if np.isfinite(problem.constants.L):
        eta = 1 / problem.constants.L
        np.testing.assert_allclose(problem.phi.prox(x - eta * problem.gradient(x), eta), x, atol=1e-12)
    near = x + 1e-4 * np.random.default_rng(0).normal(size=(200, len(x)))
    assert (problem.objective(near) >= problem.optimum - 1e-12).all()


def test_solutions_have_what_makes_the_problems_interesting():
    assert (np.abs(box_least_squares().solution) == 0.5).any()
    assert (sparse_logistic().solution == 0).sum() == 3
    assert phase_retrieval().optimum == 0
    problem = cauchy_regression()
    value = problem.objective(np.stack(np.meshgrid(*[np.linspace(-4, 4, 161)] * 2), -1).reshape(-1, 2))
    assert problem.optimum <= value.min()


def test_constants_need_a_regulariser_at_the_origin_and_a_true_lower_bound():
    data = (np.ones((2, 1)), np.zeros(2), Squared())
    with pytest.raises(ValueError, match=r"off: needs a regulariser that is 0 at the origin, got phi\(0\) = 2"):
        Composite("off", *data, L2(1.0, np.array([2.0])), np.zeros(1))
    with pytest.raises(ValueError, match=r"lower_bound must not be above, got 0\.5"):
        Composite("high", *data, Zero(), np.zeros(1), lower_bound=0.5)


def test_absolute_loss_is_solved_with_the_squared_l2_norm_only():
    problem = Composite("none", np.ones((2, 1)), np.zeros(2), Absolute(), L1(0.1), np.zeros(1))
    with pytest.raises(ValueError, match=r"none: the absolute loss is solved with the regulariser L2\(lam\)"):
        _ = problem.solution
