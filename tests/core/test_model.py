"""How high the linear model stands along its ray, by kind of block: against the prox of whole tensors, in doubles."""

import math

import numpy as np
import pytest
import torch

from proxsps.core.model import (
    RowSums,
    entry_heights,
    line_heights,
    row_factors,
    row_heights,
)
from proxsps.core.step import Line
from proxsps.regularizers import L1, Box, ElasticNet, GroupLasso, L2Ball, LInfBall, NonNegative
from proxsps.regularizers.structure import Scalar

U = np.array([0.0, 0.1, 0.37, 0.8, 1.0])
ROWS = {
    "rows": GroupLasso.rows(0.9),
    "rows by size": GroupLasso.rows(0.3, scale_by_size=True),
    "tensor": GroupLasso(2.0),
    "ball": L2Ball(6.5),
}
ENTRIES = {
    "l1": L1(0.6),
    "elastic net": ElasticNet(0.4, 0.7),
    "non-negative": NonNegative(),
    "box": Box(-0.3, 0.8),
    "max norm": LInfBall(0.7),
}
ALPHAS = (0.01, 0.7, 20.0)


def draw(shape=(5, 7), seed=0):
    return np.random.default_rng(seed).standard_normal((2, *shape))


def direct(phi, x, d, alpha, u):
    """<d, y(u) - x> from the prox of whole tensors."""
    return float(np.sum(d * (phi.prox(x - u * alpha * d, alpha) - x)))


def row_sums(x, d):
    return RowSums(*(np.sum(a * b, axis=-1) for a, b in ((x, x), (d, x), (d, d))))


def as_rows(phi, x, d):
    structure = phi.structure(x.shape)
    matrix = (1, x.size) if structure.dims is None else x.shape
    return row_sums(x.reshape(matrix), d.reshape(matrix)), structure.psi


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ROWS)
def test_rows_by_three_sums_are_the_prox_of_the_tensor(name, alpha):
    x, d = draw()
    rows, psi = as_rows(ROWS[name], x, d)
    h, _ = row_heights(rows, psi, alpha, U)
    np.testing.assert_allclose(h, [direct(ROWS[name], x, d, alpha, u) for u in U], rtol=1e-12, atol=1e-12)


def test_draws_meet_every_branch():
    """The cases above have rows that become zero and rows that do not, and a ball whose bound holds and does not."""
    x, d = draw()
    zeros = [(ROWS["rows"].prox(x - u * a * d, a) == 0).all(axis=1).sum() for a in ALPHAS for u in U]
    assert min(zeros) == 0
    assert max(zeros) == 5
    norms = [np.linalg.norm(x - u * a * d) for a in ALPHAS for u in U]
    assert min(norms) < ROWS["ball"].radius < max(norms)


@pytest.mark.parametrize("alpha", [0.01, 0.7, 3.0])
@pytest.mark.parametrize("name", ROWS)
def test_slopes_of_rows_are_derivatives(name, alpha):
    x, d = draw()
    rows, psi = as_rows(ROWS[name], x, d)
    _, slope = row_heights(rows, psi, alpha, U)
    h = 1e-6 / max(1.0, alpha)
    numeric = (row_heights(rows, psi, alpha, U + h)[0] - row_heights(rows, psi, alpha, U - h)[0]) / (2 * h)
    np.testing.assert_allclose(slope, numeric, rtol=1e-6, atol=1e-6 * alpha * np.sum(d * d))
    assert np.all(slope <= 0)
    assert np.all(slope >= -alpha * np.sum(d * d) * (1 + 1e-12))  # a prox is non-expansive


def test_each_row_may_have_its_own_cap_and_function():
    """Two groups of rows, with a ball around one of them, joined."""
    x, d = draw((6, 4))
    first, second = GroupLasso.rows(0.5), L2Ball(1.0)
    sums = [row_sums(x[:5], d[:5]), row_sums(x[5:], d[5:])]
    joined = RowSums(*(np.concatenate(parts) for parts in zip(*sums, strict=True)))
    alpha = np.array([0.3] * 5 + [2.0])
    psi = Scalar(np.array([0.5] * 5 + [0.0]), np.zeros(6), np.full(6, -np.inf), np.array([np.inf] * 5 + [1.0]))
    expected = [direct(first, x[:5], d[:5], 0.3, u) + direct(second, x[5:], d[5:], 2.0, u) for u in U]
    np.testing.assert_allclose(row_heights(joined, psi, alpha, U)[0], expected, rtol=1e-12)


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_runs_of_rows_are_independent(library):
    """Two leading axes of runs, with a cap for each run and row."""
    rng = np.random.default_rng(1)
    x, d = rng.standard_normal((2, 2, 3, 4, 5))
    alpha, u, psi = rng.uniform(0.1, 2, (2, 3, 4)), rng.uniform(0, 1, (2, 3, 3)), Scalar(l1=0.8)
    rows = RowSums(*map(library, row_sums(x, d)))
    h, slope = row_heights(rows, psi, library(alpha), library(u))
    assert h.shape == slope.shape == (2, 3, 3)
    for i in np.ndindex(2, 3):
        alone = row_heights(row_sums(x[i], d[i]), psi, alpha[i], u[i])
        np.testing.assert_allclose(np.stack([h[i], slope[i]]), alone, rtol=1e-13)


