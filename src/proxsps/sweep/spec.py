"""The description of a run: frozen, with its hash as its name; its step sizes, its batches, and what it leaves behind.

Grids are lists of descriptions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from proxsps import methods
from proxsps.core import schedules as rates
from proxsps.methods import Method

if TYPE_CHECKING:
    from proxsps.problems.base import Problem
    from proxsps.regularizers import Regularizer

METHODS = methods.RUNNABLE
METRICS = ("objective", "train_loss", "val_error", "model_norm", "zeta_median")
SCHEDULES = ("constant", "sqrt", "adaptive")
SETTING = ["method", "schedule", "lr", "weight_decay", "seed"]  # what distinguishes runs of one experiment
Named = TypeVar("Named", bound=str | Method)  # of one kind, or of both


class Constants(NamedTuple):
    """What an optimizer is made with."""

    lr: float | None
    weight_decay: float
    regularizer: Regularizer | None  # in place of weight decay
    lower_bound: float


@dataclass(frozen=True)
class RunSpec:
    """One run: a method with its constants on a problem, over some epochs, with a seed for shuffling and validation.

    Args:
        problem: what is minimised, together with the regulariser.
        method: the name of a method, or your own `Method`; the field then keeps its name.
        schedule: `constant`, `sqrt` or `adaptive`.
        lr: alpha_0.
        weight_decay: lambda, the strength of the regulariser.
        seed: seed of shuffling and validation.
        epochs: passes over the data.
        regularizer: the regulariser as a function of its strength, such as `L1`; None for lambda/2 ||x||^2.
        own: your own method that `method` names; set automatically.
    """

    problem: Problem
    method: str  # or a `Method`, whose name is kept
    schedule: str
    lr: float
    weight_decay: float
    seed: int
    epochs: int
    regularizer: Callable[[float], Regularizer] | None = None
    own: Method | None = None

    def __post_init__(self) -> None:
        definition = _definition(self.method, self.own)
        object.__setattr__(self, "method", definition.name)
        object.__setattr__(self, "own", None if definition.name in METHODS else definition)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Unknown schedule {self.schedule!r}. Known names: {', '.join(SCHEDULES)}.")
        if self.schedule == "adaptive" and not definition.followed:
            followed = [method.name for method in methods.METHODS.values() if method.followed]
            raise ValueError(
                f"The schedule 'adaptive' follows the adaptive step zeta, which {self.method!r} does not have. "
                f"Use it with {' or '.join(followed)}."
            )
        if self.epochs < 1:
            raise ValueError(f"A run needs at least one epoch, got {self.epochs}.")
        if not 0 <= self.lr < math.inf or not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"A run needs lr >= 0 and weight_decay >= 0, got {self.lr} and {self.weight_decay}.")
        if self.method == "adamw" and self.lr == 0:
            raise ValueError("AdamW needs lr > 0: its decay is given relative to it. Got 0.")
        if self.own is None and definition.groups and not self.problem.has_layers:
            raise ValueError(
                f"{definition.name} is for networks: matrices of hidden layers get other steps than the rest. "
                f"{self.problem.name} has no layers; use schedule-free-sps."
            )
        if self.regularizer is not None:
            self._check_regularizer(definition)

    def _check_regularizer(self, definition: Method) -> None:
        from proxsps.regularizers import Regularizer
        from proxsps.regularizers.checks import check_subgradient

        if not isinstance(self.phi, Regularizer):
            raise ValueError(
                "regularizer must return a Regularizer for a strength, as L1 or lambda lam: ElasticNet(lam, 0.1) do; "
                f"got {self.phi!r} for the strength {self.weight_decay:g}."
            )
        if definition.name == "adamw":
            raise ValueError(
                f"AdamW has weight decay and no other regulariser, got {self.phi!r}. Use prox-sps, or your own "
                "method that adds it to the loss."
            )
        if definition.coupled:
            check_subgradient(self.phi, definition.label or definition.name, "prox-sps or prox-sgd")

    @property
    def definition(self) -> Method:
        """The method, from the table of methods."""
        return self.own or methods.METHODS[self.method]

    @property
    def constants(self) -> Constants:
        """What the optimizer is made with. AdamW's decay is not multiplied by its lr, as in the paper's comparison."""
        lr, bound = None if self.definition.rateless else self.lr, self.problem.lower_bound
        if self.regularizer is not None:
            return Constants(lr, 0.0, self.phi, bound)
        return Constants(lr, self.weight_decay / (self.lr if self.method == "adamw" else 1.0), None, bound)

    @property
    def outside(self) -> Regularizer | None:
        """The regulariser, if it has to be added to the loss because the optimizer does not apply it."""
        theirs = self.regularizer is not None and not self.definition.optimizer.startswith("proxsps.")
        return self.phi if self.definition.coupled and (self.own is not None or theirs) else None

    @cached_property
    def phi(self) -> Regularizer:
        """The regulariser with its strength."""
        from proxsps.regularizers import L2

        return L2(self.weight_decay) if self.regularizer is None else self.regularizer(self.weight_decay)

    @cached_property
    def id(self) -> str:
        """Sixteen digits that stand for all of the above, equal on every machine.

        For your own methods, regularisers, models and data they cover the content, and depend on the minor version of
        Python.
        """
        facts = {**self.columns(), "epochs": self.epochs, "problem": describe(self.problem)}
        content = self.problem.fingerprint(self.seed)
        if content is not None:
            facts["content"] = content
        return digest(facts | self._own_facts())

    def _own_facts(self) -> dict[str, str]:
        """Digests of the method and the regulariser, if they are your own; options of a method of this package."""
        if self.own is None and self.regularizer is None and not self.definition.options:
            return {}
        from proxsps.problems.fingerprint import fingerprint

        facts = {}
        if self.own is not None:
            facts["own method"] = method_digest(self.own)
        elif self.definition.options:
            facts["options"] = fingerprint(self.definition.options)
        if self.regularizer is not None:
            facts["regularizer"] = fingerprint(self.phi)
        return facts

    def columns(self) -> dict[str, Any]:
        """The constants of the run, as columns of a table; the regulariser only if it is not the squared l2 norm."""
        found = {name: getattr(self, name) for name in SETTING}
        found |= {"lr": float(self.lr), "weight_decay": float(self.weight_decay)}
        return found if self.regularizer is None else {**found, "regularizer": type(self.phi).__name__}

    def describe(self) -> str:
        """The run in words, for messages."""
        constants = f"lr {self.lr:g}, weight decay {self.weight_decay:g}, seed {self.seed}"
        return f"run {self.id} ({self.method}, {self.schedule}, {constants})"

    def options(self) -> dict[str, Any]:
        """All fields except the problem, for a copy with another problem."""
        return {part.name: getattr(self, part.name) for part in fields(RunSpec) if part.name != "problem"}


def _definition(method: str | Method, own: Method | None) -> Method:
    """The method that a spec names or holds."""
    given = own if own is not None and method == own.name else method
    if not isinstance(given, Method):
        return methods.find(given)
    if given.name in methods.OWN_TABLE and given is not methods.METHODS[given.name]:
        raise ValueError(f"{given.name!r} is a method of this package. Choose another name for yours.")
    if not given.runs:
        raise ValueError(f"The method {given.name!r} has no optimizer: pass `make`, a function of parameters and run.")
    return given


def digest(facts: Any) -> str:
    """Sixteen digits that stand for plain data, equal on every machine."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def method_digest(method: Method) -> str:
    """Sixteen digits for all that a run gets from a method: its fields except its looks, and your own code."""
    from proxsps.problems.fingerprint import fingerprint, own_code

    decisive = {part.name: getattr(method, part.name) for part in fields(method) if part.name not in methods.LOOKS}
    named = [own_code(part) for part in (method.rule, method.optimizer, method.groups) if isinstance(part, str)]
    return fingerprint(decisive, named)


