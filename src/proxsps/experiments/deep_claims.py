"""Sentences of the paper on residual networks for CIFAR-10, and the numbers that check them.

A network at chance level has not been trained: sentences on how well methods work, or how they compare, do not hold
for it, however equal the methods are. `imagenet_claims` has the sentences on ImageNet32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from proxsps.experiments.base import Claim, Frames, last_medians
from proxsps.experiments.sentences import (
    SURE,
    epochs,
    labelled,
    least,
    least_of,
    require_finite,
    require_methods,
    states,
)

ALL, POLYAK = ("prox-sps", "sps", "adamw"), ("prox-sps", "sps")
CHANCE = 0.2  # an accuracy above it has left chance level, which is 0.1
GUESSING = 0.15  # AdamW is something to compare with if it is above: half as much again as chance
# After 100 epochs on whole images a network that works is right more often than not; a linear classifier on the pixels
# is right for two images of five. Twins have few steps and small images, and need only have left chance level.
WORKS = 0.5
LEVEL = 0.02  # accuracies this far below another one are level with it
APART = 0.01  # a difference of accuracies that counts: three standard errors of 10,000 images at 85 %
FASTER = 2 / 3  # of the epochs that another method takes: considerably faster

Checked = Callable[[Frames], Claim]


# What claims are made of


def last_tenth(runs: pd.DataFrame) -> int:
    """Epochs at the end over which a median is taken: the paper's ten of a hundred."""
    return max(1, int(runs["epoch"].max()) // 10)


def by_seed(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Values at the end; a row for each lambda and seed, a column for each method."""
    values = last_medians(runs, metric, last_tenth(runs))
    return values.groupby(["weight_decay", "seed", "method"]).mean().unstack()


def final(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Values at the end, mean over runs; a row for each lambda, a column for each method."""
    return by_seed(runs, metric).groupby("weight_decay").mean()


def accuracies(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracies at the end; that of a run that diverged is minus infinity."""
    return 1 - final(runs, "val_error")


def largest_strength(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with the largest lambda."""
    return runs[runs["weight_decay"] == runs["weight_decay"].max()]


def lead_over(runs: pd.DataFrame, ours: list[str], other: str) -> tuple[float, str]:
    """The least lead of the worst of our methods over another one, over lambda, as far as it is sure, and a text."""
    errors, table = by_seed(runs, "val_error"), accuracies(runs)
    lead = least_of(errors[other] - errors[ours].max(axis=1))
    worst = lead.idxmin()
    mean = (table[ours].min(axis=1) - table[other])[worst]
    return float(lead.min()), (
        f"least {100 * mean:+.1f} points, surely {100 * lead.min():+.1f}, at lambda = {worst:g}: "
        f"{percent(table.loc[worst])}"
    )


def first_above(runs: pd.DataFrame, level: float) -> pd.Series:
    """First epoch of each run with an accuracy above a level, infinity if there is none; by lambda, method and seed."""
    reached = runs["epoch"].where(runs["val_accuracy"] > level, float("inf"))
    return reached.groupby([runs["weight_decay"], runs["method"], runs["seed"]]).min()


def percent(values: pd.Series) -> str:
    """Values by method, as a text."""
    return labelled(values, ".1%")


# ResNet110


def leaves_chance(sps_after: int | None = None) -> Checked:
    """Epochs to leave chance level, at the largest strength; SPS takes more than `sps_after`, or all there are."""

    @states(
        "leaves-chance",
        "SPS does not make progress for a long time; ProxSPS does not share this issue and performs well after a few "
        "initial epochs.",
        f"first epoch with a validation accuracy above {CHANCE:.0%}, largest lambda, every run",
        f"ProxSPS gets there within {f'{sps_after} epochs' if sps_after else 'all epochs'}, SPS does not",
        needs=POLYAK,
    )
    def check(frames: Frames) -> tuple[str, bool]:
        runs = largest_strength(frames["runs"])
        require_finite(runs, "val_accuracy", POLYAK)
        first = first_above(runs, CHANCE).droplevel("weight_decay")
        ours, theirs = first["prox-sps"], first["sps"]
        limit = sps_after or int(runs["epoch"].max())
        return (
            f"ProxSPS {epochs(ours)}; SPS {epochs(theirs)} (of {runs['epoch'].max()})",
            ours.max() <= limit < theirs.min(),
        )

    return check


@states(
    "tiny-steps",
    "SPS makes no progress for a long time because its adaptive step size is very small; ProxSPS does not share "
    "this issue.",
    f"zeta_k, median over epochs, largest lambda: of SPS at an accuracy of at most {CHANCE:.0%}, of ProxSPS above",
    "below 1e-4 for SPS, above for ProxSPS; SPS has such low accuracies in at least twice as many epochs",
    needs=POLYAK,
)
def tiny_steps(frames: Frames) -> tuple[str, bool]:
    """Why SPS stalls."""
    largest = largest_strength(frames["runs"])
    require_finite(largest, "val_accuracy", POLYAK)
    low = largest["val_accuracy"] <= CHANCE
    stuck, late = (largest[low & (largest["method"] == method)] for method in ("sps", "prox-sps"))
    moving = largest[~low & (largest["method"] == "prox-sps")]
    zeta, other = stuck["zeta_median"].median(), moving["zeta_median"].median()
    return (
        f"SPS {zeta:.1e}, ProxSPS {other:.1e}; {len(stuck)} epochs against {len(late)}",
        zeta < 1e-4 < other and len(stuck) >= 2 * len(late),
    )


@states(
    "faster-than-adamw",
    "For larger lambda the training is considerably faster than for AdamW.",
    "first epoch with a validation accuracy above nine tenths of AdamW's final one, but not below "
    f"{CHANCE:.0%}; every lambda but the smallest, if there are several; mean over runs",
    f"for ProxSPS after at most two thirds of AdamW's epochs, {SURE}; final accuracy of AdamW above {GUESSING:.0%}",
    needs=("prox-sps", "adamw"),
)
def faster_than_adamw(frames: Frames) -> tuple[str, bool]:
    """Speed against AdamW at the larger strengths."""
    runs = frames["runs"]
    strengths = sorted(runs["weight_decay"].unique())
    texts, verdicts = [], []
    for lam in strengths[1:] or strengths:
        rows = runs[runs["weight_decay"] == lam]
        require_finite(rows, "val_accuracy", ("prox-sps", "adamw"))
        theirs = float(accuracies(rows)["adamw"].iloc[0])
        level = max(CHANCE, 0.9 * theirs)
        first = first_above(rows, level).droplevel("weight_decay")
        within = first.replace(float("inf"), runs["epoch"].max() + 1)  # at the earliest
        sure = least(FASTER * within["adamw"] - within["prox-sps"]) >= 0
        verdicts.append(first["prox-sps"].max() < float("inf") and sure and theirs > GUESSING)
        mean = first.groupby("method").mean()
        texts.append(
            f"lambda = {lam:g}, above {level:.1%}: ProxSPS {epochs(mean[['prox-sps']])}, AdamW "
            f"{epochs(mean[['adamw']])} ({theirs:.1%} at the end)"
        )
    return "; ".join(texts), all(verdicts)


# Both networks


def competitive(floor: float = WORKS) -> Checked:
    """Final accuracy against AdamW."""

    @states(
        "competitive",
        "ProxSPS performs well in comparison to AdamW, without extensive tuning.",
        "final validation accuracy of ProxSPS minus that of AdamW, every lambda, mean over runs",
        f"at least minus two points, {SURE}; accuracies of ProxSPS above {floor:.0%}, of AdamW above {GUESSING:.0%}",
        needs=("prox-sps", "adamw"),
        finite="val_error",
    )
    def check(frames: Frames) -> tuple[str, bool]:
        lead, text = lead_over(frames["runs"], ["prox-sps"], "adamw")
        table = accuracies(frames["runs"])
        return text, lead >= -LEVEL and table["prox-sps"].min() > floor and table["adamw"].min() > GUESSING

    return check


def smaller_norm(floor: float = WORKS, largest_only: bool = False) -> Checked:
    """Norm of the weights."""

    @states(
        "smaller-norm",
        "ProxSPS produces smaller weights in the trained network.",
        "final norm of ProxSPS's weights over the smaller one of SPS's and AdamW's, "
        f"{'largest' if largest_only else 'every'} lambda",
        f"below 1, {SURE}; of ProxSPS every accuracy above {floor:.0%}",
        needs=ALL,
    )
    def check(frames: Frames) -> tuple[str, bool]:
        runs = largest_strength(frames["runs"]) if largest_only else frames["runs"]
        require_finite(runs, "model_norm", ALL)
        require_finite(runs, "val_error", ("prox-sps",))
        norms = np.log(by_seed(runs, "model_norm"))
        sure = least_of(norms[["sps", "adamw"]].min(axis=1) - norms["prox-sps"])
        worst, table = sure.idxmin(), final(runs, "model_norm")
        ratio = table["prox-sps"] / table[["sps", "adamw"]].min(axis=1)
        trained = accuracies(runs)["prox-sps"].min()
        return (
            f"{ratio[worst]:.3f}, surely {np.exp(-sure.min()):.3f}, at lambda = {worst:g}: "
            f"{labelled(table.loc[worst])}; accuracy at least {trained:.1%}",
            sure.min() > 0 and trained > floor,
        )

    return check


# ResNet56


def both_work(floor: float = WORKS) -> Checked:
    """SPS and ProxSPS."""

    @states(
        "both-work",
        "Both SPS and ProxSPS work well.",
        "final validation accuracy of the worse of the two minus that of AdamW, every lambda, mean over runs",
        f"at least minus two points, {SURE}; accuracies of both above {floor:.0%}, of AdamW above {GUESSING:.0%}",
        needs=ALL,
        finite="val_error",
    )
    def check(frames: Frames) -> tuple[str, bool]:
        lead, text = lead_over(frames["runs"], list(POLYAK), "adamw")
        table = accuracies(frames["runs"])
        works = table[list(POLYAK)].min(axis=None) > floor and table["adamw"].min() > GUESSING
        return text, lead >= -LEVEL and works

    return check


def less_sensitive(floor: float = WORKS) -> Checked:
    """Accuracy over lambda."""

    @states(
        "less-sensitive",
        "SPS and ProxSPS are less sensitive to lambda than AdamW.",
        "largest minus least final validation accuracy over lambda, of AdamW minus the larger one of SPS and ProxSPS",
        f"at least one point, and above 0, {SURE}; all three above {floor:.0%} at their best lambda",
        needs=ALL,
        finite="val_error",
    )
    def check(frames: Frames) -> tuple[str, bool]:
        runs = frames["runs"]
        table, errors = accuracies(runs)[list(ALL)], by_seed(runs, "val_error").groupby("seed")
        spread, spreads = table.max() - table.min(), errors.max() - errors.min()
        more = spread["adamw"] - spread[list(POLYAK)].max()
        sure = least(spreads["adamw"] - spreads[list(POLYAK)].max(axis=1))
        return (
            f"{100 * more:+.1f} points, surely {100 * sure:+.1f}: {percent(spread)}",
            more >= APART and sure > 0 and table.max().min() > floor,
        )

    return check


def _gains(runs: pd.DataFrame, method: str) -> tuple[float, pd.Series]:
    """Mean accuracy after a quarter of the epochs, and what each seed gains from there to the end."""
    table = runs[runs["method"] == method].pivot_table(index="epoch", columns="seed", values="val_accuracy")
    quarter, last = len(table) // 4, last_tenth(runs)
    before = table.iloc[quarter : quarter + last].median()
    return float(before.mean()), table.iloc[-last:].median() - before


def stagnates(floor: float = WORKS) -> Checked:
    """ProxSPS at the largest strength, from a quarter of the epochs on."""

    @states(
        "stagnates",
        "At lambda = 5e-4 the progress of ProxSPS stagnates after roughly a quarter of the epochs.",
        "gain of validation accuracy after a quarter of the epochs, largest lambda, mean over runs",
        f"at most two points for ProxSPS, from above {floor:.0%}; more than two for SPS; more for SPS, {SURE}",
        needs=POLYAK,
    )
    def check(frames: Frames) -> tuple[str, bool]:
        largest = largest_strength(frames["runs"])
        require_finite(largest, "val_accuracy", POLYAK)
        (level, gain), (_, other) = (_gains(largest, method) for method in POLYAK)
        return (
            f"ProxSPS {100 * gain.mean():+.1f} points from {level:.1%}, SPS {100 * other.mean():+.1f} points",
            gain.mean() <= LEVEL < other.mean() and least(other - gain) > 0 and level > floor,
        )

    return check


@states(
    "zeta-below-alpha",
    "zeta_k decays over time until it is far below alpha_k, which biases the weights towards zero.",
    "zeta_k over alpha_k of ProxSPS at the end, and zeta_k at the end over its largest, medians of epochs, largest "
    "lambda",
    "both below 0.1",
    needs=("prox-sps",),
)
def capped_far_above(frames: Frames) -> tuple[str, bool]:
    """Why ProxSPS stagnates."""
    largest = largest_strength(frames["runs"])
    require_finite(largest, "zeta_median", ("prox-sps",))
    require_finite(largest, "val_accuracy", ("prox-sps",))
    mine = largest[largest["method"] == "prox-sps"]
    zeta = mine.groupby("epoch")["zeta_median"].median()
    ratio = zeta / mine.groupby("epoch")["alpha"].median()
    last = last_tenth(largest)
    end, fall = ratio.iloc[-last:].median(), zeta.iloc[-last:].median() / zeta.max()
    return f"{end:.2g} and {fall:.2g}", end < 0.1 and fall < 0.1


# The cap that follows zeta

FOLLOWED = "prox-sps-adaptive"


def relabelled(frames: Frames) -> Frames:
    """Runs with the adaptive cap under their own name, so that a figure distinguishes them."""
    return {
        name: frame.assign(method=frame["method"].where(frame["schedule"] != "adaptive", FOLLOWED))
        for name, frame in frames.items()
    }


def published_caps(frames: Frames) -> Frames:
    """The results without the runs of the adaptive cap."""
    return {name: frame[frame["schedule"] != "adaptive"] for name, frame in frames.items()}


def on_published_caps(claim: Checked) -> Checked:
    """A claim on methods as the paper ran them, if the results also have runs with the adaptive cap."""

    def check(frames: Frames) -> Claim:
        return claim(published_caps(frames))

    return check


@states(
    "adaptive-helps",
    "We should choose alpha_k roughly of the order of zeta_k, for example by its values from the previous epoch.",
    "final validation accuracy of ProxSPS, adaptive cap minus sqrt cap, mean over runs",
    f"at least one point, {SURE}; both above {CHANCE:.0%}",
    needs=("prox-sps",),
)
def adaptive_helps(frames: Frames) -> tuple[str, bool]:
    """Final accuracy with the cap that follows zeta."""
    runs, both = relabelled(frames)["runs"], ["prox-sps", FOLLOWED]
    require_methods(runs, both)
    require_finite(runs, "val_error", both)
    table, norms = accuracies(runs)[both].iloc[0], final(runs, "model_norm").iloc[0]
    errors = by_seed(runs, "val_error")
    gain = least(errors["prox-sps"] - errors[FOLLOWED])
    return (
        f"{100 * (table[FOLLOWED] - table['prox-sps']):+.1f} points, surely {100 * gain:+.1f} ({table[FOLLOWED]:.1%} "
        f"against {table['prox-sps']:.1%}; norm {norms[FOLLOWED]:.3g} against {norms['prox-sps']:.3g})",
        gain >= APART - 1e-12 and table.min() > CHANCE,
    )
