"""Time of one step with spectral directions, beside torch.optim.Muon with fused AdamW for the other tensors.

    python benchmarks/spectral_time.py [--rounds 7] [--cpu-time] [--only REGEX]

Two sets of parameters: the 329 tensors of a CIFAR ResNet110, whose filters are flattened to matrices because Muon takes
nothing else, and those of a GPT of 10 M parameters (6 layers, width 384, vocabulary 256). Hidden matrices take spectral
directions, all others Adam's metric. Optimizers step in turn, round after round; a time is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable

import torch
from step_time import interleaved, resnet110_shapes, state_floats, take_cpu_time
from torch import Tensor

from proxsps import ScheduleFreeSPS

WIDTH, LAYERS, VOCABULARY, CONTEXT = 384, 6, 256, 128
Shapes = list[tuple[int, ...]]


def resnet() -> tuple[Shapes, Shapes]:
    """Hidden matrices and other tensors of a ResNet110."""
    shapes = resnet110_shapes()
    hidden = [shape for shape in shapes[:-2] if len(shape) > 1]
    flat: Shapes = [(rows, width * height * depth) for rows, width, height, depth in hidden]
    return flat, [shape for shape in shapes if len(shape) == 1] + shapes[-2:-1]


def gpt() -> tuple[Shapes, Shapes]:
    """Hidden matrices and other tensors of a small GPT."""
    layer: Shapes = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    rest: Shapes = [(WIDTH,)] * (8 * LAYERS) + [(VOCABULARY, WIDTH), (CONTEXT, WIDTH), (VOCABULARY, WIDTH)]
    return layer * LAYERS, rest


def contestants(hidden: Shapes, rest: Shapes) -> dict[str, Callable[[], object]]:
    """A step of each optimizer, each on its own parameters."""

    def made() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        found = [[torch.randn(shape).mul_(0.02).requires_grad_() for shape in shapes] for shapes in (hidden, rest)]
        for p in found[0] + found[1]:
            p.grad = torch.randn_like(p)
        return found[0], found[1]

    def muon() -> Callable[[], object]:
        matrices, others = made()
        parts = torch.optim.Muon(matrices, lr=1e-9), torch.optim.AdamW(others, lr=1e-9, fused=True)
        return lambda: [part.step() for part in parts]

    def ours(spectral: bool) -> Callable[[], object]:
        matrices, others = made()
        metric = "spectral" if spectral else "adam"
        groups = [{"params": matrices, "metric": metric, "set": "matrices"}, {"params": others, "set": "rest"}]
        opt, loss = ScheduleFreeSPS(groups), torch.tensor(1e9)
        return lambda: opt.step(loss=loss)

    matrices, others = made()
    adamw = torch.optim.AdamW(matrices + others, lr=1e-9, fused=True)
    return {
        "Muon and fused AdamW": muon(),
        "schedule-free, spectral": ours(True),
        "schedule-free, Adam's metric": ours(False),
        "AdamW fused": adamw.step,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each optimizer (default: %(default)s)")
    parser.add_argument("--only", default="", help="time only the sets of parameters whose name matches")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread, for machines that are in use")
    options = parser.parse_args()
    if options.cpu_time:
        take_cpu_time()
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, {platform.machine()}\n"
    )
    print("| parameters | step | ms | / Muon and fused AdamW |\n| --- | --- | ---: | ---: |")
    for name, shapes in {"ResNet110": resnet(), "GPT, 10 M": gpt()}.items():
        if re.search(options.only, name):
            times = interleaved(contestants(*shapes), options.rounds)
            for step, seconds in times.items():
                print(f"| {name} | {step} | {1e3 * seconds:.1f} | {seconds / times['Muon and fused AdamW']:.2f} |")
    print(f"\nOptimizer state, floats per parameter: {state_floats(ScheduleFreeSPS):.3f}")


if __name__ == "__main__":
    main()
