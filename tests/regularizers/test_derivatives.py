"""Derivatives of the prox against finite differences; subgradients and strong convexity against their inequalities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxsps.regularizers import NuclearNorm

few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10**6)
scales = st.sampled_from([0.1, 1.0, 3.0])


def dot(a, b):
    return float(np.sum(a * b))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [0.3, 1.2])
@pytest.mark.parametrize("seed", range(4))
def test_prox_jvp_is_the_directional_derivative(jvp_case, scale, alpha, seed):
    phi, z, v, h = jvp_case.phi, jvp_case.draw(seed, scale), jvp_case.draw(seed + 100), 1e-6
    jvp = phi.prox_jvp(z, phi.prox(z, alpha), v, alpha)
    difference = (phi.prox(z + h * v, alpha) - phi.prox(z - h * v, alpha)) / (2 * h)
    # Central differences: rounding 1e-16 / h, and h^2 times a third derivative of order 1 / scale^2.
    np.testing.assert_allclose(jvp, difference, atol=5e-9)


def test_prox_jvp_meets_both_branches(kinked_case):
    """The draws above reach a direction that is mostly kept and one that is flattened."""
    ratios = []
    for scale in (0.1, 1.0, 3.0):
        phi, z, v = kinked_case.phi, kinked_case.draw(0, scale), kinked_case.draw(100)
        ratios.append(np.linalg.norm(phi.prox_jvp(z, phi.prox(z, 1.2), v, 1.2)) / np.linalg.norm(v))
    assert max(ratios) > 0.3
    assert min(ratios) < 0.95


def test_nuclear_norm_offers_no_cheap_derivative():
    z = np.eye(3)
    assert NuclearNorm(0.1).prox_jvp(z, z, z, 1.0) is None


@few
@given(seed=seeds, scale=scales)
def test_subgradient_inequality(finite_case, seed, scale):
    """phi(w) >= phi(x) + <s, w - x> + mu/2 ||w - x||^2, at generic points and at the sparse points a prox returns."""
    phi = finite_case.phi
    w = finite_case.draw(seed + 1, scale)
    for x in (finite_case.draw(seed, scale), phi.prox(finite_case.draw(seed, scale), 1.0), np.zeros(finite_case.shape)):
        s = phi.subgradient(x)
        below = float(phi.value(x)) + dot(s, w - x) + 0.5 * phi.strong_convexity * dot(w - x, w - x)
        assert float(phi.value(w)) >= below - 1e-13 * (1 + abs(below))


@few
@given(seed=seeds, scale=scales)
def test_subgradient_is_the_gradient_where_phi_is_smooth(finite_case, seed, scale):
    phi, x, v, h = finite_case.phi, finite_case.draw(seed, scale), finite_case.draw(seed + 1), 1e-7
    # Kinks nearer than h |v| are not smooth points: step over those draws.
    if np.min(np.abs(x)) < 1e-5 or (finite_case.name == "TotalVariation1D" and np.min(np.abs(np.diff(x))) < 1e-5):
        return
    if finite_case.name == "NuclearNorm" and np.min(np.linalg.svd(x)[1]) < 1e-3:
        return
    slope = float(phi.value(x + h * v) - phi.value(x - h * v)) / (2 * h)
    # Rounding of phi over h, and h^2 times the third derivative.
    assert dot(phi.subgradient(x), v) == pytest.approx(slope, abs=2e-6)


@few
@given(seed=seeds, scale=scales, alpha=st.floats(0.1, 4.0))
def test_strong_convexity_inequality_from_the_prox(case, seed, scale, alpha):
    """(z - y)/alpha is a subgradient at y = prox(z): this covers the sets as well."""
    phi, z = case.phi, case.draw(seed, scale)
    y, w = phi.prox(z, alpha), phi.prox(case.draw(seed + 1, scale), alpha)
    below = float(phi.value(y)) + dot((z - y) / alpha, w - y) + 0.5 * phi.strong_convexity * dot(w - y, w - y)
    size = np.sum(np.abs(z - y)) / alpha * (1 + np.max(np.abs(w - y)))
    assert float(phi.value(w)) >= below - 1e-13 * (1 + abs(below) + size)


@few
@given(seed=seeds)
def test_strong_convexity_is_the_largest_possible(finite_case, seed):
    """From x to 2x every finite case here grows exactly as its strong convexity says."""
    phi, x = finite_case.phi, finite_case.draw(seed, 2.0)
    predicted = float(phi.value(x)) + dot(phi.subgradient(x), x) + 0.5 * phi.strong_convexity * dot(x, x)
    assert float(phi.value(2 * x)) == pytest.approx(predicted, rel=1e-12)


def test_sets_have_no_subgradient(set_case):
    with pytest.raises(TypeError, match="has no subgradient everywhere"):
        set_case.phi.subgradient(set_case.draw(0))
