"""Ray: rows are those of the batched engine whatever happens to workers, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

from proxsps._install import extra
from proxsps.cli import app
from proxsps.methods import Method
from proxsps.problems import LogisticRegression, from_module
from proxsps.regularizers import L1
from proxsps.sweep import ray as ray_engine
from proxsps.sweep.engines import Batched, Engine, EngineError
from proxsps.sweep.ray import Ray
from proxsps.sweep.spec import RunResult, RunSpec, grid


def quiet(runs: int) -> None:
    """Hear of progress, and say nothing."""


def everything(engine: Engine, specs: list[RunSpec], done: set[str] | None = None) -> dict[str, RunResult]:
    results = [result for batch in engine.run(specs, done or set(), quiet) for result in batch]
    found = {result.spec.id: result for result in results}
    assert len(found) == len(results)
    return found


def identical(one: dict[str, RunResult], other: dict[str, RunResult]) -> bool:
    """Bitwise, run by run."""
    return one.keys() == other.keys() and all(
        np.array_equal(getattr(one[key], name), getattr(other[key], name), equal_nan=True)
        for key in one
        for name in ("metrics", "zetas")
    )


def small_grid(problem: Any, seeds: int = 3) -> list[RunSpec]:
    return grid(problem, {"prox-sps": [5.0, 1.0], "sps": [5.0], "sgd": [0.1]}, [1e-3, 1e-2], ["sqrt"], seeds, 2)


# Processes


def session(leader: int) -> list[int]:
    """Processes of a session: all that a process started with a session of its own has left running."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[3] == str(leader) and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return value


def gone(leader: int) -> None:
    try:
        until(lambda: not session(leader), 15)
    finally:
        for process in session(leader):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """Ray on the loopback interface, with files in a folder of its own (a short path: its sockets are there)."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", **ray_engine.PRIVATE}.items():
            patch.setenv(name, value)
        pytest.importorskip("ray")  # which reads some of it when it is imported
        yield


HEAD = """
import logging, signal, sys
import ray

