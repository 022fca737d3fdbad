"""Time of the single passes of the compiled kernels, next to fused AdamW.

    python benchmarks/kernel_passes.py [--rounds 30]

First nanoseconds per entry on one thread with the entries in the cache, which other programs hardly disturb; then
milliseconds on all threads for the sets of parameters of step_time.py, and ratios to torch's fused AdamW in that run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from step_time import CASES, interleaved
from torch import Tensor

from proxsps import L1, Box, ElasticNet, GroupLasso, ProxSPS, ProxSPSAdam
from proxsps.optim.kernels import layout
from proxsps.optim.kernels.entrywise import EntryPart
from proxsps.optim.kernels.parts import NOWHERE, Memory
from proxsps.optim.kernels.sampling import NO_START
from proxsps.optim.plan import Plan
from proxsps.regularizers.structure import Scalar

FUNCTIONS = {
    "affine": None,
    "L1": Scalar(l1=1e-3),
    "ElasticNet": Scalar(l1=1e-3, l2=1e-2),
    "Box": Scalar(lower=-1.0, upper=1.0),
    "all constants": Scalar(1e-3, 1e-2, -1.0, 1.0),
}
SLOPES = {"gradients": 2, "averages": 3, "Adam's metric": 4}  # and the number of tensors that they read
TINY = 1e-9  # steps: entries keep their size while thousands are timed
ONE, THREE, FOUR = [0.5], [0.1, 0.5, 1.0], [0.1, 0.4, 0.7, 1.0]
METHODS = {
    "weight decay": (ProxSPS, {"weight_decay": 1e-3}),
    "L1": (ProxSPS, {"regularizer": L1(1e-3)}),
    "ElasticNet": (ProxSPS, {"regularizer": ElasticNet(1e-3, 1e-2)}),
    "Box": (ProxSPS, {"regularizer": Box(-10.0, 10.0)}),
    "GroupLasso": (ProxSPS, {"regularizer": GroupLasso.rows(1e-3)}),
    "momentum": (ProxSPS, {"momentum": 0.9}),
    "L1 with momentum": (ProxSPS, {"momentum": 0.9, "regularizer": L1(1e-3)}),
    "Adam's metric": (ProxSPSAdam, {}),
    "L1 in Adam's metric": (ProxSPSAdam, {"cap": "proximal", "regularizer": L1(1e-3)}),
}


def best(call: Callable[[], object], rounds: int = 15) -> float:
    """Least seconds of several calls."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def in_cache(dtype: torch.dtype, repeats: int = 200, size: int = layout.CHUNK) -> None:
    """Print nanoseconds per entry of each pass over the same chunk of memory."""
    print(f"{dtype}: ns per entry, one thread: sums, h at 1, 3, 4 points, write")
    for slope, count in SLOPES.items():
        tensors = [torch.rand(size, dtype=dtype) for _ in range(count)]
        at = [np.full(repeats, t.data_ptr()) for t in tensors]
        d_at, v_at = [*at[2:], None, None][:2]
        numbers = (np.zeros(1), np.tile([0.9, 0.1, 0.999, 0.001, 0.0, 0.0], (repeats, 1)), 1e-8, 1e-30)
        memory = Memory(layout.LIKE[dtype], at[0], at[1], d_at, v_at, None, NOWHERE, *NO_START, *numbers)
        for name, psi in FUNCTIONS.items():
            part = EntryPart(memory, layout.layout(((size,) * repeats,), 1), [psi])
            calls = [lambda p=part: p.sums([TINY], ())]
            if psi is not None:
                calls += [lambda u=u, p=part: p.heights([TINY], u) for u in (ONE, THREE, FOUR)]
            calls += [lambda p=part: p.write([1.0], [-TINY], [TINY], 0.5, True)]
            print(f"  {slope}, {name}: " + " | ".join(f"{best(call) * 1e9 / size / repeats:.3f}" for call in calls))


def planned(params: list[Tensor], name: str) -> Plan:
    """The plan of a method for these parameters; GroupLasso takes those with rows."""
    method, options = METHODS[name]
    chosen = [p for p in params if p.dim() > 1 or name != "GroupLasso"]
    opt = method(chosen, lr=TINY, fused=True, **options)
    opt.step(loss=1.0)
    return opt._plan


def contestants(params: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The passes on the same parameters and gradients, and AdamW."""
    found: dict[str, Callable[[], object]] = {
        "AdamW fused": torch.optim.AdamW(params, lr=TINY, fused=True).step,
    }
    for name in METHODS:
        if name == "GroupLasso" and not any(p.dim() > 1 for p in params):
            continue
        plan = planned(params, name)
        found[f"{name}: sums"] = lambda p=plan: p.sums([TINY], ())
        if plan.entries:
            found[f"{name}: sample at 4"] = lambda p=plan: p.heights([TINY], FOUR, 16)
            found[f"{name}: h at 1"] = lambda p=plan: p.heights([TINY], ONE)
            found[f"{name}: h at 3"] = lambda p=plan: p.heights([TINY], THREE)
        found[f"{name}: write"] = lambda p=plan: p.write([1.0], [-TINY], [TINY], 0.5, True)
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each pass (default: %(default)s)")
    options = parser.parse_args()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        in_cache(dtype)
    torch.set_num_threads(threads)
    for case, shapes in CASES.items():
        params = [torch.randn(shape).requires_grad_() for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        times = interleaved(contestants(params), options.rounds)
        print(f"\n{case}, f32, {threads} threads: ms, and ratio to AdamW")
        for name, seconds in times.items():
            print(f"  {name}: {1e3 * seconds:.2f}  {seconds / times['AdamW fused']:.2f}")


if __name__ == "__main__":
    main()
