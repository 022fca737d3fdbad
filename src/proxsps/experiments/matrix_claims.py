"""What the paper says about matrix factorisation with several strengths of regularisation, checked by numbers.

If the paper compares one method with another, so does the rule, and it fails on results with swapped or
copied methods. `stability_claims` has the sentences on a single strength.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from proxsps.experiments.base import Frames, last_medians, setting
from proxsps.experiments.sentences import SURE, least, least_of, require_methods, states

BOTH = ("prox-sps", "sps")
LARGE = (5.0, 10.0)  # values of alpha_0 at which the paper finds the methods apart
STRONG = 1e-3  # lambda from here on is large; the grid has three such values and two below
GOOD = 0.05  # an objective this far above the best one found still is a good performance
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
    "best-lambda",
    "The best validation error is obtained for lambda = 1e-4 and large alpha_0.",
    "validation error, median over the last ten epochs, mean over runs",
    f"least for ProxSPS at lambda = 1e-4 with alpha_0 >= 5; below that of every other setting, {SURE}",
    needs=BOTH,
    finite="val_error",
)
def best_strength(frames: Frames) -> tuple[str, bool]:
    """Where the validation error is least."""
    errors = np.log(_pairs(frames["runs"], "val_error").stack().unstack("seed"))
    means = _means(frames["runs"], "val_error").stack()
    lr, lam, method = means.idxmin()
    claimed = [key for key in means.index if key[2] == "prox-sps" and key[1] == 1e-4 and key[0] in LARGE]
    best = means[claimed].idxmin()
    lead = errors.drop(claimed).sub(errors.loc[best], axis=1).apply(least, axis=1)
    ours, other = means.xs("prox-sps", level="method"), means.xs("sps", level="method")
    return (
        f"ProxSPS {ours.min():.2e} at {setting(*ours.idxmin())}; SPS {other.min():.2e} at {setting(*other.idxmin())}",
        lam == 1e-4 and lr in LARGE and method == "prox-sps" and lead.min() > 0,
    )


@states(
    "lower-error",
    "With SPS the validation error is higher, in particular for large alpha_0 and lambda.",
    "validation error of SPS over that of ProxSPS, alpha_0 in {5, 10}, every lambda; and their median difference",
    f"above 1, {SURE}; the difference is larger for lambda >= 1e-3 than below, and for alpha_0 = 10 than for 5",
    needs=BOTH,
    finite="val_error",
)
def lower_error(frames: Frames) -> tuple[str, bool]:
    """ProxSPS against SPS at large caps."""
    pairs = _pairs(frames["runs"], "val_error").loc[list(LARGE)]
    sure = least_of(np.log(pairs["sps"] / pairs["prox-sps"]))
    means = pairs.groupby(["lr", "weight_decay"]).mean()
    ratio, higher = means["sps"] / means["prox-sps"], means["sps"] - means["prox-sps"]
    strong, weak = higher[_strong(higher)].median(), higher[~_strong(higher)].median()
    small, large = (higher[alpha].median() for alpha in LARGE)
    return (
        f"least {ratio.min():.4g} at {setting(*ratio.idxmin())}, surely {np.exp(sure.min()):.4g} at "
        f"{setting(*sure.idxmin())}; {strong:.1e} against {weak:.1e} over lambda, {large:.1e} against {small:.1e} over "
        "alpha_0",
        sure.min() > 0 and strong > weak and large > small,
    )


@states(
    "same-at-1",
    "For alpha_0 = 1 the two methods give almost identical results.",
    "relative difference of their validation errors at alpha_0 = 1, and its median over lambda at alpha_0 = 10",
    "at most 5 % at every lambda, but more at alpha_0 = 10",
    needs=BOTH,
    finite="val_error",
)
def same_for_small_caps(frames: Frames) -> tuple[str, bool]:
    """At alpha_0 = 1 both methods are capped most of the time."""
    means = _means(frames["runs"], "val_error")
    apart = (means["prox-sps"] / means["sps"] - 1).abs()
    near, far = apart[1.0], apart[10.0].median()
    return (
        f"largest {near.max():.1%} at lambda = {near.idxmax():g}; {far:.1%} at alpha_0 = 10",
        near.max() <= 0.05 < far,
    )


@states(
    "smaller-norm",
    "ProxSPS leads to a smaller norm of the iterates, hence a more effective regularisation.",
    "model norm of ProxSPS over that of SPS, alpha_0 in {5, 10}, every lambda",
    f"below 1, {SURE}",
    needs=BOTH,
    finite="model_norm",
)
def smaller_norm(frames: Frames) -> tuple[str, bool]:
    """Norm of the iterates."""
    pairs = _pairs(frames["runs"], "model_norm").loc[list(LARGE)]
    sure = least_of(np.log(pairs["sps"] / pairs["prox-sps"]))
    means = pairs.groupby(["lr", "weight_decay"]).mean()
    ratio = means["prox-sps"] / means["sps"]
    return (
        f"largest {ratio.max():.4g} at {setting(*ratio.idxmax())}, surely {np.exp(-sure.min()):.4g} at "
        f"{setting(*sure.idxmin())}",
        sure.min() > 0,
    )


# Objective


def _excess(runs: pd.DataFrame) -> pd.DataFrame:
    """Objective relative to the best one found at that lambda, minus 1; indexed by alpha_0 and lambda."""
    means = _means(runs, "objective")
    best = runs.groupby("weight_decay")["objective"].min()
    return means.div(best.reindex(means.index.get_level_values("weight_decay")).to_numpy(), axis=0) - 1


@states(
    "unstable-sps",
    "SPS is unstable for large alpha_0 for all lambda >= 1e-4.",
    "objective above the best one found, SPS over ProxSPS, alpha_0 in {5, 10}",
    "at least 2 at every lambda >= 1e-4",
    needs=BOTH,
    finite="objective",
    unless=("sps",),
)
def unstable_sps(frames: Frames) -> tuple[str, bool]:
    """The objective of SPS with a large cap."""
    excess = _excess(frames["runs"]).loc[list(LARGE)]
    excess = excess[excess.index.get_level_values("weight_decay") >= 1e-4]
    ratio = (excess["sps"] / excess["prox-sps"]).fillna(0)  # 0/0: neither is above the best one
    return f"least {ratio.min():.3g} at {setting(*ratio.idxmin())}", ratio.min() >= 2


def _places(excess: pd.Series) -> str:
    """Where a method is above the limit, and by how much."""
    bad = excess[~(excess <= GOOD)]
    return "nowhere" if bad.empty else "; ".join(f"{setting(*key)}: {value:.1%}" for key, value in bad.items())


@states(
    "good-for-many-alpha",
    "ProxSPS has a good performance for a wide range of alpha_0 in [1, 10] if lambda is not too large.",
    "objective of ProxSPS relative to the best one found at that lambda, minus 1, every alpha_0, lambda < 0.1",
    f"at most {GOOD:.0%} everywhere; SPS above that somewhere",
    needs=BOTH,
    finite="objective",
    unless=("sps",),
)
def good_for_many_caps(frames: Frames) -> tuple[str, bool]:
    """All caps, all strengths but the largest."""
    excess = _excess(frames["runs"])
    excess = excess[excess.index.get_level_values("weight_decay") < CORNER[1]]
    ours, theirs = excess["prox-sps"], excess["sps"]
    return (
        f"ProxSPS above {GOOD:.0%}: {_places(ours)} ({int((ours > GOOD).sum())} of {len(ours)} settings; SPS "
        f"{int((~(theirs <= GOOD)).sum())})",
        ours.max() <= GOOD < theirs.max(),
    )


@states(
    "deteriorates-at-the-corner",
    "ProxSPS starts to deteriorate only when both alpha_0 and lambda are very large.",
    "objective relative to the best one found at that lambda, minus 1, every alpha_0 and lambda",
    f"above {GOOD:.0%} for ProxSPS at alpha_0 = 10, lambda = 0.1 and nowhere else; for SPS elsewhere too",
    needs=BOTH,
    finite="objective",
    unless=("sps",),
)
def good_unless_both_large(frames: Frames) -> tuple[str, bool]:
    """Where ProxSPS deteriorates."""
    excess = _excess(frames["runs"])
    both, rest, other = excess["prox-sps"][CORNER], excess["prox-sps"].drop(CORNER), excess["sps"].drop(CORNER)
    return (
        f"ProxSPS {both:.1%} there; elsewhere above {GOOD:.0%}: {_places(rest)}. SPS elsewhere up to "
        f"{other.max():.1%}, at {setting(*other.idxmax())}",
        rest.max() <= GOOD < both and other.max() > GOOD,
    )


# Step sizes


def _typical(ratio: pd.Series) -> tuple[str, bool]:
    """Whether a ratio is above 1 in most settings, and larger for large lambda."""
    count = int((ratio > 1).sum())
    strong, weak = ratio[_strong(ratio)].median(), ratio[~_strong(ratio)].median()
    return (
        f"above 1 in {count} of {len(ratio)}; least {ratio.min():.3g} at {setting(*ratio.idxmin())}; median "
        f"{strong:.3g} for lambda >= 1e-3, {weak:.3g} below",
        4 * count >= 3 * len(ratio) and strong > max(weak, 1),
    )


TYPICAL = "above 1 in at least three of four settings; its median is above 1 for lambda >= 1e-3, and larger than below"


@states(
    "larger-zeta",
    "The adaptive step zeta_k is typically larger for SPS than for ProxSPS, in particular for large lambda.",
    "epoch median of zeta_k, SPS over ProxSPS, every alpha_0 and lambda",
    TYPICAL,
    needs=BOTH,
    finite="zeta_median",
)
def larger_zeta(frames: Frames) -> tuple[str, bool]:
    """The adaptive step of SPS."""
    means = _means(frames["runs"], "zeta_median")
    return _typical((means["sps"] / means["prox-sps"]).fillna(0))


@states(
    "more-spread-zeta",
    "zeta_k has more variance for SPS than for ProxSPS, in particular for large lambda.",
    "standard deviation of log10 zeta_k over the last ten epochs of one run, SPS over ProxSPS, every alpha_0, lambda",
    f"{TYPICAL}; above 1 everywhere for lambda >= 1e-3",
    needs=BOTH,
    finite="zeta_median",
)
def more_spread_zeta(frames: Frames) -> tuple[str, bool]:
    """The spread of the adaptive step of SPS."""
    steps = frames["steps"]
    late = steps[(steps["epoch"] > steps["epoch"].max() - 10) & (steps["zeta"] > 0)]
    spread = late.assign(log=np.log10(late["zeta"])).groupby(["lr", "weight_decay", "method"])["log"].std().unstack()
    ratio = (spread["sps"] / spread["prox-sps"]).fillna(0)  # neither varies
    text, holds = _typical(ratio)
    return text, holds and ratio[_strong(ratio)].min() > 1


@states(
    "zeta-above-alpha-at-1",
    "If alpha_0 = 1, zeta_k > alpha_k for most iterations, so that both methods are almost identical.",
    "share of iterations with zeta_k > alpha_k in one run, both methods, every lambda",
    "above one half for alpha_0 = 1, and below one half for alpha_0 = 10",
    needs=BOTH,
    finite="zeta_median",
)
def capped_for_small_caps(frames: Frames) -> tuple[str, bool]:
    """Why the methods are almost identical at alpha_0 = 1."""
    steps = frames["steps"]
    require_methods(steps, BOTH)
    keys = [steps[name] for name in ("lr", "method", "weight_decay")]
    share = (steps["zeta"] > steps["alpha"]).groupby(keys).mean()
    small, large = share[1.0], share[10.0]
    return (
        f"least {small.min():.0%} at lambda = {small.idxmin()[1]:g}; at alpha_0 = 10 at most {large.max():.0%}",
        small.min() > 0.5 > large.max(),
    )


PATH_CLAIMS = (
    best_strength,
    lower_error,
    same_for_small_caps,
    smaller_norm,
    unstable_sps,
    good_for_many_caps,
    good_unless_both_large,
    larger_zeta,
    more_spread_zeta,
    capped_for_small_caps,
)
