"""What every engine promises: each missing run once, whatever interrupts the sweep."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from proxsps.sweep import batched, engines, pool
from proxsps.sweep.engines import ENGINES, Batched, Engine, Processes, Single
from proxsps.sweep.spec import RunResult, RunSpec, grid
from proxsps.sweep.store import Store

SAME = pd.testing.assert_frame_equal


def quiet(runs: int) -> None:
    """Hear of progress, and say nothing."""


def everything(engine: Engine, specs: list[RunSpec], done: set[str] | None = None) -> list[RunResult]:
    return [result for results in engine.run(specs, done or set(), quiet) for result in results]


def small_grid(problem: Any, seeds: int = 5) -> list[RunSpec]:
    return grid(problem, {"prox-sps": [5.0, 1.0], "sps": [5.0], "sgd": [0.1]}, [1e-3, 1e-2], ["sqrt"], seeds, 2)


def identical(one: RunResult, other: RunResult) -> bool:
    same = np.array_equal(one.metrics, other.metrics, equal_nan=True)
    return same and one.spec == other.spec and np.array_equal(one.zetas, other.zetas, equal_nan=True)


# All engines


def test_engines_are_found_by_name() -> None:
    assert {"batched": Batched, "single": Single, "processes": Processes} == ENGINES


@pytest.mark.parametrize("engine", [Batched(size=8), Single()], ids=["batched", "single"])
def test_every_missing_run_is_run_once_in_order(kit: Any, engine: Engine) -> None:
    specs = small_grid(kit.tiny(), seeds=3)
    done = {spec.id for spec in specs[3:9]}
    assert [result.spec for result in everything(engine, specs)] == specs
    assert [result.spec for result in everything(engine, specs, done)] == specs[:3] + specs[9:]
    assert everything(engine, specs, {spec.id for spec in specs}) == []


@pytest.mark.parametrize("engine", [Batched(size=8), Single()], ids=["batched", "single"])
def test_progress_sums_to_all_epochs(kit: Any, engine: Engine) -> None:
    specs, heard = small_grid(kit.tiny(), seeds=2), []
    for _ in engine.run(specs, set(), heard.append):
        pass
    assert sum(heard) == sum(spec.epochs for spec in specs)


def test_processes_without_anything_to_do_start_none(kit: Any) -> None:
    begin = time.monotonic()
    assert everything(Processes(workers=2), [kit.spec()], {kit.spec().id}) == []
    assert time.monotonic() - begin < 0.5  # a process that imports torch takes longer


def test_a_sweep_that_is_interrupted_gives_the_threads_back(kit: Any) -> None:
    def interrupt(runs: int) -> None:
        during.append(torch.get_num_threads())
        raise KeyboardInterrupt

    before, during = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(Batched().run([kit.spec()], set(), interrupt))
        assert (during, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


# Batches


def sizes(batches: list[list[RunSpec]]) -> list[int]:
    return [len(batch) for batch in batches]


def test_batches_are_of_equal_size_and_in_order(kit: Any) -> None:
    specs = small_grid(kit.tiny())  # 40 runs
    for size in (1, 7, 39, 40, 1000):
        batches = list(Batched(size).batches(specs))
        assert [spec for batch in batches for spec in batch] == specs
        assert max(sizes(batches)) <= size
        assert len(batches) == -(-40 // min(size, 40))
    assert sizes(list(Batched(39).batches(specs))) == [20, 20]


def test_a_batch_never_mixes_problems_or_epochs(kit: Any) -> None:
    specs = [kit.spec(seed=seed) for seed in range(3)]
    specs += [kit.spec(seed=seed, epochs=3) for seed in range(2)]
    specs += [kit.spec(kit.tiny(N=80), seed=seed) for seed in range(4)]
    assert sizes(list(Batched().batches(specs))) == [3, 2, 4]
    assert [result.spec for result in everything(Batched(), specs)] == specs


def test_batches_do_not_depend_on_what_is_done(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = small_grid(kit.tiny())
    seen: list[list[RunSpec]] = []

    def record(batch: list[RunSpec], advance: Callable[[int], None], saved: None) -> list[RunResult]:
        seen.append(list(batch))
        return [RunResult(spec, np.ones((2, 5)), np.ones((2, 3))) for spec in batch]

    monkeypatch.setattr(engines, "run_batched", record)
    whole = list(Batched(10).batches(specs))
    done = {spec.id for spec in [*whole[0], *whole[2][:4]]}
    results = everything(Batched(10), specs, done)
    assert seen == whole[1:]  # of the third, six runs are missing, and all ten are run
    assert [result.spec for result in results] == [spec for spec in specs if spec.id not in done]


def test_memory_bounds_the_size_of_a_batch(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = small_grid(kit.tiny())
    problem = specs[0].problem
    footprint = engines._footprint(specs[0])
    params = sum(value.nbytes for value in problem.start().values())
    validation = sum(array.nbytes for array in problem.validation_data(0))
    assert footprint >= 4 * params + validation  # point, gradient and two moments, and data of its own
    for runs in (1, 7, 13):
        monkeypatch.setattr(engines, "MEMORY", runs * footprint)
        batches = list(Batched().batches(specs))
        assert max(sizes(batches)) <= runs
        assert [spec for batch in batches for spec in batch] == specs
    monkeypatch.setattr(engines, "MEMORY", footprint // 2)  # even where one run is too large, it is run
    assert sizes(list(Batched().batches(specs))) == [1] * 40


@pytest.fixture
def two_long_batches(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs that count as many and as long, on a machine with two cores."""
    monkeypatch.setattr(batched, "LARGE", 1)
    monkeypatch.setattr(engines, "LONG", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield small_grid(kit.tiny(), seeds=1)
    torch.set_num_threads(before)


def test_large_batches_are_halves_whatever_is_done(two_long_batches: list[RunSpec], kit: Any) -> None:
    assert sizes(list(Batched().batches(two_long_batches))) == [4, 4]
    assert sizes(list(Batched().batches(two_long_batches[:1]))) == [1]


@pytest.mark.usefixtures("quick_pool")
def test_long_batches_side_by_side_give_bitwise_what_one_thread_gives(
    two_long_batches: list[RunSpec], tmp_path: Path
) -> None:
    specs, heard = two_long_batches, []
    engine = Batched(processes=True).saving(tmp_path)
    together = {r.spec.id: r for results in engine.run(specs, set(), heard.append) for r in results}
    assert sum(heard) == sum(spec.epochs for spec in specs)
    assert list(tmp_path.iterdir()) == [], "no state is left behind"
    rest = {r.spec.id: r for r in everything(engine, specs, {spec.id for spec in specs[:5]})}
    assert list(rest) == [spec.id for spec in specs[5:]]
    torch.set_num_threads(1)
    alone = everything(engine, specs)
    assert len(alone) == len(together) == 8
    assert all(identical(result, together[result.spec.id]) for result in alone)
    assert all(identical(result, together[key]) for key, result in rest.items())


def test_own_problems_stay_in_this_process(
    two_long_batches: list[RunSpec], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their loss may be a lambda, which cannot be sent; and a script may lack what a new process needs."""
    problem = kit.network()
    problem._loss = lambda outputs, targets: (outputs - targets).square().mean()
    monkeypatch.setattr(pool, "_Worker", None)
    assert len(everything(Batched(processes=True), small_grid(problem, seeds=1))) == 8
    assert len(everything(Batched(), two_long_batches)) == 8, "unless asked for, no process is started"


def test_a_larger_problem_has_a_larger_footprint(kit: Any) -> None:
    base = engines._footprint(kit.spec(kit.tiny()))
    for problem in (kit.tiny(r=8), kit.tiny(N=600)):
        assert engines._footprint(kit.spec(problem)) > base
    assert engines._footprint(kit.spec(kit.tiny(dtype="float32"))) < base


# Kills and interrupts


def wait_for(store: Callable[[], int], runs: int, process: subprocess.Popen[str], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while store() < runs:
        if process.poll() is not None:
            pytest.fail(f"The sweep ended too early:\n{process.communicate()[1]}")
        if time.monotonic() > end:
            pytest.fail("The sweep stored nothing.")
        time.sleep(0.02)


def stored(folder: Path) -> int:
    """Runs in a store that another process may be writing."""
    file = folder / "runs.parquet"
    return pd.read_parquet(io.BytesIO(file.read_bytes()))["run"].nunique() if file.exists() else 0


SWEEP = """
import sys, time
from pathlib import Path
from proxsps.problems import matrix_fac1
from proxsps.sweep.engines import Batched
from proxsps.sweep.spec import grid
from proxsps.sweep.store import Store

lrs = {"prox-sps": [5.0, 1.0], "sps": [5.0], "sgd": [0.1]}
specs = grid(matrix_fac1(N=60), lrs, [1e-3, 1e-2], ["sqrt"], 5, 2)
store = Store(Path(sys.argv[1]), "tiny")
for results in Batched(10).run(specs, store.done, lambda runs: time.sleep(0.2)):
    store.add(results)
"""


def sweep(folder: Path, specs: list[RunSpec]) -> Store:
    store = Store(folder, "tiny")
    for results in Batched(10).run(specs, store.done, quiet):
        store.add(results)
    return Store(folder, "tiny")


def test_a_killed_sweep_is_taken_up_again(kit: Any, tmp_path: Path) -> None:
    specs = small_grid(kit.tiny(dtype="float32"))
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    process = kit.script(tmp_path / "sweep.py", SWEEP, killed)
    wait_for(lambda: stored(killed), 1, process)
    process.kill()
    process.communicate(timeout=10)
    before = stored(killed)
    assert before in (10, 20, 30)  # whole batches, in the middle of the sweep

    again, whole = sweep(killed, specs), sweep(undisturbed, specs)
    assert again.done == {spec.id for spec in specs}
    assert len(again.runs) == 40 * 2
    assert not again.runs.duplicated(["run", "epoch"]).any()
    assert not again.steps.duplicated(["run", "step"]).any()
    SAME(again.runs, whole.runs, check_exact=True)
    SAME(again.steps.reset_index(drop=True), whole.steps.reset_index(drop=True), check_exact=True)


POOL = """
import sys
from pathlib import Path

if __name__ == "__main__":
    from proxsps.problems import matrix_fac1
    from proxsps.sweep.engines import Processes
    from proxsps.sweep.spec import RunSpec
    from proxsps.sweep.store import Store

    problem = matrix_fac1(N=20)
    # three short runs, then some that would take minutes
    specs = [RunSpec(problem, "sgd", "sqrt", 0.1, 0.0, seed, 1 if seed < 3 else 200_000) for seed in range(8)]
    store = Store(Path(sys.argv[1]), "tiny")
    try:
        for results in Processes(workers=int(sys.argv[2])).run(specs, store.done, lambda runs: None):
            store.add(results)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "process"])
def test_an_interrupt_keeps_what_was_finished(kit: Any, tmp_path: Path, whole_group: bool) -> None:
    """A terminal interrupts the pool's processes as well, `kill -INT` only the one that was named."""
    folder = tmp_path / "store"
    process = kit.script(tmp_path / "pool.py", POOL, folder, 2 if whole_group else 1)
    try:
        wait_for(lambda: stored(folder), 3, process)
        time.sleep(0.2)  # by now long runs are under way
        begin = time.monotonic()
        if whole_group:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=6)
        assert time.monotonic() - begin < 6
    except subprocess.TimeoutExpired:
        pytest.fail("The pool did not end within 6 seconds of the interrupt.")
    finally:
        if process.poll() is None or not whole_group:
            _end_group(process.pid)
        process.communicate(timeout=10)
    assert process.returncode == 130
    kept = Store(folder, "tiny")
    assert sorted(kept.runs["seed"]) == [0, 1, 2]
    assert set(kept.runs["status"]) == {"ok"}


def _end_group(group: int) -> None:
    """End what the script above may have left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
