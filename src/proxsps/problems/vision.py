"""Image classification by residual networks: the paper's deep experiments, and smaller ones of the same kind.

Images stay in uint8 until a batch is made. A batch is cropped and mirrored as a whole: the images are surrounded by
zeros, and one gather takes the right pixels of all of them. Draws are made on the CPU from the seed and the epoch
alone, so that a run can continue at any epoch, on any device and in any number of processes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from proxsps.problems.base import BASE_SEED, Problem, check_batch_size, check_choice, check_sizes, seeded
from proxsps.problems.datasets import DataError, data_folder
from proxsps.problems.image_cache import SIZE
from proxsps.problems.images import PUBLISHED, load_images
from proxsps.problems.names import CLASSES, check_depth, split_name
from proxsps.problems.resnet import ResNet

# Of ImageNet's pixels, red, green and blue, on the scale from 0 to 255.
MEAN = 255 * torch.tensor([0.485, 0.456, 0.406])
STD = 255 * torch.tensor([0.229, 0.224, 0.225])

Part = tuple[Tensor, Tensor]  # images and labels
DEEPEST, WIDEST = 1202, 1024  # the deepest one published; wider ones do not fit into memory


@dataclass(frozen=True)
class ImageClassification(Problem):
    """Cross-entropy of a residual network on small images; the validation error is the share of wrong answers.

    Published settings are the defaults: no batch normalisation, 16 channels in the first stage, batches of 128, random
    mirroring and crops out of a frame of zeros, pixels normalised by ImageNet's means and deviations, Kaiming-normal
    weights that are the same for all runs.

    Args:
        data: "cifar10", "imagenet32" or "synthetic"; `images.load_images` says where the files must be.
        depth: depth of the network, 6n + 2.
        width: channels of its first stage.
        batch_norm: whether convolutions are followed by batch normalisation.
        size: side length in pixels: 32, or 16 or 8 for images that are averaged to this size.
        images: number of training images, the first ones of the files; 0 for all.
        validation_images: the same for validation.
        augment: whether training images are mirrored and cropped at random.
        batch_size: images per step. An incomplete last batch is dropped.
        data_seed: seed of the starting weights.

    With `images`, an epoch counts in the schedules as the part of the data that it uses: schedules depend on the number
    of steps, not of epochs.
    """

    name: ClassVar[str] = "image-classification"
    reentrant: ClassVar[bool] = False  # functional_call puts parameters into the network and takes them out again

    data: str = "cifar10"
    depth: int = 56
    width: int = 16
    batch_norm: bool = False
    size: int = 32
    images: int = 0
    validation_images: int = 0
    augment: bool = True
    batch_size: int = 128
    data_seed: int = BASE_SEED

    def __post_init__(self) -> None:
        check_choice("data", self.data, tuple(CLASSES))
        check_sizes(width=self.width)
        check_batch_size(self.batch_size)
        check_depth(self.depth)
        if self.depth > DEEPEST or self.width > WIDEST:
            raise ValueError(
                f"depth is at most {DEEPEST} and width at most {WIDEST}, got {self.depth} and {self.width}."
            )
        if self.size not in (32, 16, 8):
            raise ValueError(f"size must be 32, 16 or 8, got {self.size!r}.")
        if not 0 <= self.images <= PUBLISHED[self.data] or self.validation_images < 0:
            raise ValueError(
                f"images must be between 0 (all) and {PUBLISHED[self.data]}, validation_images at least 0; got "
                f"{self.images!r} and {self.validation_images!r}."
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        return CLASSES[self.data]

    @property
    def pace(self) -> float:  # type: ignore[override]
        """Part of the published training images in an epoch."""
        return (self.images or PUBLISHED[self.data]) / PUBLISHED[self.data]

    @property
    def padding(self) -> int:
        """Zeros around an image before it is cropped: 4 pixels at 32 x 32."""
        return self.size // 8

    def network(self) -> ResNet:
        """The network with its starting weights, as a separate module."""
        with seeded(self.data_seed):
            return ResNet(self.depth, self.width, self.classes, self.batch_norm)

    def layers(self) -> ResNet:
        """The network."""
        return self.network()

    def start(self) -> dict[str, Tensor]:
        """The starting weights by name."""
        return {name: param.detach() for name, param in self.network().named_parameters()}

    def train_data(self) -> tuple[Tensor, Tensor]:
        """Images (N, 3, size, size) in uint8 and labels (N,)."""
        return _data(self.data, data_folder(), self.size, self.images, self.validation_images)[0]

    def validation_data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Images and labels of the validation set, the same for every seed."""
        return _data(self.data, data_folder(), self.size, self.images, self.validation_images)[1]

    def data_digest(self) -> str:
        """Sixteen digits that stand for the content of the data set, training and validation images."""
        text = "".join(part.digest for part in load_images(self.data))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Mean cross-entropy of images without augmentation; batch normalisation uses the statistics of this batch."""
        return functional.cross_entropy(self._scores(params, batch[0]), batch[1])

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """Share of images whose largest score is not that of their class."""
        return (self._scores(params, data[0]).argmax(1) != data[1]).float().mean()

    def _scores(self, params: dict[str, Tensor], images: Tensor) -> Tensor:
        network = _shell(self)
        # Copies of the running statistics are updated and thrown away: a loss is a pure function.
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        scores: Tensor = functional_call(network, {**params, **buffers}, (normalize(images),))
        return scores


def image_problem(name: str, **options: Any) -> ImageClassification:
    """The problem that a name such as "cifar10-resnet110" stands for: data set and depth, as published.

    `options` are those of `ImageClassification`.
    """
    data, depth = split_name(name)
    published = {"batch_norm": True, "batch_size": 512} if data == "imagenet32" else {}
    return ImageClassification(data=data, depth=depth, **{**published, **options})


class Draws(NamedTuple):
    """What augmentation does to each image: the corner of its crop in the frame, and whether it is mirrored."""

    top: Tensor
    left: Tensor
    mirrored: Tensor

    def at(self, index: slice) -> Draws:
        """The draws of some images."""
        return Draws(*(part[index] for part in self))


def draw(problem: ImageClassification, seed: int, epoch: int, count: int) -> Draws:
    """The draws of an epoch, one for each position in its order of images."""
    rng = np.random.default_rng((seed, epoch, 1))  # the order itself is drawn from (seed, epoch)
    corners = torch.from_numpy(rng.integers(0, 2 * problem.padding, (2, count), endpoint=True))
    return Draws(corners[0], corners[1], torch.from_numpy(rng.random(count) < 0.5))


def crop_and_mirror(images: Tensor, draws: Draws, padding: int) -> Tensor:
    """Crops of images, (B, 3, S, S), of the same size out of a frame of zeros, some mirrored."""
    device, size = images.device, images.shape[-1]
    line = torch.arange(size, device=device)
    top, left, mirrored = (part.to(device)[:, None] for part in draws)
    rows, columns = top + line, left + torch.where(mirrored, size - 1 - line, line)
    framed = functional.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
    every = torch.arange(len(images), device=device)[:, None, None]
    return framed[every, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def normalize(images: Tensor) -> Tensor:
    """Pixels from 0 to 255, normalised for the network."""
    mean, std = (part.to(images.device)[:, None, None] for part in (MEAN, STD))
    return (images - mean) / std


@lru_cache(maxsize=2)
def _shell(problem: ImageClassification) -> ResNet:
    """A network to call with other parameters than its own."""
    return problem.network()


@lru_cache(maxsize=4)
def _data(name: str, folder: Path | None, size: int, *counts: int) -> tuple[Part, Part]:
    train, validation = (
        _part(part.images, part.labels, size, count, f"{name} has {len(part.labels)} {kind} images")
        for part, count, kind in zip(load_images(name), counts, ("training", "validation"), strict=True)
    )
    return train, validation


def _part(images: np.ndarray, labels: np.ndarray, size: int, count: int, facts: str) -> tuple[Tensor, Tensor]:
    if count > len(labels):
        raise DataError(f"{facts}, but {count} are needed. Use fewer, or get the complete files.")
    chosen = slice(count or None)
    return torch.from_numpy(_averaged(images[chosen], SIZE // size)), torch.from_numpy(labels[chosen])


def _averaged(images: np.ndarray, factor: int) -> np.ndarray:
    """Images whose pixels are means of squares of pixels, rounded; halves go up."""
    if factor == 1:
        return images
    n, channels, height, width = images.shape
    squares = images.reshape(n, channels, height // factor, factor, width // factor, factor)
    found: np.ndarray = ((2 * squares.sum((3, 5), dtype=np.uint32) + factor**2) // (2 * factor**2)).astype(np.uint8)
    return found
