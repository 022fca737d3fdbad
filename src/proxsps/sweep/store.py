"""Results of one experiment in parquet files, complete after every addition.

A sweep has two. `runs.parquet`, one row per run and epoch:

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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from proxsps.sweep import tables
from proxsps.sweep.files import StoreError as StoreError  # part of this module's interface
from proxsps.sweep.spec import METRICS, SETTING, RunResult, RunSpec, alpha_of_epoch

if TYPE_CHECKING:
    from proxsps.sweep.trials import Trial


class TableStore:
    """Tables of one experiment in `folder`, one file each. Subclasses say what is in them."""

    names: ClassVar[tuple[str, ...]]  # of the tables; the last one is written last, and lists what is done
    key: ClassVar[str]  # its column of ids
    tables: dict[str, pd.DataFrame]
    _stamp: tuple[int, ...] | None  # of the files that the tables were read from

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment
        self._read()

    @property
    def done(self) -> set[str]:
        """Ids of the stored runs."""
        return set(self._last[self.key]) if len(self._last) else set()

    def lacking(self, runs: Sequence[Any]) -> list[Any]:
        """Those without a stored result."""
        done = self.done
        return [run for run in runs if run.id not in done]

    def diverged(self, ids: Iterable[str]) -> int:
        """How many of these runs have diverged."""
        rows = self._last[self._last[self.key].isin(set(ids))]
        return int((rows.groupby(self.key)["status"].last() == "diverged").sum())

    def add(self, results: Iterable[Any]) -> None:
        """Add finished runs to what other commands may have added in the meantime."""
        parts = [_rows(result, self.experiment) for result in results]
        if not parts:
            return
        with tables.locked(self.folder):
            if self._stamp != self._look():
                self._read()
            known, by_id = self.done, {part[self.names[-1]][self.key][0]: part for part in parts}
            fresh = [part for name, part in by_id.items() if name not in known]
            if not fresh:
                return
            new = {name: _joined(self.tables[name], [part[name] for part in fresh]) for name in self.names}
            for name in self.names:
                tables.write_table(self._path(name), new[name])
            self.tables, self._stamp = new, self._look()

    def _check(self) -> None:
        """Raise an error if the tables cannot be used."""
        raise NotImplementedError

    @property
    def _last(self) -> pd.DataFrame:
        return self.tables[self.names[-1]]

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"

    def _read(self) -> None:
        self._stamp = self._look()
        # The last one first: another command may be writing, and what is listed in it is in the others by now.
        self.tables = {name: tables.read_table(self._path(name)) for name in reversed(self.names)}
        self._check()

    def _look(self) -> tuple[int, ...] | None:
        """Shows whether another command has replaced the files."""
        with suppress(OSError):
            found = os.stat(self._path(self.names[-1]))
            return found.st_ino, found.st_size, found.st_mtime_ns
        return None


class Store(TableStore):
    """The results of the runs of one experiment in `folder`."""

    names = ("steps", "runs")
    key = "run"

    @property
    def runs(self) -> pd.DataFrame:
        """One row for each run and epoch."""
        return self.tables["runs"]

    @property
    def steps(self) -> pd.DataFrame:
        """One row for each iteration of the runs with seed 0."""
        return self.tables["steps"]

    def lacking(self, runs: Sequence[RunSpec]) -> list[RunSpec]:
        """The specs without a stored run; an error if a stored run does not fit its spec."""
        if self.done:
            tables.check_against(self.runs, runs, self.folder)
        return super().lacking(runs)

    def require(self, specs: Sequence[RunSpec], command: str, by_id: bool = True) -> None:
        """Raise an error that names `command` unless exactly the runs of these specs, a whole sweep, are stored.

        Without `by_id` only settings are compared, because ids need large data.
        """
        names = [name for name in (*SETTING, "regularizer") if name in self.runs.columns]
        wanted = {tuple(spec.columns().get(name, tables.DEFAULT) for name in names) for spec in specs}
        settings = self.runs.drop_duplicates("run")[names]
        found = set(tables.check_settings(settings, wanted, self.folder, command))
        if others := len(found - wanted):
            which = f"{others} runs with settings that the experiment does not have"
            raise tables.other_runs(self.folder, which, command)
        if by_id and (others := len(self.done - {spec.id for spec in specs})):
            which = f"{others} runs that were shortened, or made by another version"
            raise tables.other_runs(self.folder, which, command)

    def _check(self) -> None:
        if len(self.runs):
            tables.check_runs(self.runs, self._path("runs"), self.experiment)
        # runs.parquet is written last: steps of a run that is not in it are from an interrupted write.
        if "run" in self.steps.columns:
            self.tables["steps"] = self.steps[self.steps["run"].isin(self.done)]
        if len(self.runs):
            tables.check_steps(self.steps, self.runs, self._path("steps"))


class TrialStore(TableStore):
    """The trials of one experiment in `folder`: `trials.parquet`, one row per trial.

    | column | meaning |
    | --- | --- |
    | trial | id: the hash of everything that the result depends on |
    | experiment, task, title, metric, method, lr, seed, ending | what was run; lr is NaN if it was not set |
    | steps | number of steps; fewer than the task has if the loss was no longer finite |
    | value | the task's number at the end: an accuracy, a loss, or a gap; NaN if it is not finite |
    | status | "ok" or "diverged" |
    """

    names = ("trials",)
    key = "trial"

    @property
    def rows(self) -> pd.DataFrame:
        """One row for each trial."""
        return self._last

    def require(self, trials: Sequence[Trial], optional: frozenset[str], command: str) -> pd.DataFrame:
        """The rows of these trials; an error that names `command` if some are missing, except tasks in `optional`."""
        left_out = optional - set(self.rows["task"])
        wanted = {trial.setting() for trial in trials if trial.task.name not in left_out}
        found = tables.check_settings(self.rows[tables.OF_TRIALS], wanted, self.folder, command)
        return self.rows[[setting in wanted for setting in found]].reset_index(drop=True)

    def _check(self) -> None:
        if len(self.rows):
            tables.check_trials(self.rows, self._path("trials"), self.experiment)


def _joined(old: pd.DataFrame, parts: list[pd.DataFrame]) -> pd.DataFrame:
    filled = [part for part in (old, *parts) if len(part)]
    table = pd.concat(filled, ignore_index=True) if filled else old
    if "regularizer" in table.columns:
        table["regularizer"] = table["regularizer"].fillna(tables.DEFAULT)
    return table


def _rows(result: RunResult | dict[str, Any], experiment: str) -> dict[str, pd.DataFrame]:
    """The rows of a run or of a trial, for each table of its store."""
    if not isinstance(result, RunResult):
        return {"trials": pd.DataFrame([{"experiment": experiment, **result}])}
    spec, (epochs, steps) = result.spec, result.zetas.shape
    alphas = [alpha_of_epoch(spec, epoch, result.zetas) for epoch in range(epochs)]
    epoch = np.arange(1, epochs + 1)
    facts = {"run": spec.id, "experiment": experiment, **spec.columns(), "epoch": epoch}
    metrics = dict(zip(METRICS, result.metrics.T, strict=True))
    status = np.where(epoch < (result.diverged_at or epochs + 1), "ok", "diverged")
    runs = pd.DataFrame({**facts, **metrics, **result.extra, "alpha": alphas, "status": status})
    if spec.seed != 0:
        return {"runs": runs, "steps": pd.DataFrame()}
    facts = {"run": spec.id, **spec.columns(), "step": np.arange(epochs * steps), "epoch": np.repeat(epoch, steps)}
    zetas = {"zeta": result.zetas.ravel(), "alpha": np.repeat(alphas, steps)}
    return {"runs": runs, "steps": pd.DataFrame({**facts, **zetas})}
