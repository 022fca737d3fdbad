"""Grids and experiments of your own on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.experiments import EXPERIMENTS, Experiment
from proxsps.experiments.grids import own_specs, parse_settings
from proxsps.experiments.standard import standard_drawings
from proxsps.regularizers import L1

pytestmark = pytest.mark.usefixtures("table")

MINE = """
import torch
from proxsps.experiments import Claim, Experiment
from proxsps.experiments.base import Drawing, over_seeds
from proxsps.experiments.standard import standard_drawings
from proxsps.methods import Method, add
from proxsps.problems import matrix_fac1
from proxsps.sweep.spec import grid


def make(params, run):
    return torch.optim.Adagrad(params, run.lr)


ADAGRAD = add(Method("adagrad", make, label="Adagrad"))


def specs(seeds, epochs):
    lrs = {ADAGRAD: [0.1], "prox-sps": [1.0]}
    return grid(matrix_fac1(N=60), lrs, [1e-3, 1e-2], ["constant"], seeds, epochs)


def better(frames):
    means = over_seeds(frames["runs"], "objective", last=1)
    ours, theirs = means["prox-sps"].min(), means["adagrad"].min()
    return Claim("better", "ProxSPS is better.", "objective", "smaller", f"{ours:.3g}, {theirs:.3g}", ours < theirs)


