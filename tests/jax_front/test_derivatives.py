"""Derivatives of whole steps, against differences."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from proxsps.jax import prox_sps, prox_sps_adam
from proxsps.regularizers import L1

DATA = np.random.default_rng(0)
A, TARGET, WAY = DATA.standard_normal((30, 40)), DATA.standard_normal(30), DATA.standard_normal(40)
STARTS = {"origin": np.zeros(40), "elsewhere": DATA.standard_normal(40)}


def loss(x, used=40):
    """Entries from `used` on have no gradient."""
    return jnp.mean((A[:, :used] @ x[:used] - TARGET) ** 2)


def after(x, opt, steps, used=40):
    state = opt.init(x)
    for _ in range(steps):
        value, grad = jax.value_and_grad(loss)(x, used)
        updates, state = opt.update(grad, state, x, value=value)
        x = optax.apply_updates(x, updates)
    return loss(x, used)


def differences(function, x, h=1e-6):
    # At the origin the norm of the start has a kink; the difference of both sides is its derivative 0.
    return float(function(x + h * WAY) - function(x - h * WAY)) / (2 * h)


OPTS = {
    "adam": lambda: prox_sps_adam(),
    "momentum": lambda: prox_sps(None, momentum=0.9),
    "adam-decay": lambda: prox_sps_adam(weight_decay=1e-2),
    "adam-rate": lambda: prox_sps_adam(0.1),
    "plain": lambda: prox_sps(None),
}


CASES = [("adam", "origin", 1), ("adam", "elsewhere", 3), ("momentum", "origin", 3), ("momentum", "elsewhere", 1)]


@pytest.mark.parametrize(("name", "start", "steps"), [*CASES, *((name, "elsewhere", 2) for name in list(OPTS)[2:])])
def test_gradients_through_steps_without_a_rate(name, start, steps):
    """A run that has not left its start has the distance 0, whose square root has no derivative there."""
    with jax.enable_x64(True):
        x, function = jnp.asarray(STARTS[start]), partial(after, opt=OPTS[name](), steps=steps)
        found = jax.grad(function)(x)
        assert jnp.isfinite(found).all()
        np.testing.assert_allclose(found @ WAY, differences(function, x), rtol=3e-5)


def test_entries_without_a_gradient():
    with jax.enable_x64(True):
        x, function = jnp.asarray(STARTS["elsewhere"]), partial(after, opt=prox_sps_adam(), steps=2, used=30)
        found = jax.grad(function)(x)
        assert jnp.isfinite(found).all()
        np.testing.assert_allclose(found @ WAY, differences(function, x), rtol=3e-5)


def test_searches_have_a_forward_mode_only():
    with jax.enable_x64(True):
        opt = prox_sps(None, regularizer=L1(0.1))
        x, function = jnp.asarray(STARTS["elsewhere"]), partial(after, opt=opt, steps=1)
        found = jax.jvp(function, (x,), (jnp.asarray(WAY),))[1]
        np.testing.assert_allclose(found, differences(function, x), rtol=3e-5)
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(function)(x)
