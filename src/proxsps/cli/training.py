"""`proxsps train`: one network, one method, with a progress bar, checkpoints and rows in a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from proxsps.cli import loading
from proxsps.cli.checks import at_most, check_folder
from proxsps.cli.options import Data, with_options
from proxsps.methods import RUNNABLE, find
from proxsps.problems.names import split_name
from proxsps.sweep.spec import SCHEDULES, RunSpec

Flag = bool | None


@dataclass
class Wanted:
    """What is trained, by which method, and where its results go."""

    name: Annotated[str, typer.Argument(metavar="DATA-RESNET", help="For instance cifar10-resnet110.")]
    method: Annotated[str, typer.Option(help=f"One of {', '.join(RUNNABLE)}.")] = RUNNABLE[0]
    lr: Annotated[
        float | None,
        typer.Option(
            help="Upper limit of the step; default 1, for AdamW 1e-3. Methods without a learning rate: a factor."
        ),
    ] = None
    weight_decay: Annotated[float, typer.Option(help="The strength lambda of lambda/2 ||x||^2.")] = 5e-4
    schedule: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(SCHEDULES)}; default: sqrt, but constant for AdamW and methods without an lr."
        ),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, callback=at_most(10**6), help="Passes over the images.")] = 100
    seed: Annotated[int, typer.Option(min=0, callback=at_most(2**31), help="Seed of shuffling and augmentation.")] = 0
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per step, over all processes.")] = None
    batch_norm: Annotated[Flag, typer.Option(help="Batch normalisation; default: only for ImageNet32.")] = None
    width: Annotated[int, typer.Option(min=1, help="Channels of the first stage.")] = 16
    size: Annotated[int, typer.Option(help="Side length of the images: 32, or 16 or 8 (averaged).")] = 32
    images: Annotated[int, typer.Option(min=0, help="Training images to use; 0 for all.")] = 0
    validation_images: Annotated[int, typer.Option(min=0, help="Validation images to use; 0 for all.")] = 0
    augment: Annotated[bool, typer.Option(help="Mirror and crop training images at random.")] = True
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None
    amp: Annotated[bool, typer.Option(help="Compute in bfloat16; weights and steps stay in float32.")] = False
    data: Data = None
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for results.")] = Path("out")
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of the checkpoint; default: in the folder of results.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the last epoch as JSON.")] = False


@with_options
def train(wanted: Wanted) -> None:
    """Train a residual network on images.

    proxsps train cifar10-resnet110 --method prox-sps --lr 1 --weight-decay 5e-4
    proxsps train cifar10-resnet20 --method prox-sps-adam
    proxsps train cifar10-resnet20 --method adamw --width 8 --size 16 --epochs 5
    torchrun --nproc-per-node 4 --no-python proxsps train cifar10-resnet56

    A checkpoint is written after every epoch; the same command continues from it. A finished run is kept in the store
    DIR/train/NAME, with the columns of a sweep. With other data, another device or --amp it is a different run.
    """
    chosen = find({known.replace("-", ""): known for known in RUNNABLE}.get(wanted.method, wanted.method))
    named = ("width", "size", "images", "validation_images", "augment", "batch_size", "batch_norm")
    options = {name: getattr(wanted, name) for name in named if getattr(wanted, name) is not None}  # None: as published
    place = wanted.folder / "train" / wanted.name
    split_name(wanted.name)
    with loading():
        from proxsps.cli.training_run import run
        from proxsps.problems.vision import image_problem

    problem = image_problem(wanted.name, **options)
    schedule, alpha = wanted.schedule or chosen.schedule, chosen.lr if wanted.lr is None else wanted.lr
    spec = RunSpec(problem, chosen.name, schedule, alpha, wanted.weight_decay, wanted.seed, wanted.epochs)
    check_folder(place)
    run(spec, place, wanted)
