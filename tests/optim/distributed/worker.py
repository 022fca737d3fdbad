"""Ranks: each runs the scenarios of some modules in order and saves what each of them returned, or how it failed.

python worker.py FOLDER WORLD MODULE...
"""

from __future__ import annotations

import datetime
import importlib
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist


def rank_of(folder: Path, rank: int, world: int, scenarios: dict[tuple[str, str], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=40),
    )
    results = {}
    for name, scenario in scenarios.items():
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                value = scenario(rank, world, folder)
            except Exception:  # the test of this name shows it
                value = traceback.format_exc()
        said = [str(w.message) for w in seen if "This warning is shown once" in str(w.message)]
        results[name] = {"value": value, "warnings": said, "seconds": time.perf_counter() - start}
        torch.save(results, folder / f"rank{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, world: int, modules: list[str]) -> int:
    """Import and compile once, which takes longer than most scenarios, and fork the ranks; how many of them failed."""
    scenarios = {
        (module, scenario.__name__): scenario
        for module in modules
        for scenario in importlib.import_module(module).SCENARIOS
    }
    common.compile_kernels()
    ranks = []
    for rank in range(world):
        if (child := os.fork()) == 0:
            with (folder / f"log{rank}").open("w") as log:
                os.dup2(log.fileno(), sys.stdout.fileno())
                os.dup2(log.fileno(), sys.stderr.fileno())
            rank_of(folder, rank, world, scenarios)
            return 0
        ranks.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
