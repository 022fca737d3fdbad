"""`proxsps`: run the paper's experiments, draw their figures, check their claims, write the report.

Nothing large is imported before a command needs it, so help, lists and usage errors are shown at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxsps import figures
from proxsps.cli import loading
from proxsps.cli.checks import check_files, check_folder
from proxsps.cli.console import (
    DEFAULT_FORMAT,
    DEFAULT_OUT,
    AsJson,
    Commands,
    Format,
    duration,
    one_line_errors,
    print_json,
    show,
    show_claims,
    show_markdown,
    show_table,
)
from proxsps.cli.options import Asked, Effort, with_options
from proxsps.experiments.catalogue import CATALOGUE, CORES, EXPERIMENTS, GPU
from proxsps.experiments.own import is_file, load_file
from proxsps.experiments.variants import Options, check_options, variant

if TYPE_CHECKING:
    from proxsps.experiments.base import Experiment

app = typer.Typer(
    help="Stochastic proximal Polyak step sizes: reproduce the paper's experiments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    cls=Commands,
)
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a claim does not hold.")]
Everything = Annotated[bool, typer.Option("--all", help="Print every claim, not only those that do not hold.")]
Kind = Annotated[Format, typer.Option("--format", help="File format of the figures.")]

REPORT = "report.html"


@app.command("list")
def list_experiments(as_json: AsJson = False) -> None:
    """Show the experiments and how long they take."""
    entries = list(CATALOGUE.values())
    if as_json:
        print_json([{key: value for key, value in vars(entry).items() if key != "home"} for entry in entries])
        return
    lines = [("experiment", "what it shows", "runs", "about")]
    for entry in entries:
        about = duration(entry.seconds) + (" *" if entry.hardware == GPU else "  ")
        lines.append((entry.name, entry.shows, str(entry.runs or "-"), about))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for name, shows, runs, about in lines:
        text = f"{name:<{widths[0]}}  {shows:<{widths[1]}}  {runs:>{widths[2]}}  {about:>{widths[3]}}"
        show(text.rstrip())
    show("\nTimes are for two cores; * on a GPU, estimated.\nNext: proxsps reproduce matrix-fac1")


@app.command()
@with_options
def run(asked: Asked, effort: Effort, as_json: AsJson = False) -> None:
    """Run experiments; runs that are already in the folder are skipped."""
    folder, options = asked.folder, asked.options
    with one_line_errors(folder):
        chosen = _chosen(asked.names, options)
        effort.check()
        check_folder(folder)
        with loading():
            from proxsps.cli import running

        runner = running.engine_named(effort.engine, effort.address, effort.per_batch)
        experiments = (_loaded(name, options) for name in chosen)
        summaries = [running.run(experiment, folder, effort.seeds, effort.epochs, runner) for experiment in experiments]
    if as_json:
        print_json(summaries)


@app.command("figures")
@with_options
def draw_figures(asked: Asked, kind: Kind = DEFAULT_FORMAT) -> None:
    """Draw the figures of experiments that were run."""
    folder, options = asked.folder, asked.options
    with one_line_errors(folder):
        for name in _chosen(asked.names, options):
            experiment = _loaded(name, options)
            place = folder / experiment.name / "figures"
            check_folder(place)
            frames = experiment.frames(folder)
            for drawing in experiment.drawings:
                show(str(figures.save(drawing.draw(frames), place / f"{drawing.name}.{kind}")))
            if experiment.table is not None:
                show_table(experiment.name, experiment.table(frames))
            if experiment.summary is not None:
                show_markdown(experiment.summary(frames))


@app.command()
@with_options
def claims(asked: Asked, as_json: AsJson = False, strict: Strict = False, everything: Everything = False) -> None:
    """Check the paper's claims on experiments that were run."""
    folder, options = asked.folder, asked.options
    with one_line_errors(folder):
        chosen = [_loaded(name, options) for name in _chosen(asked.names, options)]
        judged, notes = {}, {}
        for experiment in chosen:
            frames = experiment.frames(folder)
            judged[experiment.name], notes[experiment.name] = experiment.judge(frames), experiment.shortened(frames)
    show_claims(judged, as_json, notes, everything)
    _exit_if_failing(judged, strict)


