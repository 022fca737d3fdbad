"""Closed forms against the paper's formulas, written out, and against a numeric minimiser of the model."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from proxsps.core.models import truncated_model
from proxsps.core.step import (
    coupled_coefficients,
    coupled_move_sq,
    dec_sps_dual,
    l2_dual,
    l2_line,
    prox_coefficients,
    prox_move_sq,
    relax,
    relaxation,
    sps_dual,
)

EPS = np.finfo(float).eps
finite = st.floats(-3, 3)
positive = st.floats(0.01, 10)


def draw(seed, n=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(n), rng.standard_normal(n)


def one_block(gap, d, x, alpha, lam):
    as_block = lambda value: np.array([value])  # noqa: E731
    return gap, as_block(d @ d), as_block(d @ x), as_block(alpha), as_block(lam)


def paper_zeta(gap, d, x, alpha, lam):
    """The adaptive step of Algorithm 3, without its positive part."""
    return ((1 + alpha * lam) * gap - alpha * lam * (d @ x)) / (d @ d)


@given(seed=st.integers(0, 999), gap=positive, alpha=positive, lam=st.floats(0, 5))
def test_one_block_is_the_l2_lemma(seed, gap, alpha, lam):
    x, d = draw(seed)
    dual = l2_dual(*one_block(gap, d, x, alpha, lam))
    zeta = paper_zeta(gap, d, x, alpha, lam)
    # A dozen roundings of terms no larger than `size`; subtraction may leave an absolute error of their size.
    size = ((1 + alpha * lam) * gap + alpha * lam * np.abs(d) @ np.abs(x)) / (d @ d)
    assert alpha * dual.root == pytest.approx(zeta, rel=1e-12, abs=16 * EPS * size)
    assert alpha * dual.u == pytest.approx(min(alpha, max(zeta, 0)), rel=1e-12, abs=16 * EPS * size)
    keep, move, _ = prox_coefficients(dual.u, alpha, lam)
    np.testing.assert_allclose(
        keep * x + move * d, (x - alpha * dual.u * d) / (1 + alpha * lam), rtol=1e-13, atol=16 * EPS
    )


BRANCHES = {  # gap, alpha, lam, and what <d, x> has to be: u = 0 needs <d, x> above gap (1 + alpha lam) / (alpha lam)
    "truncated": (0.1, 1.0, 2.0, 4.0),
    "inside": (0.5, 1.0, 0.1, 0.0),
    "capped": (50.0, 1.0, 0.1, 0.0),
}


def branch_state(name):
    gap, alpha, lam, d_dot_x = BRANCHES[name]
    d = np.array([1.0, 2.0, -1.0, 0.5])
    x = d * d_dot_x / (d @ d) + np.array([2.0, -1.0, 0.0, 0.0])  # the second term is orthogonal to d
    return gap, alpha, lam, d, x


@pytest.mark.parametrize("name", BRANCHES)
def test_each_branch_minimises_the_model_and_has_the_stated_value(name):
    gap, alpha, lam, d, x = branch_state(name)
    C = 0.7
    m = gap + C
    dual = l2_dual(*one_block(gap, d, x, alpha, lam))
    assert {"truncated": dual.u == 0, "inside": 0 < dual.u < 1, "capped": dual.u == 1}[name]
    keep, move, _ = prox_coefficients(dual.u, alpha, lam)
    new = keep * x + move * d

    def objective(y):
        return float(truncated_model(m, d, C, x, y)) + lam / 2 * y @ y + (y - x) @ (y - x) / (2 * alpha)

    options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 20_000, "maxfev": 20_000}
    numeric = minimize(objective, new + 0.1, method="Nelder-Mead", options=options)
    assert objective(new) <= numeric.fun + 1e-12  # the closed form is the minimum, up to rounding
    np.testing.assert_allclose(new, numeric.x, atol=1e-5)  # quadratic growth: fatol 1e-14 leaves 1e-7, with room

    # Stated value: f - alpha lam/(1 + alpha lam) <g, x> - tau/(1 + alpha lam) ||g||^2 + phi, tau without positive part.
    tau = min(alpha, paper_zeta(gap, d, x, alpha, lam))
    stated = m - alpha * lam / (1 + alpha * lam) * (d @ x) - tau / (1 + alpha * lam) * (d @ d)
    assert float(truncated_model(m, d, C, x, new)) == pytest.approx(stated, rel=1e-13)


@given(seed=st.integers(0, 999), gap=positive, alpha=positive)
def test_without_regulariser_it_is_sps(seed, gap, alpha):
    x, d = draw(seed)
    plain = sps_dual(gap, np.array([d @ d]), np.array([alpha]))
    assert plain == l2_dual(*one_block(gap, d, x, alpha, 0.0))
    gamma = alpha * plain.u
    assert gamma == pytest.approx(min(alpha, gap / (d @ d)), rel=1e-14)
    # Value at the new point: max{C, f - alpha ||g||^2} with C = 0, and equally f - gamma ||g||^2.
    value = float(truncated_model(gap, d, 0.0, x, x - gamma * d))
    rounding = 16 * EPS * (gap + np.abs(d) @ np.abs(x))  # x - gamma d is rounded at the size of x
    assert value == pytest.approx(max(0.0, gap - alpha * (d @ d)), rel=1e-12, abs=rounding)
    assert value == pytest.approx(gap - gamma * (d @ d), rel=1e-12, abs=rounding)


@given(gap=positive, alpha=positive, c=positive, d_sq=positive)
def test_sps_max_divides_by_c(gap, alpha, c, d_sq):
    dual = sps_dual(gap, np.array([d_sq]), np.array([alpha]), c)
    assert alpha * dual.u == pytest.approx(min(alpha, gap / (c * d_sq)), rel=1e-14)


@given(seed=st.integers(0, 999), gap=positive, alpha=positive, lam=st.floats(0, 5), cut=st.integers(1, 4))
def test_splitting_a_block_changes_nothing(seed, gap, alpha, lam, cut):
    x, d = draw(seed)
    parts = [(d[:cut], x[:cut]), (d[cut:], x[cut:])]
    d_sq, d_dot_x = np.array([[a @ a, a @ b] for a, b in parts]).T
    two = l2_dual(gap, d_sq, d_dot_x, np.full(2, alpha), np.full(2, lam))
    one = l2_dual(*one_block(gap, d, x, alpha, lam))
    scale = (gap + abs(d) @ abs(x)) / (d @ d) * (1 + 1 / alpha)
    np.testing.assert_allclose(two, one, rtol=1e-12, atol=16 * EPS * scale)


def test_blocks_with_other_caps_and_strengths_reach_the_bound_together():
    rng = np.random.default_rng(0)
    x, d = rng.standard_normal((2, 3, 4))
    alpha, lam = np.array([0.1, 1.0, 3.0]), np.array([0.0, 0.2, 1.0])
    d_sq, d_dot_x = (d * d).sum(1), (d * x).sum(1)
    gap = 1.5
    u = l2_dual(gap, d_sq, d_dot_x, alpha, lam).u
    assert 0 < u < 1
    keep, move, _ = prox_coefficients(u, alpha, lam)
    new = keep[:, None] * x + move[:, None] * d
    assert gap + np.sum(d * (new - x)) == pytest.approx(0, abs=32 * EPS * (gap + np.abs(d * x).sum()))


def test_line_is_the_height_of_the_linear_model():
    rng = np.random.default_rng(1)
    x, d, center = rng.standard_normal((3, 2, 4))
    alpha, lam, gap = np.array([0.5, 2.0]), np.array([0.3, 0.7]), 2.0
    line = l2_line(gap, (d * d).sum(1), (d * (x - center)).sum(1), alpha, lam)
    for u in (0.0, 0.3, 1.0):
        keep, move, pull = prox_coefficients(u, alpha, lam)
        new = keep[:, None] * x + move[:, None] * d + pull[:, None] * center
        assert line.start - line.fall * u == pytest.approx(gap + np.sum(d * (new - x)), rel=1e-13)


def test_leading_axes_are_independent_runs():
    rng = np.random.default_rng(2)
    d_sq, alpha, lam = rng.uniform(0.1, 2, (3, 4, 2))
    d_dot_x, gap = rng.standard_normal((4, 2)), rng.uniform(0.1, 2, 4)
    together = l2_dual(gap, d_sq, d_dot_x, alpha, lam)
    for i in range(4):
        alone = l2_dual(gap[i], d_sq[i], d_dot_x[i], alpha[i], lam[i])
        assert (together.root[i], together.u[i]) == tuple(alone)


def test_zero_slope_gives_the_prox_alone_and_tiny_slope_the_cap():
    zero, one = np.zeros(1), np.ones(1)
    assert l2_dual(1.0, zero, zero, one, one) == (0.0, 0.0)
    assert sps_dual(1.0, np.array([1e-300]), one).u == 1.0


def test_dec_sps_follows_its_recursion():
    rng = np.random.default_rng(3)
    alpha, c0, previous = 2.0, 0.5, None
    memory = np.array([math.inf])
    for k in range(6):
        gap, d_sq = rng.uniform(0.1, 5), rng.uniform(0.5, 2)
        c = c0 * math.sqrt(k + 1)
        gamma = min(gap / d_sq, c0 * alpha if previous is None else previous) / c
        u = dec_sps_dual(gap, np.array([d_sq]), np.array([alpha]), c, memory).u
        assert alpha * u == pytest.approx(gamma, rel=1e-14)
        previous, memory = c * gamma, np.array([c * alpha * u])


def test_dec_sps_ignores_blocks_that_rest():
    both = dec_sps_dual(1.0, np.array([1.0, 4.0]), np.array([0.5, 0.0]), 1.0, np.array([0.2, 0.0]))
    alone = dec_sps_dual(1.0, np.array([1.0]), np.array([0.5]), 1.0, np.array([0.2]))
    assert both == alone


@given(alpha=positive, lam=st.floats(0, 0.09), x=finite, g=finite)
def test_sgd_and_proximal_sgd_are_one_method(alpha, lam, x, g):
    """Appendix: SGD with step beta on loss + l2 is proximal SGD with alpha = beta / (1 - beta lam)."""
    keep, move, _ = prox_coefficients(1.0, alpha, lam)
    beta = alpha / (1 + alpha * lam)
    coupled_keep, coupled_move, _ = coupled_coefficients(1.0, beta, lam)
    assert keep * x + move * g == pytest.approx(coupled_keep * x + coupled_move * g, rel=1e-13, abs=1e-14)
    assert beta / (1 - beta * lam) == pytest.approx(alpha, rel=1e-13)


def test_every_array_library_gives_the_same_numbers():
    import torch

    rng = np.random.default_rng(4)
    d_sq, alpha, lam = rng.uniform(0.1, 2, (3, 2))
    args = (np.float64(0.3), d_sq, rng.standard_normal(2), alpha, lam)
    for mine, theirs in zip(l2_dual(*args), l2_dual(*(torch.as_tensor(a) for a in args)), strict=True):
        assert float(theirs) == pytest.approx(mine, rel=1e-14)


# -- the length of a move ---------------------------------------------------------------------------------------------


def test_lengths_of_moves_are_those_of_the_vectors():
    rng = np.random.default_rng(3)
    x, g, c = rng.standard_normal((3, 2, 5))
    alpha, lam, u = np.array([0.7, 2.0]), np.array([0.4, 0.0]), 0.6
    sums = [(a * b).sum(axis=-1) for a, b in ((g, g), (g, x - c), (x - c, x - c))]
    update = prox_coefficients(u, alpha, lam)
    moved = update.keep[:, None] * x + update.move[:, None] * g + update.pull[:, None] * c
    assert prox_move_sq(update, *sums) == pytest.approx(((moved - x) ** 2).sum(), rel=1e-14)
    d = g + lam[:, None] * (x - c)
    update = coupled_coefficients(u, alpha, lam)
    moved = update.keep[:, None] * x + update.move[:, None] * g + update.pull[:, None] * c
    assert coupled_move_sq(update, (d * d).sum(axis=-1)) == pytest.approx(((moved - x) ** 2).sum(), rel=1e-14)


def test_a_relaxed_update_is_the_projection_onto_a_ball():
    x, d, c = np.random.default_rng(4).standard_normal((3, 5))
    update = prox_coefficients(np.float64(0.6), np.array([0.7]), np.array([0.4]))
    y = update.keep * x + update.move * d + update.pull * c
    for radius in (0.1, 100.0):
        s = relaxation(np.float64(((y - x) ** 2).sum()), radius)
        short = relax(update, s)
        got = short.keep * x + short.move * d + short.pull * c
        nearest = x + (y - x) * min(1.0, radius / np.linalg.norm(y - x))
        np.testing.assert_allclose(got, nearest, rtol=0, atol=1e-15)
        assert (tuple(short) == tuple(update)) == (radius == 100.0)


def test_a_move_of_length_zero_is_left_alone():
    assert relaxation(np.float64(0.0), 0.1) == 1.0
