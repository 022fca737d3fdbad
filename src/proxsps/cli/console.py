"""What all commands share: printing, and the form of errors, progress, claims and JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from proxsps import _install
from proxsps.problems.errors import DataError
from proxsps.sweep.files import StoreError
from proxsps.sweep.pool import EngineError

if TYPE_CHECKING:
    import pandas as pd

    from proxsps.experiments import Claim

out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

Format = StrEnum("Format", ["svg", "png", "pdf"])
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

DEFAULT_OUT = Path("out")
DEFAULT_FORMAT = Format("svg")


@contextmanager
def progress(name: str, total: int, unit: str = "epochs") -> Iterator[Any]:
    """A progress bar on a terminal; nothing if the output is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{name} ({unit})", total=total)
        yield lambda count: progress.advance(task, count)


def say(text: str) -> None:
    """Print a line on standard error as it is: brackets and colons in a path are not markup."""
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def show(text: str) -> None:
    """Print a line on standard output as it is."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


EXPECTED = (EngineError, StoreError, DataError, ValueError, OSError, OverflowError, MemoryError)


@contextmanager
def one_line_errors(folder: Path | None = None) -> Iterator[None]:
    """Print errors that a user can fix as one line; after an interrupt, print what was kept."""
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except EXPECTED as error:
        _complain(error)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as error:
        if (text := _install.explained(error)) is None:
            raise
        _complain(ValueError(text))
        raise typer.Exit(2) from None
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "out of memory" not in str(error):  # torch's MemoryError
            raise
        _complain(MemoryError(error))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say(f"Interrupted.{_kept(folder)}")
        raise typer.Exit(130) from None


def _kept(folder: Path | None) -> str:
    """What an interrupt leaves: finished runs, the saved state of a batch, or a checkpoint."""
    if folder is None:
        return ""
    files = (path for path in folder.rglob("*") if path.is_file())
    if any(not path.name.startswith(".") and path.suffix != ".lock" for path in files):
        return f" What was finished is in {folder}; the same command continues from there."
    return " Nothing was finished yet."


class Commands(TyperGroup):
    """Commands that print every error as one line."""

    def make_context(self, *words: Any, **options: Any) -> Any:
        """Parse the arguments; help and version are shown here."""
        with one_line_errors():
            return super().make_context(*words, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        with one_line_errors():
            return super().invoke(ctx)


def _complain(error: Exception) -> None:
    err.print("[bold red]Error:[/bold red]", end=" ")
    say(printable(_explained(error)))


def _explained(error: Exception) -> str:
    text = " ".join(line.strip() for line in str(error).splitlines())
    match error:
        case MemoryError():
            return f"There is not enough memory for this ({text or 'no details'}). Choose smaller numbers."
        case OverflowError():
            return f"A number is too large ({text}). Choose a smaller one."
        case OSError() if not isinstance(error, ValueError):
            reason = error.strerror or text
            if error.filename is None:  # errors while writing have none
                return f"The output cannot be written ({reason}). Make room, or choose another place."
            return f"{os.fsdecode(error.filename)} cannot be used ({reason}). Choose another place."
    return text


def printable(text: str) -> str:
    """Text in one line without characters that would change the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def print_json(value: Any) -> None:
    """Print JSON for programs on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def finite(value: Any) -> Any:
    """A value for JSON, which has no infinity and no NaN."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def duration(seconds: float) -> str:
    """Seconds in words, roughly."""
    if seconds < 1:
        return "a second" if seconds else "-"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def show_claims(
    judged: dict[str, list[Claim]], as_json: bool, notes: dict[str, str] | None = None, everything: bool = False
) -> None:
    """How many claims hold, then those that do not, or only in part; or all of them, or JSON.

    Args:
        judged: the claims of each experiment.
        as_json: print JSON, which always has all of them.
        notes: on what the verdicts of an experiment do not say, for instance because it was shortened.
        everything: whether to print the claims that hold as well.
    """
    notes, named = notes or {}, [(name, claim) for name, found in judged.items() for claim in found]
    if as_json:
        print_json([{**_record(name, claim), "shortened": notes.get(name, "")} for name, claim in named])
        return
    from proxsps.experiments.symbols import counted

    out.print(counted([claim for _, claim in named]), highlight=False)
    for name, claim in named:
        if everything or not claim.holds:
            _show_claim(name, claim)
    for name, note in notes.items():
        if note:
            out.print(f"{name}: {note}", style="bold", highlight=False, markup=False)


def _record(name: str, claim: Claim) -> dict[str, Any]:
    published = claim.published._asdict() if claim.published else None
    return {"experiment": name, **vars(claim), "verdict": claim.verdict, "published": published}


COLOURS = {"holds": "green", "holds in part": "yellow", "does not hold": "bold red"}


def _show_claim(name: str, claim: Claim) -> None:
    """A claim in a few lines: its sentence, the verdicts, the number and the rule."""
    from proxsps.experiments.symbols import symbols

    def line(text: str, style: str = "") -> None:
        shown = symbols(text, out.encoding)
        out.print(Padding(Text(shown, style), (0, 0, 0, 2), expand=False), highlight=False)

    verdict = Text(claim.verdict, COLOURS[claim.verdict])
    published = f" (paper's own curves: {claim.published.verdict})" if claim.published else ""
    out.print(Text.assemble((f"\n{name}, {claim.name}: ", "bold"), verdict, published))
    line(claim.gist)
    line(f"measured: {claim.measured}")
    if claim.part:
        line(f"in part: {claim.part}")
    if claim.rule:
        line(f"rule: {claim.rule}", "dim")


def show_table(name: str, frame: pd.DataFrame) -> None:
    """A table of numbers."""
    table = Table(*map(str, frame.columns), title=name, title_justify="left", box=box.SIMPLE_HEAD)
    for row in frame.itertuples(index=False, name=None):
        table.add_row(*(escape(str(value)) for value in row))
    out.print(table)


def show_markdown(frame: pd.DataFrame) -> None:
    """A table to be copied into a page."""
    for line in (frame.columns, ["---"] * len(frame.columns), *frame.itertuples(index=False, name=None)):
        show(f"| {' | '.join(map(str, line))} |")
