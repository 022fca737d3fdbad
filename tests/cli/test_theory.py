"""`proxsps theory` as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from proxsps import theory
from proxsps.cli import app, console
from proxsps.experiments.theory import CHECKS

QUICK = ["smooth-c", "mapping-upper"]


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console.out, "width", 200)
    return lambda *words: CliRunner().invoke(app, ["theory", *words])


def test_help_teaches(call):
    text = call("--help").output
    for command in ("list", "problems", "verify", "steps"):
        assert command in text
    text = " ".join(call("verify", "--help").output.split())
    assert "99 % confidence" in text
    assert "every sample" in text


def test_list_and_problems(call):
    rows = json.loads(call("list", "--json").stdout)
    assert [row["name"] for row in rows] == [*CHECKS, "floor", "robustness"]
    text = call("list").output
    assert "E (psi(x+) - psi*)" in text  # brackets would be markup
    assert "needs subgradients bounded" in text
    assert "proxsps theory verify" in text
    constants = {row["problem"]: row for row in json.loads(call("problems", "--json").stdout)}
    assert constants["robust-regression"]["L"] is None  # not smooth; JSON has no infinity
    assert constants["phase-retrieval"]["rho"] == pytest.approx(2)
    assert "phase-retrieval" in call("problems").output


def test_verify_prints_draws_and_reports(call, tmp_path):
    result = call("verify", *QUICK, "--seeds", "20", "--format", "png", "--strict")
    assert result.exit_code == 0, result.output
    assert "noisy shrinkage" in result.output
    assert "2 of 2 bounds hold." in result.output
    folder = tmp_path / "out" / "theory"
    assert sorted(path.name for path in folder.iterdir()) == ["checks.csv", "rates.png", "report.html", "tightness.png"]
    report = (folder / "report.html").read_text()
    assert report.count("<svg") == 2
    assert "2 of 2 claims hold" in report


def test_verify_of_one_step_inequalities_draws_no_rates(call, tmp_path):
    rows = json.loads(call("verify", "mapping-upper", "--json", "--out", "here").stdout)
    assert [row["check"] for row in rows] == ["mapping-upper"] * 4
    assert all(row["holds"] and row["measured"] <= row["bound"] and row["truncated"] is None for row in rows)
    assert not (tmp_path / "here" / "rates.svg").exists()
    assert (tmp_path / "here" / "tightness.svg").exists()


def test_verify_of_a_study_prints_its_claims(call, tmp_path):
    result = call("verify", "robustness", "--seeds", "2")
    assert "1 of 1 claims hold." in result.output
    assert (tmp_path / "out" / "theory" / "robustness.svg").stat().st_size > 10_000
    (found,) = json.loads(call("verify", "robustness", "--seeds", "2", "--json").stdout)
    assert found["name"] == "bounded-models-are-robust"


def test_strict_fails_when_a_bound_does(call, monkeypatch):
    wrong = theory.smooth_constant_step
    monkeypatch.setattr(theory, "smooth_constant_step", lambda *args, **kwargs: wrong(*args, **kwargs) / 100)
    assert call("verify", "smooth-c", "--seeds", "20").exit_code == 0
    result = call("verify", "smooth-c", "--seeds", "20", "--strict")
    assert result.exit_code == 1
    assert "NO" in result.output
    assert "0 of 1 bounds hold." in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "smoth-c"], "Unknown check 'smoth-c'. Did you mean 'smooth-c'?"),
        (["verify", "floo"], "Did you mean 'floor'?"),
        (["verify", "smooth-c", "--out", "file"], "Choose another folder with --out"),
        (["steps"], "Pass L (a smooth loss) or G (bounded subgradients), or both."),
    ],
)
def test_wrong_words_get_one_line(call, tmp_path, words, message):
    (tmp_path / "file").write_text("not a folder")
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out" / "theory" / "report.html").exists()


def test_steps_tells_what_is_allowed(call):
    text = call("steps", "--L", "4", "--lam", "0.1", "--beta", "1", "--D-sq", "1", "--K", "100").output
    assert "k_0 >= 80" in text
    assert "alpha <= 0.125" in text
    bound = theory.smooth_convex(100, alpha=0.125, L=4, beta=1, D_sq=1, theta=2)
    assert f"{bound:.4g}" in text
    assert "needs Delta" in text
    text = call("steps", "--L", "4", "--G", "3").output
    assert text.count("does not apply") == 3
    assert "Strong convexity of phi" in text
    assert "needs 0 < mu + lam" in text


def test_steps_for_weakly_convex_losses(call):
    constants = ["--rho", "1", "--G", "2", "--Delta", "1", "--K", "1000"]
    text = call("steps", *constants).output
    assert f"{theory.bounded_weakly_convex_alpha(K=1000, rho=1, G=2, Delta=1):.4g}" in text
    assert "below 0.5" in call("steps", "--rho", "1", "--G", "2").output
    text = call("steps", "--L", "4", "--beta", "1", "--lam", "0.1", *constants).output
    assert "eta = 0.5" in text
    alpha = theory.envelope_alpha(L=4, theta=2, eta=0.5, lam=0.1, rho=1)
    assert f"{alpha:.4g}" in text
    expected = theory.envelope_sqrt(1000, alpha=alpha, L=4, rho=1, lam=0.1, eta=0.5, beta=1, Delta=1, theta=2)
    assert f"{expected:.4g}" in text
    assert "needs theta > 1, got theta = 0.5" in call("steps", "--L", "1", "--theta", "0.5").output
    assert "needs a finite L >= 0, got L = -1" in call("steps", "--L", "-1").output
    assert "rho < 1/eta + lam" in call("steps", "--L", "4", "--rho", "5", "--eta", "1").output


def test_an_interrupt_leaves_nothing_behind(forked, tmp_path):
    code = "import sys; from proxsps.cli import app; print('ready', flush=True); app()"
    process = forked(
        [sys.executable, "-c", code, "theory", "verify"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 30
    while not (tmp_path / "out" / "theory").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted: no report was written." in text
    assert "Traceback" not in text
    assert list((tmp_path / "out" / "theory").iterdir()) == []
