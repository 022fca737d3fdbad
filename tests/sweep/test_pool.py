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

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
from proxsps.problems import from_module
from proxsps.sweep.engines import EngineError, Processes, Single
from proxsps.sweep.spec import RunSpec

def dies_once(outputs, targets):
    marker = Path(sys.argv[1])
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return (outputs - targets).square().mean()

def dies_always(outputs, targets):
    os.kill(os.getpid(), signal.SIGKILL)

def raises(outputs, targets):
    raise ValueError("These labels are not from here.")

def problem(name, loss):
    data = torch.linspace(-1, 1, 8).reshape(-1, 1)
    torch.manual_seed(0)
    return from_module(name, nn.Linear(1, 1), loss, (data, data + 1), (data, data + 1), batch_size=4)

def specs(loss, seeds):
    return [RunSpec(problem("line", loss), "prox-sps", "sqrt", 1.0, 1e-3, seed, 3) for seed in range(seeds)]

if __name__ == "__main__":
    runs, told = specs(dies_once, 3), []
    found = {r.spec.seed: r for batch in Processes(workers=2).run(runs, (), told.append) for r in batch}
    here = {r.spec.seed: r for batch in Single().run(runs, (), lambda n: None) for r in batch}
    print(len(found), sum(told), all(np.array_equal(found[s].metrics, here[s].metrics) for s in here))
    for loss in (dies_always, raises):
        try:
            list(Processes(workers=1).run(specs(loss, 1), (), told.append))
        except (EngineError, ValueError) as error:
            print(type(error).__name__, error, "in raises" in str(error.__cause__), sep="|")
"""


def test_a_killed_process_costs_one_attempt_and_a_second_time_its_run_is_named(kit: Any, tmp_path: Path) -> None:
    process = kit.script(tmp_path / "killed.py", KILLED, tmp_path / "marker")
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        _end_group(process.pid)
    assert process.returncode == 0, errors
    retried, *failures = output.splitlines()
    assert retried == "3 9 True"  # every run and every epoch once, and bitwise what one process gives
    kind, message, _ = failures[0].split("|")
    assert kind == "EngineError"
    assert "(prox-sps, sqrt, lr 1, weight decay 0.001, seed 0) died 2 times (killed by signal 9)" in message
    assert failures[1] == "ValueError|These labels are not from here.|True"


# A parent that dies

LONG = """
import os, signal, sys
from pathlib import Path
from proxsps.problems import matrix_fac1
from proxsps.problems.vision import ImageClassification
from proxsps.sweep.engines import Processes
from proxsps.sweep.spec import RunSpec
from proxsps.training import Training

if __name__ == "__main__":
    signal.alarm(60)  # whatever happens, this ends
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "processes":
        problem, engine = matrix_fac1(N=20), Processes(workers=2)
    else:
        options = {"images": 64, "validation_images": 8, "size": 8, "width": 4, "batch_size": 32}
        problem, engine = ImageClassification("synthetic", 8, **options), Training(folder, workers=2)
    specs = [RunSpec(problem, "sgd", "sqrt", 0.01, 0.0, seed, 100_000) for seed in range(2)]
    heard = []
    def advance(runs):
        heard.append(runs)
        if len(heard) == 5:
            print("under way", flush=True)
    list(engine.run(specs, (), advance))
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
        assert len(_group(process.pid)) >= 3
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
