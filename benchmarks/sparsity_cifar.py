"""Accuracy against size on CIFAR-10: a unit lasso and an l1 norm, next to pruning and fine-tuning.

    python benchmarks/sparsity_cifar.py tune   # AdamW's step size and the strength of the group-norm regulariser
    python benchmarks/sparsity_cifar.py run    # all methods, settings and seeds
    python benchmarks/sparsity_cifar.py draw   # the table and the figure of what has been run

Data is that of PROXSPS_DATA. Every point is trained for the same number of epochs in all, the last third of them on
the smaller network, with neither penalty nor pruning. `tune` uses a seed of its own and the validation images, `run`
is scored on the test images. Finished runs are appended to a file of JSON lines and not run again, so that all three
commands can be stopped and started at any time.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from proxsps import L1, ProxSPS, ProxSPSAdam
from proxsps.sparsity import find_units, shrink, sparse_groups, unit_groups
from proxsps.training.tasks import Task, accuracy, fit, task_named

TUNED = 1 / 3  # share of the epochs in which the smaller network is trained
TUNING_SEED = 100  # not among the seeds that are compared
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
GROUP_NORMS = (1e-4, 1e-3, 1e-2)  # strengths of torch-pruning's regulariser; its own default is the first
GROUP_NORM_RATIO = 0.6  # of channels that are removed while its strength is chosen
WEIGHT_DECAY = 5e-4


class Plan(NamedTuple):
    """What all runs have in common."""

    task: Task
    epochs: int
    lr: float = 1e-3  # of AdamW
    group_norm: float = 1e-4

    @property
    def tuned(self) -> int:
        """Epochs of fine-tuning."""
        return max(round(TUNED * self.epochs), 1)

    @property
    def first(self) -> int:
        """Epochs before it."""
        return self.epochs - self.tuned

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of all ways that have a step size to tune."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=WEIGHT_DECAY, fused=True)


# Methods: each returns a trained model, and how many parameters count as kept (None for all)

Trained = tuple[nn.Module, int | None]
Optimizer = type[ProxSPS] | type[ProxSPSAdam]  # with its default lr: 1, or none


def dense_adamw(plan: Plan, _: float, seed: int) -> Trained:
    """No regulariser but weight decay."""
    model = plan.task.network(seed)
    fit(plan.task, model, plan.adamw(model), plan.epochs, seed)
    return model, None


def dense_polyak(plan: Plan, _: float, seed: int, optimizer: Optimizer = ProxSPS) -> Trained:
    """No regulariser."""
    model = plan.task.network(seed)
    fit(plan.task, model, optimizer(model.parameters()), plan.epochs, seed)
    return model, None


def unit_lasso(plan: Plan, strength: float, seed: int, optimizer: Optimizer = ProxSPS) -> Trained:
    """Dead units are removed, which does not change the output, and the rest is tuned without the penalty."""
    model, x = plan.task.network(seed), plan.task.example_inputs()
    fit(plan.task, model, optimizer(unit_groups(model, x, strength)), plan.first, seed)
    small = shrink(model, x, timing_seconds=0).model
    fit(plan.task, small, optimizer(small.parameters()), plan.tuned, seed, first_epoch=plan.first)
    return small, None


def l1(plan: Plan, strength: float, seed: int, optimizer: Optimizer = ProxSPS) -> Trained:
    """Single weights become zero, and stay so while the rest is tuned without the penalty."""
    model = plan.task.network(seed)
    fit(plan.task, model, optimizer(sparse_groups(model, L1(strength))), plan.first, seed)
    return _tuned_around_zeros(plan, model, optimizer(model.parameters()), seed)


def pruned_channels(plan: Plan, ratio: float, seed: int) -> Trained:
    """The channels of smallest norm are removed after dense training, then the rest is tuned."""
    return _pruned(plan, ratio, seed, group_norm=False)


def group_norm(plan: Plan, ratio: float, seed: int) -> Trained:
    """The same after training with torch-pruning's group-norm regulariser."""
    return _pruned(plan, ratio, seed, group_norm=True)


