"""Trials: one task, one optimizer with its constants, one seed, and one number at the end.

A sweep compares methods on one problem over epochs. Trials are for comparisons over several tasks of any kind, with any
torch optimizer: a task says what is trained and measured, a method of `proxsps.methods` or your own is the optimizer,
and a result is one row.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.swa_utils import AveragedModel

from proxsps.methods import Method, load
from proxsps.optim import CoolDown, polynomial_multi_avg_fn, renew_statistics
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.problems.fingerprint import fingerprint
from proxsps.regularizers import Regularizer
from proxsps.sweep.loop import RENEWED, coupling, make_optimizer, set_mode, take_steps
from proxsps.sweep.spec import Constants, digest, method_digest
from proxsps.sweep.tables import OF_TRIALS

ENDINGS = ("none", "cool-down", "average", "cosine")
WARM_UP = 0.05  # share of the steps, before the cosine

Batch = tuple[Tensor, ...]
Params = list[nn.Parameter] | list[dict[str, Any]]


class TrialTask(ABC):
    """What is trained, for how many steps, and what is measured at the end.

    Subclasses are frozen dataclasses of plain options; `data_digest` covers everything else that they depend on.
    """

    name: str  # unique in an experiment
    title: str  # in words, for figures
    metric: ClassVar[str] = "loss"  # or accuracy, or gap: an objective over its smallest value, minus 1
    lower_bound: ClassVar[float] = 0.0
    steps: int
    weight_decay: float = 0.0

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model; the seed is that of its starting weights."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Endless batches, the same for equal seeds."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over a batch, without weight decay and regulariser."""

    @abstractmethod
    def measure(self, model: nn.Module) -> float:
        """The number that is compared, of a model in evaluation mode; called without gradients."""

    def regularizer(self) -> Regularizer | None:
        """A regulariser in place of weight decay."""
        return None

    def data_digest(self) -> str:
        """A digest of data that is not among the options."""
        return ""


@dataclass(frozen=True)
class Trial:
    """One run: a task, a method with an lr, a seed, and what is done at the end of training.

    `lr` is None if it is not set. `make` of a method is called with the parameters, or its groups of them, and the
    trial. `ending` is "none", "cool-down" (the lr falls to 0 over the last quarter), "average" (the polynomial average
    of the weights is measured) or "cosine" (the lr rises over the first 20th, and falls to 0 along a cosine).
    """

    task: TrialTask
    method: Method
    lr: float | None
    seed: int
    ending: str = "none"

    def __post_init__(self) -> None:
        if self.ending not in ENDINGS:
            raise ValueError(f"The ending is one of {', '.join(ENDINGS)}, got {self.ending!r}.")

    @cached_property
    def id(self) -> str:
        """Sixteen digits that stand for all of the above, for the task's data, and for your own code in both."""
        return digest([_settings(self.task), *self.setting(), method_digest(self.method)])

    @property
    def constants(self) -> Constants:
        """What the optimizer is made with."""
        return Constants(self.lr, self.task.weight_decay, self.task.regularizer(), self.task.lower_bound)

    @property
    def outside(self) -> Regularizer | None:
        """The task's regulariser, if it has to be added to the loss because the optimizer does not apply it."""
        named = self.method.optimizer
        applied = issubclass(load(named), PolyakOptimizer) if named else not self.method.coupled
        return None if applied else self.task.regularizer()

    def setting(self) -> tuple[str, str, float | None, int, str]:
        """What distinguishes trials of one experiment."""
        return self.task.name, self.method.name, self.lr, self.seed, self.ending

    def describe(self) -> str:
        """The trial in words, for messages."""
        lr = "not set" if self.lr is None else f"{self.lr:g}"
        return f"trial {self.id} ({self.task.name}, {self.method.name}, lr {lr}, seed {self.seed})"


@lru_cache(maxsize=64)
def _settings(task: TrialTask) -> dict[str, Any]:
    """Everything that a result depends on, as plain data: options, data, which is read, and code if it is your own."""
    options: dict[str, Any] = asdict(task)  # type: ignore[call-overload]
    return {"kind": type(task).__name__, **options, "data": task.data_digest(), "code": fingerprint(type(task))}


def run_trial(trial: Trial, advance: Callable[[int], None] = lambda trials: None) -> dict[str, Any]:
    """Train and measure; one row of the store. A loss that is not finite ends the run: it has diverged."""
    task = trial.task
    model = task.model(trial.seed)
    optimizer, params = make_optimizer(trial.method, trial, model), list(model.parameters())
    scheduler = _scheduler(optimizer, trial)
    averaged = AveragedModel(model, multi_avg_fn=polynomial_multi_avg_fn()) if trial.ending == "average" else None
    set_mode(model, optimizer, training=True)
    done, batches = 0, islice(task.batches(trial.seed), task.steps)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a trial that diverges is a result
        for loss in take_steps(optimizer, batches, partial(task.loss, model), coupling(trial.outside, params)):
            if not math.isfinite(loss):
                break
            done += 1
            if scheduler is not None:
                scheduler.step()
            if averaged is not None:
                averaged.update_parameters(model)
    value = _measured(trial, averaged or model, optimizer) if done == task.steps else math.nan
    advance(1)
    setting = dict(zip(OF_TRIALS, trial.setting(), strict=True))
    setting["lr"] = math.nan if trial.lr is None else float(trial.lr)
    facts = {"trial": trial.id, **setting, "title": task.title, "metric": task.metric, "steps": done, "value": value}
    return {**facts, "status": "ok" if math.isfinite(value) else "diverged"}


def _scheduler(optimizer: Optimizer, trial: Trial) -> LRScheduler | None:
    steps = trial.task.steps
    if trial.ending == "cosine":
        return LambdaLR(optimizer, partial(warm_cosine, steps))
    return CoolDown(optimizer, steps) if trial.ending == "cool-down" else None


def warm_cosine(steps: int, k: int) -> float:
    """The factor of step k: it rises to 1 over the first 20th of the steps, then follows half a cosine to 0."""
    warm = math.ceil(WARM_UP * steps)
    return (k + 1) / warm if k < warm else (1 + math.cos(math.pi * (k - warm) / max(1, steps - warm))) / 2


@torch.no_grad()
def _measured(trial: Trial, model: nn.Module, optimizer: Optimizer) -> float:
    set_mode(model, optimizer, training=False)
    # Running statistics belong to the weights of the last steps, not to an average of weights.
    renew_statistics(model, islice(trial.task.batches(trial.seed), RENEWED))
    return trial.task.measure(model.module if isinstance(model, AveragedModel) else model)
