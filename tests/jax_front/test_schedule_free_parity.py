"""The schedule-free step: the steps of the torch optimizer, to rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from proxsps.jax import eval_params, schedule_free_sps
from proxsps.optim import ScheduleFreeSPS
from proxsps.regularizers import L1, GroupLasso

SHAPES = {"w": (9, 8), "b": (70,), "f": (6, 4, 3, 3)}
HEIGHTS = (0.5, 1e3, 0.1, 20.0, 1e-3, 2.0)  # of the losses
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}
VARIANTS: dict[str, dict[str, Any]] = {
    "adam, decay": {"weight_decay": 0.4},
    "adam, L1": {"regularizer": L1(0.3)},
    "adam, rows": {"regularizer": GroupLasso.rows(9.0), "rest": {"weight_decay": 0.1}},
    "adam, no bound": {"lower_bound": None},
    "adam, rate": {"learning_rate": 0.02, "b1": 0.8, "b2": 0.9, "eps": 1e-3},
    "spectral, decay, limit": {"metric": "spectral", "weight_decay": 0.4, "max_move": 0.05},
    "spectral, factors": {"metric": "spectral", "scale": 0.5, "rest": {"scale": 0.25}},
    "adam, a set at rest": {"rest": {"scale": 0.0}},
}


def pair_of(options: dict[str, Any], xs: dict[str, jax.Array], kit: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The same optimizer twice, with matrices and the rest as groups, and torch's parameters."""
    shared = {key: value for key, value in options.items() if key not in ("metric", "regularizer", "rest")}
    shared.setdefault("lower_bound", 0.0)  # so that regularisers need searches
    rest = options.get("rest", {})
    own = {key: options[key] for key in ("metric", "regularizer") if key in options}
    ours = schedule_free_sps(
        **shared,
        labels={"w": "matrices", "b": "rest", "f": "matrices"},
        groups={"matrices": {**own, "set": "matrices"}, "rest": {**rest, "set": "rest"}},
    )
    params = {name: torch.nn.Parameter(kit.as_torch(x)) for name, x in xs.items()}
    names = {"learning_rate": "lr", "scale": "factor"}
    betas = {"betas": (shared.pop("b1"), shared.pop("b2"))} if "b1" in shared else {}
    groups = [
        {"params": [params["w"], params["f"]], "set": "matrices", **own},
        {"params": [params["b"]], "set": "rest", **{names.get(key, key): value for key, value in rest.items()}},
    ]
    theirs = ScheduleFreeSPS(groups, **betas, **{names.get(key, key): value for key, value in shared.items()})
    return ours, theirs, params


def agree(kit: Any, ours: Any, theirs: Any, tolerance: float, what: str) -> None:
    np.testing.assert_allclose(kit.as_numpy(ours), kit.as_numpy(theirs), rtol=tolerance, atol=tolerance, err_msg=what)


def steps(kit: Any, options: dict[str, Any], dtype: str) -> list[str]:
    """Six steps side by side; returns their branches."""
    xs = dict(zip(SHAPES, kit.drawn(0, *SHAPES.values(), dtype=dtype), strict=True))
    opt, other, params = pair_of(options, xs, kit)
    state, step, tolerance, seen = opt.init(xs), jax.jit(opt.update), TOLERANCE[dtype], []
    for k, value in enumerate(HEIGHTS):
        gs = dict(zip(SHAPES, kit.drawn(k + 1, *SHAPES.values(), dtype=dtype), strict=True))
        if value < 0.01:  # a model that is below its bound at z
            gs = {name: 10 * (x - state.memory.z[name]) for name, x in xs.items()}
        for name, param in params.items():
            param.grad = kit.as_torch(gs[name])
        other.step(loss=value)
        updates, state = step(gs, state, xs, value=value)
        xs = optax.apply_updates(xs, updates)
        last = state.last_step
        for name, param in params.items():
            agree(kit, xs[name], param, tolerance, f"{name}, step {k}")
            agree(kit, state.memory.z[name], other.state[param]["z"], tolerance, f"z of {name}, step {k}")
        agree(kit, last.tau, other.last_step.tau, tolerance, "tau")
        squares = [other.param_groups[i]["g_sq"] for i in (0, 1)]
        np.testing.assert_allclose(state.memory.travel.g_sq, squares, rtol=50 * tolerance, err_msg="G of both sets")
        agree(kit, last.gap, other.last_step.gap, 10 * tolerance, "gap")
        assert last.branch_name == other.last_step.branch_name
        seen.append(last.branch_name)
    shown = eval_params(state, xs)
    other.eval()
    for name, param in params.items():
        agree(kit, shown[name], param, tolerance, f"evaluated {name}")
        np.testing.assert_array_equal(np.asarray(shown[name]) == 0, kit.as_numpy(param) == 0)
    if "regularizer" in options:
        assert (np.asarray(shown["w"]) == 0).any()
    return seen


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_are_those_of_torch(kit, name):
    with jax.enable_x64(True):
        seen = steps(kit, VARIANTS[name], "float64")
    assert set(seen) == ({"capped"} if name == "adam, no bound" else {"truncated", "inside", "capped"})


@pytest.mark.parametrize("name", ["adam, L1", "spectral, decay, limit"])
def test_single_precision(kit, name):
    steps(kit, VARIANTS[name], "float32")


def test_a_parameter_without_a_gradient_rests(kit):
    with jax.enable_x64(True):
        xs = dict(zip(SHAPES, kit.drawn(0, *SHAPES.values(), dtype="float64"), strict=True))
        opt, other, params = pair_of({"metric": "spectral", "weight_decay": 0.1}, xs, kit)
        state = opt.init(xs)
        for k, absent in enumerate(([], ["w"], ["w", "b"], [])):
            gs = dict(zip(SHAPES, kit.drawn(k + 1, *SHAPES.values(), dtype="float64"), strict=True))
            for name, param in params.items():
                param.grad = None if name in absent else kit.as_torch(gs[name])
            other.step(loss=3.0)
            before = {name: (state.memory.z[name], state.memory.average[name]) for name in absent}
            updates, state = opt.update({n: None if n in absent else g for n, g in gs.items()}, state, xs, value=3.0)
            for name, held in before.items():
                assert updates[name] is None
                for a, b in zip(held, (state.memory.z[name], state.memory.average[name]), strict=True):
                    assert jnp.array_equal(a, b)
            xs = {n: x if updates[n] is None else x + updates[n] for n, x in xs.items()}
            for name, param in params.items():
                agree(kit, xs[name], param, 1e-12, f"{name}, step {k}")
