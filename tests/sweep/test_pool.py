"""Processes of a pool that die, and parents that die before them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TASKS = """
import os, signal, sys
from pathlib import Path
from proxsps.sweep.pool import EngineError, run_tasks

def work(task, tell):
    marker = Path(sys.argv[1])
    tell(1)
    if task == "dies once" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "dies always":
        os._exit(3)
    if task == "raises":
        raise ValueError("These labels are not from here.")
    tell(2)
    return task, os.getpid() != os.getppid()

def load():
    raise ModuleNotFoundError("No module named 'mine'")

class Lost:
    def __reduce__(self):
        return load, ()

def told(*names):
    heard = []
    results = sorted(run_tasks(work, [(name, f"the task that {name}") for name in names], 2, heard.append))
    return len(results), [name for name, _ in results], sum(heard)

if __name__ == "__main__":
    print(told("dies once", "b", "c", "d"))
    for name in ("dies always", "raises"):
        try:
            told("a", name)
        except (EngineError, ValueError) as error:
            print(type(error).__name__, error, "in work" in str(error.__cause__), sep="|")
    try:
        list(run_tasks(work, [(Lost(), "the lost task")], 1, print))
    except (EngineError, ModuleNotFoundError) as error:
        print(type(error).__name__, error, "in load" in str(error.__cause__), sep="|")
"""


def test_a_process_that_dies_costs_one_attempt_and_a_second_time_its_task_is_named(kit: Any, tmp_path: Path) -> None:
    retried, *failures = _output(kit.script(tmp_path / "tasks.py", TASKS, tmp_path / "marker"))
    assert retried == "(4, ['b', 'c', 'd', 'dies once'], 12)"  # every task once, and every epoch told once
    kind, message, _ = failures[0].split("|")
    assert kind == "EngineError"
    assert message.startswith("The process of the task that dies always died 2 times (exit code 3)")
    assert failures[1] == "ValueError|These labels are not from here.|True"
    assert failures[2] == "ModuleNotFoundError|No module named 'mine'|True"  # a task that the process cannot load


KILLED = """
import os, signal, sys
from pathlib import Path

def dies_once(outputs, targets):
    marker = Path(sys.argv[1])
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return (outputs - targets).square().mean()

if __name__ == "__main__":
    import numpy as np
    import torch
    from torch import nn
    from proxsps.problems import from_module
    from proxsps.sweep.engines import Processes, Single
    from proxsps.sweep.spec import RunSpec

    data = torch.linspace(-1, 1, 8).reshape(-1, 1)
    torch.manual_seed(0)
    problem = from_module("line", nn.Linear(1, 1), dies_once, (data, data + 1), (data, data + 1), batch_size=4)
    runs, told = [RunSpec(problem, "sgd", "sqrt", 0.1, 1e-3, seed, 3) for seed in range(2)], []
    found = {r.spec.seed: r for batch in Processes(workers=1).run(runs, (), told.append) for r in batch}
    here = {r.spec.seed: r for batch in Single().run(runs, (), lambda n: None) for r in batch}
    same = [np.array_equal(found[seed].metrics, here[seed].metrics, equal_nan=True) for seed in here]
    print(len(found), sum(told), all(same))
"""


def test_a_sweep_goes_on_after_a_worker_was_killed(kit: Any, tmp_path: Path) -> None:
    lines = _output(kit.script(tmp_path / "killed.py", KILLED, tmp_path / "marker"))
    assert lines == ["2 6 True"]  # every run and every epoch once, and bitwise what one process gives


def test_a_run_is_named_by_its_id_and_constants(kit: Any) -> None:
    spec = kit.spec(seed=3)
    assert spec.describe() == f"run {spec.id} (prox-sps, sqrt, lr 2, weight decay 0.001, seed 3)"


def _output(process: subprocess.Popen[str]) -> list[str]:
    try:
        output, errors = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        pytest.fail("The pool hangs.")
    finally:
        _end_group(process.pid)
        process.communicate(timeout=10)
    assert process.returncode == 0, errors
    return output.splitlines()


# A parent that dies

# After some epochs the process of the pool is busy and says nothing, so that no broken pipe ends it.
LONG = """
import signal, sys, time
from multiprocessing.connection import Connection
from pathlib import Path

send, said = Connection.send, []

def send_at_first(self, content):
    said.append(content)
    if len(said) == 5:
        print("under way", flush=True)
        time.sleep(100)
    send(self, content)

if __name__ == "__mp_main__":
    Connection.send = send_at_first

if __name__ == "__main__":
    from proxsps.problems import matrix_fac1
    from proxsps.problems.vision import ImageClassification
    from proxsps.sweep.engines import Processes
    from proxsps.sweep.spec import RunSpec
    from proxsps.training import Training

    signal.alarm(100)  # whatever happens, this ends
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "processes":
        problem, engine = matrix_fac1(N=20), Processes(workers=1)
    else:
        options = {"images": 64, "validation_images": 8, "size": 8, "width": 4, "batch_size": 32}
        problem, engine = ImageClassification("synthetic", 8, **options), Training(folder, workers=1)
    specs = [RunSpec(problem, "sgd", "sqrt", 0.01, 0.0, seed, 100_000) for seed in range(2)]
    list(engine.run(specs, (), lambda epochs: None))
"""


@pytest.fixture
def parents(kit: Any, tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    kinds = ("processes", "training")
    started = {kind: kit.script(tmp_path / f"{kind}.py", LONG, kind, tmp_path) for kind in kinds}
    yield started
    for process in started.values():
        _end_group(process.pid)
        process.communicate(timeout=10)


def test_processes_end_when_their_parent_is_killed(parents: dict[str, subprocess.Popen[str]]) -> None:
    for process in parents.values():
        assert process.stdout.readline() == "under way\n"
        assert len(_group(process.pid)) >= 2
    parents["processes"].kill()
    parents["training"].terminate()
    for process in parents.values():
        process.wait(timeout=10)
    end = time.monotonic() + 2
    while left := [pid for process in parents.values() for pid in _group(process.pid)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.05)


def _group(leader: int) -> list[int]:
    """Living processes of a process group."""
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, group, state in rows if int(group) == leader and not state.startswith("Z")]


def _end_group(leader: int) -> None:
    """End what a script may have left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
