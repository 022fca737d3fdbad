"""How many kernels one step of the device path launches, next to torch's own optimizers, and the memory it takes.

    python benchmarks/launches.py [--device cuda] [--detail NAME]

The parameters are the 329 tensors of a CIFAR ResNet110 with batch norm. On the CPU a step with `capturable=True` takes
the same way as on an accelerator; there every operation that calculates or copies counts as one launch, and operations
on lists of tensors (foreach, fused) count once. With `--device cuda` the profiler counts the kernels and copies that
really ran, in which one operation on a long list may be several.

The second table has the most memory that a step with L1 holds beside parameters and gradients, on these tensors and on
one matrix of 20 M entries: on the device path, and on the CPU with the compiled kernels.
"""

from __future__ import annotations

import argparse
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from step_time import CASES, DECAY, resnet110_shapes
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from proxsps import L1, SPS, Box, DecSPS, ElasticNet, GroupLasso, ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.optim.plan import load_kernels

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


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at one time, those that are `known` apart."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.known = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it made."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def extra_memory(opt: ProxSPS, params: list[Tensor], loss: Tensor) -> int:
    """The most bytes that a searched step holds beside parameters and gradients, NumPy's among them."""
    opt.step(loss=loss)  # what is made once and kept, such as compiled code, does not count
    tracemalloc.start()
    with PeakMemory([*params, *(p.grad for p in params)]) as memory:
        opt.step(loss=loss)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if opt.last_step.branch_name != "inside":
        raise RuntimeError(f"The step was to be inside, but is {opt.last_step.branch_name}.")
    return memory.peak + peak


def print_memory(device: str) -> None:
    """Print the table of memory."""
    paths = {"device path": {"capturable": True}}
    if device == "cpu" and load_kernels() is not None:
        paths["kernels"] = {"fused": True}
    print("\n| step with L1 | parameters: MB | extra: MB | copies of the parameters |\n| --- | ---: | ---: | ---: |")
    for case, shapes in CASES.items():
        for path, options in paths.items() if not case.startswith("(b)") else ():
            params = draw(device, shapes)
            own, loss = sum(p.nbytes for p in params), torch.tensor(0.02 * sum(p.numel() for p in params))
            extra = extra_memory(ProxSPS(params, lr=0.1, regularizer=L1(1e-3), **options), params, loss.to(device))
            print(f"| {case}, {path} | {own / 1e6:.1f} | {extra / 1e6:.1f} | {extra / own:.2f} |", flush=True)


def draw(device: str, shapes: list[tuple[int, ...]] | None = None) -> list[Tensor]:
    """Parameters with gradients."""
    torch.manual_seed(0)
    params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes or resnet110_shapes()]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def contestants(device: str) -> dict[str, Callable[[], object]]:
    """A step of each optimizer, each on parameters of its own that ours make when they first step."""
    loss = torch.tensor(1.0, device=device)

    def polyak(method: Any, lr: float | None = 1.0, **options: Any) -> Callable[[], object]:
        made: list[Any] = []

        def step() -> None:
            if not made:
                made.append(method(draw(device), lr=lr, capturable=True, **options))
            made[0].step(loss=loss)

        return step

    def filters() -> Callable[[], object]:
        params = draw(device)
        groups = [
            {"params": [p for p in params if p.dim() == 4], "regularizer": GroupLasso.filters(0.01)},
            {"params": [p for p in params if p.dim() != 4], "weight_decay": DECAY},
        ]
        opt = ProxSPS(groups, lr=1.0, capturable=True)
        return lambda: opt.step(loss=loss)

    def spectral(decay: float) -> Callable[[], object]:
        params = draw(device)
        groups = [
            {"params": [p for p in params if p.dim() > 1], "metric": "spectral"},
            {"params": [p for p in params if p.dim() == 1]},
        ]
        opt = ScheduleFreeSPS(groups, weight_decay=decay, capturable=True)
        return lambda: opt.step(loss=loss)

    adamw = torch.optim.AdamW
    return {
        "AdamW fused": adamw(draw(device), fused=True).step,
        "AdamW foreach": adamw(draw(device), foreach=True, capturable=device != "cpu").step,
        "AdamW for loop": adamw(draw(device), foreach=False, capturable=device != "cpu").step,
        "ProxSPS, weight decay": polyak(ProxSPS, weight_decay=DECAY),
        "SPS, weight decay": polyak(SPS, weight_decay=DECAY),
        "DecSPS, weight decay": polyak(DecSPS, weight_decay=DECAY),
        "ProxSPS, momentum": polyak(ProxSPS, momentum=0.9, weight_decay=DECAY),
        "ProxSPS, matched cap": polyak(ProxSPS, cap="matched", weight_decay=DECAY),
        "ProxSPS, momentum, no lr": polyak(ProxSPS, lr=None, momentum=0.9, weight_decay=DECAY),
        "ProxSPSAdam": polyak(ProxSPSAdam, lr=None, weight_decay=DECAY),
        "ScheduleFreeSPS": polyak(ScheduleFreeSPS, lr=None),
        "ScheduleFreeSPS, weight decay": polyak(ScheduleFreeSPS, lr=None, weight_decay=DECAY),
        "ScheduleFreeSPS, spectral": spectral(0.0),
        "ScheduleFreeSPS, spectral, weight decay": spectral(DECAY),
        "ProxSPS, L1": polyak(ProxSPS, regularizer=L1(1e-3)),
        "ProxSPS, ElasticNet": polyak(ProxSPS, regularizer=ElasticNet(1e-3, DECAY)),
        "ProxSPS, Box": polyak(ProxSPS, regularizer=Box(-2.0, 2.0)),
        "ProxSPS, GroupLasso.filters and weight decay": filters(),
        "ProxSPS, momentum, L1": polyak(ProxSPS, momentum=0.9, regularizer=L1(1e-3)),
        "ProxSPSAdam, L1": polyak(ProxSPSAdam, lr=None, regularizer=L1(1e-3)),
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
    if options.device == "cpu":
        torch.set_num_threads(1)  # counts are the same, and many short operations do not wait for a second thread
    count = counted if options.device == "cpu" else profiled
    print(f"torch {torch.__version__}, {options.device}, {len(resnet110_shapes())} tensors\n")
    print("| step | launches |\n| --- | ---: |")
    details = {}
    for name, step in contestants(options.device).items():
        details[name] = count(step)
        print(f"| {name} | {details[name].total()} |")
    print_memory(options.device)
    for name, launches in details.items():
        if options.detail and options.detail in name:
            print(f"\n{name}:")
            for operation, times in launches.most_common():
                print(f"{times:6d} {operation}")


if __name__ == "__main__":
    main()
