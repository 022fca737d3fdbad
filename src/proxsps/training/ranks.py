"""One process, or several that `torchrun` has started, and its part of every batch, prepared on its device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from proxsps.problems.vision import ImageClassification, crop_and_mirror, draw, normalize
from proxsps.sweep.spec import batches

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]  # normalised images (B, 3, S, S), channels last in memory, and labels (B,)
EVALUATED = 500  # images in a batch of an evaluation


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


def epoch_batches(problem: ImageClassification, seed: int, epoch: int, ranks: TrainingRanks) -> Iterator[Batch]:
    """This process's part of every batch of an epoch.

    Order and augmentation are drawn for the whole batch from the seed and the epoch: they do not depend on the number
    of processes, nor on where a run was resumed. Pixels are sent to the device as bytes.
    """
    images, labels = problem.train_data()
    order = batches(problem, seed, epoch)
    draws = draw(problem, seed, epoch, len(order) * problem.batch_size)
    mine = ranks.share(problem.batch_size)
    for step, index in enumerate(order):
        chosen = torch.from_numpy(index[mine])
        pixels = to_device(images[chosen], ranks.device)
        if problem.augment:
            first = step * problem.batch_size
            pixels = crop_and_mirror(pixels, draws.at(slice(first + mine.start, first + mine.stop)), problem.padding)
        yield prepared(pixels), to_device(labels[chosen], ranks.device)


def plain_batches(data: Batch, ranks: TrainingRanks, size: int = EVALUATED) -> Iterator[Batch]:
    """This process's part of a data set, without augmentation, in batches of at most `size`."""
    images, labels = data
    for first in range(ranks.rank * size, len(labels), ranks.size * size):
        part = slice(first, first + size)
        yield prepared(to_device(images[part], ranks.device)), to_device(labels[part], ranks.device)


def prepared(pixels: Tensor) -> Tensor:
    """Normalised pixels with the channels last in memory, which is fastest for convolutions."""
    return normalize(pixels).contiguous(memory_format=torch.channels_last)


def placed(network: nn.Module, device: torch.device) -> nn.Module:
    """A network on the device, with the memory format of `prepared`."""
    moved: nn.Module = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device; the copy to a GPU is not waited for."""
    if device.type != "cuda":
        return value
    return value.pin_memory().to(device, non_blocking=True)
