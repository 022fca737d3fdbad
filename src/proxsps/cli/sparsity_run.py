"""Make one network smaller for the command line: the path, the smaller network, its files and tables."""

from __future__ import annotations

import copy
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
from proxsps.cli.console import finite, out, print_json, say, show
from proxsps.cli.sparsity import UNITS, Wanted
from proxsps.optim import ProxSPSAdam, ScheduleFreeSPS, renew_statistics
from proxsps.sparsity import save_sparse, shrink, strength_path
from proxsps.sparsity.export import load_safetensors
from proxsps.sparsity.graph import load_torch_pruning
from proxsps.sparsity.path import Point, StrengthPath
from proxsps.sweep.loop import RENEWED, take_steps
from proxsps.sweep.spec import digest
from proxsps.training.ranks import joined
from proxsps.training.tasks import Task, accuracy, fit, task_named


def run(wanted: Wanted) -> None:
    """Go along the path, write the smaller network and show the result; see `proxsps sparsify`."""
    _check_installed()
    seed, epochs, lr = wanted.seed, wanted.epochs, wanted.lr
    with joined(wanted.device) as ranks:
        if ranks.size > 1:
            raise ValueError("proxsps sparsify runs in one process; start it without torchrun.")
        task = task_named(wanted.name, ranks.device, **wanted.options)
        settings = {**task.settings, "optimizer": "ProxSPSAdam", "epochs": epochs, "lr": lr, "seed": seed}
        place = wanted.folder / "sparsify" / wanted.name / _digest(settings, wanted.kind, wanted.chosen)
        check_folder(place)
        model = task.network(seed)
        path = _along(wanted, task, model, place, settings)
        small, report = shrink(model, task.example_inputs())
        # Each point starts from the last good one, and all of these have a lower strength.
        runs = 1 + sum(point.strength < path.best.strength for point in path.points)
        if wanted.polish and wanted.kind == UNITS and path.chosen:
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
    if not wanted.as_json:
        _show(path, report, scores, trained, f"On disk: {on_disk}.", f"Smaller network: {place / 'small.pt'}")
        return
    costs = {"before": report.before._asdict(), "after": report.after._asdict(), "difference": report.difference}
    found = {"points": rows, "reason": path.reason, "test_accuracy": scores, "epochs": trained, **costs}
    print_json({**found, "bytes": on_disk._asdict(), "folder": str(place)})


def _along(wanted: Wanted, task: Task, model: nn.Module, place: Path, settings: dict[str, Any]) -> StrengthPath:
    """Train the model along the path of strengths."""
    return strength_path(
        model,
        lambda network, optimizer: fit(task, network, optimizer, wanted.epochs, wanted.seed),
        lambda network: accuracy(network, task.validation()),
        task.example_inputs(),
        optimizer=lambda groups: ProxSPSAdam(groups, lr=wanted.lr),
        kind=wanted.kind.value,  # type: ignore[arg-type]
        strengths=wanted.chosen,
        keep=wanted.keep,
        max_drop=wanted.max_drop,
        patience=wanted.patience,
        folder=place,
        settings=settings,
        watch=_say,
    )


def _show(path: StrengthPath, report: Any, scores: dict[str, float], trained: dict[str, int], *files: str) -> None:
    out.print(path.table)
    show(path.reason)
    out.print(report.table)
    for note in report.notes:
        show(note)
    show(
        f"On test data, not used to choose anything: dense network {scores['dense']:.2%} after {trained['dense']} "
        f"epochs, smaller network {scores['small']:.2%} after {trained['small']} epochs in total. The dense network "
        "might improve with more epochs too."
    )
    for text in files:
        show(text)


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
    renew_statistics(polished, (x for x, _ in islice(task.batches(seed, 2 * epochs), RENEWED)))
    before, after = (accuracy(model, task.validation()) for model in (small, polished))
    return polished if after > before else small


def _score_of_dense(task: Task, place: Path, seed: int) -> float:
    """Accuracy on test data of the network that the path starts from."""
    dense = task.network(seed)
    dense.load_state_dict(_sealed.read(place / "point-000.pt")["model"])
    return accuracy(dense, task.test())


def _say(point: Point) -> None:
    strength = "dense" if not point.strength else f"strength {point.strength:.3g}"
    say(
        f"{strength}: accuracy {point.accuracy:.2%}, size {point.size:.1%}, {point.zeros:.1%} of weights zero, "
        f"{point.dead_units} of {point.units} units dead"
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
    return digest([settings, kind, strengths])[:10]
