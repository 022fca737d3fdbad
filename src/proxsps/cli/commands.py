"""All commands together."""

from __future__ import annotations

from typing import Annotated

import typer

from proxsps import __version__
from proxsps.cli import theory
from proxsps.cli.console import show
from proxsps.cli.experiments import app
from proxsps.cli.sparsity import sparsify
from proxsps.cli.training import train


def _version(wanted: bool) -> None:
    if wanted:
        show(f"proxsps {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Stochastic proximal Polyak step sizes: reproduce the paper's experiments."""


app.command()(train)
app.command()(sparsify)
app.add_typer(theory.app, name="theory")

__all__ = ["app"]
