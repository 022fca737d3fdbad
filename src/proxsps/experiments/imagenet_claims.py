"""Sentences of the paper on a residual network with batch normalisation for ImageNet32, and their numbers.

The paper has one run of each setting, so that margins are fixed: nothing is known about the spread over seeds.
"""

from __future__ import annotations

import numpy as np

from proxsps.experiments.base import Frames
from proxsps.experiments.deep_claims import accuracies, final, last_tenth, less_sensitive, percent
from proxsps.experiments.sentences import POLYAK, Found, labelled, require_methods, states

ALL = (*POLYAK, "sgd", "adamw")
WORKS = 0.1  # a hundred times the accuracy of guessing, 1/1000; the smallest published one is 0.12
TRAINED = f"every accuracy above {WORKS:.0%}"
ALIKE = 0.1  # accuracies differ by at most this share of the smaller one
APART = 1.5  # a norm that is larger or smaller by this factor differs significantly


@states(
    "difference of their final validation accuracies, every lambda",
    f"at most two points, and a tenth of the smaller one; {TRAINED}",
    needs=POLYAK,
    finite="val_error",
)
def equally_well(frames: Frames) -> tuple[str, bool]:
    """SPS and ProxSPS perform equally well."""
    table = accuracies(frames["runs"])[list(POLYAK)]
    gap, low = (table["prox-sps"] - table["sps"]).abs(), table.min(axis=1)
    return (
        f"largest {100 * gap.max():.1f} points at lambda = {gap.idxmax():g}: {percent(table.loc[gap.idxmax()])}",
        gap.max() <= 0.02 and (gap <= ALIKE * low).all() and low.min() > WORKS,
    )


@states(
    "final validation accuracy of each method at its best lambda, largest minus smallest",
    f"at most four points, and a tenth of the smallest; {TRAINED}",
    needs=ALL,
    finite="val_error",
)
def similar_accuracies(frames: Frames) -> Found:
    """All methods perform similarly well in terms of accuracy."""
    best = accuracies(frames["runs"])[list(ALL)].max()
    apart = best.max() - best.min()
    return Found(
        f"{100 * apart:.1f} points: {percent(best)}",
        apart <= 0.04 and apart <= ALIKE * best.min() and best.min() > WORKS,
        "",
        f"at most three points: {'yes' if apart <= 0.03 else 'no'}",
    )


@states(
    "factor between AdamW's final norm and the nearest one of the others, every lambda; factor among the others",
    f"larger than among the others at every lambda, and at least {APART:g} at one; every method above {WORKS:.0%} at "
    "its best lambda",
    needs=ALL,
    finite="model_norm",
)
def different_norm(frames: Frames) -> Found:
    """The norm of AdamW's iterates differs significantly from that of the other methods."""
    norms = np.log(final(frames["runs"], "model_norm")[list(ALL)])
    others = norms.drop(columns="adamw")
    away = np.exp(others.sub(norms["adamw"], axis=0).abs().min(axis=1))
    within = np.exp(others.max(axis=1) - others.min(axis=1))
    lam = (away / within).idxmin()
    trained = accuracies(frames["runs"])[list(ALL)].max().min() > WORKS
    return Found(
        f"{away[lam]:.3g} and {within[lam]:.3g} at lambda = {lam:g}: {labelled(np.exp(norms.loc[lam]))}; largest "
        f"{away.max():.3g} at lambda = {away.idxmax():g}",
        (away > within).all() and away.max() >= APART and trained,
        "",
        f"at least {APART:g} at {int((away >= APART).sum())} of {len(away)} lambda",
    )


@states(
    "share of steps with zeta_k < alpha_k in the first epoch and in the last tenth of them, SPS and ProxSPS, every "
    "lambda",
    f"above a tenth in the first epoch, and larger than at the end; {TRAINED}",
    needs=POLYAK,
    finite="val_error",
)
def adaptive_early(frames: Frames) -> tuple[str, bool]:
    """The adaptive step size is active in the initial iterations."""
    steps = frames["steps"]
    require_methods(steps, POLYAK)
    steps = steps[steps["method"].isin(POLYAK)]
    active = (steps["zeta"] < steps["alpha"]).groupby([steps["weight_decay"], steps["method"], steps["epoch"]]).mean()
    table = active.unstack("epoch")
    first, late = table[1], table.iloc[:, -last_tenth(frames["runs"]) :].mean(axis=1)
    rise = accuracies(frames["runs"])[list(POLYAK)].min(axis=None)
    return (
        f"minimum {first.min():.0%} in the first epoch; at the end at most {late.max():.0%}",
        first.min() > 0.1 and (first > late).all() and rise > WORKS,
    )


@states(
    "mean validation accuracy over the first tenth of the epochs, the worse of both minus SGD, every lambda",
    f"at least half a point; at the end {TRAINED}",
    needs=(*POLYAK, "sgd"),
    finite="val_accuracy",
)
def faster_start(frames: Frames) -> tuple[str, bool]:
    """The adaptive step size leads to faster learning in the initial epochs compared to SGD."""
    runs = frames["runs"]
    early = runs[runs["epoch"] <= last_tenth(runs)]
    table = early.groupby(["weight_decay", "method"])["val_accuracy"].mean().unstack()
    lead = table[list(POLYAK)].min(axis=1, skipna=False) - table["sgd"]
    trained = accuracies(runs)[[*POLYAK, "sgd"]].min(axis=None) > WORKS
    return f"minimum {100 * lead.min():+.1f} points at lambda = {lead.idxmin():g}", lead.min() >= 0.005 and trained


CLAIMS = (equally_well, similar_accuracies, less_sensitive(WORKS), different_norm, adaptive_early, faster_start)
