"""Moreau's identity, prox_{a phi}(z) + a prox_{phi*/a}(z/a) = z, and independent algorithms for single operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from proxsps.regularizers import (
    L1,
    L2,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    NuclearNorm,
    Simplex,
    SparseGroupLasso,
    TotalVariation1D,
    Zero,
    project_simplex,
)

few = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 10**6)
alphas = st.floats(0.05, 5.0)
LAM = 0.8


def draw(seed, shape=(5, 4)):
    return 2 * np.random.default_rng(seed).standard_normal(shape)


def prox_max(z, t):
    """Prox of t max(y): the largest entries cut at the level that takes away t in all; found by bracketing."""
    level = brentq(lambda c: np.sum(np.maximum(z - c, 0)) - t, z.min() - t, z.max(), xtol=1e-15, rtol=1e-15)
    return np.minimum(z, level)


def prox_max_abs(z, t):
    """Prox of t max|y|, likewise; 0 where t exceeds ||z||_1."""
    if np.sum(np.abs(z)) <= t:
        return np.zeros_like(z)
    return np.sign(z) * np.minimum(np.abs(z), prox_max(np.abs(z), t))


def clip_spectrum(z, t):
    """Projection onto {spectral norm <= t} through the eigenvectors of z^T z."""
    squares, V = np.linalg.eigh(z.T @ z)
    return (z @ V * np.minimum(1, t / np.sqrt(squares))) @ V.T


# The two terms of Moreau's sum; for a support function phi the second is a projection onto a times the domain of phi*.
PAIRS = {
    "l1 / l-inf ball": (lambda z, a: L1(LAM).prox(z, a), lambda z, a: LInfBall(a * LAM).prox(z, 1.0)),
    "l2 norm / l2 ball": (lambda z, a: GroupLasso(LAM).prox(z, a), lambda z, a: L2Ball(a * LAM).prox(z, 1.0)),
    "max / simplex": (lambda z, a: prox_max(z, a * LAM), lambda z, a: Simplex(a * LAM).prox(z, 1.0)),
    "l-inf / l1 ball": (lambda z, a: prox_max_abs(z, a * LAM), lambda z, a: L1Ball(a * LAM).prox(z, 1.0)),
    "nuclear / spectral ball": (lambda z, a: NuclearNorm(LAM).prox(z, a), lambda z, a: clip_spectrum(z, a * LAM)),
    "cone / polar cone": (lambda z, a: NonNegative().prox(z, a), lambda z, a: -NonNegative().prox(-z, a)),
    "squared l2 / itself": (lambda z, a: L2(LAM).prox(z, a), lambda z, a: a * L2(1 / LAM).prox(z / a, 1 / a)),
}


@few
@given(seed=seeds, alpha=alphas)
@pytest.mark.parametrize("name", PAIRS)
def test_moreau_identity(name, seed, alpha):
    z = draw(seed)
    first, second = PAIRS[name]
    # Squaring in z^T z costs half the digits of small singular values, of which clipping sees only their order.
    atol = 1e-11 if name.startswith("nuclear") else 1e-13
    np.testing.assert_allclose(first(z, alpha) + second(z, alpha), z, atol=atol)


@few
@given(seed=seeds, alpha=alphas)
def test_penalties_without_weight_do_nothing(seed, alpha):
    z = draw(seed)
    for phi in (
        Zero(),
        L2(0),
        L1(0),
        ElasticNet(0, 0),
        GroupLasso.rows(0),
        SparseGroupLasso(0, 0),
        TotalVariation1D(0),
    ):
        np.testing.assert_array_equal(phi.prox(z, alpha), z)
        assert float(phi.value(z)) == 0


@few
@given(seed=seeds, alpha=alphas)
def test_special_cases_meet(seed, alpha):
    z = draw(seed)
    np.testing.assert_array_equal(ElasticNet(LAM, 0).prox(z, alpha), L1(LAM).prox(z, alpha))
    np.testing.assert_array_equal(ElasticNet(0, LAM).prox(z, alpha), L2(LAM).prox(z, alpha))
    np.testing.assert_array_equal(SparseGroupLasso(LAM, 0).prox(z, alpha), L1(LAM).prox(z, alpha))
    np.testing.assert_array_equal(
        SparseGroupLasso(0, LAM, dims=(0,)).prox(z, alpha), GroupLasso.columns(LAM).prox(z, alpha)
    )
    np.testing.assert_array_equal(L2(LAM, np.zeros_like(z)).prox(z, alpha), L2(LAM).prox(z, alpha))
    diagonal = np.diag(np.diag(z))
    # The singular value decomposition of a diagonal matrix rounds a few times.
    np.testing.assert_allclose(
        NuclearNorm(LAM).prox(diagonal, alpha), L1(LAM).prox(diagonal, alpha), atol=1e-14 * np.max(np.abs(z))
    )


@few
@given(seed=seeds, alpha=alphas)
def test_nuclear_norm_sees_a_tensor_as_a_matrix(seed, alpha):
    z = draw(seed, (3, 2, 2))
    phi = NuclearNorm(LAM)
    np.testing.assert_array_equal(phi.prox(z, alpha), phi.prox(z.reshape(3, 4), alpha).reshape(3, 2, 2))
    assert float(phi.value(z)) == pytest.approx(LAM * np.linalg.norm(z.reshape(3, 4), "nuc"), rel=1e-13)


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_simplex_against_bracketing(n):
    z = draw(n, (n,))
    level = brentq(lambda c: np.sum(np.maximum(z - c, 0)) - 1.5, z.min() - 2, z.max(), xtol=1e-15, rtol=1e-15)
    np.testing.assert_allclose(project_simplex(z, 1.5), np.maximum(z - level, 0), atol=1e-12)


@pytest.mark.parametrize("shift", [1e6, -1e6])
def test_simplex_does_not_lose_its_radius_to_large_entries(shift):
    # In float32 the entries are multiples of 1/16 here, so both sides see the same differences exactly.
    z = (np.arange(50, dtype=np.float32) / 16) % 2
    moved = project_simplex(z + np.float32(shift), 0.5)
    np.testing.assert_array_equal(moved, project_simplex(z, 0.5))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("radius", [1.0, 100.0])
@pytest.mark.parametrize("spike", [0.0, 1.0])
def test_simplex_of_long_float32_vectors(library, radius, spike):
    """Many entries crowd at the threshold: its rounding counts 300 000 times, and the sum must still be right."""
    z = 1e-3 * np.random.default_rng(0).random(300_000, dtype=np.float32)
    z[0] += np.float32(spike)
    y = np.asarray(project_simplex(z if library == "numpy" else torch.as_tensor(z), radius))
    eps = float(np.finfo(np.float32).eps)
    # The float32 sum inside is pairwise, and each entry is rounded once more.
    assert np.sum(y, dtype=np.float64) == pytest.approx(radius, rel=8 * eps)
    assert float(Simplex(radius).value(y)) == 0
    exact = project_simplex(z.astype(np.float64), radius)
    # Scaling back moves an entry by its share of the rounding of theta, eps/2 for each entry in the support.
    share = 1 + np.count_nonzero(exact) * np.max(exact) / radius
    np.testing.assert_allclose(y, exact, atol=4 * eps * np.max(exact) * share)
