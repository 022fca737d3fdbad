"""Networks that become smaller: accuracy against size next to other ways, latency, and the price of a step.

    python benchmarks/sparsity.py digits  [--seeds 3] [--epochs 20]
    python benchmarks/sparsity.py cifar   [--seeds 3] [--epochs 30] [--images 10000] ...
    python benchmarks/sparsity.py latency [--depth 110]
    python benchmarks/sparsity.py step    [--rounds 40]

`digits` runs the default path of strengths, takes the dead units out and trains once more without the penalty, next to
a dense network trained for as many epochs in all. `cifar` trains a
ResNet20 with batch normalisation on CIFAR-10 (PROXSPS_DATA), each point in the same number of epochs: a unit lasso and
an l1 norm under ProxSPS, magnitude pruning of channels and of weights with fine-tuning, and torch-pruning's group-norm
regulariser under AdamW with fine-tuning. Finished points are appended to a file of JSON lines, and not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from proxsps import L1, ProxSPS
from proxsps.problems.resnet import ResNet
from proxsps.sparsity import find_units, shrink, sparse_groups, sparsity_report, strength_path, unit_groups
from proxsps.training.tasks import Task, accuracy, fit, task_named

TUNED = 1 / 3  # share of the epochs that fine-tuning takes, where a method has it
ADAMW = {"lr": 1e-3, "weight_decay": 5e-4, "fused": True}
STRENGTHS = {"unit lasso": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3), "l1": (2e-5, 5e-5, 1e-4, 2e-4, 4e-4)}
RATIOS = (0.3, 0.5, 0.7, 0.8, 0.88)
GROUP_NORM = 1e-3  # torch-pruning's strength


# Digits


def digits(args: argparse.Namespace) -> None:
    """The default path against a dense network of as many epochs."""
    task = task_named("digits-mlp")
    print("seed   dense  sparse  polished  zero weights  units removed  parameters")
    for seed in range(args.seeds):
        model = task.network(seed)
        path = strength_path(
            model,
            lambda network, groups, seed=seed: fit(task, network, ProxSPS(groups, lr=1.0), args.epochs, seed),
            lambda network: accuracy(task, network),
            task.example_inputs(),
        )
        dense = task.network(seed)
        fit(task, dense, ProxSPS(dense.parameters(), lr=1.0), args.epochs * (len(path.points) + 1), seed)
        small = shrink(model, task.example_inputs(), timing_seconds=0).model
        fit(task, small, ProxSPS(small.parameters(), lr=1.0), args.epochs, seed, first_epoch=args.epochs)
        best = path.best
        print(
            f"{seed:>4} {accuracy(task, dense):>7.2%} {best.accuracy:>7.2%} {accuracy(task, small):>9.2%} "
            f"{best.zeros:>13.1%} {best.dead_units / best.units:>14.1%} {best.parameters:>11,}",
            flush=True,
        )


# CIFAR-10


def cifar(args: argparse.Namespace) -> None:
    """All methods, settings and seeds; a row each."""
    task = task_named(
        f"{args.data}-resnet{args.depth}",
        batch_norm=True,
        width=args.width,
        size=args.size,
        images=args.images,
        validation_images=args.validation_images,
    )
    file = Path(args.out) / "cifar.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    about = {**task.settings(), "epochs": args.epochs}
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    finished = {(row["method"], row["setting"], row["seed"]) for row in done if row["about"] == about}
    for method, setting, seed in _runs(args):
        if (method, setting, seed) in finished:
            continue
        start = time.perf_counter()
        row = METHODS[method](task, setting, seed, args.epochs)
        row |= {"method": method, "setting": setting, "seed": seed, "seconds": time.perf_counter() - start}
        with file.open("a") as lines:
            lines.write(json.dumps({**row, "about": about}) + "\n")
        print(f"{method} {setting:g}, seed {seed}: accuracy {row['accuracy']:.2%}, size {row['size']:.1%}", flush=True)
    _draw(file, about)


def _runs(args: argparse.Namespace) -> Iterator[tuple[str, float, int]]:
    settings = {"dense": (0.0,), "unit lasso": args.unit_strengths, "l1": args.l1_strengths}
    for seed in range(args.seeds):
        for method in METHODS:
            for setting in settings.get(method, args.ratios):
                if args.methods is None or method in args.methods:
                    yield method, setting, seed


def _measured(task: Task, model: nn.Module, parameters: int | None = None) -> dict[str, float]:
    """Accuracy, and the share of parameters that are left."""
    total = sum(p.numel() for p in task.network(0).parameters())
    kept = sum(p.numel() for p in model.parameters()) if parameters is None else parameters
    return {"accuracy": accuracy(task, model), "size": kept / total, "parameters": kept}


def _dense(task: Task, setting: float, seed: int, epochs: int) -> dict[str, float]:
    model = task.network(seed)
    fit(task, model, torch.optim.AdamW(model.parameters(), **ADAMW), epochs, seed)
    return _measured(task, model)


def _unit_lasso(task: Task, strength: float, seed: int, epochs: int) -> dict[str, float]:
    model = task.network(seed)
    fit(task, model, ProxSPS(unit_groups(model, task.example_inputs(), strength), lr=1.0), epochs, seed)
    return _measured(task, shrink(model, task.example_inputs(), timing_seconds=0).model)


def _l1(task: Task, strength: float, seed: int, epochs: int) -> dict[str, float]:
    model = task.network(seed)
    fit(task, model, ProxSPS(sparse_groups(model, L1(strength)), lr=1.0), epochs, seed)
    return _measured(task, model, sum(int((p != 0).sum()) for p in model.parameters()))


def _pruned(task: Task, ratio: float, seed: int, epochs: int, group_norm: bool) -> dict[str, float]:
    """Channels by magnitude, after dense training or after training with the group-norm regulariser; then tuned."""
    import torch_pruning as tp

    model, x = task.network(seed), task.example_inputs()
    fixed = [model.get_submodule(layer) for left in find_units(model, x).left for layer in left.layers]
    kind = tp.pruner.GroupNormPruner if group_norm else tp.pruner.BasePruner
    options = {"reg": GROUP_NORM} if group_norm else {}
    pruner = kind(
        model,
        x,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        global_pruning=True,
        pruning_ratio=ratio,
        max_pruning_ratio=0.9,  # a layer without channels would be left alone entirely
        ignored_layers=fixed,
        forward_fn=lambda network, images: network(images),
        **options,
    )
    tuned = max(round(TUNED * epochs), 1)
    hook: dict[str, Any] = {"after_backward": pruner.regularize} if group_norm else {}
    fit(task, model, torch.optim.AdamW(model.parameters(), **ADAMW), epochs - tuned, seed, **hook)
    pruner.step()
    fit(task, model, torch.optim.AdamW(model.parameters(), **ADAMW), tuned, seed, first_epoch=epochs - tuned)
    return _measured(task, model)


def _magnitude_weights(task: Task, ratio: float, seed: int, epochs: int) -> dict[str, float]:
    """The smallest weights of all layers, after dense training; zeros stay zeros while the rest is tuned."""
    model = task.network(seed)
    tuned = max(round(TUNED * epochs), 1)
    fit(task, model, torch.optim.AdamW(model.parameters(), **ADAMW), epochs - tuned, seed)
    weights = [p for p in model.parameters() if p.ndim > 1]
    sizes = torch.cat([p.detach().abs().flatten() for p in weights])
    limit = sizes.kthvalue(max(int(ratio * len(sizes)), 1)).values
    masks = [(p.detach().abs() > limit) for p in weights]
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    @torch.no_grad()
    def mask(*_: Any) -> None:
        for p, keep in zip(weights, masks, strict=True):
            p.mul_(keep)

    mask()
    optimizer.register_step_post_hook(mask)
    fit(task, model, optimizer, tuned, seed, first_epoch=epochs - tuned)
    return _measured(task, model, sum(int((p != 0).sum()) for p in model.parameters()))


METHODS: dict[str, Callable[..., dict[str, float]]] = {
    "dense": _dense,
    "unit lasso": _unit_lasso,
    "l1": _l1,
    "magnitude of channels, tuned": lambda *args: _pruned(*args, group_norm=False),
    "magnitude of weights, tuned": _magnitude_weights,
    "group norm and AdamW, tuned": lambda *args: _pruned(*args, group_norm=True),
}


def _draw(file: Path, about: dict[str, Any]) -> None:
    import pandas

    from proxsps.figures import save
    from proxsps.figures.sparsity import accuracy_against_size

    rows = pandas.DataFrame([json.loads(line) for line in file.read_text().splitlines()])
    rows = rows[[row == about for row in rows["about"]]].rename(columns={"setting": "point"})
    print(rows.groupby(["method", "point"], sort=False)[["accuracy", "size"]].agg(["mean", "std"]).round(4).to_string())
    path = save(accuracy_against_size(rows[["method", "point", "seed", "accuracy", "size"]]), file.with_suffix(".svg"))
    print(f"Drawn: {path}")


# Latency and steps


def latency(args: argparse.Namespace) -> None:
    """Networks with a share of dead units, shrunk."""
    torch.set_num_threads(args.threads)
    print(f"{'dead units':>10} {'parameters':>11} {'multiply-adds':>14} {'ms before':>10} {'ms after':>9} {'ratio':>6}")
    for share in (0.25, 0.5, 0.75, 0.9):
        torch.manual_seed(0)
        model = ResNet(args.depth).eval()
        x = torch.randn(args.batch, 3, 32, 32)
        units = find_units(model, x[:1])
        kill(model, units, share)
        report = shrink(model, x, units=units, timing_seconds=args.seconds).report
        old, new = report.before, report.after
        print(
            f"{share:>10.0%} {new.parameters / old.parameters:>11.1%} {new.multiply_adds / old.multiply_adds:>14.1%} "
            f"{old.milliseconds:>10.2f} {new.milliseconds:>9.2f} {new.milliseconds / old.milliseconds:>6.2f}"
        )


@torch.no_grad()
def kill(model: nn.Module, units: Any, share: float) -> None:
    """Set a share of the units of each set to zero."""
    params = dict(model.named_parameters())
    rng = np.random.default_rng(0)
    for one in units.sets:
        gone = rng.permutation(len(one))[: int(share * len(one))]
        for member in one.members:
            slices = torch.from_numpy(np.flatnonzero(np.isin(member.ids, gone)))
            params[member.name].index_fill_(member.dim, slices, 0.0)


def step(args: argparse.Namespace) -> None:
    """A step with a unit lasso on ResNet110's tensors, next to fused AdamW; medians of rounds in turns."""
    torch.manual_seed(0)
    model = ResNet(110)
    groups = unit_groups(model, torch.randn(1, 3, 32, 32), 1e-4)
    params = list(model.parameters())
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    start = copy.deepcopy(model.state_dict())
    loss = torch.tensor(1.0)
    polyak, decay = ProxSPS(groups, lr=1e-6), ProxSPS(params, lr=1e-6, weight_decay=5e-4)
    adamw = torch.optim.AdamW(params, lr=1e-9, fused=True)
    steps: dict[str, Callable[[], object]] = {
        "AdamW, fused": adamw.step,
        "ProxSPS, weight decay": lambda: decay.step(loss=loss),
        "ProxSPS, unit lasso": lambda: polyak.step(loss=loss),
    }
    report = lambda: sparsity_report(model, groups.units)  # noqa: E731
    times: dict[str, list[float]] = {name: [] for name in [*steps, "sparsity report"]}
    for _ in range(args.rounds + 2):
        for name, take in [*steps.items(), ("sparsity report", report)]:
            begin = time.perf_counter()
            take()
            times[name].append(1e3 * (time.perf_counter() - begin))
        model.load_state_dict(start)
    medians = {name: statistics.median(taken[2:]) for name, taken in times.items()}
    for name, median in medians.items():
        print(f"{name:<24} {median:8.2f} ms  {median / medians['AdamW, fused']:6.2f} of fused AdamW")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("digits")
    one.add_argument("--seeds", type=int, default=3)
    one.add_argument("--epochs", type=int, default=20, help="at each strength")
    one.set_defaults(run=digits)
    two = commands.add_parser("cifar")
    two.add_argument("--data", default="cifar10", help="or synthetic")
    two.add_argument("--seeds", type=int, default=3)
    two.add_argument("--epochs", type=int, default=30)
    two.add_argument("--depth", type=int, default=20)
    two.add_argument("--width", type=int, default=16)
    two.add_argument("--size", type=int, default=16)
    two.add_argument("--images", type=int, default=10_000)
    two.add_argument("--validation-images", type=int, default=2_000)
    two.add_argument("--out", default="out/sparsity")
    two.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    two.add_argument("--unit-strengths", nargs="+", type=float, default=STRENGTHS["unit lasso"])
    two.add_argument("--l1-strengths", nargs="+", type=float, default=STRENGTHS["l1"])
    two.add_argument("--ratios", nargs="+", type=float, default=RATIOS, help="of what pruning removes")
    two.set_defaults(run=cifar)
    three = commands.add_parser("latency")
    three.add_argument("--depth", type=int, default=110)
    three.add_argument("--batch", type=int, default=16)
    three.add_argument("--seconds", type=float, default=10.0)
    three.add_argument("--threads", type=int, default=torch.get_num_threads())
    three.set_defaults(run=latency)
    four = commands.add_parser("step")
    four.add_argument("--rounds", type=int, default=40)
    four.set_defaults(run=step)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
