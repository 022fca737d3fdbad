"""Time that torch.compile takes for one optimizer step, next to torch's own AdamW.

    python benchmarks/compile_time.py [--device cpu] [--only REGEX]

The parameters are the 329 tensors of a CIFAR ResNet110 with batch norm. Each step is compiled with the default backend
in a process of its own, with an empty cache. "seconds" is the time of the first call, "CPU seconds" is what this
process and the compilers that it started used meanwhile, which another program on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from launches import draw
from step_time import DECAY

from proxsps import L1, GroupLasso, ProxSPS


def adamw(device: str) -> Callable[[torch.Tensor], object]:
    """A step of AdamW, which has no use for the loss."""
    opt = torch.optim.AdamW(draw(device), capturable=device != "cpu")
    return lambda loss: opt.step()


def polyak(device: str, **options: Any) -> Callable[[torch.Tensor], object]:
    """A step of ProxSPS with one regulariser for all tensors."""
    opt = ProxSPS(draw(device), lr=0.1, capturable=True, **options)
    return lambda loss: opt.step(loss=loss)


def filters(device: str) -> Callable[[torch.Tensor], object]:
    """A step with GroupLasso on filters and weight decay on the other tensors."""
    params = draw(device)
    groups = [
        {"params": [p for p in params if p.dim() == 4], "regularizer": GroupLasso.filters(0.01)},
        {"params": [p for p in params if p.dim() != 4], "weight_decay": DECAY},
    ]
    opt = ProxSPS(groups, lr=0.1, capturable=True)
    return lambda loss: opt.step(loss=loss)


STEPS: dict[str, Callable[[str], Callable[[torch.Tensor], object]]] = {
    "ProxSPS, weight decay": lambda device: polyak(device, weight_decay=DECAY),
    "ProxSPS, L1, searched": lambda device: polyak(device, regularizer=L1(1e-3)),
    "ProxSPS, GroupLasso.filters and weight decay, searched": filters,
    "AdamW": adamw,
}


def compiled(name: str, device: str) -> None:
    """Compile a step, and print its line of the table."""
    step = STEPS[name](device)
    loss = torch.tensor(1e4, device=device)
    start, before = time.perf_counter(), sum(os.times()[:4])
    torch.compile(step, fullgraph=name != "AdamW")(loss)  # torch breaks the graph of its own
    seconds, used = time.perf_counter() - start, sum(os.times()[:4]) - before
    print(f"| {name} | {seconds:.0f} | {used:.0f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the parameters live (default: %(default)s)")
    parser.add_argument("--only", default="", help="compile only steps whose name matches this regular expression")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # in a process that compiles one step
    options = parser.parse_args()
    if options.step:
        compiled(options.step, options.device)
        return
    print(f"torch {torch.__version__}, {options.device}, {os.cpu_count()} CPUs\n")
    print("| step | seconds | CPU seconds |\n| --- | ---: | ---: |", flush=True)
    for name in STEPS:
        if re.search(options.only, name):
            with tempfile.TemporaryDirectory() as cache:
                command = [sys.executable, __file__, "--device", options.device, "--step", name]
                subprocess.run(command, check=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache})


if __name__ == "__main__":
    main()
