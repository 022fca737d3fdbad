"""Ridge and logistic regression, the plane and the line: optima and the interpolation constant."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from proxsps.problems import (
    LogisticRegression,
    PlanarSquares,
    RidgeRegression,
    ScalarLogistic,
    ridge_interpolation_constant,
)


def regularised_gradient(problem, x: torch.Tensor, lam: float) -> torch.Tensor:
    x = x.detach().double().requires_grad_()
    data = [array.double() for array in problem.train_data()]
    (problem.loss({"x": x}, *data) + lam / 2 * x.square().sum()).backward()
    return x.grad


@pytest.mark.parametrize("lam", [1e-3, 1.0, 50.0])
def test_minimisers_are_stationary(lam):
    for problem in (RidgeRegression(dtype="float64"), PlanarSquares(dtype="float64"), PlanarSquares(a21=-3.0, b2=2.0)):
        gradient = regularised_gradient(problem, problem.minimiser(lam), lam)
        assert gradient.abs().max() < 1e-10
    for problem in (ScalarLogistic(dtype="float64"), ScalarLogistic(slope=-3.0, dtype="float64")):
        x = torch.tensor([problem.minimiser(lam)], dtype=torch.float64)
        assert regularised_gradient(problem, x, lam).abs().max() < 1e-12


def test_ridge_is_interpolated_by_its_true_point():
    problem = RidgeRegression(dtype="float64")
    A, b, x_true = problem.arrays()
    assert A.shape == (80, 100)
    assert 0 <= x_true.min() < x_true.max() <= 1
    np.testing.assert_array_equal(A @ x_true, b)
    params = {"x": torch.from_numpy(x_true)}
    assert problem.loss(params, *problem.train_data()) < 1e-25
    assert problem.validation_error(params, *problem.validation_data(4)) < 1e-25


@pytest.mark.parametrize("lam", [1e-4, 0.1, 10.0])
def test_interpolation_constant_by_brute_force(lam):
    """Minimise the regularised mean, and each regularised sample for itself, numerically."""
    rng = np.random.RandomState(0)
    A, b = rng.randn(6, 8), rng.randn(6)

    def least(rows: np.ndarray, targets: np.ndarray) -> float:
        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            residual = rows @ x - targets
            value = (residual**2).mean() / 2 + lam / 2 * x @ x
            return value, rows.T @ residual / len(targets) + lam * x

        options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10_000}
        return minimize(objective, np.zeros(8), jac=True, method="L-BFGS-B", options=options).fun

    singles = [least(A[i : i + 1], b[i : i + 1]) for i in range(6)]
    expected = least(A, b) - np.mean(singles)
    assert ridge_interpolation_constant(A, b, lam) == pytest.approx(expected, rel=1e-5)


def test_interpolation_constant_is_that_of_the_minimisers_in_the_paper():
    problem = RidgeRegression(N=20, n=30, dtype="float64")
    A, b, _ = problem.arrays()
    lam = 0.3
    x = problem.minimiser(lam).numpy()
    joint = ((A @ x - b) ** 2).mean() / 2 + lam / 2 * x @ x
    singles = []
    for a, target in zip(A, b, strict=True):
        z = np.linalg.solve(np.outer(a, a) + lam * np.eye(30), a * target)
        singles.append((a @ z - target) ** 2 / 2 + lam / 2 * z @ z)
    assert problem.interpolation_constant(lam) == pytest.approx(joint - np.mean(singles), rel=1e-10)


def test_interpolation_constant_grows_as_in_the_published_figure():
    problem = RidgeRegression()
    grid = np.logspace(-7, 0, 40)
    assert (np.diff(problem.interpolation_constant(grid)) > 0).all()
    assert problem.interpolation_constant(grid.reshape(8, 5)).shape == (8, 5)
    lam = np.array([3e-7, 1e-5, 2e-4, 5e-3, 0.15, 4.0])
    published = np.array([3e-6, 1e-4, 2e-3, 6e-2, 1.3, 8.0])  # read off the figure, which shows another draw
    values = problem.interpolation_constant(lam)
    assert (np.abs(np.log(values / published)) < np.log(1.5)).all()
    assert 0.5 * values[-1] < problem.interpolation_constant(100.0) < values[-1]


def test_logistic_loss_and_error():
    problem = LogisticRegression(flip=0.0)
    features, labels = problem.train_data()
    assert set(labels.tolist()) == {-1.0, 1.0}
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.SoftMarginLoss()(features @ x, labels)
    torch.testing.assert_close(problem.loss({"x": x}, features, labels), expected)
    assert problem.loss(problem.start(), features, labels).item() == pytest.approx(math.log(2), rel=1e-6)
    assert problem.validation_error(problem.start(), features, labels) == 1
    wrong = (torch.sign(features @ x) != labels).float().mean()
    assert problem.validation_error({"x": x}, features, labels) == wrong


def test_logistic_labels_follow_one_plane_except_the_flipped():
    clean, flipped = LogisticRegression(flip=0.0), LogisticRegression(flip=0.1)
    assert torch.equal(clean.train_data()[0], flipped.train_data()[0])
    share = (clean.train_data()[1] != flipped.train_data()[1]).float().mean()
    assert 0.07 < share < 0.13
    features, labels = clean.train_data()
    x = torch.linalg.lstsq(features, labels).solution  # close to the plane's normal
    assert clean.validation_error({"x": x}, *clean.validation_data(0)) < 0.1
    assert not torch.equal(clean.validation_data(0)[0], clean.validation_data(1)[0])


def test_scalar_logistic_is_the_loss_of_the_figure():
    problem = ScalarLogistic(dtype="float64")
    for x in (-4.0, -1.0, 0.0, 3.0):
        value = problem.loss({"x": torch.tensor([x], dtype=torch.float64)}, *problem.train_data())
        assert value.item() == pytest.approx(math.log(1 + math.exp(-x / 2)), rel=1e-12)
    assert problem.start()["x"].item() == -4.0


def flow_straightness(problem: PlanarSquares, proximal: bool, alpha: float = 1.0, lam: float = 1.0) -> np.ndarray:
    """Distance to the minimiser over the length of the streamline there, from points around [-3, 3]^2."""
    A, b = (array[0].numpy() for array in problem.train_data())
    goal = problem.minimiser(lam).numpy()
    edge = np.linspace(-3, 3, 9)
    x = np.concatenate([[(t, s) for t in edge] + [(s, t) for t in edge] for s in (-3.0, 3.0)])
    start, length, step = np.linalg.norm(x - goal, axis=1), np.zeros(len(x)), 0.02
    for _ in range(600):
        f, g = ((x @ A.T - b) ** 2).sum(1), 2 * (x @ A.T - b) @ A
        if proximal:
            zeta = ((1 + alpha * lam) * f - alpha * lam * (g * x).sum(1)) / (g * g).sum(1)
            new = (x - np.clip(zeta, 0, alpha)[:, None] * g) / (1 + alpha * lam)
        else:
            g = g + lam * x
            new = x - np.minimum(alpha, (f + lam / 2 * (x * x).sum(1)) / (g * g).sum(1))[:, None] * g
        direction = (new - x) / np.linalg.norm(new - x, axis=1)[:, None]
        moving = np.linalg.norm(x - goal, axis=1) > 0.1
        x, length = x + step * moving[:, None] * direction, length + step * moving
    assert not moving.any()
    return start / (length + np.linalg.norm(x - goal, axis=1))


def test_planar_squares_bend_the_flow_of_sps_only():
    problem = PlanarSquares(dtype="float64")
    prox_sps, sps = flow_straightness(problem, proximal=True), flow_straightness(problem, proximal=False)
    assert np.median(prox_sps) > 0.98
    assert np.median(sps) < 0.9
    assert prox_sps.min() > sps.min()
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    A, b = problem.train_data()
    assert problem.loss({"x": x}, A, b) == ((A[0] @ x - b[0]) ** 2).sum()
