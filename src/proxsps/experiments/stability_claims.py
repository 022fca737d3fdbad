"""What the paper says about the stability of matrix factorisation at one strength, checked by numbers.

Limits are relative to the best objective found, so that they mean the same for every scale of the loss. The published
figure has a best objective of 0.0105.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from proxsps.experiments.base import Frames, over_seeds, setting
from proxsps.experiments.matrix_claims import GOOD
from proxsps.experiments.sentences import DivergedError, epochs, first_within, label, require_finite, states

ALL = ("prox-sps", "sps", "sgd")
POLYAK = ("prox-sps", "sps")
UNSTABLE = 0.5  # SPS with constant steps is unstable for alpha_0 above
CONVERGED = 0.02  # of the best objective: 2e-4 in the published figure, which shows 1e-5 to 1e-4 for ProxSPS
STALLED = 0.1  # of the best objective: 1e-3 in the published figure, which shows 1e-3 to 7e-3 for SPS
FACTORS = (5, 10, 20)  # times the least gap: what counts as good should not depend on the factor
# Decay of the gap. The theorem bounds the squared norm of the envelope's gradient by a multiple of k^(-1/2), hence the
# norm by one of k^(-1/4); a gap is at most a distance times the norm.
RATE = 0.25


def _gaps(runs: pd.DataFrame, schedule: str, metric: str = "objective") -> pd.Series:
    """Objective above the best one found, mean over runs, indexed by method and alpha_0."""
    means = over_seeds(runs, metric).xs(schedule, level="schedule").droplevel("weight_decay")
    return means - runs["objective"].min() if metric == "objective" else means


def _curves(runs: pd.DataFrame) -> pd.DataFrame:
    """Objective above the best one found, mean over runs, by method, schedule, alpha_0 (rows) and epoch (columns).

    Infinity where a run has diverged.
    """
    finite = runs.assign(objective=runs["objective"].fillna(math.inf))
    mean = finite.groupby(["method", "schedule", "lr", "epoch"])["objective"].mean().unstack()
    return mean - runs["objective"].min()


def _at(curves: pd.DataFrame, share: float) -> tuple[pd.Series, float]:
    """Gaps after a share of the epochs, as medians over a tenth of all epochs, and the middle of these."""
    last = int(curves.columns.max())
    epoch, width = math.ceil(share * last), max(1, last // 10)
    return curves.loc[:, epoch - width + 1 : epoch].median(axis=1), epoch - (width - 1) / 2


def _good_from(runs: pd.DataFrame) -> pd.Series:
    """Epoch from which on the gap is at most 5 % of the best objective, constant steps, by method and alpha_0."""
    level = GOOD * runs["objective"].min()
    curves = _curves(runs).xs("constant", level="schedule")
    return curves.apply(lambda gaps: first_within(gaps, level), axis=1)


# Constant steps


@states(
    "proxsps-converges",
    "With constant steps ProxSPS converges quickly for all alpha_0, while SPS is unstable.",
    "objective above the best one found, relative to it, after the last epochs, and the epoch from which on it is at "
    f"most {GOOD:.0%}; constant schedule",
    f"for ProxSPS at most {CONVERGED:.0%}, and {GOOD:.0%} from half of the epochs on, at every alpha_0; for SPS not",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def proxsps_converges(frames: Frames) -> tuple[str, bool]:
    """ProxSPS converges where SPS does not."""
    runs = frames["runs"]
    gaps = _gaps(runs, "constant") / runs["objective"].min()
    ours, other, when = gaps["prox-sps"], gaps["sps"], _good_from(runs)["prox-sps"]
    return (
        f"ProxSPS: largest {ours.max():.2%} at {setting(ours.idxmax())}, at most {GOOD:.0%} from: "
        f"{epochs([when.max()])} of {runs['epoch'].max()}; SPS: largest {other.max():.2%}",
        ours.max() <= CONVERGED < other.max() and when.max() <= runs["epoch"].max() / 2,
    )


@states(
    "sps-stalls",
    "With constant steps SPS is unstable for alpha_0 above 0.5 and stalls.",
    "objective above the best one found, relative to it, after the last epochs, constant schedule, alpha_0 > 0.5",
    f"at least {STALLED:.0%} for SPS at every alpha_0; for ProxSPS at most a tenth of SPS's least",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def sps_stalls(frames: Frames) -> tuple[str, bool]:
    """SPS with large caps."""
    gaps = _gaps(frames["runs"], "constant") / frames["runs"]["objective"].min()
    gap, other = (gaps[method][gaps[method].index > UNSTABLE] for method in ("sps", "prox-sps"))
    return (
        f"SPS: least {gap.min():.1%} at {setting(gap.idxmin())}; ProxSPS: largest {other.max():.2%}",
        gap.min() >= STALLED and other.max() <= gap.min() / 10,
    )


@states(
    "sgd-diverges",
    "SGD diverges for large alpha_0; it needs much smaller ones than ProxSPS.",
    "share of runs that diverged, constant schedule: SGD at its largest alpha_0, ProxSPS at larger ones",
    "SGD at least one half, but none at alpha_0 of at most half of ProxSPS's largest; ProxSPS none",
    needs=("prox-sps", "sgd"),
)
def sgd_diverges(frames: Frames) -> tuple[str, bool]:
    """SGD with steps that are short for the other methods."""
    runs = frames["runs"]
    final = runs[(runs["schedule"] == "constant") & (runs["epoch"] == runs["epoch"].max())]
    share = final["objective"].isna().groupby([final["method"], final["lr"]]).mean()
    theirs, ours = share["sgd"], share["prox-sps"]
    safe = theirs.index[theirs == 0].max()
    return (
        f"SGD {theirs.iloc[-1]:.0%} at {setting(theirs.index[-1])}, none "
        f"{'nowhere' if math.isnan(safe) else f'up to {safe:g}'}; ProxSPS {ours.max():.0%} up to "
        f"{setting(ours.index[-1])}",
        theirs.iloc[-1] >= 0.5 and safe <= ours.index[-1] / 2 and ours.max() == 0,
    )


@states(
    "like-sgd",
    "SPS is unstable for large alpha_0, while for small alpha_0 its performance is similar to that of SGD.",
    "objective above the best one found, SPS at its smallest alpha_0 over SGD there (between the nearest alpha_0 of "
    "its grid), constant schedule, at half of the epochs and at the end; and SPS at its largest alpha_0 over that",
    "between 1/2 and 2 both times; above 3 for the largest alpha_0",
    needs=ALL,  # the best objective found is that of all methods
    finite="objective",
    unless=("sps", "sgd"),
)
def like_sgd(frames: Frames) -> tuple[str, bool]:
    """SPS with its smallest cap against SGD with the same step, between two of SGD's grid."""
    curves = _curves(frames["runs"])
    (middle, _), (end, _) = _at(curves, 0.5), _at(curves, 1)
    at = end["sps"]["constant"].index[0]
    expected = [_between(gaps["sgd"]["constant"], at) for gaps in (middle, end)]
    ratios = [gaps["sps"]["constant"][at] / sgd for gaps, sgd in zip((middle, end), expected, strict=True)]
    large = end["sps"]["constant"].iloc[-1] / expected[1]
    return (
        f"{ratios[0]:.3g} and {ratios[1]:.3g} at {setting(at)}; {large:.3g} for the largest",
        all(0.5 <= ratio <= 2 for ratio in ratios) and large > 3,
    )


