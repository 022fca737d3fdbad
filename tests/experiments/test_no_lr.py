"""The experiment no-lr: claims on right and wrong results, its table and figure, and runs by the command line."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from proxsps import figures, methods
from proxsps.cli import app
from proxsps.experiments import EXPERIMENTS
from proxsps.experiments.base import Frames
from proxsps.experiments.no_lr import OPTIONAL, TASKS
from proxsps.experiments.no_lr.claims import NETWORKS, SHORT, TASK_NAMES, good_range, losses, plain
from proxsps.experiments.no_lr.methods import ADAM, EUCLIDEAN, FREE, IDENTITY, LRS, METHODS, RIVALS, SPECTRAL
from proxsps.experiments.no_lr.tasks import DigitsTask, SparseTask, smallest_objective
from proxsps.experiments.no_lr.text import LETTERS, RecurrentTask, TextTask, language_reference
from proxsps.sweep.tables import write_table
from proxsps.sweep.trials import Trial

NO_LR, LONG, TRANSFORMER = (EXPERIMENTS[name] for name in ("no-lr", "no-lr-long", "no-lr-transformer"))
GOOD = {"accuracy": 0.9, "loss": 2.0, "gap": 0.001}
BETTER = {"accuracy": 0.93, "loss": 1.9, "gap": 0.0009}
BAD = {"accuracy": 0.1, "loss": 20.0, "gap": 2.0}


def right(method: str, lr: float | None, metric: str) -> float:
    """Each baseline is good at the lr in the middle of its grid; ours from the middle on, and without lr."""
    lrs = [value for value in LRS[method] if value is not None]
    middle = len(lrs) // 2
    if method in SHORT:
        return BETTER[metric]
    if method in (*RIVALS, *EUCLIDEAN):
        return GOOD[metric] if lr is None or lrs.index(lr) >= middle else BAD[metric]
    if method in ("prodigy", "schedule-free-plus"):
        return 0.5 * (GOOD[metric] + BAD[metric])
    return GOOD[metric] if lrs.index(lr) == middle else math.nan if lr == lrs[-1] else BAD[metric]


def source_of(store: str, method: str) -> str:
    """The method whose results a method gets in a store."""
    kind, _, other = store.partition("-")
    if kind == "copy":
        return method if method in EUCLIDEAN else other
    if kind == "swap":
        pairs = {"rivals": RIVALS, "prodigy": {ADAM: "prodigy"}, "free": {FREE: "muon", SPECTRAL: "schedule-free"}}[
            other
        ]
        return {**pairs, **{rival: ours for ours, rival in pairs.items()}}.get(method, method)
    return method


def matched_lr(method: str, lr: float | None, source: str) -> float | None:
    """The lr of another method that stands where an lr stands in a method's own grid; None is the largest."""
    if source in (*EUCLIDEAN, *SHORT) or (source in RIVALS and (lr is None or method == "prodigy")):
        return None
    own, other = ([value for value in LRS[name] if value is not None] for name in (method, source))
    last = len(own) - 1
    return other[-1] if lr is None or last < 1 else other[round(own.index(lr) * (len(other) - 1) / last)]


def made(store: str, trials: list[Trial] | None = None) -> Frames:
    rows = []
    for trial in trials or NO_LR.trials(2):
        metric, name = trial.task.metric, trial.method.name
        if store == "chance":
            value = BAD[metric]
        else:
            source = source_of(store, name)
            value = right(source, matched_lr(name, trial.lr, source), metric)
        lr = math.nan if trial.lr is None else trial.lr
        value *= 1 + 0.002 * np.random.default_rng([len(trial.task.name), trial.seed]).standard_normal()
        rows.append((trial.task.name, trial.task.title, metric, name, lr, trial.seed, trial.ending, value))
    columns = ["task", "title", "metric", "method", "lr", "seed", "ending", "value"]
    return {"trials": pd.DataFrame(rows, columns=columns)}


LEVEL = {f"level-{family}-{task}" for family in ("identity", "adam") for task in TASK_NAMES}
FAMILIES = {f"{claim}-{family}" for claim in ("same-for-large-lr", "wider") for family in ("identity", "adam")}
ALL = {f"all-{short}-{task}" for short in SHORT.values() for task in NETWORKS}
HALF = {f"half-{short}" for short in SHORT.values()}
OLD = LEVEL | FAMILIES | {"better-than-prodigy"}
# Wrong stores on which a claim holds all the same, because its sentence is true there as well.
HOLDS_ON = {
    "right": OLD | ALL | HALF,
    "swap-rivals": ALL | HALF,
    "swap-prodigy": {name for name in LEVEL | FAMILIES if "identity" in name} | {"same-for-large-lr-adam"} | ALL | HALF,
    "swap-free": OLD,
}


