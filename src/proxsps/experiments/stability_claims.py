"""What the paper says about the stability of matrix factorisation at one strength, checked by numbers."""

from __future__ import annotations

import math

import pandas as pd

from proxsps.experiments.base import Claim, Frames, over_seeds, setting
from proxsps.methods import METHODS

NAMES = {name: METHODS[name].label for name in ("prox-sps", "sps", "sgd")}
UNSTABLE = 0.5  # SPS with constant steps is unstable for alpha_0 above


def _gaps(runs: pd.DataFrame, schedule: str) -> pd.Series:
    """Objective above the best one found, mean over runs, indexed by method and alpha_0."""
    means = over_seeds(runs, "objective").xs(schedule, level="schedule").droplevel("weight_decay")
    return means - runs["objective"].min()


def _halfway_and_end(runs: pd.DataFrame) -> tuple[pd.Series, pd.Series, int]:
    """Objective above the best one found, after half of the epochs and after all, and how many half of them are.

    Medians over a tenth of the epochs of the mean over runs, indexed by method, schedule and alpha_0; infinity where a
    run has diverged.
    """
    finite = runs.assign(objective=runs["objective"].fillna(math.inf))
    mean = finite.groupby(["method", "schedule", "lr", "epoch"])["objective"].mean().unstack() - runs["objective"].min()
    last = mean.columns.max()
    half, width = (last + 1) // 2, max(1, last // 10)
    middle, end = (mean.loc[:, epoch - width + 1 : epoch].median(axis=1) for epoch in (half, last))
    return middle, end, half


# Constant steps


def proxsps_converges(frames: Frames) -> Claim:
    """ProxSPS converges where SPS does not."""
    gaps = _gaps(frames["runs"], "constant")
    gap, other = gaps["prox-sps"], gaps["sps"]
    return Claim(
        "proxsps-converges",
        "With constant steps ProxSPS converges quickly for all alpha_0, while SPS is unstable.",
        "objective above the best one found after the last epochs, constant schedule",
        "for ProxSPS at most 2e-4 for every alpha_0 (the published figure shows 1e-5 to 1e-4), for SPS not",
        f"ProxSPS: largest {gap.max():.2e} at {setting(gap.idxmax())}; SPS: largest {other.max():.2e}",
        bool(gap.max() <= 2e-4 < other.max()),
    )


def sps_stalls(frames: Frames) -> Claim:
    """SPS with large caps."""
    gaps = _gaps(frames["runs"], "constant")
    gap, other = (gaps[method][gaps[method].index > UNSTABLE] for method in ("sps", "prox-sps"))
    return Claim(
        "sps-stalls",
        "With constant steps SPS is unstable for alpha_0 above 0.5 and stalls.",
        "objective above the best one found after the last epochs, constant schedule, alpha_0 > 0.5",
        "at least 1e-3 for SPS at every alpha_0 (the published figure shows 1e-3 to 7e-3), at most a tenth for ProxSPS",
        f"SPS: least {gap.min():.2e} at {setting(gap.idxmin())}; ProxSPS: largest {other.max():.2e}",
        bool(gap.min() >= 1e-3 and other.max() <= gap.min() / 10),
    )


def sgd_diverges(frames: Frames) -> Claim:
    """SGD with steps that are short for the other methods."""
    runs = frames["runs"]
    final = runs[(runs["schedule"] == "constant") & (runs["epoch"] == runs["epoch"].max())]
    share = (final["status"] == "diverged").groupby([final["method"], final["lr"]]).mean()
    theirs, ours = share["sgd"], share["prox-sps"]
    return Claim(
        "sgd-diverges",
        "SGD diverges for large alpha_0; it needs much smaller ones than ProxSPS.",
        "share of runs that diverged, constant schedule: SGD at its largest alpha_0, ProxSPS at larger ones",
        "SGD at least one half; ProxSPS none",
        f"SGD {theirs.iloc[-1]:.0%} at {setting(theirs.index[-1])}; ProxSPS {ours.max():.0%} up to "
        f"{setting(ours.index[-1])}",
        bool(theirs.iloc[-1] >= 0.5 and ours.max() == 0),
    )