def _between(gaps: pd.Series, at: float) -> float:
    """A gap at some alpha_0, interpolated on logarithmic axes between its neighbours, which must not have diverged."""
    near = pd.concat([gaps[gaps.index <= at].iloc[-1:], gaps[gaps.index > at].iloc[:1]])
    lost = near.index[near == math.inf]
    if len(lost):
        raise DivergedError(f"SGD diverged at {setting(lost[0])}, next to {setting(at)}")
    if len(near) == 1:
        return float(near.iloc[0])
    share = math.log(at / near.index[0]) / math.log(near.index[1] / near.index[0])
    return float(near.iloc[0] ** (1 - share) * near.iloc[1] ** share)


@states(
    "slow-for-small-alpha",
    "SPS with small alpha_0 is like SGD; however, convergence will be very slow there.",
    f"epoch from which on the objective is at most {GOOD:.0%} above the best one found, smallest alpha_0, constant "
    "schedule",
    "after half of the epochs for SPS and SGD, but before for ProxSPS at some alpha_0",
    needs=ALL,
)
def slow_for_small_caps(frames: Frames) -> tuple[str, bool]:
    """The smallest steps of the grids."""
    runs = frames["runs"]
    smallest = runs[runs["lr"] == runs.groupby("method")["lr"].transform("min")]
    require_finite(smallest[smallest["schedule"] == "constant"], "objective", ("sps", "sgd"))
    require_finite(runs, "objective", ("prox-sps",))
    when = _good_from(runs)
    slow = {method: (when[method].index[0], when[method].iloc[0]) for method in ("sps", "sgd")}
    text = "; ".join(f"{label(name)} at {setting(lr)}: {epochs([epoch])}" for name, (lr, epoch) in slow.items())
    half, quick = runs["epoch"].max() / 2, when["prox-sps"].min()
    return (
        f"{text}; ProxSPS at best: {epochs([quick])} (of {runs['epoch'].max()})",
        all(epoch > half for _, epoch in slow.values()) and quick <= half,
    )


