"""What `proxsps theory verify` does: bounds and studies measured, shown as tables, drawn and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table

from proxsps.cli.console import finite, out, progress, show_claims
from proxsps.cli.reporting import draw
from proxsps.experiments.base import Claim, Drawing, Experiment, Frames
from proxsps.experiments.theory import BOUNDS, CHECKS, FLOOR, ROBUSTNESS, Check, claim, evaluate, find_check, summary
from proxsps.report import Section, describe_environment, write_report

STUDIES = {"floor": FLOOR, "robustness": ROBUSTNESS}
COLUMNS = ["check", "problem", "K", "measured", "half", "bound", "ratio", "truncated", "holds"]


@dataclass(frozen=True)
class Result:
    """An experiment, its tables and the claims checked on them."""

    experiment: Experiment
    frames: Frames
    claims: Sequence[Claim]

    @property
    def drawings(self) -> list[Drawing]:
        """The drawings that can be made: rates only if some were measured."""
        rates = "checks" not in self.frames or not self.frames["checks"]["exact"].all()
        return [drawing for drawing in self.experiment.drawings if rates or drawing.name != "rates"]

    @property
    def table(self) -> pd.DataFrame | None:
        """Measured values beside their bounds, where they come closest."""
        return summary(self.frames["checks"])[COLUMNS] if "checks" in self.frames else None

    def records(self) -> list[dict[str, Any]]:
        """For programs."""
        if self.table is None:
            return [vars(found) for found in self.claims]
        return [{k: finite(v) for k, v in row.items()} for row in self.table.to_dict("records")]


def show_results(results: Sequence[Result]) -> None:
    """The bounds as a table, the claims of the studies as another."""
    for result in results:
        if result.table is not None:
            _show_bounds(result.table)
            holding = sum(found.holds for found in result.claims)
            out.print(f"{holding} of {len(result.claims)} bounds hold.", highlight=False)
    studies = {result.experiment.title: list(result.claims) for result in results if result.table is None}
    if studies:
        show_claims(studies, as_json=False, everything=True)


def _show_bounds(rows: pd.DataFrame) -> None:
    heads = ("bound and problem", "K", "measured", "bound", "ratio", "u < 1", "holds")
    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for name, group in rows.groupby("check", sort=False):
        table.add_row(f"[bold]{name}[/bold]")
        for row in group.itertuples():
            measured = f"{row.measured:.3g}" + (f" ± {row.half:.1g}" if row.half > 1e-12 else "")
            share = "-" if pd.isna(row.truncated) else f"{100 * row.truncated:.0f} %"
            verdict = "[green]yes[/green]" if row.holds else "[bold red]NO[/bold red]"
            numbers = (str(row.K), measured, f"{row.bound:.3g}", f"{row.ratio:.3f}", share)
            table.add_row(f" {row.problem}", *numbers, verdict)
    out.print(table, highlight=False)
    out.print(
        "Each row shows where measured / bound is largest. K: steps, or evaluations of a one-step inequality. "
        "u < 1: share of steps with a truncated model.",
        style="dim",
        highlight=False,
    )


def measure(checks: Sequence[Check], studies: Sequence[Experiment], seeds: int | None) -> list[Result]:
    """Rows and verdicts of the checks, and of each study."""
    results, parts = [], []
    with progress("theory", len(checks) + len(studies), unit="checks") as advance:
        for check in checks:
            parts.append(evaluate(check, seeds or BOUNDS.seeds))
            advance(1)
        if parts:
            rows = pd.concat(parts, ignore_index=True)
            results.append(Result(BOUNDS, {"checks": rows}, [claim(check, rows) for check in checks]))
        for study in studies:
            frames = study.tables(seeds or study.seeds) if study.tables else {}
            results.append(Result(study, frames, study.judge(frames)))
            advance(1)
    return results


def write(results: Sequence[Result], folder: Path, kind: str, speed: dict[str, str]) -> Path:
    """Figures, the table of all rows, and the report."""
    sections = []
    for result in results:
        shown = draw(result.drawings, result.frames, folder, (kind,))
        of = result.experiment
        table = None if result.table is None else result.table.rename(columns={"half": "±", "truncated": "u < 1"})
        sections.append(Section(of.title, of.description, result.claims, shown, table))
        for name, frame in result.frames.items():
            frame.to_csv(folder / f"{name}.csv", index=False)
    return write_report(
        folder / "report.html",
        sections,
        title="The theory of stochastic proximal Polyak step sizes, compared with runs",
        environment=describe_environment(),
        speed=speed,
    )


__all__ = ["BOUNDS", "CHECKS", "STUDIES", "find_check", "measure", "show_results", "write"]
