"""What all commands share: where they print, how errors, progress, claims and JSON look."""

from __future__ import annotations

import json
import sys
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

from proxsps.experiments import Claim
from proxsps.problems.datasets import DataError
from proxsps.sweep.engines import EngineError
from proxsps.sweep.store import StoreError

out = Console()
err = Console(stderr=True)

Format = StrEnum("Format", {name: name for name in ("svg", "png", "pdf")})
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

DEFAULT_OUT = Path("out")
DEFAULT_FORMAT = Format("svg")


@contextmanager
def progress(name: str, total: int, unit: str = "epochs") -> Iterator[Any]:
    """A bar on a terminal; in a pipe, nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{name} ({unit})", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def one_line_errors(folder: Path) -> Iterator[None]:
    """What a user can mend is said in one line; an interrupt says what was kept."""
    try:
        yield
    except (EngineError, StoreError, DataError, ValueError) as error:
        err.print(f"[bold red]Error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print(
            f"Interrupted. What was finished is in {folder}; the same command goes on from there.", highlight=False
        )
        raise typer.Exit(130) from None


def print_json(value: Any) -> None:
    """For programs, on the standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def duration(seconds: float) -> str:
    """Seconds in words, roughly."""
    if seconds < 1:
        return "a second" if seconds else "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def show_claims(judged: dict[str, list[Claim]], as_json: bool) -> None:
    """The claims of each experiment as a table, or as JSON."""
    if as_json:
        rows = [{"experiment": name, **vars(claim)} for name, found in judged.items() for claim in found]
        print_json(rows)
        return
    for name, found in judged.items():
        table = Table("the paper says", "measured", "verdict", title=name, title_justify="left", box=box.SIMPLE_HEAD)
        for claim in found:
            verdict = "[green]holds[/green]" if claim.holds else "[bold red]does not hold[/bold red]"
            table.add_row(claim.gist, f"{claim.measured}\n[dim]wanted: {escape(claim.rule)}[/dim]", verdict)
        out.print(table)
    total = [claim.holds for found in judged.values() for claim in found]
    out.print(f"{sum(total)} of {len(total)} claims hold.", highlight=False)
