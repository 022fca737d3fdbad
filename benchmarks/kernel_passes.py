"""Time of the single passes of the compiled kernels, and of the steps they make up, next to fused AdamW.

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

from proxsps.optim import kernels
from proxsps.optim.kernels import Psi, entries, rows

ENTRIES = {
    "L1": {"l1": 1e-3},
    "ElasticNet": {"l1": 1e-3, "l2": 1e-2},
    "Box": {"lower": -1.0, "upper": 1.0},
    "all constants": {"l1": 1e-3, "l2": 1e-2, "lower": -1.0, "upper": 1.0},
}
ONE, ALPHA = np.array([0.5]), np.array([1e-9])  # tiny steps: entries keep their size while thousands are timed
THREE, FOUR = np.linspace(0.1, 1, 3), np.linspace(0.1, 1, 4)


def in_cache(dtype: torch.dtype, repeats: int = 200, size: int = 16_384) -> None:
    """Print nanoseconds per entry of each pass over the same chunk of memory."""
    x, d = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
    scale = 1e9 / size / repeats
    at = kernels.memory([[x] * repeats], [[d] * repeats])
    plain = best(lambda: kernels.sums(at, np.zeros(1), False)) * scale
    print(f"{dtype}: ns per entry, one thread; lines: sums {plain:.3f}")
    for name, constants in ENTRIES.items():
        psi = Psi.of(1, **constants)
        times = [best(lambda u=u, psi=psi: entries.reduce(at, psi, ALPHA, u)) for u in (ONE, THREE, FOUR)]
        times += [best(lambda f=f, psi=psi: f(at, psi, ALPHA, 0.5)) for f in (entries.move_sq, entries.write)]
        numbers = " | ".join(f"{t * scale:.3f}" for t in times)
        print(f"  {name}: h at 1, 3, 4 points, move, write: {numbers}")
    for shape, dims in (((16, 1024), (1,)), ((113, 144), (1,)), ((1820, 9), (1,)), ((128, 128), (0,)), ((size,), None)):
        y, e = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        row_at = rows.memory([[y] * repeats], [[e] * repeats], [dims])
        psi, alpha = Psi.of(row_at.groups, l1=1e-3), np.full(row_at.groups, 1e-9)
        known = rows.sums(row_at)
        times = [
            best(lambda row_at=row_at: rows.sums(row_at)),
            best(lambda row_at=row_at, psi=psi, alpha=alpha: rows.write(row_at, psi, alpha, 0.5)),
            best(lambda row_at=row_at, psi=psi, alpha=alpha, k=known: rows.write(row_at, psi, alpha, 0.5, known=k)),
        ]
        numbers = " | ".join(f"{t * 1e9 / y.numel() / repeats:.3f}" for t in times)
        print(f"  rows {shape}, normed over {dims}: sums, write, write with known sums: {numbers}")


def best(call: Callable[[], object], rounds: int = 15) -> float:
    """Least seconds of several calls."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def as_rows(t: Tensor) -> Tensor:
    """Filters as rows; long vectors as rows of a thousand entries, short ones as one row."""
    if t.dim() > 1:
        return t.flatten(1)
    return t.view(-1, 1_000) if t.numel() % 1_000 == 0 else t.view(1, -1)


def contestants(params: list[Tensor]) -> dict[str, Callable[[], object]]:
    """The passes on the same parameters and gradients, and AdamW."""
    xs, ds = [p.detach() for p in params], [p.grad for p in params]
    flat = [[as_rows(t) for t in ts] for ts in (xs, ds)]
    soft, box = Psi.of(1, l1=1e-3), Psi.of(1, lower=-10.0, upper=10.0)
    at = kernels.memory([xs], [ds])
    row_at = rows.memory([flat[0]], [flat[1]], [(1,)])
    group, alpha = Psi.of(row_at.groups, l1=1e-3), np.full(row_at.groups, 1e-9)

    def searched(psi: Psi) -> Callable[[], None]:
        def step() -> None:
            at = kernels.memory([xs], [ds])
            for u in (FOUR, FOUR):
                entries.reduce(at, psi, ALPHA, u, every=16)
            entries.reduce(at, psi, ALPHA, THREE)
            entries.reduce(at, psi, ALPHA, ONE)
            entries.write(at, psi, ALPHA, 0.5)

        return step

    def by_rows() -> None:
        at = rows.memory([flat[0]], [flat[1]], [(1,)])
        rows.sums(at)
        rows.write(at, group, alpha, 0.5)

    return {
        "AdamW fused": torch.optim.AdamW(params, lr=1e-9, fused=True).step,
        "memory": lambda: kernels.memory([xs], [ds]),
        "lines: sums": lambda: kernels.sums(at, np.zeros(1), False),
        "lines: write": lambda: kernels.write(at, np.ones(1), np.full(1, -1e-9)),
        "L1: sample at 4": lambda: entries.reduce(at, soft, ALPHA, FOUR, every=16),
        "L1: h at 1": lambda: entries.reduce(at, soft, ALPHA, ONE),
        "L1: h at 3": lambda: entries.reduce(at, soft, ALPHA, THREE),
        "Box: h at 3": lambda: entries.reduce(at, box, ALPHA, THREE),
        "entries: write": lambda: entries.write(at, soft, ALPHA, 0.5),
        "L1: searched step": searched(soft),
        "Box: searched step": searched(box),
        "rows: sums": lambda: rows.sums(row_at),
        "rows: write": lambda: rows.write(row_at, group, alpha, 0.5),
        "rows: step": by_rows,
    }


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
