"""Every claim on matrix factorisation can hold and can fail, and says the number that decided."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from judging import judged, only

from proxsps.experiments import EXPERIMENTS, matrix_claims
from proxsps.experiments.base import FAILS, HOLDS, IN_PART, Claim, Frames
from proxsps.experiments.sentences import similar
from proxsps.sweep.spec import RunSpec

Made = Callable[..., Frames]


def by_method(**values: float) -> Callable[[RunSpec], float]:
    return lambda spec: values[spec.method.replace("-", "_")]


@pytest.fixture(scope="module")
def path(made: Made) -> Made:
    return lambda **values: made("matrix-fac1", **values)


# Strengths of regularisation


def test_best_lambda(path: Made) -> None:
    claim = matrix_claims.best_lambda
    best = {"method": "prox-sps", "value": 1e-5, "elsewhere": 1e-3}
    judged(claim, path(val_error=only(lr=10.0, weight_decay=1e-4, **best)), True, "1.00e-05", "alpha_0 = 10, lambda = ")
    judged(claim, path(val_error=only(lr=5.0, weight_decay=1e-4, **best)), True, "alpha_0 = 5, lambda = 0.0001")
    judged(claim, path(val_error=only(lr=1.0, weight_decay=1e-4, **best)), False, "alpha_0 = 1, lambda = 0.0001")
    judged(claim, path(val_error=only(lr=10.0, weight_decay=1e-3, **best)), False, "1.00e-05", "lambda = 0.001")
    other = only(1e-6, only(lr=10.0, weight_decay=1e-4, **best), method="sps", lr=1.0)  # a better SPS
    judged(claim, path(val_error=other), False, "1.00e-05", "SPS 1.00e-06")


def apart(spec: RunSpec) -> float:
    """SPS is worse, the more so for large caps and strengths."""
    return 0.5 if spec.method == "prox-sps" else 1.0 + spec.lr * spec.weight_decay


def test_lower_error(path: Made) -> None:
    claim = matrix_claims.lower_error
    judged(claim, path(val_error=apart), True, "minimum 2 at alpha_0 = 5, lambda = 1e-05")
    judged(claim, path(), False, "1")  # equal is not higher
    everywhere = by_method(prox_sps=0.5, sps=1.0)
    judged(claim, path(val_error=everywhere), False, "minimum 2")  # but not in particular for large ones
    for constant in ("lr", "weight_decay"):
        half = lambda spec, name=constant: apart(spec) + (spec.method == "sps") * getattr(spec, name)  # noqa: E731
        judged(claim, path(val_error=half), True)
    worse = only(1.5, apart, method="prox-sps", lr=5.0, weight_decay=1e-2)
    judged(claim, path(val_error=worse), False, "0.7", "alpha_0 = 5, lambda = 0.01")
    judged(claim, path(val_error=only(1.5, apart, method="prox-sps", lr=1.0)), True, "minimum 2")
    for method, label in (("prox-sps", "ProxSPS"), ("sps", "SPS")):
        lost = path(val_error=only(math.nan, apart, method=method, lr=10.0, weight_decay=0.1, seed=1))
        judged(claim, lost, False, f"{label} diverged in 1 of 30 runs")


def test_a_difference_within_the_spread_of_the_seeds_does_not_count(path: Made) -> None:
    wide = lambda spec: apart(spec) * (1 + 0.8 * spec.seed * (spec.method == "sps"))  # noqa: E731
    judged(matrix_claims.lower_error, path(val_error=wide), False, "minimum 2.8")  # 2 and 3.6: two runs say little
    narrow = lambda spec: apart(spec) * (1 + 0.1 * spec.seed * (spec.method == "sps"))  # noqa: E731
    judged(matrix_claims.lower_error, path(val_error=narrow), True, "minimum 2.1")
    norms = lambda spec: 1 - 0.1 * spec.seed * (spec.method == "prox-sps")  # noqa: E731
    judged(matrix_claims.smaller_norm, path(model_norm=norms), False, "largest 0.95")


def test_same_at_1(path: Made) -> None:
    claim, far = matrix_claims.same_at_1, {"method": "sps", "lr": 10.0}
    judged(claim, path(val_error=only(2.0, by_method(prox_sps=1.02, sps=1.0), **far)), True, "2.0%", "49.0%")
    judged(claim, path(val_error=only(2.0, by_method(prox_sps=0.9, sps=1.0), **far)), False, "10.0%")
    judged(claim, path(), False, "0.0%")  # the methods never differ
    one = only(1.1, 1.0, method="prox-sps", lr=1.0, weight_decay=0.1)
    judged(claim, path(val_error=only(2.0, one, **far)), False, "lambda = 0.1")
    judged(claim, path(val_error=only(2.0, only(9.0, 1.0, method="prox-sps", lr=5.0), **far)), True, "0.0%")


def test_smaller_norm(path: Made) -> None:
    claim, smaller = matrix_claims.smaller_norm, by_method(prox_sps=0.9, sps=1.0)
    judged(claim, path(model_norm=smaller), True, "0.9")
    judged(claim, path(), False, "1")  # equal is not smaller
    judged(claim, path(model_norm=only(1.5, smaller, method="prox-sps", lr=1.0)), True, "0.9")
    worse = only(1.125, smaller, method="prox-sps", lr=10.0, weight_decay=1e-5)
    judged(claim, path(model_norm=worse), False, "1.125", "alpha_0 = 10, lambda = 1e-05")


def test_unstable_sps(path: Made) -> None:
    claim = matrix_claims.unstable_sps
    apart = only(
        1.25, only(1.75, only(1.5, 1.0, method="sps", lr=5.0), method="sps", lr=10.0), method="prox-sps", lr=10.0
    )
    judged(claim, path(objective=apart), True, "3 at alpha_0 = 10")
    calm = only(1.0, apart, method="sps", lr=5.0, weight_decay=1e-3)
    judged(claim, path(objective=calm), False, "minimum 0 at alpha_0 = 5, lambda = 0.001")
    close = {"method": "sps", "lr": 10.0}
    judged(claim, path(objective=only(1.375, apart, weight_decay=1e-2, **close)), False, "1.5", "lambda = 0.01")
    judged(claim, path(objective=only(1.25, apart, weight_decay=1e-5, **close)), True, "3 at")  # not claimed there
    judged(claim, path(objective=only(math.nan, apart, weight_decay=1e-2, **close)), True, "3 at")


def test_deteriorates_at_the_corner(path: Made) -> None:
    claim = matrix_claims.deteriorates_at_the_corner
    corner = {"value": 1.5, "method": "prox-sps", "lr": 10.0, "weight_decay": 0.1}
    bad_sps = only(1.5, 1.0, method="sps", lr=10.0)
    judged(claim, path(objective=only(elsewhere=bad_sps, **corner)), True, "50.0% there, elsewhere at most 0.0%")
    judged(claim, path(objective=only(elsewhere=1.0, **corner)), False, "SPS elsewhere up to 0.0%")
    judged(claim, path(objective=only(elsewhere=bad_sps, **{**corner, "value": 1.01})), False, "1.0% there")
    for lr, lam in ((5.0, 1e-2), (10.0, 1e-3)):  # the sentence is about every lambda
        worse = only(1.1, bad_sps, method="prox-sps", lr=lr, weight_decay=lam)
        found = judged(
            claim, path(objective=only(elsewhere=worse, **corner)), False, "50.0% there, elsewhere at most 10"
        )
        assert found.part == f"there, but at alpha_0 = {lr:g}, lambda = {lam:g} as well"
        twice = only(1.1, worse, method="prox-sps", lr=5.0, weight_decay=1e-5)
        assert judged(claim, path(objective=only(elsewhere=twice, **corner)), False).verdict == FAILS
    slow = only(1.2, bad_sps, method="prox-sps", lr=1.0, weight_decay=1e-5)  # larger caps are better there
    judged(claim, path(objective=only(elsewhere=slow, **corner)), True)


def falls(end: float) -> np.ndarray:
    """An objective that starts at 10."""
    return np.where(np.arange(12) == 0, 10.0, end)


def test_good_for_many_alpha(path: Made) -> None:
    claim, bad_sps = matrix_claims.good_for_many_alpha, only(falls(3.0), falls(1.0), method="sps", lr=10.0)
    judged(claim, path(objective=bad_sps), True, "at most 0.0%", "SPS up to 22.2%, above 10% in 4 of 12 settings")
    judged(claim, path(objective=lambda spec: falls(1.0)), False, "above 10% in 0 of 12")  # so is SPS
    judged(claim, path(), False)  # nothing has changed since the first epoch
    for lam, holds in ((1e-5, False), (1e-2, False), (0.1, True)):  # the largest is too large
        worse = only(falls(2.0), bad_sps, method="prox-sps", lr=1.0, weight_decay=lam)
        found = judged(claim, path(objective=worse), holds)
        assert found.part == ("" if holds else f"in 11 of 12 settings, not at alpha_0 = 1, lambda = {lam:g}")
    bad = only(falls(3.0), bad_sps, method="prox-sps", lr=5.0)
    assert judged(claim, path(objective=bad), False).verdict == FAILS  # no better than SPS
    judged(claim, path(objective=only(math.nan, bad_sps, method="sps", lr=10.0)), True)
    judged(claim, path(objective=only(math.nan, bad_sps, method="prox-sps", lr=1.0, seed=0)), False, "in 5 of 30 runs")


def test_what_a_stricter_rule_gives_is_told(path: Made) -> None:
    """One run found 1 in one epoch; all others stay at 1.1 or more."""
    near = only(np.where(np.arange(12) == 5, 1.0, 1.1), falls(1.1), method="prox-sps", lr=1.0, seed=0)
    frames = path(objective=only(falls(3.0), near, method="sps", lr=10.0))
    text = "at most 5% above the best objective of any run in any epoch: ProxSPS in 0 of 12 settings, SPS in 0"
    assert judged(matrix_claims.good_for_many_alpha, frames, True).strict == text
    errors = only(1e-5, 1e-3, method="prox-sps", lr=10.0, weight_decay=1e-4)
    best = matrix_claims.best_lambda(path(val_error=errors))
    assert best.strict == "by the mean over runs, ProxSPS 1.00e-05 at alpha_0 = 10, lambda = 0.0001"


def test_the_best_strength_holds_in_part_at_one_of_two_caps(path: Made) -> None:
    ours = {"method": "prox-sps", "weight_decay": 1e-4}
    one = only(2e-5, only(1e-5, 1e-3, method="prox-sps", lr=5.0, weight_decay=1e-3), lr=10.0, **ours)
    found = judged(matrix_claims.best_lambda, path(val_error=one), False, "1.00e-05 at alpha_0 = 5, lambda = 0.001")
    assert found.part == "at alpha_0 = 10; lambda = 0.001 is better at alpha_0 = 5"
    better = only(1e-6, one, method="sps", lr=1.0)
    assert judged(matrix_claims.best_lambda, path(val_error=better), False).verdict == FAILS


def test_errors_that_are_higher_in_most_settings(path: Made) -> None:
    """At one of ten settings SPS is higher on average, but within the spread of the two runs."""
    here = {"method": "sps", "lr": 5.0, "weight_decay": 1e-5}
    close = only(0.4, only(1.0, apart, **here), seed=0, **here)  # ProxSPS: 0.5
    found = judged(matrix_claims.lower_error, path(val_error=close), False)
    assert found.part == "in 9 of 10 settings, not at alpha_0 = 5, lambda = 1e-05"


def test_the_corner_is_compared_with_its_neighbours_at_the_same_strength(path: Made) -> None:
    """The rule is for all lambda, and 0.1 is one of them."""
    neighbour = only(2.0, 1.0, method="prox-sps", lr=5.0, weight_decay=0.1)
    frames = path(objective=only(1.5, neighbour, method="prox-sps", lr=10.0, weight_decay=0.1))
    assert judged(matrix_claims.deteriorates_at_the_corner, frames, False).verdict == FAILS


def larger(spec: RunSpec) -> float:
    """zeta_k of SPS is larger, the more so for large lambda."""
    return 1.0 if spec.method == "prox-sps" else 2.0 if spec.weight_decay < 1e-3 else 3.0


def test_larger_zeta(path: Made) -> None:
    claim = matrix_claims.larger_zeta
    judged(claim, path(zeta_median=larger), True, "15 of 15", "minimum 2 at", "median 3 for lambda >= 1e-3, 2 below")
    judged(claim, path(), False, "0 of 15", "1 at")
    smaller = only(0.5, larger, method="sps", lr=10.0, weight_decay=0.1)
    judged(claim, path(zeta_median=smaller), True, "14 of 15", "0.5", "alpha_0 = 10, lambda = 0.1")
    judged(claim, path(zeta_median=only(0.5, larger, method="sps", lr=10.0)), False, "10 of 15", "0.5")
    even = by_method(prox_sps=1.0, sps=2.0)
    judged(claim, path(zeta_median=even), False, "median 2 for lambda >= 1e-3, 2 below")  # not in particular
    judged(claim, path(zeta_median=only(math.nan, larger, method="sps", lr=5.0)), False, "SPS diverged in 10 of 30")


def spread(decades: float) -> np.ndarray:
    """Steps zeta_k half of which are this many decades above the others."""
    return np.tile([1.0, 10**decades], (12, 10))


def wide(spec: RunSpec) -> np.ndarray:
    """zeta_k of SPS is spread more widely, the more so for large lambda."""
    return spread(1 if spec.method == "prox-sps" else 2 if spec.weight_decay < 1e-3 else 3)


def test_more_spread_zeta(path: Made) -> None:
    claim = matrix_claims.more_spread_zeta
    judged(claim, path(zeta=wide), True, "15 of 15", "2 at", "median 3 for lambda >= 1e-3, 2 below")
    narrow = only(spread(0.5), wide, method="sps", lr=1.0, weight_decay=1e-2)
    judged(claim, path(zeta=narrow), False, "0.5", "alpha_0 = 1, lambda = 0.01")
    judged(claim, path(zeta=only(spread(0.5), wide, method="sps", weight_decay=1e-4)), True, "12 of 15")
    judged(claim, path(zeta=only(spread(3), wide, method="sps")), False, "median 3 for lambda >= 1e-3, 3 below")
    early = spread(2)
    early[2:] = spread(0.5)[2:]  # only the last ten of twelve epochs count
    judged(claim, path(zeta=only(early, wide, method="sps", lr=5.0)), False, "0.5", "alpha_0 = 5")


def test_zeta_above_alpha_at_1(path: Made) -> None:
    claim = matrix_claims.zeta_above_alpha_at_1
    judged(claim, path(zeta=lambda spec: 3.0), True, "minimum 100%", "at alpha_0 = 10 at most 0%")
    judged(claim, path(zeta=lambda spec: 0.5), False, "minimum 0%")
    judged(claim, path(zeta=lambda spec: 20.0), False, "at most 100%")  # at alpha_0 = 10 as well
    judged(claim, path(zeta=only(0.5, 3.0, method="sps", weight_decay=0.1)), False, "minimum 0% at lambda = 0.1")


# Tables of claims


def test_every_claim_is_tested_above_and_told_in_full(made: Made) -> None:
    name = "matrix-fac1"
    experiment = EXPERIMENTS[name]
    here = set(globals())
    assert all(f"test_{claim.__name__}" in here for claim in experiment.claims)
    objective = lambda spec: 1.0 + 0.1 * spec.lr - 0.1 * (spec.method == "sps")  # noqa: E731
    decided = experiment.judge(made(name, objective=objective, zeta=lambda spec: spread(1)))
    assert len({claim.name for claim in decided}) == len(experiment.claims)
    for claim in decided:
        assert all([claim.gist.endswith("."), claim.quantity, claim.rule, claim.measured])
        assert "nan" not in claim.measured


def test_the_second_data_set_is_similar_if_most_sentences_hold_there() -> None:
    def sentence(name: str, holds: bool, part: str = "") -> Callable[[Frames], Claim]:
        return lambda frames: Claim(name, "", "", "", f"{name} measured", holds, part)

    good, partly, bad = sentence("a", True), sentence("b", False, "here"), sentence("c", False)
    frames = {"runs": pd.DataFrame({"method": ["sps"], "seed": 0})}
    for sentences, verdict, text in (
        ((good, good), HOLDS, "2 of 2 hold"),
        ((good, partly), HOLDS, "1 of 2 hold, in part b: here"),
        ((good, good, partly, bad), IN_PART, "2 of 4 hold, in part b: here"),
        ((good, good, bad), FAILS, "2 of 3 hold"),
    ):
        found = similar(sentences, ("sps",))(frames)
        assert (found.verdict, found.measured) == (verdict, text)
    assert similar((good, good, good, bad), ("sps",))(frames).part == "3 of 4 sentences; not c: c measured"
