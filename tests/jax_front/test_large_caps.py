"""Caps that are far too large, so that u is tiny: the step ends where the model reaches its bound."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from proxsps.jax import prox_sps, prox_sps_adam
from proxsps.regularizers import L1, Box, L2Ball


@pytest.mark.parametrize("phi", [Box(-0.5, 0.5), L2Ball(5.0)], ids=repr)
def test_the_model_reaches_its_bound(phi):
    for lr in (1e3, 1e6, 1e8):
        rng = np.random.default_rng(0)
        x, target = rng.standard_normal((2, 300)).astype(np.float32)
        x = np.asarray(phi.prox(x, 1.0))
        d, loss = 0.04 * (x - target) ** 3, 0.01 * np.sum((x - target) ** 4)
        opt = prox_sps(lr, regularizer=phi)
        start = jnp.asarray(x)
        move, state = opt.update(jnp.asarray(d), opt.init(start), start, value=loss)
        assert int(state.last_step.branch) == 1  # inside
        height = float(loss) + np.sum(d.astype(np.float64) * np.asarray(move, np.float64))
        assert abs(height) < 1e-5 * loss
        assert abs(float(state.last_step.model_gap)) < 1e-5 * loss


def test_a_matched_step_from_outside_a_constraint_restores_it_and_does_no_more():
    rng = np.random.default_rng(0)
    x = (3 * rng.standard_normal(20)).astype(np.float32)
    d = x + 0.1 * rng.standard_normal(20).astype(np.float32)
    phi = Box(-0.1, 0.1)
    opt = prox_sps(1.0, regularizer=phi, cap="matched")
    start = jnp.asarray(x)
    move, state = opt.update(jnp.asarray(d), opt.init(start), start, value=1.0)
    np.testing.assert_allclose(x + np.asarray(move), phi.prox(x, 1.0), atol=1e-6)
    assert float(state.last_step.model_gap) == pytest.approx(1 + float(d @ np.asarray(move)), rel=1e-5)


@pytest.mark.parametrize("make", [prox_sps, prox_sps_adam])
def test_tiny_gradients_and_huge_caps_give_finite_updates(make):
    x, d = (jnp.asarray(part, jnp.float32) for part in np.random.default_rng(0).standard_normal((2, 67)))
    moves = {}
    for lr, size in ((None, 1e-40), (1e6, 1.0), (1e30, 1.0)):
        opt = make(lr, regularizer=L1(0.1), cap="matched")
        move, _ = opt.update(size * d, opt.init(x), x, value=jnp.float32(1.0))
        assert jnp.isfinite(move).all()
        moves[lr] = move
    np.testing.assert_allclose(moves[1e30], moves[1e6], rtol=1e-5, atol=1e-6)
    assert float(1 + d @ moves[1e30]) == pytest.approx(0, abs=1e-5)