@pytest.mark.parametrize("threshold", [1e-12, 1e-9, 1e-8, 1e-7, 1e-3])
@pytest.mark.parametrize("aside", [0.0, 1e-12, 1e-8, 1e-7])
def test_rows_that_cancel_cost_half_the_digits_at_most(aside, threshold):
    """Where x is almost s d, ||x - s d||^2 is a difference of equal sums; h stays right to sqrt(eps) ||d|| ||x||."""
    rng = np.random.default_rng(0)
    for off in (0.0, 1e-12, 1e-8, -1e-8, 1e-7, 1e-4):
        d, p = rng.standard_normal((2, 6))
        p -= p @ d / (d @ d) * d
        x = (0.5 + off) * d + aside * p
        h, slope = row_heights(row_sums(x[None], d[None]), Scalar(l1=threshold), 1.0, np.array([0.5]))
        expected = direct(GroupLasso(threshold), x, d, 1.0, 0.5)
        assert abs(h[0] - expected) <= 4e-8 * np.linalg.norm(d) * np.linalg.norm(x)
        assert -4 * (d @ d) <= slope[0] <= 0


def test_rows_of_zeros_stay_zeros_and_divide_by_nothing():
    zero, one = np.zeros((1, 3)), np.ones((1, 3))
    for x, d in ((zero, zero), (one, one), (zero, one), (one, zero)):
        with np.errstate(all="raise"):
            h, slope = row_heights(row_sums(x, d), Scalar(l1=0.5), 1.0, np.array([0.0, 0.5, 1.0]))
        assert np.isfinite(h).all()
        assert np.isfinite(slope).all()
        expected = [direct(GroupLasso(0.5), x, d, 1.0, u) for u in (0.0, 0.5, 1.0)]
        np.testing.assert_allclose(h, expected, atol=1e-15)
    np.testing.assert_array_equal(row_factors(Scalar(l1=0.5), np.array([0.0, 0.4, 1.0]), 1.0), [0.0, 0.0, 0.5])


# -- entries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", ENTRIES)
def test_entries_are_the_prox_of_the_tensor(name, alpha):
    phi, (x, d) = ENTRIES[name], draw((30,))
    psi = phi.structure(x.shape).psi
    h, slope = entry_heights(x, d, psi, alpha, U)
    np.testing.assert_allclose(h, [direct(phi, x, d, alpha, u) for u in U], rtol=1e-13, atol=1e-13)
    for i, u in enumerate(U):
        z = x - u * alpha * d
        exact = -alpha * np.sum(d * phi.prox_jvp(z, phi.prox(z, alpha), d, alpha))
        assert slope[i] == pytest.approx(exact, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("name", ENTRIES)
def test_slopes_of_entries_are_derivatives(name):
    """Pieces of a polygon: finite differences are exact where no kink lies between them."""
    psi, (x, d), alpha, h = ENTRIES[name].structure((30,)).psi, draw((30,)), 0.7, 1e-7
    u = np.linspace(0.01, 0.99, 41)
    _, slope = entry_heights(x, d, psi, alpha, u)
    up, down = (entry_heights(x, d, psi, alpha, u + s * h) for s in (1, -1))
    smooth = up[1] == down[1]
    assert smooth.sum() > 30
    np.testing.assert_allclose(slope[smooth], ((up[0] - down[0]) / (2 * h))[smooth], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_runs_of_entries_are_independent(library):
    rng = np.random.default_rng(2)
    x, d = rng.standard_normal((2, 2, 3, 9))
    alpha, u, psi = rng.uniform(0.1, 2, (2, 3)), rng.uniform(0, 1, (2, 3, 4)), Scalar(0.4, 0.2, -0.5, 0.9)
    h, slope = entry_heights(library(x), library(d), psi, library(alpha), library(u))
    assert h.shape == slope.shape == (2, 3, 4)
    for i in np.ndindex(2, 3):
        alone = entry_heights(x[i], d[i], psi, float(alpha[i]), u[i])
        np.testing.assert_allclose(np.stack([h[i], slope[i]]), alone, rtol=1e-13)


def test_a_derivative_that_is_not_known_is_nan():
    class Shrinkage:
        def prox(self, z, alpha):
            return z / (1 + alpha)

        def prox_jvp(self, z, y, v, alpha):
            return None

    x, d = draw((4,))
    h, slope = entry_heights(x, d, Shrinkage(), 0.5, U)
    np.testing.assert_allclose(h, [d @ ((x - 0.5 * u * d) / 1.5 - x) for u in U], rtol=1e-13)
    assert np.isnan(slope).all()


# -- lines ------------------------------------------------------------------------------------------------------------


def test_lines_of_runs():
    line = Line(np.array([1.0, 2.0]), np.array([0.5, 4.0]))
    h, slope = line_heights(line, np.array([[0.0, 1.0], [0.5, math.pi]]))
    np.testing.assert_array_equal(h, [[1.0, 0.5], [0.0, 2 - 4 * math.pi]])
    np.testing.assert_array_equal(slope, [[-0.5, -0.5], [-4.0, -4.0]])
