"""Every claim on matrix factorisation can hold and can fail, and says the number that decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from proxsps.experiments import EXPERIMENTS, matrix_claims
from proxsps.experiments.base import Claim, Frames
from proxsps.sweep.spec import RunSpec

Made = Callable[..., Frames]


def by_method(**values: float) -> Callable[[RunSpec], float]:
    return lambda spec: values[spec.method.replace("-", "_")]


def only(
    value: Any, elsewhere: Callable[[RunSpec], Any] | float, seed: int | None = None, **where: Any
) -> Callable[[RunSpec], Any]:
    """A value at one setting, and another one elsewhere."""

    def choose(spec: RunSpec) -> Any:
        here = all(getattr(spec, name) == wanted for name, wanted in where.items()) and seed in (None, spec.seed)
        return value if here else elsewhere(spec) if callable(elsewhere) else elsewhere

    return choose


def judged(claim: Callable[[Frames], Claim], frames: Frames, holds: bool, *measured: str) -> Claim:
    decided = claim(frames)
    assert isinstance(decided.holds, bool)
    assert decided.holds is holds, decided.measured
    for text in measured:
        assert text in decided.measured
    return decided


@pytest.fixture(scope="module")
def path(made: Made) -> Made:
    return lambda **values: made("matrix-fac1", **values)


@pytest.fixture(scope="module")
def stability(made: Made) -> Made:
    return lambda **values: made("matrix-fac1-stability", **values)


# Strengths of regularisation


def test_best_strength(path: Made) -> None:
    claim = matrix_claims.best_strength
    best = {"method": "prox-sps", "value": 1e-5, "elsewhere": 1e-3}
    judged(claim, path(val_error=only(lr=10.0, weight_decay=1e-4, **best)), True, "1.00e-05", "alpha_0 = 10, lambda = ")
    judged(claim, path(val_error=only(lr=5.0, weight_decay=1e-4, **best)), True, "alpha_0 = 5, lambda = 0.0001")
    judged(claim, path(val_error=only(lr=1.0, weight_decay=1e-4, **best)), False, "alpha_0 = 1, lambda = 0.0001")
    judged(claim, path(val_error=only(lr=10.0, weight_decay=1e-3, **best)), False, "1.00e-05", "lambda = 0.001")
    other = only(1e-9, only(lr=10.0, weight_decay=1e-4, **best), method="sps", lr=1.0)  # a better SPS does not matter
    judged(claim, path(val_error=other), True, "1.00e-05")


def test_lower_error(path: Made) -> None:
    claim, lower = matrix_claims.lower_error, by_method(prox_sps=0.5, sps=1.0)
    judged(claim, path(val_error=lower), True, "0.5")
    judged(claim, path(), True, "1")
    worse = only(1.25, lower, method="prox-sps", lr=5.0, weight_decay=1e-2)
    judged(claim, path(val_error=worse), False, "1.25", "alpha_0 = 5, lambda = 0.01")
    judged(claim, path(val_error=only(1.25, lower, method="prox-sps", lr=1.0)), True, "0.5")
    judged(claim, path(val_error=only(math.nan, lower, method="prox-sps", lr=10.0, seed=1)), False, "inf")
    judged(claim, path(val_error=only(math.nan, lower, method="sps", lr=10.0, seed=1)), True, "0.5")


def test_same_for_small_caps(path: Made) -> None:
    claim = matrix_claims.same_for_small_caps
    judged(claim, path(val_error=by_method(prox_sps=1.02, sps=1.0)), True, "2.0%")
    judged(claim, path(val_error=by_method(prox_sps=0.9, sps=1.0)), False, "10.0%")
    judged(claim, path(val_error=only(1.1, 1.0, method="prox-sps", lr=1.0, weight_decay=0.1)), False, "lambda = 0.1")
    judged(claim, path(val_error=only(9.0, 1.0, method="prox-sps", lr=5.0)), True, "0.0%")


def test_smaller_norm(path: Made) -> None:
    claim, smaller = matrix_claims.smaller_norm, by_method(prox_sps=0.9, sps=1.0)
    judged(claim, path(model_norm=smaller), True, "0.9")
    judged(claim, path(), False, "1")  # equal is not smaller
    judged(claim, path(model_norm=only(1.5, smaller, method="prox-sps", lr=1.0)), True, "0.9")
    worse = only(1.125, smaller, method="prox-sps", lr=10.0, weight_decay=1e-5)
    judged(claim, path(model_norm=worse), False, "1.125", "alpha_0 = 10, lambda = 1e-05")


def test_unstable_sps(path: Made) -> None:
    claim = matrix_claims.unstable_sps
    apart = only(1.25, only(1.75, 1.0, method="sps", lr=10.0), method="prox-sps", lr=10.0)
    judged(claim, path(objective=apart), True, "3 at")
    close = {"method": "sps", "lr": 10.0}
    judged(claim, path(objective=only(1.375, apart, weight_decay=1e-2, **close)), False, "1.5", "lambda = 0.01")
    judged(claim, path(objective=only(1.25, apart, weight_decay=1e-5, **close)), True, "3 at")  # not claimed there
    judged(claim, path(objective=only(math.nan, apart, weight_decay=1e-2, **close)), True, "3 at")


def test_good_unless_both_large(path: Made) -> None:
    claim = matrix_claims.good_unless_both_large
    corner = {"value": 1.5, "method": "prox-sps", "lr": 10.0, "weight_decay": 0.1}
    decided = judged(claim, path(objective=only(elsewhere=1.0, **corner)), True, "0.5 there")
    assert "among lambda >= 1e-3" in decided.rule
    for lr, lam in ((5.0, 1e-2), (10.0, 1e-3)):
        worse = only(2.0, 1.0, method="prox-sps", lr=lr, weight_decay=lam)
        judged(claim, path(objective=only(elsewhere=worse, **corner)), False, "0.5 there", "at most 1")
    small = only(2.0, 1.0, method="prox-sps", lr=10.0, weight_decay=1e-4)  # below 1e-3 runs have not converged
    judged(claim, path(objective=only(elsewhere=small, **corner)), True)


def test_the_corner_is_compared_with_its_neighbours_at_the_same_strength(path: Made) -> None:
    """The rule says largest among lambda >= 1e-3, and 0.1 is one of them."""
    neighbour = only(2.0, 1.0, method="prox-sps", lr=5.0, weight_decay=0.1)
    frames = path(objective=only(1.5, neighbour, method="prox-sps", lr=10.0, weight_decay=0.1))
    judged(matrix_claims.good_unless_both_large, frames, False)


def test_larger_zeta(path: Made) -> None:
    claim, larger = matrix_claims.larger_zeta, by_method(prox_sps=1.0, sps=2.0)
    judged(claim, path(zeta_median=larger), True, "9 of 9", "2 at")
    judged(claim, path(), False, "0 of 9", "1 at")
    smaller = only(0.5, larger, method="sps", lr=10.0, weight_decay=0.1)
    judged(claim, path(zeta_median=smaller), True, "8 of 9", "0.5", "alpha_0 = 10, lambda = 0.1")
    judged(claim, path(zeta_median=only(0.5, larger, method="sps", lr=10.0)), False, "6 of 9", "0.5")
    judged(claim, path(zeta_median=only(0.5, larger, method="sps", weight_decay=1e-4)), True, "2 at")


def spread(decades: float) -> np.ndarray:
    """Steps zeta_k half of which are this many decades above the others."""
    return np.tile([1.0, 10**decades], (12, 10))


def test_more_spread_zeta(path: Made) -> None:
    claim = matrix_claims.more_spread_zeta
    wide = only(spread(2), only(spread(1), 1.0, method="prox-sps"), method="sps")
    judged(claim, path(zeta=wide), True, "2 at")
    narrow = only(spread(0.5), wide, method="sps", lr=1.0, weight_decay=1e-2)
    judged(claim, path(zeta=narrow), False, "0.5", "alpha_0 = 1, lambda = 0.01")
    judged(claim, path(zeta=only(spread(0.5), wide, method="sps", weight_decay=1e-4)), True, "2 at")
    early = spread(2)
    early[2:] = spread(0.5)[2:]  # only the last ten of twelve epochs count
    judged(claim, path(zeta=only(early, wide, method="sps", lr=5.0)), False, "0.5", "alpha_0 = 5")


# Stability

BEST = 0.01


def gap(value: float | np.ndarray) -> float | np.ndarray:
    return BEST + value


def test_proxsps_converges(stability: Made) -> None:
    claim = matrix_claims.proxsps_converges
    near = only(gap(1e-4), BEST, method="prox-sps", schedule="constant")
    judged(claim, stability(objective=near), True, "1.00e-04")
    far = only(gap(5e-4), near, method="prox-sps", schedule="constant", lr=2.0)
    judged(claim, stability(objective=far), False, "5.00e-04", "alpha_0 = 2")
    judged(claim, stability(objective=only(gap(1.0), near, method="prox-sps", schedule="sqrt")), True)
    judged(claim, stability(objective=only(math.nan, near, method="prox-sps", lr=2.0, seed=1)), False, "inf")


def test_sps_stalls(stability: Made) -> None:
    claim = matrix_claims.sps_stalls
    stalled = only(gap(2e-3), BEST, method="sps", schedule="constant")
    judged(claim, stability(objective=stalled), True, "2.00e-03")
    fine = only(gap(5e-4), stalled, method="sps", schedule="constant", lr=1.25)
    judged(claim, stability(objective=fine), False, "5.00e-04", "alpha_0 = 1.25")
    judged(claim, stability(objective=only(BEST, stalled, method="sps", schedule="constant", lr=0.5)), True, "2.00e-03")
    judged(claim, stability(objective=only(math.nan, stalled, method="sps", lr=2.0)), True, "2.00e-03")


def test_sgd_diverges(stability: Made) -> None:
    claim = matrix_claims.sgd_diverges
    gone = {"value": math.nan, "elsewhere": 1.0, "method": "sgd", "schedule": "constant", "lr": 0.7}
    judged(claim, stability(objective=only(**gone)), True, "100%", "alpha_0 = 0.7")
    judged(claim, stability(objective=only(**gone, seed=0)), True, "50%")
    judged(claim, stability(), False, "0%")
    judged(claim, stability(objective=only(**{**gone, "schedule": "sqrt"})), False, "0%")
    judged(claim, stability(objective=only(**{**gone, "lr": 0.125})), False, "0%")


def test_less_sensitive(stability: Made) -> None:
    claim = matrix_claims.less_sensitive

    def objective(spread: dict[str, float]) -> Callable[[RunSpec], float]:
        base = only(BEST, lambda spec: gap(1e-3), method="sps")
        for method, factor in spread.items():
            lr = 2.0 if method == "prox-sps" else 0.7
            base = only(gap(factor * 1e-3), base, method=method, lr=lr, schedule="sqrt")
        return base

    judged(claim, stability(objective=objective({"prox-sps": 2, "sgd": 8})), True, "ProxSPS 2", "SGD 8")
    judged(claim, stability(objective=objective({"prox-sps": 8, "sgd": 2})), False, "ProxSPS 8", "SGD 2")
    judged(claim, stability(objective=objective({"prox-sps": 2, "sgd": math.nan})), True, "SGD inf")


def bump(height: float) -> np.ndarray:
    """An objective that rises to `height` times its best value in the third epoch."""
    values = np.ones(12)
    values[2] = height
    return values


def test_early_bumps(stability: Made) -> None:
    claim = matrix_claims.early_bumps
    sps, prox = ({"method": method, "schedule": "sqrt", "lr": 2.0} for method in ("sps", "prox-sps"))
    judged(claim, stability(objective=only(bump(4), 1.0, **sps)), True, "SPS 4", "ProxSPS 1")
    judged(claim, stability(objective=only(bump(4), 1.0, **prox)), False, "SPS 1", "ProxSPS 4")
    judged(claim, stability(objective=only(bump(4), 1.0, **{**sps, "lr": 0.5})), False, "SPS 1")
    late = np.ones(12)
    late[10] = 4.0
    judged(claim, stability(objective=only(late, 1.0, **sps)), False, "SPS 1")


def test_a_sps_run_that_diverges_early_is_the_largest_bump(stability: Made) -> None:
    gone = np.where(np.arange(12) < 3, 1.0, np.nan)
    frames = stability(objective=only(gone, 1.0, method="sps", schedule="sqrt", lr=2.0))
    judged(matrix_claims.early_bumps, frames, True)


def test_exact_with_decay(stability: Made) -> None:
    claim = matrix_claims.exact_with_decay
    falling = only(gap(1e-3 / np.arange(1, 13)), BEST, method="prox-sps", schedule="sqrt")
    judged(claim, stability(objective=falling), True, "0.5")
    rising = only(gap(1e-3 * np.arange(1, 13)), falling, method="prox-sps", schedule="sqrt", lr=0.5)
    judged(claim, stability(objective=rising), False, "2 at alpha_0 = 0.5")


def test_a_run_that_diverges_does_not_converge(stability: Made) -> None:
    """Half of the runs of the largest cap are lost: no mean of the others makes that convergence."""
    falling = only(gap(1e-3 / np.arange(1, 13)), BEST, method="prox-sps", schedule="sqrt")
    gone = np.where(np.arange(12) < 8, gap(1e-3), np.nan)
    lost = only(gone, falling, method="prox-sps", schedule="sqrt", lr=2.0, seed=1)
    judged(matrix_claims.exact_with_decay, stability(objective=lost), False)


# Tables of claims


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name.startswith("matrix-fac")])
def test_every_claim_is_tested_above_and_told_in_full(made: Made, name: str) -> None:
    experiment = EXPERIMENTS[name]
    here = set(globals())
    assert all(f"test_{claim.__name__}" in here for claim in experiment.claims)
    objective = lambda spec: 1.0 + 0.1 * spec.lr - 0.1 * (spec.method == "sps")  # noqa: E731
    decided = experiment.judge(made(name, objective=objective, zeta=lambda spec: spread(1)))
    assert len({claim.name for claim in decided}) == len(experiment.claims)
    for claim in decided:
        assert all([claim.gist.endswith("."), claim.quantity, claim.rule, claim.measured])
        assert "nan" not in claim.measured
