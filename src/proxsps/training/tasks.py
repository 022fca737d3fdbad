"""Networks to make sparse: a multi-layer perceptron on digits, and the residual networks of `proxsps train`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
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
from proxsps.sweep.spec import shuffled
from proxsps.training.ranks import CPU, Batch, TrainingRanks, epoch_batches, placed, plain_batches, prepared

DIGITS = "digits-mlp"
HIDDEN = (300, 100)
PARTS = (1047, 300, 450)  # of 1797 digits: for training, for choosing a network, and for scoring the chosen one


@dataclass(frozen=True)
class Task:
    """Networks to make sparse, and their data in three parts."""

    settings: dict[str, Any]  # everything that a result depends on, as plain data
    network: Callable[[int], nn.Module]  # with starting weights of this seed
    example_inputs: Callable[[], Tensor]  # a few
    batches: Callable[[int, int], Iterator[Batch]]  # for training, by seed and epoch
    validation: Callable[[], Iterator[Batch]]  # for choosing a network
    test: Callable[[], Iterator[Batch]]  # for scoring the chosen network; not used to choose anything


def digits_task(batch_size: int = 64) -> Task:
    """Handwritten digits of 8 x 8 pixels, as scikit-learn ships them, and a perceptron with two hidden layers."""

    def batches(seed: int, epoch: int) -> Iterator[Batch]:
        x, labels = digits()[0]
        return ((x[chosen], labels[chosen]) for chosen in shuffled(len(labels), batch_size, seed, epoch))

    return Task(
        {"task": DIGITS, "hidden": list(HIDDEN), "batch_size": batch_size, "parts": list(PARTS)},
        network=perceptron,
        example_inputs=lambda: digits()[0][0][:4],
        batches=batches,
        validation=lambda: iter(digits()[1:2]),
        test=lambda: iter(digits()[2:]),
    )


def perceptron(seed: int, hidden: tuple[int, int] = HIDDEN) -> nn.Module:
    """A network for digits: two hidden layers with ReLU, and starting weights of this seed."""
    one, two = hidden
    with seeded(BASE_SEED + seed):
        return nn.Sequential(nn.Linear(64, one), nn.ReLU(), nn.Linear(one, two), nn.ReLU(), nn.Linear(two, 10))


def images_task(problem: ImageClassification, device: torch.device = CPU) -> Task:
    """An image problem of `proxsps train`; every second validation image is for choosing, the others for scoring."""
    if problem.validation_images == 1:
        raise ValueError(
            "validation_images must be 0 (all) or at least 2, got 1: half are for choosing a network, half for "
            "scoring it."
        )
    ranks = TrainingRanks(device)

    def every_second(first: int) -> Iterator[Batch]:
        images, labels = problem.validation_data(0)
        return plain_batches((images[first::2], labels[first::2]), ranks)

    return Task(
        {"task": problem.name, **asdict(problem), "validation": "every second image"},
        # Seed 0 gives the weights that `proxsps train` starts with.
        network=lambda seed: placed(replace(problem, data_seed=problem.data_seed + seed).network(), device),
        example_inputs=lambda: prepared(problem.train_data()[0][:2]).to(device),
        batches=partial(epoch_batches, problem, ranks=ranks),
        validation=partial(every_second, 0),
        test=partial(every_second, 1),
    )


def task_named(name: str, device: torch.device = CPU, **options: Any) -> Task:
    """The task of a name: "digits-mlp", or a name like "cifar10-resnet20" with options of `ImageClassification`."""
    if name == DIGITS:
        if given := options.keys() - {"batch_size"}:
            raise ValueError(f"{DIGITS} has no options {', '.join(sorted(given))}; they are those of image networks.")
        return digits_task(**options)
    try:
        problem = image_problem(name, **options)
    except ValueError as error:
        raise ValueError(f"{error} Or {DIGITS!r}.") from None
    return images_task(problem, device)


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

    The largest cap is the `lr` of the optimizer's groups. Samples are in the order of the seed's epochs from
    `first_epoch` on. `after_backward` is called before each step, for penalties that are added to gradients.
    """
    caps = [group["lr"] for group in optimizer.param_groups]

    def loss(batch: Batch) -> Tensor:
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
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
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
def digits() -> list[Batch]:
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
