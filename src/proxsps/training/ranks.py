"""One process, or several that `torchrun` has started and that share every batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrainingRanks:
    """This process among those that train together, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of a batch of `count` samples, which has to be the same for all."""
        if count % self.size:
            raise ValueError(
                f"A batch of {count} images cannot be divided equally among {self.size} processes, so gradients "
                "would have unequal weights. Choose a multiple with --batch-size."
            )
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, with gradients that are averaged over the processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, [self.device] if self.device.type == "cuda" else None)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the processes, in a new tensor."""
        if self.size == 1:
            return value
        value = value.detach().clone()
        dist.all_reduce(value)
        return value


ALONE = TrainingRanks(CPU)


@contextmanager
def joined(device: str | None = None) -> Iterator[TrainingRanks]:
    """The processes that `torchrun` has started, or only this one; one GPU per process if there are any."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(kind)
        torch.zeros(1, device=place).item()  # a device without memory, such as meta, cannot do this
    except (RuntimeError, AssertionError) as error:  # NotImplementedError is one of the former
        reason = str(error).splitlines()[0]
        raise ValueError(f"The device {kind!r} cannot be used here ({reason}). Try --device cpu.") from None
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield TrainingRanks(place)
        return
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield TrainingRanks(place, dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
