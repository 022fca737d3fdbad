"""The dynamic programme of total variation: certificates on long signals, and the same code with and without numba."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from proxsps.regularizers import TotalVariation1D, denoise_tv1d, total_variation


def certify(z, y, t):
    """Optimality: the flow w_i = sum_{j<=i} (y_j - z_j) stays in [-t, t], ends at 0, and is t sign(jump) at jumps."""
    flow = np.cumsum(y - z, axis=-1)
    # Sums of n terms, each a rounding away from an entry or from the weight (which counts up to the largest flow).
    n, size = z.shape[-1], np.max(np.abs(z))
    atol = 10 * np.finfo(float).eps * n * (size + min(t, n * size))
    jump = np.diff(y, axis=-1)
    assert np.max(np.abs(flow)) <= t + atol
    assert np.max(np.abs(flow[..., -1])) <= atol
    np.testing.assert_allclose(flow[..., :-1][jump != 0], (t * np.sign(jump))[jump != 0], atol=atol)


@pytest.mark.parametrize("t", [1e-6, 0.3, 3.0, 40.0])
@pytest.mark.parametrize("kind", ["noise", "walk", "ramp", "integers", "steps"])
def test_long_signals_meet_their_certificate(kind, t):
    rng = np.random.default_rng(1)
    n = 3000
    z = {
        "noise": rng.standard_normal(n),
        "walk": np.cumsum(rng.standard_normal(n)),
        "ramp": np.linspace(0, 30, n),
        "integers": rng.integers(-3, 4, n).astype(float),
        "steps": np.repeat(rng.standard_normal(n // 100), 100) + 0.01 * rng.standard_normal(n),
    }[kind]
    certify(z, denoise_tv1d(z, t), t)


# Few values and ties, so that knots fall together.
signals = arrays(float, st.integers(1, 30), elements=st.integers(-4, 4).map(float) | st.floats(-100, 100, width=32))


@settings(max_examples=200, deadline=None)
@given(z=signals, t=st.sampled_from([1e-9, 0.25, 1.0, 2.5, 1000.0]))
def test_any_signal_meets_its_certificate(z, t):
    certify(z, denoise_tv1d(z, t), t)


@settings(max_examples=50, deadline=None)
@given(z=signals, t=st.sampled_from([0.25, 1.0, 2.5]))
def test_plain_python_does_the_same(z, t):
    rows, plain = z[None, :], np.empty((1, z.size))
    if z.size < 2:
        return
    mean = rows.mean(axis=1, keepdims=True)
    total_variation._denoise_rows(rows - mean, np.array([t]), plain)
    # numba may fuse a product and a sum, which rounds once less.
    np.testing.assert_allclose(plain[0] + mean[0], denoise_tv1d(z, t), atol=1e-12)


def test_works_without_numba(monkeypatch):
    real = builtins.__import__

    def without_numba(name, *args, **kwargs):
        if name == "numba":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_numba)
    total_variation._kernel.cache_clear()
    try:
        assert total_variation._kernel() is total_variation._denoise_rows
        z = np.array([3.0, 1.0, 2.0, 8.0])
        certify(z, denoise_tv1d(z, 0.5), 0.5)
    finally:
        total_variation._kernel.cache_clear()


def test_each_leading_index_is_a_signal_of_its_own():
    z = np.random.default_rng(0).standard_normal((2, 3, 50))
    phi = TotalVariation1D(0.4)
    y = phi.prox(z, 1.3)
    for i in np.ndindex(2, 3):
        np.testing.assert_array_equal(y[i], phi.prox(z[i], 1.3))
    # Neighbouring signals with the same value at their seam are not one run.
    v = np.arange(4.0).reshape(2, 2)
    np.testing.assert_array_equal(phi.prox_jvp(v, np.zeros((2, 2)), v, 1.0), [[0.5, 0.5], [2.5, 2.5]])


def test_runs_are_exactly_constant():
    y = TotalVariation1D(2.0).prox(np.random.default_rng(0).standard_normal(500), 1.0)
    jumps = np.abs(np.diff(y))
    assert 0 < np.count_nonzero(jumps) < 100
    assert np.min(jumps[jumps > 0]) > 1e-12


def test_large_weight_gives_the_mean():
    z = np.random.default_rng(0).standard_normal(40)
    np.testing.assert_allclose(TotalVariation1D(1e3).prox(z, 1.0), np.full(40, z.mean()), atol=1e-13)


@pytest.mark.parametrize("shape", [(1,), (4, 1), (0,), (3, 0)])
def test_signals_without_neighbours(shape):
    z, phi = np.ones(shape), TotalVariation1D(1.0)
    np.testing.assert_array_equal(phi.prox(z, 1.0), z)
    np.testing.assert_array_equal(phi.prox_jvp(z, z, z, 1.0), z)
    assert float(phi.value(z)) == 0
    np.testing.assert_array_equal(phi.subgradient(z), 0 * z)


def test_tensors_that_require_grad_are_read_not_tracked():
    z = torch.randn(6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = TotalVariation1D(0.1).prox(z, torch.tensor(1.0))
    assert not y.requires_grad
    assert not TotalVariation1D.traceable
