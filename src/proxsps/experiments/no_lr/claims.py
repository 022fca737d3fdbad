"""Statements about training without a learning rate, checked by numbers.

"Level with" means: at most 1.5 points of accuracy below, at most 1 % of the loss above, or at most 1 % of the smallest
objective above. Values are means over seeds; a setting with a run that diverged has none. A task counts only if the
lr matters: if our result is not far from the worst one of the baseline, divergence aside, nothing was learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pandas as pd

from proxsps.experiments.base import Claim, Frames
from proxsps.experiments.no_lr.methods import ADAM, DEFAULTS, FREE, IDENTITY, RIVALS, SPECTRAL
from proxsps.experiments.no_lr.text import LETTERS
from proxsps.experiments.sentences import label

TASK_NAMES = (
    "digits",
    "digits-1e-4",
    "digits-1e-3",
    "matrix",
    "l1",
    "fine-tuning",
    "transformer",
    "resnet",
    "resnet-bn",
)
NETWORKS = ("digits", "fine-tuning", "transformer", "resnet", "resnet-bn", "gru", "gpt")
BASELINES = ("sgd-momentum", "adamw", "schedule-free", "muon", "prodigy", "schedule-free-plus")
COSINE = "adamw, cosine"  # AdamW with warm-up and cosine
POINTS, PERCENT = 0.015, 0.01
FAR = 10  # times what counts as level
FAR_OF_FEW = 2  # the same where the grid has only lr that are of use
SHORT = {FREE: "free", SPECTRAL: "spectral"}
GUESSING = math.log(len(LETTERS))  # the loss of a network that gives all letters the same probability
LARGE = {IDENTITY: 10.0, ADAM: 0.1}  # from here on lr should not matter


def plain(trials: pd.DataFrame) -> pd.DataFrame:
    """The trials over the whole grid of lr, without a cool-down or an average at the end."""
    return trials[(trials["ending"] == "none") & trials["task"].isin(TASK_NAMES)]


def scheduled(trials: pd.DataFrame) -> pd.DataFrame:
    """The trials with a constant lr, and those with warm-up and cosine as methods of their own, ", cosine" added."""
    kept = trials[trials["ending"].isin(["none", "cosine"])]
    return kept.assign(method=kept["method"].where(kept["ending"] == "none", kept["method"] + ", cosine"))


def losses(trials: pd.DataFrame) -> pd.DataFrame:
    """Mean and spread over seeds of each setting, as something to be made small: an accuracy counts as its negative.

    Columns task, method, lr (NaN: not set), metric, loss, spread; the loss is infinite where a run diverged.
    """
    signed = trials.assign(loss=trials["value"].where(trials["metric"] != "accuracy", -trials["value"]))
    signed["loss"] = signed["loss"].fillna(math.inf)
    groups = signed.groupby(["task", "method", "lr", "metric"], dropna=False, sort=False)["loss"]
    rows = groups.agg(loss="mean", low="min", high="max").reset_index()
    spread = (rows["high"] - rows["low"]).where(rows["high"] < math.inf, 0.0)
    return rows.assign(spread=spread).drop(columns=["low", "high"])


def allowance(metric: str, loss: float) -> float:
    """How much more than `loss` counts as level with it."""
    return {"accuracy": POINTS, "gap": PERCENT}.get(metric, PERCENT * abs(loss))


def shown(metric: str, loss: float) -> str:
    """A loss, shown as its metric."""
    if not math.isfinite(loss):
        return "diverged"
    return f"{-loss:.1%}" if metric == "accuracy" else f"{loss:.4g}"


def best_of(rows: pd.DataFrame) -> pd.Series:
    """The row with the smallest loss."""
    return rows.loc[rows["loss"].idxmin()]


def _without_lr(rows: pd.DataFrame, method: str) -> pd.Series:
    return rows[(rows["method"] == method) & rows["lr"].isna()].iloc[0]


def _is_decisive(rows: pd.DataFrame, method: str) -> bool:
    """Whether a method without lr is far better than the worst lr of its rival that does not diverge, on one task."""
    ours, theirs = _without_lr(rows, method), rows.loc[rows["method"] == RIVALS[method], "loss"]
    worst = float(theirs[theirs.map(math.isfinite)].max())
    return bool(ours["loss"] + FAR * allowance(str(ours["metric"]), float(ours["loss"])) < worst)


def level_with_tuned(task: str, method: str, frames: Frames) -> Claim | None:
    """A method without lr against the best lr of the baseline of its family, on one task."""
    table = losses(plain(frames["trials"]))
    rows = table[table["task"] == task]
    if rows.empty:
        return None  # its data is missing
    ours, theirs = _without_lr(rows, method), best_of(rows[rows["method"] == RIVALS[method]])
    metric = str(ours["metric"])
    limit = theirs["loss"] + allowance(metric, theirs["loss"])
    rule = {"accuracy": "at most 1.5 points below", "gap": "at most 0.01 above"}.get(metric, "at most 1 % above")
    return Claim(
        f"level-{'identity' if method == IDENTITY else 'adam'}-{task}",
        f"{task}: {label(method)}, without lr, is level with {label(RIVALS[method])} at its best lr.",
        "metric at the end of training, mean over seeds, lr not set",
        f"{rule} {label(RIVALS[method])} at the best lr of its grid, and far from its worst",
        f"{shown(metric, ours['loss'])}; {label(RIVALS[method])} {shown(metric, theirs['loss'])} at lr "
        f"{theirs['lr']:g}",
        bool(ours["loss"] <= limit) and _is_decisive(rows, method),
    )


def _against_all(rows: pd.DataFrame, method: str) -> tuple[pd.Series, pd.Series]:
    """Our row on a task, and that of the best baseline: any family at its best constant lr, or AdamW with a cosine."""
    return _without_lr(rows, method), best_of(rows[rows["method"].isin([*BASELINES, COSINE])])


def level_with_all(task: str, method: str, frames: Frames) -> Claim | None:
    """A schedule-free method without lr against the best of all baselines, on one network."""
    table = losses(scheduled(frames["trials"]))
    rows = table[table["task"] == task]
    if rows.empty:
        return None
    ours, theirs = _against_all(rows, method)
    metric = str(ours["metric"])
    worst = float(rows.loc[(rows["method"] == "adamw") & rows["loss"].map(math.isfinite), "loss"].max())
    decisive = ours["loss"] + FAR_OF_FEW * allowance(metric, float(ours["loss"])) < worst
    name, _, cosine = str(theirs["method"]).partition(", ")
    return Claim(
        f"all-{SHORT[method]}-{task}",
        f"{task}: {label(method)}, without lr and schedule, is level with every baseline at its best constant lr, and "
        "with AdamW with warm-up and the best cosine.",
        "metric at the end of training, mean over seeds",
        "at most 1.5 points or 1 % worse than the best of all of them, and better than AdamW at its worst lr",
        f"{shown(metric, ours['loss'])}; best: {label(name)}{', cosine,' if cosine else ''} "
        f"{shown(metric, theirs['loss'])} at lr {theirs['lr']:g}",
        bool(ours["loss"] <= theirs["loss"] + allowance(metric, theirs["loss"]) and decisive),
    )


def better_on_half(method: str, frames: Frames) -> Claim | None:
    """On how many networks a schedule-free method is better than the best of all baselines."""
    table = losses(scheduled(frames["trials"]))
    pairs = {
        str(task): _against_all(rows, method) for task, rows in table.groupby("task", sort=False) if task in NETWORKS
    }
    better = [task for task, (ours, theirs) in pairs.items() if ours["loss"] < theirs["loss"]]
    return Claim(
        f"half-{SHORT[method]}",
        f"{label(method)}, without lr and schedule, is better than all of these baselines on half of the networks.",
        "mean metric at the end of training, against the best of all baselines, each at its best lr",
        "better on at least half of the networks",
        f"on {len(better)} of {len(pairs)}: {', '.join(better) or 'none'}",
        2 * len(better) >= len(pairs),
    )


def same_for_large_lr(method: str, frames: Frames) -> Claim:
    """Nothing depends on lr from some size on, up to 1e6, on any task that was learned."""
    table = losses(plain(frames["trials"]))
    groups = dict(list(table.groupby("task", sort=False)))
    learned = {task: group for task, group in groups.items() if _is_decisive(group, method)}
    worst, where = 0.0, "none"
    for task, group in learned.items():
        large = group[(group["method"] == method) & ~(group["lr"] < LARGE[method])]
        # Rounding may change a last digit, and one seed has no range: a thousandth of the value is no dependence.
        noise = max(float(large["spread"].max()), 1e-3 * abs(float(large["loss"].median())), 1e-12)
        low, high = large["loss"].min(), large["loss"].max()
        ratio = (high - low) / noise if math.isfinite(high) else math.inf
        if ratio >= worst:
            worst, where = ratio, str(task)
    return Claim(
        f"same-for-large-lr-{'identity' if method == IDENTITY else 'adam'}",
        f"{label(method)}: from lr = {LARGE[method]:g} to 1e6, and without lr, the result is the same.",
        "difference of the largest and the smallest mean over these lr, over the range of seeds; largest of all tasks",
        f"at most 1 on the tasks that it learns (far better than {label(RIVALS[method])} at its worst lr), most of all",
        f"{worst:.2g} on {where}; {len(learned)} of {len(groups)} tasks",
        bool(worst <= 1) and len(learned) > len(groups) / 2,
    )


def good_range(rows: pd.DataFrame, least: float = math.inf) -> float:
    """Decades of lr around the best one of a method on a task that are level with it, or with a loss of `least`."""
    rows = rows[rows["lr"].notna()].sort_values("lr")
    if rows.empty or not rows["loss"].map(math.isfinite).any():
        return 0.0
    best = best_of(rows)
    least = min(least, float(best["loss"]))
    good = (rows["loss"] <= least + allowance(str(best["metric"]), least)).tolist()
    first = last = rows.index.get_loc(best.name)
    if not good[first]:
        return 0.0
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(good) and good[last + 1]:
        last += 1
    lrs = rows["lr"].tolist()
    return math.log10(lrs[last] / lrs[first])


def wider_range(method: str, frames: Frames) -> Claim:
    """The range of good lr, against the baseline of the same family, on every task."""
    table = losses(plain(frames["trials"]))
    both = table[table["method"].isin([method, RIVALS[method]])]
    least = both.groupby("task")["loss"].min()
    groups = both.groupby(["task", "method"])
    widths = {(task, name): good_range(rows, least[task]) for (task, name), rows in groups}
    tasks = list(dict.fromkeys(table["task"]))
    decisive = all(_is_decisive(rows, method) for _, rows in table.groupby("task"))
    ours, theirs = ([widths[task, name] for task in tasks] for name in (method, RIVALS[method]))
    wider = sum(own >= other + 2 for own, other in zip(ours, theirs, strict=True))
    return Claim(
        f"wider-{'identity' if method == IDENTITY else 'adam'}",
        f"{label(method)} has a wider range of good lr than {label(RIVALS[method])}.",
        "decades of lr around a method's best one that are level with the best of both methods",
        "at least two decades more on every task, and the lr matters",
        f"on {wider} of {len(tasks)} tasks; {min(ours):.1f} to {max(ours):.1f} decades against {min(theirs):.1f} to "
        f"{max(theirs):.1f}",
        wider == len(tasks) and decisive,
    )


def better_than_prodigy(frames: Frames) -> Claim:
    """Two optimizers that need no lr, in the same metric."""
    table = losses(plain(frames["trials"]))
    counts = {"better": 0, "level": 0, "worse": 0}
    for _, rows in table.groupby("task", sort=False):
        ours = _without_lr(rows, ADAM)
        theirs = rows[(rows["method"] == "prodigy") & (rows["lr"] == DEFAULTS["prodigy"])].iloc[0]
        few = allowance(str(ours["metric"]), float(theirs["loss"]))
        # Two runs that diverge are equally bad.
        apart = 0.0 if ours["loss"] == theirs["loss"] else float(ours["loss"] - theirs["loss"])
        counts["better" if apart < -few else "worse" if apart > few else "level"] += 1
    return Claim(
        "better-than-prodigy",
        f"{label(ADAM)}, without lr, is better than Prodigy, which needs no lr either.",
        "metric at the end of training, Prodigy at its default lr of 1",
        "better on more than half of the tasks",
        ", ".join(f"{kind} on {count}" for kind, count in counts.items()),
        counts["better"] > sum(counts.values()) / 2,
    )


def level_over_long_run(ending: str, frames: Frames) -> Claim:
    """Our method in Adam's metric against AdamW over 10,000 steps, one seed, with the same ending."""
    trials = frames["trials"]
    rows = losses(trials[trials["ending"] == ending])
    ours, theirs = _without_lr(rows, ADAM), best_of(rows[rows["method"] == "adamw"])
    return Claim(
        f"long-run-{ending}",
        f"Over 10,000 steps of the transformer {label(ADAM)}, without lr, is level with AdamW (ending: {ending}).",
        "validation loss, one seed, lr not set",
        f"at most 1 % above AdamW at its best lr, and below half the loss of guessing, {GUESSING:.3g}",
        f"{ours['loss']:.4g}; AdamW {theirs['loss']:.4g} at lr {theirs['lr']:g}",
        bool(ours["loss"] <= theirs["loss"] + allowance("loss", theirs["loss"]) and ours["loss"] < GUESSING / 2),
    )


