"""What the paper says about matrix factorisation with several strengths of regularisation, checked by numbers.

If the paper compares one method with another, so does the rule, and it fails on results with swapped or
copied methods. `stability_claims` has the sentences on a single strength.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from proxsps.experiments.base import Frames, last_medians, setting
from proxsps.experiments.sentences import (
    POLYAK,
    SURE,
    Found,
    lower_bound,
    lower_bounds,
    mean_curves,
    mostly,
    require_methods,
    states,
)

LARGE = (5.0, 10.0)  # values of alpha_0 at which the paper finds the methods apart
STRONG = 1e-3  # lambda from here on is large; the grid has three such values and two below
GOOD = 0.05  # an objective this far above another one still is as good
CLOSED = 0.1  # share of the gap after one epoch that may be left; any limit from 6 to 60 % gives the same verdicts
CORNER = (10.0, 0.1)  # the largest alpha_0 and the largest lambda


def _pairs(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Values of both methods side by side, indexed by alpha_0, lambda and seed."""
    return last_medians(runs, metric).droplevel("schedule").unstack("method")


def _means(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Means over seeds of both methods side by side, indexed by alpha_0 and lambda."""
    return _pairs(runs, metric).groupby(["lr", "weight_decay"]).mean()


def _strong(table: pd.DataFrame | pd.Series) -> np.ndarray:
    return np.asarray(table.index.get_level_values("weight_decay") >= STRONG)


# Validation error and norm


@states(
    "validation error, median over the last ten epochs, median over runs (a few of ten runs dominate their mean)",
    f"minimum for ProxSPS at lambda = 1e-4 with alpha_0 >= 5; below that of every other setting, {SURE}. In part: at "
    "one of these alpha_0",
    needs=POLYAK,
    finite="val_error",
)
def best_lambda(frames: Frames) -> Found:
    """The best validation error is obtained for lambda = 1e-4 and large alpha_0."""
    pairs = _pairs(frames["runs"], "val_error")
    medians = pairs.groupby(["lr", "weight_decay"]).median()
    ours, other = medians["prox-sps"], medians["sps"]
    claimed = [(lr, 1e-4, "prox-sps") for lr in LARGE]
    errors = np.log(pairs.stack().unstack("seed"))
    best = medians.stack()[claimed].idxmin()
    lead = errors.drop(claimed).sub(errors.loc[best], axis=1).apply(lower_bound, axis=1)
    there = {lr: ours[lr].idxmin() for lr in LARGE}
    here = [f"alpha_0 = {lr:g}" for lr, lam in there.items() if lam == 1e-4]
    first = ours.idxmin()[0] in LARGE and ours.min() < other.min()
    elsewhere = "; ".join(f"lambda = {lam:g} is better at alpha_0 = {lr:g}" for lr, lam in there.items() if lam != 1e-4)
    means = _means(frames["runs"], "val_error")["prox-sps"]
    return Found(
        f"ProxSPS {ours.min():.2e} at {setting(*ours.idxmin())}; SPS {other.min():.2e} at {setting(*other.idxmin())}",
        first and ours.idxmin()[1] == 1e-4 and lead.min() > 0,
        f"at {' and '.join(here)}; {elsewhere or 'other settings are not worse with 95 % confidence'}"
        if first and here
        else "",
        f"by the mean over runs, ProxSPS {means.min():.2e} at {setting(*means.idxmin())}",
    )


@states(
    "validation error of SPS over that of ProxSPS, alpha_0 in {5, 10}, every lambda; and their median difference",
    f"above 1, {SURE}; the difference is larger for lambda >= 1e-3 than below, and for alpha_0 = 10 than for 5. In "
    "part: in three of four settings, and on average everywhere",
    needs=POLYAK,
    finite="val_error",
)
def lower_error(frames: Frames) -> Found:
    """With SPS the validation error is higher, in particular for large alpha_0 and lambda."""
    pairs = _pairs(frames["runs"], "val_error").loc[list(LARGE)]
    bound = lower_bounds(np.log(pairs["sps"] / pairs["prox-sps"]))
    means = pairs.groupby(["lr", "weight_decay"]).mean()
    ratio, higher = means["sps"] / means["prox-sps"], means["sps"] - means["prox-sps"]
    strong, weak = higher[_strong(higher)].median(), higher[~_strong(higher)].median()
    small, large = (higher[alpha].median() for alpha in LARGE)
    particular = strong > weak and large > small
    return Found(
        f"minimum {ratio.min():.4g} at {setting(*ratio.idxmin())}, 95 % lower bound {np.exp(bound.min()):.4g} at "
        f"{setting(*bound.idxmin())}; {strong:.1e} against {weak:.1e} over lambda, {large:.1e} against {small:.1e} "
        "over alpha_0",
        bound.min() > 0 and particular,
        mostly(bound > 0) if particular and ratio.min() > 1 else "",
    )


@states(
    "relative difference of their validation errors at alpha_0 = 1, and its median over lambda at alpha_0 = 10",
    "at most 5 % at every lambda, but more at alpha_0 = 10",
    needs=POLYAK,
    finite="val_error",
)
def same_at_1(frames: Frames) -> tuple[str, bool]:
    """For alpha_0 = 1 the two methods give almost identical results."""
    means = _means(frames["runs"], "val_error")
    apart = (means["prox-sps"] / means["sps"] - 1).abs()
    near, far = apart[1.0], apart[10.0].median()
    return (
        f"largest {near.max():.1%} at lambda = {near.idxmax():g}; {far:.1%} at alpha_0 = 10",
        near.max() <= 0.05 < far,
    )


@states(
    "model norm of ProxSPS over that of SPS, alpha_0 in {5, 10}, every lambda",
    f"below 1, {SURE}. In part: in three of four settings, and on average everywhere",
    needs=POLYAK,
    finite="model_norm",
)
def smaller_norm(frames: Frames) -> Found:
    """ProxSPS leads to a smaller norm of the iterates, hence a more effective regularisation."""
    pairs = _pairs(frames["runs"], "model_norm").loc[list(LARGE)]
    bound = lower_bounds(np.log(pairs["sps"] / pairs["prox-sps"]))
    means = pairs.groupby(["lr", "weight_decay"]).mean()
    ratio = means["prox-sps"] / means["sps"]
    return Found(
        f"largest {ratio.max():.4g} at {setting(*ratio.idxmax())}, 95 % upper bound {np.exp(-bound.min()):.4g} at "
        f"{setting(*bound.idxmin())}",
        bound.min() > 0,
        mostly(bound > 0) if ratio.max() < 1 else "",
    )


# Objective


def _excess(runs: pd.DataFrame) -> pd.DataFrame:
    """Objective relative to the best one found at that lambda, minus 1; indexed by alpha_0 and lambda."""
    means = _means(runs, "objective")
    best = runs.groupby("weight_decay")["objective"].min()
    return means.div(best.reindex(means.index.get_level_values("weight_decay")).to_numpy(), axis=0) - 1


@states(
    "objective above the best one found, SPS over ProxSPS, alpha_0 in {5, 10}",
    "at least 2 at every lambda >= 1e-4",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def unstable_sps(frames: Frames) -> tuple[str, bool]:
    """SPS is unstable for large alpha_0 for all lambda >= 1e-4."""
    excess = _excess(frames["runs"]).loc[list(LARGE)]
    excess = excess[excess.index.get_level_values("weight_decay") >= 1e-4]
    ratio = (excess["sps"] / excess["prox-sps"]).fillna(0)  # 0/0: neither is above the best one
    return f"minimum {ratio.min():.3g} at {setting(*ratio.idxmin())}", ratio.min() >= 2


def _ends(runs: pd.DataFrame) -> pd.DataFrame:
    """Objective at the end, median over the last ten epochs of the mean curves; indexed by alpha_0 and lambda."""
    return mean_curves(runs).droplevel("schedule").iloc[:, -10:].median(axis=1).unstack("method")


def _closing(runs: pd.DataFrame) -> pd.DataFrame:
    """Gap at the end over the mean gap of all settings after epoch 1, same lambda; indexed by alpha_0 and lambda."""
    curves, ends = mean_curves(runs).droplevel("schedule"), _ends(runs)
    first = curves.iloc[:, 0].replace(np.inf, np.nan).groupby("weight_decay").mean()
    best = curves.min(axis=1).groupby("weight_decay").min()
    start = (first - best).replace(0, np.nan)
    at = ends.index.get_level_values("weight_decay")
    return ends.sub(best.reindex(at).to_numpy(), axis=0).div(start.reindex(at).to_numpy(), axis=0)


def _stricter(runs: pd.DataFrame) -> str:
    """How often an objective is close to the best one found by any single run in any epoch."""
    near = _excess(runs) <= GOOD
    return (
        f"at most {GOOD:.0%} above the best objective of any run in any epoch: ProxSPS in "
        f"{int(near['prox-sps'].sum())} of {len(near)} settings, SPS in {int(near['sps'].sum())}"
    )


@states(
    "objective gap at the end (above the minimum of the mean curves at that lambda) over the mean gap after epoch 1, "
    "every alpha_0, lambda < 0.1",
    f"at most {CLOSED:.0%} for ProxSPS everywhere, above that for SPS somewhere. In part: in three of four settings, "
    "and in more than for SPS",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def good_for_many_alpha(frames: Frames) -> Found:
    """ProxSPS has a good performance for a wide range of alpha_0 in [1, 10] if lambda is not too large."""
    runs = frames["runs"]
    left = _closing(runs[runs["weight_decay"] < CORNER[1]])
    ours, theirs = left["prox-sps"], left["sps"]
    good = left <= CLOSED
    return Found(
        f"ProxSPS at most {ours.max():.1%}, at {setting(*ours.idxmax())}; SPS up to {theirs.max():.1%}, above "
        f"{CLOSED:.0%} in {int((~good['sps']).sum())} of {len(theirs)} settings",
        good["prox-sps"].all() and not good["sps"].all(),
        mostly(good["prox-sps"]) if good["prox-sps"].sum() > good["sps"].sum() else "",
        _stricter(runs[runs["weight_decay"] < CORNER[1]]),
    )


@states(
    "objective at the end over that with alpha_0 = 1 at the same lambda, minus 1, every alpha_0 and lambda",
    f"above {GOOD:.0%} for ProxSPS at alpha_0 = 10, lambda = 0.1 and nowhere else; for SPS elsewhere too. In part: in "
    "at most one other setting",
    needs=POLYAK,
    finite="objective",
    unless=("sps",),
)
def deteriorates_at_the_corner(frames: Frames) -> Found:
    """ProxSPS starts to deteriorate only when both alpha_0 and lambda are very large."""
    ends = _ends(frames["runs"])
    larger = ends.drop(1.0, level="lr")
    base = ends.loc[1.0].loc[larger.index.get_level_values("weight_decay")].to_numpy()
    worse = (larger / base - 1).fillna(np.inf)  # with alpha_0 = 1 it has diverged as well
    both, rest, other = worse["prox-sps"][CORNER], worse["prox-sps"].drop(CORNER), worse["sps"].drop(CORNER)
    bad = rest.index[~(rest <= GOOD)]
    apart = both > GOOD and not (other <= GOOD).all()
    places = "; ".join(setting(*key) for key in bad)
    return Found(
        f"ProxSPS {both:.1%} there, elsewhere at most {rest.max():.1%}, at {setting(*rest.idxmax())}; SPS elsewhere up "
        f"to {other.max():.1%}, at {setting(*other.idxmax())}",
        apart and not len(bad),
        f"there, but at {places} as well" if apart and len(bad) == 1 else "",
        _stricter(frames["runs"]),
    )


# Step sizes


def _typical(ratio: pd.Series) -> tuple[str, bool]:
    """Whether a ratio is above 1 in most settings, and larger for large lambda."""
    count = int((ratio > 1).sum())
    strong, weak = ratio[_strong(ratio)].median(), ratio[~_strong(ratio)].median()
    return (
        f"above 1 in {count} of {len(ratio)}; minimum {ratio.min():.3g} at {setting(*ratio.idxmin())}; median "
        f"{strong:.3g} for lambda >= 1e-3, {weak:.3g} below",
        4 * count >= 3 * len(ratio) and strong > max(weak, 1),
    )


TYPICAL = "above 1 in at least three of four settings; its median is above 1 for lambda >= 1e-3, and larger than below"


@states(
    "epoch median of zeta_k, SPS over ProxSPS, every alpha_0 and lambda", TYPICAL, needs=POLYAK, finite="zeta_median"
)
def larger_zeta(frames: Frames) -> tuple[str, bool]:
    """The adaptive step zeta_k is typically larger for SPS than for ProxSPS, in particular for large lambda."""
    means = _means(frames["runs"], "zeta_median")
    return _typical((means["sps"] / means["prox-sps"]).fillna(0))


@states(
    "standard deviation of log10 zeta_k over the last ten epochs of one run, SPS over ProxSPS, every alpha_0, lambda",
    f"{TYPICAL}; above 1 everywhere for lambda >= 1e-3",
    needs=POLYAK,
    finite="zeta_median",
)
def more_spread_zeta(frames: Frames) -> tuple[str, bool]:
    """zeta_k has more variance for SPS than for ProxSPS, in particular for large lambda."""
    steps = frames["steps"]
    late = steps[(steps["epoch"] > steps["epoch"].max() - 10) & (steps["zeta"] > 0)]
    spread = late.assign(log=np.log10(late["zeta"])).groupby(["lr", "weight_decay", "method"])["log"].std().unstack()
    ratio = (spread["sps"] / spread["prox-sps"]).fillna(0)  # neither varies
    text, holds = _typical(ratio)
    return text, holds and ratio[_strong(ratio)].min() > 1


@states(
    "share of iterations with zeta_k > alpha_k in one run, both methods, every lambda",
    "above one half for alpha_0 = 1, and below one half for alpha_0 = 10",
    needs=POLYAK,
    finite="zeta_median",
)
def zeta_above_alpha_at_1(frames: Frames) -> tuple[str, bool]:
    """If alpha_0 = 1, zeta_k > alpha_k for most iterations, so that both methods are almost identical."""
    steps = frames["steps"]
    require_methods(steps, POLYAK)
    keys = [steps[name] for name in ("lr", "method", "weight_decay")]
    share = (steps["zeta"] > steps["alpha"]).groupby(keys).mean()
    small, large = share[1.0], share[10.0]
    return (
        f"minimum {small.min():.0%} at lambda = {small.idxmin()[1]:g}; at alpha_0 = 10 at most {large.max():.0%}",
        small.min() > 0.5 > large.max(),
    )


PATH_CLAIMS = (
    best_lambda,
    lower_error,
    same_at_1,
    smaller_norm,
    unstable_sps,
    good_for_many_alpha,
    deteriorates_at_the_corner,
    larger_zeta,
    more_spread_zeta,
    zeta_above_alpha_at_1,
)
