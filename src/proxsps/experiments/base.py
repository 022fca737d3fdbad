"""An experiment as data: what to run, what to draw, and which sentences of the paper it decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from proxsps.sweep.engines import Engine
from proxsps.sweep.spec import RunSpec

Frames = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper's discussion, the number that decides it, and the verdict."""

    name: str
    gist: str
    quantity: str
    rule: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Drawing:
    """A figure and what it shows."""

    name: str
    caption: str
    draw: Callable[[Frames], Figure]


@dataclass(frozen=True)
class Experiment:
    """Runs (or tables that are computed at once), drawings and claims under one name."""

    name: str
    title: str
    description: str
    drawings: tuple[Drawing, ...]
    claims: tuple[Callable[[Frames], Claim], ...]
    specs: Callable[[int, int], list[RunSpec]] | None = None  # of seeds and epochs
    tables: Callable[..., Frames] | None = None  # where there is nothing to store; of a number of seeds, if `seeds`
    seeds: int = 0
    epochs: int = 0
    seconds: float = 0.0  # that the published grid takes, batched, on this hardware
    hardware: str = "two cores"
    engine: Callable[[Path], Engine] | None = None  # of a folder for checkpoints; else one of the sweep's

    @property
    def heavy(self) -> bool:
        """Whether it is too much for two cores, and is run only when it is named."""
        return self.hardware != "two cores"

    def judge(self, frames: Frames) -> list[Claim]:
        """All claims, decided on these results."""
        return [claim(frames) for claim in self.claims]


def last_medians(runs: pd.DataFrame, metric: str, last: int = 10) -> pd.Series:
    """Median of a metric over the last epochs of each run; infinity for a run that diverged.

    Indexed by method, schedule, lr, weight_decay and seed.
    """
    tail = runs[runs["epoch"] > runs["epoch"].max() - last]
    keys = ["method", "schedule", "lr", "weight_decay", "seed"]
    return tail.groupby(keys)[metric].agg(lambda values: values.median(skipna=False)).fillna(float("inf"))


def over_seeds(runs: pd.DataFrame, metric: str, last: int = 10) -> pd.Series:
    """Mean over seeds of `last_medians`, indexed by method, schedule, lr and weight_decay."""
    return last_medians(runs, metric, last).groupby(["method", "schedule", "lr", "weight_decay"]).mean()


def setting(lr: float, weight_decay: float | None = None) -> str:
    """How claims name a setting."""
    return f"alpha_0 = {lr:g}" + ("" if weight_decay is None else f", lambda = {weight_decay:g}")
