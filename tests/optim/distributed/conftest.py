"""Real processes: a module of scenarios runs once on its ranks, and the tests look at what every rank brought back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests and ranks share `common`
SECONDS = 240  # for all scenarios of a launch, on a machine that is busy with other things too


class Outcome:
    """What the ranks brought back from the scenarios of a module."""

    def __init__(self, folder: Path, world: int, module: str) -> None:
        self.folder = folder
        self._module = module
        self._ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]

    def of(self, scenario: str, field: str = "value") -> list[Any]:
        """The result of a scenario on every rank, or what the optimizers warned of there (field "warnings")."""
        found = [results[self._module, scenario] for results in self._ranks]
        for rank, result in enumerate(found):
            if isinstance(result["value"], str):
                pytest.fail(f"{scenario} failed on rank {rank}:\n{result['value']}")
        return [result[field] for result in found]


def launch(folder: Path, world: int, modules: list[str]) -> None:
    """Run the scenarios of some modules on `world` ranks, which meet in a file."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "worker.py"), str(folder), str(world), *modules]
    with (folder / "log").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        process.wait(SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise RuntimeError("\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("log*"))))


def ran(base: Path, world: int, *modules: str) -> Path:
    """Where the ranks left their results; where several test processes ask, one launches and the others wait."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = (base.parent if run else base) / f"{world}-ranks-{run or 'here'}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            launch(folder, world, list(modules))
    return folder


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.getbasetemp(), 2, "replicated", "sharded", "uneven", "free")


@pytest.fixture(scope="session")
def replicated(two_ranks: Path) -> Outcome:
    return Outcome(two_ranks, 2, "replicated")


@pytest.fixture(scope="session")
def sharded(two_ranks: Path) -> Outcome:
    return Outcome(two_ranks, 2, "sharded")


@pytest.fixture(scope="session")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(ran(tmp_path_factory.getbasetemp(), 4, "meshes"), 4, "meshes")


@pytest.fixture(scope="session")
def uneven(two_ranks: Path) -> Outcome:
    return Outcome(two_ranks, 2, "uneven")


@pytest.fixture(scope="session")
def schedule_free(two_ranks: Path) -> Outcome:
    return Outcome(two_ranks, 2, "free")
