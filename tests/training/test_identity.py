"""Everything that changes the numbers of a run changes its name: precision, device and data, besides its spec."""

from __future__ import annotations

import dataclasses
import io
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.experiments import EXPERIMENTS, deep
from proxsps.problems.vision import ImageClassification
from proxsps.sweep.store import Store
from proxsps.training import CheckpointError, train
from proxsps.training.loop import identify
from proxsps.training.ranks import TrainingRanks

CPU = TrainingRanks(torch.device("cpu"))
TINY = ["--width=2", "--size=8", "--batch-size=16", "--device=cpu", "--epochs=1"]


def write_images(folder: Path, seed: int) -> Path:
    """CIFAR-10 in parquet, with pixels of this seed."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    rng = np.random.RandomState(seed)
    (folder / "cifar10").mkdir(parents=True)
    for part in ("train", "test"):
        rows = []
        for _ in range(20):
            stream = io.BytesIO()
            image.fromarray(rng.randint(0, 256, (32, 32, 3), dtype=np.uint8)).save(stream, "png")
            rows.append({"bytes": stream.getvalue(), "path": ""})
        pq.write_table(pa.table({"img": rows, "label": np.arange(20) % 10}), folder / "cifar10" / f"{part}-0.parquet")
    return folder


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Two folders of data, and a cache of their own."""
    monkeypatch.setenv("PROXSPS_DATA", "")  # restored afterwards: --data sets it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return [write_images(tmp_path / name, seed) for seed, name in enumerate(("one", "two"))]


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["train", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def stored(name: str) -> pd.DataFrame:
    return pd.read_parquet(Path("out", "train", name, "runs.parquet"))


def test_another_precision_is_another_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, options = "synthetic-resnet8", [*TINY, "--images=80", "--validation-images=30"]
    first, low = call(name, *options), call(name, *options, "--amp")
    assert first != low
    assert stored(name)["run"].nunique() == 2
    assert stored(name)["objective"].nunique() == 2
    assert (call(name, *options), call(name, *options, "--amp")) == (first, low)
    assert len(stored(name)) == 2, "both are answered from the store"


def test_other_data_is_another_run(data):
    one, two = (call("cifar10-resnet8", *TINY, "--data", str(folder)) for folder in data)
    assert one != two
    assert stored("cifar10-resnet8")["objective"].nunique() == 2
    copy = write_images(Path("copy"), 0)  # the same images elsewhere
    assert call("cifar10-resnet8", *TINY, "--data", str(copy)) == one
    assert len(stored("cifar10-resnet8")) == 2


@pytest.mark.parametrize("change", ["precision", "data"])
def test_a_checkpoint_made_otherwise_is_refused_and_kept(kit, data, monkeypatch, change):
    problem = ImageClassification(depth=8, width=2, size=8, batch_size=16)
    file = Path("run.pt")
    monkeypatch.setenv("PROXSPS_DATA", str(data[0]))
    train(kit.spec(problem, epochs=1), file)
    before = file.read_bytes()
    if change == "data":
        monkeypatch.setenv("PROXSPS_DATA", str(data[1]))
    with pytest.raises(CheckpointError, match=f"belongs to another run: it has {change} '"):
        train(kit.spec(problem, epochs=2), file, amp=change == "precision")
    assert file.read_bytes() == before


def test_what_is_in_the_name_of_a_run(kit):
    plain, norm = kit.spec(), kit.spec(kit.tiny(batch_norm=True))
    gpu, pair = TrainingRanks(torch.device("cuda", 1)), TrainingRanks(torch.device("cpu"), 0, 2)
    names = {identify(plain, CPU).id, identify(plain, CPU, amp=True).id, identify(plain, gpu).id, plain.id}
    assert len(names) == 4
    assert identify(plain, gpu).id == identify(plain, TrainingRanks(torch.device("cuda", 0))).id
    assert identify(identify(plain, CPU), CPU).id == identify(plain, CPU).id
    # Processes share a batch, which changes rounding alone, unless each has its own statistics of it.
    assert identify(plain, pair).id == identify(plain, CPU).id
    assert identify(norm, pair).id != identify(norm, CPU).id


def test_an_experiment_is_not_mixed_from_two_data_sets(data, kit, monkeypatch):
    name = "cifar10-resnet56-twin"
    problem = ImageClassification(depth=8, width=2, size=8, batch_size=16)
    specs = partial(deep.specs, problem, deep.LAMBDAS[-1:], deep.POLYAK)
    monkeypatch.setitem(EXPERIMENTS, name, dataclasses.replace(EXPERIMENTS[name], specs=specs))
    monkeypatch.setenv("PROXSPS_DATA", str(data[0]))
    Store(Path("out", name), name).add([train(spec) for spec in specs(1, 1)])
    words = ["run", name, "--seeds", "1", "--epochs", "1"]
    again = CliRunner().invoke(app, words)
    assert "3 runs, 3 already done" in again.stderr
    other = CliRunner().invoke(app, [*words, "--data", str(data[1])])
    assert other.exit_code == 2
    assert "holds runs with the same settings on other data" in other.stderr
    assert len(other.stderr.splitlines()) == 1
