"""`proxsps theory`: compare the paper's bounds with runs, and show which steps they allow."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from proxsps.cli import loading
from proxsps.cli.checks import at_most, check_files
from proxsps.cli.console import DEFAULT_FORMAT, AsJson, Format, finite, one_line_errors, out, print_json, say, show

app = typer.Typer(
    help="The paper's theory: compare its bounds with runs, and show the steps they allow.", no_args_is_help=True
)

Names = Annotated[
    list[str] | None, typer.Argument(metavar="CHECK", help="Names as in `proxsps theory list`; default: all.")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for table, figures and report.")]
Seeds = Annotated[
    int | None, typer.Option(min=2, callback=at_most(100_000), help="Number of seeds; default: 400 for the rates.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a bound does not hold.")]
DEFAULT_OUT = Path("out/theory")


@app.command("list")
def list_checks(as_json: AsJson = False) -> None:
    """Show what `verify` checks: what each bound says, and which problem and alpha_k it needs."""
    with loading():
        from proxsps.cli.bounds import CHECKS, STUDIES

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
    with loading():
        from proxsps.problems.composite import PROBLEMS

    made = {name: make() for name, make in PROBLEMS.items()}
    rows = [{"problem": name, **asdict(p.constants), "psi*": p.optimum} for name, p in made.items()]
    if as_json:
        print_json([{key: finite(value) for key, value in row.items()} for row in rows])
        return
    table = Table(*rows[0], box=box.SIMPLE_HEAD, padding=0, pad_edge=True)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in row.values()))
    out.print(table)
    out.print("beta and G hold in the region of the iterates: the ball of this radius, or everywhere.")


@app.command()
def verify(
    names: Names = None,
    folder: Out = DEFAULT_OUT,
    seeds: Seeds = None,
    kind: Annotated[Format, typer.Option("--format", help="File format of the figures.")] = DEFAULT_FORMAT,
    as_json: AsJson = False,
    strict: Strict = False,
) -> None:
    """Compare the paper's bounds with runs: a table, figures and a report, in about half a minute.

    For rates, ProxSPS runs with the steps of the theorem over many seeds. A rate holds unless the lower 99 % confidence
    limit of the measured mean is above the bound. One-step inequalities are evaluated in exact expectation, over every
    sample.
    """
    with one_line_errors(folder):
        with loading():
            from proxsps.cli.bounds import BOUNDS, CHECKS, STUDIES, find_check, measure, show_results, write

        wanted = list(dict.fromkeys(names or [*CHECKS, *STUDIES]))
        checks = [find_check(name, STUDIES) for name in wanted if name not in STUDIES]
        studies = [STUDIES[name] for name in wanted if name in STUDIES]
        drawn = [f"{drawing.name}.{kind}" for experiment in (BOUNDS, *studies) for drawing in experiment.drawings]
        check_files(folder, *drawn, "checks.csv", "report.html")
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        try:
            results = measure(checks, studies, seeds)
            report = write(results, folder, kind, {"All checks": f"{time.perf_counter() - started:.1f} s"})
        except KeyboardInterrupt:
            say("Interrupted: no report was written.")
            raise typer.Exit(130) from None
    claims = [found for result in results for found in result.claims]
    if as_json:
        rows = [row for result in results for row in result.records()]
        print_json(rows)
    else:
        show_results(results)
        show(f"Report: {report}")
    if strict and not all(found.holds for found in claims):
        raise typer.Exit(1)


@app.command()
def steps(
    L: Annotated[float | None, typer.Option("--L", help="Smoothness of the loss f.")] = None,
    lam: Annotated[float, typer.Option("--lam", help="Strong convexity of the regulariser.")] = 0.0,
    mu: Annotated[float, typer.Option("--mu", help="Strong convexity of f.")] = 0.0,
    rho: Annotated[float, typer.Option("--rho", help="Weak convexity of f; 0 if f is convex.")] = 0.0,
    beta: Annotated[float | None, typer.Option("--beta", help="Bound on the gradient noise.")] = None,
    G: Annotated[float | None, typer.Option("--G", help="Bound on the subgradients, root mean square.")] = None,
    D_sq: Annotated[float | None, typer.Option("--D-sq", help="||x^0 - x*||^2.")] = None,
    Delta: Annotated[float | None, typer.Option("--Delta", help="env(x^0) - inf psi.")] = None,
    K: Annotated[int, typer.Option("--K", min=1, help="Number of steps.")] = 1000,
    theta: Annotated[float, typer.Option("--theta", help="Constant of the proofs, above 1.")] = 2.0,
    eta: Annotated[
        float | None, typer.Option("--eta", help="Parameter of the envelope; default 1/(2 rho), or 1/L.")
    ] = None,
) -> None:
    """Show which alpha_k the theory allows for a problem with these constants, and which bounds follow."""
    with loading():
        from proxsps import theory

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
