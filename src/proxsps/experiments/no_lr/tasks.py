"""The tasks on which optimizers are compared, except the transformer: digits, images, matrices, l1 regression."""

from __future__ import annotations

import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from proxsps.optim import CoolDown
from proxsps.problems.base import BASE_SEED, Problem, seeded
from proxsps.problems.linear import LogisticRegression
from proxsps.problems.matrix import matrix_fac1
from proxsps.problems.resnet import ResNet
from proxsps.problems.vision import ImageClassification
from proxsps.regularizers import L1, Regularizer
from proxsps.sweep.loop import take_steps
from proxsps.sweep.spec import shuffled
from proxsps.sweep.trials import Batch, TrialTask
from proxsps.training.ranks import ALONE, placed, plain_batches, prepared
from proxsps.training.tasks import accuracy, digits, perceptron

HALF = 5  # classes of CIFAR-10 that a network is trained on before it is fine-tuned on the others


def squared_norm(model: nn.Module) -> float:
    """||x||^2 over all parameters."""
    return sum(float(param.double().square().sum()) for param in model.parameters())


def _orders(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches, epoch by epoch, each in a new order."""
    return (torch.from_numpy(part) for epoch in itertools.count() for part in shuffled(count, size, seed, epoch))


@lru_cache(maxsize=1)
def _digits() -> tuple[Batch, Batch]:
    """Digits to train on, and the test digits: no network is chosen here, so that the validation digits are free."""
    train, validation, test = digits()
    return tuple(map(torch.cat, zip(train, validation, strict=True))), test


@dataclass(frozen=True)
class DigitsTask(TrialTask):
    """Handwritten digits and a perceptron. With weight decay the objective on the training set counts, else accuracy.

    The loss of this network can reach its bound, and with weight decay the optimum is a compromise: a step that shrinks
    the weights more than it moves them shows in the objective.
    """

    name: str = "digits"
    title: str = "digits, accuracy"
    steps: int = 840
    weight_decay: float = 0.0
    batch_size: int = 64

    @property
    def metric(self) -> str:  # type: ignore[override]
        """The accuracy, or the objective."""
        return "loss" if self.weight_decay else "accuracy"

    def model(self, seed: int) -> nn.Module:
        """A perceptron with two hidden layers."""
        return perceptron(seed, hidden=(100, 50))

    def batches(self, seed: int) -> Iterator[Batch]:
        """All digits in a new order, epoch by epoch."""
        x, labels = _digits()[0]
        return ((x[chosen], labels[chosen]) for chosen in _orders(len(labels), self.batch_size, seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        x, labels = batch
        return cross_entropy(model(x), labels)

    def measure(self, model: nn.Module) -> float:
        """The objective of all training digits, or the accuracy on the others."""
        train, (x, labels) = _digits()
        if self.weight_decay:
            return float(self.loss(model, train)) + self.weight_decay / 2 * squared_norm(model)
        return float((model(x).argmax(1) == labels).double().mean())

    def data_digest(self) -> str:
        """A digest of the digits."""
        return hashlib.sha256(_digits()[0][0].numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class ImagesTask(TrialTask):
    """CIFAR-10 in 16 x 16 pixels by a small residual network; the accuracy on 2,500 images counts.

    Args:
        batch_norm: whether the network has batch normalisation.
        tuned: steps of training on the first half of the classes, before the task begins on the second half with
            those weights and a new last layer; 0 for training on all classes from the start.
    """

    metric: ClassVar[str] = "accuracy"

    name: str = "resnet"
    title: str = "ResNet8, accuracy"
    steps: int = 250
    weight_decay: float = 0.0
    batch_norm: bool = False
    tuned: int = 0
    depth: int = 8
    width: int = 8
    batch_size: int = 64

    def model(self, seed: int) -> nn.Module:
        """A fresh network, or one whose body was trained on the first half of the classes."""
        with seeded(BASE_SEED + seed):
            model = placed(ResNet(self.depth, self.width, 10, self.batch_norm), ALONE.device)
        if self.tuned:
            trained = _trained(replace(self, tuned=0, steps=self.tuned), seed)
            body = {name: value for name, value in trained.items() if not name.startswith("linear.")}
            model.load_state_dict(body, strict=False)
        return model

    def batches(self, seed: int) -> Iterator[Batch]:
        """Images without augmentation, epoch by epoch, of the classes of the task."""
        images, labels = _images(validation=False, second_half=bool(self.tuned))
        return ((prepared(images[i]), labels[i]) for i in _orders(len(labels), self.batch_size, seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return cross_entropy(model(images), labels)

    def measure(self, model: nn.Module) -> float:
        """The share of right answers."""
        data = _images(validation=True, second_half=bool(self.tuned))
        return accuracy(model, plain_batches(data, ALONE))

    def data_digest(self) -> str:
        """A digest of the images."""
        return ImageClassification(size=16).data_digest()


@lru_cache(maxsize=4)
def _images(validation: bool, second_half: bool) -> tuple[Tensor, Tensor]:
    """Images of all classes, or of the second half of them; the first 20,000 for training, 2,500 for validation."""
    problem = ImageClassification(size=16)
    images, labels = problem.validation_data(0) if validation else problem.train_data()
    chosen = torch.nonzero(labels >= HALF if second_half else labels >= 0)[:, 0][: 2_500 if validation else 20_000]
    return images[chosen], labels[chosen]


@lru_cache(maxsize=8)
def _trained(task: ImagesTask, seed: int) -> dict[str, Tensor]:
    """Weights after training on the first half of the classes, by AdamW with a cool-down."""
    model = task.model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scheduler = CoolDown(optimizer, task.steps)
    images, labels = ImageClassification(size=16).train_data()
    first = torch.nonzero(labels < HALF)[:, 0][:20_000]
    orders = itertools.islice(_orders(len(first), task.batch_size, seed), task.steps)
    batches = ((prepared(images[first[chosen]]), labels[first[chosen]]) for chosen in orders)
    for _ in take_steps(optimizer, batches, partial(task.loss, model)):
        scheduler.step()
    return model.state_dict()


class ProblemTask(TrialTask):
    """A problem of sweeps, whose starting point is the same for all seeds: they shuffle."""

    @abstractmethod
    def problem(self) -> Problem:
        """The problem."""

    def model(self, seed: int) -> nn.Module:
        """The start of the problem."""
        return self.problem().module()

    def batches(self, seed: int) -> Iterator[Batch]:
        """Samples in a new order, epoch by epoch."""
        data = self.problem().train_data()
        return (tuple(part[i] for part in data) for i in _orders(len(data[0]), self.problem().batch_size, seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of the problem."""
        loss: Tensor = model(*batch)
        return loss


@dataclass(frozen=True)
class MatrixTask(ProblemTask):
    """The paper's first matrix factorisation; its objective on the training set."""

    metric: ClassVar[str] = "loss"

    name: str = "matrix"
    title: str = "matrix factorisation, objective"
    steps: int = 2_000
    weight_decay: float = 1e-3

    def problem(self) -> Problem:
        """The published problem."""
        return matrix_fac1()

    def measure(self, model: nn.Module) -> float:
        """The objective."""
        return float(model(*self.problem().train_data())) + self.weight_decay / 2 * squared_norm(model)


@dataclass(frozen=True)
class SparseTask(ProblemTask):
    """Logistic regression with an l1 penalty: how far the objective is above its smallest value, relative to that.

    Optimizers without a prox get a subgradient of the penalty.
    """

    metric: ClassVar[str] = "gap"

    name: str = "l1"
    title: str = "l1 logistic regression, gap"
    steps: int = 2_000
    weight_decay: float = 0.0
    lam: float = 0.01
    features: int = 100

    def problem(self) -> LogisticRegression:
        """Synthetic data with 5 % of wrong labels."""
        return LogisticRegression(N=1000, n=self.features)

    def regularizer(self) -> Regularizer:
        """lam ||x||_1."""
        return L1(self.lam)

    def measure(self, model: nn.Module) -> float:
        """F(x) / F* - 1 in double precision."""
        (x,) = model.parameters()
        return _objective(self, x.detach().double()) / smallest_objective(self) - 1


def _objective(task: SparseTask, x: Tensor) -> float:
    features, labels = (part.double() for part in task.problem().train_data())
    loss = nn.functional.softplus(-labels * (features @ x)).mean()
    return float(loss + task.lam * x.abs().sum())


@lru_cache(maxsize=4)
def smallest_objective(task: SparseTask) -> float:
    """The smallest objective, by accelerated proximal gradient steps that restart where the objective rises."""
    features, labels = (part.double() for part in task.problem().train_data())
    step = 4 * len(labels) / float(torch.linalg.matrix_norm(features, 2) ** 2)
    x = y = torch.zeros(features.shape[1], dtype=torch.float64)
    t, best = 1.0, _objective(task, x)
    for _ in range(5_000):
        g = -(features.T @ (labels * torch.sigmoid(-labels * (features @ y)))) / len(labels)
        new = task.regularizer().prox(y - step * g, step)
        value = _objective(task, new)
        if value > best:
            y, t = x, 1.0
            continue
        following = (1 + (1 + 4 * t * t) ** 0.5) / 2
        y, x, t, settled = new + (t - 1) / following * (new - x), new, following, best - value < 1e-15
        best = value
        if settled:
            break
    return best
