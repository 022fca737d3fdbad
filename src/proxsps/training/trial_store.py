"""Results of trials in one parquet file, one row per trial, complete after every addition.

| column | meaning |
| --- | --- |
| trial | id: the hash of everything that the result depends on |
| experiment, task, title, metric, method, lr, seed, ending | what was run; lr is NaN if it was not set |
| steps | number of steps; fewer than the task has if the loss was no longer finite |
| value | the task's number at the end: an accuracy, a loss, or a gap; NaN if it is not finite |
| share_polyak, share_distance, share_lr | share of the sampled steps in which this cap was active; NaN if unknown |
| status | "ok" or "diverged" |
| cpu_seconds | CPU time of the trial |

The file is replaced as a whole under a lock, like the files of sweeps: a kill leaves the old or the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from proxsps.sweep.lock import locked
from proxsps.sweep.tables import StoreError, read_table, write_table
from proxsps.sweep.trials import Trial

SETTING = ["task", "method", "lr", "seed", "ending"]
COLUMNS = ["trial", "experiment", *SETTING, "title", "metric", "steps", "value", "status"]


class TrialStore:
    """The trials of one experiment in `folder`."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment
        self.rows = self._read()

    @property
    def done(self) -> set[str]:
        """Ids of the stored trials."""
        return set(self.rows["trial"]) if len(self.rows) else set()

    def add(self, row: dict[str, Any]) -> None:
        """Add a finished trial to what other commands may have added in the meantime."""
        with locked(self.folder):
            self.rows = self._read()
            if row["trial"] not in self.done:
                fresh = pd.DataFrame([{"experiment": self.experiment, **row}])
                rows = pd.concat([self.rows, fresh], ignore_index=True) if len(self.rows) else fresh
                write_table(self._path, rows)
                self.rows = rows

    def require(self, trials: Sequence[Trial], optional: frozenset[str], command: str) -> pd.DataFrame:
        """The rows of all trials of a whole experiment; an error if some are missing.

        Args:
            trials: the trials of the whole experiment.
            optional: names of tasks that may be missing, if their data is missing.
            command: the command that would run the experiment, for messages.
        """
        found = {_key(row) for row in self.rows.to_dict("records")} if len(self.rows) else set()
        if len(found) < len(self.rows):
            raise StoreError(
                f"{self.folder} holds more than one trial of {len(self.rows) - len(found)} settings, of other data or "
                f"of another version. Move the folder away and run `{command}`, or choose another with --out."
            )
        here = {key[0] for key in found}
        wanted = [trial for trial in trials if trial.task.name in here or trial.task.name not in optional]
        lacking = sum(_setting(trial) not in found for trial in wanted)
        if lacking:
            raise StoreError(f"{lacking} of {len(wanted)} runs are missing in {self.folder}: run `{command}`.")
        keys = {_setting(trial) for trial in wanted}
        chosen = [_key(row) in keys for row in self.rows.to_dict("records")]
        return self.rows[chosen].reset_index(drop=True)

    @property
    def _path(self) -> Path:
        return self.folder / "trials.parquet"

    def _read(self) -> pd.DataFrame:
        rows = read_table(self._path)
        lacking = [name for name in COLUMNS if name not in rows.columns]
        if len(rows) and lacking:
            raise self._unusable(f"it has no column {', '.join(lacking)}")
        if len(rows) and set(rows["experiment"]) != {self.experiment}:
            raise self._unusable(f"it holds rows of another experiment than {self.experiment}")
        if len(rows) and rows["trial"].duplicated().any():
            raise self._unusable("a trial is there twice")
        return rows

    def _unusable(self, reason: str) -> StoreError:
        return StoreError(f"{self._path} cannot be used: {reason}. Restore it, or move the folder away to start again.")


def _key(row: dict[Any, Any]) -> tuple[Any, ...]:
    """The setting of a row; NaN, which is not equal to itself, becomes None."""
    return tuple(None if row[name] != row[name] else row[name] for name in SETTING)


def _setting(trial: Trial) -> tuple[Any, ...]:
    return trial.setting()
