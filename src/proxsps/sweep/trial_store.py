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
from typing import Any

import pandas as pd

from proxsps.sweep.checks import check_experiment, check_settings, unusable
from proxsps.sweep.store import TableStore
from proxsps.sweep.trials import Trial

SETTING = ["task", "method", "lr", "seed", "ending"]
COLUMNS = ["trial", "experiment", *SETTING, "title", "metric", "steps", "value", "status"]


class TrialStore(TableStore):
    """The trials of one experiment in `folder`."""

    names = ("trials",)
    key = "trial"

    @property
    def rows(self) -> pd.DataFrame:
        """One row for each trial."""
        return self._last

    def require(self, trials: Sequence[Trial], optional: frozenset[str], command: str) -> pd.DataFrame:
        """The rows of all trials of a whole experiment; an error if some are missing.

        Args:
            trials: the trials of the whole experiment.
            optional: names of tasks that may be missing, if their data is missing.
            command: the command that would run the experiment, for messages.
        """
        left_out = optional - set(self.rows["task"])
        wanted = {trial.setting() for trial in trials if trial.task.name not in left_out}
        found = check_settings(self.rows[SETTING], wanted, self.folder, command)
        return self.rows[[setting in wanted for setting in found]].reset_index(drop=True)

    def _id(self, result: dict[str, Any]) -> str:
        return str(result["trial"])

    def _rows(self, name: str, results: list[dict[str, Any]]) -> list[pd.DataFrame]:
        return [pd.DataFrame([{"experiment": self.experiment, **row} for row in results])]

    def _check(self) -> None:
        if not len(self.rows):
            return
        path = self._path("trials")
        if lacking := [name for name in COLUMNS if name not in self.rows.columns]:
            raise unusable(path, f"it has no column {', '.join(lacking)}")
        check_experiment(self.rows, path, self.experiment)
        if self.rows["trial"].duplicated().any():
            raise unusable(path, "a trial is there twice")
