"""What an optimizer remembers: numbers in its parameter groups, tensors in its state."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.blocks import PLAIN

State = Mapping[Tensor, dict[str, Any]]


def store(group: dict[str, Any], key: str, value: Tensor | float) -> None:
    """Keep a number in a group; a tensor in place, so that a captured step finds it again."""
    if isinstance(value, Tensor) and isinstance(group[key], Tensor) and not torch.compiler.is_compiling():
        group[key].copy_(value)
    else:
        group[key] = value.clone() if isinstance(value, Tensor) else value


def store_all(groups: Sequence[dict[str, Any]], **values: Tensor | float) -> None:
    """Keep numbers of the whole step, in all groups alike."""
    for group in groups:
        for key, value in values.items():
            store(group, key, value)


def blank(owner: Tensor) -> Tensor:
    """Zeros for an average of a parameter's gradients: like the parameter, in single precision at least."""
    half = owner.dtype in (torch.float16, torch.bfloat16)
    return torch.zeros_like(owner, dtype=torch.float32 if half else owner.dtype, requires_grad=False)


def entries(held: Tensor, like: Tensor) -> Tensor:
    """What a state tensor holds of the entries that a block has of its parameter, `like`: real, and local or whole."""
    if type(held) not in PLAIN and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import held_entries

        held = held_entries(held, like)
    return torch.view_as_real(held) if held.is_complex() else held


def replace(owner: Tensor, own: dict[str, Any], key: str, new: Tensor) -> None:
    """Keep new entries of a state tensor, in the form that `entries` gave them."""
    new = torch.view_as_complex(new) if owner.is_complex() else new
    if type(owner) not in PLAIN and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import keep_entries

        if keep_entries(owner, own, key, new):
            return
    own[key] = new
