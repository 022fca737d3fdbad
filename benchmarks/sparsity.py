"""Networks that become smaller: digits along the default path, latency, and the price of a step.

    python benchmarks/sparsity.py digits  [--seeds 3] [--epochs 20] [--optimizer ProxSPS] [--restart]
    python benchmarks/sparsity.py latency [--depth 110] [--threads 1]
    python benchmarks/sparsity.py step    [--rounds 40] [--threads 1]

`digits` runs the default path of strengths, takes the dead units out and trains once more without the penalty, next to
the dense network that the path starts from and one that is trained for as many epochs in all. `sparsity_cifar.py`
compares ways to smaller networks on CIFAR-10.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import proxsps
from proxsps import ProxSPS
from proxsps.problems.resnet import ResNet
from proxsps.sparsity import (
    ParameterGroups,
    StrengthPath,
    find_units,
    shrink,
    sparsity_report,
    strength_path,
    unit_groups,
)
from proxsps.training.tasks import Task, accuracy, fit, task_named

ADAMW = "AdamW, fused"
CAP = 0.1  # of the steps that are timed

# Digits


def digits(args: argparse.Namespace) -> None:
    """The default path; networks are chosen on validation digits and scored on test digits."""
    task, make = task_named("digits-mlp"), getattr(proxsps, args.optimizer)
    print("seed   dense  dense, longer  sparse  polished  zero weights  units removed  parameters")
    for seed in range(args.seeds):
        dense, small, path = _shrunk_digits(task, make, args.epochs, seed, args.restart)
        longer = task.network(seed)
        fit(task, longer, make(longer.parameters()), args.epochs * (len(path.points) + 1), seed)
        polished = copy.deepcopy(small)
        fit(task, polished, make(polished.parameters()), args.epochs, seed, first_epoch=args.epochs)
        scores = [accuracy(model, task.test()) for model in (dense, longer, small, polished)]
        best = path.best
        print(
            "{:>4} {:>7.2%} {:>14.2%} {:>7.2%} {:>9.2%} ".format(seed, *scores)
            + f"{best.zeros:>13.1%} {best.dead_units / best.units:>14.1%} {best.parameters:>11,}",
            flush=True,
        )


def _shrunk_digits(
    task: Task, make: Callable[[Any], Optimizer], epochs: int, seed: int, restart: bool
) -> tuple[nn.Module, nn.Module, StrengthPath]:
    """The dense network that the path starts from, the shrunk one that it chooses, and the path."""
    model = task.network(seed)
    trained: list[nn.Module] = []

    def train(network: nn.Module, given: Any) -> None:
        fit(task, network, make(given) if restart else given, epochs, seed)
        trained.append(copy.deepcopy(network))

    def judge(network: nn.Module) -> float:
        return accuracy(network, task.validation())

    path = strength_path(model, train, judge, task.example_inputs(), optimizer=None if restart else make)
    return trained[0], shrink(model, task.example_inputs(), timing_seconds=0).model, path


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
    """A step with a unit lasso on ResNet110's tensors, next to fused AdamW; rounds in turns."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = ResNet(110)
    groups = unit_groups(model, torch.randn(1, 3, 32, 32), 1e-4)
    params = list(model.parameters())
    for param in params:
        param.grad = 1e-3 * torch.randn_like(param)
    start = copy.deepcopy(model.state_dict())
    searched, capped = _losses(groups)
    polyak, decay = ProxSPS(groups, lr=CAP), ProxSPS(params, lr=CAP, weight_decay=5e-4)
    steps: dict[str, Callable[[], object]] = {
        ADAMW: torch.optim.AdamW(params, lr=1e-9, fused=True).step,
        "ProxSPS, weight decay": lambda: decay.step(loss=searched),
        "ProxSPS, unit lasso, searched": lambda: polyak.step(loss=searched),
        "ProxSPS, unit lasso, capped": lambda: polyak.step(loss=capped),
        "sparsity report": lambda: sparsity_report(model, groups.units),
    }
    # One thread's own time, which other programs hardly disturb.
    clock = time.process_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds + 2):
        for name, take in steps.items():
            begin = clock()
            take()
            times[name].append(1e3 * (clock() - begin))
            model.load_state_dict(start)
            _check_branch(name, polyak)
    # The lower quartile: what else the machine does only ever makes a step slower.
    quartiles = {name: statistics.quantiles(taken[2:], n=4)[0] for name, taken in times.items()}
    for name, quartile in quartiles.items():
        print(f"{name:<30} {quartile:8.2f} ms  {quartile / quartiles[ADAMW]:6.2f} of fused AdamW")


@torch.no_grad()
def _losses(groups: ParameterGroups) -> list[torch.Tensor]:
    """Losses at which the dual variable is searched for inside (0, 1), and at which the step ends at the cap."""

    def fall(u: float) -> float:
        total = 0.0
        for group in groups:
            x = torch.cat([param.flatten() for _, param in group["params"]]).double()
            d = torch.cat([param.grad.flatten() for _, param in group["params"]]).double()
            phi, moved = group["regularizer"], x - u * CAP * d
            total += float(torch.sum(d * (x - (moved if phi is None else phi.prox(moved, CAP)))))
        return total

    return [torch.tensor((fall(0.0) + fall(1.0)) / 2), torch.tensor(1.5 * fall(1.0))]


def _check_branch(name: str, optimizer: ProxSPS) -> None:
    wanted = {"searched": "inside", "capped": "capped"}.get(name.rpartition(", ")[2])
    if wanted and optimizer.last_step.branch_name != wanted:
        raise RuntimeError(f"{name}: the step was {optimizer.last_step.branch_name}.")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("digits")
    one.add_argument("--seeds", type=int, default=3)
    one.add_argument("--epochs", type=int, default=20, help="at each strength")
    one.add_argument("--optimizer", default="ProxSPSAdam", help="name of a class of proxsps")
    one.add_argument("--restart", action="store_true", help="make a new optimizer for each strength")
    one.set_defaults(run=digits)
    three = commands.add_parser("latency")
    three.add_argument("--depth", type=int, default=110)
    three.add_argument("--batch", type=int, default=16)
    three.add_argument("--seconds", type=float, default=10.0, help="at each share of dead units")
    three.add_argument("--threads", type=int, default=torch.get_num_threads())
    three.set_defaults(run=latency)
    four = commands.add_parser("step")
    four.add_argument("--rounds", type=int, default=40)
    four.add_argument("--threads", type=int, default=torch.get_num_threads())
    four.set_defaults(run=step)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
