"""`proxsps`: run the paper's experiments, draw their figures, decide their claims, write the report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from proxsps import figures
from proxsps.experiments import EXPERIMENTS, Claim, Experiment, find
from proxsps.problems.datasets import DataError, data_folder, find_sensors
from proxsps.report import Section, describe_environment, write_report
from proxsps.sweep.engines import ENGINES
from proxsps.sweep.store import Store, StoreError

app = typer.Typer(
    help="Stochastic proximal Polyak step sizes: reproduce the paper's experiments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
out = Console()
err = Console(stderr=True)

EngineName = StrEnum("EngineName", {name: name for name in ENGINES})
Format = StrEnum("Format", {name: name for name in ("svg", "png", "pdf")})

Names = Annotated[list[str], typer.Argument(metavar="EXPERIMENT...", help="Names as in `proxsps list`, or `all`.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder of results; each experiment has its own in it.")
]
Seeds = Annotated[int | None, typer.Option(min=1, help="Runs of each setting; default: as published.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs of each run; default: as published.")]
Engine = Annotated[
    EngineName, typer.Option(help="batched: all runs as one tensor program; single: one by one; processes.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a claim does not hold.")]

DEFAULT_OUT = Path("out")
DEFAULT_ENGINE = EngineName("batched")
DEFAULT_FORMAT = Format("svg")


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
            "claims": len(experiment.claims),
        }
        for experiment in EXPERIMENTS.values()
    ]
    if as_json:
        _print_json(rows)
        return
    table = Table("experiment", "what it shows", "runs", "epochs", "about", "claims", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        numbers = (str(row["runs"] or "-"), str(row["epochs"] or "-"), _duration(row["seconds"]), str(row["claims"]))
        table.add_row(row["name"], row["title"], *numbers)
    out.print(table)
    out.print("Times are for two cores. Next: [bold]proxsps reproduce matrix-fac1[/bold]")


@app.command()
def run(
    names: Names,
    folder: Out = DEFAULT_OUT,
    seeds: Seeds = None,
    epochs: Epochs = None,
    engine: Engine = DEFAULT_ENGINE,
    as_json: AsJson = False,
) -> None:
    """Run experiments; what is already in the folder is not run again."""
    with _one_line_errors(folder):
        summaries = [_run(experiment, folder, seeds, epochs, engine) for experiment in _chosen(names)]
    if as_json:
        _print_json(summaries)


@app.command("figures")
def draw_figures(
    names: Names,
    folder: Out = DEFAULT_OUT,
    kind: Annotated[Format, typer.Option("--format", help="Kind of file.")] = DEFAULT_FORMAT,
) -> None:
    """Draw the figures of experiments that were run."""
    with _one_line_errors(folder):
        for experiment in _chosen(names):
            frames = _frames(experiment, folder)
            for drawing in experiment.drawings:
                path = folder / experiment.name / "figures" / f"{drawing.name}.{kind}"
                out.print(str(figures.save(drawing.draw(frames), path)), highlight=False)


@app.command()
def claims(names: Names, folder: Out = DEFAULT_OUT, as_json: AsJson = False, strict: Strict = False) -> None:
    """Decide the paper's claims on experiments that were run."""
    with _one_line_errors(folder):
        judged = {e.name: e.judge(_frames(e, folder)) for e in _chosen(names)}
    _show_claims(judged, as_json)
    _exit_if_failing(judged, strict)


@app.command()
def report(names: Names, folder: Out = DEFAULT_OUT) -> None:
    """Write one HTML file with claims and figures of experiments that were run."""
    with _one_line_errors(folder):
        _write_report(_chosen(names), folder, {})


@app.command()
def reproduce(
    names: Names,
    folder: Out = DEFAULT_OUT,
    seeds: Seeds = None,
    epochs: Epochs = None,
    engine: Engine = DEFAULT_ENGINE,
    strict: Strict = False,
) -> None:
    """Run, draw, decide and report in one go; `all` leaves out what has no data."""
    with _one_line_errors(folder):
        chosen = _chosen(names)
        speed = {}
        for experiment in list(chosen):
            try:
                summary = _run(experiment, folder, seeds, epochs, engine)
            except DataError as error:
                if names != ["all"]:
                    raise
                err.print(f"[yellow]Left out:[/yellow] {experiment.name}. {error}", highlight=False, soft_wrap=True)
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
    out.print(f"PROXSPS_DATA: {folder if folder else 'not set'}", highlight=False)
    with _one_line_errors(DEFAULT_OUT):
        place = find_sensors()
    out.print(
        f"sensor: {place or 'not there; `proxsps run sensor` downloads it and checks its sha256'}", highlight=False
    )


