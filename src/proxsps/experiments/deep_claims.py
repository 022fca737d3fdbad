"""Sentences of the paper on residual networks for CIFAR-10, and the numbers that check them.

A network at chance level has not been trained: sentences on how well methods work, or how they compare, do not hold
for it, however equal the methods are. `imagenet_claims` has the sentences on ImageNet32.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from proxsps.experiments.base import Claim, Frames, last_medians
from proxsps.experiments.sentences import (
    POLYAK,
    SURE,
    Found,
    epochs,
    label,
    labelled,
    lower_bound,
    lower_bounds,
    require_finite,
    states,
)

ALL = (*POLYAK, "adamw")
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
    """A 95 % lower bound of the lead of the worst of our methods over another one, at every lambda, and a text."""
    errors, table = by_seed(runs, "val_error"), accuracies(runs)
    lead = lower_bounds(errors[other] - errors[ours].max(axis=1))
    worst = lead.idxmin()
    mean = (table[ours].min(axis=1) - table[other])[worst]
    return float(lead.min()), (
        f"minimum {100 * mean:+.1f} points, 95 % lower bound {100 * lead.min():+.1f}, at lambda = {worst:g}: "
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
        f"first epoch with a validation accuracy above {CHANCE:.0%}, largest lambda, every run",
        f"ProxSPS gets there within {f'{sps_after} epochs' if sps_after else 'all epochs'}, SPS does not",
        name="leaves-chance",
        needs=POLYAK,
        gist="SPS does not make progress for a long time; ProxSPS does not share this issue and performs well after a "
        "few initial epochs.",
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
    f"zeta_k, median over epochs, largest lambda: of SPS at an accuracy of at most {CHANCE:.0%}, of ProxSPS above",
    "below 1e-4 for SPS, above for ProxSPS; SPS has such low accuracies in at least twice as many epochs",
    needs=POLYAK,
    gist="SPS makes no progress for a long time because its adaptive step size is very small; ProxSPS does not share "
    "this issue.",
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
    "first epoch with a validation accuracy above nine tenths of AdamW's final one, but not below "
    f"{CHANCE:.0%}; every lambda but the smallest, if there are several; mean over runs",
    f"for ProxSPS after at most two thirds of AdamW's epochs, {SURE}; final accuracy of AdamW above {GUESSING:.0%}",
    needs=("prox-sps", "adamw"),
)
def faster_than_adamw(frames: Frames) -> tuple[str, bool]:
    """For larger lambda the training is considerably faster than for AdamW."""
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
        sure = lower_bound(FASTER * within["adamw"] - within["prox-sps"]) >= 0
        verdicts.append(first["prox-sps"].max() < float("inf") and sure and theirs > GUESSING)
        mean = first.groupby("method").mean()
        texts.append(
            f"lambda = {lam:g}, above {level:.1%}: ProxSPS {epochs(mean[['prox-sps']])}, AdamW "
            f"{epochs(mean[['adamw']])} ({theirs:.1%} at the end)"
        )
    return "; ".join(texts), all(verdicts)


# Both networks


@states(
    "final validation accuracy of ProxSPS minus that of AdamW, every lambda, mean over runs",
    f"at least minus two points, {SURE}; accuracies of ProxSPS above {{floor:.0%}}, of AdamW above {GUESSING:.0%}",
    needs=("prox-sps", "adamw"),
    finite="val_error",
)
def competitive(frames: Frames, floor: float = WORKS) -> tuple[str, bool]:
    """ProxSPS performs well in comparison to AdamW, without extensive tuning."""
    lead, text = lead_over(frames["runs"], ["prox-sps"], "adamw")
    table = accuracies(frames["runs"])
    return text, lead >= -LEVEL and table["prox-sps"].min() > floor and table["adamw"].min() > GUESSING


# ResNet56


@states(
    "final validation accuracy of the worse of the two minus that of AdamW, every lambda, mean over runs",
    f"at least minus two points, {SURE}; accuracies of both above {{floor:.0%}}, of AdamW above {GUESSING:.0%}",
    needs=ALL,
    finite="val_error",
)
def both_work(frames: Frames, floor: float = WORKS) -> tuple[str, bool]:
    """Both SPS and ProxSPS work well."""
    lead, text = lead_over(frames["runs"], list(POLYAK), "adamw")
    table = accuracies(frames["runs"])
    works = table[list(POLYAK)].min(axis=None) > floor and table["adamw"].min() > GUESSING
    return text, lead >= -LEVEL and works


@states(
    "final validation accuracy of SPS (c = 1) at its best lambda minus that of AdamW at its best lambda",
    f"above 0, {SURE}; above {WORKS:.0%}, and that of AdamW above {GUESSING:.0%}",
    needs=("sps", "adamw"),
    finite="val_error",
)
def good_with_c_1(frames: Frames) -> tuple[str, bool]:
    """Setting c = 1 in SPS_max leads to good results, without extensive tuning."""
    errors, table = by_seed(frames["runs"], "val_error"), accuracies(frames["runs"])
    best = {method: table[method].idxmax() for method in ("sps", "adamw")}
    lead = lower_bound(errors["adamw"][best["adamw"]] - errors["sps"][best["sps"]])
    ours, theirs = (table[method].max() for method in best)
    return (
        f"{100 * (ours - theirs):+.1f} points, 95 % lower bound {100 * lead:+.1f}: SPS {ours:.1%} at lambda = "
        f"{best['sps']:g}, AdamW {theirs:.1%} at lambda = {best['adamw']:g}",
        lead > 0 and ours > WORKS and theirs > GUESSING,
    )


def less_sensitive(floor: float = WORKS, ours: tuple[str, ...] = POLYAK) -> Checked:
    """Accuracy over lambda."""
    names = " and ".join(label(method) for method in reversed(ours))

    @states(
        f"largest minus smallest final validation accuracy over lambda, of AdamW minus that of {names}",
        f"at least one point, and above 0, {SURE}; all above {floor:.0%} at their best lambda. In part: without the "
        "smallest lambda",
        name="less-sensitive",
        needs=(*ours, "adamw"),
        finite="val_error",
        gist=f"{names} {'are' if len(ours) > 1 else 'is'} less sensitive to lambda than AdamW.",
    )
    def check(frames: Frames) -> Found:
        runs = frames["runs"]
        text, holds = _spread(runs, ours, floor)
        smallest = runs["weight_decay"].min()
        rest, without = _spread(runs[runs["weight_decay"] > smallest], ours, floor)
        return Found(text, holds, f"without lambda = {smallest:g}: {rest}" if without else "")

    return check


def _spread(runs: pd.DataFrame, ours: tuple[str, ...], floor: float) -> tuple[str, bool]:
    """By how much the accuracy of AdamW differs more over lambda than that of our methods, and whether it counts."""
    table, errors = accuracies(runs)[[*ours, "adamw"]], by_seed(runs, "val_error").groupby("seed")
    spread, spreads = table.max() - table.min(), errors.max() - errors.min()
    more = spread["adamw"] - spread[list(ours)].max()
    bound = lower_bound(spreads["adamw"] - spreads[list(ours)].max(axis=1))
    return (
        f"{100 * more:+.1f} points, 95 % lower bound {100 * bound:+.1f}: {percent(spread)}",
        more >= APART and bound > 0 and table.max().min() > floor,
    )


def _gains(runs: pd.DataFrame, method: str) -> tuple[float, pd.Series]:
    """Mean accuracy after a quarter of the epochs, and what each seed gains from there to the end."""
    table = runs[runs["method"] == method].pivot_table(index="epoch", columns="seed", values="val_accuracy")
    quarter, last = len(table) // 4, last_tenth(runs)
    before = table.iloc[quarter : quarter + last].median()
    return float(before.mean()), table.iloc[-last:].median() - before


@states(
    "gain of validation accuracy after a quarter of the epochs, largest lambda, mean over runs",
    f"at most two points for ProxSPS, from above {{floor:.0%}}; more than two for SPS; more for SPS, {SURE}",
    needs=POLYAK,
)
def stagnates(frames: Frames, floor: float = WORKS) -> tuple[str, bool]:
    """At lambda = 5e-4 the progress of ProxSPS stagnates after roughly a quarter of the epochs."""
    largest = largest_strength(frames["runs"])
    require_finite(largest, "val_accuracy", POLYAK)
    (level, gain), (_, other) = (_gains(largest, method) for method in POLYAK)
    return (
        f"ProxSPS {100 * gain.mean():+.1f} points from {level:.1%}, SPS {100 * other.mean():+.1f} points",
        gain.mean() <= LEVEL < other.mean() and lower_bound(other - gain) > 0 and level > floor,
    )


@states(
    "zeta_k over alpha_k of ProxSPS at the end, and zeta_k at the end over its largest, medians of epochs, largest "
    "lambda",
    "both below 0.1",
    needs=("prox-sps",),
)
def zeta_below_alpha(frames: Frames) -> tuple[str, bool]:
    """zeta_k decays over time until it is far below alpha_k, which biases the weights towards zero."""
    largest = largest_strength(frames["runs"])
    require_finite(largest, "zeta_median", ("prox-sps",))
    require_finite(largest, "val_accuracy", ("prox-sps",))
    mine = largest[largest["method"] == "prox-sps"]
    zeta = mine.groupby("epoch")["zeta_median"].median()
    ratio = zeta / mine.groupby("epoch")["alpha"].median()
    last = last_tenth(largest)
    end, fall = ratio.iloc[-last:].median(), zeta.iloc[-last:].median() / zeta.max()
    return f"{end:.2g} and {fall:.2g}", end < 0.1 and fall < 0.1
