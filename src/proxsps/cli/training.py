"""`proxsps train`: one network, one method, with a bar, checkpoints and rows in a store."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import Optimizer

from proxsps.cli.checks import at_most, check_folder, check_steps
from proxsps.cli.console import show
from proxsps.optim.base import PolyakOptimizer
from proxsps.problems.vision import image_problem
from proxsps.sweep.spec import METHODS, SCHEDULES, RunSpec
from proxsps.sweep.store import Store
from proxsps.training.identity import identify
from proxsps.training.loop import Watch
from proxsps.training.loop import train as train_run
from proxsps.training.ranks import joined

REFRESH = 0.25  # seconds between looks at the loss: each of them waits for the device
LRS = {"adamw": 1e-3}  # as published; 1 for all others
CONSTANT = ("adamw",)  # methods without a schedule


def use_data(folder: Path | None) -> Path | None:
    """Look for data in this folder, in this process and those it starts."""
    if folder is not None:
        os.environ["PROXSPS_DATA"] = str(folder)
    return folder


Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", callback=use_data, help="Folder of data sets; default: PROXSPS_DATA."),
]
Flag = bool | None


def train(
    name: Annotated[str, typer.Argument(metavar="DATA-RESNET", help="For instance cifar10-resnet110.")],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = METHODS[0],
    lr: Annotated[float | None, typer.Option(help="The cap alpha_0; default 1, for AdamW 1e-3.")] = None,
    weight_decay: Annotated[float, typer.Option(help="The strength lambda of lambda/2 ||x||^2.")] = 5e-4,
    schedule: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(SCHEDULES)}; default sqrt, for AdamW constant.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, callback=at_most(10**6), help="Passes over the images.")] = 100,
    seed: Annotated[int, typer.Option(min=0, callback=at_most(2**31), help="Of shuffling and augmentation.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images in a step, of all processes.")] = None,
    batch_norm: Annotated[Flag, typer.Option(help="Default: none, for ImageNet32 with.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Channels of the first stage.")] = 16,
    size: Annotated[int, typer.Option(help="Pixels of a side: 32, or images averaged to 16 or 8.")] = 32,
    images: Annotated[int, typer.Option(min=0, help="Training images to use; 0 for all.")] = 0,
    validation_images: Annotated[int, typer.Option(min=0, help="Validation images to use; 0 for all.")] = 0,
    augment: Annotated[bool, typer.Option(help="Mirror and crop training images at random.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    amp: Annotated[bool, typer.Option(help="Compute in bfloat16; weights and steps stay in float32.")] = False,
    data: Data = None,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of results.")] = Path("out"),
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: a file of the run's own in the folder of results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last epoch as JSON.")] = False,
) -> None:
    """Train a residual network on images.

    proxsps train cifar10-resnet110 --method prox-sps --lr 1 --weight-decay 5e-4
    proxsps train cifar10-resnet20 --method adamw --width 8 --size 16 --epochs 5
    torchrun --nproc-per-node 4 --no-python proxsps train cifar10-resnet56

    A checkpoint is written after every epoch; the same command goes on from it. A finished run is kept in the store
    DIR/train/NAME, with the columns of a sweep. On other data, on another device or with --amp it is another run.
    """
    method = {known.replace("-", ""): known for known in METHODS}.get(method, method)
    options = {"width": width, "size": size, "images": images, "validation_images": validation_images}
    published = {"batch_size": batch_size, "batch_norm": batch_norm}  # unless given
    options |= {key: value for key, value in published.items() if value is not None}
    problem = image_problem(name, augment=augment, **options)
    schedule = schedule or ("constant" if method in CONSTANT else "sqrt")
    spec = RunSpec(problem, method, schedule, LRS.get(method, 1.0) if lr is None else lr, weight_decay, seed, epochs)
    place = folder / "train" / name
    check_folder(place)
    with joined(device) as ranks:
        console = Console(stderr=True, quiet=not ranks.first, emoji=False)
        spec = identify(spec, ranks, amp)
        check_steps(1, epochs, problem.steps_per_epoch)
        file = checkpoint or place / "checkpoints" / f"{spec.id}.pt"
        if spec.id not in Store(place, name).done:
            with _interrupts(console, file), _Bar(console, spec) as bar:
                result = train_run(spec, file, ranks, amp, bar)
            if ranks.first:
                Store(place, name).add([result])  # read again: other runs may have been kept meanwhile
        if not ranks.first:
            return
    _summarise(Store(place, name), spec, file, as_json)


def _summarise(store: Store, spec: RunSpec, file: Path, as_json: bool) -> None:
    row = store.runs[store.runs["run"] == spec.id].iloc[-1].to_dict()
    if as_json:
        plain = {key: None if value != value else value for key, value in row.items()}
        sys.stdout.write(json.dumps(plain, indent=2, default=lambda value: value.item()) + "\n")
        return
    if row["status"] == "diverged":
        show("Diverged: the loss is no longer finite. Try a smaller --lr.")
    else:
        show(
            f"After {spec.epochs} epochs: accuracy {row['val_accuracy']:.2%}, loss {row['train_loss']:.4g}, "
            f"norm of the weights {row['model_norm']:.4g}."
        )
        show(f"Weights: {file}")
    show(f"Rows: {store.folder / 'runs.parquet'}")


@contextmanager
def _interrupts(console: Console, file: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = f"{file} has the last complete epoch" if file.exists() else "No epoch was complete yet"
        line = f"Interrupted. {kept}; the same command goes on from there."
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


class _Bar(Watch):
    """A line an epoch and, on a terminal, a bar with loss, accuracy, tau and speed."""

    def __init__(self, console: Console, spec: RunSpec) -> None:
        self.console, self.spec = console, spec
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self.task: TaskID = self.progress.add_task("", total=None, facts="")
        self.accuracy = "-"
        self.started = self.looked = time.perf_counter()
        self.before = self.count = 0  # steps of a checkpoint, and steps since
        self.epochs = 0

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def start(self, epochs: int, steps: int) -> None:
        """Set the bar to where the run begins."""
        if epochs:
            self._say(f"Going on after epoch {epochs}.")
        self.epochs, self.before = epochs, epochs * steps
        self.progress.update(self.task, total=self.spec.epochs * steps, completed=self.before)
        self.started = time.perf_counter()

    def step(self, epoch: int, loss: Tensor, optimizer: Optimizer) -> None:
        """Show a step, now and then."""
        self.count += 1
        now = time.perf_counter()
        if self.progress.disable or now < self.looked + REFRESH:
            return
        self.looked = now
        last = optimizer.last_step if isinstance(optimizer, PolyakOptimizer) else None
        tau = "" if last is None else f"  tau {float(last.tau[0]):.2g}"
        facts = f"loss {float(loss):.4g}  accuracy {self.accuracy}{tau}  {self._speed()}"
        done, text = self.before + self.count, f"epoch {epoch + 1}/{self.spec.epochs}"
        self.progress.update(self.task, completed=done, facts=facts, description=text)

    def epoch(self, row: dict[str, float]) -> None:
        """Say how an epoch went."""
        self.accuracy = f"{row['val_accuracy']:.1%}"
        self.epochs += 1
        zeta = "" if row["zeta_median"] != row["zeta_median"] else f", median zeta {row['zeta_median']:.2g}"
        self._say(
            f"epoch {self.epochs}/{self.spec.epochs}: loss {row['train_loss']:.4g}, accuracy {self.accuracy}, norm "
            f"{row['model_norm']:.4g}{zeta}, {self._speed()}"
        )

    def _speed(self) -> str:
        return f"{self.count * self.spec.problem.batch_size / (time.perf_counter() - self.started):,.0f} images/s"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
