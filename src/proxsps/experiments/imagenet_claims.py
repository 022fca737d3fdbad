"""Sentences of the paper on a residual network with batch normalisation for ImageNet32, and their numbers."""

from __future__ import annotations

import numpy as np

from proxsps.experiments.base import Claim, Frames
from proxsps.experiments.deep_claims import accuracies, final, last_tenth, percent
from proxsps.methods import METHODS

CHANCE = 2e-3  # an accuracy above it has left chance level, which is 1/1000
TRAINED = f"all of them above {CHANCE:.1%}"
APART = 1.5  # a norm that is larger or smaller by this factor differs significantly


def equally_well(frames: Frames) -> Claim:
    """ProxSPS against SPS."""
    table = accuracies(frames["runs"])[["prox-sps", "sps"]]
    gap = (table["prox-sps"] - table["sps"]).abs()
    return Claim(
        "equally-well",
        "SPS and ProxSPS perform equally well.",
        "difference of their final validation accuracies, every lambda",
        f"at most two points; {TRAINED}",
        f"largest {100 * gap.max():.1f} points at lambda = {gap.idxmax():g}",
        bool(gap.max() <= 0.02 and table.min(axis=None) > CHANCE),
    )


def similar_accuracies(frames: Frames) -> Claim:
    """The best accuracy of each method."""
    best = accuracies(frames["runs"]).max()
    return Claim(
        "similar-accuracies",
        "All methods perform similarly well in terms of accuracy.",
        "final validation accuracy of each method at its best lambda, largest minus least",
        f"at most three points; {TRAINED}",
        f"{100 * (best.max() - best.min()):.1f} points: {percent(best)}",
        bool(best.max() - best.min() <= 0.03 and best.min() > CHANCE),
    )


def different_norm(frames: Frames) -> Claim:
    """The norm of AdamW's weights against the others."""
    norms = np.log(final(frames["runs"], "model_norm"))
    others = norms.drop(columns="adamw")
    away = np.exp(others.sub(norms["adamw"], axis=0).abs().min(axis=1))
    within = np.exp(others.max(axis=1) - others.min(axis=1))
    lam = (away / within).idxmin()
    shown = ", ".join(f"{METHODS[method].label} {value:.3g}" for method, value in np.exp(norms.loc[lam]).items())
    return Claim(
        "different-norm",
        "The norm of AdamW's iterates differs significantly from that of the other methods.",
        "factor between AdamW's final norm and the nearest one of the others, every lambda; factor among the others",
        f"at least {APART:g}, and larger than among the others",
        f"{away[lam]:.3g} and {within[lam]:.3g} at lambda = {lam:g}: {shown}",
        bool((away >= APART).all() and (away > within).all()),
    )


def active_early(frames: Frames) -> Claim:
    """Where the adaptive step is shorter than its cap."""
    steps = frames["steps"]
    steps = steps[steps["method"].isin(["prox-sps", "sps"])]
    active = (steps["zeta"] < steps["alpha"]).groupby([steps["weight_decay"], steps["method"], steps["epoch"]]).mean()
    table = active.unstack("epoch")
    first, late = table[1], table.iloc[:, -last_tenth(frames["runs"]) :].mean(axis=1)
    rise = accuracies(frames["runs"])[["prox-sps", "sps"]].min(axis=None)
    return Claim(
        "adaptive-early",
        "The adaptive step size is active in the initial iterations.",
        "share of steps with zeta_k < alpha_k in the first epoch and in the last tenth of them, SPS and ProxSPS, every "
        "lambda",
        "above a tenth in the first epoch, and larger than at the end; the networks are trained",
        f"least {first.min():.0%} in the first epoch; at the end at most {late.max():.0%}",
        bool(first.min() > 0.1 and (first > late).all() and rise > CHANCE),
    )


def faster_start(frames: Frames) -> Claim:
    """The first epochs against SGD."""
    runs = frames["runs"]
    early = runs[runs["epoch"] <= last_tenth(runs)]
    table = early.groupby(["weight_decay", "method"])["val_accuracy"].mean().unstack()
    lead = table[["prox-sps", "sps"]].min(axis=1) - table["sgd"]
    return Claim(
        "faster-start",
        "The adaptive step size leads to faster learning in the initial epochs compared to SGD.",
        "mean validation accuracy over the first tenth of the epochs, the worse of both minus SGD, every lambda",
        "at least half a point",
        f"least {100 * lead.min():+.1f} points at lambda = {lead.idxmin():g}",
        bool(lead.min() >= 0.005),
    )
