"""JAX's transformations of a step: jit, vmap, scan, several devices; and what a step may not do to them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from proxsps.jax import prox_sps
from proxsps.regularizers import L1

A = jnp.asarray(np.random.default_rng(0).standard_normal((24, 6)), "float32")
B = A @ jnp.arange(6.0)


def loss(x, rows=slice(None)):
    return jnp.mean((A[rows] @ x - B[rows]) ** 2) / 2


def advance(opt, x, state):
    value, grad = jax.value_and_grad(loss)(x)
    updates, state = opt.update(grad, state, x, value=value)
    return optax.apply_updates(x, updates), state


OPTIONS = {"weight_decay": {"weight_decay": 0.1}, "L1": {"regularizer": L1(0.1)}}


def test_second_calls_do_not_compile_again_and_states_keep_their_types(method):
    opt = method.make(method.lr, **OPTIONS["weight_decay" if method.coupled else "L1"])
    step = jax.jit(lambda x, state: advance(opt, x, state))
    x = jnp.ones(6)
    state = opt.init(x)
    for _ in range(3):
        x, after = step(x, state)
        assert types(after) == types(state)
        state = after
    assert step._cache_size() == 1
    assert float(loss(x)) < float(loss(jnp.ones(6)))


def types(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_of_parameters_and_state(kit, method, dtype):
    with jax.enable_x64(dtype == "float64"):
        opt = method.make(method.lr, weight_decay=0.1)
        (x,) = kit.drawn(0, (3,), dtype=dtype)
        state = opt.init(x)
        updates, after = jax.eval_shape(lambda v: opt.update(x, state, x, value=v), jnp.float32(1.0))
        assert updates.dtype == x.dtype
        wide = jnp.float64 if dtype == "float64" else jnp.float32
        assert after.last_step.u.dtype == state.last_step.u.dtype == wide
        assert after.last_step.branch.dtype == after.count.dtype == jnp.int32


def test_scan_is_a_loop():
    opt = prox_sps(**OPTIONS["L1"])
    start = (jnp.ones(6), opt.init(jnp.ones(6)))
    step = jax.jit(lambda x, state: advance(opt, x, state))
    (x, state), zetas = jax.lax.scan(
        lambda carry, _: ((new := advance(opt, *carry)), new[1].last_step.zeta[0]), start, length=4
    )
    y, other = start
    for zeta in zetas:
        y, other = step(y, other)
        assert float(other.last_step.zeta[0]) == pytest.approx(float(zeta), rel=1e-5)
    np.testing.assert_allclose(x, y, rtol=1e-5)
    assert int(state.count) == 4


def test_vmap_over_hyperparameters(kit):
    """A grid of caps, decays, bounds and weights of a regulariser is one program."""
    x, d = kit.drawn(0, (6,), (6,))
    caps, weights, bounds = jnp.array([0.1, 1.0, 5.0]), jnp.array([0.0, 0.3, 1.0]), jnp.array([0.0, 0.5, -1.0])

    def decayed(cap, weight, bound):
        return prox_sps(cap, weight_decay=weight, lower_bound=bound)

    def sparse(cap, weight, bound):
        return prox_sps(cap, regularizer=L1(weight), lower_bound=bound)

    for make in (decayed, sparse):

        def one(cap, weight, bound, make=make):
            opt = make(cap, weight, bound)
            updates, state = opt.update(d, opt.init(x), x, value=1.0)
            return x + updates, state.last_step.u

        single = jax.jit(one)
        points, us = jax.jit(jax.vmap(one))(caps, weights, bounds)
        for i, constants in enumerate(zip(caps, weights, bounds, strict=True)):
            expected, u = single(*constants)
            np.testing.assert_allclose(points[i], expected, rtol=1e-6, atol=1e-6)
            assert float(us[i]) == pytest.approx(float(u), rel=1e-5)
        assert len(set(us.tolist())) == 3


def test_vmap_over_runs(kit):
    """Each run stops its own search, skips its own steps and keeps its own state."""
    opt = prox_sps(**OPTIONS["L1"])
    (xs,), (ds,) = kit.drawn(0, (5, 6)), kit.drawn(1, (5, 6))
    values = jnp.array([0.01, 1.0, -1.0, jnp.nan, 50.0])
    step = kit.stepper(opt)
    states = jax.vmap(opt.init)(xs)
    got, after = jax.jit(jax.vmap(lambda x, s, d, v: step(x, s, d, value=v)))(xs, states, ds, values)
    for i in range(5):
        expected, state = step(xs[i], opt.init(xs[i]), ds[i], value=values[i])
        np.testing.assert_allclose(got[i], expected, rtol=1e-6, atol=1e-6)
        assert int(after.last_step.branch[i]) == int(state.last_step.branch)
        assert int(after.last_step.evaluations[i]) == int(state.last_step.evaluations)
    assert after.last_step.branch[jnp.array([0, 2, 3, 4])].tolist() == [1, -1, -1, 2]


@pytest.fixture(scope="module")
def mesh():
    assert jax.device_count() == 2
    return jax.make_mesh((2,), ("data",))


def averaged_step(opt, a, b, x, state):
    """The loss is averaged, then differentiated: inside shard_map JAX adds up gradients of what all devices share."""

    def mean_loss(x):
        return jax.lax.pmean(jnp.mean((a @ x - b) ** 2) / 2, "data")

    value, grad = jax.value_and_grad(mean_loss)(x)
    updates, state = opt.update(grad, state, x, value=value)
    return optax.apply_updates(x, updates)[None], state.last_step.u[None]


def twice_averaged_step(opt, a, b, x, state):
    """The habit of pmap, where each device differentiates its own loss."""
    value, grad = jax.value_and_grad(lambda x: jnp.mean((a @ x - b) ** 2) / 2)(x)
    value, grad = jax.lax.pmean((value, grad), "data")
    updates, state = opt.update(grad, state, x, value=value)
    return optax.apply_updates(x, updates), state.last_step.u


@pytest.mark.parametrize(("mapped", "name"), [("shard_map", "L1"), ("pmap", "weight_decay")])
def test_replicas_with_averaged_loss_and_gradient_stay_equal(mesh, mapped, name):
    """Two devices with half of the batch each take the step of the whole batch, bit by bit alike."""
    opt = prox_sps(**OPTIONS[name])
    x = jnp.ones(6)
    if mapped == "shard_map":
        specs = (P("data"), P("data"), P(), P())
        both = jax.jit(jax.shard_map(partial(averaged_step, opt), mesh=mesh, in_specs=specs, out_specs=P("data")))
        a, b = jax.device_put((A, B), NamedSharding(mesh, P("data")))
    else:
        both = jax.pmap(partial(twice_averaged_step, opt), "data", in_axes=(0, 0, None, None))
        a, b = A.reshape(2, -1, 6), B.reshape(2, -1)
    replicas, us = map(np.asarray, both(a, b, x, opt.init(x)))
    expected, _ = jax.jit(lambda x, state: advance(opt, x, state))(x, opt.init(x))
    assert replicas.shape == (2, 6)
    assert np.array_equal(replicas[0], replicas[1])
    assert us[0] == us[1]
    np.testing.assert_allclose(replicas[0], expected, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_sharded_parameters_take_the_same_step(kit, mesh, name):
    x, d = kit.drawn(0, (8, 4), (8, 4))
    opt = prox_sps(**OPTIONS[name])
    step = kit.stepper(opt)
    expected, _ = step(x, opt.init(x), d, value=1.0)
    split = NamedSharding(mesh, P("data"))
    x, d = jax.device_put((x, d), split)
    got, state = step(x, opt.init(x), d, value=1.0)
    assert got.sharding.is_equivalent_to(split, 2)
    assert state.last_step.branch_name == "inside"
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_closed_form_steps_can_be_differentiated():
    """For instance with respect to the cap, by which hypergradient methods tune it."""
    x, d = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0])

    def after(cap):
        opt = prox_sps(cap, weight_decay=0.5)
        updates, _ = opt.update(d, opt.init(x), x, value=100.0)
        return jnp.sum(x + updates)

    # Capped: the point is (x - cap d) / (1 + cap / 2).
    slope = jax.jit(jax.grad(after))(1.0)
    assert float(slope) == pytest.approx(float(jnp.sum(-d / 1.5 - 0.5 * (x - d) / 1.5**2)), rel=1e-5)
