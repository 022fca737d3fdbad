"""Trials: rows that depend on nothing but the trial, optimizers of every kind, and a store that survives faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from proxsps.methods import METHODS, Method
from proxsps.optim import ProxSPS
from proxsps.regularizers import L1, Regularizer
from proxsps.sweep.files import StoreError
from proxsps.sweep.store import TrialStore
from proxsps.sweep.trials import Trial, TrialTask, run_trial, warm_cosine


@dataclass(frozen=True)
class Line(TrialTask):
    """Least squares for a line with noise; the loss of all points counts."""

    name: str = "line"
    title: str = "a line"
    steps: int = 40
    weight_decay: float = 0.0
    lam: float = 0.0
    norm: bool = False

    def points(self) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 64)[:, None]
        return x, 2 * x + 1 + 0.2 * torch.sin(37 * x)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(1, 1), *([nn.BatchNorm1d(1)] if self.norm else []))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        x, y = self.points()
        while True:
            chosen = torch.randint(len(x), (8,), generator=generator)
            yield x[chosen], y[chosen]

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def measure(self, model: nn.Module) -> float:
        assert not model.training
        return float(self.loss(model, self.points()))

    def regularizer(self) -> Regularizer | None:
        return L1(self.lam) if self.lam else None


def sgd(params: Any, trial: Trial) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, trial.lr)


def schedule_free(params: Any, trial: Trial) -> torch.optim.Optimizer:
    return pytest.importorskip("schedulefree").AdamWScheduleFree(params, lr=trial.lr)


def prox_sps(params: Any, trial: Trial) -> torch.optim.Optimizer:
    return ProxSPS(params, trial.lr, regularizer=trial.task.regularizer())


SGD = Method("own-sgd", sgd)
PROX_SPS = Method("own-prox-sps", prox_sps, coupled=False)
FREE = Method("own-schedule-free", schedule_free)


@pytest.mark.parametrize("method", [SGD, PROX_SPS, FREE], ids=lambda method: method.name)
def test_a_trial_learns_and_gives_the_same_row_again(method):
    row = run_trial(Trial(Line(), method, 0.3, 0))
    assert row["status"] == "ok"
    assert row["steps"] == 40
    assert row["value"] < 0.1
    assert row == run_trial(Trial(Line(), method, 0.3, 0))
    assert row["value"] != run_trial(Trial(Line(), method, 0.3, 1))["value"]


def test_a_loss_that_is_not_finite_ends_a_trial_as_diverged():
    row = run_trial(Trial(Line(steps=500), SGD, 100.0, 0))
    assert row["status"] == "diverged"
    assert row["steps"] < 500
    assert math.isnan(row["value"])


def test_weights_that_are_not_finite_at_the_end_count_as_diverged():
    """The last step may be the one that diverges: the loss before it was finite."""
    row = run_trial(Trial(Line(steps=1), SGD, 1e30, 0))
    assert row["steps"] == 1
    assert row["status"] == "diverged"


def test_optimizers_that_keep_two_kinds_of_weights_are_measured_with_the_right_ones():
    pytest.importorskip("schedulefree")
    kept = {}

    def make(params, trial):
        kept["optimizer"] = schedule_free(params, trial)
        return kept["optimizer"]

    run_trial(Trial(Line(), replace(FREE, make=make), 0.3, 0))
    assert not kept["optimizer"].param_groups[0]["train_mode"]


@pytest.mark.parametrize("method", [SGD, METHODS["sgd"], METHODS["prox-sps"]], ids=lambda method: method.name)
def test_a_regulariser_reaches_methods_with_a_prox_and_without(method):
    """min (w - 2)^2 / 3 + (b - 1)^2 + lam (|w| + |b|) with lam = 1: w = 0.5 (mean of x^2 is about 1/3), b = 0.5."""
    found: dict[str, list[float]] = {}

    @dataclass(frozen=True)
    class Looked(Line):
        def measure(self, model: nn.Module) -> float:
            found["w"] = [float(p) for p in model.parameters()]
            return 0.0

    run_trial(Trial(Looked(steps=3000, lam=1.0), method, 0.02, 0))
    assert found["w"] == pytest.approx([0.5, 0.5], abs=0.15)


@pytest.mark.parametrize("ending", ["cool-down", "average", "cosine"])
def test_endings_are_less_noisy_than_the_last_weights(ending):
    ends = {end: run_trial(Trial(Line(steps=200), SGD, 0.9, 0, end))["value"] for end in ("none", ending)}
    assert ends[ending] < ends["none"]


def test_a_cosine_rises_over_a_twentieth_of_the_steps_and_falls_to_zero():
    """The factors of 100 steps against half a period of a cosine, sampled by NumPy."""
    factors = [warm_cosine(100, k) for k in range(101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == pytest.approx(0.5 + 0.5 * np.cos(np.linspace(0, np.pi, 96)), abs=1e-12)
    assert warm_cosine(1, 0) == 1


def bias_apart(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 0.0 if p.dim() == 1 else 0.3} for p in model.parameters()]


def test_a_method_may_get_groups_of_parameters_made_from_the_model():
    found: list[float] = []

    @dataclass(frozen=True)
    class Looked(Line):
        def measure(self, model: nn.Module) -> float:
            found.extend(p.item() for p in model.parameters())
            return 0.0

    start = [p.item() for p in Line().model(0).parameters()]
    run_trial(Trial(Looked(), replace(SGD, groups=f"{__name__}:bias_apart"), 0.3, 0))
    assert found[0] != start[0]
    assert found[1] == start[1]


def test_an_average_over_batch_norm_gets_statistics_of_its_own():
    row = run_trial(Trial(Line(norm=True, steps=200), SGD, 0.1, 0, "average"))
    assert row["value"] < 0.1


def test_an_ending_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="The ending is one of none, cool-down, average, cosine, got 'warm'"):
        Trial(Line(), SGD, 0.1, 0, "warm")


def test_ids_tell_trials_apart_by_everything_that_matters():
    base = Trial(Line(), SGD, 0.1, 0)
    others = [
        replace(base, task=Line(steps=41)),
        replace(base, task=Line(weight_decay=0.1)),
        replace(base, method=PROX_SPS),
        replace(base, method=replace(SGD, groups=f"{__name__}:bias_apart")),
        replace(base, lr=None),
        replace(base, lr=0.2),
        replace(base, seed=1),
        replace(base, ending="average"),
    ]
    assert len({trial.id for trial in [base, *others]}) == 9
    assert Trial(Line(), SGD, 0.1, 0).id == base.id


class SteepLine(Line):
    """Another slope; its name and options are those of a line."""

    def points(self) -> tuple[Tensor, Tensor]:
        x, y = super().points()
        return x, 3 * y


def test_an_id_covers_options_of_the_method_and_own_code():
    """What is stored for other constants, another optimizer or another loss is not taken for the same trial."""
    known = METHODS["sgd-momentum"]
    methods = [known, replace(known, options=(("momentum", 0.8),)), replace(known, optimizer="torch.optim:AdamW")]
    methods += [
        replace(known, make=sgd),
        replace(known, make=lambda params, trial: torch.optim.SGD(params, 2 * trial.lr)),
    ]
    ids = {Trial(Line(), method, 0.1, 0).id for method in methods}
    steep = type("Line", (SteepLine,), {})()
    assert len(ids | {Trial(steep, known, 0.1, 0).id}) == 6
    assert Trial(Line(), replace(known, colour="#123456"), 0.1, 0).id in ids


# The store


def trials(seeds: int = 2) -> list[Trial]:
    return [Trial(Line(), SGD, lr, seed) for lr in (0.1, None) for seed in range(seeds)]


def row(trial: Trial, value: float = 1.0) -> dict[str, Any]:
    lr = math.nan if trial.lr is None else trial.lr
    name, method, _, seed, ending = trial.setting()
    facts = {"trial": trial.id, "task": name, "method": method, "lr": lr, "seed": seed, "ending": ending}
    return {**facts, "title": "", "metric": "loss", "steps": 1, "value": value, "status": "ok"}


def filled(folder, chosen) -> TrialStore:
    store = TrialStore(folder, "mine")
    for trial in chosen:
        store.add([row(trial)])
    return store


def test_a_store_is_read_again_with_what_was_added(tmp_path):
    store = filled(tmp_path, trials())
    again = TrialStore(tmp_path, "mine")
    pd.testing.assert_frame_equal(again.rows, store.rows)
    assert again.done == {trial.id for trial in trials()}
    assert len(again.require(trials(), frozenset(), "run it")) == 4


def test_two_writers_keep_what_the_other_added(tmp_path):
    first, second = TrialStore(tmp_path, "mine"), TrialStore(tmp_path, "mine")
    a, b, *_ = trials()
    first.add([row(a)])
    second.add([row(b)])
    second.add([row(a, value=2.0)])  # is there already, and stays as it is
    rows = TrialStore(tmp_path, "mine").rows
    assert set(rows["trial"]) == {a.id, b.id}
    assert rows["value"].tolist() == [1.0, 1.0]


def test_a_store_that_lacks_trials_says_what_to_run(tmp_path):
    store = filled(tmp_path, trials()[:3])
    with pytest.raises(StoreError, match=r"1 of 4 runs are missing in .*: run `proxsps run mine`"):
        store.require(trials(), frozenset(), "proxsps run mine")


def test_tasks_that_may_be_left_out_may_only_be_left_out_as_a_whole(tmp_path):
    other = [replace(trial, task=Line(name="other")) for trial in trials()]
    both, optional = [*trials(), *other], frozenset({"other"})
    assert len(filled(tmp_path, trials()).require(both, optional, "run it")) == 4
    with pytest.raises(StoreError, match="1 of 8 runs are missing"):
        filled(tmp_path, other[:3]).require(both, optional, "run it")


def test_the_same_setting_of_two_versions_is_an_error(tmp_path):
    longer = [replace(trial, task=Line(steps=99)) for trial in trials()]
    with pytest.raises(StoreError, match="more than one run of 4 settings"):
        filled(tmp_path, [*trials(), *longer]).require(trials(), frozenset(), "run it")


def test_a_store_of_another_experiment_or_damaged_is_not_opened(tmp_path):
    filled(tmp_path, trials())
    with pytest.raises(StoreError, match=r"rows of another experiment \(mine\), not only of other"):
        TrialStore(tmp_path, "other")
    file = tmp_path / "trials.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged"):
        TrialStore(tmp_path, "mine")
