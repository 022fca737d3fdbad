"""Results on disk: complete after every addition, never torn, never lost."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from proxsps.sweep import store as module
from proxsps.sweep import tables
from proxsps.sweep.batched import run_batched
from proxsps.sweep.spec import METRICS, RunResult
from proxsps.sweep.store import Store, StoreError

SAME = pd.testing.assert_frame_equal


@pytest.fixture(scope="module")
def results(kit: Any) -> list[RunResult]:
    """Four runs, of which the last diverges; two of them with seed 0."""
    specs = [kit.spec(seed=0), kit.spec(seed=1), kit.spec(method="sps", seed=0), kit.spec(method="sgd", seed=1, lr=1e9)]
    return run_batched(specs)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("[!.]*")} if folder.exists() else {}


def documented(table: str) -> list[str]:
    """Columns named in the module's text."""
    text = module.__doc__ or ""
    if table == "runs":
        cells = re.findall(r"^\| ([a-z_, ]+) \|", text, re.MULTILINE)
        return [name for cell in cells if cell != "column" for name in cell.split(", ")]
    listed = re.search(r"with seed 0: ([\w\s,]+)\.", text)
    assert listed is not None
    return re.split(r",\s+", listed[1])


def test_a_round_trip(results: list[RunResult], tmp_path: Path) -> None:
    written = Store(tmp_path / "a" / "b", "tiny")
    assert written.done == set()
    written.add(results)
    read = Store(tmp_path / "a" / "b", "tiny")
    SAME(read.runs, written.runs, check_exact=True)
    SAME(read.steps.reset_index(drop=True), written.steps.reset_index(drop=True), check_exact=True)
    assert read.done == {result.spec.id for result in results}
    for result in results:
        rows = read.runs[read.runs["run"] == result.spec.id]
        assert list(rows["epoch"]) == [1, 2]
        assert np.array_equal(rows[list(METRICS)].to_numpy(), result.metrics, equal_nan=True)
        for name, value in result.spec.columns().items():
            assert set(rows[name]) == {value}
        assert set(rows["experiment"]) == {"tiny"}
        np.testing.assert_allclose(rows["alpha"], result.spec.lr / np.sqrt(rows["epoch"]), rtol=1e-15)
    assert sorted(file.name for file in (tmp_path / "a" / "b").glob("[!.]*")) == ["runs.parquet", "steps.parquet"]


