"""Every claim on stability can hold and can fail, and says the number that decided."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from judging import judged, only

from proxsps.experiments import EXPERIMENTS, matrix_fac, robustness_claims, stability_claims
from proxsps.experiments.base import FAILS, Frames
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


def small(value: float | np.ndarray, elsewhere: Callable[[RunSpec], Any]) -> Callable[[RunSpec], Any]:
    """A value of SPS at the two alpha_0 that SGD has as well."""
    return only(value, only(value, elsewhere, method="sps", lr=SGD[0]), method="sps", lr=SGD[2])


def test_like_sgd(stability: Made) -> None:
    claim = stability_claims.like_sgd
    sgd = only(gap(2e-4), only(gap(1e-4), BEST, method="sgd", lr=SGD[0]), method="sgd", lr=SGD[2])
    large = only(gap(1e-2), sgd, method="sps", lr=2.0)
    judged(claim, stability(objective=small(gap(2e-4), large)), True, "at most 0.99% at alpha_0 = 0.125, alpha_0 = 0.4")
    judged(claim, stability(objective=small(gap(5e-4), large)), False, "at most 3.96%")
    judged(claim, stability(objective=small(gap(-2e-4), large)), False)
    early = np.where(np.arange(12) == 3, 1e-3, 1e-4)  # in one epoch
    judged(claim, stability(objective=small(gap(early), large)), False, "at most 8.91%")
    tame = small(gap(2e-4), only(gap(5e-4), sgd, method="sps", lr=2.0))
    judged(claim, stability(objective=tame), False, "2.5 for the largest")
    lost = only(math.nan, small(gap(2e-4), large), method="sgd", lr=SGD[2])
    judged(claim, stability(objective=lost), False, "SGD diverged at alpha_0 = 0.4125, next to alpha_0 = 0.4125")


def without_small_caps(frames: Frames) -> Frames:
    """The published grid."""
    return {name: matrix_fac.published_caps(frame) for name, frame in frames.items()}


def test_without_runs_at_the_same_cap_the_neighbours_of_sgd_are_a_range(stability: Made) -> None:
    sgd = only(gap(4e-4), only(gap(1e-4), BEST, method="sgd", lr=SGD[3]), method="sgd", lr=SGD[2])
    large = only(gap(1e-2), sgd, method="sps", lr=2.0)
    for value, holds in ((2e-4, True), (5e-4, True), (1e-3, False), (5e-5, True), (-2e-4, False)):
        frames = stability(objective=only(gap(value), large, method="sps", lr=0.5))
        judged(stability_claims.like_sgd, without_small_caps(frames), holds, "at alpha_0 = 0.5;")


def test_slow_for_small_alpha(stability: Made) -> None:
    claim = stability_claims.slow_for_small_alpha
    late = gap(np.where(np.arange(1, 13) < 8, 1e-3, 0.0))
    sps = only(late, BEST, method="sps", lr=SGD[0])
    both = only(late, sps, method="sgd", lr=SGD[0])
    judged(claim, stability(objective=both), True, "SPS: epoch 8; SGD: epoch 8; ProxSPS at best: epoch 1 (of 12)")
    assert claim(stability(objective=both)).strict.endswith("the smallest of its published grid: epoch 1")
    assert judged(claim, stability(objective=sps), False, "SGD: epoch 1;").verdict == FAILS
    nobody = only(late, both, method="prox-sps")
    assert judged(claim, stability(objective=nobody), False, "ProxSPS at best: epoch 8 (of 12)").verdict == FAILS
    lost = only(math.nan, both, method="sgd", lr=SGD[0], seed=0)
    judged(claim, stability(objective=lost), False, "SGD diverged")
    judged(claim, stability(objective=only(math.nan, both, method="sgd", lr=0.7)), True)
    partly = judged(claim, without_small_caps(stability(objective=both)), False, "SGD: epoch 8; ProxSPS")
    assert partly.part == "for SGD; there are no runs of SPS at alpha_0 = 0.125"


def counted(schedule: str, **good: dict[float, float]) -> Callable[[RunSpec], float]:
    """Gaps at some alpha_0 of a method, relative to the best objective; 100 % elsewhere."""

    def choose(spec: RunSpec) -> float:
        if spec.schedule != schedule:
            return BEST
        return BEST * (1 + good.get(spec.method.replace("-", "_"), {}).get(spec.lr, 1.0))

    return choose


WIDE = [0.5, 0.875, 1.25, 1.625, 2.0]


def test_more_robust(stability: Made) -> None:
    claim, all_good = robustness_claims.more_robust, dict.fromkeys(WIDE, 0.005)
    one = {SGD[3]: 0.005}
    good = counted("constant", prox_sps=all_good, sps={0.5: 0.005}, sgd=one)
    judged(claim, stability(objective=good), True, "within 1%: ProxSPS 5, SPS 1, SGD 1; within 2%:", "(of 5, 5, 5)")
    equal = counted("constant", prox_sps=all_good, sps=all_good, sgd=one)
    assert judged(claim, stability(objective=equal), False).verdict == FAILS
    single = counted("constant", prox_sps={0.5: 0.005}, sgd={})
    assert judged(claim, stability(objective=single), False, "ProxSPS 1, SPS 0, SGD 0").verdict == FAILS
    other = counted("constant", prox_sps={0.5: 0.005, 0.875: 0.005}, sgd=dict.fromkeys(SGD, 0.005))
    assert judged(claim, stability(objective=other), False, "SGD 5").verdict == FAILS
    small = counted("constant", prox_sps=all_good, sps=dict.fromkeys((SGD[0], SGD[2], *WIDE[:3]), 0.005), sgd=one)
    judged(claim, stability(objective=small), True, "SPS 3")  # SPS is counted on its published grid
    judged(claim, stability(objective=counted("sqrt", prox_sps=all_good, sgd=one)), False)  # not on constant steps
    lost = only(math.nan, good, method="prox-sps", lr=1.25)
    judged(claim, stability(objective=lost), False, "ProxSPS diverged in 4 of 20 runs")


def test_less_sensitive(stability: Made) -> None:
    claim = robustness_claims.less_sensitive
    ours = dict(zip(WIDE, (0.04, 0.03, 0.015, 0.005, 0.002), strict=True))
    better = counted("sqrt", prox_sps=ours, sgd={SGD[2]: 0.045, SGD[3]: 0.04})
    text = "within 1%: ProxSPS 2, SGD 0; within 2%: ProxSPS 3, SGD 0; within 5%: ProxSPS 5, SGD 2 (of 5, 5)"
    found = judged(claim, stability(objective=better), True, text)
    assert found.strict == "within ten times the smallest gap: ProxSPS 3, SGD 0"
    partly = counted("sqrt", prox_sps=ours, sgd=dict.fromkeys(SGD, 0.04))
    assert judged(claim, stability(objective=partly), False).part == "within 1% and 2%"
    worse = counted("sqrt", prox_sps={2.0: 0.002}, sgd=dict.fromkeys(SGD, 0.005))
    assert judged(claim, stability(objective=worse), False, "SGD 5").verdict == FAILS
    gone = only(math.nan, worse, method="sgd", lr=0.7)  # an infinite value of SGD does not decide alone
    assert judged(claim, stability(objective=gone), False, "SGD 4").verdict == FAILS


def test_validation_alike(stability: Made) -> None:
    claim = robustness_claims.validation_alike
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


def test_sqrt_stabilises_sps(stability: Made) -> None:
    claim = stability_claims.sqrt_stabilises_sps
    stable = only(gap(4e-3), only(gap(1e-3), BEST, method="sps"), method="sps", schedule="constant")
    judged(claim, stability(objective=stable), True, "minimum 4")
    one = only(gap(1.5e-3), stable, method="sps", schedule="constant", lr=0.875)
    judged(claim, stability(objective=one), False, "minimum 1.5 at alpha_0 = 0.875")
    judged(claim, stability(objective=only(gap(1e-4), stable, method="sps", schedule="constant", lr=0.5)), True)
    judged(claim, stability(objective=only(gap(1e-3), BEST, method="sps")), False, "minimum 1")


def bump(height: float) -> np.ndarray:
    """A gap that rises to `height` times its smallest value in the third epoch."""
    values = np.full(12, 1e-3)
    values[2] *= height
    return gap(values)


def test_early_bumps(stability: Made) -> None:
    claim = stability_claims.early_bumps
    sps, prox = ({"method": method, "schedule": "sqrt", "lr": 2.0} for method in ("sps", "prox-sps"))
    flat = only(bump(1), BEST, schedule="sqrt")
    found = judged(claim, stability(objective=only(bump(4), flat, **sps)), True, "SPS 4 at alpha_0 = 2, ProxSPS 1")
    assert found.strict == "rise of the objective, largest alpha_0, median over runs: SPS 1.27, ProxSPS 1"
    judged(
        claim, stability(objective=only(bump(1.3), flat, **{**sps, "lr": 1.625})), True, "SPS 1.3 at alpha_0 = 1.625"
    )
    judged(claim, stability(objective=only(bump(4), flat, **prox)), False, "SPS 1", "ProxSPS 4")
    both = only(bump(2), only(bump(4), flat, **sps), **prox)
    judged(claim, stability(objective=both), False, "SPS 4", "ProxSPS 2")
    judged(claim, stability(objective=only(bump(4), flat, **{**sps, "lr": 0.5})), False, "SPS 1")
    late = bump(1)
    late[10] = gap(4e-3)
    judged(claim, stability(objective=only(late, flat, **sps)), False, "SPS 1")


def test_a_sps_run_that_diverges_early_is_the_largest_bump(stability: Made) -> None:
    gone = np.where(np.arange(12) < 3, gap(1e-3), np.nan)
    flat = only(bump(1), BEST, schedule="sqrt")
    frames = stability(objective=only(gone, flat, method="sps", schedule="sqrt", lr=2.0))
    judged(stability_claims.early_bumps, frames, True)


def falling() -> Callable[[RunSpec], Any]:
    """ProxSPS converges with sqrt steps, and SPS stalls with constant ones."""
    stalled = only(gap(1e-2), BEST, method="sps", schedule="constant")
    return only(gap(1e-3 / np.arange(1, 13)), stalled, method="prox-sps", schedule="sqrt")


def test_exact_with_decay(stability: Made) -> None:
    claim = stability_claims.exact_with_decay
    judged(claim, stability(objective=falling()), True, "minimum 1.00 and 1.00", "at most 1.00")
    rising = only(gap(1e-3 * np.arange(1, 13)), falling(), method="prox-sps", schedule="sqrt", lr=0.5)
    judged(claim, stability(objective=rising), False, "minimum -1.00 and -1.00, at alpha_0 = 0.5")
    flat = only(gap(1e-3), falling(), method="prox-sps", schedule="sqrt", lr=1.25)
    judged(claim, stability(objective=flat), False, "minimum 0.00 and 0.00, at alpha_0 = 1.25")
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


def test_every_claim_is_tested_above_and_told_in_full(made: Made) -> None:
    name = "matrix-fac1-stability"
    experiment = EXPERIMENTS[name]
    here = set(globals())
    assert all(f"test_{claim.__name__}" in here for claim in experiment.claims)
    objective = lambda spec: 1.0 + 0.1 * spec.lr - 0.1 * (spec.method == "sps")  # noqa: E731
    decided = experiment.judge(made(name, objective=objective))
    assert len({claim.name for claim in decided}) == len(experiment.claims)
    for claim in decided:
        assert all([claim.gist.endswith("."), claim.quantity, claim.rule, claim.measured])
        assert "nan" not in claim.measured