def free_over_long_run(method: str, frames: Frames) -> Claim:
    """A schedule-free method over 10,000 steps against constant lr, and AdamW with a cosine."""
    trials = frames["trials"]
    rows = losses(scheduled(trials))
    ours, theirs = _against_all(rows, method)
    ended = losses(trials[trials["method"].isin(BASELINES)].assign(method=lambda t: t["method"] + ", " + t["ending"]))
    best = best_of(ended)
    limit = theirs["loss"] + allowance("loss", theirs["loss"])
    return Claim(
        f"long-run-{SHORT[method]}",
        f"Over 10,000 steps of the transformer {label(method)}, without lr and schedule, is level with the others.",
        "validation loss, one seed",
        "at most 1 % above baselines with a constant lr and AdamW with a cosine, and below half the loss of guessing",
        f"{ours['loss']:.4g}; best of these {theirs['loss']:.4g} ({theirs['method']}); with any ending "
        f"{best['loss']:.4g} ({best['method']})",
        bool(ours["loss"] <= limit and ours["loss"] < GUESSING / 2),
    )


CLAIMS: tuple[Callable[[Frames], Claim | None], ...] = (
    *(partial(level_with_all, task, method) for method in SHORT for task in NETWORKS),
    *(partial(better_on_half, method) for method in SHORT),
    *(partial(level_with_tuned, task, method) for method in RIVALS for task in TASK_NAMES),
    *(partial(same_for_large_lr, method) for method in RIVALS),
    *(partial(wider_range, method) for method in RIVALS),
    better_than_prodigy,
)
