"""Time of one optimizer step, as ratios to torch's own optimizers in the same run.

    python benchmarks/step_time.py [--rounds 20] [--device cpu] [--cpu-time] [--only REGEX] [--json FILE]

Four sets of parameters: the 329 tensors of a CIFAR ResNet110 with batch norm (1.7 M entries), 25 M entries in 50
matrices, one matrix of 20 M, and a small network, where Python takes nearly all of the time. All optimizers step in
turn from the same point, round after round, so that a busy moment of the machine hits all of them; a time is the median
over rounds. With --cpu-time, steps run on one thread, and times are those of this process on the CPU: if others use the
machine as well, threads that wait for each other make the time on the clock meaningless.

"searched" is a step whose dual variable lies inside (0, 1), "capped" one that ends at the cap. GroupLasso has filters
in (a), with weight decay on the other tensors, and rows in (b) and (c); "mixed" has L1 on every other tensor and weight
decay on the rest; NuclearNorm is timed in (a) only, with weight decay on the vectors. "momentum" and "Adam's metric"
have a model that is an average over steps, with weight decay; "no lr" is a step without a learning rate, with the
distance cap. "schedule-free" is `ScheduleFreeSPS` in Adam's metric; its spectral steps are in spectral_time.py.

Floors are what a step cannot do without: "read, then write" reads parameters and gradients once (torch.dot) before it
reads and writes them (fused SGD), "read twice, then write" reads them twice. "read three, then write two" is that of
momentum, whose passes need the average of the gradients too (fused SGD with momentum), and "read four, then write
three" that of Adam's metric, with the average of their squares (fused AdamW).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxsps import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    NonNegative,
    NuclearNorm,
    PolyakOptimizer,
    ProxSPS,
    ProxSPSAdam,
    Regularizer,
    ScheduleFreeSPS,
)
from proxsps.optim.plan import load_kernels

DECAY = 5e-4
clock = time.perf_counter
BASE = ("AdamW fused",)
NUCLEAR = "NuclearNorm"


def resnet110_shapes() -> list[tuple[int, ...]]:
    """Parameters of the CIFAR ResNet110 with batch norm: three stages of 18 blocks, widths 16, 32, 64."""
    shapes: list[tuple[int, ...]] = [(16, 3, 3, 3), (16,), (16,)]
    width_in = 16
    for width in (16, 32, 64):
        for _ in range(18):
            shapes += [(width, width_in, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            width_in = width
    return [*shapes, (10, 64), (10,)]


CASES = {
    "(a) ResNet110": resnet110_shapes(),
    "(b) 25 M in 50": [(1000, 500)] * 50,
    "(c) 20 M in one": [(20_000, 1000)],
    "(d) 10 k in 4": [(128, 64), (128,), (10, 128), (10,)],
}
ALPHA, LAM = 0.1, 0.1
REGULARIZERS: dict[str, Callable[[int], Regularizer]] = {  # for a number of dims
    "L1": lambda dims: L1(LAM),
    "ElasticNet": lambda dims: ElasticNet(LAM, LAM),
    "NonNegative": lambda dims: NonNegative(),
    "Box": lambda dims: Box(-1.0, 1.0),
    "GroupLasso": lambda dims: GroupLasso(LAM, tuple(range(1, dims))),
}

AVERAGED: dict[str, tuple[type[PolyakOptimizer], dict[str, Any]]] = {
    "no lr": (ProxSPS, {"lr": None}),
    "momentum": (ProxSPS, {"lr": 1.0, "momentum": 0.9}),
    "momentum, no lr": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "Adam's metric": (ProxSPSAdam, {"lr": 1e-3}),
    "Adam's metric, no lr": (ProxSPSAdam, {"lr": None}),
    "schedule-free": (ScheduleFreeSPS, {}),
}


def groups_of(name: str, params: list[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups with the regulariser of this name, and weight decay where it does not apply."""
    if name == "mixed":
        some, others, name = params[::2], params[1::2], "L1"
    elif name == "GroupLasso":
        some, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    else:
        some, others = params, []
    groups = [
        {"params": [p for p in some if p.dim() == dims], "regularizer": REGULARIZERS[name](dims)}
        for dims in sorted({p.dim() for p in some})
    ]
    return [*groups, {"params": others, "weight_decay": DECAY}] if others else groups