# Robustness


def _range(gaps: pd.Series, level: float) -> pd.Index:
    """The values of alpha_0 around the best one, without a hole, whose gap is at most `level`."""
    good, best = (gaps <= level).tolist(), int(np.argmin(gaps))
    if not good[best]:
        return gaps.index[:0]
    first = last = best
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(good) and good[last + 1]:
        last += 1
    return gaps.index[first : last + 1]


def _wider(runs: pd.DataFrame, schedule: str, others: tuple[str, ...]) -> tuple[str, bool]:
    """Whether ProxSPS has the widest range of good alpha_0 for every factor, and what the ranges are."""
    gaps = _gaps(runs, schedule)
    texts, verdicts = [], []
    for factor in FACTORS:
        good = {method: _range(gaps[method], factor * gaps.min()) for method in ("prox-sps", *others)}
        width = {method: lrs.max() / lrs.min() if len(lrs) else 0.0 for method, lrs in good.items()}
        verdicts.append(len(good["prox-sps"]) > 1 and width["prox-sps"] > max(width[method] for method in others))
        shown = ", ".join(f"{label(method)} {_span(lrs, gaps[method].index)}" for method, lrs in good.items())
        texts.append(f"factor {factor}: {shown}{'' if verdicts[-1] else ' (does not hold)'}")
    # Where SGD is good nowhere, even for the largest factor, ranges say nothing about its sensitivity.
    return "; ".join(texts), all(verdicts) and len(good["sgd"]) > 0


def _span(lrs: pd.Index, grid: pd.Index) -> str:
    if not len(lrs):
        return "nowhere"
    return f"{lrs.min():g} to {lrs.max():g}" + (" (its whole grid)" if len(lrs) == len(grid) else "")


RANGE = (
    "largest over least alpha_0 of those around a method's best one whose objective gap is at most 5, 10, 20 times the "
    "least one of all methods"
)


@states(
    "more-robust",
    "ProxSPS admits a larger range of initial step sizes that converge fast, and so is more robust than SGD and "
    "SPS to the tuning of alpha_0 (constant steps).",
    f"{RANGE}, constant schedule",
    "for each factor at least two values for ProxSPS, and a wider range than for SPS and for SGD; SGD good somewhere",
    needs=ALL,
    finite="objective",
    unless=("sps", "sgd"),
)
def more_robust(frames: Frames) -> tuple[str, bool]:
    """The range of good step sizes, constant steps."""
    return _wider(frames["runs"], "constant", ("sps", "sgd"))


@states(
    "less-sensitive",
    "ProxSPS is less sensitive to the choice of alpha_0 than SGD (sqrt schedule).",
    f"{RANGE}, sqrt schedule",
    "for each factor at least two values for ProxSPS, and a wider range than for SGD; SGD good somewhere",
    needs=("prox-sps", "sgd"),
    finite="objective",
    unless=("sgd",),
)
def less_sensitive(frames: Frames) -> tuple[str, bool]:
    """The range of good step sizes, decreasing steps."""
    return _wider(frames["runs"], "sqrt", ("sgd",))


@states(
    "validation-alike",
    "The same can be observed for the validation error: ProxSPS is good for all alpha_0, SPS with constant steps is "
    "not, sqrt steps stabilise it, and ProxSPS is less sensitive than SGD.",
    "validation error after the last epochs, both schedules",
    "constant: largest of ProxSPS below the least of SPS with alpha_0 > 0.5; SPS there: less with sqrt steps; sqrt: "
    "largest over least smaller for ProxSPS than for SGD where it converges",
    needs=ALL,
    finite="val_error",
    unless=("sgd",),
)
def validation_alike(frames: Frames) -> tuple[str, bool]:
    """The same on validation data."""
    constant, sqrt = (_gaps(frames["runs"], schedule, "val_error") for schedule in ("constant", "sqrt"))
    ours, theirs = constant["prox-sps"], constant["sps"]
    theirs = theirs[theirs.index > UNSTABLE]
    calmer = (theirs / sqrt["sps"][theirs.index]).min()
    finite = sqrt[np.isfinite(sqrt)]
    spread = {method: finite[method].max() / finite[method].min() for method in ("prox-sps", "sgd")}
    return (
        f"constant: ProxSPS largest {ours.max():.2e} at {setting(ours.idxmax())}, SPS least {theirs.min():.2e} at "
        f"{setting(theirs.idxmin())}, at least {calmer:.3g} times that with sqrt steps; sqrt: {spread['prox-sps']:.3g} "
        f"for ProxSPS, {spread['sgd']:.3g} for SGD",
        ours.max() < theirs.min() and calmer > 1 and spread["prox-sps"] < spread["sgd"],
    )


