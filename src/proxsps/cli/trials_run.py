"""Running experiments that consist of trials: a pool of processes computes the trials that their store lacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxsps._install import extra
from proxsps.cli.checks import check_folder
from proxsps.cli.console import duration, printable, progress, say
from proxsps.experiments.base import Experiment
from proxsps.problems.datasets import DataError
from proxsps.sweep.trials import Trial, Trials
from proxsps.training.trial_store import TrialStore


def run_trials(
    experiment: Experiment,
    trials: Callable[[int], list[Trial]],
    folder: Path,
    seeds: int | None,
    epochs: int | None,
    is_default: bool,
) -> dict[str, Any]:
    """Compute the missing trials of an experiment; returns what was done, in numbers.

    Args:
        experiment: the experiment.
        trials: the trials of a number of seeds.
        folder: the folder of results.
        seeds: the number of seeds of each setting; None for the default.
        epochs: must be None; tasks have their own numbers of steps.
        is_default: whether no engine was chosen on the command line.
    """
    if epochs is not None:
        raise ValueError(f"The tasks of {experiment.name} have their own numbers of steps: leave --epochs out.")
    if not is_default:
        say(f"{experiment.name} trains networks: --engine is not used.")
    wanted = _possible(experiment, trials(seeds or experiment.seeds))
    check_folder(folder / experiment.name)
    store = TrialStore(folder / experiment.name, experiment.name)
    missing = [trial for trial in wanted if trial.id not in store.done]
    share = len(missing) / len(trials(experiment.seeds))
    guess = f", about {duration(experiment.seconds * share)} on two cores" if missing else ""
    say(f"{experiment.name}: {len(wanted)} runs, {len(wanted) - len(missing)} already done{guess}")
    started = time.perf_counter()
    with (
        progress(experiment.name, len(missing), "runs") as advance,
        closing(Trials().run(wanted, store.done, advance)) as rows,  # closing it ends the processes
    ):
        for row in rows:
            store.add(row)
    own = store.rows[store.rows["trial"].isin({trial.id for trial in wanted})]
    return {
        "experiment": experiment.name,
        "runs": len(wanted),
        "ran": len(missing),
        "diverged": int((own["status"] == "diverged").sum()),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _possible(experiment: Experiment, trials: list[Trial]) -> list[Trial]:
    """The trials whose data is available. Optional tasks without data are skipped with a message."""
    packages = sorted({package for trial in trials for package in trial.method.needs if find_spec(package) is None})
    if packages:
        raise DataError(
            f"{experiment.name} compares with {' and '.join(packages)}, which are not installed: {extra('baselines')}."
        )
    left_out: set[str] = set()
    for task in {trial.task.name: trial.task for trial in trials}.values():
        try:
            next(iter(task.batches(0)))
        except DataError as error:
            if task.name not in experiment.optional:
                raise
            left_out.add(task.name)
            say(f"Skipped: {task.name}. {printable(str(error))}")
    return [trial for trial in trials if trial.task.name not in left_out]
