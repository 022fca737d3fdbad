"""The numbers of a step on a device: tensors that are never read back, so that a step can be captured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace, chosen

array_namespace(torch.empty(0))  # fills its cache, so that a step is compiled only once


class Numbers:
    """Makes numbers on a device, in few kernels and without copies from the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtype = torch.float32 if device.type == "mps" else torch.float64  # mps has no doubles

    def scalar(self, value: Tensor | float) -> Tensor:
        """A 0-d tensor."""
        if isinstance(value, Tensor):
            return value.to(self.device, self.dtype).reshape(())
        return torch.full((), value, dtype=self.dtype, device=self.device)  # a kernel, not a copy from the host

    def vector(self, values: Sequence[Tensor | float]) -> Tensor:
        """A tensor with one dim."""
        if len(values) == 1:
            return self.scalar(values[0]).reshape(1)
        plain = [value for value in values if not isinstance(value, Tensor)]
        if len(plain) == len(values) and len(set(plain)) == 1:
            return torch.full((len(plain),), plain[0], dtype=self.dtype, device=self.device)
        if len(plain) == len(values) == 2 and all(map(math.isfinite, plain)):  # one kernel for two different numbers
            return torch.linspace(plain[0], plain[1], 2, dtype=self.dtype, device=self.device)
        return torch.stack([self.scalar(value) for value in values])

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of tensors of one shape."""
        if len(parts) == 1:
            return parts[0].to(self.dtype)
        return torch.stack(list(parts)).sum(0, dtype=self.dtype) if parts else self.scalar(0.0)


def step_device(params: Sequence[Tensor], capturable: bool) -> torch.device | None:
    """The device on which the numbers of a step stay; None if the host may read them."""
    on_cpu = all([x.is_cpu for x in params])  # cheaper for each tensor than its device
    if on_cpu and not capturable and not torch.compiler.is_compiling():
        return None
    devices = {x.device for x in params}
    if len(devices) > 1:
        raise ValueError(f"All parameters of one optimizer must be on one device, got {sorted(map(str, devices))}.")
    return devices.pop()


def scale_of(norm: Tensor) -> Tensor:
    """A norm that f32 can be divided by: if it is tiny or infinite, the nearest number of f32."""
    single = torch.finfo(torch.float32)
    return norm.clamp(single.tiny, single.max)


def keep_numbers(
    ok: Tensor, sets: Iterable[tuple[Sequence[dict[str, Any]], Mapping[str, tuple[Array, Array]]]]
) -> None:
    """Store numbers in groups if the step was taken; each is given with its values after and before the step."""
    found = [(group, key, *pair) for groups, changes in sets for group in groups for key, pair in changes.items()]
    if not found:
        return
    values = chosen(ok, [after for *_, after, _ in found], [before for *_, before in found]).unbind()
    held = [group[key] for group, key, *_ in found]
    if all(isinstance(old, Tensor) for old in held) and not torch.compiler.is_compiling():
        torch._foreach_copy_(held, values)
        return
    for (group, key, *_), value in zip(found, values, strict=True):
        store(group, key, value)


def store(group: dict[str, Any], key: str, value: Tensor) -> None:
    """Store a number in a group; in place where there is a tensor, so that a captured step finds it again."""
    if isinstance(group[key], Tensor) and not torch.compiler.is_compiling():
        group[key].copy_(value)
    else:
        group[key] = value.clone()
