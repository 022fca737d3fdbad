"""The rules against the papers' formulas, written out, and against numeric minimisers of what they minimise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from proxsps.core.dual import eager_loop, search_dual
from proxsps.core.model import entry_heights
from proxsps.core.models import truncated_model
from proxsps.core.rules import Model, StepMemory, dec_sps, linear, sps_max, start_memory, truncated
from proxsps.core.step import l2_line, prox_coefficients
from proxsps.regularizers import L1, Box

EPS = np.finfo(float).eps
positive = st.floats(0.01, 10)
seeds = st.integers(0, 999)


def draw(seed, n=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(n), rng.standard_normal(n)


def line_model(gap, d, x, alpha, lam=0.0):
    """One run whose blocks are the rows of d and x; one block where these are vectors."""
    d, x = np.atleast_2d(d), np.atleast_2d(x)
    alpha, lam = (np.broadcast_to(np.asarray(v, float), (len(d),)) for v in (alpha, lam))
    d_sq, d_dot_x = (d * d).sum(1), (d * x).sum(1)
    return Model(np.float64(gap), d_sq, alpha, l2_line(np.float64(gap), d_sq, d_dot_x, alpha, lam))


def entry_model(gap, d, x, alpha, phi):
    """One run and block whose prox acts on each entry."""
    psi = phi.structure(x.shape).psi

    def evaluate(u):
        h, slope = entry_heights(x, d, psi, alpha, u)
        return gap + h, slope

    def find(line):
        return search_dual(evaluate, line.start, 1e-14 * gap, 1e-15, 200, eager_loop)

    model = line_model(gap, d, x, 0.0)  # its line is constant
    return model._replace(alpha=np.array([alpha]), find=find, top=lambda line: evaluate(np.ones(1))[0][0])


def minimiser(objective, near):
    """The smallest value that a simplex search finds, started away from the answer, and again from where it ended."""
    options = {"xatol": 1e-11, "fatol": 1e-15, "maxiter": 40_000, "maxfev": 40_000, "adaptive": True}
    found = minimize(objective, near + 0.1, method="Nelder-Mead", options=options)
    return minimize(objective, found.x, method="Nelder-Mead", options=options)


def paper_zeta(gap, d, x, alpha, lam):
    """The adaptive step of Algorithm 3, without its positive part."""
    return ((1 + alpha * lam) * gap - alpha * lam * (d @ x)) / (d @ d)


# -- ProxSPS with the squared l2 norm ---------------------------------------------------------------------------------


@given(seed=seeds, gap=positive, alpha=positive, lam=st.floats(0, 5))
def test_one_block_is_the_l2_lemma(seed, gap, alpha, lam):
    x, d = draw(seed)
    decision = truncated(line_model(gap, d, x, alpha, lam))
    zeta = paper_zeta(gap, d, x, alpha, lam)
    # A dozen roundings of terms no larger than `size`; subtraction may leave an absolute error of their size.
    size = ((1 + alpha * lam) * gap + alpha * lam * np.abs(d) @ np.abs(x)) / (d @ d)
    assert alpha * decision.root == pytest.approx(zeta, rel=1e-12, abs=16 * EPS * size)
    assert alpha * decision.u == pytest.approx(min(alpha, max(zeta, 0)), rel=1e-12, abs=16 * EPS * size)
    keep, move, _ = prox_coefficients(decision.u, alpha, lam)
    np.testing.assert_allclose(
        keep * x + move * d, (x - alpha * decision.u * d) / (1 + alpha * lam), rtol=1e-13, atol=16 * EPS
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
    decision = truncated(line_model(gap, d, x, alpha, lam))
    assert {"truncated": decision.u == 0, "inside": 0 < decision.u < 1, "capped": decision.u == 1}[name]
    keep, move, _ = prox_coefficients(decision.u, alpha, lam)
    new = keep * x + move * d

    def objective(y):
        return float(truncated_model(m, d, C, x, y)) + lam / 2 * y @ y + (y - x) @ (y - x) / (2 * alpha)

    numeric = minimiser(objective, new)
    assert objective(new) <= numeric.fun + 1e-12  # the closed form is the minimum, up to rounding
    np.testing.assert_allclose(new, numeric.x, atol=1e-5)  # quadratic growth: fatol 1e-14 leaves 1e-7, with room
    assert decision.height == pytest.approx(gap + d @ (new - x), rel=1e-13, abs=1e-14)

    # Stated value: f - alpha lam/(1 + alpha lam) <g, x> - tau/(1 + alpha lam) ||g||^2 + phi, tau without positive part.
    tau = min(alpha, paper_zeta(gap, d, x, alpha, lam))
    stated = m - alpha * lam / (1 + alpha * lam) * (d @ x) - tau / (1 + alpha * lam) * (d @ d)
    assert float(truncated_model(m, d, C, x, new)) == pytest.approx(stated, rel=1e-13)


@given(seed=seeds, gap=positive, alpha=positive, lam=st.floats(0, 5), cut=st.integers(1, 4))
def test_splitting_a_block_changes_nothing(seed, gap, alpha, lam, cut):
    x, d = draw(seed)
    parts = [np.where(np.arange(5) < cut, d, 0.0), np.where(np.arange(5) < cut, 0.0, d)]
    two = truncated(line_model(gap, np.stack(parts), np.stack([x, x]), alpha, lam))
    one = truncated(line_model(gap, d, x, alpha, lam))
    scale = (gap + abs(d) @ abs(x)) / (d @ d) * (1 + 1 / alpha)
    np.testing.assert_allclose(two[:2], one[:2], rtol=1e-12, atol=16 * EPS * scale)


def test_blocks_with_other_caps_and_strengths_reach_the_bound_together():
    rng = np.random.default_rng(0)
    x, d = rng.standard_normal((2, 3, 4))
    alpha, lam = np.array([0.1, 1.0, 3.0]), np.array([0.0, 0.2, 1.0])
    gap = 1.5
    u = truncated(line_model(gap, d, x, alpha, lam)).u
    assert 0 < u < 1
    keep, move, _ = prox_coefficients(u, alpha, lam)
    new = keep[:, None] * x + move[:, None] * d
    assert gap + np.sum(d * (new - x)) == pytest.approx(0, abs=32 * EPS * (gap + np.abs(d * x).sum()))


def test_zero_slope_gives_the_prox_alone_and_tiny_slope_the_cap():
    zero = np.zeros(3)
    assert truncated(line_model(1.0, zero, zero, 1.0, 1.0))[:2] == (0.0, 0.0)
    assert sps_max(line_model(1.0, np.array([1e-150, 0, 0]), zero, 1.0)).u == 1.0


# -- ProxSPS and proximal SGD with a search ---------------------------------------------------------------------------


SEARCHED = {  # gap, regulariser
    "truncated at once": (0.01, L1(0.4)),
    "inside": (0.6, L1(0.4)),
    "inside the box": (0.6, Box(-0.8, 0.6)),
    "capped": (30.0, L1(0.4)),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_steps_minimise_their_models(name):
    """Both rules on the same state: the truncated model, and the linear one."""
    (gap, phi), (x, d) = SEARCHED[name], draw(0, n=3)
    x, d, alpha, C = np.clip(x, -0.8, 0.6), 2 * d, 0.7, 0.2
    model = entry_model(gap, d, x, alpha, phi)
    u = truncated(model).u
    assert {"truncated at once": u == 0, "capped": u == 1}.get(name, 0 < u < 1)
    for rule, bound in ((truncated, C), (linear, -math.inf)):
        decision = rule(model)
        new = phi.prox(x - alpha * decision.u * d, alpha)

        def objective(y, bound=bound):
            y = phi.prox(y, 1e-300)  # into the domain
            near = (y - x) @ (y - x) / (2 * alpha)
            return max(gap + C + d @ (y - x), bound) + float(phi.value(y)) + near

        assert objective(new) <= minimiser(objective, new).fun + 1e-10
        assert decision.height == pytest.approx(gap + d @ (new - x), abs=1e-12)


def test_a_capped_search_tells_how_far_the_root_is():
    """Beyond the cap h goes on with its last slope; SPS_max and DecSPS do not search at all."""
    x, d = draw(3, n=3)
    decision = truncated(entry_model(30.0, d, x, 0.7, L1(0.4)))
    assert decision.u == 1.0
    assert decision.root > 1.0
    assert decision.evaluations == 1
    assert sps_max(entry_model(30.0, d, x, 0.7, L1(0.4))).evaluations == 0


# -- SPS and SPS_max --------------------------------------------------------------------------------------------------


@given(seed=seeds, gap=positive, alpha=positive)
def test_without_regulariser_it_is_sps(seed, gap, alpha):
    x, d = draw(seed)
    plain = sps_max(line_model(gap, d, x, alpha))
    assert plain == truncated(line_model(gap, d, x, alpha))
    gamma = alpha * plain.u
    assert gamma == pytest.approx(min(alpha, gap / (d @ d)), rel=1e-14)
    # Value at the new point: max{C, f - alpha ||g||^2} with C = 0, and equally f - gamma ||g||^2.
    value = float(truncated_model(gap, d, 0.0, x, x - gamma * d))
    rounding = 16 * EPS * (gap + np.abs(d) @ np.abs(x))  # x - gamma d is rounded at the size of x
    assert value == pytest.approx(max(0.0, gap - alpha * (d @ d)), rel=1e-12, abs=rounding)
    assert value == pytest.approx(gap - gamma * (d @ d), rel=1e-12, abs=rounding)
    assert plain.height == pytest.approx(gap - gamma * (d @ d), rel=1e-12, abs=rounding)


@pytest.mark.parametrize("gap", [0.5, 40.0])
def test_sps_minimises_its_model_over_blocks(gap):
    x, d = np.random.default_rng(1).standard_normal((2, 2, 2))
    alpha = np.array([0.3, 1.4])
    decision = sps_max(line_model(gap, d, x, alpha))
    assert (decision.u == 1) == (gap == 40.0)
    new = x - (alpha * decision.u)[:, None] * d

    def objective(y):
        y = y.reshape(2, 2)
        return max(gap + np.sum(d * (y - x)), 0.0) + np.sum((y - x) ** 2 / (2 * alpha[:, None]))

    assert objective(new.ravel()) <= minimiser(objective, new.ravel()).fun + 1e-12


@given(gap=positive, alpha=positive, c=positive, d=positive)
def test_sps_max_divides_by_c(gap, alpha, c, d):
    decision = sps_max(line_model(gap, np.array([d]), np.zeros(1), alpha), c)
    assert alpha * decision.u == pytest.approx(min(alpha, gap / (c * d * d)), rel=1e-14)
    assert decision.height == pytest.approx(gap - alpha * decision.u * d * d, rel=1e-12, abs=1e-13 * gap)


# -- DecSPS -----------------------------------------------------------------------------------------------------------


def test_dec_sps_follows_its_recursion():
    rng = np.random.default_rng(3)
    alpha, c0, previous = 2.0, 0.5, None
    memory = start_memory(np.array([alpha]))
    for k in range(6):
        gap, d = rng.uniform(0.1, 5), rng.uniform(0.7, 1.4, 1)
        c = c0 * math.sqrt(k + 1)
        gamma = min(gap / (d @ d), c0 * alpha if previous is None else previous) / c
        decision, memory = dec_sps(line_model(gap, d, np.zeros(1), alpha), memory, np.array(True), c0)
        assert alpha * decision.u == pytest.approx(gamma, rel=1e-14)
        assert decision.height == pytest.approx(gap - gamma * (d @ d), rel=1e-13)
        previous = c * gamma
        assert memory.taken == k + 1
        assert memory.previous[0] == pytest.approx(previous, rel=1e-14)


def test_dec_sps_ignores_blocks_that_rest():
    d, x = np.array([[1.0], [2.0]]), np.zeros((2, 1))
    fresh = StepMemory(np.float64(0.0), np.array([0.2, 0.0]))
    both, after = dec_sps(line_model(1.0, d, x, [0.5, 0.0]), fresh, np.array(True))
    alone, _ = dec_sps(line_model(1.0, d[:1], x[:1], 0.5), StepMemory(np.float64(0.0), np.array([0.2])), np.array(True))
    assert both == alone
    assert after.previous[1] == 0.0  # nothing to remember of it


def test_dec_sps_forgets_steps_that_are_skipped():
    """A step that is not taken leaves everything as it was, run by run, even where its numbers are no numbers."""
    memory = StepMemory(np.array([3.0, 3.0]), np.array([[0.4], [0.4]]))
    d_sq, alpha = np.array([[2.0], [math.nan]]), np.ones((2, 1))
    gap = np.array([1.0, math.inf])
    model = Model(gap, d_sq, alpha, l2_line(gap, d_sq, d_sq, alpha, 0 * alpha))
    _, after = dec_sps(model, memory, np.array([True, False]))
    np.testing.assert_array_equal(after.taken, [4.0, 3.0])
    assert after.previous[0, 0] == pytest.approx(0.4)
    assert after.previous[1, 0] == 0.4


def test_dec_sps_without_a_slope_is_not_limited_by_the_loss():
    """Where d = 0 nothing moves, and what is remembered is the cap."""
    decision, memory = dec_sps(line_model(0.3, np.zeros(1), np.zeros(1), 0.8), start_memory(np.ones(1)), np.array(True))
    assert decision.u == 1.0
    assert memory.previous[0] == 0.8


# -- all rules --------------------------------------------------------------------------------------------------------

RULES = {
    "truncated": truncated,
    "linear": linear,
    "sps": sps_max,
    "sps_max": lambda model: sps_max(model, 0.4),
    "dec_sps": lambda model: dec_sps(model, start_memory(model.alpha), model.gap > 0)[0],
}


def random_models(library):
    """Four runs with two blocks each."""
    rng = np.random.default_rng(2)
    d_sq, alpha, lam = (library(part) for part in rng.uniform(0.1, 2, (3, 4, 2)))
    d_dot_x, gap = library(rng.standard_normal((4, 2))), library(rng.uniform(0.1, 2, 4))
    return Model(gap, d_sq, alpha, l2_line(gap, d_sq, d_dot_x, alpha, lam))


@pytest.mark.parametrize("name", RULES)
def test_leading_axes_are_independent_runs(name):
    model = random_models(np.asarray)
    together = RULES[name](model)
    for i in range(4):
        alone = Model(*(part[i] for part in model[:3]), type(model.line)(*(part[i] for part in model.line)))
        assert tuple(part[i] for part in together[:3]) == RULES[name](alone)[:3]


@pytest.mark.parametrize("name", RULES)
def test_every_array_library_gives_the_same_numbers(name):
    mine, theirs = (RULES[name](random_models(library)) for library in (np.asarray, torch.as_tensor))
    for one, other in zip(mine[:3], theirs[:3], strict=True):
        np.testing.assert_allclose(other.numpy(), one, rtol=1e-14)


def test_the_linear_rule_takes_the_cap():
    model = random_models(np.asarray)
    decision = linear(model)
    np.testing.assert_array_equal(decision.u, np.ones(4))
    np.testing.assert_array_equal(decision.height, model.line.start - model.line.fall)
