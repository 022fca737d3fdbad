"""Matrix factorisation: the published data, drawn again here step by step, and the two conventions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from proxsps.problems import MatrixFactorization, matrix_fac1, matrix_fac2

SEED = 12345678


def published_data(noise: float, split: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    shared, own = np.random.RandomState(SEED), np.random.RandomState(seed)
    D = np.diag(np.logspace(1, -5, 10))
    A = D @ shared.rand(10, 6)
    if split == "train":
        A = A * (1 + noise * (2 * shared.rand(10, 6) - 1))
    y = own.randn(6, 1000)
    return y.T.astype(np.float32), (A @ y).T.astype(np.float32)


@pytest.mark.parametrize(("problem", "noise"), [(matrix_fac1(), 0.0), (matrix_fac2(), 0.05)], ids=["fac1", "fac2"])
def test_data_is_the_published_one(problem, noise):
    cases = [(problem.train_data(), "train", SEED)]
    cases += [(problem.validation_data(run), "val", SEED + 2 + run) for run in (0, 7)]
    for (inputs, targets), split, seed in cases:
        expected_inputs, expected_targets = published_data(noise, split, seed)
        np.testing.assert_array_equal(inputs.numpy(), expected_inputs)
        np.testing.assert_allclose(targets.numpy(), expected_targets, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("problem", "r"), [(matrix_fac1(), 4), (matrix_fac2(), 10)], ids=["fac1", "fac2"])
def test_start_and_loss_are_those_of_two_linear_layers(problem, r):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        net = nn.Sequential(nn.Linear(6, r, bias=False), nn.Linear(r, 10, bias=False))
    start = problem.start()
    assert torch.equal(start["W1"], net[0].weight)
    assert torch.equal(start["W2"], net[1].weight)
    inputs, targets = (array[:20] for array in problem.train_data())
    torch.testing.assert_close(problem.loss(start, inputs, targets), nn.MSELoss()(net(inputs), targets).detach())
    assert problem.batch_size == 20
    assert problem.steps_per_epoch == 50


def test_text_convention_sums_outputs_and_starts_the_diagonal_at_one():
    published, text = matrix_fac2(dtype="float64"), matrix_fac2(dtype="float64", convention="text")
    start, data = text.start(), text.validation_data(0)
    error = data[0] @ (start["W2"] @ start["W1"]).T - data[1]
    torch.testing.assert_close(text.loss(start, *data), error.square().sum(1).mean())
    # Log scales from 10 and from 1 to the same end: the rows differ by 10^(1 - i/9).
    ratio = published.matrices()[0] / text.matrices()[0]
    np.testing.assert_allclose(ratio, 10 ** (1 - np.arange(10) / 9)[:, None] * np.ones((1, 6)))


def test_training_and_validation_matrices_differ_by_the_noise():
    true, disturbed = matrix_fac2().matrices()
    assert 0.03 < np.abs(disturbed / true - 1).max() <= 0.05
    true, disturbed = matrix_fac1().matrices()
    np.testing.assert_array_equal(true, disturbed)


def test_another_data_seed_draws_everything_afresh():
    old, new = matrix_fac1(), matrix_fac1(data_seed=7)
    assert not np.isclose(old.matrices()[0], new.matrices()[0]).all(1).any()
    assert not torch.isclose(old.start()["W1"], new.start()["W1"]).all()
    assert not torch.isclose(old.train_data()[0], new.train_data()[0]).all()


def test_the_true_factors_have_no_error():
    """Rank 6 is enough for a (10, 6) matrix: W2 = A, W1 = I."""
    problem = MatrixFactorization(r=6, dtype="float64")
    A = torch.from_numpy(problem.matrices()[0])
    params = {"W1": torch.eye(6, dtype=torch.float64), "W2": A}
    assert problem.loss(params, *problem.train_data()) < 1e-28
    assert problem.validation_error(params, *problem.validation_data(1)) < 1e-28


def test_double_precision_starts_where_single_precision_does():
    single, double = matrix_fac1().start(), matrix_fac1(dtype="float64").start()
    assert all(torch.equal(single[name].double(), double[name]) for name in single)
