"""Running experiments: an engine computes the runs that their stores lack, with a progress bar."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from proxsps.cli.checks import check_folder, check_steps
from proxsps.cli.console import duration, printable, progress, say
from proxsps.experiments.base import Experiment
from proxsps.problems.datasets import DataError
from proxsps.sweep.engines import BATCH, ENGINES, Batched, Engine
from proxsps.sweep.run import fill
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store, StoreError
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
    if experiment.trials is not None:
        from proxsps.cli.trials_run import run_trials

        return run_trials(experiment, experiment.trials, folder, seeds, epochs, isinstance(engine, Batched))
    if experiment.specs is None:
        return {"experiment": experiment.name, "runs": 0, "ran": 0, "diverged": 0, "seconds": 0.0}
    specs = experiment.specs(seeds or experiment.seeds, epochs or experiment.epochs)
    check_folder(folder / experiment.name)
    store = Store(folder / experiment.name, experiment.name)
    if experiment.engine is not None:
        specs = _identified(experiment.engine(store.folder), specs, store)
    missing = len(store.lacking(specs))
    if missing:
        check_steps(missing, specs[0].epochs, specs[0].problem.steps_per_epoch)
    published = len(experiment.specs(experiment.seeds, 1)) * experiment.epochs
    if experiment.engine is not None and not isinstance(engine, Batched):
        say(f"{experiment.name} trains networks: --engine is not used.")
    runner = engine.saving(store.folder) if isinstance(engine, Batched) else engine
    runner = runner if experiment.engine is None else experiment.engine(store.folder)
    seconds = experiment.seconds * missing * specs[0].epochs / published
    known = seconds and isinstance(runner, Batched | Training)
    guess = f", about {duration(seconds)} on {experiment.hardware}" if known else ""
    say(f"{experiment.name}: {len(specs)} runs, {len(specs) - missing} already done{guess}")
    started = time.perf_counter()
    with progress(experiment.name, missing * specs[0].epochs) as advance:
        fill(store, specs, runner, advance)
    wanted = {spec.id for spec in specs}
    final = store.runs[store.runs["run"].isin(wanted)].groupby("run")["status"].last()
    return {
        "experiment": experiment.name,
        "runs": len(specs),
        "ran": missing,
        "diverged": int((final == "diverged").sum()),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _identified(engine: Engine, specs: list[RunSpec], store: Store) -> list[RunSpec]:
    """Training runs with ids that depend on data and device. A store cannot hold the same settings for two of these."""
    if not isinstance(engine, Training):
        return specs
    specs = engine.identified(specs)
    ids, settings = {spec.id for spec in specs}, {(*spec.columns().values(), spec.epochs) for spec in specs}
    if len(store.runs):
        others = store.runs[~store.runs["run"].isin(ids)].groupby([*specs[0].columns(), "run"])["epoch"].max()
        if settings & {(*key[:-1], epochs) for key, epochs in others.items()}:
            raise StoreError(
                f"{store.folder} holds runs with the same settings on other data, on another device or of another "
                "version. Use one folder for each (--out)."
            )
    return specs
