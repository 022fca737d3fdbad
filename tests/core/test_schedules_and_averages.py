import math

import numpy as np
import pytest

from proxsps.core import schedules
from proxsps.core.averaging import (
    draw_iterate,
    polynomial_average,
    polynomial_weight,
    start_average,
    update_average,
)


def test_schedules_are_the_formulas_of_the_theorems():
    assert [schedules.constant(k, 0.3) for k in range(3)] == [0.3] * 3
    assert [schedules.sqrt_decay(k, 2.0) for k in (0, 3, 8)] == [2.0, 1.0, 2 / 3]
    assert schedules.horizon(7, 3.0, 9) == 1.0
    assert [schedules.strongly_convex(k, 0.5, 3) for k in (0, 1)] == [2 / 3, 0.5]
    assert [schedules.strongly_convex_bounded(k, 0.5) for k in (0, 3)] == [4.0, 1.0]


def test_sums_of_the_square_root_schedule_meet_the_series_lemma():
    for K in (1, 2, 10, 1000):
        alphas = [schedules.sqrt_decay(k, 1.0) for k in range(K)]
        assert sum(a * a for a in alphas) <= 1 + math.log(K) + 1e-12
        assert sum(alphas) >= 2 * math.sqrt(K + 1) - 2


@pytest.mark.parametrize(
    ("zetas", "expected"),
    [([3.0, 1.0, 2.0], 2.0), ([1.0, 2.0], 1.5), ([], 0.7), ([0.0, 0.0, 1.0], 0.7), ([math.inf, math.inf], 0.7)],
)
def test_adaptive_schedule_is_the_median_where_there_is_one(zetas, expected):
    assert schedules.adaptive(zetas, fallback=0.7) == expected


@pytest.mark.parametrize("weight", [lambda k: 1.0, lambda k: k + 1.0, lambda k: 1 / math.sqrt(k + 1)])
def test_running_average_is_numpys(weight):
    xs = np.random.default_rng(0).standard_normal((20, 3))
    average = start_average(xs[0])
    for k, x in enumerate(xs):
        average = update_average(average, x, weight(k))
    expected = np.average(xs, axis=0, weights=[weight(k) for k in range(20)])
    np.testing.assert_allclose(average.mean, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_a_cool_down_falls_on_a_line_to_zero_and_never_rises(fraction):
    total = 40
    factors = [schedules.cool_down(k, 2.0, total, fraction) for k in range(total + 5)]
    flat = round(total * (1 - fraction))
    assert factors[:flat] == [2.0] * flat
    assert factors[total:] == [0.0] * 5
    falls = -np.diff(factors[max(flat - 1, 0) : total + 1])
    np.testing.assert_allclose(falls, falls.mean(), rtol=1e-12)
    assert all(factor > 0 for factor in factors[:total])


@pytest.mark.parametrize("power", [0.0, 1.0, 8.0])
def test_polynomial_average_weighs_points_by_a_rising_factorial(power):
    """The k-th point (from 1) has the weight Gamma(k + power) / Gamma(k), which is about k^power."""
    xs = np.random.default_rng(0).standard_normal((30, 3))
    mean = xs[0]
    for count, x in enumerate(xs[1:], 1):
        mean = polynomial_average(mean, x, count, power)
    weights = [math.exp(math.lgamma(k + power) - math.lgamma(k)) for k in range(1, 31)]
    np.testing.assert_allclose(mean, np.average(xs, axis=0, weights=weights), rtol=1e-12, atol=1e-14)


def test_the_weight_of_the_newest_point_is_nine_over_k_plus_ten():
    assert [polynomial_weight(k + 1) for k in (0, 8, 90)] == [9 / 10, 9 / 18, 9 / 100]
    assert polynomial_weight(0) == 1


def test_drawn_iterate_is_uniform():
    rng = np.random.default_rng(0)
    K, trials = 5, 20_000
    drawn = np.zeros(trials)
    for k in range(K):
        drawn = draw_iterate(drawn, np.full(trials, float(k)), k, rng.uniform(size=trials))
    counts = np.bincount(drawn.astype(int), minlength=K)
    # Five standard deviations of a binomial count; one draw in a million would miss.
    assert np.abs(counts - trials / K).max() < 5 * math.sqrt(trials / K * (1 - 1 / K))
