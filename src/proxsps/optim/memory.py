"""The memory of an optimizer: numbers in its parameter groups, tensors in its state."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, chosen
from proxsps.optim.blocks import PLAIN
from proxsps.optim.numbers import Device, Numbers

State = Mapping[Tensor, dict[str, Any]]


def store(group: dict[str, Any], key: str, value: Tensor | float) -> None:
    """Store a number in a group; a tensor in place, so that a captured step finds it again."""
    if isinstance(value, Tensor) and isinstance(group[key], Tensor) and not torch.compiler.is_compiling():
        group[key].copy_(value)
    else:
        group[key] = value.clone() if isinstance(value, Tensor) else value


def store_all(groups: Sequence[dict[str, Any]], **values: Tensor | float) -> None:
    """Store numbers of the whole step in all groups; tensors in place, and all at once."""
    held = [(group[key], value) for group in groups for key, value in values.items()]
    if held and all(isinstance(part, Tensor) for pair in held for part in pair) and not torch.compiler.is_compiling():
        old, new = (list(column) for column in zip(*held, strict=True))
        torch._foreach_copy_(old, new)
        return
    for group in groups:
        for key, value in values.items():
            store(group, key, value)


def keep_numbers(
    groups: Sequence[dict[str, Any]], numbers: Numbers, ok: Array, changes: Mapping[str, tuple[Array, Array]]
) -> None:
    """Store numbers of the whole step if it was taken; each is given with its values after and before the step."""
    if not changes:
        return
    after, before = zip(*changes.values(), strict=True)
    if isinstance(numbers, Device):  # on the host, a skipped step has stopped before
        after = chosen(ok, after, before).unbind()
    store_all(groups, **dict(zip(changes, map(numbers.factor, after), strict=True)))


def blank(owner: Tensor) -> Tensor:
    """Zeros for an average of a parameter's gradients: like the parameter, in at least single precision."""
    return torch.zeros_like(owner, dtype=memory_dtype("average", owner), requires_grad=False)


def memory_dtype(key: str, owner: Tensor) -> torch.dtype:
    """The dtype of a state tensor: counts are f32, averages at least f32, and sampled parameters keep their dtype."""
    if key == "steps":
        return torch.float32
    half = owner.dtype in (torch.float16, torch.bfloat16)
    if key == "origin":
        return owner.dtype.to_real()
    return torch.float32 if half else owner.dtype


def restored(key: str, value: Tensor, saved: Any, owner: Tensor) -> Tensor:
    """A loaded value in the right dtype: as it was saved, unless torch has changed it."""
    dtype = memory_dtype(key, owner)
    if value.dtype is dtype or not isinstance(saved, Tensor):
        return value.clone() if value.dtype is dtype else value.to(dtype)
    on = saved.to(value.device)
    same = torch.equal(local_entries(on.to(value.dtype)), local_entries(value))
    return on.to(dtype, copy=True) if same else value.to(dtype)


def follow_dtypes(state: State, groups: Sequence[dict[str, Any]]) -> None:
    """Convert state to what it is for parameters that have got another dtype, for instance by `model.double()`."""
    for owner in (param for group in groups for param in group["params"]):
        own = state.get(owner, {})
        for key in own.keys() & {"average", "square", "origin"}:
            own[key] = own[key].to(memory_dtype(key, owner))


def local_entries(tensor: Tensor) -> Tensor:
    """The shard of this rank of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def entries(held: Tensor, whole: bool) -> Tensor:
    """A state tensor in the form that blocks use: real, and if it is sharded, the shard of this rank or the `whole`."""
    if type(held) not in PLAIN and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import held_entries

        held = held_entries(held, whole)
    return torch.view_as_real(held) if held.is_complex() else held


def replace(owner: Tensor, own: dict[str, Any], key: str, new: Tensor, whole: bool) -> None:
    """Store new entries of a state tensor, in the form that `entries` returned."""
    new = torch.view_as_complex(new) if owner.is_complex() else new
    if type(owner) not in PLAIN and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import keep_entries

        if keep_entries(owner, own, key, new, whole):
            return
    own[key] = new
