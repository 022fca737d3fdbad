"""Running experiments: an engine computes the runs that their stores lack, with a progress bar."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxsps._install import extra
from proxsps.cli.checks import check_folder, check_steps
from proxsps.cli.console import duration, printable, progress, say
from proxsps.experiments.base import Experiment
from proxsps.experiments.catalogue import CORES
from proxsps.problems.datasets import DataError
from proxsps.sweep.engines import BATCH, ENGINES, Batched, Engine, Processes, fill
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import StoreError, TableStore
from proxsps.sweep.trials import Trial, run_trial
from proxsps.training import Training


def engine_named(name: str, address: str | None, per_batch: int | None) -> Engine:
    """The engine that the command line names."""
    match name:
        case "batched":
            return Batched(per_batch or BATCH, processes=True)
        case "ray":
            from proxsps.sweep.ray import Ray

            return Ray(address, per_batch or BATCH)
        case _:
            return ENGINES[name]()


def run_if_possible(
    experiment: Experiment, folder: Path, seeds: int | None, epochs: int | None, engine: Engine, is_named: bool
) -> dict[str, Any] | None:
    """As `run`; an experiment that was not named and has no data is skipped with a message."""
    try:
        return run(experiment, folder, seeds, epochs, engine)
    except DataError as error:
        if is_named:
            raise
        say(f"Skipped: {experiment.name}. {printable(str(error))}")
        return None


def run(experiment: Experiment, folder: Path, seeds: int | None, epochs: int | None, engine: Engine) -> dict[str, Any]:
    """Compute the missing runs of an experiment; returns what was done, in numbers."""
    found = {"experiment": experiment.name, "runs": 0, "ran": 0, "diverged": 0, "seconds": 0.0}
    runs, lengths = _planned(experiment, seeds or experiment.seeds, epochs)
    if not runs:
        return found
    check_folder(folder / experiment.name)
    store = experiment.store(folder)
    runner, is_known = _runner(experiment, store.folder, engine)
    if isinstance(runner, Training):
        runs = _identified(runner, runs, store)
    missing = len(store.lacking(runs))
    if missing and experiment.specs is not None:
        check_steps(missing, lengths[0], runs[0].problem.steps_per_epoch)
    seconds = experiment.seconds * missing * lengths[0] / lengths[1]
    hardware = experiment.hardware if experiment.trials is None else CORES
    guess = f", about {duration(seconds)} on {hardware}" if seconds and is_known else ""
    say(f"{experiment.name}: {len(runs)} runs, {len(runs) - missing} already done{guess}")
    started = time.perf_counter()
    with progress(experiment.name, missing * lengths[0], "epochs" if experiment.trials is None else "runs") as advance:
        fill(store, runs, runner, advance)
    elapsed = round(time.perf_counter() - started, 3)
    diverged = store.diverged(run.id for run in runs)
    return {**found, "runs": len(runs), "ran": missing, "diverged": diverged, "seconds": elapsed}


def _planned(experiment: Experiment, seeds: int, epochs: int | None) -> tuple[list[Any], tuple[int, int]]:
    """The runs or trials; and the length of one, and of all that are published together, in epochs or trials."""
    if experiment.specs is not None:
        published = len(experiment.specs(experiment.seeds, 1)) * experiment.epochs
        length = epochs or experiment.epochs
        return experiment.specs(seeds, length), (length, published)
    if experiment.trials is None:
        return [], (1, 1)
    if epochs is not None:
        raise ValueError(f"The tasks of {experiment.name} have their own numbers of steps: leave --epochs out.")
    return _possible(experiment, experiment.trials(seeds)), (1, len(experiment.trials(experiment.seeds)))


def _runner(experiment: Experiment, folder: Path, engine: Engine) -> tuple[Engine, bool]:
    """The engine for an experiment, given the one that was chosen; and whether it is known how long that takes."""
    if experiment.trials is None and experiment.engine is None:
        return (engine.saving(folder), True) if isinstance(engine, Batched) else (engine, False)
    if not isinstance(engine, Batched):
        say(f"{experiment.name} trains networks: --engine is not used.")
    return (Processes(work=run_trial) if experiment.engine is None else experiment.engine(folder)), True


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


def _identified(engine: Training, specs: list[RunSpec], store: TableStore) -> list[RunSpec]:
    """Training runs with ids that depend on data and device. A store cannot hold the same settings for two of these."""
    specs = engine.identified(specs)
    ids, settings = {spec.id for spec in specs}, {(*spec.columns().values(), spec.epochs) for spec in specs}
    runs = store.tables["runs"]
    if len(runs):
        others = runs[~runs["run"].isin(ids)].groupby([*specs[0].columns(), "run"])["epoch"].max()
        if settings & {(*key[:-1], epochs) for key, epochs in others.items()}:
            raise StoreError(
                f"{store.folder} holds runs with the same settings on other data, on another device or of another "
                "version. Use one folder for each (--out)."
            )
    return specs