@pytest.mark.parametrize(
    "store", ["right", "swap-rivals", "swap-prodigy", "swap-free", "copy-adamw", "copy-prodigy", "chance"]
)
def test_claims_hold_on_right_results_and_on_no_wrong_ones_but_those_named(store):
    judged = NO_LR.judge(made(store))
    assert {claim.name for claim in judged} == OLD | ALL | HALF
    held = {claim.name for claim in judged if claim.holds}
    assert held == HOLDS_ON.get(store, set())
    assert not any("nan" in claim.measured for claim in judged)


def changed(change: Callable[[pd.DataFrame], pd.Series], value: Callable[[pd.Series], pd.Series]) -> dict[str, bool]:
    """Verdicts after the values of some rows were changed."""
    frames = made("right")
    table = frames["trials"]
    rows = change(table)
    table.loc[rows, "value"] = value(table.loc[rows, "value"])
    return {claim.name: claim.holds for claim in NO_LR.judge(frames)}


@pytest.mark.parametrize(("task", "enough"), [("digits", 0.98), ("digits-1e-4", 1.02), ("l1", 20.0)])
def test_a_task_that_is_not_level_fails_alone(task, enough):
    verdicts = changed(
        lambda t: (t["task"] == task) & (t["method"] == ADAM) & (t["lr"].isna() | (t["lr"] >= 0.01)),
        lambda values: values * enough,
    )
    assert {name for name, holds in verdicts.items() if not holds} == {f"level-adam-{task}", "wider-adam"}


@pytest.mark.parametrize("method", RIVALS)
def test_one_large_lr_that_differs_or_diverges_is_told(method):
    family = "identity" if method == IDENTITY else "adam"
    for factor in (1.05, math.nan):
        verdicts = changed(
            lambda t: (t["task"] == "transformer") & (t["method"] == method) & (t["lr"] == 1e6),
            lambda values, factor=factor: values * factor,
        )
        assert not verdicts[f"same-for-large-lr-{family}"]


def test_without_the_images_their_claims_are_left_out():
    trials = [trial for trial in NO_LR.trials(2) if trial.task.name not in OPTIONAL]
    names = {claim.name for claim in NO_LR.judge(made("right", trials))}
    left_out = {name for name in LEVEL | ALL if any(name.endswith(f"-{task}") for task in OPTIONAL)}
    assert names == (OLD | ALL | HALF) - left_out


@pytest.mark.parametrize("method", SHORT)
@pytest.mark.parametrize("rival", ["schedule-free", "muon", "cosine"])
def test_a_baseline_that_is_better_is_told_and_named(method, rival):
    """One better baseline on four of seven networks: the claims on them fail, and that on half of the networks."""
    frames = made("right")
    rows, tasks = frames["trials"], NETWORKS[:4]
    chosen = (
        (rows["ending"] == "cosine") & (rows["method"] == "adamw") if rival == "cosine" else rows["method"] == rival
    )
    chosen &= rows["task"].isin(tasks) & (rows["lr"] == 0.01)
    rows.loc[chosen, "value"] = np.where(rows.loc[chosen, "metric"] == "accuracy", 0.97, 1.5)
    judged = {claim.name: claim for claim in NO_LR.judge(frames)}
    short = SHORT[method]
    failed = {name for name, claim in judged.items() if short in name and not claim.holds}
    assert failed == {f"half-{short}", *(f"all-{short}-{task}" for task in tasks)}
    assert ("cosine" if rival == "cosine" else METHODS[rival].label) in judged[f"all-{short}-transformer"].measured
    assert judged[f"half-{short}"].measured == "on 3 of 7: resnet-bn, gru, gpt"


def test_good_ranges_are_decades_around_the_best_lr():
    table = losses(plain(made("right")["trials"]))
    rows = table[(table["task"] == "transformer") & (table["method"] == "adamw")]
    assert good_range(rows) == 0
    ours = table[(table["task"] == "transformer") & (table["method"] == ADAM)]
    assert good_range(ours) == pytest.approx(7)
    none = rows.assign(loss=math.inf)
    assert good_range(none) == 0


