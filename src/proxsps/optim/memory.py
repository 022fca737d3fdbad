"""The state of an optimizer: which tensors it holds for each parameter, in which dtypes, sharded or whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.lists import is_sharded
from proxsps.optim.rule import Rule

State = Mapping[Tensor, dict[str, Any]]
HALF = (torch.float16, torch.bfloat16)

# Besides averages of gradients and of their squares, and how many squares there were: sampled entries of the start, z,
# y of half-precision parameters, and y while a model with the zeros of a regulariser is evaluated.
ORIGIN, Z, Y, HELD = "origin", "z", "y", "held"
KEYS = {"average", "square", "steps", ORIGIN, Z, Y, HELD}


def new_state(owner: Tensor, key: str) -> Tensor:
    """A tensor of the state before the first step."""
    dtype = memory_dtype(key, owner)
    if key in (Z, Y):
        return owner.detach().clone().to(dtype)
    if key == "steps":
        return torch.zeros((), dtype=dtype, device=owner.device)
    return torch.zeros_like(owner, dtype=dtype, requires_grad=False)


def start_state(state: State, owner: Tensor, rule: Rule, spectral: bool) -> None:
    """Create what the state of a parameter lacks, but for the sampled entries of the start."""
    averages = rule.averages(spectral)
    points = [Z, *[Y] * (owner.dtype in HALF)] if rule.mix is not None else []
    for key in [*averages, *["steps"] * ("square" in averages), *points]:
        if key not in state[owner]:
            state[owner][key] = new_state(owner, key)


def least_metric(dtype: torch.dtype) -> float:
    """A lower bound for D = sqrt(v) + eps, and for norms: a smaller eps, or square, may be 0 in this precision."""
    return math.sqrt(torch.finfo(dtype).tiny)


def memory_dtype(key: str, owner: Tensor) -> torch.dtype:
    """The dtype of a state tensor: counts are f32, averages at least f32, and sampled parameters keep their dtype."""
    if key == "steps":
        return torch.float32
    if key == ORIGIN:
        return owner.dtype.to_real()
    if key == HELD:
        return owner.dtype
    return torch.float32 if owner.dtype in HALF else owner.dtype


def restored(key: str, value: Tensor, saved: Any, owner: Tensor) -> Tensor:
    """A loaded value in the right dtype: as it was saved, unless torch has changed it."""
    dtype = memory_dtype(key, owner)
    if value.dtype is dtype or not isinstance(saved, Tensor):
        return value.to(dtype, copy=True)
    on = saved.to(value.device)
    same = torch.equal(local_entries(on.to(value.dtype)), local_entries(value))
    return on.to(dtype, copy=True) if same else value.to(dtype)


def follow_dtypes(state: State, groups: Sequence[dict[str, Any]]) -> None:
    """Convert state to what it is for parameters that have got another dtype, for instance by `model.double()`."""
    for owner in (param for group in groups for param in group["params"]):
        own = state.get(owner, {})
        for key in own.keys() & KEYS:
            own[key] = own[key].to(memory_dtype(key, owner))
        if owner.dtype not in HALF:
            own.pop(Y, None)


def local_entries(tensor: Tensor) -> Tensor:
    """The shard of this rank of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def entries(held: Tensor, whole: bool) -> Tensor:
    """A state tensor in the form that blocks use: real, and if it is sharded, the shard of this rank or the `whole`."""
    if is_sharded(held):
        held = held.full_tensor() if whole else held.to_local()
    return torch.view_as_real(held) if held.is_complex() else held


def replace(owner: Tensor, own: dict[str, Any], key: str, new: Tensor, whole: bool) -> None:
    """Store new entries of a state tensor, in the form that `entries` returned."""
    new = torch.view_as_complex(new) if owner.is_complex() else new
    if is_sharded(owner):
        from proxsps.optim.shards import cut, sharded_like

        new = sharded_like(owner, cut(new, owner) if whole else new, owner.shape)
    own[key] = new
