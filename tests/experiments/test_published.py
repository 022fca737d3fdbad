"""Claims on the paper's own curves: what is recorded, and the rules on the curves themselves where these are there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from proxsps.experiments import EXPERIMENTS, published
from proxsps.experiments.base import FAILS, HOLDS, IN_PART, Frames

FOLDER = os.environ.get(published.FOLDER, "")
curves = pytest.mark.skipif(not FOLDER, reason=f"{published.FOLDER} does not name the folder of the curves")
WHOLE = [name for name, source in published.SOURCES.items() if not source.epochs]
# What the paper says and its own curves show only in part: see the parts.
PARTLY = {("matrix-fac1", "best-lambda"), ("matrix-fac1-stability", "slow-for-small-alpha")}
PARTLY |= {("cifar10-resnet110", "less-sensitive")}


EMPTY = {"runs": pd.DataFrame({"method": [], "schedule": [], "seed": []})}


def test_the_record_is_of_claims_that_exist_and_has_every_source() -> None:
    for name in published.SOURCES:
        names = {claim.name for claim in EXPERIMENTS[name].judge(EMPTY)}
        record = published.recorded(name)
        assert record
        assert set(record) <= names - published.CIRCULAR
    assert published.recorded("flow") == {}


@pytest.mark.parametrize("name", WHOLE)
def test_every_rule_holds_on_the_curves_that_it_is_about(name: str) -> None:
    for claim, found in published.recorded(name).items():
        assert found.verdict == (IN_PART if (name, claim) in PARTLY else HOLDS), found.measured


def test_a_judged_claim_has_the_recorded_verdict_beside_its_own() -> None:
    claims = {claim.name: claim for claim in EXPERIMENTS["matrix-fac1"].judge(EMPTY)}
    assert claims["unstable-sps"].verdict == FAILS
    assert claims["unstable-sps"].published.verdict == HOLDS
    assert claims["larger-zeta"].published is None  # the figures have no such numbers in curves


@curves
@pytest.mark.parametrize("name", published.SOURCES)
def test_the_record_is_what_the_curves_give(name: str) -> None:
    assert published.judged(name, Path(FOLDER)) == published.recorded(name)


def swapped(method: str, frames: Frames) -> Frames:
    """ProxSPS and another method exchanged; alpha_0 of different grids by their rank."""
    runs = frames["runs"]
    names = {"prox-sps": method, method: "prox-sps"}
    grids = {name: sorted(runs.loc[runs["method"] == name, "lr"].unique()) for name in names}
    runs = runs.assign(method=runs["method"].replace(names))
    for old, new in names.items():
        ranks = np.round(np.linspace(0, len(grids[new]) - 1, len(grids[old]))).astype(int)
        moved = dict(zip(grids[old], (grids[new][rank] for rank in ranks), strict=True))
        own = runs["method"] == new
        runs.loc[own, "lr"] = runs.loc[own, "lr"].map(moved)
    schedules = frames["runs"].groupby("method")["schedule"].first()
    if "schedule" in runs and frames["runs"].groupby("method")["schedule"].nunique().max() == 1:
        runs["schedule"] = runs["method"].map(schedules)
    return {"runs": runs}


def chance(frames: Frames) -> Frames:
    """Nothing is learned: noise around the first value, the same for all methods."""
    runs, rng = frames["runs"].copy(), np.random.default_rng(0)
    for metric in ("objective", "val_error", "val_accuracy", "model_norm"):
        if metric in runs:
            level = 0.1 if metric == "val_accuracy" else 1.05
            runs[metric] = level * (1 + 0.01 * rng.standard_normal(len(runs)))
    if "val_accuracy" in runs:
        runs["val_error"] = 1 - runs["val_accuracy"]
    return {"runs": runs}


OTHERS = {"matrix-fac1": "sps", "matrix-fac1-stability": "sps", "sensor": "sgd", "imagenet32-resnet110": "adamw"}
OTHERS |= dict.fromkeys(("cifar10-resnet56", "cifar10-resnet110"), "adamw")
# Sentences that are true of the exchanged methods as well: they say the same of both, or do not speak of one.
TRUE = {
    "matrix-fac1": {"same-at-1"},
    "matrix-fac1-stability": {"sgd-diverges", "less-sensitive", "slow-for-small-alpha"},
    "sensor": set(),
    "cifar10-resnet56": {"good-with-c-1"},
    "cifar10-resnet110": {"leaves-chance"},
    "imagenet32-resnet110": {"similar-accuracies", "faster-start"},
}


@curves
@pytest.mark.parametrize("name", WHOLE)
def test_no_rule_holds_on_exchanged_curves_or_on_chance(name: str) -> None:
    frames = published.read(name, Path(FOLDER))
    changes: dict[str, Callable[[Frames], Frames]] = {"swapped": partial(swapped, OTHERS[name]), "chance": chance}
    for kind, change in changes.items():
        held = {
            claim.name for claim in EXPERIMENTS[name].judge(change(frames)) if claim.checked and claim.verdict != FAILS
        }
        assert held <= (TRUE[name] if kind == "swapped" else set()), (kind, held)


@curves
def test_curves_have_every_epoch_once_and_what_is_missing_has_diverged() -> None:
    runs = published.read("matrix-fac1-stability", Path(FOLDER))["runs"]
    sizes = runs.groupby(published.SETTINGS)["epoch"].agg(["size", "nunique"])
    assert (sizes == 50).all(axis=None)
    lost = runs[runs["objective"].isna()]
    assert set(zip(lost["method"], lost["schedule"], lost["lr"], strict=True)) == {("sgd", "constant", 0.7)}
    twin = published.read("cifar10-resnet110-twin", Path(FOLDER))["runs"]
    assert (twin["epoch"].max(), twin["weight_decay"].unique().tolist()) == (6, [5e-4])


def test_reading_a_small_folder(tmp_path: Path) -> None:
    """Rolling medians start late, and epochs are cut off where the experiment ends."""
    rows = [("adamw", 5e-4, epoch, 0.1 * epoch, 10.0) for epoch in range(1, 9)]
    columns = ["method", "weight_decay", "epoch", "val_accuracy", "model_norm"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / published.RESNET56, index=False)
    runs = published.read("cifar10-resnet56-twin", tmp_path)["runs"]
    assert runs["epoch"].tolist() == [1, 2, 3, 4, 5]
    assert (runs["lr"].unique(), runs["schedule"].unique()) == ([1e-3], ["constant"])
    assert runs["val_error"].iloc[-1] == pytest.approx(0.5)
    record = json.loads(Path(published.__file__).with_name(published.RECORD).read_text(encoding="utf-8"))
    assert set(record) == set(published.SOURCES)
