"""One rank: runs the scenarios of some modules in order and saves what each of them returned, or how it failed.

python worker.py FOLDER RANK WORLD MODULE...
"""

from __future__ import annotations

import datetime
import importlib
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, rank: int, world: int, modules: list[str]) -> None:
    scenarios = {
        (module, scenario.__name__): scenario
        for module in modules
        for scenario in importlib.import_module(module).SCENARIOS
    }
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
        said = [str(w.message) for w in seen if "This is said once" in str(w.message)]
        results[name] = {"value": value, "warnings": said, "seconds": time.perf_counter() - start}
        torch.save(results, folder / f"rank{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
