"""Deep experiments: the published grids, two steps of each twin, and claims that can hold and can fail."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from proxsps.experiments import EXPERIMENTS, adaptive_claims, deep_claims, first_epoch, imagenet_claims, norm_claims
from proxsps.experiments.base import Claim, Frames
from proxsps.experiments.catalogue import CORES, GPU
from proxsps.problems.images import PUBLISHED as PUBLISHED_IMAGES
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store
from proxsps.training import train

Made = Callable[..., Frames]
PUBLISHED = ("cifar10-resnet56", "cifar10-resnet110", "imagenet32-resnet110")
TWINS = ("cifar10-resnet56-twin", "cifar10-resnet110-twin", "cifar10-resnet56-adaptive", "cifar10-resnet56-long")


# Grids


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_grids(name: str) -> None:
    experiment = EXPERIMENTS[name]
    specs = experiment.specs(experiment.seeds, experiment.epochs)
    imagenet = name.startswith("imagenet32")
    methods = {"prox-sps", "sps", "adamw"} | ({"sgd"} if imagenet else set())
    assert len(specs) == len({spec.id for spec in specs}) == len(methods) * 3 * (1 if imagenet else 3)
    assert {spec.method for spec in specs} == methods
    assert {spec.weight_decay for spec in specs} == {5e-6, 5e-5, 5e-4}
    assert {spec.epochs for spec in specs} == {50 if imagenet else 100}
    for spec in specs:
        assert (spec.schedule, spec.lr) == (("constant", 1e-3) if spec.method == "adamw" else ("sqrt", 1.0))
    (problem,) = {spec.problem for spec in specs}
    assert (problem.width, problem.size, problem.images, problem.augment) == (16, 32, 0, True)
    assert problem.depth == (56 if "56" in name else 110)
    assert (problem.batch_norm, problem.batch_size) == ((True, 512) if imagenet else (False, 128))
    assert experiment.hardware == GPU
    assert experiment.seconds >= 3600


@pytest.mark.parametrize("name", TWINS)
def test_twins_keep_depth_batches_and_settings(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert experiment.hardware == CORES
    assert experiment.seconds <= 1800
    for spec in experiment.specs(experiment.seeds, experiment.epochs):
        problem = spec.problem
        assert problem.depth == (56 if "56" in name else 110)
        assert (problem.batch_size, problem.batch_norm, problem.augment) == (128, False, True)
        assert spec.weight_decay == 5e-4
        assert spec.lr == (1e-3 if spec.method == "adamw" else 1.0)


def test_the_long_twin_has_the_steps_that_late_effects_take() -> None:
    experiment = EXPERIMENTS["cifar10-resnet56-long"]
    specs = experiment.specs(experiment.seeds, experiment.epochs)
    steps = {PUBLISHED_IMAGES["cifar10"] // spec.problem.batch_size * spec.epochs for spec in specs}
    assert steps == {23_400}
    assert {spec.problem.pace for spec in specs} == {1.0}
    assert sorted((spec.method, spec.schedule) for spec in specs) == [
        ("adamw", "constant"),
        ("prox-sps", "adaptive"),
        ("prox-sps", "sqrt"),
        ("sps", "sqrt"),
    ]


# Two steps of each twin, on synthetic images


@pytest.mark.parametrize("name", TWINS)
def test_two_steps_of_a_twin(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    store = Store(tmp_path, name)
    for spec in experiment.specs(1, 1):
        problem = dataclasses.replace(spec.problem, data="synthetic", images=256, validation_images=100)
        store.add([train(dataclasses.replace(spec, problem=problem))])
    frames = {"runs": store.runs, "steps": store.steps}
    assert len(frames["steps"]) == 2 * len(frames["runs"])
    assert np.isfinite(frames["runs"]["objective"]).all()
    claims = experiment.judge(frames)
    assert all(isinstance(claim.holds, bool) for claim in claims)
    for drawing in experiment.drawings:
        plt.close(drawing.draw(frames))
    if "110" in name:
        norm, zeta = (frames["runs"].set_index("method")[column] for column in ("model_norm", "zeta_median"))
        before = sum(float(w.double().square().sum()) for w in problem.start().values()) ** 0.5
        assert zeta["sps"] < 1e-4, "at this depth the loss allows only steps that lead nowhere"
        assert norm["sps"] == pytest.approx(before, rel=2e-4), "so that SPS stands still"
        assert norm["prox-sps"] == pytest.approx(before / 1.0005**2, rel=2e-4), "and ProxSPS shrinks the weights"


# Claims


def judged(claim: Callable[[Frames], Claim], frames: Frames, holds: bool, *measured: str) -> None:
    decided = claim(frames)
    assert isinstance(decided.holds, bool)
    assert decided.holds is holds, decided.measured
    for text in measured:
        assert text in decided.measured


def errors(**values: object) -> Callable[[RunSpec], object]:
    """Validation errors by method, 0.5 for others."""
    return lambda spec: values.get(spec.method.replace("-", "_"), 0.5)


RISING = np.where(np.arange(1, 13) < 5, 0.9, 0.5)  # chance level until epoch 4


def test_leaves_chance(made: Made) -> None:
    name = "cifar10-resnet110-twin"
    claim = deep_claims.leaves_chance()
    judged(claim, made(name, val_error=errors(prox_sps=RISING, sps=0.9)), True, "ProxSPS epoch 5, epoch 5; SPS never")
    judged(claim, made(name, val_error=errors(prox_sps=RISING, sps=RISING)), False, "SPS epoch 5")
    judged(claim, made(name, val_error=errors(prox_sps=0.8, sps=0.9)), False, "ProxSPS never")
    early = deep_claims.leaves_chance(sps_after=4)
    judged(early, made(name, val_error=errors(prox_sps=0.7, sps=RISING)), True, "ProxSPS epoch 1")
    judged(early, made(name, val_error=errors(prox_sps=RISING, sps=0.9)), False)
    one_of_two = made(name, val_error=lambda spec: 0.9 if spec.method == "sps" and spec.seed else 0.5)
    judged(claim, one_of_two, False)


def test_tiny_steps(made: Made) -> None:
    name, claim = "cifar10-resnet110-twin", deep_claims.tiny_steps
    small = {"zeta_median": lambda spec: 1e-8 if spec.method == "sps" else 1.0}
    judged(claim, made(name, val_error=errors(sps=0.9), **small), True, "SPS 1.0e-08, ProxSPS 1.0e+00; 24 epochs")
    judged(claim, made(name, val_error=errors(sps=0.9)), False, "1.0e+00")
    judged(claim, made(name, val_error=errors(sps=0.5), **small), False, "0 epochs")
    judged(claim, made(name, val_error=errors(sps=0.9, prox_sps=0.9), **small), False, "24 epochs against 24")
    both = {"zeta_median": lambda spec: 1e-8}
    judged(claim, made(name, val_error=errors(sps=0.9, prox_sps=0.5), **both), False, "ProxSPS 1.0e-08")


def test_faster_than_adamw(made: Made) -> None:
    name, claim = "cifar10-resnet110-twin", deep_claims.faster_than_adamw
    judged(claim, made(name, val_error=errors(prox_sps=0.5, adamw=RISING)), True, "ProxSPS epoch 1, AdamW epoch 5")
    judged(claim, made(name, val_error=errors(prox_sps=RISING, adamw=0.5)), False, "ProxSPS epoch 5, AdamW epoch 1")
    judged(claim, made(name, val_error=errors(prox_sps=0.56, adamw=0.5)), False, "ProxSPS never")
    later = np.where(np.arange(1, 13) < 4, 0.9, 0.5)  # a little faster is not considerably faster
    judged(claim, made(name, val_error=errors(prox_sps=later, adamw=RISING)), False, "ProxSPS epoch 4, AdamW epoch 5")
    guessing = made(name, val_error=errors(prox_sps=0.89, adamw=0.9))
    judged(claim, guessing, False, "ProxSPS never, AdamW never")
    for useless in (0.9, 0.86, math.nan):  # nothing to be faster than
        judged(claim, made(name, val_error=errors(prox_sps=0.5, adamw=useless)), False)
    judged(claim, made(name, val_error=errors(prox_sps=0.5, adamw=0.82)), True, "AdamW never (18.0% at the end)")


def test_larger_strengths_are_all_but_the_smallest(made: Made) -> None:
    name, claim = "cifar10-resnet110", deep_claims.faster_than_adamw

    def slow_adamw(*strengths: float) -> Frames:
        return made(
            name,
            val_error=lambda spec: RISING if spec.method == "adamw" and spec.weight_decay in strengths else 0.3,
        )

    judged(claim, slow_adamw(5e-5, 5e-4), True, "lambda = 5e-05, above", "lambda = 0.0005, above")
    judged(claim, slow_adamw(5e-4), False, "lambda = 5e-05, above")


FLOORS = [("cifar10-resnet56-twin", 0.2), ("cifar10-resnet56", 0.5)]


@pytest.mark.parametrize(("name", "floor"), FLOORS)
def test_competitive(made: Made, name: str, floor: float) -> None:
    claim, both = (partial(each, floor=floor) for each in (deep_claims.competitive, deep_claims.both_work))
    ok, bad = {"adamw": 0.4, "prox_sps": 0.4, "sps": 0.4}, float("nan")

    def of(**values: object) -> Frames:
        return made(name, val_error=errors(**{**ok, **values}))

    judged(claim, of(prox_sps=0.415), True, "-1.5 points", "ProxSPS 58.5%", "AdamW 60.0%")
    judged(claim, of(prox_sps=0.43), False, "-3.0 points")
    judged(claim, of(prox_sps=bad), False, "ProxSPS diverged")
    judged(claim, of(adamw=bad), False, "AdamW diverged")
    judged(claim, of(adamw=0.87), False, "AdamW 13.0%")  # nothing to compare with
    judged(claim, of(sps=0.9), True, "+0.0 points")
    judged(both, of(sps=0.9), False, "-50.0 points", "SPS 10.0%")
    judged(both, of(adamw=0.41), True, "+1.0 points")
    for check in (claim, both):
        judged(check, made(name, val_error=lambda spec: 0.9), False, "+0.0 points", "10.0%")
        low = made(name, val_error=errors(prox_sps=0.795, sps=0.794, adamw=0.79))
        judged(check, low, floor < 0.205, "ProxSPS 20.5%")  # twice chance level is not well, with all epochs


def test_the_floor_of_the_published_experiments_is_well_above_chance(made: Made) -> None:
    low = errors(prox_sps=0.795, sps=0.794, adamw=0.78)
    for name in ("cifar10-resnet56", "cifar10-resnet110"):
        verdicts = {claim.name: claim.holds for claim in EXPERIMENTS[name].judge(made(name, val_error=low))}
        assert not any(verdicts.get(claim, False) for claim in ("both-work", "competitive"))


def test_seeds_that_disagree_are_no_lead(made: Made) -> None:
    """Leads of 1 and of 21 points: their mean is 11, and nothing is sure. Leads of 11 and 12 are."""
    name, claim = "cifar10-resnet56-twin", partial(deep_claims.competitive, floor=0.2)

    def of(second: float) -> Frames:
        return made(name, val_error=lambda spec: 0.5 if spec.method != "prox-sps" else second if spec.seed else 0.49)

    judged(claim, of(0.29), False, "minimum +11.0 points, 95 % lower bound -52.1")
    judged(claim, of(0.485), True, "minimum +1.2 points, 95 % lower bound -0.3")


def test_less_sensitive(made: Made) -> None:
    for name, claim in (
        ("cifar10-resnet56", deep_claims.less_sensitive(0.3)),
        ("imagenet32-resnet110", deep_claims.less_sensitive(imagenet_claims.WORKS)),
    ):

        def sensitive(method: str, by: float = 0.25) -> Callable[[RunSpec], float]:
            return lambda spec: 0.5 + by * (spec.method == method and spec.weight_decay == 5e-4)

        judged(claim, made(name, val_error=sensitive("adamw")), True, "AdamW 25.0%", "ProxSPS 0.0%")
        judged(claim, made(name, val_error=sensitive("sps")), False, "SPS 25.0%")
        judged(claim, made(name), False, "AdamW 0.0%")
        judged(claim, made(name, val_error=sensitive("adamw", 0.005)), False, "+0.5 points")  # a margin
        gone = lambda spec: math.nan if spec.method == "adamw" and spec.weight_decay == 5e-4 else 0.5  # noqa: E731
        judged(claim, made(name, val_error=gone), False, "AdamW diverged in 2 of 6 runs")
    guessing = made("cifar10-resnet56", val_error=lambda spec: 0.89 if spec.method == "adamw" else 0.9)
    judged(deep_claims.less_sensitive(), guessing, False)


def test_smaller_norm(made: Made) -> None:
    name = "cifar10-resnet110"
    claim = partial(norm_claims.smaller_norm, floor=0.2)
    largest = partial(claim, which="largest")

    def norms(spec: RunSpec) -> float:
        large = spec.weight_decay == 5e-4
        return {"prox-sps": 10.0 if large else 90.0, "sps": 60.0, "adamw": 20.0}[spec.method]

    half = lambda spec: 1.0 + (spec.method != "prox-sps")  # noqa: E731
    trained = {"val_error": lambda spec: 0.5}
    judged(claim, made(name, model_norm=half, **trained), True, "0.500")
    judged(claim, made(name, model_norm=norms, **trained), False, "4.500")
    judged(largest, made(name, model_norm=norms, **trained), True, "0.500", "AdamW 20")
    judged(largest, made(name, model_norm=lambda spec: 1.0, **trained), False)
    judged(claim, made(name, model_norm=half, val_error=lambda spec: 0.9), False, "accuracy at least 10.0%")
    lost = lambda spec: math.nan if spec.method == "adamw" and spec.seed else half(spec)  # noqa: E731
    judged(claim, made(name, model_norm=lost, **trained), False, "AdamW diverged in 3 of 6 runs")


def test_stagnation_and_its_reason(made: Made) -> None:
    name, claim = "cifar10-resnet56", partial(deep_claims.stagnates, floor=0.2)
    flat, rising = np.where(np.arange(12) < 2, 0.9, 0.2), np.linspace(0.9, 0.2, 12)
    judged(claim, made(name, val_error=errors(prox_sps=flat, sps=rising)), True, "ProxSPS +0.0 points from 80.0%")
    judged(claim, made(name, val_error=errors(prox_sps=rising, sps=rising)), False, "ProxSPS +50.9 points")
    judged(claim, made(name, val_error=errors(prox_sps=flat, sps=flat)), False, "SPS +0.0 points")
    judged(claim, made(name, val_error=errors(prox_sps=0.9, sps=rising)), False, "ProxSPS +0.0 points from 10.0%")
    one = lambda spec: math.nan if spec.method == "prox-sps" and spec.seed else rising  # noqa: E731
    judged(claim, made(name, val_error=one), False, "ProxSPS diverged in 1 of 2 runs")  # at the largest lambda
    decay = np.where(np.arange(12) < 6, 5.0, 0.01)
    judged(deep_claims.zeta_below_alpha, made(name, zeta_median=lambda spec: decay), True, "0.01 and 0.002")
    judged(deep_claims.zeta_below_alpha, made(name, zeta_median=lambda spec: 0.01), False, "0.01 and 1")
    judged(deep_claims.zeta_below_alpha, made(name, zeta_median=lambda spec: 20 * decay), False, "0.2 and 0.002")
    lost = lambda spec: math.nan if spec.seed else decay  # noqa: E731
    judged(deep_claims.zeta_below_alpha, made(name, zeta_median=lost), False, "ProxSPS diverged in 1 of 2 runs")


def test_adaptive_helps(made: Made) -> None:
    name, claim = "cifar10-resnet56-adaptive", adaptive_claims.adaptive_helps

    def with_cap(error: float, otherwise: float) -> Frames:
        return made(name, val_error=lambda spec: error if spec.schedule == "adaptive" else otherwise)

    judged(claim, with_cap(0.25, 0.5), True, "+25.0 points, 95 % lower bound +25.0 (75.0% against 50.0%")
    judged(claim, with_cap(0.495, 0.5), False, "+0.5 points")
    judged(claim, with_cap(0.85, 0.9), False, "+5.0 points, 95 % lower bound +5.0 (15.0%")  # neither has been trained
    judged(claim, with_cap(0.5, 0.5), False, "+0.0 points")


def test_norms_so_far(made: Made) -> None:
    name, claim = "cifar10-resnet56-twin", partial(norm_claims.norms_so_far, epoch=5)

    def norms(sps: float, ours: float = 30.0, adamw: float = 20.0, spread: float = 0.0) -> Frames:
        values = {"sps": sps, "prox-sps": ours, "adamw": adamw}
        return made(name, model_norm=lambda spec: values[spec.method] + spread * spec.seed * (spec.method == "sps"))

    judged(claim, norms(40.0), True, "1.333 (95 % lower bound 1.333) and 1.500")
    judged(claim, norms(40.0, ours=15.0), False, "2.667", "0.750")
    judged(claim, norms(25.0), False, "0.833")
    partly = claim(norms(30.1, spread=2.0))
    assert partly.part == "the difference from SPS is within the spread of the runs"
    assert "in the published epoch 5" in claim(norms(40.0)).gist.lower()


def test_good_with_c_1(made: Made) -> None:
    name, claim = "cifar10-resnet56", deep_claims.good_with_c_1
    judged(claim, made(name, val_error=errors(sps=0.2, adamw=0.3)), True, "+10.0 points", "SPS 80.0% at lambda = ")
    judged(claim, made(name, val_error=errors(sps=0.3, adamw=0.3)), False, "+0.0 points")
    judged(claim, made(name, val_error=errors(sps=0.6, adamw=0.7)), False, "SPS 40.0%")  # works badly
    judged(claim, made(name, val_error=errors(sps=0.2, adamw=0.9)), False, "AdamW 10.0%")  # nothing to compare with
    best = lambda spec: 0.1 if spec.method == "sps" and spec.weight_decay == 5e-5 else 0.2  # noqa: E731
    judged(claim, made(name, val_error=best), True, "SPS 90.0% at lambda = 5e-05")


def test_less_sensitive_in_part_without_the_smallest_lambda(made: Made) -> None:
    name, claim = "cifar10-resnet110", deep_claims.less_sensitive(ours=("prox-sps",))

    def error(spec: RunSpec) -> float:
        slow = 0.3 * (spec.weight_decay == 5e-6)
        return 0.2 + slow + 0.05 * (spec.method == "adamw" and spec.weight_decay == 5e-4) * (1 - slow)

    found = claim(made(name, val_error=error))
    assert not found.holds
    assert found.part.startswith("without lambda = 5e-06: +5.0 points")
    assert claim(made(name, val_error=lambda spec: 0.2 + 300 * spec.weight_decay)).part == ""


# One epoch at full size


def test_the_first_epoch(made: Made) -> None:
    def epoch(ours: float, sps: float, **metrics: Callable[[RunSpec], object]) -> Frames:
        norm = lambda spec: ours if spec.method == "prox-sps" else sps  # noqa: E731
        return made("cifar10-resnet110-epoch", epochs=1, model_norm=norm, **metrics)

    judged(first_epoch.weights_shrink, epoch(82.287, 100.0), True, "ratio 0.8229")
    judged(first_epoch.weights_shrink, epoch(82.6, 100.0), False, "0.380%")
    judged(first_epoch.norms_as_published, epoch(74.2, 90.1), True, "0.05%", "0.03%")
    judged(first_epoch.norms_as_published, epoch(74.2, 89.0), False, "1.25%")
    still = {
        "zeta_median": lambda spec: 1e-9,
        "train_loss": lambda spec: 10.0 if spec.method == "prox-sps" else 1e4,
    }
    judged(first_epoch.stands_still, epoch(1.0, 1.0, **still), True, "SPS: zeta_k 1.0e-09, loss 1e+04")
    judged(first_epoch.stands_still, epoch(1.0, 1.0, **{**still, "train_loss": lambda spec: 1e4}), False)
    judged(first_epoch.stands_still, epoch(1.0, 1.0, **{**still, "zeta_median": lambda spec: 1e-3}), False)


# ImageNet32

NAME = "imagenet32-resnet110"


def test_equally_well(made: Made) -> None:
    claim = imagenet_claims.equally_well
    judged(claim, made(NAME, val_error=errors(sps=0.51)), True, "largest 1.0 points")
    judged(claim, made(NAME, val_error=errors(sps=0.55)), False, "largest 5.0 points")
    judged(claim, made(NAME, val_error=lambda spec: 0.999), False, "largest 0.0 points")
    judged(claim, made(NAME, val_error=errors(prox_sps=0.88, sps=0.865)), False, "largest 1.5 points")  # of 12 and 13.5
    judged(claim, made(NAME, val_error=errors(prox_sps=0.997, sps=0.978)), False)


def test_similar_accuracies(made: Made) -> None:
    claim = imagenet_claims.similar_accuracies
    judged(claim, made(NAME, val_error=errors(sgd=0.52)), True, "2.0 points", "SGD 48.0%")
    judged(claim, made(NAME, val_error=errors(sgd=0.55)), False, "5.0 points")
    one = made(NAME, val_error=lambda spec: 0.9 if spec.method == "adamw" and spec.weight_decay == 5e-4 else 0.5)
    judged(claim, one, True, "0.0 points")  # at its best lambda
    judged(claim, made(NAME, val_error=lambda spec: 0.999), False)
    near_chance = errors(prox_sps=0.997, sps=0.978, sgd=0.9975, adamw=0.969)
    judged(claim, made(NAME, val_error=near_chance), False, "2.9 points")


def test_different_norm(made: Made) -> None:
    claim = imagenet_claims.different_norm

    def norms(**values: float) -> Frames:
        norm = lambda spec: values.get(spec.method.replace("-", "_"), 60.0)  # noqa: E731
        return made(NAME, model_norm=norm, val_error=lambda spec: 0.6)

    judged(claim, norms(adamw=120.0), True, "2 and 1")
    judged(claim, norms(adamw=30.0, sgd=66.0), True, "2 and 1.1")
    judged(claim, norms(adamw=70.0), False, "1.17 and 1")
    judged(claim, norms(adamw=120.0, sps=20.0), False, "2 and 3")
    judged(claim, norms(sgd=120.0), False, "1 and 2")


def test_adaptive_early(made: Made) -> None:
    claim, early = imagenet_claims.adaptive_early, np.where(np.arange(12) < 1, 0.5, 2.0)[:, None]
    trained = {"val_error": lambda spec: 0.6}
    judged(claim, made(NAME, zeta=lambda spec: early, **trained), True, "minimum 100% in the first", "at most 0%")
    judged(claim, made(NAME, zeta=lambda spec: 0.5, **trained), False, "at most 100%")
    judged(claim, made(NAME, zeta=lambda spec: 2.0, **trained), False, "minimum 0%")
    one = made(NAME, zeta=lambda spec: 2.0 if spec.method == "sps" else early, **trained)
    judged(claim, one, False, "minimum 0%")
    judged(claim, made(NAME, zeta=lambda spec: early, val_error=lambda spec: 0.999), False)


def test_faster_start(made: Made) -> None:
    claim, late = imagenet_claims.faster_start, np.where(np.arange(12) < 1, 0.9, 0.5)
    judged(claim, made(NAME, val_error=errors(sgd=late)), True, "+40.0 points")
    judged(claim, made(NAME, val_error=errors(sps=late)), False, "-40.0 points")
    judged(claim, made(NAME, val_error=errors(sgd=0.501)), False, "+0.1 points")
    for method, label in (("prox_sps", "ProxSPS"), ("sps", "SPS"), ("sgd", "SGD")):
        lost = made(NAME, val_error=errors(**{"sgd": late, method: math.nan}))
        judged(claim, lost, False, f"{label} diverged in 6 of 6 runs")