def test_columns_are_the_documented_ones(results: list[RunResult], tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    store.add(results)
    assert list(store.runs.columns) == documented("runs")
    assert list(store.steps.columns) == documented("steps")
    assert pq.read_schema(tmp_path / "runs.parquet").names == documented("runs")
    assert pq.read_schema(tmp_path / "steps.parquet").names == documented("steps")


def test_status_tells_the_epoch_of_divergence(kit: Any, tmp_path: Path) -> None:
    metrics = np.ones((4, len(METRICS)))
    metrics[2:] = np.nan
    store = Store(tmp_path, "tiny")
    store.add([RunResult(kit.spec(epochs=4), metrics, np.ones((4, 3), dtype=np.float32))])
    assert list(store.runs["status"]) == ["ok", "ok", "diverged", "diverged"]
    assert store.runs["objective"].isna().tolist() == [False, False, True, True]


def test_a_diverged_run_is_stored_with_its_neighbours(results: list[RunResult], tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    store.add(results)
    status = store.runs.groupby("run")["status"].last()
    assert [status[result.spec.id] for result in results] == ["ok", "ok", "ok", "diverged"]


def test_steps_are_those_of_seed_0(results: list[RunResult], tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    store.add(results)
    assert set(store.steps["run"]) == {results[0].spec.id, results[2].spec.id}
    rows = store.steps[store.steps["run"] == results[0].spec.id]
    assert list(rows["step"]) == list(range(6))
    assert list(rows["epoch"]) == [1, 1, 1, 2, 2, 2]
    assert np.array_equal(rows["zeta"].to_numpy(), results[0].zetas.ravel())
    np.testing.assert_allclose(rows["alpha"], 2 / np.sqrt(rows["epoch"]), rtol=1e-15)


def test_a_store_without_seed_0_can_be_read_and_filled_up(results: list[RunResult], tmp_path: Path) -> None:
    Store(tmp_path, "tiny").add([results[1]])
    again = Store(tmp_path, "tiny")
    assert len(again.steps) == 0
    again.add([results[0]])
    assert len(Store(tmp_path, "tiny").steps) == 6


# Resuming


def test_adding_the_same_results_again_changes_nothing(results: list[RunResult], tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    store.add(results[:2])
    before = files(tmp_path)
    store.add(results[:2])
    Store(tmp_path, "tiny").add(results[:2])
    assert files(tmp_path) == before
    Store(tmp_path, "tiny").add(results)
    assert len(Store(tmp_path, "tiny").runs) == 8


def test_a_result_twice_in_one_addition_is_stored_once(results: list[RunResult], tmp_path: Path) -> None:
    store = Store(tmp_path, "tiny")
    store.add([results[0], results[0]])
    assert len(store.runs) == 2
    assert len(store.steps) == 6


def test_parts_make_the_whole(results: list[RunResult], tmp_path: Path) -> None:
    whole = Store(tmp_path / "whole", "tiny")
    whole.add(results)
    for result in results:
        Store(tmp_path / "parts", "tiny").add([result])
    parts = Store(tmp_path / "parts", "tiny")
    SAME(parts.runs, whole.runs, check_exact=True)
    SAME(parts.steps.reset_index(drop=True), whole.steps.reset_index(drop=True), check_exact=True)


def test_an_addition_reads_the_list_of_runs_once(results: list[RunResult], tmp_path: Path) -> None:
    """Reading it again for each result takes a time that grows with the square of the number of runs."""

    class Counting(Store):
        reads = 0

        @property
        def done(self) -> set[str]:
            type(self).reads += 1
            return super().done

    store = Counting(tmp_path, "tiny")
    store.add(results[:1])
    before = Counting.reads
    store.add(results)
    assert Counting.reads - before <= 1


def test_nothing_added_nothing_written(tmp_path: Path) -> None:
    Store(tmp_path / "new", "tiny").add([])
    assert not (tmp_path / "new").exists()


# Writes that were cut short


def test_a_partial_file_is_ignored(results: list[RunResult], tmp_path: Path) -> None:
    (tmp_path / "runs.123.partial").write_bytes(b"PAR1 half a file")
    store = Store(tmp_path, "tiny")
    assert store.done == set()
    store.add(results)
    assert Store(tmp_path, "tiny").done == {result.spec.id for result in results}


def test_steps_of_a_write_that_was_cut_short_are_left_out(results: list[RunResult], tmp_path: Path) -> None:
    """steps.parquet was replaced, then came the kill: runs.parquet does not know the last run."""
    Store(tmp_path / "old", "tiny").add(results[:1])
    Store(tmp_path / "new", "tiny").add(results)
    (tmp_path / "new" / "runs.parquet").write_bytes((tmp_path / "old" / "runs.parquet").read_bytes())
    cut = Store(tmp_path / "new", "tiny")
    assert cut.done == {results[0].spec.id}
    assert set(cut.steps["run"]) == cut.done
    cut.add(results)
    whole = Store(tmp_path / "new", "tiny")
    assert len(whole.runs) == 8
    assert len(whole.steps) == 12


def test_steps_alone_count_for_nothing(results: list[RunResult], tmp_path: Path) -> None:
    Store(tmp_path, "tiny").add(results)
    (tmp_path / "runs.parquet").unlink()
    cut = Store(tmp_path, "tiny")
    assert cut.done == set()
    assert len(cut.steps) == 0
    cut.add(results)
    assert len(Store(tmp_path, "tiny").steps) == 12


@pytest.mark.parametrize("broken", ["runs", "steps"])
def test_a_write_that_fails_leaves_the_old_files(
    results: list[RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    store = Store(tmp_path, "tiny")
    store.add(results[:1])
    before = files(tmp_path)
    sync = os.fsync

    def full(handle: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith(broken):
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        store.add(results)
    assert "\n" not in str(caught.value)
    assert files(tmp_path)["runs.parquet"] == before["runs.parquet"]
    assert Store(tmp_path, "tiny").done == {results[0].spec.id}
    # with room again, the same object takes what it could not write
    monkeypatch.undo()
    store.add(results)
    assert Store(tmp_path, "tiny").done == {result.spec.id for result in results}


def test_a_store_can_be_read_while_it_is_written(results: list[RunResult], tmp_path: Path) -> None:
    """A reader finds the old files or the new ones, never the footer of one and the rows of the other."""

    def write() -> None:
        for seed in range(40):
            spec = dataclasses.replace(results[0].spec, seed=seed)
            Store(tmp_path, "tiny").add([dataclasses.replace(results[0], spec=spec)])

    writer = threading.Thread(target=write)
    writer.start()
    counts = [0]
    while writer.is_alive():
        counts.append(len(Store(tmp_path, "tiny").done))
    writer.join()
    assert counts == sorted(counts)
    assert len(Store(tmp_path, "tiny").done) == 40


def test_a_run_that_is_added_between_two_reads_is_not_taken_for_damage(
    results: list[RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads steps first and runs later finds a run without steps."""
    Store(tmp_path, "tiny").add(results[:1])
    read, writer = tables.read_table, Store(tmp_path, "tiny")

    def read_slowly(path: Path) -> pd.DataFrame:
        table = read(path)
        monkeypatch.undo()
        writer.add([results[2]])
        return table

    monkeypatch.setattr(tables, "read_table", read_slowly)
    assert Store(tmp_path, "tiny").done == {results[0].spec.id}


# Stores that cannot be used


def message(folder: Path) -> str:
    """The error on opening a store, after which its files are as they were."""
    before = files(folder)
    with pytest.raises(StoreError) as caught:
        Store(folder, "tiny")
    assert files(folder) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["runs", "steps"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.99])
def test_a_truncated_file(results: list[RunResult], tmp_path: Path, name: str, keep: float) -> None:
    Store(tmp_path, "tiny").add(results)
    file = tmp_path / f"{name}.parquet"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    assert str(file) in message(tmp_path)
    file.write_bytes(content)
    assert len(Store(tmp_path, "tiny").runs) == 8


@pytest.mark.parametrize("name", ["runs", "steps"])
@pytest.mark.parametrize("version", [None, b"0", b"3"])
def test_another_version(results: list[RunResult], tmp_path: Path, name: str, version: bytes | None) -> None:
    Store(tmp_path, "tiny").add(results)
    file = tmp_path / f"{name}.parquet"
    metadata = {} if version is None else {tables.KEY: version}
    pq.write_table(pq.read_table(file).replace_schema_metadata(metadata), file)
    text = message(tmp_path)
    assert str(file) in text
    assert "another version" in text


def test_a_file_of_another_program(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "runs.parquet")
    assert "no version" in message(tmp_path)


@pytest.mark.parametrize("place", ["below a file", "/proc", "a name that is too long"])
def test_a_place_that_cannot_be_written(results: list[RunResult], tmp_path: Path, place: str) -> None:
    """Permissions do not stop the superuser; these places stop everybody."""
    (tmp_path / "file").write_text("mine")
    folders = {"below a file": tmp_path / "file" / "store", "/proc": Path("/proc/store")}
    folder = folders.get(place, tmp_path / ("x" * 300))
    with pytest.raises(StoreError, match="--out") as caught:
        Store(folder, "tiny").add(results)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"
