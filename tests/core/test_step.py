"""Closed forms: the line of the squared l2 norm, its root, and the coefficients of updates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxsps.core.step import (
    Line,
    admissible,
    coupled_coefficients,
    l2_line,
    line_dual,
    prox_coefficients,
    relaxation,
)

finite = st.floats(-3, 3)
positive = st.floats(0.01, 10)


def test_line_is_the_height_of_the_linear_model():
    rng = np.random.default_rng(1)
    x, d, center = rng.standard_normal((3, 2, 4))
    alpha, lam, gap = np.array([0.5, 2.0]), np.array([0.3, 0.7]), 2.0
    line = l2_line(gap, (d * d).sum(1), (d * (x - center)).sum(1), alpha, lam)
    for u in (0.0, 0.3, 1.0):
        keep, move, pull = prox_coefficients(u, alpha, lam)
        new = keep[:, None] * x + move[:, None] * d + pull[:, None] * center
        assert line.start - line.fall * u == pytest.approx(gap + np.sum(d * (new - x)), rel=1e-13)


def test_root_of_a_line_is_clipped_to_the_unit_interval():
    start, fall = np.array([-1.0, 0.0, 0.5, 3.0, 1.0]), np.array([2.0, 2.0, 2.0, 2.0, 0.0])
    dual = line_dual(Line(start, fall))
    np.testing.assert_array_equal(dual.root, [-0.5, 0.0, 0.25, 1.5, 0.0])  # flat: y does not depend on u
    np.testing.assert_array_equal(dual.u, [0.0, 0.0, 0.25, 1.0, 0.0])


def test_steps_that_may_be_taken():
    """Each run by itself: the gap, or any block, may be what is wrong."""
    fine = np.ones((6, 2))
    gap, d_sq, d_dot_x = np.array([1.0, 0.0, -1.0, np.nan, 1.0, 1.0]), fine.copy(), fine.copy()
    d_sq[4, 1], d_dot_x[5, 0] = np.inf, np.nan
    np.testing.assert_array_equal(admissible(gap, d_sq, d_dot_x, True), [True, True, False, False, False, False])
    np.testing.assert_array_equal(admissible(gap, d_sq, d_dot_x, False), [True, True, True, False, False, False])


@given(alpha=positive, lam=st.floats(0, 0.09), x=finite, g=finite)
def test_sgd_and_proximal_sgd_are_one_method(alpha, lam, x, g):
    """Appendix: SGD with step beta on loss + l2 is proximal SGD with alpha = beta / (1 - beta lam)."""
    keep, move, _ = prox_coefficients(1.0, alpha, lam)
    beta = alpha / (1 + alpha * lam)
    coupled_keep, coupled_move, _ = coupled_coefficients(1.0, beta, lam)
    assert keep * x + move * g == pytest.approx(coupled_keep * x + coupled_move * g, rel=1e-13, abs=1e-14)
    assert beta / (1 - beta * lam) == pytest.approx(alpha, rel=1e-13)


# -- the length of a move ---------------------------------------------------------------------------------------------


def test_a_shortened_move_is_the_projection_onto_a_ball():
    x, y = np.random.default_rng(4).standard_normal((2, 5))
    for radius in (0.1, 100.0):
        s = relaxation(np.float64(((y - x) ** 2).sum()), radius)
        nearest = x + (y - x) * min(1.0, radius / np.linalg.norm(y - x))
        np.testing.assert_allclose(x + s * (y - x), nearest, rtol=0, atol=1e-15)
        assert (s == 1) == (radius == 100.0)


def test_a_move_of_length_zero_is_left_alone():
    assert relaxation(np.float64(0.0), 0.1) == 1.0