@app.command()
@with_options
def report(asked: Asked, kind: Kind = DEFAULT_FORMAT) -> None:
    """Write one HTML file with claims and figures of the named experiments, and the figures as files.

    The experiments must have been run. The file replaces an older report in the folder: name all that it should show.
    """
    folder, options = asked.folder, asked.options
    with one_line_errors(folder):
        chosen = _chosen(asked.names, options)
        check_files(folder, REPORT)
        with loading():
            from proxsps.cli.reporting import Report

        with Report(folder, kind) as page:
            for name in chosen:
                page.add(_loaded(name, options))
            page.write(folder / REPORT)


@app.command()
@with_options
def reproduce(
    asked: Asked, effort: Effort, kind: Kind = DEFAULT_FORMAT, strict: Strict = False, everything: Everything = False
) -> None:
    """Run, draw, check and report in one go; `all` skips experiments without data, or that need a GPU or hours.

    The report is about the named experiments, and replaces an older one in the folder.
    """
    folder, options = asked.folder, asked.options
    with one_line_errors(folder):
        chosen = _chosen(asked.names, options)
        check_files(folder, REPORT)
        effort.check()
        with loading():
            from proxsps.cli.reporting import Report

        beside = any(CATALOGUE[name].runs for name in chosen if name in CATALOGUE)
        with Report(folder, kind, beside, options) as page:
            with loading():  # torch, while the drawing process loads matplotlib
                from proxsps.cli import running

            runner = running.engine_named(effort.engine, effort.address, effort.per_batch)
            for name in chosen:
                experiment = _loaded(name, options)
                summary = running.run_if_possible(
                    experiment, folder, effort.seeds, effort.epochs, runner, name in asked.names
                )
                if summary is not None:
                    page.add(experiment, summary)
            judged = page.write(folder / REPORT, everything)
    _exit_if_failing(judged, strict)


@app.command()
def data() -> None:
    """Show where data sets are read from, and which are available."""
    from proxsps.problems.datasets import data_folder, find_sensors
    from proxsps.problems.images import find_cifar10, find_imagenet32

    folder = data_folder()
    show(f"PROXSPS_DATA: {folder if folder else 'not set'}")
    with one_line_errors(DEFAULT_OUT):
        place, cifar10, imagenet32 = find_sensors(), find_cifar10(), find_imagenet32()
    show(f"sensor: {place or 'not there; `proxsps run sensor` downloads it and checks its sha256'}")
    for name, source in (("cifar10", cifar10), ("imagenet32", imagenet32)):
        lacking = "not there; a run that needs it " + ("downloads it" if name == "cifar10" else "says what to get")
        show(f"{name}: {', '.join(map(str, source.files)) if source else lacking}")


# What the commands share


def _chosen(names: list[str], options: Options) -> list[str]:
    """Names of experiments, each once; `all` means all that need neither a GPU nor hours.

    An option that none of them has is an error. Experiments in files are added to the table.
    """
    for name in names:
        if name != "all" and not is_file(name):
            EXPERIMENTS.check(name)
    files = {name: _of_file(name) for name in names if is_file(name)}  # first: options may name their methods
    light = [name for name in EXPERIMENTS if (CATALOGUE.get(name) or EXPERIMENTS[name]).hardware == CORES]
    named = [own for name in names if name != "all" for own in files.get(name, [name])]
    check_options(named, options, everything="all" in names)
    groups = [light if name == "all" else files.get(name, [name]) for name in names]
    return list(dict.fromkeys(name for group in groups for name in group))


def _of_file(name: str) -> list[str]:
    with loading():
        return load_file(name)


def _loaded(name: str, options: Options) -> Experiment:
    """An experiment with these options, ready for its tables, figures and claims."""
    with loading():
        importlib.import_module("proxsps.problems.base")
        return variant(EXPERIMENTS[name], options)


def _exit_if_failing(judged: dict[str, list[Any]], strict: bool) -> None:
    if strict and not all(claim.holds for found in judged.values() for claim in found):
        raise typer.Exit(1)
