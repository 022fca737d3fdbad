"""`proxsps` on the command line: experiments, training, theory."""

from proxsps.cli import theory
from proxsps.cli.console import DEFAULT_OUT, one_line_errors
from proxsps.cli.experiments import app
from proxsps.cli.sparsity import sparsify
from proxsps.cli.training import train

app.command()(one_line_errors(DEFAULT_OUT)(train))
app.command()(one_line_errors(DEFAULT_OUT)(sparsify))
app.add_typer(theory.app, name="theory")

__all__ = ["app"]
