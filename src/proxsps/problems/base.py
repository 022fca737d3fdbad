"""What a sweep needs from a problem: a start, the data, and two pure functions of parameters and data.

Losses take parameters as a dictionary and change nothing, so that `torch.func.grad` and `torch.func.vmap` work on them
and many runs become one tensor program; `module()` returns the same problem as an `nn.Module`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from proxsps.problems.fingerprint import fingerprint

BASE_SEED = 12345678  # of the published experiments

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from this seed; afterwards the caller's continue where they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Problem(ABC):
    """An empirical risk: the mean over samples of a loss that is never below `lower_bound`.

    Subclasses are frozen dataclasses of plain options (numbers, strings, booleans): equal options mean equal problems.
    Data is cached between calls and must not be changed in place.
    """

    name: ClassVar[str]
    lower_bound: ClassVar[float] = 0.0
    drop_last: ClassVar[bool] = True
    reentrant: ClassVar[bool] = True  # whether two threads may compute losses at the same time
    pace: ClassVar[float] = 1.0  # of schedules: less than 1 if an epoch uses only a part of the published data
    batch_size: int

    @abstractmethod
    def start(self) -> dict[str, Tensor]:
        """A fresh copy of the starting parameters, the same for all runs."""

    @abstractmethod
    def train_data(self) -> tuple[Tensor, ...]:
        """Arrays with the samples on the first axis."""

    @abstractmethod
    def validation_data(self, seed: int) -> tuple[Tensor, ...]:
        """Arrays like those of `train_data`; they may depend on the run's seed."""

    @abstractmethod
    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Mean loss over the batch, 0-d."""

    @abstractmethod
    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """Error on validation data, 0-d; smaller is better."""

    def fingerprint(self, seed: int) -> str | None:
        """A digest of everything that the options do not contain but that changes runs with this seed.

        None for the problems of this package, whose options are complete; for your own problems, its code, starting
        parameters and data.
        """
        if type(self).__module__.startswith("proxsps."):
            return None
        common = self._digest(None, lambda: (type(self), self.start(), self.train_data()))
        return common + self._digest(seed, lambda: (self.validation_data(seed),))

    def _digest(self, key: int | None, parts: Callable[[], tuple[Any, ...]]) -> str:
        """The digest of these parts, computed once for each key."""
        known = vars(self).setdefault("_digests", {})
        if key not in known:
            known[key] = fingerprint(*parts())
        return str(known[key])

    def layers(self) -> nn.Module | None:
        """A network whose parameters have the names of `start()`, for methods that depend on layers; None without."""
        return None

    @property
    def has_layers(self) -> bool:
        """Whether `layers` returns a network, which may take time to make."""
        return type(self).layers is not Problem.layers

    def module(self) -> nn.Module:
        """The problem as a module: named parameters that start at `start()`, `forward(*batch)` the loss."""
        return _LossModule(self)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the training data; an incomplete last one counts unless `drop_last`."""
        samples = len(self.train_data()[0])
        steps = samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
        if steps == 0:
            raise ValueError(
                f"{self.name}: batch_size={self.batch_size} is larger than the {samples} training samples, so that no "
                "complete batch exists. Choose a smaller one."
            )
        return steps


