"""Sentences of the paper on residual networks for CIFAR-10, and the numbers that check them.

A network at chance level has not been trained: sentences on how well methods work, or how they compare, do not hold
for it, however equal the methods are. `imagenet_claims` has the sentences on ImageNet32.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from proxsps.experiments.base import Claim, Frames, last_medians
from proxsps.methods import METHODS

CHANCE = 0.2  # an accuracy above it has left chance level, which is 0.1
LEARNED = f"every accuracy above {CHANCE:.0%}"
FASTER = 2 / 3  # of the epochs that another method takes: considerably faster


# What claims are made of


def last_tenth(runs: pd.DataFrame) -> int:
    """Epochs at the end over which a median is taken: the paper's ten of a hundred."""
    return max(1, int(runs["epoch"].max()) // 10)


def final(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Values at the end, mean over runs; a row for each lambda, a column for each method."""
    values = last_medians(runs, metric, last_tenth(runs))
    return values.groupby(["weight_decay", "method"]).mean().unstack()


def accuracies(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracies at the end; that of a run that diverged is minus infinity."""
    return 1 - final(runs, "val_error")


def beaten_by(table: pd.DataFrame, ours: list[str], other: str) -> tuple[float, str]:
    """The least lead of the worst of our methods over another one, over lambda, and a text that says where."""
    lead = table[ours].min(axis=1) - table[other]
    worst = lead.idxmin()
    return lead.min(), f"least {100 * lead.min():+.1f} points, at lambda = {worst:g}: {percent(table.loc[worst])}"


def first_above(runs: pd.DataFrame, level: float) -> pd.Series:
    """First epoch of each run with an accuracy above a level, infinity if there is none; by lambda, method and seed."""
    reached = runs["epoch"].where(runs["val_accuracy"] > level, float("inf"))
    return reached.groupby([runs["weight_decay"], runs["method"], runs["seed"]]).min()


def _epochs(values: pd.Series) -> str:
    shown = ["never" if value == float("inf") else f"epoch {value:.0f}" for value in values]
    return ", ".join(shown)


def percent(values: pd.Series) -> str:
    """Values by method, as a text."""
    return ", ".join(f"{METHODS[method].label} {value:.1%}" for method, value in values.items())


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
    largest = runs[runs["weight_decay"] == runs["weight_decay"].max()]
    low = largest["val_accuracy"] <= CHANCE
    stuck, late = (largest[low & (largest["method"] == method)] for method in ("sps", "prox-sps"))
    moving = largest[~low & (largest["method"] == "prox-sps")]
    zeta, other = stuck["zeta_median"].median(), moving["zeta_median"].median()
    return Claim(
        "tiny-steps",
        "SPS makes no progress for a long time because its adaptive step size is very small; ProxSPS does not share "
        "this issue.",
        f"zeta_k, median over epochs, largest lambda: of SPS at an accuracy of at most {CHANCE:.0%}, of ProxSPS above",
        "below 1e-4 for SPS, above for ProxSPS; SPS has such low accuracies in at least twice as many epochs",
        f"SPS {zeta:.1e}, ProxSPS {other:.1e}; {len(stuck)} epochs against {len(late)}",
        bool(zeta < 1e-4 < other and len(stuck) >= 2 * len(late)),
    )


def faster_than_adamw(frames: Frames) -> Claim:
    """Speed against AdamW at the largest strength."""
    runs = frames["runs"]
    largest = runs[runs["weight_decay"] == runs["weight_decay"].max()]
    level = max(CHANCE, 0.9 * float(accuracies(largest)["adamw"].iloc[0]))
    first = first_above(largest, level).groupby("method").mean()
    return Claim(
        "faster-than-adamw",
        "For larger lambda the training is considerably faster than for AdamW.",
        f"first epoch with a validation accuracy above {level:.1%}, largest lambda, mean over runs: nine tenths of "
        f"AdamW's final one, but not below {CHANCE:.0%}",
        "for ProxSPS after at most two thirds of AdamW's epochs",
        f"ProxSPS {_epochs(first[['prox-sps']])}; AdamW {_epochs(first[['adamw']])}",
        bool(first["prox-sps"] < float("inf") and first["prox-sps"] <= FASTER * first["adamw"]),
    )


# Both networks


def competitive(frames: Frames) -> Claim:
    """Final accuracy against AdamW."""
    table = accuracies(frames["runs"])
    lead, text = beaten_by(table, ["prox-sps"], "adamw")
    return Claim(
        "competitive",
        "ProxSPS performs well in comparison to AdamW, without extensive tuning.",
        "final validation accuracy of ProxSPS minus that of AdamW, every lambda, mean over runs",
        f"at least minus two points; of ProxSPS {LEARNED}",
        text,
        bool(lead >= -0.02 and table["prox-sps"].min() > CHANCE),
    )


def smaller_norm(frames: Frames, largest_only: bool = False) -> Claim:
    """Norm of the weights."""
    table = final(frames["runs"], "model_norm")
    table, which = (table.iloc[-1:], "largest") if largest_only else (table, "every")
    ratio = (table["prox-sps"] / table[["sps", "adamw"]].min(axis=1)).fillna(float("inf"))  # all diverged
    worst = ratio.idxmax()
    norms = ", ".join(f"{METHODS[method].label} {value:.3g}" for method, value in table.loc[worst].items())
    trained = accuracies(frames["runs"])["prox-sps"].loc[table.index]
    return Claim(
        "smaller-norm",
        "ProxSPS produces smaller weights in the trained network.",
        f"final norm of ProxSPS's weights over the smaller one of SPS's and AdamW's, {which} lambda",
        f"below 1; of ProxSPS {LEARNED}",
        f"largest {ratio.max():.3f} at lambda = {worst:g}: {norms}; accuracy at least {trained.min():.1%}",
        bool(ratio.max() < 1 and trained.min() > CHANCE),
    )


# ResNet56


def both_work(frames: Frames) -> Claim:
    """SPS and ProxSPS."""
    table = accuracies(frames["runs"])
    lead, text = beaten_by(table, ["prox-sps", "sps"], "adamw")
    return Claim(
        "both-work",
        "Both SPS and ProxSPS work well.",
        "final validation accuracy of the worse of the two minus that of AdamW, every lambda, mean over runs",
        f"at least minus two points; {LEARNED}",
        text,
        bool(lead >= -0.02 and table.min(axis=None) > CHANCE),
    )


def less_sensitive(frames: Frames, chance: float = CHANCE) -> Claim:
    """Accuracy over lambda."""
    table = accuracies(frames["runs"])
    spread = table.max() - table.min()
    return Claim(
        "less-sensitive",
        "SPS and ProxSPS are less sensitive to lambda than AdamW.",
        "largest minus least final validation accuracy over lambda",
        "smaller for SPS and ProxSPS than for AdamW, and all three trained",
        percent(spread),
        bool(spread[["prox-sps", "sps"]].max() < spread["adamw"] and table.max().min() > chance),
    )


def _gain(runs: pd.DataFrame, method: str) -> tuple[float, float]:
    """Mean accuracy after a quarter of the epochs, and what is gained from there to the end."""
    mean = runs[runs["method"] == method].groupby("epoch")["val_accuracy"].mean()
    quarter, last = len(mean) // 4, last_tenth(runs)
    before = mean.iloc[quarter : quarter + last].median()
    return before, mean.iloc[-last:].median() - before


def stagnates(frames: Frames) -> Claim:
    """ProxSPS at the largest strength, from a quarter of the epochs on."""
    runs = frames["runs"]
    largest = runs[runs["weight_decay"] == runs["weight_decay"].max()]
    (level, gain), (_, other) = (_gain(largest, method) for method in ("prox-sps", "sps"))
    return Claim(
        "stagnates",
        "At lambda = 5e-4 the progress of ProxSPS stagnates after roughly a quarter of the epochs.",
        "gain of validation accuracy after a quarter of the epochs, largest lambda, mean over runs",
        f"at most two points for ProxSPS, from above {CHANCE:.0%}; more than two for SPS",
        f"ProxSPS {100 * gain:+.1f} points from {level:.1%}, SPS {100 * other:+.1f} points",
        bool(gain <= 0.02 < other and level > CHANCE),
    )


def capped_far_above(frames: Frames) -> Claim:
    """Why ProxSPS stagnates."""
    runs = frames["runs"]
    mine = runs[(runs["method"] == "prox-sps") & (runs["weight_decay"] == runs["weight_decay"].max())]
    zeta = mine.groupby("epoch")["zeta_median"].median()
    ratio = zeta / mine.groupby("epoch")["alpha"].median()
    last = last_tenth(runs)
    end, fall = ratio.iloc[-last:].median(), zeta.iloc[-last:].median() / zeta.max()
    return Claim(
        "zeta-below-alpha",
        "zeta_k decays over time until it is far below alpha_k, which biases the weights towards zero.",
        "zeta_k over alpha_k of ProxSPS at the end, and zeta_k at the end over its largest, medians of epochs, largest "
        "lambda",
        "both below 0.1",
        f"{end:.2g} and {fall:.2g}",
        bool(end < 0.1 and fall < 0.1),
    )


# The cap that follows zeta


def relabelled(frames: Frames) -> Frames:
    """Runs with the adaptive cap under their own name, so that a figure distinguishes them."""
    return {
        name: frame.assign(method=frame["method"].where(frame["schedule"] != "adaptive", "prox-sps-adaptive"))
        for name, frame in frames.items()
    }


def published_caps(frames: Frames) -> Frames:
    """The results without the runs of the adaptive cap."""
    return {name: frame[frame["schedule"] != "adaptive"] for name, frame in frames.items()}


def on_published_caps(claim: Callable[[Frames], Claim]) -> Callable[[Frames], Claim]:
    """A claim on methods as the paper ran them, if the results also have runs with the adaptive cap."""

    def check(frames: Frames) -> Claim:
        return claim(published_caps(frames))

    return check


def adaptive_helps(frames: Frames) -> Claim:
    """Final accuracy with the cap that follows zeta."""
    table = accuracies(relabelled(frames)["runs"])[["prox-sps", "prox-sps-adaptive"]].iloc[0]
    norms = final(relabelled(frames)["runs"], "model_norm").iloc[0]
    gain = table["prox-sps-adaptive"] - table["prox-sps"]
    return Claim(
        "adaptive-helps",
        "We should choose alpha_k roughly of the order of zeta_k, for example by its values from the previous epoch.",
        "final validation accuracy of ProxSPS, adaptive cap minus sqrt cap, mean over runs",
        f"at least one point; both above {CHANCE:.0%}",
        f"{100 * gain:+.1f} points ({table['prox-sps-adaptive']:.1%} against {table['prox-sps']:.1%}; norm "
        f"{norms['prox-sps-adaptive']:.3g} against {norms['prox-sps']:.3g})",
        bool(gain >= 0.01 and table.min() > CHANCE),
    )
