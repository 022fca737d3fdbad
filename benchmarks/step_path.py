"""What a reader of one step walks through: modules of this package that it enters, and calls of Python functions.

    python benchmarks/step_path.py [--list]

One step of a network with 10 thousand parameters whose plan is kept, after a backward pass.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import proxsps
from proxsps import L1, GroupLasso, ProxSPS, ProxSPSAdam

PACKAGE = str(Path(proxsps.__file__).parent)
METHODS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "weight decay": lambda params: ProxSPS(params, lr=1.0, weight_decay=5e-4),
    "L1": lambda params: ProxSPS(params, lr=0.1, regularizer=L1(1e-3)),
    "GroupLasso": lambda params: ProxSPS([p for p in params if p.dim() > 1], lr=0.1, regularizer=GroupLasso.rows(1e-2)),
    "ProxSPSAdam, no lr": lambda params: ProxSPSAdam(params, weight_decay=5e-4),
}


def path(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Counter[str], str]:
    """Calls of functions of this package by module in one step, and the branch that the step took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    opt, calls = make(list(model.parameters())), Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_filename.removeprefix(PACKAGE)] += 1

    for last in (False, False, True):
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        sys.setprofile(count if last else None)
        opt.step(loss=loss)
        sys.setprofile(None)
    return calls, opt.last_step.branch_name  # type: ignore[attr-defined]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also list the modules with the calls of each")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| step | branch | modules | calls |\n| --- | --- | ---: | ---: |")
    for name, make in METHODS.items():
        calls, branch = path(make)
        print(f"| {name} | {branch} | {len(calls)} | {calls.total()} |")
        for module, number in calls.most_common() if options.list else ():
            print(f"|   {module} | | | {number} |")


if __name__ == "__main__":
    main()
