"""The formulas of the schedule-free form against brute force, simulation and singular values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from proxsps.core import schedule_free as sf
from proxsps.core.array import array_namespace

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])
LIBRARY = pytest.mark.parametrize("library", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])


def points(dtype, size, rng):
    """x and z whose entries, and the ratio of the two, range over twelve decades."""
    x, z = (rng.standard_normal(size) * 10.0 ** rng.uniform(-6, 6, size) for _ in range(2))
    near = rng.random(size) < 0.5  # as in training, x and z differ by little
    z = np.where(near, x * (1 + 10.0 ** rng.uniform(-9, 0, size) * rng.choice([-1, 1], size)), z)
    x[::7], z[::11] = 0, 0
    z[3::13] = x[3::13]
    return x.astype(dtype), z.astype(dtype)


@LIBRARY
@DTYPES
@pytest.mark.parametrize("b", [0.9, 0.5, 0.98, 0.1])
def test_the_point_of_gradients_comes_back_bitwise_from_its_average(dtype, library, b):
    rng = np.random.default_rng(0)
    for size in (64, 67, 1025, 100_003):
        x, z = points(dtype, size, rng)
        y = sf.gradient_point(library(x), library(z), library(np.asarray(b, dtype)))
        average = sf.average_exactly(y, library(z), b)
        again = sf.gradient_point(average, library(z), library(np.asarray(b, dtype)))
        assert np.array_equal(np.asarray(again), np.asarray(y))
        assert again.dtype == y.dtype
        # y is the sum of two rounded numbers, of which the larger decides; division by b makes the error larger.
        scale = np.finfo(dtype).eps * (np.abs(x) + np.abs(z)) / b
        for found in (average, sf.average(y, library(z), b)):
            assert (np.abs(np.asarray(found, np.float64) - x) <= 4 * scale).all()


@DTYPES
def test_equal_points_stay_bitwise_where_they_are(dtype):
    x, _ = points(dtype, 1025, np.random.default_rng(1))
    for formula in (sf.gradient_point, sf.average, sf.average_exactly):
        assert np.array_equal(formula(x, x), x)


@DTYPES
def test_the_point_of_gradients_does_not_decrease_with_the_average(dtype):
    """What the correction of `average_exactly` relies on."""
    x, z = points(dtype, 20_001, np.random.default_rng(2))
    up = np.nextafter(x, np.array(np.inf, dtype))
    assert (sf.gradient_point(up, z) >= sf.gradient_point(x, z)).all()


@pytest.mark.parametrize("r", [0.0, 1.0, 4.0])
def test_shares_give_the_weighted_average_of_all_points(r):
    rng = np.random.default_rng(3)
    taus, zs = 10.0 ** rng.uniform(-4, 0, 60), rng.standard_normal((60, 5))
    taus[:3], taus[17] = 0, 0  # no step yet, and a step of size 0 in between
    numbers, x, longest, weights = sf.Averaging(np.zeros(1), np.zeros(1)), zs[0], 0.0, []
    for k, (tau, z) in enumerate(zip(taus, zs, strict=True)):
        share, numbers = sf.next_share(numbers, k, tau, r)
        x = x + share * (z - x)
        longest = max(longest, tau)
        weights.append((k + 1) ** r * longest**2)
        if longest > 0:
            np.testing.assert_allclose(x, np.average(zs[: k + 1], axis=0, weights=weights), rtol=1e-12, atol=1e-13)
        else:
            assert share == 1
    assert float(numbers.total[0]) == pytest.approx(sum(weights), rel=1e-14)
    assert float(numbers.longest[0]) == taus.max()


@pytest.mark.parametrize("r", [0.0, 1.0, 2.0, 4.0])
def test_growth_in_pure_noise(r):
    """Steps of one size in random directions: 2,000 of them in 1,000 dims, so that squares scatter by about 1/30."""
    rng, steps, dims = np.random.default_rng(4), 2000, 1000
    numbers, x, z = sf.Averaging(np.zeros(()), np.zeros(())), np.zeros(dims), np.zeros(dims)
    for k in range(steps):
        z = z + rng.standard_normal(dims) / dims**0.5
        share, numbers = sf.next_share(numbers, np.asarray(float(k)), np.asarray(1.0), r)
        x = x + share * (z - x)
    assert float(x @ x) / steps == pytest.approx(sf.noise_growth(r), rel=0.15)
    assert float(z @ z) / steps == pytest.approx(1, rel=0.15)  # for which the formula would be wrong


def test_weights_of_gradients_and_their_squares():
    weights, squares = np.zeros(0), np.zeros(())
    for k in range(1200):
        mu, squares = sf.gradient_weights(np.asarray(float(k)), squares)
        assert float(mu) == min(0.9, k / (k + 100))
        weights = np.append(weights * float(mu), 1 - float(mu))
        assert float(squares) == pytest.approx(float(weights @ weights), rel=1e-12)
    assert weights.sum() == pytest.approx(1, rel=1e-12)
    assert float(squares) == pytest.approx(0.1 / 1.9, rel=1e-9)  # (1 - mu) / (1 + mu)


@LIBRARY
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 7), (7, 1), (8, 8), (64, 17), (2, 3, 6, 4)], ids=str)
def test_directions_have_the_singular_vectors_of_slopes(shape, library):
    """In the basis of the singular vectors of d the result is diagonal, with entries near 1 where d is not tiny."""
    rng = np.random.default_rng(5)
    for scale in (1e-4, 1.0, 1e6):
        d = scale * rng.standard_normal(shape)
        found = np.asarray(sf.orthogonalized(library(d)))
        U, S, V = np.linalg.svd(d, full_matrices=False)
        core = np.swapaxes(U, -1, -2) @ found @ np.swapaxes(V, -1, -2)
        values = np.diagonal(core, axis1=-2, axis2=-1)
        np.testing.assert_allclose(core, values[..., None] * np.eye(S.shape[-1]), atol=1e-10)
        np.testing.assert_allclose(U @ core @ V, found, atol=1e-10)
        large = 0.02 * np.linalg.norm(d, axis=(-2, -1))[..., None] < S
        assert large.sum() >= 0.7 * large.size
        assert (values[large] > 0.65).all()
        assert (values[large] < 1.25).all()


def test_a_matrix_of_zeros_has_no_direction():
    assert not sf.orthogonalized(np.zeros((4, 3))).any()
    assert math.isfinite(float(np.abs(sf.orthogonalized(np.full((4, 3), 1e-200))).max()))


@LIBRARY
def test_directions_count_by_their_rank_and_full_rank_as_all_entries(library):
    """Each singular value that is raised fills max(m, n) entries, up to the band in which the iteration ends."""
    rng = np.random.default_rng(6)
    for m, n in ((64, 64), (32, 96), (160, 40)):
        for rank in (1, 4, min(m, n)):
            d = rng.standard_normal((20, m, rank)) @ rng.standard_normal((20, rank, n))
            p = 0.3 * math.sqrt(max(m, n)) * np.asarray(sf.orthogonalized(library(d)))
            q = np.asarray(sf.counted(library((p**2).sum(axis=(-2, -1)) / 0.3**2), m * n))
            filled = (q - m * n / 4) / 0.75 / (rank * max(m, n))
            assert (filled > 0.68**2 / 0.8).all()
            assert (filled < 1.21**2 / 0.8).all()
            assert rank < min(m, n) or abs(q.mean() / (m * n) - 1) < 0.1


def test_how_far_averages_move_a_run_in_noise():
    """(sum of sizes)^2 / sum of squares, of the parts that old gradients have in a direction: if they add up as in the
    average, 1 / rho^2; if each has singular vectors of its own, which the iteration raises one by one, 3.5 / rho^2."""
    for mu in (0.2, 0.5, 0.9):
        weights = mu ** np.arange(300.0)
        raised = np.diagonal(sf.orthogonalized(np.diag(weights)))
        kept, new = (parts.sum() ** 2 / (parts**2).sum() for parts in (weights, raised))
        assert kept == pytest.approx((1 + mu) / (1 - mu))
        assert new / kept == pytest.approx(3.5, rel=0.1)


@LIBRARY
def test_an_average_is_zero_where_a_long_step_sets_it_to_zero_and_the_last_point_is_elsewhere(library):
    x, after, z = (
        library(np.array(t))
        for t in ([1.0, -2.0, 3e-9, 0.0, -2.0, 0.5], [0.5, 0.0, 0.0, 4.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0, -2.4, -0.5])
    )
    found = sf.cleaned(x, sf.zeros_of_average(x, z, after))
    assert array_namespace(found) is array_namespace(x)
    assert np.asarray(found).tolist() == [1.0, 0.0, 0.0, 0.0, -2.0, 0.0]
    assert np.asarray(sf.zeros_of_average(x, z, after, None)).tolist() == [False, True, True, False, True, True]
    rows = [library(np.asarray(t).reshape(3, 2)) for t in (x, z, 0 * after)]
    assert np.asarray(sf.zeros_of_average(*rows, (1,))).tolist() == [[True] * 2, [True] * 2, [True] * 2]
    assert not np.asarray(sf.zeros_of_average(rows[0], 1.2 * rows[0], rows[2], (-1,))).any()
