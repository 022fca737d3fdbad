"""Full disks, places that cannot be written to, numbers out of all proportion: one line each, before work starts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from faults import file_limit
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.cli.checks import PROBE, check_folder
from proxsps.cli.console import one_line_errors, printable

SMALL = ["--seeds", "1", "--epochs", "2"]
TINY = ["synthetic-resnet8", "--size=8", "--images=80", "--validation-images=30", "--batch-size=16", "--device=cpu"]
# Commands that write, and the longest part of their work.
WRITING = {
    "run": ["run", "matrix-fac1", "--seeds", "1", "--epochs", "20"],
    "figures": ["figures", "flow"],
    "report": ["report", "flow"],
    "reproduce": ["reproduce", "flow"],
    "train": ["train", *TINY, "--epochs", "1"],
    "sparsify": ["sparsify", *TINY, "--epochs", "1", "--strengths", "1e-3", "--max-drop", "1"],
    "verify": ["theory", "verify", "smooth-c", "--seeds", "2"],
}


@pytest.fixture
def call(monkeypatch, tmp_path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, list(words))


def assert_one_line(result: Any, *parts: str) -> None:
    lines = [line for line in result.stderr.splitlines() if "already done" not in line and "epoch " not in line]
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    assert not [part for part in parts if part not in lines[0]], lines[0]


@pytest.mark.parametrize("name", WRITING)
def test_a_disk_that_is_full_is_found_before_work_starts(call, name, tmp_path):
    with file_limit(PROBE // 2):
        result = call(*WRITING[name])
    assert_one_line(result, os.strerror(errno.EFBIG), "Choose another folder with --out")
    assert "already done" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in WRITING if name != "reproduce"])  # which does what the others do
def test_a_disk_that_becomes_full_is_one_line(call, name, tmp_path):
    with file_limit(PROBE):
        result = call(*WRITING[name], *(["--width", "24"] if name in ("train", "sparsify") else []))
    assert_one_line(result, os.strerror(errno.EFBIG))
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize("place", ["file", "file/below", "x" * 300, "nowhere/link"])
def test_places_that_are_no_folders(call, tmp_path, name, place):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "link").symlink_to("not-there/at-all")
    result = call(*WRITING[name], "--out", place)
    assert_one_line(result, f"Cannot use {place}", "Choose another folder with --out")
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("report", "report.html"),
        ("reproduce", "report.html"),
        ("verify", "report.html"),
        ("verify", "tightness.svg"),
        ("verify", "checks.csv"),
    ],
)
def test_a_folder_where_a_file_is_to_be_written(call, tmp_path, name, place):
    (tmp_path / "out" / place).mkdir(parents=True)
    result = call(*WRITING[name], "--out", "out")
    assert_one_line(result, f"Cannot write out/{place}: it is a folder.")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [place], "nothing was run"


def test_the_test_of_a_folder_leaves_nothing_behind(tmp_path):
    check_folder(tmp_path / "a" / "b")
    check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_devices_are_no_checkpoints(call):
    """Reading some of them never ends, and root could replace them by a file."""
    for device in ("/dev/full", "/dev/zero", "/dev/null"):
        if Path(device).exists():
            assert_one_line(call("train", *TINY, "--width=2", "--checkpoint", device), "Choose another place")
            assert Path(device).is_char_device()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "matrix-fac1", "--epochs", "100000000"], ["--epochs must be at most 1,000,000"]),
        (["run", "matrix-fac1", "--seeds", "100000000"], ["--seeds must be at most 10,000"]),
        (["run", "matrix-fac1", "--epochs", "9" * 400], ["--epochs must be at most", "a number of 400 digits"]),
        (["run", "matrix-fac1", "--epochs", "100000"], ["1,500,000,000 steps", "Choose fewer --epochs"]),
        (["reproduce", "matrix-fac1", "--epochs", "100000000"], ["--epochs must be at most"]),
        (["theory", "verify", "--seeds", "100000000"], ["--seeds must be at most 100,000"]),
        (["train", *TINY, "--epochs", "100000000"], ["--epochs must be at most 1,000,000"]),
        (["train", *TINY, "--seed", "9" * 30], ["--seed must be at most"]),
        (["train", *TINY, "--batch-size", "9" * 30], ["batch_size=999", "Choose a smaller one"]),
        (["train", *TINY, "--width", "9" * 11], ["width at most 1024"]),
        (["train", *TINY, "--images", "9" * 30], ["images must be between 0 (all) and 2000"]),
        (["train", *TINY, "--validation-images", "9" * 30], ["500 validation images, but 999"]),
        (["train", f"synthetic-resnet{'8' * 300}"], ["Unknown problem 'synthetic-resnet888"]),
        (["train", "synthetic-resnet60002"], ["depth is at most 1202"]),
        (["train", *TINY, "--device", "meta"], ["The device 'meta' cannot be used here", "--device cpu"]),
        (["train", *TINY, "--checkpoint", "x" * 300], ["cannot be written (File name too long)"]),
        (["train", "x" * 300], ["Unknown problem"]),
        (["run", "x" * 300], ["Unknown experiment"]),
        (["run", "all", "matrx-fac1"], ["Did you mean 'matrix-fac1'?"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_numbers_and_names_out_of_proportion(call, tmp_path, words, parts):
    assert_one_line(call(*words), *parts)
    assert list(tmp_path.iterdir()) == []


ODD = "a[/b] [red]:warning: [bold"


def test_paths_are_no_markup(call, tmp_path):
    for words, said in (
        (["report", "interpolation"], f"Report: {ODD}/report.html"),
        (["figures", "interpolation"], f"{ODD}/interpolation/figures/"),
        (["theory", "verify", "mapping-upper"], f"Report: {ODD}/report.html"),
        (["train", *TINY, "--width=2", "--epochs=1"], f"Rows: {ODD}/train/synthetic-resnet8/runs.parquet"),
    ):
        result = call(*words, "--out", ODD)
        assert result.exit_code == 0, result.output
        assert said in result.stdout
    (tmp_path / "file[").mkdir()
    (tmp_path / "file[/b]").write_text("")
    assert_one_line(call("report", "flow", "--out", "file[/b]"), "Cannot use file[/b]: Not a directory")
    assert_one_line(call("claims", "matrix-fac1", "--out", ODD), f"{ODD}/matrix-fac1 has no runs")


def test_letters_that_would_change_a_terminal_are_shown_as_codes(call, tmp_path):
    (tmp_path / "a\nb\x1b[31m").write_text("")
    assert_one_line(call("report", "flow", "--out", "a\nb\x1b[31m"), "\\x1b[31m")
    assert printable("é\udcff") == "é\\udcff"


def test_memory_that_is_not_there_is_one_line(call, monkeypatch):
    """Torch and NumPy have different errors for it."""
    monkeypatch.setattr("proxsps.problems.vision.WIDEST", 10**12)
    assert_one_line(call("train", *TINY, "--width", str(10**11)), "not enough memory")


def test_all_may_have_others_beside_it_and_each_is_taken_once(call):
    result = call("claims", "flow", "flow", "--json")
    assert result.stdout.count("experiment") == call("claims", "flow", "--json").stdout.count("experiment")


def test_version(call):
    from proxsps import __version__

    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"proxsps {__version__}\n")


def test_an_interrupt_before_anything_was_finished_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def interrupted() -> str:
        with pytest.raises(typer.Exit), one_line_errors(out):
            raise KeyboardInterrupt
        return capsys.readouterr().err

    assert interrupted() == "Interrupted. Nothing was finished yet.\n"
    (out / "matrix-fac1" / "batches").mkdir(parents=True)
    (out / "matrix-fac1" / ".lock").touch()
    assert "Nothing was finished yet" in interrupted()
    (out / "matrix-fac1" / "batches" / "state.pt").touch()
    assert "the same command continues from there" in interrupted()
