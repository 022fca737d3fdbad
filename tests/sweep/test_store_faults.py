"""Stores that two commands write, that were damaged, or that are not what a command takes them for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from proxsps._files import replace_file
from proxsps.cli import app
from proxsps.experiments import EXPERIMENTS
from proxsps.sweep import tables
from proxsps.sweep import tables as module
from proxsps.sweep.spec import METRICS, RunResult, RunSpec
from proxsps.sweep.store import Store, StoreError

NAME = "matrix-fac1"


def made(spec: RunSpec) -> RunResult:
    """A result that nobody has computed."""
    numbers = np.random.default_rng(int(spec.id, 16)).random((spec.epochs, len(METRICS)))
    return RunResult(spec, numbers, np.ones((spec.epochs, 3), dtype=np.float32))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a whole sweep, two epochs of each run."""
    folder = tmp_path_factory.mktemp("whole")
    Store(folder, NAME).add([made(spec) for spec in EXPERIMENTS[NAME].specs(1, 2)])
    return {name: (folder / name).read_bytes() for name in ("runs.parquet", "steps.parquet")}


@pytest.fixture
def folder(whole: dict[str, bytes], tmp_path: Path) -> Path:
    """A copy of it where commands look for it."""
    for name, content in whole.items():
        replace_file(tmp_path / "out" / NAME / name, content)
    return tmp_path / "out" / NAME


def error(folder: Path) -> str:
    with pytest.raises(StoreError) as caught:
        Store(folder, NAME)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Two commands on one store

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from proxsps.problems import matrix_fac1
from proxsps.sweep.spec import METRICS, RunResult
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store

folder, own, other = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
store = Store(folder / "store", "tiny")
(folder / own).touch()
while not (folder / other).exists():
    time.sleep(0.001)
for seed in range(40):
    # every tenth run is made by both
    method = "sgd" if seed % 10 == 0 else own
    spec = RunSpec(matrix_fac1(N=20), method, "sqrt", 0.1, 0.0, seed, 1)
    store.add([RunResult(spec, np.full((1, len(METRICS)), seed + 1.0), np.ones((1, 1), dtype=np.float32))])
"""


def test_two_commands_that_write_at_once_lose_nothing(kit: Any, tmp_path: Path) -> None:
    names = ("sps", "prox-sps")
    writers = [
        kit.script(tmp_path / f"{own}.py", WRITER, tmp_path, own, other)
        for own, other in zip(names, names[::-1], strict=True)
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    store = Store(tmp_path / "store", "tiny")
    assert store.runs["method"].value_counts().to_dict() == {"sps": 36, "prox-sps": 36, "sgd": 4}
    assert not store.runs.duplicated("run").any()
    assert (store.runs["objective"] == store.runs["seed"] + 1).all()
    assert not list((tmp_path / "store").glob("*.partial"))


def test_a_lock_that_is_never_given_back_ends_in_one_line(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    with module.FileLock(tmp_path / ".lock"), pytest.raises(StoreError, match="Another command has been writing"):
        Store(tmp_path, "tiny").add([made(kit.spec())])
    assert not (tmp_path / "runs.parquet").exists()


# Damage that keeps the size


@pytest.mark.parametrize("name", ["runs.parquet", "steps.parquet"])
def test_every_flipped_bit_is_noticed(whole: dict[str, bytes], folder: Path, name: str) -> None:
    """600 single bits all over the file; the last of them in the footer, which has no checksum of parquet's own."""
    content = whole[name]
    places = np.linspace(0, 8 * len(content) - 1, 500).astype(int)
    tail = 8 * len(content) - 1 - np.arange(0, 8 * 400, 32)
    for bit in (*places, *tail):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(damaged)
        with pytest.raises(StoreError, match=rf"^[^\n]*{name} is damaged[^\n]*$"):
            tables.read_table(folder / name)
    assert f"{name} is damaged" in error(folder)
    (folder / name).write_bytes(content)
    assert len(Store(folder, NAME).done) == 30


def test_pages_have_checksums_that_other_readers_check(whole: dict[str, bytes]) -> None:
    content = bytearray(whole["runs.parquet"])
    column = pq.ParquetFile(pa.BufferReader(bytes(content))).metadata.row_group(0).column(RUNS.index("objective"))
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(pa.BufferReader(bytes(content)), page_checksum_verification=True)


def test_a_store_of_the_first_version_is_read_and_gets_a_digest(folder: Path) -> None:
    for name in ("runs", "steps"):
        table = pq.read_table(folder / f"{name}.parquet")
        facts = {key: value for key, value in table.schema.metadata.items() if key != tables.DIGEST_KEY}
        pq.write_table(table.replace_schema_metadata({**facts, tables.KEY: b"1"}), folder / f"{name}.parquet")
    store = Store(folder, NAME)
    assert len(store.done) == 30
    store.add([made(EXPERIMENTS[NAME].specs(2, 2)[1])])
    assert tables.PLACE.search((folder / "runs.parquet").read_bytes())


# Tables that are not a store's

