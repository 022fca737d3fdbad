"""Factors on the step, rates of zero, and the end of training: a cool-down and an average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from proxsps.jax import cool_down, polynomial_average, prox_sps, prox_sps_adam


def test_a_scale_is_a_factor_on_the_step(kit):
    x, d = kit.drawn(0, (70,), (70,))
    taus = {}
    for scale in (1.0, 0.25, 0.0, cool_down(4, fraction=1.0)):
        opt = prox_sps(None, scale=scale, weight_decay=0.1)
        updates, state = opt.update(d, opt.init(x), x, value=100.0)
        taus[scale] = float(state.last_step.tau[0])
        np.testing.assert_allclose(x + updates, (x - taus[scale] * d) / (1 + 0.1 * taus[scale]), rtol=1e-5, atol=1e-6)
    whole, quarter, nothing, cooled = taus.values()
    assert quarter == pytest.approx(whole / 4)
    assert nothing == 0
    assert cooled == pytest.approx(whole * 4 / 5)


def test_a_label_with_a_rate_of_zero_rests_and_still_counts_in_the_model(kit):
    xs, ds = kit.drawn(0, (70,), (70,)), kit.drawn(1, (70,), (70,))
    groups = {"a": {}, "b": {"learning_rate": 0.0}}
    opt = prox_sps_adam(0.5, labels=["a", "b"], groups=groups, weight_decay=0.1)
    state = opt.init(xs)
    for _ in range(2):
        updates, state = opt.update(ds, state, xs, value=3.0)
        assert jnp.array_equal(updates[1], jnp.zeros(70))
    assert bool(jnp.any(updates[0] != 0))
    np.testing.assert_allclose(state.memory.average[1], ds[1], rtol=1e-5)


def test_zero_gradients_without_a_rate_move_nothing():
    opt, x = prox_sps(None, weight_decay=0.1), jnp.ones(70)
    updates, state = opt.update(jnp.zeros(70), opt.init(x), x, value=1.0)
    assert jnp.array_equal(updates, jnp.zeros(70))
    assert state.last_step.branch_name != "skipped"


def test_entries_that_never_had_a_gradient_need_no_eps():
    opt, x = prox_sps_adam(eps=0.0), jnp.ones(70)
    updates, state = opt.update(jnp.ones(70).at[3].set(0.0), opt.init(x), x, value=1.0)
    assert state.last_step.branch_name != "skipped"
    assert float(updates[3]) == 0
    assert float(updates[4]) < 0


def test_a_cool_down():
    schedule = cool_down(100)
    assert [float(schedule(k)) for k in (0, 50, 74)] == [1, 1, 1]
    falling = [float(schedule(k)) for k in range(74, 101)]
    np.testing.assert_allclose(np.diff(falling), -1 / 26, rtol=1e-5)
    assert falling[-2] > 0
    assert [float(jax.jit(schedule)(jnp.int32(k))) for k in (100, 1000)] == [0, 0]
    assert float(cool_down(10, 0.0, 3.0)(9)) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_polynomial_average(kit, dtype):
    points = kit.drawn(0, *[(70,)] * 6, dtype=dtype)
    average = polynomial_average()
    update, state = jax.jit(average.update), average.init({"w": points[0]})
    expected = np.asarray(points[0], "float64")
    for k, x in enumerate(points):
        mean, state = update({"w": x}, state)
        expected = expected + (9 / (k + 9) if k else 0) * (np.asarray(x, "float64") - expected)
    assert mean["w"].dtype == x.dtype
    assert state.mean["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.mean["w"], expected, rtol=1e-5, atol=1e-6)
