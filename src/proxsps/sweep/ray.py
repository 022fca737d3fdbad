"""Batches of runs on a Ray cluster: a task is a batch of the batched engine, and its results come back to the driver.

Batches and threads are those that the batched engine would have in this process, so that rows are bitwise the same on
the same kind of processor. Only the driver needs data and writes results. Ray is imported when a sweep starts.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np
import torch

from proxsps._install import extra
from proxsps.problems.base import Problem
from proxsps.problems.fingerprint import is_installed
from proxsps.sweep.batched import is_large
from proxsps.sweep.engines import BATCH, Batched, Results, run_batch
from proxsps.sweep.pool import Advance, EngineError, first_line
from proxsps.sweep.spec import RunResult, RunSpec

RETRIES = 3  # of a batch whose worker was lost
# Our own cluster listens only on the loopback interface, which is Ray's default except on Linux, and sends no usage
# reports.
PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

Found = list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]  # metrics, zetas and extra columns of every run


class Ray:
    """Batches of runs as tasks of a Ray cluster.

    Args:
        address: address of a running cluster, `HOST:PORT` or `auto`; by default the environment variable RAY_ADDRESS,
            and without it a cluster of this machine's cores, which ends with the sweep.
        size: runs in a batch, as in `Batched`; smaller batches spread a sweep over more workers.
    """

    def __init__(self, address: str | None = None, size: int = BATCH) -> None:
        self.address, self.batched = address, Batched(size)

    def run(self, specs: Sequence[RunSpec], done: Collection[str], advance: Advance) -> Results:
        """Batches in the order in which they finish; a lost worker costs only the time of its batch."""
        batches = [batch for batch in self.batched.batches(specs) if any(spec.id not in done for spec in batch)]
        if not batches:
            return
        carried = {problem: _with_data(problem, specs) for problem in {batch[0].problem for batch in batches}}
        with _cluster(self.address) as ray:
            with _sent_whole(ray, specs):
                problems = {problem: ray.put(data) for problem, data in carried.items()}
                pending = {_submit(ray, problems[batch[0].problem], batch): batch for batch in batches}
            try:
                while pending:
                    (task,), _ = ray.wait(list(pending), num_returns=1)
                    news = _receive(ray, task)
                    if isinstance(news, int):
                        advance(news)
                        continue
                    found = zip(pending.pop(task), news, strict=True)
                    # Copies: Ray's arrays are in its shared memory, which ends with the cluster.
                    yield [RunResult(spec, *copy.deepcopy(parts)) for spec, parts in found if spec.id not in done]
            finally:
                for task in pending:
                    ray.cancel(task, force=True)


# What a worker receives and returns


def _with_data(problem: Problem, specs: Sequence[RunSpec]) -> Problem:
    """A copy of a problem together with its data, so that a worker does not need the files."""
    start, train = problem.start(), problem.train_data()
    validation = {spec.seed: problem.validation_data(spec.seed) for spec in specs if spec.problem == problem}
    carried = copy.copy(problem)
    vars(carried).update(  # in place of its methods
        start=lambda: {name: value.clone() for name, value in start.items()},
        train_data=lambda: train,
        validation_data=lambda seed: validation[seed],
    )
    return carried


def _work(problem: Problem, options: list[dict[str, Any]], threads: int) -> Generator[int | Found, None, None]:
    """The task: yields the number of runs after each epoch, and finally the results."""
    specs = [RunSpec(problem, **fields) for fields in options]
    told: SimpleQueue[int | None] = SimpleQueue()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as runner:
        results = runner.submit(run_batch, (specs, None), told.put)
        results.add_done_callback(lambda _: told.put(None))
        while (epochs := told.get()) is not None:
            yield epochs
    yield [(result.metrics, result.zetas, dict(result.extra)) for result in results.result()]


def _submit(ray: ModuleType, problem: Any, batch: list[RunSpec]) -> Any:
    threads = torch.get_num_threads()
    cores = max([1, *(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])])
    work = ray.remote(_work).options(
        name=f"{len(batch)} runs",
        num_cpus=min(threads, cores) if is_large(batch) else 1,
        num_returns="streaming",
        max_retries=RETRIES,
    )
    return work.remote(problem, [spec.options() for spec in batch], threads)


@contextmanager
def _sent_whole(ray: ModuleType, specs: Sequence[RunSpec]) -> Iterator[None]:
    """Send your own modules with what they define, because workers may not have them; name what cannot be sent."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    own = [name for name, file in files.items() if file and name != "__main__" and not is_installed(name, file)]
    modules = [sys.modules[name] for name in own if sys.modules[name].__name__ == name]
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        names = sorted({f"method {spec.method!r}" for spec in specs if spec.own})
        names += sorted({f"problem {spec.problem.name!r}" for spec in specs})
        raise EngineError(
            f"A part of {' or '.join(names)} cannot be sent to a worker ({first_line(error)}). Remove what belongs "
            "only to this process, such as locks, files and connections."
        ) from None
    finally:
        for module in modules:
            ray.cloudpickle.unregister_pickle_by_value(module)


def _receive(ray: ModuleType, task: Any) -> int | Found:
    try:
        news: int | Found = ray.get(next(task))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"A batch was given up after {RETRIES + 1} attempts ({first_line(error)}). What was finished is kept; if "
            "memory is short, use fewer runs per batch (--runs-per-batch)."
        ) from None
    return news


# The cluster


@contextmanager
def _cluster(address: str | None) -> Iterator[ModuleType]:
    """Ray, connected; an existing connection is used and kept."""
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        for name, value in PRIVATE.items():
            os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise EngineError(f"The Ray engine needs Ray: {extra('ray')}.") from None
    if ray.is_initialized():
        yield ray
        return
    try:
        _connect(ray, address)
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, address: str | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        try:
            ray.init("local", include_dashboard=False, **quiet)
        except Exception as error:  # of many kinds: Ray starts several programs, with their own files and ports
            files = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
            raise EngineError(
                f"Ray did not start on this machine ({first_line(error)}). Its files are in {files}: is "
                "there room, and may you write there? RAY_TMPDIR names another folder, with a short path; --engine "
                "batched needs no Ray."
            ) from None
        return
    try:
        if address != "auto":  # Ray would retry for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineError(
            f"No Ray cluster was reached at {address} ({first_line(error)}). Pass HOST:PORT as printed by "
            "`ray start --head`, on a machine of that cluster; without an address the sweep runs only on this machine."
        ) from None
