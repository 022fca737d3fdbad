"""The claims on the sensors can hold and can fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from proxsps.experiments import sensor
from proxsps.experiments.base import Claim, Frames
from proxsps.sweep.spec import RunSpec

Made = Callable[..., Frames]
Setting = tuple[str, float, float]  # method, alpha_0, lambda


@pytest.fixture(scope="module")
def errors(made: Made) -> Callable[[dict[Setting, float]], Frames]:
    """Results with these validation errors, and 1 elsewhere."""

    def build(values: dict[Setting, float]) -> Frames:
        return made("sensor", val_error=lambda spec: values.get(_setting(spec), 1.0))

    return build


def _setting(spec: RunSpec) -> Setting:
    return spec.method, spec.lr, spec.weight_decay


def judged(claim: Callable[[Frames], Claim], frames: Frames, holds: bool, *measured: str) -> None:
    decided = claim(frames)
    assert isinstance(decided.holds, bool)
    assert decided.holds is holds, decided.measured
    for text in measured:
        assert text in decided.measured


def test_best_for_small_lambda(errors: Callable[..., Frames]) -> None:
    best = {("prox-sps", 10.0, 5e-5): 0.25, ("prox-sps", 5.0, 1e-4): 0.5}
    judged(sensor.best_for_small_lambda, errors(best), True, "0.250", "0.500", "ProxSPS with alpha_0 = 10")
    beaten = {**best, ("adamw", 1e-3, 1e-4): 0.125}
    judged(sensor.best_for_small_lambda, errors(beaten), False, "0.250", "AdamW with alpha_0 = 0.001, 0.125")
    assert sensor.best_for_small_lambda(errors(beaten)).part == "at lambda = 5e-05"
    elsewhere = {**best, ("sgd", 1.0, 5e-4): 0.125}
    judged(sensor.best_for_small_lambda, errors(elsewhere), True)


def test_alike_for_large_lambda(made: Made) -> None:
    def alike(values: dict[Setting, float]) -> Frames:
        return made("sensor", val_error=lambda spec: values.get(_setting(spec), 0.5))

    claim = sensor.alike_for_large_lambda
    judged(claim, alike({("sps", 5.0, 5e-4): 0.51}), True, "2.0%", "0.510")
    for method in ("prox-sps", "sps", "sgd"):
        judged(claim, alike({(method, 5.0, 5e-4): 0.55}), False, "10.0%", "0.550")
    judged(claim, alike({("sps", 10.0, 5e-4): 9.0, ("sps", 5.0, 1e-4): 9.0}), True, "0.0%")
    judged(claim, made("sensor"), False, "0.0% (1.000, 1.000, 1.000)")  # no better than the mean


def test_sgd_best_for_large_lambda(errors: Callable[..., Frames]) -> None:
    best = {("sgd", 1.0, 5e-4): 0.5}
    judged(sensor.sgd_best_for_large_lambda, errors(best), True, "SGD with alpha_0 = 1, 0.500")
    judged(sensor.sgd_best_for_large_lambda, errors({("sgd", 5.0, 5e-4): 0.5}), False, "alpha_0 = 5")
    judged(sensor.sgd_best_for_large_lambda, errors({**best, ("sps", 5.0, 5e-4): 0.25}), False, "SPS", "0.250")


def test_best_overall(errors: Callable[..., Frames]) -> None:
    best = {("prox-sps", 5.0, 1e-4): 0.25}
    judged(sensor.best_overall, errors(best), True, "ProxSPS with alpha_0 = 5", "0.0001", "0.250")
    judged(sensor.best_overall, errors({**best, ("sgd", 1.0, 5e-4): 0.125}), False, "SGD", "0.125")


def test_methods_that_share_the_least_error_have_no_winner(errors: Callable[..., Frames]) -> None:
    tie = {("prox-sps", 5.0, lam): 0.25 for lam in sensor.LAMBDAS} | {("sgd", 1.0, lam): 0.25 for lam in sensor.LAMBDAS}
    for claim in (sensor.best_for_small_lambda, sensor.best_overall, sensor.sgd_best_for_large_lambda):
        judged(claim, errors(tie), False, "not less with 95 % confidence")
        judged(claim, errors({}), False, "no better than the mean")
    two = {("prox-sps", lr, lam): 0.25 for lr in (5.0, 10.0) for lam in sensor.LAMBDAS}  # of one method: no matter
    judged(sensor.best_overall, errors(two), True, "ProxSPS", "0.250")


def test_a_lead_within_the_spread_of_the_seeds_does_not_count(made: Made) -> None:
    """0.25 and 0.5 are no sure lead over 0.45; 0.25 and 0.27 are one."""

    def ours(second: float) -> Frames:
        def error(spec: RunSpec) -> float:
            return (second if spec.seed else 0.25) if spec.method == "prox-sps" else 0.45

        return made("sensor", val_error=error)

    for claim in (sensor.best_overall, sensor.best_for_small_lambda):
        judged(claim, ours(0.5), False, "ProxSPS", "not less with 95 % confidence")
        judged(claim, ours(0.27), True, "ProxSPS")
    norms = lambda spec: 1 - 0.5 * spec.seed * (spec.method == "prox-sps")  # noqa: E731
    judged(sensor.smaller_norm, made("sensor", model_norm=norms), False, "largest 0.750")


def test_with_one_seed_there_are_no_bounds(errors: Callable[..., Frames]) -> None:
    frames = errors({("prox-sps", 5.0, 1e-4): 0.25})
    one = {name: frame[frame["seed"] == 0] for name, frame in frames.items()}
    judged(sensor.best_overall, one, True, "; one curve per setting, so there are no confidence bounds")
    assert "one curve" not in sensor.best_overall(frames).measured


def test_no_verdict_with_runs_that_diverged(errors: Callable[..., Frames]) -> None:
    values = {("sgd", 1.0, 5e-4): math.nan, ("sgd", 5.0, 5e-4): 0.5, ("prox-sps", 5.0, 1e-4): 0.25}
    judged(sensor.sgd_best_for_large_lambda, errors(values), False, "SGD diverged in 2 of 12 runs")
    judged(sensor.alike_for_large_lambda, errors({("sgd", 5.0, 5e-4): math.nan}), False, "SGD diverged")


def test_smaller_norm(made: Made) -> None:
    values = {"prox-sps": 0.75, "sps": 1.0, "sgd": 0.1, "adamw": 0.1}
    judged(sensor.smaller_norm, made("sensor", model_norm=lambda spec: values[spec.method]), True, "0.750")
    worse = lambda spec: 1.125 if _setting(spec) == ("prox-sps", 5.0, 1e-4) else values[spec.method]  # noqa: E731
    judged(sensor.smaller_norm, made("sensor", model_norm=worse), False, "1.125", "alpha_0 = 5, lambda = 0.0001")