def loss_for(branch: str, groups: list[dict[str, Any]], adam: bool = False) -> Tensor:
    """A loss above a bound of 0 at which the step ends on this branch; in Adam's metric for gradients that stay."""

    def fall(u: float) -> float:
        total = 0.0
        for group in groups:
            phi = group.get("regularizer") or L2(group["weight_decay"])
            for p in group["params"]:
                x, d = p.detach().double(), p.grad.double()
                if adam:
                    y = phi.prox_diagonal(x - u * ALPHA * d.sign(), ALPHA / d.abs())
                else:
                    y = phi.prox(x - u * ALPHA * d, ALPHA)
                total += float(torch.sum(d * (x - y)))
        return total

    top = fall(1.0)
    return torch.tensor(
        1.5 * top if branch == "capped" else (fall(0.0) + top) / 2, device=groups[0]["params"][0].device
    )


def contestants(
    params: list[Tensor], reset: Callable[[], None], wanted: Callable[[str], bool]
) -> dict[str, Callable[[], object]]:
    """A step of each wanted optimizer on the same parameters and gradients."""
    grads = [p.grad for p in params]
    on_cpu = params[0].is_cpu
    kernels = on_cpu and load_kernels() is not None

    # A loss that the linear model cannot reach by rounding alone: inner products are as large as the number of entries.
    small = torch.tensor(0.01 * sum(p.numel() for p in params))

    def decay(method: type[PolyakOptimizer], fused: bool | None, **options: Any) -> Callable[[], object]:
        # The points z of the schedule-free form are not reset, and lower its model from step to step.
        loss = 1e6 * small if method is ScheduleFreeSPS else small
        return moving(method(params, weight_decay=DECAY, fused=fused, **options), loss, reset)

    def averaged_prox(name: str, fused: bool | None) -> Callable[[], object]:
        groups = groups_of(name, params)
        opt = ProxSPS(groups, lr=ALPHA, momentum=0.9, fused=fused)
        return moving(opt, loss_for("searched", groups), reset)

    def adam_prox(name: str, lr: float | None, fused: bool | None) -> Callable[[], object]:
        groups = groups_of(name, params)
        loss = loss_for("searched", groups, adam=True)
        opt = ProxSPSAdam(groups, lr=lr, cap="matched" if lr is None else "proximal", fused=fused)
        return moving(opt, loss, reset)

    sgd = torch.optim.SGD(params, lr=1e-9, weight_decay=DECAY, fused=True)
    momentum = torch.optim.SGD(params, lr=1e-9, momentum=0.9, weight_decay=DECAY, fused=True)
    adamw = torch.optim.AdamW(params, lr=1e-9, weight_decay=DECAY, fused=True)

    def passes(reads: int) -> Callable[[], object]:
        def run() -> None:
            for _ in range(reads):
                for p, g in zip(params, grads, strict=True):
                    torch.dot(p.detach().view(-1), g.view(-1))
            sgd.step()

        return run

    def averaging(opt: torch.optim.Optimizer, *names: str) -> Callable[[], object]:
        """Read parameters, gradients and the state of these names once each, then let torch write."""

        def run() -> None:
            for p, g in zip(params, grads, strict=True):
                streams = [p.detach(), g, *[opt.state[p][name] for name in names if name in opt.state[p]]]
                flat = [stream.view(-1) for stream in streams]
                for a, b in zip(flat[::2], flat[1::2], strict=False):
                    torch.dot(a, b)
                if len(flat) % 2:
                    torch.sum(flat[-1])
            opt.step()

        return run

    steps = {
        "SGD fused": sgd.step,
        "AdamW fused": adamw.step,
        "AdamW default": torch.optim.AdamW(params, lr=1e-9, weight_decay=DECAY).step,
        "read, then write": passes(1),
        "read twice, then write": passes(2),
        "read three, then write two": averaging(momentum, "momentum_buffer"),
        "read four, then write three": averaging(adamw, "exp_avg", "exp_avg_sq"),
    }
    paths = (
        {"kernels": True, "torch alone": False} if kernels else {"torch alone": False} if on_cpu else {"device": None}
    )
    makers: dict[str, Callable[[], Callable[[], object]]] = {}
    for path, fused in paths.items():
        makers[f"weight decay, {path}"] = partial(decay, ProxSPS, fused, lr=1.0)
        for name, (method, options) in AVERAGED.items():
            makers[f"{name}, {path}"] = partial(decay, method, fused, **options)
        makers[f"L1 with momentum, {path}"] = partial(averaged_prox, "L1", fused)
        makers[f"GroupLasso with momentum, {path}"] = partial(averaged_prox, "GroupLasso", fused)
        makers[f"L1 in Adam's metric, {path}"] = partial(adam_prox, "L1", ALPHA, fused)
        makers[f"L1 in Adam's metric, no lr, {path}"] = partial(adam_prox, "L1", None, fused)
        for name in [*REGULARIZERS, *(["mixed"] if len(params) > 1 else [])]:
            for branch in ("searched", "capped"):
                if branch == "searched" or name in ("L1", "GroupLasso"):
                    makers[f"{name}, {branch}, {path}"] = partial(
                        checked, name, branch, groups_of(name, params), fused, reset
                    )
    makers["GroupLasso in Adam's metric"] = partial(adam_prox, "GroupLasso", ALPHA, None)
    steps = {name: step for name, step in steps.items() if wanted(name)}
    return steps | {name: make() for name, make in makers.items() if wanted(name)}


