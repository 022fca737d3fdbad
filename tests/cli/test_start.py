"""What answers at once, and what is said where packages are missing. Each case is a process of its own.

Most are forks of one that has imported typer and rich, but nothing of this package and nothing large.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner
from warm import warmed

import proxsps
from proxsps import _install
from proxsps.cli import app, sparsity
from proxsps.cli.options import BATCH, EngineName
from proxsps.experiments import CATALOGUE, EXPERIMENTS
from proxsps.sweep import engines
from proxsps.training import tasks

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "pandas", "matplotlib", "pyarrow", "scipy", "jax"]

# Runs a command, and tells which of the large packages it has imported.
LOADED = """
import json, sys
heavy = json.loads(sys.argv.pop(1))
try:
    from proxsps.cli import main
    main()
finally:
    sys.stderr.write("\\nloaded: " + json.dumps([name for name in heavy if name in sys.modules]))
"""

# Runs code with some packages made impossible to import, as if they were not installed.
WITHOUT = """
import json, sys

class Blocked:
    names = json.loads(sys.argv[1])
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
code = sys.argv[2]
del sys.argv[1:3]
exec(code)
"""
MAIN = "from proxsps.cli import main; main()"


@pytest.fixture(scope="module")
def light() -> Iterator[type[subprocess.Popen[str]]]:
    names = ("rich.progress", "typer.rich_utils", "pydantic")  # the last one is loaded by typer, where it is there
    with warmed(*filter(find_spec, names)) as popen:
        yield popen


def process(
    popen: type[subprocess.Popen[str]], code: str, *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(proxsps.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment |= {"COLUMNS": "80", "PROXSPS_DATA": ""}
    command, pipes = [sys.executable, "-c", code, *words], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(command, text=True, env=environment, cwd=cwd, **pipes) as started:
        output, errors = started.communicate(timeout=120)
    return subprocess.CompletedProcess(command, started.returncode, output, errors)


def without(
    popen: type[subprocess.Popen[str]], packages: list[str], code: str, *words: str
) -> subprocess.CompletedProcess[str]:
    return process(popen, WITHOUT, json.dumps(packages), code, *words)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "reproduce"),
        (["--version"], 0, proxsps.__version__),
        (["list"], 0, "matrix-fac1"),
        (["list", "--json"], 0, '"matrix-fac1"'),
        (["data"], 0, "PROXSPS_DATA: not set"),
        (["run", "--help"], 0, "as published"),
        (["train", "--help"], 0, "prox-sps"),
        (["sparsify", "--help"], 0, "digits-mlp"),
        (["train", "cifar10-resnet57x"], 2, "Unknown problem 'cifar10-resnet57x'"),
        (["train", "cifar10-resnet57"], 2, "depth must be 6n + 2"),
        (["train", "cifar10-resnet56", "--method", "proxsp"], 2, "Did you mean 'prox-sps'?"),
        (["sparsify", "digit-mlp"], 2, "Or 'digits-mlp'"),
        (["run", "matrix-fac1", "--convention", "txt"], 2, "published or text, got 'txt'"),
        (["reproduce", "flow", "--sensors", "month.csv"], 2, "sensor was not named"),
        (["theory", "--help"], 0, "verify"),
        (["no-such-command"], 2, "No such command"),
        (["run"], 2, "Missing argument"),
        (["run", "matrx-fac1"], 2, "Did you mean 'matrix-fac1'?"),
        (["run", "matrix-fac1", "--engine", "batchd"], 2, "batched"),
        (["run", "matrix-fac1", "--epochs", "100000000"], 2, "--epochs must be at most 1,000,000"),
        (["run", "matrix-fac1", "--address", "auto"], 2, "use it with --engine ray"),
        (["run", "matrix-fac1", "--out", "file"], 2, "Choose another folder with --out"),
        (["reproduce", "flow", "--out", "file"], 2, "Choose another folder with --out"),
        (["figures", "flow", "--format", "bmp"], 2, "svg"),
        (["train", "synthetic-resnet8", "--epochs", "0"], 2, "--epochs"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_needs_nothing_large_imports_nothing_large(light, words, code, said, tmp_path):
    (tmp_path / "file").write_text("")
    done = process(light, LOADED, json.dumps(HEAVY), *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert done.stderr.rpartition("loaded: ")[2] == "[]"


def test_list_is_one_line_for_each_experiment_at_80_columns(light):
    lines = process(light, MAIN, "list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1 : len(CATALOGUE) + 1]] == list(CATALOGUE)
    shown = {line.split()[0]: line for line in lines if line}
    assert re.fullmatch(r"sensor +gaps in air-quality measurements +63 +\d+ min", shown["sensor"].rstrip())
    assert shown["cifar10-resnet56"].endswith("6 h *")


def test_the_catalogue_tells_what_the_experiments_are():
    assert list(EXPERIMENTS) == list(CATALOGUE)
    for name, experiment in EXPERIMENTS.items():
        entry = CATALOGUE[name]
        runs = len(experiment.specs(experiment.seeds, experiment.epochs)) if experiment.specs else 0
        runs = len(experiment.trials(experiment.seeds)) if experiment.trials else runs
        facts = (experiment.name, runs, experiment.epochs, experiment.seconds, experiment.hardware)
        assert (entry.name, entry.runs, entry.epochs, entry.seconds, entry.hardware) == facts


def test_names_and_numbers_of_the_command_line_are_those_of_what_it_runs():
    assert set(EngineName) == {*engines.ENGINES, "ray"}
    assert engines.BATCH == BATCH
    assert tasks.DIGITS == sparsity.DIGITS


def test_an_experiment_that_was_added_is_found(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EXPERIMENTS, "mine", EXPERIMENTS["flow"])
    assert "claims hold" in CliRunner().invoke(app, ["claims", "mine"]).output
    assert "Did you mean 'mine'?" in CliRunner().invoke(app, ["claims", "minne"]).output


# Missing packages


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_base_install_names_the_extra(package):
    packages = list(_install.EXPERIMENTS) if package == "typer" else [package]
    done = without(subprocess.Popen, packages, MAIN, "--help")
    text = f"Error: proxsps needs the package {package}, which is not installed: {_install.extra('experiments')}.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", text)


@pytest.mark.parametrize(
    ("package", "words"), [("matplotlib", ["figures", "flow"]), ("pandas", ["claims", "flow"])], ids=str
)
def test_a_command_whose_package_is_missing_names_the_extra(light, package, words, tmp_path):
    done = without(light, [package], MAIN, *words, "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"needs the package {package}, which is not installed: {_install.extra('experiments')}" in done.stderr


@pytest.mark.parametrize(
    ("module", "packages", "extra"),
    [
        ("proxsps.sweep", ["pandas"], "experiments"),
        ("proxsps.sweep.store", ["filelock", "pandas", "pyarrow"], "experiments"),
        ("proxsps.figures", ["matplotlib", "pandas"], "experiments"),
        ("proxsps.experiments.matrix_fac", ["matplotlib"], "experiments"),
        ("proxsps.integrations.lightning", ["lightning"], "lightning"),
        ("proxsps.integrations.transformers", ["transformers"], "transformers"),
        ("proxsps.jax", ["jax"], "jax"),
    ],
    ids=str,
)
def test_a_part_whose_packages_are_missing_names_the_extra(light, forked, module, packages, extra):
    popen = forked if module.startswith("proxsps.integrations") else light  # these import torch first
    done = without(popen, packages, f"import {module}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert _install.extra(extra) in last
    assert all(package in last for package in packages)


def test_a_module_that_no_extra_has_is_still_an_error_with_a_traceback():
    done = without(subprocess.Popen, ["difflib"], MAIN, "--help")
    assert done.returncode == 1
    assert "No module named 'difflib'" in done.stderr


def test_the_extra_installs_what_the_message_says():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = {"pillow": "PIL", "scikit-learn": "sklearn"}
    names = [re.match(r"[\w-]+", item)[0] for item in extras["experiments"]]
    assert {imported.get(name, name) for name in names} == set(_install.EXPERIMENTS)


def test_one_variable_decides_how_install_lines_are_spelt(monkeypatch):
    assert _install.extra("jax") == "pip install '.[jax]' in a clone of proxsps"
    monkeypatch.setattr(_install, "PUBLISHED", True)
    assert _install.extra("experiments", "ray") == "pip install 'proxsps[experiments,ray]'"


def test_texts_have_no_install_line_of_a_package_that_is_not_published():
    wrong = "pip install proxsps|pip install 'proxsps|pip install \"proxsps"
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("examples/*.py")]
    found = [text for text in texts if text.name != "_install.py" and re.search(wrong, text.read_text())]
    assert not _install.PUBLISHED
    assert not found
