"""What the paper says about matrix factorisation with several strengths of regularisation, checked by numbers.

If the paper compares one method with another, so does the rule, and it fails on results with swapped or
copied methods. `stability_claims` has the sentences on a single strength.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from proxsps.experiments.base import Claim, Frames, over_seeds, setting

LARGE = (5.0, 10.0)  # values of alpha_0 at which the paper finds the methods apart
GOOD = 0.05  # an objective this far above the best one found still is a good performance


# Claims on the strengths of regularisation


def _pairs(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Means of both methods side by side, indexed by alpha_0 and lambda."""
    means = over_seeds(runs, metric).rename("value").reset_index()
    return means.pivot_table(index=["lr", "weight_decay"], columns="method", values="value")


def best_strength(frames: Frames) -> Claim:
    """Where the validation error is least."""
    pairs = _pairs(frames["runs"], "val_error")
    best, other = pairs["prox-sps"].min(), pairs["sps"].min()
    lr, lam = pairs["prox-sps"].idxmin()
    return Claim(
        "best-lambda",
        "The best validation error is obtained for lambda = 1e-4 and large alpha_0.",
        "validation error, median over the last ten epochs, mean over runs",
        "least of all for ProxSPS at lambda = 1e-4 with alpha_0 >= 5",
        f"ProxSPS {best:.2e} at {setting(lr, lam)}; SPS {other:.2e} at {setting(*pairs['sps'].idxmin())}",
        bool(lam == 1e-4 and lr in LARGE and best < other),
    )


def lower_error(frames: Frames) -> Claim:
    """ProxSPS against SPS at large caps."""
    pairs = _pairs(frames["runs"], "val_error").loc[list(LARGE)]
    ratio = (pairs["sps"] / pairs["prox-sps"]).fillna(0)  # both diverged
    higher = pairs["sps"] - pairs["prox-sps"]
    strong = higher.index.get_level_values("weight_decay") >= 1e-3
    by_lambda, by_alpha = (
        (higher[~strong].median(), higher[strong].median()),
        (higher[5.0].median(), higher[10.0].median()),
    )
    return Claim(
        "lower-error",
        "With SPS the validation error is higher, in particular for large alpha_0 and lambda.",
        "validation error of SPS over that of ProxSPS, alpha_0 in {5, 10}, every lambda; and their median difference",
        "above 1; the difference is larger for lambda >= 1e-3 than below, and for alpha_0 = 10 than for 5",
        f"least {ratio.min():.4g} at {setting(*ratio.idxmin())}; {by_lambda[1]:.1e} against {by_lambda[0]:.1e} over "
        f"lambda, {by_alpha[1]:.1e} against {by_alpha[0]:.1e} over alpha_0",
        bool(ratio.min() > 1 and by_lambda[1] > by_lambda[0] and by_alpha[1] > by_alpha[0]),
    )


def same_for_small_caps(frames: Frames) -> Claim:
    """At alpha_0 = 1 both methods are capped most of the time."""
    pairs = _pairs(frames["runs"], "val_error")
    apart = (pairs["prox-sps"] / pairs["sps"] - 1).abs().fillna(np.inf)
    near, far = apart[1.0], apart[10.0].median()
    return Claim(
        "same-at-1",
        "For alpha_0 = 1 the two methods give almost identical results.",
        "relative difference of their validation errors at alpha_0 = 1, and its median over lambda at alpha_0 = 10",
        "at most 5 % at every lambda, but more at alpha_0 = 10",
        f"largest {near.max():.1%} at lambda = {near.idxmax():g}; {far:.1%} at alpha_0 = 10",
        bool(near.max() <= 0.05 < far),
    )


def smaller_norm(frames: Frames) -> Claim:
    """Norm of the iterates."""
    pairs = _pairs(frames["runs"], "model_norm").loc[list(LARGE)]
    ratio = (pairs["prox-sps"] / pairs["sps"]).fillna(np.inf)  # both diverged
    return Claim(
        "smaller-norm",
        "ProxSPS leads to a smaller norm of the iterates, hence a more effective regularisation.",
        "model norm of ProxSPS over that of SPS, alpha_0 in {5, 10}, every lambda",
        "below 1",
        f"largest {ratio.max():.4g} at {setting(*ratio.idxmax())}",
        bool(ratio.max() < 1),
    )