def checked(
    name: str, branch: str, groups: list[dict[str, Any]], fused: bool | None, reset: Callable[[], None]
) -> Callable[[], object]:
    """A step with regularisers, once it is known to end on this branch."""
    opt, loss = ProxSPS(groups, lr=ALPHA, fused=fused), loss_for(branch, groups)
    opt.step(loss=loss)
    reset()
    if opt.last_step.branch_name != branch.replace("searched", "inside"):
        raise RuntimeError(f"{name} was to be {branch}, but is {opt.last_step.branch_name}.")
    return lambda: opt.step(loss=loss)


def moving(opt: PolyakOptimizer, loss: Tensor, reset: Callable[[], None]) -> Callable[[], object]:
    """A step with averages, once it is known to move along them, and has left its start, as in training."""
    for _ in range(3):
        opt.step(loss=loss)
        if opt.last_step.branch_name not in ("inside", "capped"):
            raise RuntimeError(f"A step was to move, but is {opt.last_step.branch_name}: {opt}.")
    reset()
    return lambda: opt.step(loss=loss)


def nuclear(params: list[Tensor], reset: Callable[[], None]) -> dict[str, Callable[[], object]]:
    """Steps with the nuclear norm, whose decompositions take seconds for the large matrices: (a) only."""

    def step(branch: str) -> Callable[[], object]:
        groups = [
            {"params": [p for p in params if p.dim() > 1], "regularizer": NuclearNorm(LAM)},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": DECAY},
        ]
        return checked("NuclearNorm", branch, groups, None, reset)

    return {f"{NUCLEAR}, {branch}": step(branch) for branch in ("searched", "capped")}


def measure(case: str, rounds: int, device: str, only: str) -> dict[str, float]:
    """Median seconds of a step of each contestant."""
    params = [torch.randn(shape, device=device).requires_grad_() for shape in CASES[case]]
    for p in params:
        p.grad = torch.randn_like(p) + 0.5 * p.detach()  # so that every regulariser alone lowers the linear model
    start = [p.detach().clone() for p in params]

    @torch.no_grad()
    def reset() -> None:
        if params[0].is_cpu:  # by NumPy: threads of torch spin after their last use, in the way of whoever comes next
            for p, x in zip(params, start, strict=True):
                np.copyto(p.detach().numpy(), x.numpy())
        else:
            torch._foreach_copy_(params, start)

    def wanted(name: str) -> bool:
        return name in BASE or re.search(only, name) is not None

    steps = contestants(params, reset, wanted)
    if case.startswith("(a)") and wanted(NUCLEAR):
        steps |= nuclear(params, reset)
    return interleaved(steps, rounds, reset)


