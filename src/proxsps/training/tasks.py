"""Networks to make sparse: a multi-layer perceptron on digits, and the residual networks of `proxsps train`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from proxsps import _install
from proxsps.problems.base import BASE_SEED, seeded
from proxsps.problems.datasets import DataError
from proxsps.problems.vision import ImageClassification, image_problem
from proxsps.sweep.loop import set_mode, take_steps
from proxsps.sweep.result import shuffled
from proxsps.training.loader import epoch_batches, plain_batches, prepared
from proxsps.training.ranks import TrainingRanks

DIGITS = "digits-mlp"
PARTS = (1047, 300, 450)  # of 1797 digits: for training, for choosing a network, and for scoring the chosen one


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8 x 8 pixels, as scikit-learn ships them, and a perceptron with two hidden layers."""

    hidden: tuple[int, int] = (300, 100)
    batch_size: int = 64

    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on, as plain data."""
        return {"task": DIGITS, "hidden": list(self.hidden), "batch_size": self.batch_size, "parts": list(PARTS)}

    def network(self, seed: int) -> nn.Module:
        """Two hidden layers with ReLU, and starting weights of this seed."""
        one, two = self.hidden
        with seeded(BASE_SEED + seed):
            return nn.Sequential(nn.Linear(64, one), nn.ReLU(), nn.Linear(one, two), nn.ReLU(), nn.Linear(two, 10))

    def example_inputs(self) -> Tensor:
        """Four digits."""
        return digits()[0][0][:4]

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All digits in a new order; an incomplete last batch is dropped."""
        x, labels = digits()[0]
        for chosen in shuffled(len(labels), self.batch_size, seed, epoch):
            yield x[chosen], labels[chosen]

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Digits for choosing a network, all at once."""
        yield digits()[1]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Digits for scoring the chosen network, all at once; not used to choose anything."""
        yield digits()[2]


@dataclass(frozen=True)
class Images:
    """An image problem of `proxsps train`, whose validation images are shared between validation and test."""

    problem: ImageClassification
    ranks: TrainingRanks

    def __post_init__(self) -> None:
        if self.problem.validation_images == 1:
            raise ValueError(
                "validation_images must be 0 (all) or at least 2, got 1: half are for choosing a network, half for "
                "scoring it."
            )

    def settings(self) -> dict[str, Any]:
        """Everything that a result depends on, as plain data."""
        return {"task": self.problem.name, **asdict(self.problem), "validation": "every second image"}

    def network(self, seed: int) -> nn.Module:
        """The residual network; seed 0 gives the weights that `proxsps train` starts with."""
        fresh = replace(self.problem, data_seed=self.problem.data_seed + seed).network()
        network: nn.Module = fresh.to(self.ranks.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    def example_inputs(self) -> Tensor:
        """Two images."""
        return prepared(self.problem.train_data()[0][:2]).to(self.ranks.device)

    def batches(self, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Augmented batches."""
        return epoch_batches(self.problem, seed, epoch, self.ranks)

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every second validation image, without augmentation."""
        return self._every_second(0)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The other validation images, without augmentation."""
        return self._every_second(1)

    def _every_second(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self.problem.validation_data(0)
        return plain_batches((images[first::2], labels[first::2]), self.ranks)


Task = Digits | Images


def task_named(name: str, device: torch.device | None = None, **options: Any) -> Task:
    """The task of a name: "digits-mlp", or a name like "cifar10-resnet20" with options of `ImageClassification`."""
    if name == DIGITS:
        given = {key for key in options if key != "batch_size"}
        if given:
            raise ValueError(f"{DIGITS} has no options {', '.join(sorted(given))}; they are those of image networks.")
        return Digits(**options)
    try:
        problem = image_problem(name, **options)
    except ValueError as error:
        raise ValueError(f"{error} Or {DIGITS!r}.") from None
    return Images(problem, TrainingRanks(device or torch.device("cpu")))


def fit(
    task: Task,
    model: nn.Module,
    optimizer: Optimizer,
    epochs: int,
    seed: int,
    first_epoch: int = 0,
    after_backward: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """Train for some epochs with a cap that falls linearly to zero, so that the last weights have little noise.

    Args:
        task: data.
        model: the model, trained from its current weights.
        optimizer: made for the model; the `lr` of its groups is the largest.
        epochs: passes over the data.
        seed: seed of the order of samples.
        first_epoch: which of the seed's epochs comes first.
        after_backward: called before each step, for penalties that are added to gradients.
    """
    caps = [group["lr"] for group in optimizer.param_groups]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def after(loss: Tensor) -> Tensor:
        after_backward(model)
        return loss

    set_mode(model, optimizer, training=True)
    for epoch in range(epochs):
        for group, cap in zip(optimizer.param_groups, caps, strict=True):
            group["lr"] = cap * (1 - epoch / epochs)
        for _ in take_steps(optimizer, task.batches(seed, first_epoch + epoch), loss, after):
            pass
    for group, cap in zip(optimizer.param_groups, caps, strict=True):
        group["lr"] = cap
    set_mode(model, optimizer, training=False)
    model.train()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of right answers on `task.validation()` or `task.test()`, in evaluation mode."""
    training = model.training
    model.eval()
    right = count = 0
    for x, labels in batches:
        right += int((model(x).argmax(1) == labels).sum())
        count += len(labels)
    model.train(training)
    return right / count


@lru_cache(maxsize=1)
def digits() -> list[tuple[Tensor, Tensor]]:
    """Pixels between 0 and 1, (n, 64), and labels (n,), of the training, the validation and the test digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"The digits come with scikit-learn: {_install.extra('experiments')}.") from None
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = torch.from_numpy(data.data[order] / 16).float().split(PARTS)
    labels = torch.from_numpy(data.target[order]).long().split(PARTS)
    return list(zip(x, labels, strict=True))


__all__ = ["DIGITS", "Digits", "Images", "Task", "accuracy", "digits", "fit", "task_named"]