def describe(problem: Problem) -> dict[str, Any]:
    """Name and options of a problem, as plain data."""
    if not is_dataclass(problem):
        return {name: getattr(problem, name) for name in ("name", "batch_size", "lower_bound", "drop_last")}
    options = {part.name: getattr(problem, part.name) for part in fields(problem)}
    # By the declared type: 1 and 1.0 make equal problems, and equal problems have one description.
    options |= {part.name: float(options[part.name]) for part in fields(problem) if part.type in (float, "float")}
    return {"name": problem.name, **options}


def grid(
    problem: Problem,
    lrs: Mapping[Named, Iterable[float]],
    weight_decays: Iterable[float],
    schedules: Iterable[str],
    seeds: int,
    epochs: int,
    regularizer: Callable[[float], Regularizer] | None = None,
) -> list[RunSpec]:
    """Every method with each of its step sizes, schedule, strength and seed.

    Args:
        problem: the problem of all runs.
        lrs: the step sizes alpha_0 of each method. A method is a name, or your own `Method`, which is added to the
            table of methods.
        weight_decays: strengths lambda of the regulariser.
        schedules: the schedules of all methods.
        seeds: number of runs of each setting.
        epochs: the epochs of each run.
        regularizer: as in `RunSpec`.
    """
    for method in lrs:
        if isinstance(method, Method) and method.name not in methods.OWN_TABLE:
            methods.add(method)
    specs = [
        RunSpec(problem, method, schedule, lr, decay, seed, epochs, regularizer)  # type: ignore[arg-type]
        for schedule, decay, (method, values) in itertools.product(schedules, weight_decays, lrs.items())
        for lr, seed in itertools.product(values, range(seeds))
    ]
    if not specs:
        raise ValueError("The grid is empty: pass at least one method, step size, schedule, strength and seed.")
    return specs