options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
print(ray.init("local", num_cpus=2, object_store_memory=80 * 2**20, **options).address_info["gcs_address"], flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def address(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster with two cores, in a session of its own."""
    head = kit.cold_script(tmp_path_factory.mktemp("cluster") / "head.py", HEAD)
    try:
        yield head.stdout.readline().strip()
        head.terminate()
        head.communicate(timeout=30)
    finally:
        gone(head.pid)


@pytest.fixture(scope="module")
def cluster(address: str) -> Iterator[None]:
    """A connection that the tests share, so that workers are started once."""
    import ray

    ray.init(address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def connected() -> bool:
    import ray

    return ray.is_initialized()


# Rows


@pytest.mark.usefixtures("cluster")
def test_rows_are_those_of_the_batched_engine(kit: Any) -> None:
    specs = small_grid(kit.tiny(dtype="float32")) + [kit.spec(kit.network(), seed=seed) for seed in range(3)]
    heard: list[int] = []
    found = [result for batch in Ray(size=8).run(specs, set(), heard.append) for result in batch]
    assert identical({result.spec.id: result for result in found}, everything(Batched(8), specs))
    assert len(found) == len(specs)
    assert sum(heard) == sum(spec.epochs for spec in specs)
    assert all(result.spec in specs and result.metrics.flags.owndata for result in found)
    assert connected()  # a connection that was there before is kept


@pytest.mark.usefixtures("cluster")
def test_what_is_done_is_not_run_again(kit: Any) -> None:
    specs = small_grid(kit.tiny())  # 24 runs, in batches of 8
    done = {spec.id for spec in specs[4:16]}
    whole = everything(Batched(8), specs)
    heard: list[int] = []
    found = {r.spec.id: r for batch in Ray(size=8).run(specs, done, heard.append) for r in batch}
    assert identical(found, {key: result for key, result in whole.items() if key not in done})
    assert sum(heard) == 2 * 16  # of the first batch half is missing, and all of it is run


def test_nothing_to_do_asks_for_no_cluster(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert everything(Ray(), [kit.spec()], {kit.spec().id}) == {}


@pytest.mark.usefixtures("cluster")
def test_a_large_batch_has_the_threads_of_the_driver() -> None:
    data = torch.randn(8, 400, generator=torch.Generator().manual_seed(0))
    problem = from_module(
        "large", nn.Linear(400, 150), lambda out, _: out.square().mean(), (data, data), (data, data), 4
    )
    specs = grid(problem, {"prox-sps": [1.0]}, [1e-3], ["sqrt"], seeds=4, epochs=2)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert identical(everything(Ray(), specs), everything(Batched(), specs))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("cluster")
def test_only_the_driver_needs_the_data(tmp_path: Path) -> None:
    file = tmp_path / "samples.svm"
    file.write_text("".join(f"{(-1) ** i} 1:{i / 10} 2:{(i % 3) - 1}\n" for i in range(30)))
    problem = LogisticRegression(file=str(file), batch_size=5)
    specs = [RunSpec(problem, "prox-sps", "sqrt", 1.0, 1e-3, seed, 2) for seed in range(2)]
    here = everything(Batched(), specs)
    file.unlink()
    assert identical(everything(Ray(), specs), here)


OWN = """
from dataclasses import dataclass
import torch
from proxsps.methods import Method
from proxsps.problems import MatrixFactorization

FACTOR = 0.5

class Scaled(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for param in self.param_groups[0]["params"]:
            param.sub_(FACTOR * self.param_groups[0]["lr"] * param.grad)

@dataclass(frozen=True)
class Slow(MatrixFactorization):
    name = "slow"
    pace = 0.25

METHOD = Method("scaled", lambda params, run: Scaled(params, run.lr))
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that workers do not have."""
    (tmp_path / "own_of_the_driver.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    import own_of_the_driver

    yield own_of_the_driver
    del sys.modules["own_of_the_driver"]


@pytest.mark.usefixtures("cluster", "table")
def test_methods_problems_and_regularisers_of_your_own_are_sent(own_module: Any) -> None:
    problem = own_module.Slow(N=60, dtype="float64")
    lrs = {own_module.METHOD: [0.1], "prox-sps": [1.0]}
    specs = grid(problem, lrs, [0.1], ["sqrt"], 2, 3, lambda lam: L1(lam))
    here, there = everything(Batched(), specs), everything(Ray(), specs)
    assert identical(there, here)
    for key, result in here.items():
        assert np.array_equal(there[key].extra["nonzeros"], result.extra["nonzeros"])


@pytest.mark.usefixtures("cluster", "table")
def test_what_cannot_be_sent_to_a_worker_is_named(kit: Any) -> None:
    lock = threading.Lock()
    method = Method("locked", lambda params, run: (lock, torch.optim.SGD(params, run.lr))[1])
    with pytest.raises(EngineError, match=r"A part of method 'locked' or problem .* cannot be sent to a worker"):
        everything(Ray(), [RunSpec(kit.tiny(), method, "sqrt", 0.1, 0.0, 0, 1)])


@pytest.mark.usefixtures("cluster")
def test_the_command_stores_what_it_stores_without_ray(tmp_path: Path) -> None:
    small = ["--seeds", "1", "--epochs", "2", "--runs-per-batch", "10", "--json"]
    for engine in ("batched", "ray"):
        words = ["run", "matrix-fac1", "--engine", engine, "--out", str(tmp_path / engine), *small]
        result = CliRunner().invoke(app, words)
        assert json.loads(result.stdout)[0]["ran"] == 30, result.output
    for name, key in (("runs", ["run", "epoch"]), ("steps", ["run", "step"])):
        here, there = (
            pd.read_parquet(tmp_path / engine / "matrix-fac1" / f"{name}.parquet").sort_values(key, ignore_index=True)
            for engine in ("batched", "ray")
        )
        pd.testing.assert_frame_equal(here, there, check_exact=True)


# Workers that fail: the more a test leaves dead the later it comes, as new ones import torch again


def network(name: str, loss: Callable[..., Any]) -> Any:
    data = torch.linspace(-1, 1, 16).reshape(-1, 1)
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return from_module(name, model, loss, (data, data + 1), (data, data + 1), batch_size=8)


def noted_loss(file: Path) -> Callable[..., Any]:
    """A slow loss that notes the process it is asked in."""

    def loss(outputs: Any, targets: Any) -> Any:
        with open(file, "a") as notes:
            notes.write(f"{os.getpid()}\n")
        time.sleep(0.02)
        return mse_loss(outputs, targets)

    return loss


@pytest.mark.usefixtures("cluster")
def test_an_error_on_a_worker_is_raised_here() -> None:
    def wrong(outputs: Any, targets: Any) -> Any:
        raise ValueError("These labels are not from here.")

    with pytest.raises(ValueError, match=r"^These labels are not from here\.$") as caught:
        everything(Ray(), [RunSpec(network("wrong", wrong), "sgd", "sqrt", 0.1, 0.0, 0, 1)])
    assert "in wrong" in str(caught.value.__cause__)  # with the traceback of the worker


@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    specs = grid(network("killed", noted_loss(file)), {"prox-sps": [1.0, 0.1]}, [1e-3], ["sqrt"], seeds=2, epochs=6)
    heard: list[int] = []

    def kill_once(runs: int) -> None:
        heard.append(runs)
        if len(heard) == 3:  # of twelve, so that no batch is done
            os.kill(int(file.read_text().split()[-1]), signal.SIGKILL)

    found = {r.spec.id: r for batch in Ray(size=2).run(specs, set(), kill_once) for r in batch}
    calls = len(file.read_text().split())
    assert len(found) == len(specs)
    assert sum(heard) == 4 * 6  # what is run again is not heard of again
    file.unlink()
    assert identical(found, everything(Batched(2), specs))
    assert calls > len(file.read_text().split())  # a part was run again


@pytest.mark.usefixtures("cluster")
def test_a_sweep_that_is_left_ends_its_tasks(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    problem = network("left", noted_loss(file))
    specs = [RunSpec(problem, "sgd", "sqrt", 0.1, 0.0, 0, epochs) for epochs in (1, 10_000)]
    with closing(Ray().run(specs, set(), quiet)) as batches:
        assert [result.spec for result in next(batches)] == specs[:1]
        before = file.stat().st_size
        until(lambda: file.stat().st_size > before)  # the long run is under way

    def silent() -> bool:
        before = file.stat().st_size
        time.sleep(0.25)
        return file.stat().st_size == before

    until(silent, 15)
    assert connected()


@pytest.mark.usefixtures("cluster")
def test_a_batch_that_kills_its_workers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fatal(outputs: Any, targets: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(ray_engine, "RETRIES", 0)
    with pytest.raises(EngineError, match=r"given up after 1 attempts .*--runs-per-batch") as caught:
        everything(Ray(), [RunSpec(network("fatal", fatal), "sgd", "sqrt", 0.1, 0.0, 0, 1)])
    assert "\n" not in str(caught.value)


# What a user can mend


ADDRESSES = """
import sys
from proxsps.problems import matrix_fac1
from proxsps.sweep.engines import EngineError
from proxsps.sweep.ray import Ray
from proxsps.sweep.spec import RunSpec

for address in sys.argv[1:]:
    try:
        list(Ray(address).run([RunSpec(matrix_fac1(N=20), "sgd", "sqrt", 0.1, 0.0, 0, 1)], (), print))
    except EngineError as error:
        print(error)
"""


def test_wrong_addresses_get_one_line_at_once_and_a_right_one_is_joined(kit: Any, address: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"127.0.0.1:{server.getsockname()[1]}"
    wrong = [closed, "nonsense", "ray://127.0.0.1:10001"]
    process = kit.script(tmp_path / "addresses.py", ADDRESSES, *wrong, address)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    *lines, joined = output.splitlines()
    for line, tried in zip(lines, wrong, strict=True):
        assert line.startswith(f"No Ray cluster was reached at {tried} (")
        assert "`ray start --head`" in line
    assert joined == "1"  # run and epoch


LOCAL = """
import os, sys
from proxsps.cli import app

# Ray's files: below a file, and in a folder whose sockets have too long a path
for folder in sys.argv[1:]:
    os.environ["RAY_TMPDIR"] = folder
    try:
        app(["run", "matrix-fac1", "--seeds", "1", "--epochs", "1", "--engine", "ray"])
    except SystemExit as end:
        print(end.code)
"""


def test_a_cluster_of_our_own_that_does_not_come_up_gets_one_line(kit: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    folders = [tmp_path / "file", tmp_path / ("x" * 120)]
    process = kit.script(tmp_path / "local.py", LOCAL, *folders)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        gone(process.pid)
    assert output.split() == ["2", "2"], errors
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("Error:")]
    assert len(lines) == 2
    assert all("Ray did not start on this machine (" in line and "RAY_TMPDIR" in line for line in lines)
    assert all(str(folder) in line for folder, line in zip(folders, lines, strict=True))


# The command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--address", "auto"], "--address names a Ray cluster: use it with --engine ray, not batched."),
        (["--engine", "single", "--runs-per-batch", "5"], "single has no batches"),
        (["--engine", "ray"], f"The Ray engine needs Ray: {extra('ray')}."),
    ],
)
def test_what_cannot_be_run_gets_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    result = CliRunner().invoke(app, ["run", "matrix-fac1", "--seeds", "1", "--epochs", "1", *words])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


INTERRUPTED = """
import sys
from pathlib import Path
from proxsps.problems import matrix_fac1
from proxsps.sweep.ray import Ray
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store

problem = matrix_fac1(N=20)
# a short run, then one that would take minutes
specs = [RunSpec(problem, "sgd", "sqrt", 0.1, 0.0, 0, epochs) for epochs in (1, 200_000)]
store = Store(Path(sys.argv[1]), "tiny")
try:
    for results in Ray().run(specs, store.done, lambda runs: None):
        store.add(results)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_keeps_what_was_finished_and_ends_the_cluster(kit: Any, tmp_path: Path) -> None:
    """As a terminal interrupts: Ray's processes as well."""
    folder = tmp_path / "store"
    process = kit.script(tmp_path / "sweep.py", INTERRUPTED, folder, RAY_OVERRIDE_RESOURCES='{"CPU": 1}')
    try:
        until(lambda: (folder / "runs.parquet").exists() or process.poll() is not None)
        time.sleep(0.2)  # by now the long run is under way
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 130, errors
    finally:
        gone(process.pid)
    assert pd.read_parquet(folder / "runs.parquet")["epoch"].tolist() == [1]
