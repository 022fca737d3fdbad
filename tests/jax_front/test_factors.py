"""Factors on steps without a learning rate: those of the torch optimizers, as `scale`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from proxsps.core.distance import Travel
from proxsps.jax import prox_sps, prox_sps_adam

MAKERS = {
    "identity": lambda **own: prox_sps(None, momentum=0.9, lower_bound=None, **own),
    "adam": lambda **own: prox_sps_adam(lower_bound=None, **own),
}
EVERY = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def walk(opt, draw, steps):
    """Points of a run whose gradients do not depend on it."""
    x, points = jnp.zeros(70), []
    state, update = opt.init(x), jax.jit(opt.update)
    for k in range(steps):
        move, state = update(draw(k), state, x, value=1.0)
        x = optax.apply_updates(x, move)
        points.append(x)
    return np.stack(points), state


def drift(k):
    return jnp.linspace(-1, 1, 70)


def noise(k):
    return jax.random.normal(jax.random.key(k), 70)


@EVERY
@pytest.mark.parametrize("draw", [drift, noise])
@pytest.mark.parametrize("scale", [0.125, 4.0])  # powers of two, with which nothing is rounded
def test_a_constant_factor_multiplies_all_moves(make, draw, scale):
    one, other = (walk(make(scale=own), draw, 20)[0] for own in (1.0, scale))
    np.testing.assert_array_equal(other, scale * one)


@EVERY
def test_a_schedule_may_begin_at_zero(make):
    late, state = walk(make(scale=lambda k: jnp.where(k < 10, 0.0, 1.0)), drift, 20)
    one, _ = walk(make(), drift, 10)
    assert np.count_nonzero(late[:10]) == 0
    np.testing.assert_allclose(late[10:], one, rtol=1e-5)  # in f32; averages of gradients have gone on
    assert state.memory.travel.weight == 10


@EVERY
def test_a_state_from_before_factors_were_counted_goes_on(make):
    opt, x = make(), jnp.ones(70)
    _, state = walk(opt, noise, 4)
    travel = state.memory.travel
    old = state._replace(memory=state.memory._replace(travel=Travel(travel.reach, travel.g_sq, travel.taken)))
    expected, after = opt.update(noise(4), state, x, value=1.0)
    move, found = opt.update(noise(4), old, x, value=1.0)
    np.testing.assert_array_equal(move, expected)
    assert found.memory.travel.weight == after.memory.travel.weight == 5


def test_a_label_at_rest_has_no_part_in_the_distance_cap():
    """The same moves as without it; it starts at 0, because its norm is a part of ||x_0||."""
    opt = prox_sps_adam(labels={"a": "a", "b": "b"}, groups={"a": {}, "b": {"scale": 0.0}})
    alone = prox_sps_adam()
    x, rest = jnp.ones(70), jnp.zeros(34)
    state, other = opt.init({"a": x, "b": rest}), alone.init(x)
    for k in range(4):
        move, state = opt.update({"a": noise(k), "b": 100 * noise(k)[:34]}, state, {"a": x, "b": rest}, value=1e9)
        expected, other = alone.update(noise(k), other, x, value=1e9)
        np.testing.assert_allclose(move["a"], expected, rtol=1e-6)
        assert not np.any(move["b"])
        x = optax.apply_updates(x, expected)
