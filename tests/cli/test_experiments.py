"""The command line as a user meets it: in a pipe, with wrong words, interrupted, and again."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from proxsps.cli import app, running
from proxsps.experiments import EXPERIMENTS
from proxsps.experiments.symbols import symbols

SMALL = ["--seeds", "1", "--epochs", "2"]
RUNS = 30  # settings of matrix-fac1, one seed each


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(app, list(words))


def test_help_teaches(call):
    text = call("--help").output
    for command in ("list", "run", "figures", "claims", "report", "reproduce", "data"):
        assert command in text
    assert "as published" in call("run", "--help").output


def test_list_names_every_experiment(call):
    rows = json.loads(call("list", "--json").output)
    assert [row["name"] for row in rows] == list(EXPERIMENTS)
    assert next(row for row in rows if row["name"] == "matrix-fac1")["runs"] == 300
    assert next(row for row in rows if row["name"] == "sensor")["runs"] == 63
    assert "matrix-fac2-stability" in call("list").output


def test_reproduce_runs_draws_decides_and_reports(call, tmp_path):
    result = call("reproduce", "matrix-fac1", "matrix-fac1-stability", "flow", *SMALL)
    assert result.exit_code == 0, result.output
    runs = pd.read_parquet(tmp_path / "out" / "matrix-fac1" / "runs.parquet")
    assert runs.groupby("run").size().tolist() == [2] * RUNS
    report = (tmp_path / "out" / "report.html").read_text()
    assert "Flow of the deterministic methods" in report
    assert report.count("<svg") == 12
    assert report.index('aria-label="Matrix factorisation. Left') < report.index('id="claims"')  # the overview is first
    lines = result.stdout.splitlines()  # after two epochs most claims fail
    assert re.match(r"\d+ of 23 claims hold.* On the paper's own curves: 15 of 17, 2 in part\.", lines[0])
    assert "matrix-fac1-stability, more-robust: does not hold (paper's own curves: holds)" in lines
    assert "Report: out/report.html" in result.output


def test_reproduce_writes_each_figure_once_for_the_page_and_as_files(call, tmp_path):
    result = call("reproduce", "matrix-fac1-stability", "flow", *SMALL, "--format", "pdf")
    assert result.exit_code == 0, result.output
    report = (tmp_path / "out" / "report.html").read_text()
    for name, drawings in (("matrix-fac1-stability", ["objective", "validation"]), ("flow", ["streamlines"])):
        files = {path.name: path for path in (tmp_path / "out" / name / "figures").iterdir()}
        assert sorted(files) == sorted(f"{drawing}.{kind}" for drawing in drawings for kind in ("pdf", "svg"))
        for drawing in drawings:
            shape = re.search(r' d="(M [^"]+)"', files[f"{drawing}.svg"].read_text())[1]
            assert shape in report, "the page shows the same drawing"
            assert files[f"{drawing}.pdf"].read_bytes().startswith(b"%PDF")
        assert f"Figures: out/{name}/figures" in result.output


def test_if_the_process_that_draws_dies_this_one_draws(call, tmp_path, monkeypatch):
    killed = []

    def run_and_kill(*arguments):
        summary = run(*arguments)
        for child in multiprocessing.active_children():
            killed.append(child.pid)
            child.kill()
        return summary

    run = running.run
    monkeypatch.setattr(running, "run", run_and_kill)
    result = call("reproduce", "matrix-fac1-stability", *SMALL)
    assert result.exit_code == 0, result.output
    assert killed
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 2
    assert len(list((tmp_path / "out" / "matrix-fac1-stability" / "figures").iterdir())) == 2


def test_an_error_in_the_process_that_draws_is_one_line(call, tmp_path):
    (tmp_path / "out" / "matrix-fac1-stability").mkdir(parents=True)
    (tmp_path / "out" / "matrix-fac1-stability" / "figures").write_text("a file where a folder should be")
    result = call("reproduce", "matrix-fac1-stability", *SMALL)
    assert result.exit_code == 2
    assert "figures cannot be used" in result.stderr
    assert "Traceback" not in result.output
    assert not multiprocessing.active_children()


def test_the_process_that_draws_loads_no_torch_and_ends_with_the_command(tmp_path):
    """Killed, the command leaves no process behind."""
    code = """
import os, sys, time
from proxsps.cli.reporting import _Artist
if __name__ == "__main__":
    artist = _Artist()
    print(artist._process.pid, flush=True)
    time.sleep(60)