def test_the_table_has_one_row_per_task_and_method_with_endings_of_ours():
    table = NO_LR.table(made("right"))
    kept = [trial for trial in NO_LR.trials(1) if trial.ending in ("none", "cosine")]
    assert len(table) == len({(trial.task, trial.method.name, trial.ending) for trial in kept})
    ours = table[(table["task"] == "digits") & (table["method"] == methods.METHODS[ADAM].label)].iloc[0]
    assert ours["lr not set"].startswith("90.")
    assert ours["cool-down"].startswith("90.")
    assert table[table["method"] == "AdamW"]["cool-down"].tolist() == [""] * len(TASKS)


def test_the_long_version_is_the_same_with_more_steps():
    long, short = (experiment.trials(1) for experiment in (LONG, NO_LR))
    assert [trial.setting() for trial in long] == [trial.setting() for trial in short]
    assert {a.task.steps / b.task.steps for a, b in zip(long, short, strict=True)} == {4}


@pytest.mark.parametrize(
    ("ours", "theirs", "holds"), [(1.5, 1.5, True), (1.52, 1.5, False), (4.5, 4.5, False), (math.nan, 1.5, False)]
)
def test_the_transformers_long_run_has_claims_for_endings_and_methods_and_a_table(ours, theirs, holds):
    frames = made("right", TRANSFORMER.trials(1))
    rows = frames["trials"]
    rows["value"] = np.where(rows["method"].isin([ADAM, *SHORT]), ours, theirs)
    judged = TRANSFORMER.judge(frames)
    assert [claim.name for claim in judged] == [
        *("long-run-none", "long-run-cool-down", "long-run-average", "long-run-free", "long-run-spectral")
    ]
    assert [claim.holds for claim in judged] == [holds] * 5
    table = TRANSFORMER.table(frames)
    assert table["lr"].tolist()[:4] == ["not set"] * 3 + ["0.001"]
    assert table.loc[3, ["none", "cool-down", "average", "cosine"]].tolist() == [f"{theirs:.4g}"] * 4
    assert table.loc[0, ["cool-down", "average", "cosine"]].tolist() == [""] * 3


def test_an_lr_with_which_the_baseline_diverges_does_not_make_a_task_decisive():
    """Where no lr of a baseline gets beyond chance, and some diverge, being level with it shows nothing."""
    frames = made("chance")
    rows = frames["trials"]
    rows.loc[rows["lr"] == rows["lr"].max(), "value"] = math.nan
    rows.loc[rows["method"].isin(["sgd-momentum", "adamw"]) & (rows["lr"] == 10.0), "value"] = math.nan
    assert not any(claim.holds for claim in NO_LR.judge(frames) if claim.name.startswith("level"))


def test_the_figure_has_a_panel_per_task_and_says_what_is_missing(tmp_path):
    figure = NO_LR.drawings[0].draw(made("right"))
    titles = [axes.get_title().replace("\n", " ") for axes in figure.axes]
    assert [title for title in titles if title] == [task.title for task in TASKS]
    figure.draw_without_rendering()
    for part in (*figure.legends, *(axes.title for axes in figure.axes)):
        box = part.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    assert figures.save(figure, tmp_path / "figure.svg").stat().st_size > 10_000
    with pytest.raises(ValueError, match="trials lacks the columns"):
        figures.over_lr(pd.DataFrame({"task": ["a"]}))


# The tasks


def test_the_text_is_that_of_python_in_printable_letters():
    text = "".join(LETTERS[i] for i in language_reference()[:20_000].tolist())
    assert "assert" in text
    assert len(language_reference()) > 300_000


@pytest.mark.parametrize("task", [TextTask(), RecurrentTask()], ids=lambda task: task.name)
def test_no_network_sees_the_letters_that_it_predicts(task):
    model = task.model(0).eval()
    text = language_reference()[:32][None]
    changed = text.clone()
    changed[0, 20] = (changed[0, 20] + 1) % len(LETTERS)
    with torch.no_grad():
        a, b = model(text), model(changed)
    torch.testing.assert_close(a[:, :20], b[:, :20])
    assert not torch.allclose(a[:, 20:], b[:, 20:])


def test_the_smallest_objective_of_l1_regression_is_scikit_learns():
    linear_model = pytest.importorskip("sklearn.linear_model")
    task = SparseTask(features=20)
    features, labels = (part.double().numpy() for part in task.problem().train_data())
    strength = 1 / (task.lam * len(labels))
    model = linear_model.LogisticRegression(
        l1_ratio=1, C=strength, solver="saga", fit_intercept=False, tol=1e-10, max_iter=20_000
    )
    x = model.fit(features, labels).coef_[0]
    value = np.logaddexp(0, -labels * (features @ x)).mean() + task.lam * np.abs(x).sum()
    assert smallest_objective(task) == pytest.approx(value, rel=1e-8)
    assert smallest_objective(task) <= value * (1 + 1e-12)