def pruned_weights(plan: Plan, ratio: float, seed: int) -> Trained:
    """The smallest weights of all layers become zero after dense training, and stay so while the rest is tuned."""
    model = copy.deepcopy(_trained_for_pruning(plan, seed, False))
    weights = [p for p in model.parameters() if p.ndim > 1]
    sizes = torch.cat([p.detach().abs().flatten() for p in weights])
    limit = sizes.kthvalue(max(int(ratio * len(sizes)), 1)).values
    with torch.no_grad():
        for p in weights:
            p.mul_(p.abs() > limit)
    return _tuned_around_zeros(plan, model, plan.adamw(model), seed)


class Method(NamedTuple):
    """A way to a smaller network, and the settings at which it is tried."""

    train: Callable[[Plan, float, int], Trained]
    settings: tuple[float, ...]


METHODS = {
    "dense, AdamW": Method(dense_adamw, (0.0,)),
    "dense, ProxSPS": Method(dense_polyak, (0.0,)),
    "dense, ProxSPSAdam": Method(partial(dense_polyak, optimizer=ProxSPSAdam), (0.0,)),
    "unit lasso, ProxSPS": Method(unit_lasso, (7e-4, 1e-3, 1.5e-3, 3e-3)),
    "unit lasso, ProxSPSAdam": Method(partial(unit_lasso, optimizer=ProxSPSAdam), (1e-3, 2e-3, 3e-3, 5e-3)),
    "l1, ProxSPS": Method(l1, (1e-3, 2e-3, 3e-3, 5e-3)),
    "l1, ProxSPSAdam": Method(partial(l1, optimizer=ProxSPSAdam), (2e-3, 3e-3, 5e-3, 8e-3)),
    "magnitude of channels": Method(pruned_channels, (0.3, 0.5, 0.7, 0.85)),
    "magnitude of weights": Method(pruned_weights, (0.5, 0.7, 0.85, 0.95)),
    "group norm and AdamW": Method(group_norm, (0.3, 0.5, 0.7, 0.85)),
}


