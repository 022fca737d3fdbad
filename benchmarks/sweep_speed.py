"""Runs of matrix-fac1 per second, batched against one by one, and how it grows with the number of runs.

    python benchmarks/sweep_speed.py [--epochs 50] [--quick]

The full experiment comes first: 300 runs of 50 epochs with all metrics after each epoch, and the peak memory of this
process after it. The table that follows takes 10, 100 and 1000 runs of the same grid. The single engine is timed on two
runs (ProxSPS and SPS) of two epochs, after a warm-up, and scaled to the number of epochs and runs: its runs follow one
another, and a run costs the same whatever comes before it. Times are those of the runs alone, without the store.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence

import torch

from proxsps.experiments import EXPERIMENTS
from proxsps.sweep.engines import Batched, Engine, Single
from proxsps.sweep.spec import RunSpec

MATRIX_FAC1 = EXPERIMENTS["matrix-fac1"]
SETTINGS = 30  # in the grid: ProxSPS and SPS, three caps, five strengths
COUNTS = (10, 100, 1000)
SINGLE_EPOCHS = 2


def runs(count: int, epochs: int) -> list[RunSpec]:
    """The first `count` runs of the grid, with as many seeds as that takes."""
    return MATRIX_FAC1.specs(math.ceil(count / SETTINGS), epochs)[:count]


def seconds(engine: Engine, specs: Sequence[RunSpec]) -> float:
    """Time to run all specs."""
    start = time.perf_counter()
    for _ in engine.run(specs, set(), lambda epochs: None):
        pass
    return time.perf_counter() - start


def single_seconds(epochs: int) -> float:
    """Time of one run of the single engine: measured on a few epochs of two runs, and scaled."""
    specs = {spec.method: spec for spec in runs(SETTINGS, SINGLE_EPOCHS)}
    seconds(Single(), list(specs.values()))  # compiles what there is to compile
    return seconds(Single(), list(specs.values())) / len(specs) * epochs / SINGLE_EPOCHS


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, kilobytes elsewhere


def table(times: dict[int, float], single: float) -> str:
    """Both engines for each number of runs, as Markdown."""
    lines = ["| runs | batched: s | runs/s | single, scaled: s | runs/s | batched / single |", "|" + " ---: |" * 6]
    for count, elapsed in times.items():
        slow = count * single
        cells = (count, f"{elapsed:.2f}", f"{count / elapsed:.1f}", f"{slow:.0f}", f"{1 / single:.2f}")
        lines.append("| " + " | ".join(map(str, cells)) + f" | {slow / elapsed:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the time of the full experiment, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="epochs of a run in the table (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="5 epochs, and no full experiment")
    options = parser.parse_args()
    epochs = 5 if options.quick else options.epochs
    if epochs < 1:
        parser.error(f"--epochs must be at least 1, got {epochs}")
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} CPUs, {platform.machine()}\n"
    )
    seconds(Batched(), runs(2, 1))
    idle = peak_megabytes()
    if not options.quick:
        specs = MATRIX_FAC1.specs(MATRIX_FAC1.seeds, MATRIX_FAC1.epochs)
        full = seconds(Batched(), specs)
        print(f"| {MATRIX_FAC1.name}, batched | value |\n| --- | ---: |")
        print(f"| {len(specs)} runs x {MATRIX_FAC1.epochs} epochs | {full:.2f} s |")
        print(f"| peak memory | {peak_megabytes():.0f} MB ({idle:.0f} MB of it before the runs) |\n")
    times = {count: seconds(Batched(), runs(count, epochs)) for count in COUNTS}
    print(f"{epochs} epochs a run; single timed on two runs of {SINGLE_EPOCHS} epochs and scaled.\n")
    print(table(times, single_seconds(epochs)))
    print(f"\nPeak memory of all of this: {peak_megabytes():.0f} MB.")


if __name__ == "__main__":
    main()
