"""`proxsps`: run the paper's experiments, draw their figures, decide their claims, write the report."""

from __future__ import annotations

import time
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from proxsps import figures
from proxsps.cli.checks import at_most, check_files, check_folder, check_steps
from proxsps.cli.console import (
    DEFAULT_FORMAT,
    DEFAULT_OUT,
    AsJson,
    Commands,
    Format,
    duration,
    one_line_errors,
    out,
    print_json,
    printable,
    progress,
    say,
    show,
    show_claims,
)
from proxsps.cli.training import Data
from proxsps.experiments import EXPERIMENTS, Claim, Experiment, find
from proxsps.experiments.variants import variants
from proxsps.problems.datasets import DataError, data_folder, find_sensors
from proxsps.problems.images import find_cifar10, find_imagenet32
from proxsps.report import Section, describe_environment, write_report
from proxsps.sweep.engines import BATCH, ENGINES, Batched, Engine
from proxsps.sweep.ray import Ray
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store, StoreError
from proxsps.training import Training

app = typer.Typer(
    help="Stochastic proximal Polyak step sizes: reproduce the paper's experiments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    cls=Commands,
)
EngineName = StrEnum("EngineName", {name: name for name in (*ENGINES, "ray")})

Names = Annotated[list[str], typer.Argument(metavar="EXPERIMENT...", help="Names as in `proxsps list`, or `all`.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of results; each experiment has its own in it.")
]
Seeds = Annotated[
    int | None, typer.Option(min=1, callback=at_most(10**4), help="Runs of each setting; default: as published.")
]
Epochs = Annotated[
    int | None, typer.Option(min=1, callback=at_most(10**6), help="Epochs of each run; default: as published.")
]
EngineChoice = Annotated[
    EngineName,
    typer.Option(help="batched: all runs as one tensor program; single: one by one; processes; ray: on a cluster."),
]
Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Of a Ray cluster, or `auto`; default: this machine's cores.")
]
PerBatch = Annotated[
    int | None,
    typer.Option("--runs-per-batch", min=1, help=f"Runs in one tensor program (batched, ray); default: {BATCH}."),
]
Convention = Annotated[
    str,
    typer.Option(
        metavar="published|text",
        help="Loss and data of matrix-fac and sensor: as in the published figures, or as the paper's text says.",
    ),
]
Sensors = Annotated[str, typer.Option(metavar="FILE", help="For sensor: a file of another month, in the same format.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a claim does not hold.")]

REPORT = "report.html"
DEFAULT_ENGINE = EngineName("batched")
PUBLISHED = "published"


