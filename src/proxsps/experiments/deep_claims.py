"""Sentences of the paper on deep networks, and the numbers that decide them."""

from __future__ import annotations

import pandas as pd

from proxsps.experiments.base import Claim, Frames, last_medians

NAMES = {"prox-sps": "ProxSPS", "sps": "SPS", "sgd": "SGD", "adamw": "AdamW"}
CHANCE = 0.2  # an accuracy above it has left chance level, which is 0.1


# What claims are made of


def _last(runs: pd.DataFrame) -> int:
    """Epochs at the end over which a median is taken: the paper's ten of a hundred."""
    return max(1, int(runs["epoch"].max()) // 10)


def final(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Values at the end, mean over runs; a row for each lambda, a column for each method."""
    values = last_medians(runs, metric, _last(runs))
    return values.groupby(["weight_decay", "method"]).mean().unstack()


def accuracies(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracies at the end; that of a run that diverged is minus infinity."""
    return 1 - final(runs, "val_error")


def first_above(runs: pd.DataFrame, level: float) -> pd.Series:
    """First epoch of each run with an accuracy above a level, infinity if there is none; by lambda, method and seed."""
    reached = runs["epoch"].where(runs["val_accuracy"] > level, float("inf"))
    return reached.groupby([runs["weight_decay"], runs["method"], runs["seed"]]).min()


def _epochs(values: pd.Series) -> str:
    shown = ["never" if value == float("inf") else f"epoch {value:.0f}" for value in values]
    return ", ".join(shown)


def _percent(values: pd.Series) -> str:
    return ", ".join(f"{NAMES[method]} {value:.1%}" for method, value in values.items())


# ResNet110


def leaves_chance(frames: Frames, sps_after: int | None = None) -> Claim:
    """Epochs to leave chance level, at the largest strength."""
    runs = frames["runs"]
    first = first_above(runs, CHANCE).loc[runs["weight_decay"].max()]
    ours, theirs = first["prox-sps"], first["sps"]
    limit = sps_after or int(runs["epoch"].max())
    return Claim(
        "leaves-chance",
        "SPS does not make progress for a long time; ProxSPS does not share this issue and performs well after a few "
        "initial epochs.",
        f"first epoch with a validation accuracy above {CHANCE:.0%}, largest lambda, every run",
        f"ProxSPS gets there within {limit} epochs, SPS does not",
        f"ProxSPS {_epochs(ours)}; SPS {_epochs(theirs)} (of {runs['epoch'].max()})",
        bool(ours.max() <= limit < theirs.min()),
    )


def tiny_steps(frames: Frames) -> Claim:
    """Why SPS stalls."""
    runs = frames["runs"]
    stuck = runs[(runs["method"] == "sps") & (runs["weight_decay"] == runs["weight_decay"].max())]
    stuck = stuck[stuck["val_accuracy"] <= CHANCE]
    zeta = stuck["zeta_median"].median()
    return Claim(
        "tiny-steps",
        "SPS makes no progress because its adaptive step size is very small.",
        f"zeta_k of SPS, median over the epochs with an accuracy of at most {CHANCE:.0%}, largest lambda",
        "below 1e-4",
        f"{zeta:.1e} over {len(stuck)} epochs",
        bool(zeta < 1e-4),
    )


def faster_than_adamw(frames: Frames) -> Claim:
    """Speed against AdamW at the largest strength."""
    runs = frames["runs"]
    largest = runs[runs["weight_decay"] == runs["weight_decay"].max()]
    level = 0.9 * float(accuracies(largest)["adamw"].iloc[0])
    first = first_above(largest, level).groupby("method").mean()
    return Claim(
        "faster-than-adamw",
        "For larger lambda the training is considerably faster than for AdamW.",
        f"first epoch with a validation accuracy above nine tenths of AdamW's final one, {level:.1%}, largest lambda",
        "earlier for ProxSPS than for AdamW, mean over runs",
        f"ProxSPS {_epochs(first[['prox-sps']])}; AdamW {_epochs(first[['adamw']])}",
        bool(first["prox-sps"] < first["adamw"]),
    )


# Both networks


def competitive(frames: Frames) -> Claim:
    """Final accuracy against AdamW."""
    table = accuracies(frames["runs"])
    lead = table["prox-sps"] - table["adamw"]
    worst = lead.idxmin()
    return Claim(
        "competitive",
        "ProxSPS performs well in comparison to AdamW, without extensive tuning.",
        "final validation accuracy of ProxSPS minus that of AdamW, every lambda, mean over runs",
        "at least minus two points",
        f"least {100 * lead.min():+.1f} points, at lambda = {worst:g}: {_percent(table.loc[worst])}",
        bool(lead.min() >= -0.02),
    )


def smaller_norm(frames: Frames, largest_only: bool = False) -> Claim:
    """Norm of the weights."""
    table = final(frames["runs"], "model_norm")
    table, which = (table.iloc[-1:], "largest") if largest_only else (table, "every")
    ratio = table["prox-sps"] / table[["sps", "adamw"]].min(axis=1)
    worst = ratio.idxmax()
    norms = ", ".join(f"{NAMES[method]} {value:.3g}" for method, value in table.loc[worst].items())
    return Claim(
        "smaller-norm",
        "ProxSPS produces smaller weights in the trained network.",
        f"final norm of ProxSPS's weights over the smaller one of SPS's and AdamW's, {which} lambda",
        "below 1",
        f"largest {ratio.max():.3f} at lambda = {worst:g}: {norms}",
        bool(ratio.max() < 1),
    )


# ResNet56


def both_work(frames: Frames) -> Claim:
    """SPS and ProxSPS."""
    table = accuracies(frames["runs"])
    lead = table[["prox-sps", "sps"]].min(axis=1) - table["adamw"]
    worst = lead.idxmin()
    return Claim(
        "both-work",
        "Both SPS and ProxSPS work well.",
        "final validation accuracy of the worse of the two minus that of AdamW, every lambda, mean over runs",
        "at least minus two points",
        f"least {100 * lead.min():+.1f} points, at lambda = {worst:g}: {_percent(table.loc[worst])}",
        bool(lead.min() >= -0.02),
    )


def stagnates(frames: Frames) -> Claim:
    """ProxSPS at the largest strength, from a quarter of the epochs on."""
    runs = frames["runs"]
    mine = runs[(runs["method"] == "prox-sps") & (runs["weight_decay"] == runs["weight_decay"].max())]
    mean = mine.groupby("epoch")["val_accuracy"].mean()
    quarter, last = len(mean) // 4, _last(runs)
    gain = mean.iloc[-last:].median() - mean.iloc[quarter : quarter + last].median()
    return Claim(
        "stagnates",
        "At lambda = 5e-4 the progress of ProxSPS stagnates after roughly a quarter of the epochs.",
        f"gain of validation accuracy from epoch {quarter} to the end, largest lambda, mean over runs",
        "at most two points",
        f"{100 * gain:+.1f} points",
        bool(gain <= 0.02),
    )


def capped_far_above(frames: Frames) -> Claim:
    """Why ProxSPS stagnates."""
    runs = frames["runs"]
    mine = runs[(runs["method"] == "prox-sps") & (runs["weight_decay"] == runs["weight_decay"].max())]
    late = mine[mine["epoch"] > mine["epoch"].max() - _last(runs)]
    ratio = (late["zeta_median"] / late["alpha"]).median()
    return Claim(
        "zeta-below-alpha",
        "zeta_k decays over time until it is far below alpha_k, which biases the weights towards zero.",
        "zeta_k over alpha_k of ProxSPS at the end, medians of epochs, largest lambda",
        "below 0.1",
        f"{ratio:.2g}",
        bool(ratio < 0.1),
    )


# The cap that follows zeta


def relabelled(frames: Frames) -> Frames:
    """Runs with the adaptive cap under a name of their own, so that a figure tells them apart."""
    return {
        name: frame.assign(method=frame["method"].where(frame["schedule"] != "adaptive", "prox-sps-adaptive"))
        for name, frame in frames.items()
    }


def adaptive_helps(frames: Frames) -> Claim:
    """Final accuracy with the cap that follows zeta."""
    table = accuracies(relabelled(frames)["runs"]).iloc[0]
    norms = final(relabelled(frames)["runs"], "model_norm").iloc[0]
    gain = table["prox-sps-adaptive"] - table["prox-sps"]
    return Claim(
        "adaptive-helps",
        "We should choose alpha_k roughly of the order of zeta_k, for example by its values from the previous epoch.",
        "final validation accuracy of ProxSPS, adaptive cap minus sqrt cap, mean over runs",
        "above 0",
        f"{100 * gain:+.1f} points ({table['prox-sps-adaptive']:.1%} against {table['prox-sps']:.1%}; norm "
        f"{norms['prox-sps-adaptive']:.3g} against {norms['prox-sps']:.3g})",
        bool(gain > 0),
    )


# ImageNet32


def equally_well(frames: Frames) -> Claim:
    """ProxSPS against SPS with batch normalisation."""
    table = accuracies(frames["runs"])
    gap = (table["prox-sps"] - table["sps"]).abs()
    return Claim(
        "equally-well",
        "SPS and ProxSPS perform equally well.",
        "difference of their final validation accuracies, every lambda",
        "at most two points",
        f"largest {100 * gap.max():.1f} points at lambda = {gap.idxmax():g}",
        bool(gap.max() <= 0.02),
    )


def less_sensitive(frames: Frames) -> Claim:
    """Accuracy over lambda."""
    table = accuracies(frames["runs"])
    spread = table.max() - table.min()
    return Claim(
        "less-sensitive",
        "SPS and ProxSPS are less sensitive to lambda than AdamW.",
        "largest minus least final validation accuracy over lambda",
        "smaller for SPS and ProxSPS than for AdamW",
        _percent(spread),
        bool(spread[["prox-sps", "sps"]].max() < spread["adamw"]),
    )


def faster_start(frames: Frames) -> Claim:
    """The first epochs against SGD."""
    runs = frames["runs"]
    early = runs[runs["epoch"] <= max(1, runs["epoch"].max() // 10)]
    table = early.groupby(["weight_decay", "method"])["val_accuracy"].mean().unstack()
    lead = table[["prox-sps", "sps"]].min(axis=1) - table["sgd"]
    return Claim(
        "faster-start",
        "The adaptive step size leads to faster learning in the initial epochs compared to SGD.",
        "mean validation accuracy over the first tenth of the epochs, the worse of both minus SGD, every lambda",
        "above 0",
        f"least {100 * lead.min():+.1f} points at lambda = {lead.idxmin():g}",
        bool(lead.min() > 0),
    )
