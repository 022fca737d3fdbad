"""How many kernels one step of the device path launches, next to torch's own optimizers.

    python benchmarks/launches.py [--device cuda] [--detail NAME]

The parameters are the 329 tensors of a CIFAR ResNet110 with batch norm. On the CPU a step with `capturable=True` takes
the same way as on an accelerator; there every operation that calculates or copies counts as one launch, and operations
on lists of tensors (foreach, fused) count once. With `--device cuda` the profiler counts the kernels and copies that
really ran, in which one operation on a long list may be several.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from step_time import DECAY, resnet110_shapes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from proxsps import L1, SPS, Box, DecSPS, ElasticNet, GroupLasso, ProxSPS

FREE = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "profiler.")


class CountLaunches(TorchDispatchMode):
    """Counts the operations that calculate or copy; views and fresh memory are free."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        views = any(found.alias_info and not found.alias_info.is_write for found in func._schema.returns)
        if not views and not str(func).startswith(FREE):
            self.launches[str(func)] += 1
        return func(*args, **(kwargs or {}))


def draw(device: str, shapes: list[tuple[int, ...]] | None = None) -> list[Tensor]:
    """Parameters with gradients."""
    torch.manual_seed(0)
    params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes or resnet110_shapes()]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def contestants(device: str) -> dict[str, Callable[[], object]]:
    """A step of each optimizer, each on parameters of its own."""
    loss = torch.tensor(1.0, device=device)

    def polyak(method: Any, **options: Any) -> Callable[[], object]:
        opt = method(draw(device), lr=1.0, capturable=True, **options)
        return lambda: opt.step(loss=loss)

    def filters() -> Callable[[], object]:
        params = draw(device)
        groups = [
            {"params": [p for p in params if p.dim() == 4], "regularizer": GroupLasso.filters(0.01)},
            {"params": [p for p in params if p.dim() != 4], "weight_decay": DECAY},
        ]
        opt = ProxSPS(groups, lr=1.0, capturable=True)
        return lambda: opt.step(loss=loss)

    adamw = torch.optim.AdamW
    return {
        "AdamW fused": adamw(draw(device), fused=True).step,
        "AdamW foreach": adamw(draw(device), foreach=True, capturable=device != "cpu").step,
        "AdamW for loop": adamw(draw(device), foreach=False, capturable=device != "cpu").step,
        "ProxSPS, weight decay": polyak(ProxSPS, weight_decay=DECAY),
        "SPS, weight decay": polyak(SPS, weight_decay=DECAY),
        "DecSPS, weight decay": polyak(DecSPS, weight_decay=DECAY),
        "ProxSPS, L1": polyak(ProxSPS, regularizer=L1(1e-3)),
        "ProxSPS, ElasticNet": polyak(ProxSPS, regularizer=ElasticNet(1e-3, DECAY)),
        "ProxSPS, Box": polyak(ProxSPS, regularizer=Box(-2.0, 2.0)),
        "ProxSPS, GroupLasso.filters and weight decay": filters(),
    }


def counted(step: Callable[[], object]) -> Counter[str]:
    """The operations of one step on the CPU."""
    step()  # state is made in the first step
    with CountLaunches() as count:
        step()
    return count.launches


def profiled(step: Callable[[], object]) -> Counter[str]:
    """The kernels and copies of one step on an accelerator."""
    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.accelerator.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return Counter(event.name for event in profile.events() if event.device_type == device)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the parameters live (default: %(default)s)")
    parser.add_argument("--detail", help="also list the operations of the steps whose name contains this")
    options = parser.parse_args()
    count = counted if options.device == "cpu" else profiled
    print(f"torch {torch.__version__}, {options.device}, {len(resnet110_shapes())} tensors\n")
    print("| step | launches |\n| --- | ---: |")
    details = {}
    for name, step in contestants(options.device).items():
        details[name] = count(step)
        print(f"| {name} | {details[name].total()} |")
    for name, launches in details.items():
        if options.detail and options.detail in name:
            print(f"\n{name}:")
            for operation, times in launches.most_common():
                print(f"{times:6d} {operation}")


if __name__ == "__main__":
    main()
