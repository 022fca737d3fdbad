"""`proxsps sparsify` as a user meets it."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.problems.resnet import ResNet
from proxsps.sparsity import StrengthPath, load_shrunk, load_sparse, shrinking
from proxsps.sparsity.measure import costs
from proxsps.sparsity.points import Point
from proxsps.training.tasks import accuracy, digits, digits_task, task_named

TINY = ["--width=2", "--size=8", "--images=80", "--validation-images=30", "--batch-size=16", "--device=cpu"]
NETWORK = "synthetic-resnet8"


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    # Networks are timed for a second, which makes their times exact; a hundredth will do.
    monkeypatch.setattr(shrinking, "costs", lambda models, inputs, seconds: costs(models, inputs, seconds / 100))
    return lambda *words: CliRunner().invoke(app, ["sparsify", *words])


def test_help_teaches(call):
    text = call("--help").output
    for word in ("digits-mlp", "cifar10-resnet20", "--keep", "continues from them", "test data", "small.pt"):
        assert word in text


def test_digits_become_small_and_the_files_hold_it(call, tmp_path):
    words = [
        "digits-mlp",
        "--epochs=2",
        "--max-drop=0.3",
        "--keep=0.7",
        "--strengths=1e-3,3e-3,6e-3",
        "--json",
        "--no-polish",
    ]
    result = call(*words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    best = next(point for point in found["points"] if point["chosen"])
    assert best["size"] <= 0.7
    assert found["after"]["parameters"] == best["parameters"]
    assert found["difference"] < 1e-6
    assert found["epochs"] == {
        "dense": 2,
        "small": 2 * sum(point["strength"] <= best["strength"] for point in found["points"]),
    }
    assert found["bytes"]["dense"] == 4 * found["before"]["parameters"]
    folder = tmp_path / found["folder"]
    small = load_shrunk(digits_task().network(7), torch.load(folder / "small.pt", weights_only=True))
    # Chosen by one part of the data, scored by another.
    assert accuracy(small, digits_task().validation()) == pytest.approx(best["accuracy"])
    assert accuracy(small, digits_task().test()) == pytest.approx(found["test_accuracy"]["small"])
    dense = digits_task().network(0)
    dense.load_state_dict(torch.load(folder / "point-000.pt", weights_only=True)["model"])
    assert accuracy(dense, digits_task().test()) == pytest.approx(found["test_accuracy"]["dense"])
    assert json.loads((folder / "path.json").read_text()) == found["points"]
    state = load_sparse(folder / "small.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in small.state_dict().items())
    # The same command trains nothing again and says the same.
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("point-*.pt")}
    again = json.loads(call(*words).stdout)
    assert again["points"] == found["points"]
    assert {file.name: file.stat().st_mtime_ns for file in folder.glob("point-*.pt")} == before


def test_a_residual_network(call, tmp_path):
    result = call(NETWORK, *TINY, "--epochs=2", "--strengths=0.001,0.01", "--max-drop=1", "--lr=0.5")
    assert result.exit_code == 0, result.output
    assert "On test data, not used to choose anything: dense network" in result.stdout
    assert re.search(r"dense network [\d.]+% after 2 epochs, smaller network [\d.]+% after [468] epochs", result.stdout)
    dense = sum(tensor.nbytes for tensor in ResNet(8, 2, batch_norm=True).state_dict().values())
    assert f"bytes instead of {dense:,} (" in result.stdout
    assert "dense: accuracy" in result.stderr
    assert "strength 0.01: accuracy" in result.stderr
    assert "a shortcut pads or shifts the channels" in result.stdout
    (file,) = tmp_path.rglob("small.pt")
    load_shrunk(ResNet(8, 2, batch_norm=True), torch.load(file, weights_only=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits"], "Unknown problem 'digits'"),
        (["cifar-resnet20"], "Or 'digits-mlp'."),
        (["digits-mlp", "--strengths", "a,b"], "--strengths must be numbers with commas between them"),
        (["digits-mlp", "--strengths", "0"], "strengths must be positive, finite and growing"),
        (["digits-mlp", "--strengths", "1e-3,inf"], "strengths must be positive, finite and growing"),
        (["digits-mlp", "--keep", "2"], "keep must be a share between 0 and 1"),
        (["digits-mlp", "--max-drop", "-1"], "max_drop must be a number >= 0"),
        ([NETWORK, "--validation-images", "1"], "validation_images must be 0 (all) or at least 2, got 1"),
        (["digits-mlp", "--device", "abacus"], "The device 'abacus' cannot be used here"),
    ],
)
def test_wrong_words_get_one_line(call, tmp_path, words, message):
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("torch_pruning", "sparsity"), ("safetensors.torch", "sparsity"), ("sklearn.datasets", "experiments")],
)
def test_what_is_not_installed_is_said_before_anything_is_trained(call, monkeypatch, tmp_path, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    digits.cache_clear()
    result = call("digits-mlp")
    digits.cache_clear()
    assert result.exit_code == 2
    assert f"pip install '.[{extra}]'" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_everything_dead_is_said_and_the_dense_network_is_kept(call):
    result = call(NETWORK, *TINY, "--epochs=1", "--strengths=1e3", "--max-drop=1", "--kind=weights", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert "Everything is dead at strength 1e+03" in found["reason"]
    assert [point["chosen"] for point in found["points"]] == [True, False]


def test_options_of_images_are_not_those_of_digits():
    with pytest.raises(ValueError, match="digits-mlp has no options width"):
        task_named("digits-mlp", width=3)


def test_names_of_columns_break_between_words():
    from rich.console import Console

    points = [Point(0.1 * i, 0.9, 0.5, 0.51, 1_234_567, 20, 400) for i in range(2)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(StrengthPath(points, 1).table)
    lines = console.export_text().splitlines()
    for word in ("strength", "accuracy", "parameters", "weights", "units"):
        assert any(re.search(rf"\b{word}\b", line) for line in lines), word