"""
    (tmp_path / "command.py").write_text(code)
    command = [sys.executable, str(tmp_path / "command.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        assert loads(child, "_image", 30), "matplotlib is loaded before anything is handed over"
        assert not loads(child, "libtorch", 0)
        process.kill()
    assert gone(child, 10)


def loads(pid: int, library: str, seconds: float) -> bool:
    """Whether a process maps a library into its memory, now or within some seconds."""
    maps = Path(f"/proc/{pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    deadline = time.monotonic() + seconds
    while library not in maps.read_text():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True  # ended, but its parent is gone and nobody has asked for its code
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_second_run_does_nothing_and_more_seeds_add(call, tmp_path):
    first = json.loads(call("run", "matrix-fac1", *SMALL, "--json").stdout)
    before = (tmp_path / "out" / "matrix-fac1" / "runs.parquet").read_bytes()
    again = json.loads(call("run", "matrix-fac1", *SMALL, "--json").stdout)
    assert (first[0]["ran"], again[0]["ran"]) == (RUNS, 0)
    assert (tmp_path / "out" / "matrix-fac1" / "runs.parquet").read_bytes() == before
    more = json.loads(call("run", "matrix-fac1", "--seeds", "2", "--epochs", "2", "--json").stdout)
    assert (more[0]["runs"], more[0]["ran"]) == (2 * RUNS, RUNS)


def test_figures_and_claims_come_from_the_store(call, tmp_path):
    call("run", "matrix-fac1-stability", *SMALL)
    drawn = call("figures", "matrix-fac1-stability", "--format", "png").output.split()
    assert [path.rsplit("/", 1)[1] for path in drawn] == ["objective.png", "validation.png"]
    assert all((tmp_path / path).stat().st_size > 10_000 for path in drawn)
    rows = json.loads(call("claims", "matrix-fac1-stability", "--json").output)
    assert {row["name"] for row in rows} >= {"proxsps-converges", "sps-stalls", "sgd-diverges"}


def test_strict_fails_with_a_failing_claim_and_only_then(call):
    call("run", "matrix-fac1-stability", *SMALL)  # nothing has converged after two epochs
    rows = json.loads(call("claims", "matrix-fac1-stability", "--json").output)
    assert not all(row["holds"] for row in rows)
    assert call("claims", "matrix-fac1-stability").exit_code == 0
    assert call("claims", "matrix-fac1-stability", "--strict").exit_code == 1
    assert call("claims", "flow", "--strict").exit_code == 0


def test_claims_that_hold_are_printed_on_demand_only(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, long = call("claims", "flow", "conditioning").output, call("claims", "flow", "conditioning", "--all").output
    assert short == "3 of 3 claims hold.\n"
    assert long.startswith(short)
    for words in ("flow, more-direct: holds", "measured: ProxSPS", "rule: larger for ProxSPS than for SPS", "αₖ"):
        assert words in long
    assert max(map(len, long.splitlines())) <= 80


def test_letters_need_an_encoding_that_has_them():
    text = "best-lambda: alpha_0 >= 5, lambda = 1e-4, zeta_k"
    assert symbols(text) == "best-lambda: α₀ ≥ 5, λ = 1e-4, ζₖ"
    assert symbols(text, "ascii") == symbols(text, "latin-1") == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "matrx-fac1"], "Unknown experiment 'matrx-fac1'. Did you mean 'matrix-fac1'?"),
        (["claims", "matrix-fac1"], "Run it first: proxsps run matrix-fac1"),
        (["run", "matrix-fac1", "--out", "file", *SMALL], "Choose another folder with --out"),
    ],
)
def test_wrong_words_get_one_line(call, tmp_path, words, message):
    (tmp_path / "file").write_text("not a folder")
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert (tmp_path / "file").read_text() == "not a folder"


def test_unknown_option_values_are_refused_by_name(call):
    result = call("run", "matrix-fac1", "--engine", "batchd")
    assert result.exit_code == 2
    assert "batched" in result.output


def test_runs_of_different_length_are_not_mixed(call):
    call("run", "matrix-fac1", "--seeds", "1", "--epochs", "1")
    call("run", "matrix-fac1", "--seeds", "1", "--epochs", "2")
    result = call("claims", "matrix-fac1")
    assert result.exit_code == 2
    assert "cannot be compared" in result.stderr


def test_missing_sensor_data_says_what_to_do(call, monkeypatch, tmp_path):
    monkeypatch.setenv("PROXSPS_DATA", str(tmp_path / "nowhere"))
    for words in (["data"], ["run", "sensor", *SMALL]):
        result = call(*words)
        assert result.exit_code == 2
        assert "PROXSPS_DATA" in result.stderr
        assert "Traceback" not in result.output


def test_an_interrupt_keeps_what_was_finished(call, forked, tmp_path):
    """Ctrl-C while single runs are under way; the same command then goes on."""
    words = ["run", "matrix-fac1", "--set", "lam=1e-3", "--seeds", "1", "--epochs", "1", "--engine", "single"]
    command = [sys.executable, "-c", "from proxsps.cli import app; app()", *words]
    store, runs = tmp_path / "out" / "matrix-fac1-lam_0.001" / "runs.parquet", 6
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = forked(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 180
    while not store.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=30)
    kept = pd.read_parquet(store)
    assert process.returncode in (0, 130)  # 0 where all runs were finished before the signal came
    assert len(kept) == kept["run"].nunique() > 0
    done = call(*words, "--json")
    assert json.loads(done.stdout)[0]["ran"] == runs - len(kept), done.stderr
    if process.returncode == 130:
        assert "the same command continues from there" in text
        assert len(kept) < runs
    pd.testing.assert_frame_equal(pd.read_parquet(store).head(len(kept)), kept)