# Decreasing steps


@states(
    "sqrt-stabilises-sps",
    "SPS can be stabilised by reducing alpha_k over the course of the iterations.",
    "objective gap of SPS with constant steps over that with sqrt steps, after the last epochs, alpha_0 > 0.5",
    "at least 2 for every alpha_0",
    needs=("sps",),
)
def sqrt_stabilises(frames: Frames) -> tuple[str, bool]:
    """SPS with both schedules."""
    runs = frames["runs"]
    require_finite(runs[runs["schedule"] == "sqrt"], "objective", ("sps",))
    gaps = {schedule: _gaps(runs, schedule)["sps"] for schedule in ("constant", "sqrt")}
    ratio = (gaps["constant"] / gaps["sqrt"]).fillna(0)
    ratio = ratio[ratio.index > UNSTABLE]
    return f"least {ratio.min():.3g} at {setting(ratio.idxmin())}", ratio.min() >= 2


@states(
    "early-bumps",
    "With the sqrt schedule SPS is still unstable in early iterations for large alpha_0, ProxSPS is not.",
    "largest rise of the objective over its best value so far within ten epochs, median over runs, largest alpha_0",
    "above 1.1 for SPS, below for ProxSPS",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def early_bumps(frames: Frames) -> tuple[str, bool]:
    """Early iterations under the sqrt schedule with the largest cap."""
    runs = frames["runs"]
    early = runs[(runs["schedule"] == "sqrt") & (runs["epoch"] <= 10) & runs["method"].isin(POLYAK)]
    largest = early[early["lr"] == early["lr"].max()]
    worst = largest.groupby(["method", "seed"])["objective"].agg(
        lambda values: (values / values.cummin()).fillna(math.inf).max()
    )
    bump = worst.groupby("method").median()
    return f"SPS {bump['sps']:.3g}, ProxSPS {bump['prox-sps']:.3g}", bump["sps"] > 1.1 > bump["prox-sps"]


@states(
    "exact-with-decay",
    "The results confirm exact convergence if alpha_k decays like 1/sqrt(k).",
    "exponent p of the objective gap of ProxSPS as a power k^(-p), in the third and in the fourth quarter of the "
    "epochs, sqrt schedule; gap of SPS with constant steps over that of ProxSPS with sqrt steps, largest alpha_0",
    f"p at least {RATE:g} in both for every alpha_0 (the theorem's rate for the envelope's gradient); at least 3",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def exact_with_decay(frames: Frames) -> tuple[str, bool]:
    """Decreasing steps continue to converge; constant ones end in a neighbourhood."""
    curves = _curves(frames["runs"])
    points = [_at(curves, share) for share in (0.5, 0.75, 1)]
    powers = pd.DataFrame(
        {
            quarter: np.log(before / after)["prox-sps"]["sqrt"] / math.log(later / earlier)
            for quarter, (before, earlier), (after, later) in zip((3, 4), points, points[1:], strict=False)
        }
    )
    end = points[-1][0]
    high, low = end["sps"]["constant"].iloc[-1], end["prox-sps"]["sqrt"].iloc[-1]
    slowest = powers.min(axis=1)
    return (
        f"least {powers[3].min():.2f} and {powers[4].min():.2f}, at {setting(slowest.idxmin())}, at most "
        f"{powers.max(axis=None):.2f}; {high:.1e} over {low:.1e}",
        slowest.min() >= RATE and high >= 3 * low,
    )


STABILITY_CLAIMS = (
    proxsps_converges,
    sps_stalls,
    sgd_diverges,
    like_sgd,
    slow_for_small_caps,
    more_robust,
    validation_alike,
    sqrt_stabilises,
    early_bumps,
    less_sensitive,
    exact_with_decay,
)
