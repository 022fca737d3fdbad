"""Bad input gets one clear line; importing one front end does not load the other's framework."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from proxsps._install import extra
from proxsps.jax import dec_sps, multi_steps, prox, prox_sgd, prox_sps, prox_sps_adam, sps
from proxsps.regularizers import L1, L2, Box, NuclearNorm, TotalVariation1D

X = jnp.ones(3)


def test_a_missing_value(bounded_method):
    opt = bounded_method.make()
    with pytest.raises(ValueError, match=rf"{bounded_method.name} needs the loss value: call update\(.*value=loss"):
        opt.update(X, opt.init(X), X)
    with pytest.raises(ValueError, match="multi_steps needs the loss value"):
        multi_steps(opt, 2).update(X, None, X)


def test_missing_parameters(method):
    opt = method.make(method.lr)
    with pytest.raises(ValueError, match=f"{method.name} needs the parameters"):
        opt.update(X, opt.init(X), value=1.0)
    with pytest.raises(ValueError, match="prox needs the parameters"):
        prox(L1(0.1)).update(X, prox(L1(0.1)).init(X))


def test_a_value_that_is_no_number():
    opt = prox_sps()
    with pytest.raises(ValueError, match=r"one number, got shape \(2,\)"):
        opt.update(X, opt.init(X), X, value=jnp.ones(2))
    updates, _ = opt.update(X, opt.init(X), X, value=jnp.ones((1, 1)))
    assert updates.shape == (3,)


@pytest.mark.parametrize("constant", [-1.0, math.nan, math.inf])
def test_constants_out_of_range(method, constant):
    for name in ("learning_rate", "weight_decay"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number >= 0, got {constant}"):
            method.make(**{"learning_rate": 1.0, name: constant})
    with pytest.raises(ValueError, match="learning_rate must be"):
        prox(L1(0.1), constant)
    with pytest.raises(ValueError, match="learning_rate must be"):
        method.make(1.0, labels="a", groups={"a": {"learning_rate": constant}})
    for make, name in ((sps, "c"), (dec_sps, "c0")):
        for value in (constant, 0.0):
            with pytest.raises(ValueError, match=f"{name} must be a positive number"):
                make(**{name: value})


def test_bounds_that_are_not_finite(bounded_method):
    for bound in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="lower_bound must be a finite number"):
            bounded_method.make(lower_bound=bound)
        opt = bounded_method.make()
        with pytest.raises(ValueError, match="lower_bound must be a finite number"):
            opt.update(X, opt.init(X), X, value=1.0, lower_bound=bound)


def test_an_array_of_constants():
    for name in ("learning_rate", "weight_decay", "lower_bound"):
        with pytest.raises(ValueError, match=rf"{name} must be one number, got shape \(2,\).*jax.vmap"):
            prox_sps(**{name: jnp.ones(2)})


def test_regularizers_that_cannot_be_taken(method):
    with pytest.raises(ValueError, match=r"TotalVariation1D\(lam=0.1\) works on the host and cannot be traced"):
        method.make(1.0, regularizer=TotalVariation1D(0.1))
    with pytest.raises(ValueError, match="cannot be traced"):
        prox(TotalVariation1D(0.1))
    for nothing in (0.1, "l1", L1):
        with pytest.raises(ValueError, match=r"must be a proxsps\.regularizers\.Regularizer"):
            method.make(1.0, regularizer=nothing)
    with pytest.raises(ValueError, match=r"both weight_decay=0.1 and regularizer=L1.*ElasticNet"):
        method.make(1.0, weight_decay=0.1, regularizer=L1(0.1))
    with pytest.raises(ValueError, match="both weight_decay"):
        jax.jit(lambda decay: method.make(1.0, weight_decay=decay, regularizer=L1(0.1)).init(X))(0.1)
    with pytest.raises(ValueError, match="does not fit parameter 1 of its group: NuclearNorm: needs a matrix"):
        method.make(1.0, regularizer=NuclearNorm(0.1)).init([jnp.ones((2, 2)), X])
    with pytest.raises(ValueError, match="lam must be a finite number >= 0"):
        L1(-0.1)


def test_a_regularizer_without_subgradient(coupled_method):
    with pytest.raises(ValueError, match=r"needs its subgradient, which Box.*Use prox_sps or prox_sgd"):
        coupled_method.make(regularizer=Box(0.0, 1.0))


def test_labels_and_groups(method):
    with pytest.raises(ValueError, match="needs labels and groups together"):
        method.make(1.0, labels="a")
    with pytest.raises(ValueError, match="needs labels and groups together"):
        method.make(1.0, groups={"a": {}})
    with pytest.raises(ValueError, match=r"Unknown key 'learning_rat'.*Did you mean 'learning_rate'"):
        method.make(1.0, labels="a", groups={"a": {"learning_rat": 1.0}})
    with pytest.raises(ValueError, match="Label 'c' has no options: groups has 'a', 'b'"):
        method.make(1.0, labels={"w": "c"}, groups={"a": {}, "b": {}}).init({"w": X})
    with pytest.raises(ValueError, match="both weight_decay"):
        method.make(1.0, weight_decay=0.1, labels="a", groups={"a": {"regularizer": L1(0.1)}})


@pytest.mark.parametrize(("dtype", "hint"), [("complex64", "real and imaginary part"), ("int32", "leave it out")])
def test_parameters_that_are_not_real(method, dtype, hint):
    opt = method.make(method.lr)
    x = jnp.ones(3, dtype)
    with pytest.raises(TypeError, match=f"dtype {dtype}.*{hint}"):
        opt.init(x)
    with pytest.raises(TypeError, match=f"dtype {dtype}.*{hint}"):
        opt.update(X, opt.init(X), x, value=1.0)


def test_too_few_centres():
    with pytest.raises(ValueError, match="center holds 1 arrays, but the group has a tensor number 1"):
        prox_sgd(1.0, regularizer=L2(0.1, [jnp.ones(3)])).init([X, X])


def run(code: str) -> str:
    """What a process prints in which XLA has its default settings."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


