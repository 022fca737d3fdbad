"""The tables of the experiment: one row per task and method, and one row per task for the documentation."""

from __future__ import annotations

import pandas as pd

from proxsps.experiments.base import Frames
from proxsps.experiments.no_lr.claims import best_of, good_range, losses, plain, shown
from proxsps.experiments.no_lr.methods import ADAM, ADAM_L2, DEFAULTS, IDENTITY, RIVALS
from proxsps.experiments.sentences import label

SIDE_BY_SIDE = ("sgd-momentum", IDENTITY, "adamw", ADAM, ADAM_L2, "schedule-free", "prodigy", "prox-sps")


def no_lr_table(frames: Frames) -> pd.DataFrame:
    """One row per task and method: best lr, its value, the width of the good range, and the value with lr not set."""
    table = losses(plain(frames["trials"]))
    lines = []
    for (task, method), rows in table.groupby(["task", "method"], sort=False):
        metric = str(rows["metric"].iloc[0])
        tuned = rows[rows["lr"].notna()]
        best = best_of(tuned) if len(tuned) else None
        default = rows[rows["lr"] == DEFAULTS[method] if method in DEFAULTS else rows["lr"].isna()]
        lines.append(
            {
                "task": task,
                "method": label(str(method)),
                "best": "" if best is None else shown(metric, float(best["loss"])),
                "at lr": "" if best is None else f"{best['lr']:g}",
                "good range, decades": "" if best is None else f"{good_range(tuned):.1f}",
                "lr not set": shown(metric, float(default["loss"].iloc[0])),
                **({} if method not in RIVALS else _endings(frames["trials"], str(task), str(method), metric)),
            }
        )
    return pd.DataFrame(lines).fillna("")


def _endings(trials: pd.DataFrame, task: str, method: str, metric: str) -> dict[str, str]:
    own = trials[(trials["task"] == task) & (trials["method"] == method)]
    found = {}
    for ending in ("cool-down", "average"):
        rows = own[own["ending"] == ending]
        found[ending] = shown(metric, float(losses(rows)["loss"].iloc[0])) if len(rows) else ""
    return found


def endings_table(frames: Frames) -> pd.DataFrame:
    """One row per method and lr, and one column per ending."""
    trials = frames["trials"]
    tables = {ending: losses(rows) for ending, rows in trials.groupby("ending", sort=False)}
    settings = next(iter(tables.values()))[["method", "lr"]]
    lines = {"method": settings["method"].map(label), "lr": settings["lr"].map("{:g}".format).replace("nan", "not set")}
    cells = {ending: [shown("loss", loss) for loss in table["loss"]] for ending, table in tables.items()}
    return pd.DataFrame({**lines, **cells})


def task_table(frames: Frames) -> pd.DataFrame:
    """One row per task. Ours without lr; others at their best lr, with the decades of lr that are level with it."""
    table = losses(plain(frames["trials"]))
    lines = []
    for task, rows in table.groupby("task", sort=False):
        line = {"task": str(task)}
        for method in SIDE_BY_SIDE:
            own = rows[rows["method"] == method]
            line[label(str(method))] = _cell(own, method) if len(own) else ""
        lines.append(line)
    return pd.DataFrame(lines)


def _cell(rows: pd.DataFrame, method: str) -> str:
    metric = str(rows["metric"].iloc[0])
    if method not in DEFAULTS:
        unset = rows[rows["lr"].isna()]
        return shown(metric, float(unset["loss"].iloc[0])) if len(unset) else ""
    best = best_of(rows)
    return f"{shown(metric, float(best['loss']))} at {best['lr']:g} ({good_range(rows):.1f})"