def _tuned_around_zeros(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Trained:
    """Weights that are zero get no gradient, so they stay zero."""
    alive = [(p, p.detach() != 0) for p in model.parameters()]

    def mask(_: nn.Module) -> None:
        for p, keep in alive:
            p.grad.mul_(keep)

    fit(plan.task, model, optimizer, plan.tuned, seed, first_epoch=plan.first, after_backward=mask)
    return model, sum(int((p != 0).sum()) for p in model.parameters())


def _pruner(plan: Plan, model: nn.Module, ratio: float, group_norm: bool) -> Any:
    """For the same units that a unit lasso has."""
    import torch_pruning as tp

    x = plan.task.example_inputs()
    kind = tp.pruner.GroupNormPruner if group_norm else tp.pruner.BasePruner
    return kind(
        model,
        x,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=ratio,
        max_pruning_ratio=0.9,  # a layer without channels would be left alone entirely
        ignored_layers=[model.get_submodule(layer) for left in find_units(model, x).left for layer in left.layers],
        forward_fn=lambda network, images: network(images),
        **({"reg": plan.group_norm} if group_norm else {}),
    )


@lru_cache(maxsize=4)
def _trained_for_pruning(plan: Plan, seed: int, group_norm: bool) -> nn.Module:
    """The same for all ratios, so trained once."""
    model = plan.task.network(seed)
    hook = {"after_backward": _pruner(plan, model, 0.5, True).regularize} if group_norm else {}
    fit(plan.task, model, plan.adamw(model), plan.first, seed, **hook)
    return model


def _pruned(plan: Plan, ratio: float, seed: int, group_norm: bool) -> Trained:
    model = copy.deepcopy(_trained_for_pruning(plan, seed, group_norm))
    _pruner(plan, model, ratio, group_norm).step()
    fit(plan.task, model, plan.adamw(model), plan.tuned, seed, first_epoch=plan.first)
    return model, None


# Commands


class Log:
    """Finished runs as JSON lines; rows of other settings of the data or the network are skipped."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file, self.about = file, about
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows = [row for row in rows if row["about"] == about]

    def run(self, plan: Plan, method: str, setting: float, seed: int, part: str) -> dict[str, Any]:
        """Train and score, or take the row from the file."""
        key = {"method": method, "setting": setting, "seed": seed, "part": part}
        key |= {"lr": plan.lr, "group_norm": plan.group_norm}
        for row in self.rows:
            if all(row[name] == value for name, value in key.items()):
                return row
        start = time.process_time()
        model, kept = METHODS[method].train(plan, setting, seed)
        kept = sum(p.numel() for p in model.parameters()) if kept is None else kept
        total = sum(p.numel() for p in plan.task.network(seed).parameters())
        found = {"accuracy": accuracy(model, getattr(plan.task, part)()), "size": kept / total, "parameters": kept}
        row = {**key, **found, "seconds": time.process_time() - start, "about": self.about}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        self.rows.append(row)
        print(
            f"{method}, {setting:g}, seed {seed}, lr {plan.lr:g}, group norm {plan.group_norm:g}: accuracy on "
            f"{part} {row['accuracy']:.2%}, size {row['size']:.1%}, {row['seconds']:.0f} s",
            flush=True,
        )
        return row


def tuned(plan: Plan, log: Log) -> Plan:
    """The plan with the best of both grids on the validation images, at a seed that is not compared."""

    def score(tried: Plan, method: str, setting: float) -> float:
        return log.run(tried, method, setting, TUNING_SEED, "validation")["accuracy"]

    plan = max((plan._replace(lr=lr) for lr in LEARNING_RATES), key=lambda tried: score(tried, "dense, AdamW", 0.0))
    tries = (plan._replace(group_norm=strength) for strength in GROUP_NORMS)
    return max(tries, key=lambda tried: score(tried, "group norm and AdamW", GROUP_NORM_RATIO))


def runs(seeds: int, methods: list[str] | None) -> Iterator[tuple[str, float, int]]:
    """Seed by seed, so that a part of the runs is a comparison too."""
    for seed in range(seeds):
        for name, method in METHODS.items():
            if methods is None or name in methods:
                yield from ((name, setting, seed) for setting in method.settings)


def draw(log: Log, out: Path) -> None:
    """The table of means over seeds, and the figure."""
    import pandas

    from proxsps.figures import save
    from proxsps.figures.sparsity import accuracy_against_size

    rows = pandas.DataFrame([row for row in log.rows if row["part"] == "test"]).rename(columns={"setting": "point"})
    rows["method"] = pandas.Categorical(rows["method"], [name for name in METHODS if name in set(rows["method"])])
    print("| method | setting | parameters kept | test accuracy | seeds |\n| --- | --- | --- | --- | --- |")
    for (method, point), part in rows.groupby(["method", "point"], observed=True):
        mean, size = 100 * part[["accuracy", "size"]].mean()
        spread = 100 * part["accuracy"].std(ddof=0)
        print(f"| {method} | {point:g} | {size:.1f} % | {mean:.1f} ± {spread:.1f} % | {len(part)} |")
    print(f"Drawn: {save(accuracy_against_size(rows, y_label='Test accuracy'), out)}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tune", "run", "draw"])
    parser.add_argument("--data", default="cifar10", help="or synthetic")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--validation-images", type=int, default=4_000, help="half to tune by, half to score by")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    parser.add_argument("--out", type=Path, default=Path("out/sparsity"))
    args = parser.parse_args()
    task = task_named(
        f"{args.data}-resnet{args.depth}",
        batch_norm=True,
        width=args.width,
        size=args.size,
        images=args.images,
        validation_images=args.validation_images,
        batch_size=args.batch_size,
    )
    log = Log(args.out / "cifar.jsonl", {**task.settings, "epochs": args.epochs})
    if args.command == "draw":
        return draw(log, args.out / "cifar.svg")
    plan = tuned(Plan(task, args.epochs), log)
    print(f"Chosen on validation images: AdamW lr {plan.lr:g}, group norm {plan.group_norm:g}", flush=True)
    if args.command == "run":
        for method, setting, seed in runs(args.seeds, args.methods):
            log.run(plan, method, setting, seed, "test")
        draw(log, args.out / "cifar.svg")
    return None


if __name__ == "__main__":
    main()
