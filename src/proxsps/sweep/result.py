"""What a run leaves behind: one row per epoch and, for some runs, the step size at every iteration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from proxsps.core import schedules
from proxsps.sweep.spec import RunSpec

if TYPE_CHECKING:
    from proxsps.problems.base import Problem

METRICS = ("objective", "train_loss", "val_error", "model_norm", "zeta_median")


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
            return schedules.constant(epoch, spec.lr)
        case "sqrt":
            return schedules.sqrt_decay(epoch * spec.problem.pace, spec.lr)
    alpha = spec.lr
    for last in itertools.islice(zetas, epoch):
        alpha = min(spec.lr, schedules.adaptive(last[~np.isnan(last)].tolist(), alpha))
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
    ordered = np.ma.masked_invalid(zetas)
    middle: np.ndarray = np.ma.filled(np.ma.median(ordered, axis=0), np.nan)
    return middle
