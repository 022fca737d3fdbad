"""Momentum, Adam's metric and steps without a learning rate: the steps of the torch optimizers, to rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from proxsps.jax import prox_sps, prox_sps_adam, schedule_free_sps
from proxsps.optim import ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.regularizers import L1, L2, GroupLasso, SparseGroupLasso

SHAPES = [(5, 13)] * 2
HEIGHTS = (0.05, 20.0, 0.3, 1e-3)  # of the loss, over ||g||
TOLERANCE = {"float64": 1e-10, "float32": 4e-5}
REGULARIZERS: dict[str, dict[str, Any]] = {
    "weight_decay": {"weight_decay": 0.7},
    "L1": {"regularizer": L1(0.3)},
    "GroupLasso": {"regularizer": GroupLasso.rows(0.4)},
    "SparseGroupLasso": {"regularizer": SparseGroupLasso(0.1, 0.3, dims=(1,))},
    "L2": {"regularizer": L2(0.7)},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "matched": {"cap": "matched", "learning_rate": 5.0},
    "distance": {"distance_cap": True, "momentum": 0.5},
    "no rate": {"learning_rate": None, "momentum": 0.9},
    "no rate, proximal, no bound": {"learning_rate": None, "cap": "proximal", "lower_bound": None},
    "adam": {"b1": 0.9, "b2": 0.999},
    "adam, rate": {"b1": 0.8, "b2": 0.95, "eps": 1e-3, "learning_rate": 0.5},
    "adam, proximal": {"b1": 0.9, "b2": 0.999, "learning_rate": 0.3, "cap": "proximal", "distance_cap": True},
}
PAIRS = [(name, "weight_decay") for name in VARIANTS]
PAIRS += [("no rate", kind) for kind in ("L1", "SparseGroupLasso")] + [
    ("adam", kind) for kind in ("L1", "GroupLasso", "L2")
]


def pair_of(kit: Any, name: str, options: dict[str, Any], groups: list[list[jax.Array]], own: list[dict[str, Any]]):
    """The same optimizer twice."""
    settings = {**VARIANTS[name], **options}
    is_adam = "b1" in settings
    opt = (prox_sps_adam if is_adam else prox_sps)(**settings)
    if is_adam:
        betas = settings.pop("b1"), settings.pop("b2")
        settings = {"learning_rate": None, "betas": betas, **settings}
    method = type("Counterpart", (), {"torch": ProxSPSAdam if is_adam else ProxSPS, "lr": 1.0})
    return opt, kit.torch_optimizer(method, groups, own, **settings)


def agree(kit: Any, ours: Any, theirs: Any, tolerance: float, what: str = "") -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(kit.as_numpy(a), kit.as_numpy(b), rtol=tolerance, atol=tolerance, err_msg=what)


def losses(gs: list[jax.Array]) -> float:
    return sum(float(jnp.sum(g**2)) for g in gs) ** 0.5


def steps(kit: Any, name: str, options: dict[str, Any], dtype: str) -> None:
    """Four steps side by side, from the same start."""
    xs = [jnp.clip(x, -0.8, 1.1) for x in kit.drawn(0, *SHAPES, dtype=dtype)]
    opt, other = pair_of(kit, name, options, [xs], [{}])
    state, tolerance = opt.init(xs), TOLERANCE[dtype]
    for k, height in enumerate(HEIGHTS):
        gs = kit.drawn(k + 1, *SHAPES, dtype=dtype)
        value = height * losses(gs)
        (expected,) = kit.torch_step(other, [gs], value)
        updates, state = opt.update(gs, state, xs, value=value)
        xs = [x + update for x, update in zip(xs, updates, strict=True)]
        agree(kit, xs, expected, tolerance, f"step {k}")
        for field in ("tau", "u", "gap"):
            ours, theirs = getattr(state.last_step, field), getattr(other.last_step, field)
            agree(kit, ours, theirs, 10 * tolerance, field)
        agree(kit, state.last_step.distance_cap, other.last_step.distance_cap, 10 * tolerance, "distance_cap")
        assert state.last_step.branch_name == other.last_step.branch_name
        assert state.last_step.cap_name == other.last_step.cap_name
    memory = state.memory
    for i, param in enumerate(other.param_groups[0]["params"]):
        for tree, key in ((memory.average, "average"), (memory.square, "square")) if memory else ():
            if tree != ():
                agree(kit, tree[i], other.state[param][key], tolerance, key)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_steps_and_moments_are_those_of_torch(kit, name, kind):
    with jax.enable_x64(True):
        steps(kit, name, REGULARIZERS[kind], "float64")


def test_single_precision(kit):
    steps(kit, "adam", REGULARIZERS["L1"], "float32")


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_parameter_without_a_gradient_rests(kit, name):
    """Its gradient is None in torch, and absent in JAX; neither it nor its averages change."""
    with jax.enable_x64(True):
        xs = kit.drawn(0, *SHAPES, dtype="float64")
        opt, other = pair_of(kit, name, {"weight_decay": 0.1}, [xs], [{}])
        state = opt.init(xs)
        for k, frozen in enumerate((False, True, True, False)):
            gs = kit.drawn(k + 1, *SHAPES, dtype="float64")
            last = other.param_groups[0]["params"][1]
            for param, g in zip(other.param_groups[0]["params"], gs, strict=True):
                param.grad = None if frozen and param is last else kit.as_torch(g)
            other.step(loss=3.0)
            before = [state.memory.average[1], *state.memory.square[1:]]
            updates, state = opt.update([gs[0], None if frozen else gs[1]], state, xs, value=3.0)
            after = [state.memory.average[1], *state.memory.square[1:]]
            assert all([bool((old == new).all()) == frozen for old, new in zip(before, after, strict=True)])
            assert (updates[1] is None) == frozen
            xs = [x if update is None else x + update for x, update in zip(xs, updates, strict=True)]
            agree(kit, xs, [param.detach() for param in other.param_groups[0]["params"]], 1e-10, f"step {k}")


def test_labels_with_factors_of_their_own(kit):
    """The factor of a label is the lr of a group that a scheduler has set."""
    with jax.enable_x64(True):
        xs, factors = kit.drawn(0, *SHAPES, dtype="float64"), (0.5, 0.2)
        own = [{"regularizer": L1(0.1)}, {"weight_decay": 0.3}]
        groups = {i: {**options, "scale": factor} for i, (options, factor) in enumerate(zip(own, factors, strict=True))}
        _, other = pair_of(kit, "no rate", {}, [[x] for x in xs], own)
        for group, factor in zip(other.param_groups, factors, strict=True):
            group["lr"] = factor
        opt = prox_sps(None, momentum=0.9, labels=[0, 1], groups=groups)
        state = opt.init(xs)
        for k in range(3):
            gs = kit.drawn(k + 1, *SHAPES, dtype="float64")
            expected = kit.torch_step(other, [[g] for g in gs], 0.3)
            updates, state = opt.update(gs, state, xs, value=0.3)
            xs = [x + update for x, update in zip(xs, updates, strict=True)]
            agree(kit, [[x] for x in xs], expected, 1e-10, f"step {k}")
            agree(kit, state.last_step.tau, other.last_step.tau, 1e-10)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("schedule_free", [False, True])
def test_entries_without_a_gradient_so_far(eps, schedule_free):
    """Where the loss says nothing, the regulariser decides, also if eps is 0: a long step to its minimiser."""
    x = torch.tensor([2.0, 1.0, -1.0], requires_grad=True)
    w, grads = jnp.asarray(x.detach().numpy()), [[1.0, 0.0, -1.0], [1.0, 0.5, 0.0]]
    torch_class, transform = (ScheduleFreeSPS, schedule_free_sps) if schedule_free else (ProxSPSAdam, prox_sps_adam)
    opt, other = torch_class([x], regularizer=L1(0.01), eps=eps), transform(regularizer=L1(0.01), eps=eps)
    state = other.init(w)
    for k, g in enumerate(grads):
        x.grad = torch.tensor(g)
        opt.step(loss=1.0)
        updates, state = other.update(jnp.asarray(g), state, w, value=1.0)
        w = optax.apply_updates(w, updates)
        np.testing.assert_allclose(w, x.detach().numpy(), rtol=1e-5, atol=1e-6)
        assert k > 0 or x[1] == 0