# The command line


TINY = replace(
    NO_LR,
    name="tiny-no-lr",
    trials=lambda seeds: [
        Trial(DigitsTask("digits", "digits", steps=3), METHODS[name], lr, seed)
        for name in ("sgd-momentum", "adamw")
        for lr in (1e-3, 1e-2)
        for seed in range(seeds)
    ],
    drawings=(),
    claims=(),
    table=None,
)


@pytest.fixture
def call(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EXPERIMENTS, TINY.name, TINY)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # processes take seconds to start
    return lambda *words: CliRunner().invoke(app, list(words))


def test_figures_and_claims_come_from_the_store(call, tmp_path):
    rows = made("right", NO_LR.trials(1))["trials"]
    rows["trial"] = [f"{i:016}" for i in range(len(rows))]
    write_table(tmp_path / "out" / "no-lr" / "trials.parquet", rows.assign(experiment="no-lr", steps=1, status="ok"))
    result = call("figures", "no-lr")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "no-lr" / "figures" / "over-lr.svg").exists()
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("| matrix |"))
    assert line.count("at 0.03 (0.0)") == 1
    judged = json.loads(call("claims", "no-lr", "--json").stdout)
    assert len(judged) == len(OLD | ALL | HALF)
    assert all(claim["holds"] for claim in judged)
    assert call("report", "no-lr").exit_code == 0
    assert "good range, decades" in (tmp_path / "out" / "report.html").read_text()


def test_errors_say_what_to_do(call, monkeypatch):
    assert "leave --epochs out" in call("run", TINY.name, "--epochs", "2").stderr
    assert "Run it first: proxsps run tiny-no-lr" in call("claims", TINY.name).stderr
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    lacking = replace(TINY, trials=lambda seeds: [Trial(TASKS[0], METHODS["schedule-free"], 0.1, 0)])
    monkeypatch.setitem(EXPERIMENTS, TINY.name, lacking)
    monkeypatch.setattr("proxsps.cli.running.find_spec", lambda name: None)
    result = call("run", TINY.name)
    assert result.exit_code == 2
    assert "no-lr compares with schedulefree" in result.stderr
    assert "baselines" in result.stderr


def _no_network(*words, **options):
    from proxsps.problems.errors import DataError

    raise DataError("no network")


SCRIPT = """
import os
from dataclasses import replace
from proxsps.cli import app
from proxsps.experiments import EXPERIMENTS
from proxsps.experiments.no_lr.methods import METHODS
from proxsps.experiments.no_lr.tasks import DigitsTask
from proxsps.sweep.tables import write_table
from proxsps.sweep.trials import Trial

task = DigitsTask("digits", "digits", steps=100)
trials = lambda seeds: [Trial(task, METHODS["sgd-momentum"], 1e-3, seed) for seed in range(seeds)]
EXPERIMENTS["tiny"] = replace(EXPERIMENTS["no-lr"], name="tiny", trials=trials)
os.cpu_count = lambda: 1  # one process beside this one: each takes seconds to start
app(["run", "tiny", "--seeds", "12"])
"""


def test_a_kill_keeps_what_was_finished_and_images_that_are_not_there_are_left_out(
    call, forked, quick_pool, monkeypatch, tmp_path: Path
) -> None:
    store, environment = tmp_path / "out" / "tiny" / "trials.parquet", {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT]
    process = forked(command, cwd=tmp_path, env=environment, start_new_session=True)
    deadline = time.monotonic() + 120
    while not store.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    kept = pd.read_parquet(store)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("PROXSPS_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("proxsps.problems.images.download", _no_network)
    trials = [
        Trial(DigitsTask("digits", "digits", steps=100), METHODS["sgd-momentum"], 1e-3, seed) for seed in range(12)
    ]
    trials += [Trial(task, METHODS["sgd-momentum"], 0.1, 0) for task in TASKS if task.name in OPTIONAL]
    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(TINY, name="tiny", trials=lambda seeds: trials))
    done = call("run", "tiny", "--seeds", "12", "--json")
    assert json.loads(done.stdout)[0]["ran"] == 12 - len(kept), done.stderr
    assert done.stderr.count("Skipped: ") == len(OPTIONAL)
    after = pd.read_parquet(store)
    assert len(after) == after["trial"].nunique() == 12
    pd.testing.assert_frame_equal(after.head(len(kept)), kept)
    assert json.loads(call("run", "tiny", "--seeds", "12", "--json").stdout)[0]["ran"] == 0
    assert call("report", "tiny").exit_code == 0
