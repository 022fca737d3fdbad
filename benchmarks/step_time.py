"""Time of one optimizer step, as ratios to torch's own optimizers in the same run.

    python benchmarks/step_time.py [--rounds 40] [--json FILE]

Three sets of parameters: the 329 tensors of a CIFAR ResNet110 with batch norm (1.7 M entries), 25 M entries in 50
tensors, and one tensor of 20 M. All optimizers step in turn, round after round, so that a busy moment of the machine
hits all of them; a time is the median over rounds. The row "read, then write" is the least that an exact step costs: it
has to read parameters and gradients once (here by torch.dot) before it can read and write them (here by fused SGD).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from proxsps import ProxSPS
from proxsps.optim.parts import load_kernels

DECAY = 5e-4


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
    "(b) 25 M in 50": [(500_000,)] * 50,
    "(c) 20 M in one": [(20_000_000,)],
}


def contestants(params: list[Tensor]) -> dict[str, Callable[[], object]]:
    """A step of each optimizer on the same parameters and gradients."""
    grads = [p.grad for p in params]
    loss = torch.tensor(1.0)

    def polyak(fused: bool) -> Callable[[], object]:
        opt = ProxSPS(params, lr=1.0, weight_decay=DECAY, fused=fused)
        return lambda: opt.step(loss=loss)

    # A rate of 1e-9: parameters must stay of the size they have while thousands of steps are timed.
    sgd = torch.optim.SGD(params, lr=1e-9, weight_decay=DECAY, fused=True)

    def two_passes() -> None:
        for p, g in zip(params, grads, strict=True):
            torch.dot(p.detach().view(-1), g.view(-1))
        sgd.step()

    steps = {
        "SGD fused": sgd.step,
        "SGD default": torch.optim.SGD(params, lr=1e-9, weight_decay=DECAY).step,
        "AdamW fused": torch.optim.AdamW(params, lr=1e-9, weight_decay=DECAY, fused=True).step,
        "AdamW default": torch.optim.AdamW(params, lr=1e-9, weight_decay=DECAY).step,
        "read, then write": two_passes,
        "ProxSPS, torch only": polyak(fused=False),
    }
    if load_kernels() is not None:
        steps["ProxSPS, kernels"] = polyak(fused=True)
    return steps


def measure(shapes: list[tuple[int, ...]], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each contestant."""
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return interleaved(contestants(params), rounds)


def interleaved(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each step, all of which are taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            step()  # brings the state of this step, not of the one before, into the caches
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(series[2:]) for name, series in times.items()}


def state_bytes(method: type[torch.optim.Optimizer]) -> int:
    """Bytes of the tensors an optimizer keeps after one step."""
    x = torch.ones(1000, requires_grad=True)
    opt = method([x], lr=1e-3)
    opt.step(lambda: _backward(x))
    return sum(t.nbytes for entry in opt.state.values() for t in entry.values() if isinstance(t, Tensor))


def _backward(x: Tensor) -> Tensor:
    loss = (x * x).sum()
    loss.backward()
    return loss


def table(results: dict[str, dict[str, float]]) -> str:
    """Milliseconds, and ratios to fused AdamW and fused SGD, as Markdown."""
    lines = ["| step | " + " | ".join(f"{case}: ms | / AdamW fused | / SGD fused" for case in results) + " |"]
    lines.append("| --- |" + " ---: |" * (3 * len(results)))
    for name in next(iter(results.values())):
        cells = []
        for times in results.values():
            t = times[name]
            cells += [f"{1e3 * t:.2f}", f"{t / times['AdamW fused']:.2f}", f"{t / times['SGD fused']:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each optimizer (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the seconds to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, {platform.machine()}\n"
    )
    results = {case: measure(shapes, options.rounds) for case, shapes in CASES.items()}
    print(table(results))
    print(f"\nOptimizer state after a step, of 1000 f32 parameters: {state_bytes(ProxSPS)} bytes for ProxSPS,")
    print(f"{state_bytes(torch.optim.AdamW)} bytes for AdamW.")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
