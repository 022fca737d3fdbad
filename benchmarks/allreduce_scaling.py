"""What the all-reduces of a step would cost on many ranks: a fit to measurements on few, carried on.

    python benchmarks/allreduce_scaling.py [--rounds 300] [--device cpu]

2, 4 and 8 gloo processes of this machine time all-reduces of a few numbers, after a barrier each. The least squares fit
of time = a + b log2(ranks) + c bytes is then evaluated for 8, 64 and 1,024 ranks and the messages that steps send: one
for a closed form; for a search over shards one for the sums, one for the rounding of h and one per round, of which
three are usual. Processes here share two cores and a loopback device: on a cluster the constants are those of its
network, so pass your own measurements (--times FILE, lines of "ranks bytes microseconds"). With `--device cuda` each
process has a device of its own, and only as many processes are tried as there are devices.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from allreduce_overhead import join
from step_time import synchronize

WORLDS = (2, 4, 8)
SIZES = (8, 64, 512, 4096)  # doubles
STEPS = {  # bytes of each message
    "closed form (weight decay)": [512],
    "L1 on replicas (DDP)": [512],
    "L1 or GroupLasso on shards (FSDP2), searched": [512, 8, 48, 48, 48],
    "L1 or GroupLasso on shards (FSDP2), capped": [512, 8, 48],
}


def measure(rank: int, world: int, meeting: str, rounds: int, device: str, out: str) -> None:
    """Median microseconds of each size, written by rank 0."""
    torch.set_num_threads(1)
    device = join(rank, world, meeting, device)
    lines = []
    for size in SIZES:
        pack, series = torch.zeros(size, dtype=torch.float64, device=device), []
        for _ in range(rounds + 20):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(pack)
            synchronize()
            series.append(time.perf_counter() - start)
        lines.append(f"{world} {8 * size} {1e6 * statistics.median(series[20:]):.3f}")
    if rank == 0:
        Path(out).write_text("\n".join(lines))
    dist.destroy_process_group()


def measured(rounds: int, device: str) -> np.ndarray:
    """Rows of ranks, bytes and microseconds."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS if device == "cpu" else [n for n in WORLDS if n <= torch.accelerator.device_count()]:
            out = Path(folder) / f"times{world}"
            mp.spawn(measure, (world, str(Path(folder) / f"meeting{world}"), rounds, device, str(out)), world)
            rows += [[float(cell) for cell in line.split()] for line in out.read_text().splitlines()]
    return np.array(rows)


def fit(rows: np.ndarray) -> np.ndarray:
    """a, b, c of time = a + b log2(ranks) + c bytes, none of them negative."""
    from scipy.optimize import nnls

    design = np.stack([np.ones(len(rows)), np.log2(rows[:, 0]), rows[:, 1]], axis=1)
    return nnls(design, rows[:, 2])[0]


def main() -> None:
    """Print what was measured, the fit, and the costs of steps by it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="all-reduces of each kind (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--times", type=Path, help="measurements of yours: lines of 'ranks bytes microseconds'")
    options = parser.parse_args()
    rows = np.loadtxt(options.times, ndmin=2) if options.times else measured(options.rounds, options.device)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {platform.machine()}\n")
    print("| ranks | " + " | ".join(f"{8 * size} bytes: us" for size in SIZES) + " |")
    print("| ---: |" + " ---: |" * len(SIZES))
    for world in sorted(set(rows[:, 0])):
        print(f"| {world:g} | " + " | ".join(f"{row[2]:.0f}" for row in rows if row[0] == world) + " |")
    a, b, c = fit(rows)
    print(f"\nFit: {a:.0f} us + {b:.0f} us log2(ranks) + {1e3 * c:.2f} us per 1,000 bytes\n")
    print(
        "| step | all-reduces | bytes | 8 ranks: ms | 64: ms | 1,024: ms |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for name, messages in STEPS.items():
        costs = [sum(a + b * np.log2(ranks) + c * size for size in messages) / 1e3 for ranks in (8, 64, 1024)]
        print(f"| {name} | {len(messages)} | {sum(messages)} | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")


if __name__ == "__main__":
    main()