class _LossModule(nn.Module):
    """A problem's parameters under their own names, dots included, and its loss as forward."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem = problem
        for name, value in problem.start().items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(value))

    def forward(self, *batch: Tensor) -> Tensor:
        return self._problem.loss(dict(self.named_parameters()), *batch)


class ModuleProblem(Problem):
    """Any `nn.Module` and loss function as a problem; see `from_module`.

    Results are stored under a digest of the model, its starting parameters, the data and the loss.
    """

    reentrant = False  # functional_call puts parameters into the model and takes them out again
    name: str  # type: ignore[misc]  # of the object, not of the class
    lower_bound: float  # type: ignore[misc]
    drop_last: bool  # type: ignore[misc]

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss: Callable[..., Tensor],
        train: Sequence[Tensor],
        validation: Sequence[Tensor],
        batch_size: int,
        error: Callable[..., Tensor] | None = None,
        lower_bound: float = 0.0,
        drop_last: bool = True,
    ) -> None:
        if not name:
            raise ValueError("A problem made from a module needs a name, under which results are stored; got ''.")
        for part, data in (("train", train), ("validation", validation)):
            if len({len(array) for array in data}) != 1 or not len(data[0]):
                raise ValueError(
                    f"The {part} arrays of {name!r} need samples on their first axis, the same number > 0 in each; "
                    f"got shapes {[tuple(array.shape) for array in data]}."
                )
        for path, part in model.named_modules():
            if getattr(part, "track_running_stats", False):
                raise ValueError(
                    f"{path!r} of the model of {name!r} ({type(part).__name__}) changes its running statistics in "
                    "forward; a loss has to be a pure function. Use GroupNorm, or track_running_stats=False."
                )
        check_batch_size(batch_size, len(train[0]) if drop_last else None)
        self.name, self.batch_size, self.lower_bound, self.drop_last = name, batch_size, lower_bound, drop_last
        self._model = copy.deepcopy(model)
        self._loss, self._error = loss, error or loss
        self._train, self._validation = tuple(train), tuple(validation)

    def start(self) -> dict[str, Tensor]:
        """The parameters that the model had when it was passed."""
        return {name: param.detach().clone() for name, param in self._model.named_parameters()}

    def layers(self) -> nn.Module:
        """The model."""
        return self._model

    def train_data(self) -> tuple[Tensor, ...]:
        """The training arrays."""
        return self._train

    def validation_data(self, seed: int) -> tuple[Tensor, ...]:
        """The validation arrays, the same for every seed."""
        return self._validation

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """The given loss of the model's outputs and the targets, which are the last array."""
        return self._loss(functional_call(self._model, params, batch[:-1]), batch[-1])

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """The given error of the model's outputs and the targets."""
        return self._error(functional_call(self._model, params, data[:-1]), data[-1])

    def fingerprint(self, seed: int) -> str:
        """A digest of model, starting parameters, loss, error and data."""
        return self._digest(None, lambda: (self._model, self._loss, self._error, self._train, self._validation))

    def __repr__(self) -> str:
        return f"ModuleProblem({self.name!r}, {type(self._model).__name__}, batch_size={self.batch_size})"


def from_module(
    name: str,
    model: nn.Module,
    loss: Callable[..., Tensor],
    train: Sequence[Tensor],
    validation: Sequence[Tensor],
    batch_size: int,
    **options: Any,
) -> ModuleProblem:
    """A problem from your own model.

    Args:
        name: the name under which results are stored, together with a digest of all other arguments.
        model: any module whose forward is pure: no running statistics, no dropout. It is copied, not changed.
        loss: loss(outputs, targets), the mean over the batch, 0-d, for instance `nn.functional.cross_entropy`.
        train: input arrays and, last, the targets; samples on the first axis.
        validation: the same for validation.
        batch_size: samples per step.
        **options: `error`, a function like `loss` for validation (default: the loss); `lower_bound` of the loss
            (default 0); `drop_last`, whether an incomplete last batch is left out (default True).

    Examples:
        >>> import torch
        >>> from proxsps.problems import from_module
        >>> x = torch.linspace(-1, 1, 40).reshape(-1, 1)
        >>> data = (x, x**2)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> problem = from_module("parabola", model, torch.nn.functional.mse_loss, data, data, batch_size=8)
        >>> problem.steps_per_epoch, sorted(problem.start())
        (5, ['0.bias', '0.weight', '2.bias', '2.weight'])
    """
    return ModuleProblem(name, model, loss, train, validation, batch_size, **options)


def check_batch_size(batch_size: int, samples: int | None = None) -> None:
    """Raise an error for a batch that is empty, or larger than the data if incomplete batches are dropped."""
    if batch_size < 1 or (samples is not None and batch_size > samples):
        limit = "" if samples is None else f" and at most the number of training samples, {samples}"
        raise ValueError(f"batch_size must be at least 1{limit}, got {batch_size!r}.")


def check_choice(option: str, value: str, known: Sequence[str]) -> None:
    """Raise an error for a value that is not one of the known ones."""
    if value not in known:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def check_sizes(**sizes: int) -> None:
    """Raise an error for a count that is not at least 1."""
    for option, value in sizes.items():
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value!r}.")
