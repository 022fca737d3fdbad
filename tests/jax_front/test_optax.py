"""In optax's company: its common test of optimizers, and what users combine them with."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from proxsps.jax import multi_steps, prox, prox_sgd, prox_sps, prox_sps_adam, sps
from proxsps.regularizers import L1, NonNegative


def parabola(x):
    return jnp.sum((x - jnp.array([1.0, -1.0, 1.0])) ** 2)


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


TARGETS = {
    "parabola": (parabola, [-1.0, 10.0, 1.0], [1.0, -1.0, 1.0]),
    "rosenbrock": (rosenbrock, [0.0, 0.0], [1.0, 1.0]),
}


def train(opt, loss, x, steps):
    def body(carry, _):
        x, state = carry
        value, grad = jax.value_and_grad(loss)(x)
        updates, state = opt.update(grad, state, x, value=value)
        return (optax.apply_updates(x, updates), state), value

    return jax.lax.scan(body, (x, opt.init(x)), length=steps)


def test_reaches_the_minimum(method):
    for target, (loss, start, end) in TARGETS.items():
        if (method.name, target) == ("dec_sps", "rosenbrock"):
            continue  # steps that fall like 1/sqrt(k) do not follow the valley in any reasonable time
        opt = method.make(1e-3 if (method.name, target) == ("prox_sgd", "rosenbrock") else method.lr)
        (x, _), _ = train(opt, loss, jnp.array(start), 30_000)
        np.testing.assert_allclose(x, end, rtol=3e-2, atol=3e-2)


def test_accepts_extra_arguments(kit, method):
    x, d = kit.drawn(0, (3,), (3,))
    opt = method.make(method.lr)
    assert isinstance(opt, optax.GradientTransformationExtraArgs)
    with_more, _ = opt.update(d, opt.init(x), x, value=1.0, something="else")
    assert jnp.array_equal(with_more, opt.update(d, opt.init(x), x, value=1.0)[0])


def test_map_params(method):
    opt = method.make(method.lr)
    state = opt.init({"w": jnp.ones(3)})
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, state, optax.tree.map_params(opt, lambda v: v, state)))


def test_inject_hyperparams(kit, method):
    """Constants become part of the state and can be changed there."""
    x, d = kit.drawn(0, (3,), (3,))
    injected = optax.inject_hyperparams(method.make)(learning_rate=0.3, weight_decay=0.2)
    plain = method.make(0.1, weight_decay=0.2)
    state = injected.init(x)
    state.hyperparams["learning_rate"] = jnp.float32(0.1)
    got, state = kit.stepper(injected)(x, state, d, value=5.0)
    expected, _ = kit.stepper(plain)(x, plain.init(x), d, value=5.0)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert state.inner_state.last_step.u.shape == ()


def test_inject_hyperparams_beside_a_regularizer(kit):
    x, d = kit.drawn(0, (3,), (3,))
    injected = optax.inject_hyperparams(prox_sps)(optax.constant_schedule(0.1), regularizer=L1(0.2))
    plain = prox_sps(0.1, regularizer=L1(0.2))
    got, _ = kit.stepper(injected)(x, injected.init(x), d, value=5.0)
    np.testing.assert_allclose(got, kit.stepper(plain)(x, plain.init(x), d, value=5.0)[0], rtol=1e-6)


def test_schedules_are_asked_with_the_count_of_updates(kit):
    x, d = kit.drawn(0, (3,), (3,))
    schedule = optax.piecewise_constant_schedule(0.1, {1: 0.5})
    opt = prox_sps(schedule, weight_decay=0.1)
    step, state = kit.stepper(opt), opt.init(x)
    for cap in (0.1, 0.05, 0.05):
        plain = prox_sps(cap, weight_decay=0.1)
        expected, _ = kit.stepper(plain)(x, plain.init(x), d, value=100.0)
        x, state = step(x, state, d, value=100.0)
        np.testing.assert_allclose(x, expected, rtol=1e-6)
        assert float(state.last_step.tau[0]) == pytest.approx(cap)


def test_chain(kit):
    """Behind a transformation of gradients; the report is found by its name."""
    x, d = kit.drawn(0, (3,), (3,))
    opt = optax.chain(optax.scale(2.0), prox_sps(weight_decay=0.1))
    plain = prox_sps(weight_decay=0.1)
    got, state = kit.stepper(opt)(x, opt.init(x), d, value=1.0)
    expected, other = kit.stepper(plain)(x, plain.init(x), 2 * d, value=1.0)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert float(optax.tree.get(state, "last_step").u) == pytest.approx(float(other.last_step.u))


@pytest.mark.parametrize("wrap", [multi_steps, optax.MultiSteps])
def test_multi_steps_with_the_loss_of_the_whole_batch(kit, wrap):
    x, d, e = kit.drawn(0, (3,), (3,), (3,))
    plain = prox_sps(weight_decay=0.1)
    opt = wrap(plain, 2)
    step, state = kit.stepper(opt), opt.init(x)
    y, state = step(x, state, d, value=2.0)
    assert jnp.array_equal(x, y)
    y, state = step(y, state, e, value=2.0)
    expected, _ = kit.stepper(plain)(x, plain.init(x), (d + e) / 2, value=2.0)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_micro_batches_equal_one_batch(kit):
    """Two batches of three micro-batches each; losses and bounds are averaged as gradients are."""
    plain = prox_sps(weight_decay=0.1)
    opt = multi_steps(plain, 3)
    (x,) = kit.drawn(0, (3,))
    step, state, whole, other = kit.stepper(opt), opt.init(x), kit.stepper(plain), plain.init(x)
    y = x
    for seed, (values, bounds) in enumerate([((1.0, 2.0, 6.0), (0.0, 0.5, 1.0)), ((9.0, 2.0, 1.0), (0.5, 0.5, 0.0))]):
        ds = kit.drawn(seed + 1, (3,), (3,), (3,))
        for d, value, bound in zip(ds, values, bounds, strict=True):
            x, state = step(x, state, d, value=value, lower_bound=bound)
        y, other = whole(y, other, sum(ds) / 3, value=sum(values) / 3, lower_bound=sum(bounds) / 3)
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert int(state.steps.gradient_step) == 2


@pytest.mark.parametrize("make", [prox_sps, prox_sps_adam])
def test_partition_freezes_parameters_and_a_mask_does_not(make):
    """Also those that have no gradient, as the error for integers says."""
    params = {"w": jnp.ones(3), "b": jnp.full(3, 2.0), "n": jnp.arange(3)}
    grads = {"w": jnp.ones(3), "b": jnp.ones(3), "n": jnp.zeros(3, int)}
    with pytest.raises(TypeError, match=r"int32, which has no gradient: leave it out with optax\.partition"):
        make().init(params)
    labels = {"w": "train", "b": "frozen", "n": "frozen"}
    opt = optax.partition({"train": make(), "frozen": optax.set_to_zero()}, labels)
    updates, _ = opt.update(grads, opt.init(params), params, value=1.0)
    new = optax.apply_updates(params, updates)
    assert not jnp.array_equal(new["w"], params["w"])
    assert all(jnp.array_equal(new[name], params[name]) for name in ("b", "n"))
    masked = optax.masked(make(), {"w": True, "b": False, "n": False})
    updates, _ = masked.update(grads, masked.init(params), params, value=1.0)
    assert jnp.array_equal(updates["b"], grads["b"])  # the raw gradient


def test_masked_and_absent_gradients_are_left_alone(kit):
    w, b, dw, db = kit.drawn(0, (4,), (2,), (4,), (2,))
    params = {"w": w, "b": b}
    plain = prox_sps(weight_decay=0.5)
    expected, _ = plain.update(dw, plain.init(w), w, value=1.0)
    masked = optax.masked(prox_sps(weight_decay=0.5), {"w": True, "b": False})
    updates, _ = masked.update({"w": dw, "b": db}, masked.init(params), params, value=1.0)
    np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)
    assert jnp.array_equal(updates["b"], db)  # as optax does with what a mask leaves out
    labelled = prox_sps(labels={"w": "a", "b": "b"}, groups={"a": {"weight_decay": 0.5}, "b": {}})
    for absent in (None, optax.MaskedNode()):
        updates, state = labelled.update({"w": dw, "b": absent}, labelled.init(params), params, value=1.0)
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)
        assert updates["b"] == absent
        assert state.last_step.tau.shape == (2,)


def test_nothing_to_do():
    opt = prox_sps(weight_decay=0.1)
    updates, state = opt.update({"w": None}, opt.init({"w": None}), {"w": None}, value=1.0)
    assert updates == {"w": None}
    assert int(state.count) == 1


# prox, after other optimizers


def test_prox_after_sgd_is_proximal_sgd(kit):
    params, grads = kit.drawn(0, (5,), (3,)), kit.drawn(1, (5,), (3,))
    schedule = optax.linear_schedule(0.5, 0.1, 3)
    chained = optax.chain(optax.sgd(schedule), prox(L1(0.4), schedule))
    whole = prox_sgd(schedule, regularizer=L1(0.4))
    step, state, other_step, other_state = (
        kit.stepper(chained),
        chained.init(params),
        kit.stepper(whole),
        whole.init(params),
    )
    others = params
    for _ in range(3):
        params, state = step(params, state, grads)
        others, other_state = other_step(others, other_state, grads)
        for a, b in zip(params, others, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert sum(int((p == 0).sum()) for p in params) > 0


def test_prox_after_adam_keeps_a_constraint(kit):
    opt = optax.chain(optax.adam(0.3), prox(NonNegative()))
    (x,) = kit.drawn(0, (20,))
    step, state = kit.stepper(opt), opt.init(x)
    for k in range(3):
        x, state = step(x, state, kit.drawn(k, (20,))[0])
        assert float(x.min()) == 0


def test_prox_with_a_rate_of_zero_changes_no_update(kit):
    x, v = kit.drawn(0, (4,), (4,))
    opt = prox(NonNegative(), 0.0)
    np.testing.assert_allclose(opt.update(v, opt.init(x), x)[0], v, rtol=1e-6, atol=1e-7)


# A model, end to end


def test_an_equinox_model_learns(kit):
    """Modules carry functions and None; the loss of a small network on a separable task falls to a fiftieth."""
    key = jax.random.key(0)
    model = eqx.nn.MLP(2, "scalar", 16, 1, key=key)
    points = jax.random.normal(jax.random.key(1), (64, 2))
    targets = jnp.sign(points[:, 0])
    groups = {"weights": {"weight_decay": 1e-4}, "biases": {"learning_rate": 0.5}}
    labels = jax.tree.map(lambda x: "weights" if x.ndim > 1 else "biases", eqx.filter(model, eqx.is_array))
    opt = prox_sps(labels=labels, groups=groups)

    def loss(model):
        return jnp.mean(jnp.logaddexp(0.0, -targets * jax.vmap(model)(points)))

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = opt.update(grads, state, eqx.filter(model, eqx.is_array), value=value)
        return eqx.apply_updates(model, updates), state, value

    state = opt.init(eqx.filter(model, eqx.is_array))
    first = None
    for _ in range(200):
        model, state, value = step(model, state)
        first = value if first is None else first
    assert float(value) < float(first) / 50

    # A model may also be handed over as it is, with functions among its leaves.
    def whole(model):
        return opt.update(eqx.filter_grad(loss)(model), state, model, value=value)[0]

    assert jax.tree.structure(eqx.filter_eval_shape(whole, model)) == jax.tree.structure(
        eqx.filter(model, eqx.is_array)
    )


def test_sps_adds_the_regularizer_itself(kit):
    """Equal to a step on the regularised loss written out by hand."""
    x, d = kit.drawn(0, (5,), (5,))
    opt, plain = sps(regularizer=L1(0.3)), sps()
    got, _ = opt.update(d, opt.init(x), x, value=1.0)
    value = 1.0 + 0.3 * jnp.abs(x).sum()
    expected, _ = plain.update(d + 0.3 * jnp.sign(x), plain.init(x), x, value=value)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
