"""Is the prox the minimiser? Against certificates, another solver, and the inequalities every prox obeys."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10**6)
scales = st.sampled_from([0.05, 1.0, 4.0, 50.0])
alphas = st.floats(0.05, 8.0)


def dot(a, b):
    return float(np.sum(a * b))


@few
@given(seed=seeds, scale=scales, alpha=alphas)
def test_fenchel_equality_certifies_the_minimiser(case, seed, scale, alpha):
    """y = prox(z) exactly when s = (z - y)/alpha has phi(y) + phi*(s) = <s, y>."""
    z = case.draw(seed, scale)
    y = case.phi.prox(z, alpha)
    s = (z - y) / alpha
    value, violation = case.conjugate(s)
    # y is some dozen roundings of the size of z away, and s that much over alpha.
    unit = 100 * np.finfo(float).eps * (1 + np.max(np.abs(z))) * (1 + 1 / alpha)
    assert violation <= unit
    assert abs(float(case.phi.value(y)) + value - dot(s, y)) <= unit * (1 + np.sum(np.abs(y)) + np.sum(np.abs(s)))


@pytest.mark.parametrize(("scale", "alpha"), [(1.0, 0.7), (3.0, 1.9)])
def test_agrees_with_a_conic_solver(case, scale, alpha):
    z = case.draw(7, scale)
    y = cp.Variable((case.shape[0], z.size // case.shape[0]))
    phi, constraints = case.model(y)
    problem = cp.Problem(cp.Minimize(phi + cp.sum_squares(y - z.reshape(y.shape)) / (2 * alpha)), constraints)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    # A gap of 1e-10 (times an objective of order 10) allows an error of sqrt(2 alpha 1e-9) in y.
    np.testing.assert_allclose(case.phi.prox(z, alpha), y.value.reshape(z.shape), atol=1e-4)


@few
@given(seed=seeds, scale=scales, alpha=alphas, share=st.sampled_from([1e-3, 0.1, 1.0]))
def test_no_point_does_better(case, seed, scale, alpha, share):
    """The objective grows from its minimiser by at least (1/alpha + mu)/2 times the squared distance."""
    z = case.draw(seed, scale)
    y = case.phi.prox(z, alpha)
    w = y + share * (case.phi.prox(case.draw(seed + 1, scale), alpha) - y)
    least = case.objective(y, z, alpha)
    growth = 0.5 * (1 / alpha + case.phi.strong_convexity) * dot(w - y, w - y)
    # Both objectives are sums of a dozen terms: rounding is relative to their size.
    assert case.objective(w, z, alpha) >= least + growth - 1e-13 * (1 + abs(least) + growth)


@few
@given(seed=seeds, scale=scales, alpha=alphas)
def test_random_perturbations_do_not_improve(case, seed, scale, alpha):
    z = case.draw(seed, scale)
    y = case.phi.prox(z, alpha)
    least = case.objective(y, z, alpha)
    assert np.isfinite(least)
    for size in (1e-4, 1e-2, 1.0):
        # Rounding, and for a set the slack in `value`: a point outside by 8 eps may be nearer by that much.
        slack = 1e-13 * (1 + least) + 1e-13 * np.max(np.abs(z)) * case.shape[0] / alpha
        assert case.objective(y + case.draw(seed + 1, size), z, alpha) >= least - slack


@few
@given(seed=seeds, scale=scales, alpha=alphas)
def test_firmly_non_expansive(case, seed, scale, alpha):
    """||Pz - Pw||^2 <= <Pz - Pw, z - w>, also for close points."""
    z = case.draw(seed, scale)
    for w in (case.draw(seed + 1, scale), z + case.draw(seed + 1, 1e-3)):
        move = case.phi.prox(z, alpha) - case.phi.prox(w, alpha)
        rounding = 1e-14 * (1 + np.max(np.abs(z)) + np.max(np.abs(w))) * np.sum(np.abs(z - w))
        assert dot(move, move) <= dot(move, z - w) + rounding


@few
@given(seed=seeds, scale=scales, alpha=alphas)
def test_does_not_raise_the_value(case, seed, scale, alpha):
    z = case.draw(seed, scale)
    before, after = float(case.phi.value(z)), float(case.phi.value(case.phi.prox(z, alpha)))
    assert after <= before * (1 + 1e-14)


@few
@given(seed=seeds, scale=scales, alpha=alphas)
def test_value_is_convex_along_segments(finite_case, seed, scale, alpha):
    x, w = finite_case.draw(seed, scale), finite_case.draw(seed + 1, scale)
    phi = finite_case.phi
    middle, ends = float(phi.value((x + w) / 2)), 0.5 * float(phi.value(x) + phi.value(w))
    assert middle <= ends - phi.strong_convexity / 8 * dot(x - w, x - w) + 1e-13 * (1 + ends)


@few
@given(seed=seeds, scale=scales, alpha=alphas)
def test_projection_is_feasible_and_idempotent(set_case, seed, scale, alpha):
    phi = set_case.phi
    y = phi.prox(set_case.draw(seed, scale), alpha)
    assert float(phi.value(y)) == 0
    np.testing.assert_allclose(phi.prox(y, alpha), y, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("outside", [True, False])
def test_set_value_tells_inside_from_outside(set_case, outside):
    phi = set_case.phi
    boundary = phi.prox(set_case.draw(3, 5.0), 1.0)
    # Push away from the set, or stay; 1e-6 is far above the slack of some eps.
    z = boundary + 1e-6 * (set_case.draw(3, 5.0) - boundary) * outside
    assert float(phi.value(z)) == (np.inf if outside else 0.0)


def test_prox_of_a_fixed_point(case):
    """A minimiser of phi is a fixed point of its prox, for every alpha."""
    start = case.phi.prox(case.draw(0), 1.0)
    for _ in range(200):
        start = case.phi.prox(start, 50.0)
    # 200 steps of length 50 bring every case here to rest; what is left is rounding.
    np.testing.assert_allclose(case.phi.prox(start, 0.3), start, atol=1e-13)