def like_sgd(frames: Frames) -> Claim:
    """SPS with its smallest cap against SGD with the same step, between two of SGD's grid."""
    middle, end, half = _halfway_and_end(frames["runs"])
    at = end["sps"]["constant"].index[0]
    expected = [_between(gaps["sgd"]["constant"], at) for gaps in (middle, end)]
    ratios = [gaps["sps"]["constant"][at] / sgd for gaps, sgd in zip((middle, end), expected, strict=True)]
    large = end["sps"]["constant"].iloc[-1] / expected[1]
    return Claim(
        "like-sgd",
        "SPS is unstable for large alpha_0, while for small alpha_0 its performance is similar to that of SGD.",
        f"objective above the best one found, SPS at {setting(at)} over SGD there (between the nearest alpha_0 of its "
        f"grid), constant schedule, after epoch {half} and at the end; and SPS at its largest alpha_0 over that",
        "between 1/2 and 2 both times; above 3 for the largest alpha_0",
        f"{ratios[0]:.3g} and {ratios[1]:.3g}; {large:.3g} for the largest",
        bool(all(0.5 <= ratio <= 2 for ratio in ratios) and large > 3),
    )


def _between(gaps: pd.Series, at: float) -> float:
    """A gap at some alpha_0, interpolated on logarithmic axes; that of one neighbour if the other one diverged."""
    below, above = gaps[gaps.index <= at].iloc[-1:], gaps[gaps.index > at].iloc[:1]
    near = pd.concat([below, above])
    near = near[(near > 0) & (near < math.inf)]
    if len(near) < 2:
        return float(near.iloc[0]) if len(near) else math.nan
    share = math.log(at / near.index[0]) / math.log(near.index[1] / near.index[0])
    return float(near.iloc[0] ** (1 - share) * near.iloc[1] ** share)


# Robustness


def _ranges(runs: pd.DataFrame, schedule: str) -> tuple[dict[str, float], str]:
    """Largest over least alpha_0 with an objective gap of at most ten times the least one of all, for each method.

    0 where there is none. The text says which they are. A method that diverges somewhere is judged by the others.
    """
    gaps = _gaps(runs, schedule)
    good = {method: gaps[method].index[gaps[method] <= 10 * gaps.min()] for method in NAMES}
    text = "; ".join(
        f"{name} {_span(good[method])}: {len(good[method])} of {len(gaps[method])}" for method, name in NAMES.items()
    )
    return {method: lrs.max() / lrs.min() if len(lrs) else 0.0 for method, lrs in good.items()}, text


def _span(lrs: pd.Index) -> str:
    return f"{lrs.min():.3g} to {lrs.max():.3g}" if len(lrs) else "nowhere"


RANGE = "largest over least alpha_0 whose objective gap is at most ten times the least one of all methods"


def more_robust(frames: Frames) -> Claim:
    """The range of good step sizes, constant steps."""
    ranges, text = _ranges(frames["runs"], "constant")
    return Claim(
        "more-robust",
        "ProxSPS admits a larger range of initial step sizes that converge fast, and so is more robust than SGD and "
        "SPS to the tuning of alpha_0 (constant steps).",
        f"{RANGE}, constant schedule",
        "larger for ProxSPS than for SPS and for SGD",
        text,
        bool(ranges["prox-sps"] > max(ranges["sps"], ranges["sgd"])),
    )


def less_sensitive(frames: Frames) -> Claim:
    """The range of good step sizes, decreasing steps."""
    ranges, text = _ranges(frames["runs"], "sqrt")
    return Claim(
        "less-sensitive",
        "ProxSPS is less sensitive to the choice of alpha_0 than SGD (sqrt schedule).",
        f"{RANGE}, sqrt schedule",
        "larger for ProxSPS than for SGD",
        text,
        bool(ranges["prox-sps"] > ranges["sgd"]),
    )


