"""`proxsps sparsify`: train a network along a path of strengths, and make it smaller."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from proxsps.cli import loading
from proxsps.cli.options import Data, with_options
from proxsps.problems.names import split_name

DIGITS = "digits-mlp"  # as in `training.tasks`, which loads torch
Kind = StrEnum("Kind", ["units", "weights", "rows"])
UNITS = Kind("units")


@dataclass
class Wanted:
    """What is made smaller, and how."""

    name: Annotated[str, typer.Argument(metavar="NETWORK", help=f"{DIGITS}, or for instance cifar10-resnet20.")]
    kind: Annotated[Kind, typer.Option(help="What becomes zero: units (channels), single weights, or rows.")] = UNITS
    keep: Annotated[float | None, typer.Option(help="Stop at this size, for instance 0.3 for 30 %.")] = None
    max_drop: Annotated[float, typer.Option(help="Accuracy that may be lost, relative to the best so far.")] = 0.01
    patience: Annotated[int, typer.Option(min=1, help="Stop after this many strengths in a row that lost more.")] = 2
    strengths: Annotated[
        str | None, typer.Option(help="Increasing strengths, such as 1e-4,2e-4,4e-4; default: from the weights.")
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data at each strength.")] = 20
    lr: Annotated[float | None, typer.Option(help="Largest step of ProxSPSAdam; default: no learning rate.")] = None
    polish: Annotated[bool, typer.Option(help="Train the smaller network once more, without a penalty.")] = True
    seed: Annotated[int, typer.Option(min=0, help="Seed of starting weights, shuffling and augmentation.")] = 0
    batch_norm: Annotated[bool, typer.Option(help="Batch normalisation in residual networks.")] = True
    width: Annotated[int, typer.Option(min=1, help="Channels of the first stage of a residual network.")] = 16
    size: Annotated[int, typer.Option(help="Side length of the images: 32, or 16 or 8 (averaged).")] = 32
    images: Annotated[int, typer.Option(min=0, help="Training images to use; 0 for all.")] = 0
    validation_images: Annotated[
        int, typer.Option(min=0, help="Validation images: half to choose the network, half to score it; 0 for all.")
    ] = 0
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per step.")] = None
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None
    data: Data = None
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for results.")] = Path("out")
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of the task."""
        options = {} if self.batch_size is None else {"batch_size": self.batch_size}
        names = () if self.name == DIGITS else ("batch_norm", "width", "size", "images", "validation_images")
        return options | {name: getattr(self, name) for name in names}

    @property
    def chosen(self) -> list[float] | None:
        """The strengths."""
        if self.strengths is None:
            return None
        try:
            return [float(part) for part in self.strengths.split(",")]
        except ValueError:
            raise ValueError(f"--strengths must be numbers with commas between them, got {self.strengths!r}.") from None


@with_options
def sparsify(wanted: Wanted) -> None:
    """Make a network smaller: remove what a penalty sets to exact zero.

    proxsps sparsify digits-mlp --keep 0.1
    proxsps sparsify cifar10-resnet20 --epochs 10 --max-drop 0.02

    The network is first trained densely, then with growing strengths of the
    penalty, each from the weights of the one before, until it is small enough or
    has lost too much accuracy on validation data. The smallest good network is
    chosen, its dead channels are removed, and the rest is trained once more
    without a penalty. Then the dense and the smaller network are scored on
    test data, which were not used to choose anything.

    Finished strengths are kept in the folder of results; the same command
    continues from them. The smaller network is written there as small.pt, which
    proxsps.sparsity.load_shrunk reads, and without zeros as small.safetensors.
    """
    if wanted.name != DIGITS:
        check_task(wanted.name)
    with loading():
        from proxsps.cli.sparsity_run import run

    run(wanted)


def check_task(name: str) -> None:
    """Raise an error if this is not the name of a network; nothing large is loaded."""
    try:
        split_name(name)
    except ValueError as error:
        raise ValueError(f"{error} Or {DIGITS!r}.") from None
