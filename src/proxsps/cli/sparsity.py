"""`proxsps sparsify`: a network along a path of strengths, and the smaller network that comes out of it."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from proxsps.cli.console import err, out, print_json
from proxsps.cli.training import Data
from proxsps.optim import ProxSPS
from proxsps.sparsity import save_sparse, shrink, strength_path
from proxsps.sparsity.export import load_safetensors
from proxsps.sparsity.graph import load_torch_pruning
from proxsps.sparsity.path import Point
from proxsps.training.ranks import joined
from proxsps.training.tasks import DIGITS, Task, accuracy, fit, task_named

Kind = StrEnum("Kind", {name: name for name in ("units", "weights", "rows")})
UNITS = Kind("units")


def sparsify(
    name: Annotated[str, typer.Argument(metavar="NETWORK", help=f"{DIGITS}, or for instance cifar10-resnet20.")],
    kind: Annotated[Kind, typer.Option(help="What becomes zero: whole units, single weights, or rows.")] = UNITS,
    keep: Annotated[float | None, typer.Option(help="Stop at this share of parameters, or of weights.")] = None,
    max_drop: Annotated[float, typer.Option(help="Accuracy that may be lost.")] = 0.01,
    strengths: Annotated[str | None, typer.Option(help="Growing strengths, for instance 1e-4,2e-4,4e-4.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data at each strength.")] = 20,
    lr: Annotated[float, typer.Option(help="The cap alpha, which falls to zero at each strength.")] = 1.0,
    polish: Annotated[bool, typer.Option(help="Train the smaller network once more, without a penalty.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of starting weights, shuffling and augmentation.")] = 0,
    batch_norm: Annotated[bool, typer.Option(help="Of residual networks.")] = True,
    width: Annotated[int, typer.Option(min=1, help="Of residual networks: channels of the first stage.")] = 16,
    size: Annotated[int, typer.Option(help="Of images: 32, or averaged to 16 or 8.")] = 32,
    images: Annotated[int, typer.Option(min=0, help="Training images to use; 0 for all.")] = 0,
    validation_images: Annotated[int, typer.Option(min=0, help="Validation images to use; 0 for all.")] = 0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a step.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    data: Data = None,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of results.")] = Path("out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Make a network smaller by exact zeros.

    proxsps sparsify digits-mlp --keep 0.1
    proxsps sparsify cifar10-resnet20 --epochs 10 --max-drop 0.02

    The network is trained densely, then with growing strengths, each from where the last one ended, until it is small
    enough or has lost too much accuracy. The dead channels of the smallest good one are taken out, and what is left is
    trained once more without a penalty. Finished strengths are kept; the same command goes on from them.
    """
    _check_installed()
    chosen = _strengths(strengths)
    options: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    if name != DIGITS:
        options |= {"batch_norm": batch_norm, "width": width, "size": size, "images": images}
        options |= {"validation_images": validation_images}
    with joined(device) as ranks:
        if ranks.size > 1:
            raise ValueError("proxsps sparsify runs in one process; start it without torchrun.")
        task = task_named(name, ranks.device, **options)
        settings = {**task.settings(), "epochs": epochs, "lr": lr, "seed": seed}
        place = folder / "sparsify" / name / _digest(settings, kind, chosen)
        model = task.network(seed)
        path = strength_path(
            model,
            lambda network, groups: fit(task, network, ProxSPS(groups, lr=lr), epochs, seed),
            lambda network: accuracy(task, network),
            task.example_inputs(),
            kind=kind.value,
            strengths=chosen,
            keep=keep,
            max_drop=max_drop,
            folder=place,
            settings=settings,
            watch=_say,
        )
        small, report = shrink(model, task.example_inputs())
        final = path.best.accuracy
        if polish and kind is UNITS and path.chosen:
            small, final = _polished(task, small, final, lr, epochs, seed)
    torch.save(small.state_dict(), place / "small.pt")
    on_disk = save_sparse(small, place / "small.safetensors")
    rows = [{**asdict(point), "chosen": i == path.chosen} for i, point in enumerate(path.points)]
    (place / "path.json").write_text(json.dumps(rows, indent=2) + "\n")
    if as_json:
        costs = {"before": report.before._asdict(), "after": report.after._asdict(), "difference": report.difference}
        costs["accuracy"] = final
        print_json({"points": rows, "reason": path.reason, **costs, "bytes": on_disk._asdict(), "folder": str(place)})
        return
    out.print(path.table)
    out.print(path.reason, highlight=False, soft_wrap=True)
    out.print(report.table)
    for left in report.left:
        out.print(f"Left alone: {left}.", highlight=False, soft_wrap=True)
    out.print(f"Accuracy of the smaller network: {final:.2%}.", highlight=False, soft_wrap=True)
    out.print(f"On disk: {on_disk}.", highlight=False, soft_wrap=True)
    out.print(f"Smaller network: {place / 'small.pt'}", highlight=False, soft_wrap=True)


def _polished(
    task: Task, small: nn.Module, before: float, lr: float, epochs: int, seed: int
) -> tuple[nn.Module, float]:
    """The smaller network, trained without the penalty that has made its weights too small; if that helps."""
    polished = copy.deepcopy(small)
    fit(task, polished, ProxSPS(polished.parameters(), lr=lr), epochs, seed, first_epoch=epochs)
    after = accuracy(task, polished)
    return (polished, after) if after > before else (small, before)


def _say(point: Point) -> None:
    strength = "dense" if not point.strength else f"strength {point.strength:.3g}"
    err.print(
        f"{strength}: accuracy {point.accuracy:.2%}, size {point.size:.1%}, {point.zeros:.1%} of weights zero, "
        f"{point.dead_units} of {point.units} units dead",
        highlight=False,
        soft_wrap=True,
    )


def _check_installed() -> None:
    """Say what is missing before anything is trained."""
    try:
        load_torch_pruning()
        load_safetensors()
    except ImportError as error:
        raise ValueError(str(error)) from None


def _strengths(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--strengths must be numbers with commas between them, got {text!r}.") from None


def _digest(settings: dict[str, Any], kind: Kind, strengths: list[float] | None) -> str:
    """A short name for everything that the points of a path depend on."""
    content = json.dumps([settings, kind.value, strengths], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:10]