def unstable_sps(frames: Frames) -> Claim:
    """The objective of SPS with a large cap."""
    runs = frames["runs"]
    pairs = _pairs(runs, "objective").loc[10.0]
    best = runs.groupby("weight_decay")["objective"].min()
    excess = pairs.sub(best, axis=0)[pairs.index >= 1e-4]
    ratio = (excess["sps"] / excess["prox-sps"]).fillna(0)  # 0/0: neither is above the best one
    return Claim(
        "unstable-sps",
        "SPS is unstable for large alpha_0 for all lambda >= 1e-4.",
        "objective above the best one found, SPS over ProxSPS, alpha_0 = 10",
        "at least 2 at every lambda >= 1e-4",
        f"least {ratio.min():.3g} at lambda = {ratio.idxmin():g}",
        bool(ratio.min() >= 2),
    )


def good_unless_both_large(frames: Frames) -> Claim:
    """Where ProxSPS deteriorates."""
    runs = frames["runs"]
    means = _pairs(runs, "objective")
    best = runs.groupby("weight_decay")["objective"].min()
    excess = means.div(best.reindex(means.index.get_level_values("weight_decay")).to_numpy(), axis=0) - 1
    corner, strong = (10.0, 0.1), excess.index.get_level_values("weight_decay") >= 1e-3
    both, rest = excess["prox-sps"][corner], excess["prox-sps"][strong].drop(corner)
    other = excess["sps"][strong].drop(corner)
    return Claim(
        "deteriorates-at-the-corner",
        "ProxSPS starts to deteriorate only when both alpha_0 and lambda are very large.",
        "objective relative to the best one found at that lambda, minus 1, lambda >= 1e-3",
        f"above {GOOD:.0%} for ProxSPS at alpha_0 = 10, lambda = 0.1 and nowhere else; for SPS elsewhere too",
        f"ProxSPS {both:.1%} there, elsewhere at most {rest.max():.1%}, at {setting(*rest.idxmax())}; SPS elsewhere up "
        f"to {other.max():.1%}, at {setting(*other.idxmax())}",
        bool(rest.max() <= GOOD < both and other.max() > GOOD),
    )


def larger_zeta(frames: Frames) -> Claim:
    """The adaptive step of SPS."""
    pairs = _pairs(frames["runs"], "zeta_median")
    large = pairs[pairs.index.get_level_values("weight_decay") >= 1e-3]
    ratio = (large["sps"] / large["prox-sps"]).fillna(0)
    count = int((ratio > 1).sum())
    return Claim(
        "larger-zeta",
        "The adaptive step zeta_k is typically larger for SPS than for ProxSPS, in particular for large lambda.",
        "epoch median of zeta_k, SPS over ProxSPS, every alpha_0, lambda >= 1e-3",
        "above 1 in at least three of four settings",
        f"above 1 in {count} of {len(ratio)}; least {ratio.min():.3g} at {setting(*ratio.idxmin())}",
        4 * count >= 3 * len(ratio),
    )


def more_spread_zeta(frames: Frames) -> Claim:
    """The spread of the adaptive step of SPS."""
    steps = frames["steps"]
    late = steps[(steps["epoch"] > steps["epoch"].max() - 10) & (steps["weight_decay"] >= 1e-3) & (steps["zeta"] > 0)]
    spread = late.assign(log=np.log10(late["zeta"])).groupby(["lr", "weight_decay", "method"])["log"].std().unstack()
    ratio = (spread["sps"] / spread["prox-sps"]).fillna(0)  # neither varies
    return Claim(
        "more-spread-zeta",
        "zeta_k has more variance for SPS than for ProxSPS, in particular for large lambda.",
        "standard deviation of log10 zeta_k over the last ten epochs of one run, SPS over ProxSPS, lambda >= 1e-3",
        "above 1 at every alpha_0",
        f"least {ratio.min():.3g} at {setting(*ratio.idxmin())}",
        bool(ratio.min() > 1),
    )


def capped_for_small_caps(frames: Frames) -> Claim:
    """Why the methods are almost identical at alpha_0 = 1."""
    steps = frames["steps"]
    keys = [steps[name] for name in ("lr", "method", "weight_decay")]
    share = (steps["zeta"] > steps["alpha"]).groupby(keys).mean()
    small, large = share[1.0], share[10.0]
    return Claim(
        "zeta-above-alpha-at-1",
        "If alpha_0 = 1, zeta_k > alpha_k for most iterations, so that both methods are almost identical.",
        "share of iterations with zeta_k > alpha_k in one run, both methods, every lambda",
        "above one half for alpha_0 = 1, and below one half for alpha_0 = 10",
        f"least {small.min():.0%} at lambda = {small.idxmin()[1]:g}; at alpha_0 = 10 at most {large.max():.0%}",
        bool(small.min() > 0.5 > large.max()),
    )


PATH_CLAIMS = (
    best_strength,
    lower_error,
    same_for_small_caps,
    smaller_norm,
    unstable_sps,
    good_unless_both_large,
    larger_zeta,
    more_spread_zeta,
    capped_for_small_caps,
)
