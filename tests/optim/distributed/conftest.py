"""Real processes: a module of scenarios runs once on its ranks, and the tests look at what every rank brought back."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests and ranks share `common`
SECONDS = 240  # for all scenarios of a module, on a machine that is busy with other things too


class Outcome:
    """What the ranks brought back."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder = folder
        self._ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]

    def of(self, scenario: str) -> list[dict[Any, Any]]:
        """The result of a scenario on every rank."""
        for rank, results in enumerate(self._ranks):
            value = results[scenario]["value"]
            if isinstance(value, str):
                pytest.fail(f"{scenario} failed on rank {rank}:\n{value}")
        return [results[scenario]["value"] for results in self._ranks]

    def warnings(self, scenario: str) -> list[list[str]]:
        """What the optimizers warned of, on every rank."""
        return [results[scenario]["warnings"] for results in self._ranks]


def launch(module: str, world: int, folder: Path) -> None:
    """Run the scenarios of a module on `world` ranks, which meet in a file."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"log{rank}" for rank in range(world)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, str(HERE / "worker.py"), module, str(rank), str(world), str(folder)]
            with log.open("w") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        deadline = time.monotonic() + SECONDS
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))


def outcome(module: str, world: int, base: Path) -> Outcome:
    """The outcome of a module; where several test processes ask for it, one runs it and the others wait."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = (base.parent if run else base) / f"{module}-{run or 'here'}"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            launch(module, world, folder)
    return Outcome(folder, world)


@pytest.fixture(scope="session")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome("replicated", 2, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome("sharded", 2, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return outcome("meshes", 4, tmp_path_factory.getbasetemp())
