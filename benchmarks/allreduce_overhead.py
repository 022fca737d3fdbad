"""What the optimizer's all-reduce costs: the time of a step with it and without it, on processes of this machine.

    python benchmarks/allreduce_overhead.py [--rounds 200] [--world 2] [--device cpu]

The parameters are the 329 tensors of a CIFAR ResNet110 with batch norm (1.7 M entries). Steps with the all-reduce
(process_group=None) and without it (process_group=False) alternate, after a barrier each; a time is the median over
rounds on rank 0. One row is what data parallel training sends anyway: one all-reduce of all gradients. The last rows
are steps with spectral directions, whose matrices are shared out, or all orthogonalised by each process. With
`--device cuda` each process has a device of its own, and nccl takes the place of gloo.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step_time import DECAY, resnet110_shapes, synchronize

from proxsps import ProxSPS, ScheduleFreeSPS
from proxsps.optim.plan import load_kernels

MATRICES = (64, 128, 256, 512)  # rows; those of 64 are never shared out


def contestants(device: str) -> dict[str, tuple[Callable[[], object], ...]]:
    """Pairs of steps: with the all-reduce, and without."""
    loss = torch.tensor(1.0, device=device)

    def drawn(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        return params

    def pair(cls: Any, params: list[torch.Tensor], **options: object) -> tuple[Callable[[], object], ...]:
        opts = [cls(params, process_group=group, **options) for group in (None, False)]
        return tuple(lambda opt=opt: opt.step(loss=loss) for opt in opts)

    params = drawn(resnet110_shapes())
    pairs = {"ProxSPS, torch only": pair(ProxSPS, params, weight_decay=DECAY, fused=False)}
    if device == "cpu" and load_kernels() is not None:
        pairs["ProxSPS, kernels"] = pair(ProxSPS, params, weight_decay=DECAY, fused=True)
    gradient = torch.randn(sum(p.numel() for p in params), device=device)
    pairs["all gradients"] = (lambda: dist.all_reduce(gradient), lambda: None)
    for n in MATRICES:
        pairs[f"ScheduleFreeSPS, 8 matrices of {n} x {n}"] = pair(
            ScheduleFreeSPS, drawn([(n, n)] * 8), metric="spectral"
        )
    return pairs


def join(rank: int, world: int, meeting: str, device: str) -> str:
    """Become one of the processes; the device of this one."""
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":
        device = f"{device}:{rank}"
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world)
    return device


def measure(rank: int, world: int, meeting: str, rounds: int, device: str) -> None:
    """Time all pairs; rank 0 prints."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    device = join(rank, world, meeting, device)
    torch.manual_seed(0)
    times: dict[str, tuple[list[float], list[float]]] = {}
    for name, steps in contestants(device).items():
        times[name] = ([], [])
        for _ in range(rounds + 5):
            for step, series in zip(steps, times[name], strict=True):
                dist.barrier()
                start = time.perf_counter()
                step()
                synchronize()
                series.append(time.perf_counter() - start)
    if rank == 0:
        print(table(times))
    dist.destroy_process_group()


def table(times: dict[str, tuple[list[float], list[float]]]) -> str:
    """Milliseconds with, without, and their difference, as Markdown."""
    lines = ["| step | with all-reduce: ms | without: ms | difference: ms |", "| --- | ---: | ---: | ---: |"]
    for name, pair in times.items():
        joint, alone = (1e3 * statistics.median(series[5:]) for series in pair)
        lines.append(f"| {name} | {joint:.3f} | {alone:.3f} | {joint - alone:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--world", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    options = parser.parse_args()
    machine = f"{options.device}, {os.cpu_count()} CPUs, {platform.machine()}"
    print(f"torch {torch.__version__}, {options.world} processes, {machine}\n")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.world, str(Path(folder) / "meeting"), options.rounds, options.device), options.world)


if __name__ == "__main__":
    main()
