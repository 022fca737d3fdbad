"""Make one network smaller for the command line: the path, the smaller network, its files and tables."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.functional import cross_entropy

from proxsps import _sealed
from proxsps._files import replace_file
from proxsps.cli.checks import check_folder
from proxsps.cli.console import err, finite, out, print_json
from proxsps.optim import ProxSPSAdam, ScheduleFreeSPS, renew_statistics
from proxsps.sparsity import save_sparse, shrink, strength_path
from proxsps.sparsity.export import load_safetensors
from proxsps.sparsity.graph import load_torch_pruning
from proxsps.sparsity.path import Point
from proxsps.sweep.loop import take_steps
from proxsps.training.ranks import joined
from proxsps.training.tasks import Task, accuracy, fit, task_named

UNITS = "units"
STATISTICS = 20  # batches for the statistics of batch normalisation


def run(
    name: str,
    kind: str,
    strengths: list[float] | None,
    options: dict[str, Any],
    folder: Path,
    keep: float | None,
    max_drop: float,
    patience: int,
    epochs: int,
    lr: float | None,
    polish: bool,
    seed: int,
    device: str | None,
    as_json: bool,
) -> None:
    """Go along the path, write the smaller network and show the result; see `proxsps sparsify`."""
    _check_installed()
    with joined(device) as ranks:
        if ranks.size > 1:
            raise ValueError("proxsps sparsify runs in one process; start it without torchrun.")
        task = task_named(name, ranks.device, **options)
        settings = {**task.settings(), "optimizer": "ProxSPSAdam", "epochs": epochs, "lr": lr, "seed": seed}
        place = folder / "sparsify" / name / _digest(settings, kind, strengths)
        check_folder(place)
        model = task.network(seed)
        path = strength_path(
            model,
            lambda network, optimizer: fit(task, network, optimizer, epochs, seed),
            lambda network: accuracy(network, task.validation()),
            task.example_inputs(),
            optimizer=lambda groups: ProxSPSAdam(groups, lr=lr),
            kind=kind,  # type: ignore[arg-type]
            strengths=strengths,
            keep=keep,
            max_drop=max_drop,
            patience=patience,
            folder=place,
            settings=settings,
            watch=_say,
        )
        small, report = shrink(model, task.example_inputs())
        # Each point starts from the last good one, and all of these have a lower strength.
        runs = 1 + sum(point.strength < path.best.strength for point in path.points)
        if polish and kind == UNITS and path.chosen:
            before, small = small, _polished(task, small, lr, epochs, seed)
            runs += small is not before
        trained = {"dense": epochs, "small": runs * epochs}
        scores = {"dense": _score_of_dense(task, place, seed), "small": accuracy(small, task.test())}
    _sealed.write(place / "small.pt", small.state_dict())
    on_disk = save_sparse(small, place / "small.safetensors")
    # Next to the network that the user began with, not to the dense form of the smaller one.
    on_disk = on_disk._replace(dense=sum(tensor.nbytes for tensor in model.state_dict().values()))
    rows = [
        {**{key: finite(value) for key, value in asdict(point).items()}, "chosen": i == path.chosen}
        for i, point in enumerate(path.points)
    ]
    replace_file(place / "path.json", (json.dumps(rows, indent=2) + "\n").encode())
    if as_json:
        costs = {"before": report.before._asdict(), "after": report.after._asdict(), "difference": report.difference}
        found = {"points": rows, "reason": path.reason, "test_accuracy": scores, "epochs": trained, **costs}
        print_json({**found, "bytes": on_disk._asdict(), "folder": str(place)})
        return
    out.print(path.table)
    out.print(path.reason, highlight=False, soft_wrap=True)
    out.print(report.table)
    for note in report.notes:
        out.print(note, highlight=False, soft_wrap=True)
    out.print(
        f"On test data, not used to choose anything: dense network {scores['dense']:.2%} after {trained['dense']} "
        f"epochs, smaller network {scores['small']:.2%} after {trained['small']} epochs in total. The dense network "
        "might improve with more epochs too.",
        highlight=False,
        soft_wrap=True,
    )
    out.print(f"On disk: {on_disk}.", highlight=False, soft_wrap=True)
    out.print(f"Smaller network: {place / 'small.pt'}", highlight=False, soft_wrap=True)


def _polished(task: Task, small: nn.Module, lr: float | None, epochs: int, seed: int) -> nn.Module:
    """The smaller network, trained without the penalty that made its weights too small, if that helps.

    Without a penalty, averages give better networks than the steps of the path, and zeros are not needed.
    """
    polished = copy.deepcopy(small)
    optimizer = ScheduleFreeSPS(polished, lr=lr)
    polished.train()
    for epoch in range(epochs, 2 * epochs):
        for _ in take_steps(optimizer, task.batches(seed, epoch), lambda b: cross_entropy(polished(b[0]), b[1])):
            pass
    renew_statistics(polished, (x for x, _ in islice(task.batches(seed, 2 * epochs), STATISTICS)))
    before, after = (accuracy(model, task.validation()) for model in (small, polished))
    return polished if after > before else small


def _score_of_dense(task: Task, place: Path, seed: int) -> float:
    """Accuracy on test data of the network that the path starts from."""
    dense = task.network(seed)
    dense.load_state_dict(_sealed.read(place / "point-000.pt")["model"])
    return accuracy(dense, task.test())


def _say(point: Point) -> None:
    strength = "dense" if not point.strength else f"strength {point.strength:.3g}"
    err.print(
        f"{strength}: accuracy {point.accuracy:.2%}, size {point.size:.1%}, {point.zeros:.1%} of weights zero, "
        f"{point.dead_units} of {point.units} units dead",
        highlight=False,
        soft_wrap=True,
    )


def _check_installed() -> None:
    """Raise an error for missing packages before anything is trained."""
    try:
        load_torch_pruning()
        load_safetensors()
    except ImportError as error:
        raise ValueError(str(error)) from None


def _digest(settings: dict[str, Any], kind: str, strengths: list[float] | None) -> str:
    """A short name for everything that the points of a path depend on."""
    content = json.dumps([settings, kind, strengths], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:10]
