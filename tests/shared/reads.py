"""What the host waits for, which on an accelerator is slow and cannot be captured."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKING = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique"}


class Reads(TorchDispatchMode):
    """Names of the operations that read a number, or whose shape depends on data; and how many there are in all."""

    def __init__(self, *further: str) -> None:
        super().__init__()
        self.names, self.seen, self.operations = BLOCKING | set(further), [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.overloadpacket.__name__
        # A boolean index looks up its positions first.
        lists = [arg for arg in args if isinstance(arg, (list, tuple))] if name.startswith("index") else []
        mask = any(isinstance(t, Tensor) and t.dtype is torch.bool for own in lists for t in own)
        if name in self.names or mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
