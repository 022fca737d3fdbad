"""What steps with moments remember: skipped steps, dtypes, and JAX's and optax's transformations of them."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sampled import sample

from proxsps.jax import multi_steps, prox_sps, prox_sps_adam
from proxsps.jax.moments import Kind, Moments, start_moments
from proxsps.jax.passes import SHORT, flat_sample
from proxsps.regularizers import L1

VARIANTS: dict[str, Any] = {
    "momentum": partial(prox_sps, 1.0, momentum=0.9, weight_decay=0.1),
    "no rate": partial(prox_sps, None, momentum=0.9, regularizer=L1(0.1)),
    "adam": partial(prox_sps_adam, weight_decay=0.1),
}
A = jnp.asarray(np.random.default_rng(0).standard_normal((24, 6)), "float32")
B = A @ jnp.arange(6.0)


@pytest.fixture(params=VARIANTS)
def make(request):
    return VARIANTS[request.param]


def loss(x):
    return jnp.mean((A @ x - B) ** 2) / 2


def advance(opt, x, state):
    value, grad = jax.value_and_grad(loss)(x)
    updates, state = opt.update(grad, state, x, value=value)
    return optax.apply_updates(x, updates), state


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda left, right: np.array_equal(left, right), a, b))


def types(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)


# State


def test_a_skipped_step_leaves_everything_that_is_remembered(kit, make):
    opt = make()
    step, (x,) = kit.stepper(opt), kit.drawn(0, (70,))
    state = opt.init(x)
    for k in range(2):
        x, state = step(x, state, kit.drawn(k, (70,))[0], value=3.0)
    good = jnp.ones(70)
    bad = [(math.nan, good), (math.inf, good), (-1.0, good), (1.0, good.at[69].set(jnp.nan)), (1.0, good * jnp.inf)]
    for value, grad in bad:
        got, after = step(x, state, grad, value=value)
        assert after.last_step.branch_name == "skipped"
        assert jnp.array_equal(got, x)
        assert equal(after.memory, state.memory)
    assert step._cache_size() == 1


@pytest.mark.parametrize("size", [1e19, 1e30])
def test_squares_beyond_the_range_of_f32_never_reach_the_state(kit, make, size):
    opt, (x, d) = make(), kit.drawn(0, (70,), (70,))
    _, state = opt.update(size * d, opt.init(x), x, value=1.0)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.memory))
    updates, state = opt.update(d, state, x, value=1.0)
    assert state.last_step.branch_name != "skipped"
    assert bool(jnp.all(jnp.isfinite(updates)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_moments_have_single_precision_at_least(kit, make, dtype):
    """The first step is that of single precision, rounded."""
    opt, (x, d) = make(), kit.drawn(0, (7, 11), (7, 11), dtype=dtype)
    updates, state = opt.update(d, opt.init(x), x, value=3.0)
    expected, _ = opt.update(d.astype("float32"), opt.init(x.astype("float32")), x.astype("float32"), value=3.0)
    assert updates.dtype == x.dtype
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.memory)} == {"float32"}
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(updates, "float32"), expected, rtol=2 * eps, atol=1e-6)
    assert bool(jnp.any(updates != 0))


def test_no_momentum_is_the_plain_step_bit_by_bit(kit):
    x, d = kit.drawn(0, (7, 11), (7, 11))
    for options in ({"weight_decay": 0.1}, {"regularizer": L1(0.1)}):
        plain, zero = prox_sps(**options), prox_sps(**options, momentum=0.0, cap="proximal")
        expected, _ = kit.stepper(plain)(x, plain.init(x), d, value=3.0)
        got, state = kit.stepper(zero)(x, zero.init(x), d, value=3.0)
        assert state.memory == ()
        assert jnp.array_equal(got, expected)


def test_a_momentum_that_is_zero_only_when_it_runs(kit):
    """A traced 0, which has moments, takes the plain step too."""
    opt, plain = optax.inject_hyperparams(prox_sps)(momentum=0.9, weight_decay=0.1), prox_sps(weight_decay=0.1)
    x, d, e = kit.drawn(0, (70,), (70,), (70,))
    state = opt.init(x)
    state.hyperparams["momentum"] = jnp.float32(0.0)
    for grad in (d, e):
        updates, state = opt.update(grad, state, x, value=3.0)
        expected, _ = plain.update(grad, plain.init(x), x, value=3.0)
        np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-7)


def test_states_are_small_and_survive_a_checkpoint(kit):
    opt, (x, d) = prox_sps_adam(weight_decay=0.1), kit.drawn(0, (300, 17), (300, 17))
    _, state = opt.update({"w": d}, opt.init({"w": x}), {"w": x}, value=3.0)
    sizes = {name: sum(leaf.size for leaf in jax.tree.leaves(part)) for name, part in state.memory._asdict().items()}
    assert sizes["average"] == sizes["square"] == x.size
    assert sizes["start"] == x.size // 16
    assert (sizes["averages"], sizes["travel"]) == (3, 5)
    restored = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state))))
    expected, other = (opt.update({"w": x}, own, {"w": x}, value=2.0) for own in (state, restored))
    assert equal(expected, other)


def test_a_state_of_other_parameters():
    opt = prox_sps_adam()
    state = opt.init([jnp.ones(3)])
    with pytest.raises(ValueError, match=r"moments of 1 parameters, got 2 parameters. Call init with the"):
        opt.update([jnp.ones(3)] * 2, state, [jnp.ones(3)] * 2, value=1.0)


@pytest.mark.parametrize(
    "shape",
    [(SHORT + 9,), (2, SHORT), (SHORT, 3), (40, 50, 51), (19, 17, 16, 17), (64, 64), (4097, 1), (5, 7), (1,), ()],
)
def test_samples_are_those_of_the_definition(shape):
    x = np.arange(math.prod(shape), dtype="float32").reshape(shape)
    assert np.array_equal(flat_sample(jnp.asarray(x)), sample(x.reshape(-1)))


@pytest.mark.parametrize("opt", [prox_sps_adam(), prox_sps(None, momentum=0.9)], ids=["adam", "momentum"])
def test_forty_runs_with_a_feature_that_is_always_zero_do_not_stall(opt):
    """Linear regression, ten seeds, and four places of the feature."""

    def run(seed, still):
        keys = jax.random.split(jax.random.key(seed), 3)
        inputs = jax.random.normal(keys[0], (100, 10)) * (jnp.arange(10) != still)
        outputs = inputs @ (9 * jax.random.normal(keys[1], (10,)))

        def step(carry, rows):
            x, state = carry
            value, grad = jax.value_and_grad(lambda x: jnp.mean((inputs[rows] @ x - outputs[rows]) ** 2))(x)
            updates, state = opt.update(grad, state, x, value=value)
            return (x + updates, state), None

        x = jnp.zeros(10)
        (x, _), _ = jax.lax.scan(step, (x, opt.init(x)), jax.random.randint(keys[2], (250, 32), 0, 100))
        return jnp.mean((inputs @ x - outputs) ** 2) / jnp.mean(outputs**2)

    seeds, places = jnp.meshgrid(jnp.arange(10), jnp.array([0, 1, 5, 9]))
    errors = jax.jit(jax.vmap(run))(seeds.ravel(), places.ravel())
    assert errors.shape == (40,)
    assert float(errors.max()) < 0.01


def test_a_state_with_the_sample_of_an_earlier_version(kit):
    """It had every 17th entry."""
    opt, (x, d) = prox_sps_adam(), kit.drawn(0, (30, 17), (30, 17))
    _, state = opt.update(d, opt.init(x), x, value=3.0)
    old = state._replace(memory=state.memory._replace(start=state.memory.start[::17]))
    with pytest.raises(
        ValueError, match=r"has 30 sampled entries .* 510 are sampled .* replace the field memory.start"
    ):
        opt.update(d, old, x, value=3.0)
    again = old._replace(memory=old.memory._replace(start=opt.init(x).memory.start))
    _, after = opt.update(d, again, x, value=3.0)
    assert float(after.memory.travel.reach) == float(state.memory.travel.reach)


# Transformations


def test_second_calls_do_not_compile_again_and_scan_is_a_loop(make):
    opt = make()
    step, x = jax.jit(lambda x, state: advance(opt, x, state)), jnp.ones(6)
    start = state = opt.init(x)
    for _ in range(3):
        x, after = step(x, state)
        assert types(after) == types(state)
        state = after
    assert step._cache_size() == 1
    (y, other), _ = jax.lax.scan(lambda carry, _: (advance(opt, *carry), None), (jnp.ones(6), start), length=3)
    np.testing.assert_allclose(x, y, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state.memory, other.memory)


GRIDS: dict[str, Any] = {
    "momentum": lambda a, b: prox_sps(b, momentum=a, weight_decay=b, cap="matched"),
    "no rate": lambda a, b: prox_sps(None, momentum=a, regularizer=L1(b), scale=b),
    "adam": lambda a, b: prox_sps_adam(b1=a, b2=1 - 0.1 * b, eps=0.01 * b, weight_decay=b, lower_bound=-b),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_of_constants_is_one_program(kit, name):
    (x,), (ds,) = kit.drawn(0, (70,)), kit.drawn(1, (3, 70))
    momenta, others = jnp.array([0.0, 0.5, 0.9]), jnp.array([0.1, 0.4, 0.8])

    def run(a, b):
        opt = GRIDS[name](a, b)

        def body(carry, d):
            x, state = carry
            updates, state = opt.update(d, state, x, value=2.0)
            return (x + updates, state), state.last_step.tau[0]

        (y, _), taus = jax.lax.scan(body, (x, opt.init(x)), ds)
        return y, taus

    points, taus = jax.jit(jax.vmap(run))(momenta, others)
    single = jax.jit(run)
    for i in range(3):
        expected, tau = single(momenta[i], others[i])
        np.testing.assert_allclose(points[i], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(taus[i], tau, rtol=1e-4)
    assert len(set(taus[:, -1].tolist())) == 3


def test_replicas_in_shard_map_stay_equal(make):
    mesh = jax.make_mesh((2,), ("data",))
    opt, x = make(), jnp.ones(6)

    def both(a, b, x, state):
        def mean_loss(x):
            return jax.lax.pmean(jnp.mean((a @ x - b) ** 2) / 2, "data")

        value, grad = jax.value_and_grad(mean_loss)(x)
        updates, state = opt.update(grad, state, x, value=value)
        x = optax.apply_updates(x, updates)
        return x, x[None], state

    specs = {"in_specs": (P("data"), P("data"), P(), P()), "out_specs": (P(), P("data"), P())}
    a, b = jax.device_put((A, B), NamedSharding(mesh, P("data")))
    y, together = jax.device_put((x, opt.init(x)), NamedSharding(mesh, P()))
    step = jax.jit(jax.shard_map(both, mesh=mesh, **specs)).lower(a, b, y, together).compile()
    state = opt.init(x)
    for _ in range(2):
        y, replicas, together = step(a, b, y, together)
        x, state = advance(opt, x, state)
    first, second = np.asarray(replicas)
    assert np.array_equal(first, second)
    np.testing.assert_allclose(first, x, rtol=1e-5)


def test_tensors_that_are_sharded_are_not_gathered(kit):
    """Moments are divided as their parameters, and devices exchange sums and samples."""
    shapes = [(256, 512), (8, 4)]
    xs, ds = kit.drawn(0, *shapes), kit.drawn(1, *shapes)
    opt = prox_sps_adam(weight_decay=0.1)
    expected, _ = kit.stepper(opt)(xs, opt.init(xs), ds, value=1e4)
    for kind, spec in itertools.product((AxisType.Auto, AxisType.Explicit), (P("data"), P(None, "data"))):
        split = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(kind,)), spec)
        x, d = jax.device_put((xs, ds), split)
        state = jax.jit(opt.init)(x)
        step = kit.stepper(opt).lower(x, state, d, value=1e4).compile()
        got, state = step(x, state, d, value=1e4)
        for array in (*got, *state.memory.average, *state.memory.square):
            assert array.sharding.is_equivalent_to(split, 2)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        exchanged = [
            np.prod([int(n) for n in shape.split(",") if n])
            for shape in re.findall(
                r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute|all-reduce)", step.as_text()
            )
        ]
        assert max(exchanged) <= 2 * 256 * 512 // 16  # the two indices of each sampled entry, at the most


# In optax's company


def test_constants_in_the_state(kit, make):
    """By inject_hyperparams, which also traces those that were left at their default."""
    inner = make.func
    x, ds = kit.drawn(0, (70,))[0], kit.drawn(1, (70,), (70,))
    options = {"learning_rate": None if inner is prox_sps_adam else 0.5, "weight_decay": 0.2}
    options |= {} if inner is prox_sps_adam else {"momentum": 0.8}
    plain, injected = inner(**options), optax.inject_hyperparams(inner)(**options)
    state, other = plain.init(x), injected.init(x)
    for d in ds:
        expected, state = plain.update(d, state, x, value=5.0)
        got, other = injected.update(d, other, x, value=5.0)
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)  # b2 = .999 as a number of single precision


def test_the_learning_rate_does_not_matter_from_ten_to_a_million(kit):
    (x,), ds = kit.drawn(0, (70,)), kit.drawn(1, (70,), (70,), (70,))
    ends = []
    for rate in (10.0, 1e3, 1e6, None):
        opt = prox_sps(rate, cap="matched", distance_cap=True, momentum=0.9, weight_decay=1e-3)
        y, state = x, opt.init(x)
        for d in ds:
            updates, state = opt.update(d, state, y, value=100.0)
            y = y + updates
        ends.append(y)
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=1e-6)


def test_micro_batches_equal_one_batch(kit, make):
    plain = make()
    opt, (x,) = multi_steps(plain, 2), kit.drawn(0, (70,))
    state, y, other = opt.init(x), x, plain.init(x)
    for k in range(2):
        d, e = kit.drawn(k + 1, (70,), (70,))
        for grad, value in ((d, 2.0), (e, 4.0)):
            updates, state = opt.update(grad, state, x, value=value)
            x = optax.apply_updates(x, updates)
        updates, other = plain.update((d + e) / 2, other, y, value=3.0)
        y = y + updates
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert int(state.steps.gradient_step) == 2


@pytest.mark.parametrize("make", [*VARIANTS.values(), lambda: multi_steps(prox_sps(), 2)], ids=[*VARIANTS, "multi"])
def test_states_can_be_donated(make):
    """A buffer that is in a state twice, or in a state and the parameters, cannot be overwritten."""
    opt, x = make(), jnp.ones(1)
    step = jax.jit(lambda x, state: opt.update(x, state, x, value=1.0), donate_argnums=(0, 1))
    state = opt.init(x)
    for _ in range(2):
        x, state = step(x, state)
    assert bool(jnp.all(jnp.isfinite(x)))


def test_masked_parameters_have_no_moments(kit):
    w, dw, b = kit.drawn(0, (70,), (70,), (5,))
    params = {"w": w, "b": b}
    plain, masked = prox_sps_adam(), optax.masked(prox_sps_adam(), {"w": True, "b": False})
    expected, _ = plain.update(dw, plain.init(w), w, value=1.0)
    updates, state = masked.update({"w": dw, "b": b}, masked.init(params), params, value=1.0)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)
    assert [leaf.shape for leaf in jax.tree.leaves(state.inner_state.memory.average)] == [(70,)]


def test_moments_are_mapped_like_parameters(make):
    """So that shardings of parameters become those of moments; samples and numbers are no parameters."""
    opt = make()
    state = opt.init({"w": jnp.ones((3, 20))})
    marked = optax.tree.map_params(opt, lambda v: "moment", state, transform_non_params=lambda v: "number")
    memory = marked.memory
    assert set(jax.tree.leaves((memory.average, memory.square))) == {"moment"}
    assert set(jax.tree.leaves((memory.averages, memory.start, memory.travel, marked.count))) == {"number"}


def test_later_updates_outside_of_jit_compile_nothing(make):
    opt, x, y = make(), jnp.linspace(-1.0, 2.0, 70), jnp.linspace(3.0, 2.0, 70)
    state = opt.init(x)
    events = []
    for _ in range(2):
        _, state = opt.update(x, state, x, value=1.0)
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    jax.block_until_ready(opt.update(y, state, x, value=0.5))
    assert "/jax/core/compile/backend_compile_duration" not in events


def test_nothing_to_remember():
    assert start_moments(Kind(), {"w": jnp.ones(3)}, jnp.float32) == Moments()
