"""What a run is: a frozen description whose hash is its name. Grids are lists of them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from typing import Any

from proxsps.problems.base import Problem

METHODS = ("prox-sps", "sps", "sgd", "prox-sgd", "dec-sps", "adamw")
SCHEDULES = ("constant", "sqrt")


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
        if self.method not in METHODS:
            raise ValueError(f"Unknown method {self.method!r}. Known are {', '.join(METHODS)}.")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"Unknown schedule {self.schedule!r}. Known are {', '.join(SCHEDULES)}.")
        if self.epochs < 1:
            raise ValueError(f"A run needs at least one epoch, got {self.epochs}.")

    @cached_property
    def id(self) -> str:
        """Sixteen digits that stand for all of the above, equal on every machine."""
        fields = {**self.columns(), "epochs": self.epochs, "problem": describe(self.problem)}
        text = json.dumps(fields, sort_keys=True)
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
    options = asdict(problem) if is_dataclass(problem) else {"batch_size": problem.batch_size}
    return {"name": problem.name, **options}


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