def after_backward(rounds: int) -> dict[str, float]:
    """Median seconds of a step of the small network after a backward pass of its own, with new gradient tensors."""
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    makers: dict[str, Callable[[list[Tensor]], Any]] = {
        "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
        "weight decay": lambda params: ProxSPS(params, lr=0.1, weight_decay=DECAY),
        "ProxSPSAdam, no lr": lambda params: ProxSPSAdam(params, weight_decay=DECAY),
        "L1": lambda params: ProxSPS(params, lr=0.1, regularizer=L1(1e-4)),
        "schedule-free": lambda params: ScheduleFreeSPS(params, weight_decay=DECAY),
    }
    runs = {}
    for name, make in makers.items():
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        runs[name] = model, make(list(model.parameters()))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 20):
        for name, (model, opt) in runs.items():
            opt.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            arguments = {} if name.startswith("AdamW") else {"loss": loss}
            start = clock()
            opt.step(**arguments)
            times[name].append(clock() - start)
    return {name: statistics.median(series[20:]) for name, series in times.items()}


def interleaved(
    steps: dict[str, Callable[[], object]], rounds: int, reset: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Median seconds of each step, all of which are taken in turn, each from where `reset` puts the parameters."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            step()  # brings the state of this step, not of the one before, into the caches
            reset()
            synchronize()
            start = clock()
            step()
            synchronize()
            times[name].append(clock() - start)
            reset()
    return {name: statistics.median(series[2:]) for name, series in times.items()}


def take_cpu_time() -> None:
    """Time one thread by the time that this process gets."""
    global clock
    torch.set_num_threads(1)
    clock = time.process_time


def synchronize() -> None:
    """Wait for a device."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def state_floats(method: type[torch.optim.Optimizer], **options: Any) -> float:
    """Floats per parameter in the tensors that an optimizer keeps after one step."""
    x = torch.ones(100_000, requires_grad=True)
    opt = method([x], **options)
    opt.step(lambda: _backward(x))
    tensors = [t for entry in opt.state.values() for t in entry.values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors) / x.nbytes


def _backward(x: Tensor) -> Tensor:
    loss = (x * x).sum()
    loss.backward()
    return loss


def table(results: dict[str, dict[str, float]]) -> str:
    """Milliseconds, and ratios to fused AdamW, as Markdown."""
    lines = ["| step | " + " | ".join(f"{case}: ms | / AdamW fused" for case in results) + " |"]
    lines.append("| --- |" + " ---: |" * (2 * len(results)))
    for name in dict.fromkeys(name for times in results.values() for name in times):
        cells = []
        for times in results.values():
            t = times.get(name)
            cells += ["-", "-"] if t is None else [f"{1e3 * t:.2f}", f"{t / times['AdamW fused']:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each optimizer (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--only", default="", help="time only steps whose name matches this regular expression")
    parser.add_argument("--case", default="", help="only the cases whose name contains this, for instance '(a)'")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread, for machines that are in use")
    parser.add_argument("--json", type=Path, help="also write the seconds to this file")
    options = parser.parse_args()
    if options.cpu_time:
        take_cpu_time()
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, {platform.machine()}\n"
    )
    results = {
        case: measure(case, options.rounds, options.device, options.only) for case in CASES if options.case in case
    }
    if options.device == "cpu" and options.case in "(d) after a backward pass":
        results["(d) after a backward pass"] = after_backward(20 * options.rounds)
    print(table(results))
    print("\nOptimizer state, floats per parameter:")
    for name, (method, kept) in {"AdamW": (torch.optim.AdamW, {}), "weight decay": (ProxSPS, {}), **AVERAGED}.items():
        print(f"  {name}: {state_floats(method, **kept):.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
