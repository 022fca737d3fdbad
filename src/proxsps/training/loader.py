"""The batches of an epoch, prepared for the network on its device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from proxsps.problems.vision import ImageClassification, crop_and_mirror, draw, normalize
from proxsps.sweep.result import batches
from proxsps.training.ranks import TrainingRanks

Batch = tuple[Tensor, Tensor]  # normalised images (B, 3, S, S), channels last in memory, and labels (B,)
EVALUATED = 500  # images in a batch of an evaluation


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
