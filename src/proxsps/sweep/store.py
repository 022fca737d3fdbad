"""Results of one experiment in two parquet files, complete after every addition.

`runs.parquet`, one row per run and epoch:

| column | meaning |
| --- | --- |
| run | id of the run: the hash of its spec |
| experiment, method, schedule, lr, weight_decay, seed | what was run; lr is alpha_0, weight_decay lambda |
| epoch | 1, 2, ... |
| objective | training loss + regulariser after the epoch |
| train_loss, val_error, model_norm | its parts, the problem's validation error, and ||x|| |
| zeta_median | median over the epoch of the adaptive step zeta_k; NaN for methods without |
| alpha | alpha_k throughout the epoch |
| status | "ok", or "diverged" from the first epoch whose objective is not finite (metrics are then NaN) |

Experiments on images have more columns before alpha: the validation accuracy and more about zeta_k. Runs with
another regulariser than lambda/2 ||x||^2 have its name as `regularizer`, which is part of their objective, and
`nonzeros`, the share of entries that are not zero.

`steps.parquet`, one row per iteration of the runs with seed 0: run, method, schedule, lr, weight_decay, seed, step,
epoch, zeta, alpha. Files are replaced as a whole, so that a kill leaves the old or the new files, never a mix.

Several commands may add to one store: each takes its lock, reads what others have added, and adds its own. A store that
is damaged, incomplete within a run or of another experiment is not opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from proxsps.sweep.checks import DEFAULT, check_against, check_runs, check_steps, check_whole
from proxsps.sweep.lock import locked
from proxsps.sweep.result import METRICS, RunResult, alpha_of_epoch
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.tables import StoreError as StoreError  # part of this module's interface
from proxsps.sweep.tables import read_table, write_table


class Store:
    """The results of one experiment in `folder`."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment
        self._stamps: list[tuple[int, ...] | None] = []
        self.runs = self.steps = pd.DataFrame()
        self._read()

    @property
    def done(self) -> set[str]:
        """Ids of the stored runs."""
        return set(self.runs["run"]) if len(self.runs) else set()

    def lacking(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The specs without a stored run; an error if a stored run does not fit its spec."""
        done = self.done
        if done:
            check_against(self.runs, specs, self.folder)
        return [spec for spec in specs if spec.id not in done]

    def require(self, specs: Sequence[RunSpec], command: str, by_id: bool = True) -> None:
        """Raise an error unless exactly the runs of these specs are stored.

        Args:
            specs: the specs of a whole sweep.
            command: the command that would run it, for messages.
            by_id: whether to compare ids, or only settings (if ids need large data).
        """
        check_whole(self.runs, specs, self.folder, command, by_id)

    def add(self, results: Iterable[RunResult]) -> None:
        """Add finished runs to what other commands may have added in the meantime."""
        results = list(results)
        if not results:
            return
        with locked(self.folder):
            if self._stamps != self._look():
                self._read()
            done = self.done
            fresh = list({result.spec.id: result for result in results if result.spec.id not in done}.values())
            if not fresh:
                return
            steps = _joined(self.steps, [_step_rows(result) for result in fresh if result.spec.seed == 0])
            runs = _joined(self.runs, [_epoch_rows(result, self.experiment) for result in fresh])
            write_table(self._path("steps"), steps)
            write_table(self._path("runs"), runs)
            self.steps, self.runs, self._stamps = steps, runs, self._look()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"

    def _read(self) -> None:
        self._stamps = self._look()
        self.runs = read_table(self._path("runs"))
        steps = read_table(self._path("steps"))
        if len(self.runs):
            check_runs(self.runs, self._path("runs"), self.experiment)
        # runs.parquet is written last: steps of a run that is not in it are from an interrupted write.
        self.steps = steps[steps["run"].isin(self.done)] if "run" in steps.columns else steps
        if len(self.runs):
            check_steps(self.steps, self.runs, self._path("steps"))

    def _look(self) -> list[tuple[int, ...] | None]:
        """Shows whether another command has replaced a file."""
        stamps: list[tuple[int, ...] | None] = []
        for name in ("runs", "steps"):
            try:
                found = os.stat(self._path(name))
                stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
            except OSError:
                stamps.append(None)
        return stamps


def _joined(old: pd.DataFrame, parts: list[pd.DataFrame]) -> pd.DataFrame:
    if not parts:
        return old
    table = pd.concat([part for part in (old, *parts) if len(part)], ignore_index=True)
    if "regularizer" in table.columns:
        table["regularizer"] = table["regularizer"].fillna(DEFAULT)
    return table


def _epoch_rows(result: RunResult, experiment: str) -> pd.DataFrame:
    spec, epochs = result.spec, np.arange(1, result.spec.epochs + 1)
    diverged = result.diverged_at or spec.epochs + 1
    return pd.DataFrame(
        {
            "run": spec.id,
            "experiment": experiment,
            **spec.columns(),
            "epoch": epochs,
            **dict(zip(METRICS, result.metrics.T, strict=True)),
            **result.extra,
            "alpha": [alpha_of_epoch(spec, int(epoch) - 1, result.zetas) for epoch in epochs],
            "status": np.where(epochs < diverged, "ok", "diverged"),
        }
    )


def _step_rows(result: RunResult) -> pd.DataFrame:
    spec = result.spec
    epochs, steps = result.zetas.shape
    epoch = np.repeat(np.arange(1, epochs + 1), steps)
    return pd.DataFrame(
        {
            "run": spec.id,
            **spec.columns(),
            "step": np.arange(epochs * steps),
            "epoch": epoch,
            "zeta": result.zetas.ravel(),
            "alpha": np.repeat([alpha_of_epoch(spec, e, result.zetas) for e in range(epochs)], steps),
        }
    )
