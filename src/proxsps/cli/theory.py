"""`proxsps theory`: hold the paper's bounds against runs, and tell which steps they allow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich import box
from rich.table import Table

from proxsps import figures, theory
from proxsps.cli.checks import at_most, check_files
from proxsps.cli.console import (
    DEFAULT_FORMAT,
    AsJson,
    Format,
    one_line_errors,
    out,
    print_json,
    progress,
    say,
    show,
    show_claims,
)
from proxsps.experiments import Claim, Experiment
from proxsps.experiments.base import Drawing, Frames
from proxsps.experiments.theory import BOUNDS, CHECKS, FLOOR, ROBUSTNESS, Check, claim, evaluate, find_check, summary
from proxsps.problems.composite import PROBLEMS
from proxsps.report import Section, describe_environment, write_report

app = typer.Typer(help="The paper's theory: its bounds against runs, and the steps they allow.", no_args_is_help=True)

STUDIES = {"floor": FLOOR, "robustness": ROBUSTNESS}
COLUMNS = ["check", "problem", "K", "measured", "half", "bound", "ratio", "truncated", "holds"]

Names = Annotated[
    list[str] | None, typer.Argument(metavar="CHECK", help="Names as in `proxsps theory list`; default: all.")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of table, figures and report.")]
Seeds = Annotated[
    int | None, typer.Option(min=2, callback=at_most(100_000), help="Runs of each setting; default: 400 for the rates.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a bound does not hold.")]
DEFAULT_OUT = Path("out/theory")


@app.command("list")
def list_checks(as_json: AsJson = False) -> None:
    """Show what `verify` checks: what each bound says, and which problem and alpha_k it needs."""
    rows = [{"name": c.name, "place": c.place, "says": c.says, "needs": c.needs} for c in CHECKS.values()]
    rows += [{"name": name, "place": "", "says": study.title, "needs": ""} for name, study in STUDIES.items()]
    if as_json:
        print_json(rows)
        return
    table = Table("check", "where it stands, what it says, what it needs", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        needs = f"[dim]needs {row['needs']}[/dim]" if row["needs"] else ""
        table.add_row(row["name"], "\n".join(line for line in (row["place"], row["says"], needs) if line))
    out.print(table, highlight=False)
    out.print("Next: [bold]proxsps theory verify[/bold]")


@app.command()
def problems(as_json: AsJson = False) -> None:
    """Show the problems that `verify` runs on, and their constants."""
    made = {name: make() for name, make in PROBLEMS.items()}
    rows = [{"problem": name, **asdict(p.constants), "psi*": p.optimum} for name, p in made.items()]
    if as_json:
        print_json([{key: _finite(value) for key, value in row.items()} for row in rows])
        return
    table = Table(*rows[0], box=box.SIMPLE_HEAD, padding=0, pad_edge=True)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in row.values()))
    out.print(table)
    out.print("beta and G hold where iterates can be: in the ball of this radius, or everywhere.")


@app.command()
def verify(
    names: Names = None,
    folder: Out = DEFAULT_OUT,
    seeds: Seeds = None,
    kind: Annotated[Format, typer.Option("--format", help="Kind of the figures' files.")] = DEFAULT_FORMAT,
    as_json: AsJson = False,
    strict: Strict = False,
) -> None:
    """Hold the bounds of the paper against runs: a table, figures and a report, in less than two minutes.

    Rates run ProxSPS with their theorem's steps over many seeds, and hold unless the lower 99 % confidence limit of the
    measured mean lies above the bound. One-step inequalities are evaluated in exact expectation, over every sample.
    """
    with one_line_errors(folder):
        wanted = list(dict.fromkeys(names or [*CHECKS, *STUDIES]))
        checks = [find_check(name, STUDIES) for name in wanted if name not in STUDIES]
        studies = [STUDIES[name] for name in wanted if name in STUDIES]
        drawn = [f"{drawing.name}.{kind}" for experiment in (BOUNDS, *studies) for drawing in experiment.drawings]
        check_files(folder, *drawn, "checks.csv", "report.html")
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            results = _measure(checks, studies, seeds)
            report = _write(results, folder, kind, {"All checks": f"{time.perf_counter() - started:.1f} s"})
        except KeyboardInterrupt:
            say("Interrupted: no report was written.")
            raise typer.Exit(130) from None
    claims = [found for result in results for found in result.claims]
    if as_json:
        rows = [row for result in results for row in result.records()]
        print_json(rows)
    else:
        _show(results)
        show(f"Report: {report}")
    if strict and not all(found.holds for found in claims):
        raise typer.Exit(1)


@app.command()
def steps(
    L: Annotated[float | None, typer.Option("--L", help="Smoothness of the loss f.")] = None,
    lam: Annotated[float, typer.Option("--lam", help="Strong convexity of the regulariser.")] = 0.0,
    mu: Annotated[float, typer.Option("--mu", help="Strong convexity of f.")] = 0.0,
    rho: Annotated[float, typer.Option("--rho", help="Weak convexity of f; 0: convex.")] = 0.0,
    beta: Annotated[float | None, typer.Option("--beta", help="Bound on the gradient noise.")] = None,
    G: Annotated[float | None, typer.Option("--G", help="Bound on the subgradients, root mean square.")] = None,
    D_sq: Annotated[float | None, typer.Option("--D-sq", help="||x^0 - x*||^2.")] = None,
    Delta: Annotated[float | None, typer.Option("--Delta", help="env(x^0) - inf psi.")] = None,
    K: Annotated[int, typer.Option("--K", min=1, help="Number of steps.")] = 1000,
    theta: Annotated[float, typer.Option("--theta", help="Constant of the proofs, above 1.")] = 2.0,
    eta: Annotated[float | None, typer.Option("--eta", help="Of the envelope; default 1/(2 rho), or 1/L.")] = None,
) -> None:
    """Tell which alpha_k the theory allows for a problem with these constants, and what it then promises."""
    with one_line_errors(DEFAULT_OUT):
        rows = theory.advise(
            theory.Known(
                K=K, L=L, lam=lam, mu=mu, rho=rho, beta=beta, G=G, D_sq=D_sq, Delta=Delta, theta=theta, eta=eta
            )
        )
    table = Table("theorem", "alpha_k", f"bound after {K} steps", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        bound = row.missing if row.bound is None else f"{row.bound:.4g}"
        table.add_row(row.theorem, row.steps or "[yellow]does not apply[/yellow]", bound)
    out.print(table, highlight=False)


# What the commands are made of


@dataclass(frozen=True)
class Result:
    """An experiment, its tables and what they say."""

    experiment: Experiment
    frames: Frames
    claims: Sequence[Claim]

    @property
    def drawings(self) -> list[Drawing]:
        """Those that can be drawn: the rates only where there are some."""
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
        return [{k: _finite(v) for k, v in row.items()} for row in self.table.to_dict("records")]


def _show(results: Sequence[Result]) -> None:
    """The bounds as a table, the claims of the studies as another."""
    for result in results:
        if result.table is not None:
            _show_bounds(result.table)
            holding = sum(found.holds for found in result.claims)
            out.print(f"{holding} of {len(result.claims)} bounds hold.", highlight=False)
    studies = {result.experiment.title: list(result.claims) for result in results if result.table is None}
    if studies:
        show_claims(studies, as_json=False)


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
        "Each row is taken where measured / bound is largest. K: steps, or evaluations of a one-step inequality. "
        "u < 1: share of steps with a truncated model.",
        style="dim",
        highlight=False,
    )


def _measure(checks: Sequence[Check], studies: Sequence[Experiment], seeds: int | None) -> list[Result]:
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


def _write(results: Sequence[Result], folder: Path, kind: str, speed: dict[str, str]) -> Path:
    """Figures, the table of all rows, and the report."""
    sections = []
    for result in results:
        drawn = [(drawing, drawing.draw(result.frames)) for drawing in result.drawings]
        for drawing, figure in drawn:
            figures.save(figure, folder / f"{drawing.name}.{kind}")
        shown = [(drawing.caption, figure) for drawing, figure in drawn]
        of = result.experiment
        table = None if result.table is None else result.table.rename(columns={"half": "±", "truncated": "u < 1"})
        sections.append(Section(of.title, of.description, result.claims, shown, table))
        for name, frame in result.frames.items():
            frame.to_csv(folder / f"{name}.csv", index=False)
    return write_report(
        folder / "report.html",
        sections,
        title="The theory of stochastic proximal Polyak step sizes, against runs",
        environment=describe_environment(),
        speed=speed,
    )


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
