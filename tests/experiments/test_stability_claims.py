"""Every claim on stability can hold and can fail, and says the number that decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judging import judged, only

from proxsps.experiments import EXPERIMENTS, stability_claims
from proxsps.experiments.base import Frames
from proxsps.sweep.spec import RunSpec

Made = Callable[..., Frames]


@pytest.fixture(scope="module")
def stability(made: Made) -> Made:
    return lambda **values: made("matrix-fac1-stability", **values)


BEST = 0.01
SGD = [float(lr) for lr in np.linspace(0.7, 0.125, 5)[::-1]]  # its step sizes


def gap(value: float | np.ndarray) -> float | np.ndarray:
    return BEST + value


def test_proxsps_converges(stability: Made) -> None:
    claim = stability_claims.proxsps_converges
    near = only(gap(1e-4), only(gap(2e-3), BEST, method="sps"), method="prox-sps", schedule="constant")
    judged(claim, stability(objective=near), True, "1.00%", "from: epoch 1 of 12", "SPS: largest 20.00%")
    alike = only(gap(1e-4), BEST, method="prox-sps", schedule="constant")
    judged(claim, stability(objective=alike), False)  # SPS converges as well
    far = only(gap(5e-4), near, method="prox-sps", schedule="constant", lr=2.0)
    judged(claim, stability(objective=far), False, "5.00%", "alpha_0 = 2")
    judged(claim, stability(objective=only(gap(1.0), near, method="prox-sps", schedule="sqrt")), True)
    lost = only(math.nan, near, method="prox-sps", lr=2.0, seed=1)
    judged(claim, stability(objective=lost), False, "ProxSPS diverged in 2 of 20 runs")


def test_convergence_has_to_be_quick(stability: Made) -> None:
    near = only(gap(1e-4), only(gap(2e-3), BEST, method="sps"), method="prox-sps", schedule="constant")
    for first, holds in ((6, True), (7, False)):  # of twelve epochs, from which on the gap is small
        late = gap(np.where(np.arange(1, 13) < first, 1e-3, 0.0))
        frames = stability(objective=only(late, near, method="prox-sps", schedule="constant", lr=0.5))
        judged(stability_claims.proxsps_converges, frames, holds, f"epoch {first} of 12")


def test_limits_are_relative(stability: Made) -> None:
    """A loss of another scale, as with the convention of the text, changes no verdict."""
    near = only(gap(1e-4), only(gap(2e-3), BEST, method="sps", schedule="constant"), method="prox-sps")
    for claim in (stability_claims.proxsps_converges, stability_claims.sps_stalls):
        for scale in (1e-3, 1.0, 1e3):
            judged(claim, stability(objective=lambda spec, scale=scale: scale * near(spec)), True)


def test_sps_stalls(stability: Made) -> None:
    claim = stability_claims.sps_stalls
    stalled = only(gap(2e-3), BEST, method="sps", schedule="constant")
    judged(claim, stability(objective=stalled), True, "20.0%")
    both = only(gap(1e-3), stalled, method="prox-sps", schedule="constant", lr=2.0)
    judged(claim, stability(objective=both), False, "ProxSPS: largest 10.00%")
    fine = only(gap(5e-4), stalled, method="sps", schedule="constant", lr=1.25)
    judged(claim, stability(objective=fine), False, "5.0%", "alpha_0 = 1.25")
    judged(claim, stability(objective=only(BEST, stalled, method="sps", schedule="constant", lr=0.5)), True, "20.0%")
    judged(claim, stability(objective=only(math.nan, stalled, method="sps", lr=2.0)), True, "20.0%")


def test_sgd_diverges(stability: Made) -> None:
    claim = stability_claims.sgd_diverges
    gone = {"value": math.nan, "elsewhere": 1.0, "method": "sgd", "schedule": "constant", "lr": 0.7}
    judged(claim, stability(objective=only(**gone)), True, "100%", "alpha_0 = 0.7, none up to 0.55625")
    judged(claim, stability(objective=only(**gone, seed=0)), True, "50%")
    everywhere = only(math.nan, 1.0, method="sgd", schedule="constant")  # smaller ones do not help
    judged(claim, stability(objective=everywhere), False, "none nowhere")
    judged(claim, stability(), False, "0%")
    judged(claim, stability(objective=only(**{**gone, "schedule": "sqrt"})), False, "0%")
    judged(claim, stability(objective=only(**{**gone, "lr": 0.125})), False, "0%")
    both = only(math.nan, only(**gone), method="prox-sps", schedule="constant", lr=2.0, seed=0)
    judged(claim, stability(objective=both), False, "ProxSPS 50%")


def test_like_sgd(stability: Made) -> None:
    claim = stability_claims.like_sgd
    sgd = only(gap(2e-4), only(gap(1e-4), BEST, method="sgd", lr=SGD[3]), method="sgd", lr=SGD[2])
    large = only(gap(1e-2), sgd, method="sps", lr=2.0)

    def sps(value: float | np.ndarray) -> Callable[[RunSpec], Any]:
        return only(gap(value), large, method="sps", lr=0.5)

    judged(claim, stability(objective=sps(1.3e-4)), True, "1.02 and 1.02")  # 1.28e-4 lies between, on both axes' logs
    judged(claim, stability(objective=sps(3e-4)), False, "2.34")
    judged(claim, stability(objective=sps(5e-5)), False, "0.39")
    early = np.where(np.arange(12) < 8, 1e-3, 1.3e-4)  # the same at the end, but much later
    judged(claim, stability(objective=sps(early)), False, "7.8")
    tame = only(gap(1.3e-4), only(gap(2e-4), sgd, method="sps", lr=2.0), method="sps", lr=0.5)
    judged(claim, stability(objective=tame), False, "1.56 for the largest")
    lost = only(math.nan, sps(1.5e-4), method="sgd", lr=SGD[3])
    judged(claim, stability(objective=lost), False, "SGD diverged at alpha_0 = 0.55625, next to alpha_0 = 0.5")


def test_slow_for_small_caps(stability: Made) -> None:
    claim = stability_claims.slow_for_small_caps
    late = gap(np.where(np.arange(1, 13) < 8, 1e-3, 0.0))
    sps = only(late, BEST, method="sps", lr=0.5)
    both = only(late, sps, method="sgd", lr=0.125)
    judged(claim, stability(objective=both), True, "SPS at alpha_0 = 0.5: epoch 8; SGD at alpha_0 = 0.125: epoch 8")
    judged(claim, stability(objective=sps), False, "SGD at alpha_0 = 0.125: epoch 1;")
    nobody = only(late, both, method="prox-sps")
    judged(claim, stability(objective=nobody), False, "ProxSPS at best: epoch 8 (of 12)")
    lost = only(math.nan, both, method="sgd", lr=0.125, seed=0)
    judged(claim, stability(objective=lost), False, "SGD diverged")
    judged(claim, stability(objective=only(math.nan, both, method="sgd", lr=0.7)), True)


def ranges(schedule: str, **good: list[float]) -> Callable[[RunSpec], float]:
    """A gap of 1e-4 at these alpha_0 of a method, 1e-2 elsewhere."""

    def choose(spec: RunSpec) -> float:
        if spec.schedule != schedule:
            return BEST
        return gap(1e-4 if spec.lr in good.get(spec.method.replace("-", "_"), []) else 1e-2)

    return choose


WIDE = [0.5, 0.875, 1.25, 1.625, 2.0]


def test_more_robust(stability: Made) -> None:
    claim, one = stability_claims.more_robust, [SGD[3]]
    good = ranges("constant", prox_sps=WIDE, sps=[0.5], sgd=one)
    judged(claim, stability(objective=good), True, "factor 20: ProxSPS 0.5 to 2 (its whole grid), SPS 0.5 to 0.5")
    judged(claim, stability(objective=ranges("constant", prox_sps=WIDE, sps=WIDE, sgd=one)), False)
    judged(claim, stability(objective=ranges("constant", prox_sps=[0.5], sgd=one)), False, "ProxSPS 0.5 to 0.5")
    judged(claim, stability(objective=ranges("constant", prox_sps=WIDE[:2], sgd=SGD)), False, "SGD 0.125 to 0.7")
    judged(claim, stability(objective=ranges("constant", prox_sps=WIDE)), False, "SGD nowhere")
    judged(claim, stability(objective=ranges("sqrt", prox_sps=WIDE, sgd=one)), False)  # nothing on constant steps


def test_a_range_has_no_holes(stability: Made) -> None:
    for claim, schedule in ((stability_claims.more_robust, "constant"), (stability_claims.less_sensitive, "sqrt")):
        ends = ranges(schedule, prox_sps=[0.5, 2.0], sgd=[SGD[3]])
        judged(claim, stability(objective=ends), False, "ProxSPS 0.5 to 0.5")
        whole = ranges(schedule, prox_sps=WIDE, sgd=[SGD[3]])
        judged(claim, stability(objective=whole), True)
        lost = only(math.nan, whole, method="prox-sps", lr=1.25)
        judged(claim, stability(objective=lost), False, "ProxSPS diverged in 4 of 20 runs")
        gone = only(math.nan, whole, method="sgd")
        judged(claim, stability(objective=gone), False, "SGD nowhere")


def test_ranges_hold_for_every_factor(stability: Made) -> None:
    """SGD is good everywhere if fifteen times the least gap is good, and that is said."""
    claim = stability_claims.less_sensitive
    better = ranges("sqrt", prox_sps=WIDE, sgd=[SGD[3]])
    near = only(gap(1.5e-3), better, method="sgd", schedule="sqrt", lr=SGD[0])
    for lr in SGD[1:3]:
        near = only(gap(1.5e-3), near, method="sgd", schedule="sqrt", lr=lr)
    text = "factor 10: ProxSPS 0.5 to 2 (its whole grid), SGD 0.55625 to 0.55625; factor 20: ProxSPS 0.5 to 2 (its"
    judged(claim, stability(objective=near), False, text, "SGD 0.125 to 0.55625 (does not hold)")


def test_less_sensitive(stability: Made) -> None:
    claim = stability_claims.less_sensitive
    better = ranges("sqrt", prox_sps=WIDE, sgd=[SGD[2], SGD[3]])
    judged(claim, stability(objective=better), True, "ProxSPS 0.5 to 2", "SGD 0.4125 to 0.55625")
    judged(claim, stability(objective=ranges("sqrt", prox_sps=WIDE[3:], sgd=SGD[:4])), False, "SGD 0.125")


def test_an_infinite_value_of_sgd_does_not_decide_alone(stability: Made) -> None:
    """SGD diverges at its largest alpha_0, and is good at all others; ProxSPS is good at one only."""
    good = ranges("sqrt", prox_sps=[2.0], sgd=[0.125, SGD[1], SGD[2], SGD[3]])
    lost = only(math.nan, good, method="sgd", lr=0.7)
    judged(stability_claims.less_sensitive, stability(objective=lost), False, "ProxSPS 2 to 2")


def test_validation_alike(stability: Made) -> None:
    claim = stability_claims.validation_alike
    varied = only(0.3, 0.1, method="sgd", schedule="sqrt", lr=0.125)
    worse = only(0.5, varied, method="sps", schedule="constant")
    judged(claim, stability(val_error=worse), True, "1.00e-01", "5.00e-01", "at least 5 times", "3 for SGD")
    judged(claim, stability(val_error=only(0.1, worse, method="sps", schedule="constant", lr=0.5)), True)
    judged(claim, stability(val_error=only(0.1, worse, method="sps", lr=1.25)), False, "alpha_0 = 1.25")
    judged(claim, stability(val_error=only(0.6, worse, method="prox-sps", lr=0.5)), False, "6.00e-01")
    judged(claim, stability(), False)
    still = only(0.5, worse, method="sps", schedule="sqrt", lr=2.0)  # not stabilised
    judged(claim, stability(val_error=still), False, "at least 1 times")
    sensitive = only(0.4, worse, method="prox-sps", schedule="sqrt", lr=0.5)
    judged(claim, stability(val_error=sensitive), False, "4 for ProxSPS, 3 for SGD")
    judged(claim, stability(val_error=only(math.nan, worse, method="sgd", lr=0.7)), True)


def test_sqrt_stabilises(stability: Made) -> None:
    claim = stability_claims.sqrt_stabilises
    stable = only(gap(4e-3), only(gap(1e-3), BEST, method="sps"), method="sps", schedule="constant")
    judged(claim, stability(objective=stable), True, "least 4")
    one = only(gap(1.5e-3), stable, method="sps", schedule="constant", lr=0.875)
    judged(claim, stability(objective=one), False, "least 1.5 at alpha_0 = 0.875")
    judged(claim, stability(objective=only(gap(1e-4), stable, method="sps", schedule="constant", lr=0.5)), True)
    judged(claim, stability(objective=only(gap(1e-3), BEST, method="sps")), False, "least 1")


def bump(height: float) -> np.ndarray:
    """An objective that rises to `height` times its best value in the third epoch."""
    values = np.ones(12)
    values[2] = height
    return values


def test_early_bumps(stability: Made) -> None:
    claim = stability_claims.early_bumps
    sps, prox = ({"method": method, "schedule": "sqrt", "lr": 2.0} for method in ("sps", "prox-sps"))
    judged(claim, stability(objective=only(bump(4), 1.0, **sps)), True, "SPS 4", "ProxSPS 1")
    judged(claim, stability(objective=only(bump(4), 1.0, **prox)), False, "SPS 1", "ProxSPS 4")
    both = only(bump(2), only(bump(4), 1.0, **sps), **prox)
    judged(claim, stability(objective=both), False, "SPS 4", "ProxSPS 2")
    judged(claim, stability(objective=only(bump(4), 1.0, **{**sps, "lr": 0.5})), False, "SPS 1")
    late = np.ones(12)
    late[10] = 4.0
    judged(claim, stability(objective=only(late, 1.0, **sps)), False, "SPS 1")


def test_a_sps_run_that_diverges_early_is_the_largest_bump(stability: Made) -> None:
    gone = np.where(np.arange(12) < 3, 1.0, np.nan)
    frames = stability(objective=only(gone, 1.0, method="sps", schedule="sqrt", lr=2.0))
    judged(stability_claims.early_bumps, frames, True)


def falling() -> Callable[[RunSpec], Any]:
    """ProxSPS converges with sqrt steps, and SPS stalls with constant ones."""
    stalled = only(gap(1e-2), BEST, method="sps", schedule="constant")
    return only(gap(1e-3 / np.arange(1, 13)), stalled, method="prox-sps", schedule="sqrt")


def test_exact_with_decay(stability: Made) -> None:
    claim = stability_claims.exact_with_decay
    judged(claim, stability(objective=falling()), True, "least 1.00 and 1.00", "at most 1.00")
    rising = only(gap(1e-3 * np.arange(1, 13)), falling(), method="prox-sps", schedule="sqrt", lr=0.5)
    judged(claim, stability(objective=rising), False, "least -1.00 and -1.00, at alpha_0 = 0.5")
    flat = only(gap(1e-3), falling(), method="prox-sps", schedule="sqrt", lr=1.25)
    judged(claim, stability(objective=flat), False, "least 0.00 and 0.00, at alpha_0 = 1.25")
    for until in (6, 7, 8, 9):  # it falls by 11 %, once, and stays there
        plateau = gap(np.where(np.arange(1, 13) <= until, 1e-3, 8.9e-4))
        judged(claim, stability(objective=only(plateau, falling(), method="prox-sps", schedule="sqrt")), False)
    exact = only(gap(1e-4), falling(), method="sps", schedule="constant", lr=2.0)  # with constant steps too
    judged(claim, stability(objective=exact), False, "1.0e-04 over 8.3e-05")


def test_a_run_that_diverges_does_not_converge(stability: Made) -> None:
    """Half of the runs of the largest cap are lost: no mean of the others makes that convergence."""
    gone = np.where(np.arange(12) < 8, gap(1e-3), np.nan)
    lost = only(gone, falling(), method="prox-sps", schedule="sqrt", lr=2.0, seed=1)
    judged(stability_claims.exact_with_decay, stability(objective=lost), False)


# Tables of claims


@pytest.mark.parametrize("name", ["matrix-fac1-stability", "matrix-fac2-stability"])
def test_every_claim_is_tested_above_and_told_in_full(made: Made, name: str) -> None:
    experiment = EXPERIMENTS[name]
    here = set(globals())
    assert all(f"test_{claim.__name__}" in here for claim in experiment.claims)
    objective = lambda spec: 1.0 + 0.1 * spec.lr - 0.1 * (spec.method == "sps")  # noqa: E731
    decided = experiment.judge(made(name, objective=objective))
    assert len({claim.name for claim in decided}) == len(experiment.claims)
    for claim in decided:
        assert all([claim.gist.endswith("."), claim.quantity, claim.rule, claim.measured])
        assert "nan" not in claim.measured
