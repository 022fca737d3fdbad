"""`proxsps train` as a user meets it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from functools import partial

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.cli.experiments import _chosen
from proxsps.cli.training_run import _Bar
from proxsps.experiments import EXPERIMENTS, deep
from proxsps.experiments.variants import Options
from proxsps.methods import METHODS
from proxsps.problems.images import _loaded
from proxsps.training import Watch, train

TINY = ["--width=2", "--size=8", "--images=80", "--validation-images=30", "--batch-size=16", "--device=cpu"]
NAME = "synthetic-resnet8"


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, ["train", *words])


def test_help_teaches(call):
    text = call("--help").output
    for word in ("cifar10-resnet110", "torchrun", "--weight-decay", "adaptive", "continues from it", "PROXSPS_DATA"):
        assert word in text
    assert "\\" not in text  # marks of a raw docstring


def test_a_run_is_kept_and_not_run_again(call, tmp_path, kit):
    first = call(NAME, *TINY, "--epochs", "2")
    assert first.exit_code == 0, first.output
    assert "epoch 2/2: loss" in first.stderr
    assert "After 2 epochs: accuracy" in first.stdout
    store = tmp_path / "out" / "train" / NAME / "runs.parquet"
    before = store.read_bytes()
    again = call(NAME, *TINY, "--epochs", "2")
    assert "epoch" not in again.stderr
    assert again.stdout == first.stdout
    assert store.read_bytes() == before
    call(NAME, *TINY, "--epochs", "2", "--method", "adamw")
    runs = pd.read_parquet(store)
    assert runs.groupby("method")["schedule"].first().to_dict() == {"adamw": "constant", "prox-sps": "sqrt"}
    assert runs.groupby("method")["lr"].first().to_dict() == {"adamw": 1e-3, "prox-sps": 1.0}
    result = train(kit.spec(epochs=2))
    assert runs.query("method == 'prox-sps'")["objective"].tolist() == pytest.approx(result.metrics[:, 0].tolist())


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.rateless and method.runs])
def test_methods_without_a_learning_rate_train_and_their_lr_is_a_factor(call, kit, method):
    row = json.loads(call(NAME, *TINY, "--epochs", "1", "--method", method, "--json").stdout)
    assert (row["method"], row["schedule"], row["lr"], row["status"]) == (method, "constant", 1.0, "ok")
    still = json.loads(call(NAME, *TINY, "--epochs", "1", "--method", method, "--lr", "0", "--json").stdout)
    assert still["model_norm"] != row["model_norm"]
    start = math.sqrt(sum(float(p.double().square().sum()) for p in kit.tiny().start().values()))
    assert still["model_norm"] == pytest.approx(start, rel=1e-6)


def test_a_run_goes_on_from_its_checkpoint(call, tmp_path):
    call(NAME, *TINY, "--epochs", "1", "--checkpoint", "run.pt")
    result = call(NAME, *TINY, "--epochs", "2", "--checkpoint", "run.pt")
    assert "Continuing after epoch 1." in result.stderr
    assert "epoch 2/2" in result.stderr
    assert "epoch 1/2" not in result.stderr


def test_the_method_of_the_paper_under_both_names(call):
    rows = [
        json.loads(call(NAME, *TINY, "--epochs", "1", "--method", m, "--json").stdout) for m in ("proxsps", "prox-sps")
    ]
    assert rows[0] == rows[1]
    assert rows[0]["method"] == "prox-sps"
    assert 0 <= rows[0]["val_accuracy"] <= 1
    row = json.loads(call(NAME, *TINY, "--epochs", "1", "--method", "adamw", "--json").stdout)
    assert row["zeta_median"] is None


def test_divergence_is_said(call):
    result = call(NAME, *TINY, "--epochs", "1", "--method", "sgd", "--lr", "1e30")
    assert result.exit_code == 0
    assert "Diverged" in result.stdout
    assert "--lr" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["synthetic-resnet9"], "depth must be 6n + 2"),
        (["cifar-resnet20"], "Did you mean 'cifar10-resnet20'?"),
        ([NAME, "--method", "adam"], "Unknown method 'adam'. Did you mean 'adamw'? Known names: prox-sps"),
        ([NAME, "--schedule", "cosine"], "Unknown schedule 'cosine'"),
        ([NAME, "--schedule", "adaptive", "--method", "adamw"], "which 'adamw' does not have"),
        ([NAME, "--size", "9"], "size must be 32, 16 or 8"),
        ([NAME, "--device", "abacus"], "The device 'abacus' cannot be used here"),
        (["imagenet32-resnet8", "--data", "empty"], "Imagenet32_train_npz.zip"),
        (["cifar10-resnet8", "--data", "nowhere"], "PROXSPS_DATA names nowhere, which is not a folder"),
        ([NAME, *TINY, "--checkpoint", "text.pt"], "text.pt has no digest: it is another kind of file"),
        ([NAME, *TINY, "--out", "text.pt"], "Choose another"),
    ],
)
def test_wrong_words_get_one_line(call, tmp_path, monkeypatch, words, message):
    monkeypatch.setenv("PROXSPS_DATA", "")  # restored afterwards: --data sets it
    _loaded.cache_clear()
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("text")
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert (tmp_path / "text.pt").read_text() == "text"
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_method_is_not_overwritten(call, tmp_path):
    call(NAME, *TINY, "--epochs", "1", "--checkpoint", "run.pt")
    before = (tmp_path / "run.pt").read_bytes()
    result = call(NAME, *TINY, "--epochs", "1", "--checkpoint", "run.pt", "--method", "sps")
    assert result.exit_code == 2
    assert "method 'prox-sps' instead of 'sps'" in result.stderr
    assert (tmp_path / "run.pt").read_bytes() == before


def test_an_interrupt_says_what_was_kept(call, monkeypatch):
    def interrupted(self, epoch, loss, optimizer):
        if epoch == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Bar, "step", interrupted)
    result = call(NAME, *TINY, "--epochs", "2")
    assert result.exit_code == 130
    assert "has the last complete epoch; the same command continues from there" in result.stderr


def test_the_bar_shows_loss_accuracy_tau_and_speed(kit, monkeypatch):
    monkeypatch.setattr("proxsps.cli.training_run.REFRESH", 0.0)
    console = Console(force_terminal=True, width=160, record=True, quiet=False, file=io.StringIO())
    spec = kit.spec(epochs=2)
    seen = []
    with _Bar(console, spec) as bar:

        class Both(Watch):
            def start(self, epochs, steps):
                bar.start(epochs, steps)

            def step(self, epoch, loss, optimizer):
                bar.step(epoch, loss, optimizer)
                task = bar.progress.tasks[0]
                seen.append((task.description, task.completed, task.total, task.fields["facts"]))

            def epoch(self, row):
                bar.epoch(row)

        train(spec, watch=Both())
    assert [completed for _, completed, _, _ in seen] == list(range(1, 11))
    assert {total for _, _, total, _ in seen} == {10}
    assert seen[-1][0] == "epoch 2/2"
    for word in ("loss", "accuracy", "%", "tau", "images/s"):
        assert word in seen[-1][3]


@pytest.fixture
def tiny_twin(kit, monkeypatch):
    """The twin of ResNet56 with its claims and figures, on tiny networks and synthetic images."""
    name = "cifar10-resnet56-twin"
    tiny_specs = partial(deep.specs, kit.tiny(), deep.LAMBDAS[-1:], deep.POLYAK)
    monkeypatch.setitem(EXPERIMENTS, name, dataclasses.replace(EXPERIMENTS[name], specs=tiny_specs))
    return name


@pytest.mark.usefixtures("quick_pool")
def test_an_experiment_is_run_drawn_decided_and_reported(tiny_twin, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # processes take seconds to start
    words = [tiny_twin, "--seeds", "1", "--epochs", "2", "--engine", "single"]  # the engine is its own
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert result.exit_code == 0, result.output
    assert "3 runs, 0 already done, about" in result.stderr
    assert "--engine is not used" in result.stderr
    runs = pd.read_parquet(tmp_path / "out" / tiny_twin / "runs.parquet")
    assert runs.groupby("method").size().to_dict() == {"adamw": 2, "prox-sps": 2, "sps": 2}
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 4
    assert "3 runs, 3 already done" in CliRunner().invoke(app, ["run", *words]).stderr


def test_all_leaves_out_what_takes_a_gpu():
    chosen = set(_chosen(["all"], Options()))
    assert "cifar10-resnet110-twin" in chosen
    assert not chosen & {"cifar10-resnet110", "cifar10-resnet56", "imagenet32-resnet110"}
    assert _chosen(["cifar10-resnet110"], Options()) == ["cifar10-resnet110"]
    more = _chosen(["all", "cifar10-resnet110", "flow"], Options())
    assert set(more) == chosen | {"cifar10-resnet110"}
    assert len(more) == len(set(more))


def test_an_experiment_without_its_data_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROXSPS_DATA", "")
    _loaded.cache_clear()
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["run", "imagenet32-resnet110", "--data", "empty"])
    assert result.exit_code == 2
    assert "Imagenet32_train_npz.zip" in result.stderr
    shown = CliRunner().invoke(app, ["data"]).output
    assert "cifar10: not there" in shown
    assert "imagenet32: not there" in shown
