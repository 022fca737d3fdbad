"""Updates outside of jax.jit: compiled once, equal to jitted ones, and never those of another regulariser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from proxsps.jax import multi_steps, prox, prox_sgd, prox_sps, sps
from proxsps.regularizers import L1, L2, Box, GroupLasso, Regularizer

COMPILED = {"programs": 0}
X, D = jnp.linspace(-1.0, 2.0, 6), jnp.linspace(1.0, -0.5, 6)


def _count(event, duration, **details):
    COMPILED["programs"] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def compiled_in(call):
    before = COMPILED["programs"]
    jax.block_until_ready(call())
    return COMPILED["programs"] - before


@dataclass(frozen=True)
class Weighted(Regularizer):
    """A weighted l1 norm, as users write it."""

    weights: Any

    def value(self, x):
        return (self.weights * abs(x)).sum()

    def prox(self, z, alpha):
        return z - z.clip(-alpha * self.weights, alpha * self.weights)

    def subgradient(self, x):
        return self.weights * jnp.sign(x)


@dataclass(frozen=True)
class Double(Regularizer):
    """Twice another one, which it holds."""

    inner: Regularizer

    def value(self, x):
        return 2 * self.inner.value(x)

    def prox(self, z, alpha):
        return self.inner.prox(z, 2 * alpha)


REGULARIZERS = {
    "none": {},
    "weight_decay": {"weight_decay": 0.3},
    "centre": {"regularizer": L2(0.3, np.ones(6))},
    "L1": {"regularizer": L1(0.2)},
    "GroupLasso": {"regularizer": GroupLasso(0.2)},
    "own": {"regularizer": Weighted(np.full(6, 0.2, "float32"))},
}


def test_the_counter_counts():
    assert compiled_in(lambda: jax.jit(lambda x: x * 1.2345)(X)) >= 1


@pytest.mark.parametrize("options", REGULARIZERS.values(), ids=REGULARIZERS)
def test_later_updates_compile_nothing(options):
    check_later_updates(prox_sps(1.0, **options))


def test_later_updates_of_any_method_compile_nothing(method):
    check_later_updates(method.make(method.lr, **REGULARIZERS["L1"]))


def check_later_updates(opt):
    state = opt.init(X)
    _, state = opt.update(D, state, X, value=1.0)
    for grad, value in ((2 * D, 0.5), (3 * D, 0.01), (D, jnp.float32(2.0))):
        assert compiled_in(lambda grad=grad, value=value: opt.update(grad, state, X, value=value)) == 0


def test_a_transformation_made_anew_compiles_nothing(method):
    """As `optax.inject_hyperparams` makes one in every update."""

    def update(rate, weight):
        opt = method.make(rate, weight_decay=weight)
        return opt.update(D, opt.init(X), X, value=1.0)

    weights = jnp.float32(0.3), jnp.float32(0.4)
    update(0.1, weights[0])
    assert compiled_in(lambda: update(0.2, weights[1])) == 0


WRAPPED = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(prox_sps)(learning_rate=0.3, weight_decay=0.2),
    "inject_hyperparams-sps": lambda: optax.inject_hyperparams(sps)(optax.linear_schedule(0.5, 0.1, 9), c=0.5),
    "multi_steps": lambda: multi_steps(prox_sps(regularizer=L1(0.1)), 2),
    "chain": lambda: optax.chain(optax.scale(2.0), prox_sps(regularizer=L1(0.1))),
    "masked": lambda: optax.masked(prox_sps(regularizer=L1(0.1)), True),
    "prox": lambda: optax.chain(optax.sgd(0.1), prox(GroupLasso(0.1))),
}


@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_transformations_compile_once(make):
    opt = make()
    state = opt.init(X)
    for _ in range(3):
        _, state = opt.update(D, state, X, value=1.0)
    for _ in range(3):
        assert compiled_in(lambda state=state: opt.update(D, state, X, value=1.0)) == 0


def test_eager_and_jitted_updates_agree(kit, method):
    opt = method.make(method.lr, **REGULARIZERS["L1"])
    updates, state = opt.update(D, opt.init(X), X, value=1.0)
    expected, after = kit.stepper(opt)(X, opt.init(X), D, value=1.0)
    np.testing.assert_allclose(X + updates, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.last_step.tau, after.last_step.tau, rtol=1e-5)


FAMILIES = {
    "centre": lambda w: L2(1.0, np.full(6, w, "float32")),
    "centre of JAX": lambda w: L2(1.0, jnp.full(6, w)),
    "centres": lambda w: L2(1.0, [np.full(6, w, "float32")] * 2),
    "number": lambda w: L2(1.0, w),
    "own, of NumPy": lambda w: Weighted(np.full(6, w, "float32")),
    "own, of JAX": lambda w: Weighted(jnp.full(6, w)),
    "own, a list": lambda w: Double(Weighted(np.full(6, w, "float32"))),
}


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_no_update_is_that_of_another_regularizer(make):
    """The point after a full step is the prox of X - D, whatever was compiled before."""
    for weight in (0.5, 1.5, 0.5):
        opt = prox_sps(1.0, regularizer=make(weight))
        updates, state = opt.update(D, opt.init(X), X, value=100.0)
        assert state.last_step.branch_name == "capped"
        np.testing.assert_allclose(X + updates, make(weight).at(0).prox(X - D, 1.0), rtol=1e-5, atol=1e-6)


def test_arrays_that_change_in_place_are_seen():
    weights = np.full(6, 0.5, "float32")
    opt = prox_sgd(1.0, regularizer=Weighted(weights))
    for weight in (0.5, 1.5):
        weights[:] = weight
        updates, _ = opt.update(D, opt.init(X), X)
        np.testing.assert_allclose(X + updates, L1(weight).prox(X - D, 1.0), rtol=1e-5, atol=1e-6)


def test_new_arrays_of_one_shape_compile_nothing():
    def update(phi):
        opt = prox_sps(1.0, regularizer=phi)
        return opt.update(D, opt.init(X), X, value=1.0)

    for make in (lambda w: L2(1.0, jnp.full(6, w)), lambda w: L1(jnp.float32(w)), lambda w: Weighted(jnp.full(6, w))):
        phis = [make(w) for w in (0.1, 0.2, 0.3)]
        update(phis[0])
        for phi in phis[1:]:
            assert compiled_in(lambda phi=phi: update(phi)) == 0


# Traced constants


@pytest.mark.parametrize(
    "make",
    [L1, lambda w: L2(0.5, w), lambda w: Box(-w, w), lambda w: Box(-0.25, w), lambda w: Double(L1(w))],
    ids=["L1", "centre", "Box", "Box, one side", "nested"],
)
def test_constants_of_regularizers_may_be_traced(make):
    def point(weight):
        opt = prox_sps(0.8, regularizer=make(weight))
        updates, _ = opt.update(D, opt.init(X), X, value=1.0)
        return X + updates

    weights = jnp.array([0.1, 0.9])
    for weight, got in zip(weights, jax.jit(jax.vmap(point))(weights), strict=True):
        np.testing.assert_allclose(got, point(weight), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(point(0.9), point(weights[1]), rtol=1e-5, atol=1e-6)


def test_a_box_with_traced_bounds():
    phi = jax.jit(lambda low, high: (Box(low, high).prox(X, 1.0), Box(low, high).value(X), Box(low, 5.0).value(X)))
    y, outside, inside = phi(-1.0, 0.5)
    np.testing.assert_allclose(y, Box(-1.0, 0.5).prox(X, 1.0))
    assert (float(outside), float(inside)) == (np.inf, 0.0)
    slope = jax.grad(lambda high: Box(-2.0, high).prox(X, 1.0).sum())(0.5)
    assert float(slope) == 3  # entries of X above the bound
    with pytest.raises(ValueError, match="Box: lower must be <= upper"):
        Box(jnp.float32(1.0), jnp.float32(0.0))
    with pytest.raises(ValueError, match=r"Box: upper must be one number, got an array of shape \(6,\)"):
        jax.jit(lambda x: Box(0.0, x).prox(x, 1.0))(X)


# A bound that nobody needs


@pytest.mark.parametrize("wrap", [lambda opt: opt, jax.jit], ids=["eager", "jit"])
def test_prox_sgd_refuses_a_lower_bound(wrap):
    opt = prox_sgd(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="prox_sgd does not use a lower bound; leave it out, or use prox_sps"):
        wrap(lambda bound: opt.update(D, opt.init(X), X, value=1.0, lower_bound=bound))(0.5)
    stepped = multi_steps(opt, 2)
    with pytest.raises(ValueError, match="prox_sgd does not use a lower bound"):
        stepped.update(D, stepped.init(X), X, value=1.0, lower_bound=0.5)
