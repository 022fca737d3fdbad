"""What `proxsps train` does: one run with a bar on a terminal, its checkpoint, its rows in a store, and a summary."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import Optimizer

from proxsps.cli.checks import check_steps
from proxsps.cli.console import show
from proxsps.cli.training import Wanted
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.sweep.loop import Watch
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store
from proxsps.training.checkpoint import checkpoint_file
from proxsps.training.loop import identify
from proxsps.training.loop import train as train_run
from proxsps.training.ranks import joined

REFRESH = 0.25  # seconds between readings of the loss: each waits for the device


def run(spec: RunSpec, place: Path, wanted: Wanted) -> None:
    """Train, unless the store in `place` has the run already, and print how it ended."""
    name = wanted.name
    with joined(wanted.device) as ranks:
        console = Console(stderr=True, quiet=not ranks.first, emoji=False)
        spec = identify(spec, ranks, wanted.amp)
        check_steps(1, spec.epochs, spec.problem.steps_per_epoch)
        file = wanted.checkpoint or checkpoint_file(place, spec)
        if spec.id not in Store(place, name).done:
            with _interrupts(console, file), _Bar(console, spec) as bar:
                result = train_run(spec, file, ranks, wanted.amp, bar)
            if ranks.first:
                Store(place, name).add([result])  # opened again: other runs may have been added in the meantime
        if not ranks.first:
            return
    _summarise(Store(place, name), spec, file, wanted.as_json)


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
        line = f"Interrupted. {kept}; the same command continues from there."
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(130) from None


class _Bar(Watch):
    """One line per epoch and, on a terminal, a bar with loss, accuracy, tau and speed."""

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
            self._say(f"Continuing after epoch {epochs}.")
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
        """Print the results of an epoch."""
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