def validation_alike(frames: Frames) -> Claim:
    """The same on validation data."""
    errors = over_seeds(frames["runs"], "val_error").xs("constant", level="schedule").droplevel("weight_decay")
    ours, theirs = errors["prox-sps"], errors["sps"]
    theirs = theirs[theirs.index > UNSTABLE]
    return Claim(
        "validation-alike",
        "The same can be observed for the validation error: ProxSPS is good for all alpha_0, SPS is not.",
        "validation error after the last epochs, constant schedule",
        "largest of ProxSPS below the least of SPS with alpha_0 > 0.5",
        f"ProxSPS: largest {ours.max():.2e} at {setting(ours.idxmax())}; SPS: least {theirs.min():.2e} at "
        f"{setting(theirs.idxmin())}",
        bool(ours.max() < theirs.min()),
    )


# Decreasing steps


def sqrt_stabilises(frames: Frames) -> Claim:
    """SPS with both schedules."""
    gaps = {schedule: _gaps(frames["runs"], schedule)["sps"] for schedule in ("constant", "sqrt")}
    ratio = (gaps["constant"] / gaps["sqrt"]).fillna(0)
    ratio = ratio[ratio.index > UNSTABLE]
    return Claim(
        "sqrt-stabilises-sps",
        "SPS can be stabilised by reducing alpha_k over the course of the iterations.",
        "objective gap of SPS with constant steps over that with sqrt steps, after the last epochs, alpha_0 > 0.5",
        "at least 2 for every alpha_0",
        f"least {ratio.min():.3g} at {setting(ratio.idxmin())}",
        bool(ratio.min() >= 2),
    )


def early_bumps(frames: Frames) -> Claim:
    """Early iterations under the sqrt schedule with the largest cap."""
    runs = frames["runs"]
    early = runs[(runs["schedule"] == "sqrt") & (runs["epoch"] <= 10) & runs["method"].isin(["prox-sps", "sps"])]
    largest = early[early["lr"] == early["lr"].max()]
    worst = largest.groupby(["method", "seed"])["objective"].agg(
        lambda values: (values / values.cummin()).fillna(math.inf).max()
    )
    bump = worst.groupby("method").median()
    return Claim(
        "early-bumps",
        "With the sqrt schedule SPS is still unstable in early iterations for large alpha_0, ProxSPS is not.",
        "largest rise of the objective over its best value so far within ten epochs, median over runs, largest alpha_0",
        "above 1.1 for SPS, below for ProxSPS",
        f"SPS {bump['sps']:.3g}, ProxSPS {bump['prox-sps']:.3g}",
        bool(bump["sps"] > 1.1 > bump["prox-sps"]),
    )


def exact_with_decay(frames: Frames) -> Claim:
    """Decreasing steps continue to converge; constant ones end in a neighbourhood."""
    middle, end, half = _halfway_and_end(frames["runs"])
    ratio = (end / middle).fillna(math.inf)["prox-sps"]["sqrt"]  # infinity where runs diverged
    high, low = end["sps"]["constant"].iloc[-1], end["prox-sps"]["sqrt"].iloc[-1]
    return Claim(
        "exact-with-decay",
        "The results confirm exact convergence if alpha_k decays like 1/sqrt(k).",
        f"objective gap of ProxSPS after the last epochs over that after epoch {half}, sqrt schedule; gap of SPS with "
        "constant steps over that of ProxSPS with sqrt steps, largest alpha_0",
        "below 0.9 for every alpha_0; at least 3",
        f"largest {ratio.max():.3g} at {setting(ratio.idxmax())}; {high:.1e} over {low:.1e}",
        bool(ratio.max() < 0.9 and high >= 3 * low),
    )


STABILITY_CLAIMS = (
    proxsps_converges,
    sps_stalls,
    sgd_diverges,
    like_sgd,
    more_robust,
    validation_alike,
    sqrt_stabilises,
    early_bumps,
    less_sensitive,
    exact_with_decay,
)