@app.command("list")
def list_experiments(as_json: AsJson = False) -> None:
    """Show the experiments and what they take."""
    rows = [
        {
            "name": experiment.name,
            "title": experiment.title,
            "runs": len(experiment.specs(experiment.seeds, experiment.epochs)) if experiment.specs else 0,
            "epochs": experiment.epochs,
            "seconds": experiment.seconds,
            "hardware": experiment.hardware,
            "claims": len(experiment.claims),
        }
        for experiment in EXPERIMENTS.values()
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("experiment", "what it shows", "runs", "epochs", "about", "claims", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        about = duration(row["seconds"]) + ("" if row["hardware"] == "two cores" else " *")
        numbers = (str(row["runs"] or "-"), str(row["epochs"] or "-"), about, str(row["claims"]))
        table.add_row(row["name"], row["title"], *numbers)
    out.print(table)
    out.print("Times are for two cores; * on a GPU, estimated. Next: [bold]proxsps reproduce matrix-fac1[/bold]")


@app.command()
def run(
    names: Names,
    folder: Out = DEFAULT_OUT,
    seeds: Seeds = None,
    epochs: Epochs = None,
    engine: EngineChoice = DEFAULT_ENGINE,
    address: Address = None,
    per_batch: PerBatch = None,
    data: Data = None,
    convention: Convention = PUBLISHED,
    sensors: Sensors = "",
    as_json: AsJson = False,
) -> None:
    """Run experiments; what is already in the folder is not run again."""
    with one_line_errors(folder):
        runner = _engine(engine, address, per_batch)
        summaries = [
            _run(experiment, folder, seeds, epochs, runner) for experiment in _chosen(names, convention, sensors)
        ]
    if as_json:
        print_json(summaries)


@app.command("figures")
def draw_figures(
    names: Names,
    folder: Out = DEFAULT_OUT,
    kind: Annotated[Format, typer.Option("--format", help="Kind of file.")] = DEFAULT_FORMAT,
    data: Data = None,
    convention: Convention = PUBLISHED,
    sensors: Sensors = "",
) -> None:
    """Draw the figures of experiments that were run."""
    with one_line_errors(folder):
        for experiment in _chosen(names, convention, sensors):
            frames = experiment.frames(folder)
            place = folder / experiment.name / "figures"
            check_folder(place)
            for drawing in experiment.drawings:
                show(str(figures.save(drawing.draw(frames), place / f"{drawing.name}.{kind}")))


@app.command()
def claims(
    names: Names,
    folder: Out = DEFAULT_OUT,
    data: Data = None,
    convention: Convention = PUBLISHED,
    sensors: Sensors = "",
    as_json: AsJson = False,
    strict: Strict = False,
) -> None:
    """Decide the paper's claims on experiments that were run."""
    with one_line_errors(folder):
        judged = {e.name: e.judge(e.frames(folder)) for e in _chosen(names, convention, sensors)}
    show_claims(judged, as_json)
    _exit_if_failing(judged, strict)


@app.command()
def report(
    names: Names,
    folder: Out = DEFAULT_OUT,
    data: Data = None,
    convention: Convention = PUBLISHED,
    sensors: Sensors = "",
) -> None:
    """Write one HTML file with claims and figures of experiments that were run."""
    with one_line_errors(folder):
        chosen = _chosen(names, convention, sensors)
        check_files(folder, REPORT)
        _write_report(chosen, folder, {})


@app.command()
def reproduce(
    names: Names,
    folder: Out = DEFAULT_OUT,
    seeds: Seeds = None,
    epochs: Epochs = None,
    engine: EngineChoice = DEFAULT_ENGINE,
    address: Address = None,
    per_batch: PerBatch = None,
    data: Data = None,
    convention: Convention = PUBLISHED,
    sensors: Sensors = "",
    strict: Strict = False,
) -> None:
    """Run, draw, decide and report in one go; `all` leaves out what has no data, and what takes a GPU."""
    with one_line_errors(folder):
        runner, chosen = _engine(engine, address, per_batch), _chosen(names, convention, sensors)
        check_files(folder, REPORT)
        speed = {}
        for experiment in list(chosen):
            try:
                summary = _run(experiment, folder, seeds, epochs, runner)
            except DataError as error:
                if (experiment.words or (experiment.name,))[0] in names:
                    raise
                say(f"Left out: {experiment.name}. {printable(str(error))}")
                chosen.remove(experiment)
                continue
            if summary["ran"]:
                speed[experiment.title] = f"{summary['ran']} runs in {summary['seconds']:.1f} s"
        judged = _write_report(chosen, folder, speed)
    _exit_if_failing(judged, strict)


@app.command()
def data() -> None:
    """Show where data sets are looked for, and which are there."""
    folder = data_folder()
    show(f"PROXSPS_DATA: {folder if folder else 'not set'}")
    with one_line_errors(DEFAULT_OUT):
        place, cifar10, imagenet32 = find_sensors(), find_cifar10(), find_imagenet32()
    show(f"sensor: {place or 'not there; `proxsps run sensor` downloads it and checks its sha256'}")
    for name, source in (("cifar10", cifar10), ("imagenet32", imagenet32)):
        lacking = "not there; a run that needs it says what to get" + (" and tries to" if name == "cifar10" else "")
        show(f"{name}: {', '.join(map(str, source.files)) if source else lacking}")


# What the commands are made of


def _chosen(names: list[str], convention: str = PUBLISHED, sensors: str = "") -> list[Experiment]:
    """Experiments by name, each once; `all` stands for those that take no GPU, and may have others beside it."""
    light = [experiment for experiment in EXPERIMENTS.values() if not experiment.heavy]
    groups = [light if name == "all" else [find(name)] for name in names]
    chosen = {experiment.name: experiment for group in groups for experiment in group}
    return variants(chosen.values(), convention, sensors)


def _engine(name: EngineName, address: str | None, per_batch: int | None) -> Engine:
    if address and name != "ray":
        raise ValueError(f"--address names a Ray cluster: use it with --engine ray, not {name}.")
    if per_batch and name not in ("batched", "ray"):
        raise ValueError(f"--runs-per-batch is of use with --engine batched or ray; {name} has no batches.")
    match name:
        case "batched":
            return Batched(per_batch or BATCH)
        case "ray":
            return Ray(address, per_batch or BATCH)
        case _:
            return ENGINES[name]()


def _run(experiment: Experiment, folder: Path, seeds: int | None, epochs: int | None, engine: Engine) -> dict[str, Any]:
    """Run what is missing of an experiment; what was done, in numbers."""
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
    share = missing * specs[0].epochs / (len(experiment.specs(experiment.seeds, 1)) * experiment.epochs)
    if experiment.engine is not None and not isinstance(engine, Batched):
        say(f"{experiment.name} trains networks: --engine is not used.")
    runner = engine.saving(store.folder) if isinstance(engine, Batched) else engine
    runner = runner if experiment.engine is None else experiment.engine(store.folder)
    known = missing and isinstance(runner, Batched | Training)
    guess = f", about {duration(experiment.seconds * share)} on {experiment.hardware}" if known else ""
    say(f"{experiment.name}: {len(specs)} runs, {len(specs) - missing} there already{guess}")
    started = time.perf_counter()
    with (
        progress(experiment.name, missing * specs[0].epochs) as advance,
        closing(runner.run(specs, store.done, advance)) as finished,  # what a sweep has started ends with it
    ):
        for results in finished:
            store.add(results)
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
    """Training runs with ids that depend on data and device. One store cannot hold the same settings on two of them."""
    if not isinstance(engine, Training):
        return specs
    specs = engine.identified(specs)
    ids, settings = {spec.id for spec in specs}, {(*spec.columns().values(), spec.epochs) for spec in specs}
    if len(store.runs):
        others = store.runs[~store.runs["run"].isin(ids)].groupby([*specs[0].columns(), "run"])["epoch"].max()
        if settings & {(*key[:-1], epochs) for key, epochs in others.items()}:
            raise StoreError(
                f"{store.folder} holds runs with the same settings on other data, on another device or by another "
                "version. Use a folder of its own for each (--out)."
            )
    return specs


def _write_report(chosen: list[Experiment], folder: Path, speed: dict[str, str]) -> dict[str, list[Claim]]:
    judged, sections = {}, []
    for experiment in chosen:
        frames = experiment.frames(folder)
        judged[experiment.name] = experiment.judge(frames)
        drawn = [(drawing.caption_for(frames), drawing.draw(frames)) for drawing in experiment.drawings]
        sections.append(Section(experiment.title, experiment.description, judged[experiment.name], drawn))
    show_claims(judged, as_json=False)
    path = write_report(
        folder / REPORT,
        sections,
        title="Stochastic proximal Polyak step sizes",
        environment=describe_environment(),
        speed=speed,
    )
    show(f"Report: {path}")
    return judged


def _exit_if_failing(judged: dict[str, list[Claim]], strict: bool) -> None:
    if strict and not all(claim.holds for found in judged.values() for claim in found):
        raise typer.Exit(1)