RUNS = ["run", "experiment", "method", "schedule", "lr", "weight_decay", "seed", "epoch", *METRICS, "alpha", "status"]
Change = Callable[[pd.DataFrame], pd.DataFrame]
UNUSABLE: dict[str, tuple[str, Change, str]] = {
    "a column is missing": ("runs", lambda t: t.drop(columns="objective"), "no column objective"),
    "a column is of another kind": ("runs", lambda t: t.assign(lr="1"), "column lr has the wrong type"),
    "a setting is missing": ("runs", lambda t: t.assign(lr=t["lr"].where(t.index > 3)), "constants of runs"),
    "rows are there twice": ("runs", lambda t: pd.concat([t, t[:2]]), "twice, out of order or not at all"),
    "an epoch is missing": ("runs", lambda t: t.drop(index=2), "twice, out of order or not at all"),
    "rows are of another experiment": ("runs", lambda t: t.assign(experiment="matrix-fac2"), "(matrix-fac2)"),
    "some rows are": ("runs", lambda t: t.assign(experiment=t["experiment"].where(t.index > 3, "x")), "(x)"),
    "a run has two step sizes": ("runs", lambda t: t.assign(lr=t["lr"] + t.index), "different constants"),
    "a loss is lost": ("runs", lambda t: t.assign(objective=t["objective"].where(t.index > 3)), "status"),
    "a status is unknown": ("runs", lambda t: t.assign(status="fine"), "status"),
    "steps have no zeta": ("steps", lambda t: t.drop(columns="zeta"), "no column zeta"),
    "steps have no run": ("steps", lambda t: t.drop(columns="run"), "no column run"),
    "steps of a run are missing": ("steps", lambda t: t[6:], "lacks steps of 1 of the 30 runs"),
    "the last step of all runs": ("steps", lambda t: t[t["epoch"] == 1], "lacks steps of 30 of the 30 runs"),
    "a step is there twice": ("steps", lambda t: pd.concat([t, t[:1]]), "twice, out of order or not at all"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_table_that_is_not_a_stores_gets_one_line(folder: Path, case: str) -> None:
    name, change, message = UNUSABLE[case]
    file = folder / f"{name}.parquet"
    tables.write_table(file, change(pd.read_parquet(file)))
    text = error(folder)
    assert str(file) in text
    assert message in text


def test_steps_that_are_gone(folder: Path) -> None:
    (folder / "steps.parquet").unlink()
    assert "lacks steps of 30 of the 30 runs" in error(folder)


# Commands on stores that are not whole


def cut(folder: Path, change: Change) -> None:
    """Change both tables alike."""
    for name in ("runs", "steps"):
        file = folder / f"{name}.parquet"
        tables.write_table(file, change(pd.read_parquet(file)))


def without_some(table: pd.DataFrame) -> pd.DataFrame:
    return table[~table["run"].isin(sorted(set(table["run"]))[:12])]


INCOMPLETE: dict[str, tuple[Change, str]] = {
    "interrupted": (without_some, f"12 of 30 runs are missing in out/{NAME}: run `proxsps run {NAME} --seeds 1 --ep"),
    "of another seed": (lambda t: t.assign(seed=3 + 10**9), "runs are missing"),
    "shortened": (lambda t: t[t["epoch"] == 1], "holds 30 runs that were shortened"),
    "one shortened": (lambda t: t[(t["epoch"] == 1) | (t["run"] != t["run"][0])], "runs of 1 and of 2 epochs"),
    "of other settings": (lambda t: t.assign(schedule="constant"), "30 of 30 runs are missing"),
    "with more settings": (
        lambda t: pd.concat([t, t.assign(run=t["run"] + "x", schedule="constant")]),
        "30 runs with settings that the experiment does not have",
    ),
    "of two versions": (lambda t: pd.concat([t, t.assign(run=t["run"] + "x")]), "more than one run of 30 settings"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_commands_name_what_is_wrong_with_a_store(folder: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    change, message = INCOMPLETE[case]
    cut(folder, change)
    monkeypatch.chdir(folder.parents[1])
    for command in ("claims", "figures", "report"):
        result = CliRunner().invoke(app, [command, NAME])
        assert result.exit_code == 2
        assert result.stdout == ""
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (folder / "figures").exists()


def test_a_whole_store_is_used(folder: Path) -> None:
    assert len(EXPERIMENTS[NAME].frames(folder.parent)["runs"]) == 60


def test_a_run_that_was_shortened_is_not_taken_as_done(folder: Path) -> None:
    specs = EXPERIMENTS[NAME].specs(1, 2)
    assert Store(folder, NAME).lacking(specs) == []
    cut(folder, lambda t: t[(t["epoch"] == 1) | (t["run"] != specs[4].id)])
    with pytest.raises(StoreError, match=f"1 of the 2 epochs of run {specs[4].id}"):
        Store(folder, NAME).lacking(specs)


def test_a_run_under_the_id_of_another_is_not_taken_as_done(folder: Path) -> None:
    specs = EXPERIMENTS[NAME].specs(1, 2)
    cut(folder, lambda t: t.assign(lr=t["lr"].where(t["run"] != specs[4].id, 0.5)))
    with pytest.raises(StoreError, match=f"run {specs[4].id} with wrong constants"):
        Store(folder, NAME).lacking(specs)


def test_what_another_command_has_added_counts_as_done(kit: Any, tmp_path: Path) -> None:
    """Both have opened the store before either has added anything."""
    one, other = (Store(tmp_path, "tiny") for _ in range(2))
    first, second = (dataclasses.replace(kit.spec(), seed=seed) for seed in (0, 1))
    one.add([made(first)])
    other.add([made(first), made(second)])
    assert other.done == {first.id, second.id} == Store(tmp_path, "tiny").done
    assert len(other.runs) == 4
