"""What a run is: a frozen description whose hash is its name. Grids are lists of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxsps.problems.base import Problem

METHODS = ("prox-sps", "sps", "sgd", "prox-sgd", "dec-sps", "adamw")
FREE = ("prox-sps-momentum", "prox-sps-adam")  # without a learning rate: lr is a factor on the step; run singly
KNOWN = METHODS + FREE
SCHEDULES = ("constant", "sqrt", "adaptive")
ADAPTIVE = ("prox-sps", "sps")  # methods with an adaptive step for the schedule of this name to follow


@dataclass(frozen=True)
class RunSpec:
    """One run: a method with its constants on a problem, over some epochs, with a seed for shuffling and validation."""

    problem: Problem
    method: str
    schedule: str
    lr: float
    weight_decay: float
    seed: int
    epochs: int

    def __post_init__(self) -> None:
        if self.method not in KNOWN:
            raise ValueError(f"Unknown method {self.method!r}. Known are {', '.join(KNOWN)}.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Unknown schedule {self.schedule!r}. Known are {', '.join(SCHEDULES)}.")
        if self.schedule == "adaptive" and self.method not in ADAPTIVE:
            raise ValueError(
                f"The schedule 'adaptive' follows the adaptive step zeta, which {self.method!r} does not have. "
                f"Use it with {' or '.join(ADAPTIVE)}."
            )
        if self.epochs < 1:
            raise ValueError(f"A run needs at least one epoch, got {self.epochs}.")
        if not 0 <= self.lr < math.inf or not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"A run needs lr >= 0 and weight_decay >= 0, got {self.lr} and {self.weight_decay}.")
        if self.method == "adamw" and self.lr == 0:
            raise ValueError("AdamW needs lr > 0: its decay is given relative to it. Got 0.")

    @cached_property
    def id(self) -> str:
        """Sixteen digits that stand for all of the above, equal on every machine.

        For models and data of your own they stand for their content, and depend on the minor version of Python.
        """
        facts = {**self.columns(), "epochs": self.epochs, "problem": describe(self.problem)}
        content = self.problem.fingerprint(self.seed)
        if content is not None:
            facts["content"] = content
        text = json.dumps(facts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def columns(self) -> dict[str, Any]:
        """The constants of the run, as columns of a table."""
        return {
            "method": self.method,
            "schedule": self.schedule,
            "lr": float(self.lr),
            "weight_decay": float(self.weight_decay),
            "seed": self.seed,
        }


def describe(problem: Problem) -> dict[str, Any]:
    """Name and options of a problem, as plain data."""
    if is_dataclass(problem):
        options = {field.name: _typed(problem, field.name, field.type) for field in fields(problem)}
    else:
        options = {key: getattr(problem, key) for key in ("batch_size", "lower_bound", "drop_last")}
    return {"name": problem.name, **options}


def _typed(problem: Problem, name: str, kind: Any) -> Any:
    """An option by its declared type: 1 and 1.0 make equal problems, and equal problems have one description."""
    value = getattr(problem, name)
    return float(value) if kind in (float, "float") else value


def grid(
    problem: Problem,
    lrs: Mapping[str, Iterable[float]],
    weight_decays: Iterable[float],
    schedules: Iterable[str],
    seeds: int,
    epochs: int,
) -> list[RunSpec]:
    """Every method with each of its step sizes, schedule, strength and seed."""
    specs = [
        RunSpec(problem, method, schedule, lr, decay, seed, epochs)
        for schedule, decay, (method, values) in itertools.product(schedules, weight_decays, lrs.items())
        for lr, seed in itertools.product(values, range(seeds))
    ]
    if not specs:
        raise ValueError("The grid is empty: give at least one method, step size, schedule, strength and seed.")
    return specs