STEP = """
import sys
import jax, jax.numpy as jnp
from proxsps.jax import prox_sps
from proxsps.regularizers import L1

x, d = jnp.linspace(-1.0, 2.0, 67), jnp.linspace(1.0, -0.5, 67)
opt = prox_sps(0.8, regularizer=L1(0.2))
updates, state = jax.jit(lambda x, d, value: opt.update(d, opt.init(x), x, value=value))(x, d, 5.0)
"""


def test_jax_users_never_load_torch_and_torch_users_never_load_jax():
    """The step of a user, who compiles with XLA's default settings, is the one that the tests here look at."""
    here: dict[str, Any] = {}
    exec(STEP, here)
    printed = run(STEP + "print('torch' in sys.modules, state.last_step.branch_name, *updates)")
    loaded, branch, *updates = printed.split()
    assert (loaded, branch) == ("False", here["state"].last_step.branch_name)
    np.testing.assert_allclose(np.array(updates, "float32"), here["updates"], rtol=1e-5, atol=1e-6)
    assert run("import sys, proxsps.optim, proxsps.sweep.batched; print('jax' in sys.modules)") == "False"


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_the_error_without_jax_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\ntry: import proxsps.jax\nexcept ImportError as e: print(e)"
    assert run(code).startswith(f"proxsps.jax needs jax and optax: {extra('jax')}")


def test_names_of_torch_get_a_suggestion():
    for call, name in (
        (lambda: prox_sps(lr=1.0), "learning_rate"),
        (lambda: prox_sgd(step_size=1.0), "learning_rate"),
        (lambda: prox_sps_adam(betas=(0.9, 0.999)), "b1"),
        (lambda: sps(weight_decy=0.1), "weight_decay"),
        (lambda: prox(L1(0.1), lr=1.0), "learning_rate"),
    ):
        with pytest.raises(TypeError, match=rf"has no argument '\w+'. Did you mean '{name}'\?"):
            call()


def test_gradients_of_another_shape():
    opt = prox_sps()
    with pytest.raises(ValueError, match=r"gradient of shape \(4,\) for a parameter of shape \(3,\)"):
        opt.update(jnp.ones(4), opt.init(X), X, value=1.0)
    with pytest.raises(ValueError, match=r"gradient of shape \(\) for a parameter of shape \(3,\)"):
        opt.update(jnp.ones(()), opt.init(X), X, value=1.0)


@pytest.mark.parametrize("make", [prox_sps_adam, dec_sps, lambda: prox_sps(None), lambda: prox_sps(momentum=0.9)])
def test_states_of_another_transformation(make):
    opt = make()
    for other in (optax.adam(0.1), prox_sps(1.0)):
        with pytest.raises(ValueError, match=r"got a state of another transformation, a \w+"):
            opt.update(X, other.init(X), X, value=1.0)