EXPERIMENT = Experiment(
    "adagrad", "Adagrad", "Against ProxSPS.", standard_drawings(specs(1, 1)), (better,), specs, seeds=2, epochs=2
)
"""


def call(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of your own; afterwards nothing of it is known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known, modules = dict.fromkeys(EXPERIMENTS), set(sys.modules)

    def write(text: str, name: str = "mine_of_a_test.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    yield write
    for name in set(EXPERIMENTS) - set(known):
        del EXPERIMENTS[name]
    for name in set(sys.modules) - modules:
        if name.endswith("_of_a_test"):
            del sys.modules[name]


# A grid of your own

SET = ["--set", "lr=0.5,1", "--set", "lam=1e-3", "--set", "method=prox-sps,prox-sgd", "--set", "prox-sgd.lr=0.1"]


def test_a_grid_is_run_drawn_and_reported(tmp_path: Path) -> None:
    words = ["matrix-fac1", *SET, "--seeds", "1", "--epochs", "1", "--out", str(tmp_path)]
    result = call("reproduce", *words)
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    runs = pd.read_parquet(place / "runs.parquet")
    found = set(runs[["method", "lr", "weight_decay", "schedule"]].itertuples(index=False, name=None))
    ours = {("prox-sps", lr, 1e-3, "sqrt") for lr in (0.5, 1.0)}
    assert found == ours | {("prox-sgd", 0.1, 1e-3, "sqrt")}
    assert {path.name for path in (place / "figures").iterdir()} >= {"objective.svg", "step-sizes.svg"}
    assert "There are no claims to check." in result.output
    assert "verdict" not in result.output
    assert "lr = 0.5, 1" in (tmp_path / "report.html").read_text()
    again = call("run", *words, "--json")
    assert json.loads(again.stdout)[0]["ran"] == 0


def test_an_l1_sweep_from_the_command_line(tmp_path: Path) -> None:
    words = ["--set", "regularizer=l1", "--set", "lam=0.1,1", "--set", "lr=1"]
    call("run", "matrix-fac1", *words, "--seeds", "1", "--epochs", "2", "--out", str(tmp_path))
    call("figures", "matrix-fac1", *words, "--out", str(tmp_path))
    (place,) = tmp_path.iterdir()
    runs = pd.read_parquet(place / "runs.parquet")
    assert set(runs["regularizer"]) == {L1.__name__}
    names = {path.stem for path in (place / "figures").iterdir()}
    assert {"nonzeros", "lambda-path-nonzeros", "step-sizes"} <= names


def test_drawings_tell_schedules_apart() -> None:
    settings = parse_settings(["schedule=sqrt,constant", "lam=0.1,1"])
    specs = own_specs(EXPERIMENTS["matrix-fac1"].specs, settings, 1, 1)
    names = {drawing.name for drawing in standard_drawings(specs)}
    assert {"objective-sqrt", "lambda-path-objective-constant", "step-sizes-sqrt"} <= names
    assert not any("nonzeros" in name for name in names)


def test_long_settings_have_a_short_folder(tmp_path: Path) -> None:
    lam = ",".join(f"{k}e-5" for k in range(1, 30))
    result = call("claims", "matrix-fac1", "--set", f"lam={lam}", "--out", str(tmp_path), code=2)
    assert "has no runs of matrix-fac1-own_" in result.output
    assert f"--set lam={lam}" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lr"], "--set needs KEY=VALUE"),
        (["lr="], "--set needs KEY=VALUE"),
        (["lr=1", "lr=2"], "was given twice"),
        (["lr=-1"], "takes numbers > 0 with commas between them; got '-1'"),
        (["lr=0"], "takes numbers > 0 with commas between them; got '0'"),
        (["sgd.lr=0"], "takes numbers > 0"),
        (["lam=-1"], "takes numbers >= 0 with commas between them; got '-1'"),
        (["lr=nan"], "got 'nan'"),
        (["lm=1"], "--set has no key 'lm'. Did you mean 'lam'?"),
        (["method=proxsps"], "Did you mean 'prox-sps'?"),
        (["adam.lr=1"], "Unknown method 'adam'"),
        (["schedule=cosine"], "takes constant, sqrt, adaptive; got 'cosine'"),
        (["regularizer=l3"], "--set regularizer=... takes l2, l1"),
    ],
)
def test_settings_that_are_wrong(settings: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_settings(settings)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flow", "--set", "lr=1"], "flow has none"),
        (["no-lr", "--set", "lr=1"], "no-lr has none"),
        (["matrix-fac1", "no-lr", "--set", "lr=1"], "no-lr has none"),
        (["matrix-fac1", "--set", "sgd.lr=1"], "is for a method that is not run"),
        (["matrix-fac1", "--set", "regularizer=l1,l2"], "takes one name"),
        (["matrix-fac1", "--set", "method=adamw", "--set", "regularizer=l1"], "AdamW has weight decay"),
        (["matrix-fac1", "--set", "method=sgd", "--set", "schedule=adaptive"], "'sgd' does not have"),
    ],
)
def test_settings_that_do_not_fit_an_experiment(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in " ".join(call("run", *words, "--out", str(tmp_path), code=2).output.split())


# An experiment of your own


def test_an_experiment_in_a_file(mine: Any, tmp_path: Path) -> None:
    file = mine(MINE)
    result = call("reproduce", file, "--out", "results")
    assert "of 1 claims hold" in result.output
    place = tmp_path / "results" / "adagrad"
    assert set(pd.read_parquet(place / "runs.parquet")["method"]) == {"adagrad", "prox-sps"}
    assert (place / "figures" / "lambda-path-objective.svg").exists()
    assert json.loads(call("run", file, "--out", "results", "--json").stdout)[0]["ran"] == 0
    other = call("claims", file, "--out", "elsewhere", code=2)
    assert "Run it first: proxsps run mine_of_a_test.py --out elsewhere" in " ".join(other.output.split())
    call("run", file, "--out", "results", "--set", "adagrad.lr=1", "--epochs", "1")
    assert (tmp_path / "results" / "adagrad-adagrad.lr_1" / "runs.parquet").exists()


def call_alone(forked: Any, words: list[str], folder: Path) -> str:
    """What a process that has not seen the file prints."""
    command = [sys.executable, "-c", "import sys; from proxsps.cli import app; app(sys.argv[1:])", *words]
    process = forked(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


def test_settings_may_name_the_methods_of_the_file(mine: Any, tmp_path: Path, forked: Any) -> None:
    """The file is loaded before the options are checked, in a process that does not know its methods yet."""
    file = mine(MINE)
    words = ["run", file, "--set", "method=adagrad", "--set", "adagrad.lr=0.5", "--epochs", "1", "--seeds", "1"]
    call_alone(forked, words, tmp_path)
    (store,) = (tmp_path / "out").glob("*/runs.parquet")
    assert set(pd.read_parquet(store)["method"]) == {"adagrad"}


def test_the_file_of_the_documentation_is_complete(mine: Any, tmp_path: Path, forked: Any) -> None:
    """The block that the page says to save, and nothing else."""
    page = (Path(__file__).parents[2] / "docs" / "your-own-experiment.md").read_text()
    (block,) = re.findall(r"Save this as `mine.py`:\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    mine(block, "mine.py")
    words = ["reproduce", "mine.py", "--seeds", "1", "--epochs", "1"]
    output = call_alone(forked, words, tmp_path)
    assert "of 1 claims hold." in output
    assert "adagrad: 1 of 5 seeds, 1 of 50 epochs: not the full experiment." in output


def test_a_claim_that_raises_an_error_does_not_hold_and_says_where(mine: Any) -> None:
    file = mine(MINE.replace('means["adagrad"].min()', 'means["adagard"].min()'))
    result = call("reproduce", file)
    line = MINE[: MINE.index('means["adagrad"].min()')].count("\n") + 1
    text = " ".join(result.output.split())
    assert "0 of 1 claims hold" in text
    assert "cannot be checked: KeyError: 'adagard'" in text
    assert str(line) in text


def test_changed_code_is_another_experiment(mine: Any, tmp_path: Path) -> None:
    """Results of the old code are not taken for those of the new one."""
    call("run", mine(MINE), "--out", "results")
    del sys.modules["mine_of_a_test"]
    file = mine(MINE.replace("Adagrad(params, run.lr)", "Adagrad(params, run.lr, eps=1e-3)"))
    result = call("claims", file, "--out", "results", code=2)
    assert "made by another version" in " ".join(result.output.split())
    assert json.loads(call("run", file, "--out", "results", "--json").stdout)[0]["ran"] == 4


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "missing_of_a_test.py", "is not a file"),
        ("x = 1", "empty_of_a_test.py", "defines no experiment"),
        ("x = 1\ny = undefined", "wrong_of_a_test.py", "wrong_of_a_test.py, line 2: NameError"),
        ("x = (", "syntax_of_a_test.py", "SyntaxError"),
        ("x = 1", "json.py", "the name of another module"),
        ("x = 1", "my-file.py", "a name that no module can have"),
        (MINE.replace('"adagrad", "Adagrad", "Against', '"flow", "Adagrad", "Against'), "flow_of_a_test.py", "'flow'"),
        (MINE.replace("seeds=2, ", ""), "seeds_of_a_test.py", "needs seeds >= 1"),
        (f"{MINE}OTHER = Experiment('adagrad', '', '', (), ())", "twice_of_a_test.py", "two experiments with the name"),
        (MINE + "DRAWING = Drawing('../a', '', None)", "up_of_a_test.py", "A drawing is named '../a'"),
    ],
    ids=lambda value: value if str(value).endswith(".py") else "",
)
def test_files_that_are_wrong(mine: Any, text: str | None, name: str, said: str) -> None:
    if text is not None:
        mine(text, name)
    assert said in " ".join(call("run", name, code=2).output.split())


OUTSIDE = ["..", ".", "", "../a", "a/b", "/a", "a\\b", "a\n", ".lock", ".a"]
TAKEN = ["all", "report.html", "train", "Sparsify", "theory"]


@pytest.mark.parametrize("name", OUTSIDE + TAKEN)
def test_names_that_would_be_written_where_they_must_not(mine: Any, tmp_path: Path, name: str) -> None:
    file = mine(MINE.replace('"adagrad", "Adagrad", "Against', f'{name!r}, "Adagrad", "Against'))
    before = sorted(tmp_path.rglob("*"))
    said = " ".join(call("reproduce", file, "--out", "results", code=2).output.split())
    assert "An experiment is named" in said
    assert "may only have letters" in said or "Choose another name" in said
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.mark.parametrize("name", ["a", "a.b-c_d", "2+2", "größe", "reports.html", "-", "training"])
def test_names_that_are_good(name: str) -> None:
    assert Experiment(name, "", "", (), ()).name == name