# What the commands are made of


def _chosen(names: list[str]) -> list[Experiment]:
    return list(EXPERIMENTS.values()) if names == ["all"] else [find(name) for name in names]


def _run(
    experiment: Experiment, folder: Path, seeds: int | None, epochs: int | None, engine: EngineName
) -> dict[str, Any]:
    """Run what is missing of an experiment; what was done, in numbers."""
    if experiment.specs is None:
        return {"experiment": experiment.name, "runs": 0, "ran": 0, "diverged": 0, "seconds": 0.0}
    specs = experiment.specs(seeds or experiment.seeds, epochs or experiment.epochs)
    store = Store(folder / experiment.name, experiment.name)
    missing = sum(spec.id not in store.done for spec in specs)
    share = missing * specs[0].epochs / (len(experiment.specs(experiment.seeds, 1)) * experiment.epochs)
    guess = f", about {_duration(experiment.seconds * share)} on two cores" if engine == "batched" and missing else ""
    err.print(f"{experiment.name}: {len(specs)} runs, {len(specs) - missing} there already{guess}", highlight=False)
    started = time.perf_counter()
    with _progress(experiment.name, missing * specs[0].epochs) as advance:
        for results in ENGINES[engine]().run(specs, store.done, advance):
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


def _frames(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """The tables that drawings and claims are made from."""
    if experiment.tables is not None:
        return experiment.tables()
    store = Store(folder / experiment.name, experiment.name)
    if not store.done:
        raise StoreError(
            f"{folder / experiment.name} has no runs of {experiment.name}. Run it first: proxsps run {experiment.name}"
        )
    lengths = store.runs.groupby("run")["epoch"].max()
    if lengths.nunique() > 1:
        raise StoreError(
            f"{store.folder} holds runs of {lengths.min()} and of {lengths.max()} epochs, which cannot be compared. "
            "Use a folder of its own for each (--out)."
        )
    return {"runs": store.runs, "steps": store.steps}


def _write_report(chosen: list[Experiment], folder: Path, speed: dict[str, str]) -> dict[str, list[Claim]]:
    judged, sections = {}, []
    for experiment in chosen:
        frames = _frames(experiment, folder)
        judged[experiment.name] = experiment.judge(frames)
        drawn = [(drawing.caption, drawing.draw(frames)) for drawing in experiment.drawings]
        sections.append(Section(experiment.title, experiment.description, judged[experiment.name], drawn))
    _show_claims(judged, as_json=False)
    path = write_report(
        folder / "report.html",
        sections,
        title="Stochastic proximal Polyak step sizes",
        environment=describe_environment(),
        speed=speed,
    )
    out.print(f"Report: {path}", highlight=False, soft_wrap=True)
    return judged


def _show_claims(judged: dict[str, list[Claim]], as_json: bool) -> None:
    if as_json:
        rows = [{"experiment": name, **vars(claim)} for name, found in judged.items() for claim in found]
        _print_json(rows)
        return
    for name, found in judged.items():
        table = Table("the paper says", "measured", "verdict", title=name, title_justify="left", box=box.SIMPLE_HEAD)
        for claim in found:
            verdict = "[green]holds[/green]" if claim.holds else "[bold red]does not hold[/bold red]"
            table.add_row(claim.gist, f"{claim.measured}\n[dim]wanted: {escape(claim.rule)}[/dim]", verdict)
        out.print(table)
    total = [claim.holds for found in judged.values() for claim in found]
    out.print(f"{sum(total)} of {len(total)} claims hold.", highlight=False)


def _exit_if_failing(judged: dict[str, list[Claim]], strict: bool) -> None:
    if strict and not all(claim.holds for found in judged.values() for claim in found):
        raise typer.Exit(1)


@contextmanager
def _progress(name: str, total: int, unit: str = "epochs") -> Iterator[Any]:
    """A bar on a terminal; in a pipe, nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{name} ({unit})", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """What a user can mend is said in one line; an interrupt says what was kept."""
    try:
        yield
    except (StoreError, DataError, ValueError) as error:
        err.print(f"[bold red]Error:[/bold red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print(
            f"Interrupted. What was finished is in {folder}; the same command goes on from there.", highlight=False
        )
        raise typer.Exit(130) from None


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "a second" if seconds else "-"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


import proxsps.cli_theory  # noqa: E402, F401  (adds `proxsps theory`, with what is defined above)