@dataclass(frozen=True)
class RunResult:
    """Metrics after each epoch, (epochs, metrics) in the order of METRICS; NaN from the epoch of divergence on."""

    spec: RunSpec
    metrics: np.ndarray
    zetas: np.ndarray  # (epochs, steps per epoch): the adaptive step at every iteration
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)  # (epochs,) each: what only some runs measure

    @property
    def diverged_at(self) -> int | None:
        """First epoch, counted from 1, whose objective is not finite."""
        bad = np.flatnonzero(~np.isfinite(self.metrics[:, 0]))
        return int(bad[0]) + 1 if len(bad) else None


def alpha_of_epoch(spec: RunSpec, epoch: int, zetas: Iterable[np.ndarray] = ()) -> float:
    """alpha_k throughout an epoch, counted from 0; the adaptive schedule uses the zetas of earlier epochs."""
    match spec.schedule:
        case "constant":
            return rates.constant(epoch, spec.lr)
        case "sqrt":
            return rates.sqrt_decay(epoch * spec.problem.pace, spec.lr)
    alpha = spec.lr
    for last in itertools.islice(zetas, epoch):
        alpha = min(spec.lr, rates.adaptive(last[~np.isnan(last)].tolist(), alpha))
    return alpha


def batches(problem: Problem, seed: int, epoch: int) -> list[np.ndarray]:
    """Indices of the samples of every step of an epoch: the same for all methods and engines."""
    return shuffled(len(problem.train_data()[0]), problem.batch_size, seed, epoch, problem.steps_per_epoch)


def shuffled(count: int, size: int, seed: int, epoch: int, steps: int | None = None) -> list[np.ndarray]:
    """Indices of the batches of an epoch; by default an incomplete last one is dropped."""
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return [order[step * size : (step + 1) * size] for step in range(count // size if steps is None else steps)]


def median_zeta(zetas: np.ndarray) -> np.ndarray:
    """Median over the steps of an epoch, the first axis; steps that were left out (NaN) do not count."""
    middle: np.ndarray = np.ma.filled(np.ma.median(np.ma.masked_invalid(zetas), axis=0), np.nan)
    return middle
