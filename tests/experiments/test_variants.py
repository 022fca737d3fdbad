"""Experiments with other options: in a store of their own, from the command line and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from proxsps.cli import app
from proxsps.experiments import EXPERIMENTS
from proxsps.experiments.base import Experiment, Frames
from proxsps.experiments.variants import Options, check_options, variant
from proxsps.problems import completion

SMALL = ["--seeds", "1", "--epochs", "1"]
MATRIX = [name for name in EXPERIMENTS if name.startswith("matrix-fac")]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("PROXSPS_DATA", raising=False)
    return lambda *words: CliRunner().invoke(app, list(words))


def variants(chosen: list[Experiment], options: Options = Options()) -> list[Experiment]:  # noqa: B008
    check_options([experiment.name for experiment in chosen], options)
    return [variant(experiment, options) for experiment in chosen]


def test_the_published_ones_stay_as_they_are() -> None:
    chosen = list(EXPERIMENTS.values())
    assert [experiment.name for experiment in variants(chosen)] == list(EXPERIMENTS)


@pytest.mark.parametrize("name", [*MATRIX, "sensor"])
def test_the_text_has_names_problems_and_the_same_claims_of_its_own(name: str) -> None:
    published = EXPERIMENTS[name]
    (text,) = variants([published], Options("text"))
    assert text.name == f"{name}-text"
    assert text.claims == published.claims
    assert text.words == (name, "--convention", "text")
    (problem,) = {spec.problem for spec in text.specs(2, 3)}
    assert problem.convention == "text"
    assert {spec.problem.convention for spec in published.specs(2, 3)} == {"published"}
    ids = [{spec.id for spec in experiment.specs(2, 3)} for experiment in (published, text)]
    assert not ids[0] & ids[1]


def test_options_that_no_experiment_has_are_told() -> None:
    flow, matrix = EXPERIMENTS["flow"], EXPERIMENTS["matrix-fac1"]
    with pytest.raises(ValueError, match=r"--convention text is for matrix-fac1, .* none of them was named"):
        variants([flow], Options("text"))
    assert [experiment.name for experiment in variants([flow, matrix], Options("text"))] == ["flow", "matrix-fac1-text"]
    with pytest.raises(ValueError, match=r"--sensors month2.csv is for sensor; sensor was not named"):
        variants([matrix], Options(sensors="month2.csv"))
    with pytest.raises(ValueError, match="The convention is published or text, got 'txt'"):
        variants([matrix], Options("txt"))


def test_the_convention_of_the_text_from_the_command_line(call: Callable[..., Result], tmp_path: Path) -> None:
    text = ["--convention", "text"]
    assert call("run", "matrix-fac1", *SMALL).exit_code == 0
    missing = call("claims", "matrix-fac1", *text)
    assert missing.exit_code == 2
    assert "Run it first: proxsps run matrix-fac1 --convention text" in missing.stderr
    assert call("run", "matrix-fac1", *text, *SMALL).exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"matrix-fac1", "matrix-fac1-text"}
    rows = {words: json.loads(call("claims", "matrix-fac1", *words, "--json").stdout) for words in ((), tuple(text))}
    assert {row["experiment"] for row in rows[tuple(text)]} == {"matrix-fac1-text"}
    assert [row["name"] for row in rows[()]] == [row["name"] for row in rows[tuple(text)]]
    assert rows[()][0]["measured"] != rows[tuple(text)][0]["measured"]
    wrong = call("run", "matrix-fac1", "--convention", "txt")
    assert wrong.exit_code == 2
    assert "got 'txt'" in wrong.stderr


def test_a_month_from_the_command_line(call: Callable[..., Result], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = np.where(rng.random((8, 60)) < 0.6, 20 + rng.random((8, 60)), 0)
    lines = [",".join(["", *map(str, range(60))]), *(",".join(["s", *map(str, row)]) for row in table)]
    (tmp_path / "month 2.csv").write_text("\n".join(lines))
    words = ["sensor", "--sensors", "month 2.csv"]
    done = call("run", *words, *SMALL, "--json")
    assert done.exit_code == 0, done.output
    (summary,) = json.loads(done.stdout)
    assert (summary["experiment"], summary["ran"]) == ("sensor-month_2", 21)
    rows = json.loads(call("claims", *words, "--json").stdout)
    assert {row["experiment"] for row in rows} == {"sensor-month_2"}
    assert {row["published"] for row in rows} == {None}  # the published curves are of another month
    told = " ".join(call("claims", *words).stdout.split())
    fewer = "1 of 3 seeds, 1 of 100 epochs: not the full experiment."
    assert f"{fewer} The paper's sentences are about its own month." in told
    (tmp_path / "month 2.csv").write_text("\n".join(lines[:-1]))  # another month under the same name
    completion._month_digest.cache_clear()  # as in another process
    assert "made by another version" in call("claims", *words).stderr
    nowhere = call("run", "sensor", "--sensors", "nowhere.csv", *SMALL)
    assert nowhere.exit_code == 2
    assert "nowhere.csv cannot be read" in nowhere.stderr


def test_the_sensors_say_how_many_runs_there_are_and_what_the_paper_says() -> None:
    experiment = EXPERIMENTS["sensor"]
    assert "three are the default" in experiment.description
    assert "ten runs" in experiment.description
    assert {spec.seed for spec in experiment.specs(experiment.seeds, 1)} == {0, 1, 2}


@pytest.mark.parametrize("name", ["matrix-fac1", "matrix-fac1-stability", "sensor", "cifar10-resnet56"])
def test_captions_say_how_many_runs(made: Callable[..., Frames], name: str) -> None:
    frames = made(name)
    one = {key: frame[frame["seed"] == 0] for key, frame in frames.items()}
    for drawing in EXPERIMENTS[name].drawings:
        caption = drawing.caption_for(frames)
        assert "{" not in caption
        assert "2 runs" in caption or "of one run" in caption
        single = drawing.caption_for(one)
        assert "one run" in single
        assert not any(word in single for word in ("mean", "deviation", "range"))


def test_reproduce_draws_the_variant_in_its_own_folder(call: Callable[..., Result], tmp_path: Path) -> None:
    result = call("reproduce", "matrix-fac1", "--convention", "text", *SMALL)
    assert result.exit_code == 0, result.output
    drawn = {file.stem for file in (tmp_path / "out" / "matrix-fac1-text" / "figures").glob("*.svg")}
    assert drawn == {drawing.name for drawing in EXPERIMENTS["matrix-fac1"].drawings}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Matrix factorisation 1 (text)" in page
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert captions
    assert not any("mean" in caption for caption in captions)
    assert "1 of 10 seeds, 1 of 50 epochs: not the full experiment." in page
    assert "matrix-fac1-text: 1 of 10 seeds, 1 of 50 epochs: not the full experiment." in result.output
    assert "{runs}" not in page
    assert not (tmp_path / "out" / "matrix-fac1").exists()


@pytest.mark.parametrize("words", [["all", "--sensors", "a"], ["sensor", "--sensors", "nowhere.csv"]])
def test_a_month_is_checked_before_anything_is_run(
    call: Callable[..., Result], tmp_path: Path, words: list[str]
) -> None:
    result = call("run", *words, *SMALL)
    assert result.exit_code == 2
    assert "--sensors" in result.stderr
    assert "data must be" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_results_of_fewer_seeds_or_epochs_are_told(made: Callable[..., Frames]) -> None:
    experiment, frames = EXPERIMENTS["sensor"], made("sensor")
    assert experiment.shortened(frames) == "2 of 3 seeds, 12 of 100 epochs: not the full experiment."
    assert replace(experiment, seeds=2).shortened(frames) == "12 of 100 epochs: not the full experiment."
    assert replace(experiment, seeds=1, epochs=12).shortened(frames) == ""
    assert EXPERIMENTS["flow"].shortened({}) == ""
