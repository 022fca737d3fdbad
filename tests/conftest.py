"""What every run of the suite relies on, however it is started: the same examples, and interrupts that arrive."""

import gc
import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from proxsps.methods import METHODS, Method

sys.path.insert(0, str(Path(__file__).parent / "shared"))

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Tests that start processes, compile or train: one half for each of two workers to begin with.
SLOW = (
    ("optim/distributed", "jax_front", "experiments", "training"),
    ("sweep", "cli", "integrations", "sparsity", "test_docs.py", "test_package.py"),
)


COMPILE = "import sys, torch, common; common.compile_kernels([getattr(torch, sys.argv[1])])"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels before there are workers, which would all compile them at the same time."""
    config = session.config
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        folder = Path(__file__).parent / "optim" / "distributed"
        commands = [[sys.executable, "-W", "ignore", "-c", COMPILE, dtype] for dtype in ("float32", "float64")]
        for process in [subprocess.Popen(command, cwd=folder) for command in commands]:
            process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first in each half, so that workers end with tests that take milliseconds."""

    def half(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((i for i, places in enumerate(SLOW) if any(f"/tests/{place}" in path for place in places)), 2)

    first, second, quick = ([item for item in items if half(item) == i] for i in range(3))
    cut = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *quick[:cut], *second, *quick[cut:]]


def pytest_collection_finish() -> None:
    """What was imported stays until the end: collecting garbage need not walk through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbouring tests in one process, where they share what was compiled or started; an idle one takes over some."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """In the background (`nohup`, `&`) a process ignores interrupts, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def forked() -> Iterator[type[subprocess.Popen[str]]]:
    """Starts Python processes that have torch and pandas already, but nothing of this package."""
    import warm

    with warm.warmed("torch._dynamo", "pandas", "pyarrow.parquet") as popen:  # any optimizer loads the first
        yield popen


@pytest.fixture
def quick_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a pool begin with what one server has loaded; `sweep/test_pool.py` starts them anew."""
    from proxsps.sweep import pool

    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "pandas", "pyarrow.parquet"])
        monkeypatch.setattr(pool, "START", "forkserver")


@pytest.fixture
def table() -> Iterator[dict[str, Method]]:
    """The table of methods, to which a test may add its own: afterwards it is as it was."""
    before = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(before)
