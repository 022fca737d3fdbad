"""The tables of the experiment: one row per task and method, and one row per task for the documentation."""

from __future__ import annotations

import math

import pandas as pd

from proxsps.experiments.base import Frames
from proxsps.experiments.no_lr.claims import best_of, good_range, losses, scheduled, shown
from proxsps.experiments.no_lr.methods import DEFAULTS, METHODS, RIVALS
from proxsps.experiments.sentences import label


def _label(method: str) -> str:
    """The name of a method, with its schedule."""
    name, _, schedule = method.partition(", ")
    return f"{label(name)}, {schedule}" if schedule else label(name)


def no_lr_table(frames: Frames) -> pd.DataFrame:
    """One row per task and method: best lr, its value, the width of the good range, and the value with lr not set."""
    table = losses(scheduled(frames["trials"]))
    lines = []
    for (task, method), rows in table.groupby(["task", "method"], sort=False):
        metric = str(rows["metric"].iloc[0])
        tuned = rows[rows["lr"].notna()]
        best = best_of(tuned) if len(tuned) else None
        default = rows[rows["lr"] == DEFAULTS[method] if method in DEFAULTS else rows["lr"].isna()]
        lines.append(
            {
                "task": task,
                "method": _label(str(method)),
                "best": "" if best is None else shown(metric, float(best["loss"])),
                "at lr": "" if best is None else f"{best['lr']:g}",
                "good range, decades": "" if best is None else f"{good_range(tuned):.1f}",
                "lr not set": shown(metric, float(default["loss"].iloc[0])) if len(default) else "",
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
    """One row per method and lr, and one column per ending; empty where there was no such run."""
    trials = frames["trials"]
    tables = {ending: losses(rows) for ending, rows in trials.groupby("ending", sort=False)}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for ending, table in tables.items():
        for row in table.itertuples():
            lr = "not set" if math.isnan(row.lr) else f"{row.lr:g}"
            lines.setdefault((label(row.method), lr), {})[str(ending)] = shown("loss", row.loss)
    return pd.DataFrame([{"method": name, "lr": lr, **cells} for (name, lr), cells in lines.items()]).fillna("")


def task_table(frames: Frames) -> pd.DataFrame:
    """One row per task. Ours without lr; others at their best lr, with the decades of lr that are level with it."""
    table = losses(scheduled(frames["trials"]))
    columns = sorted(set(table["method"]), key=lambda method: (list(METHODS).index(method.partition(", ")[0]), method))
    lines = []
    for task, rows in table.groupby("task", sort=False):
        own = {method: rows[rows["method"] == method] for method in columns}
        lines.append({"task": str(task)} | {_label(method): _cell(found) for method, found in own.items()})
    return pd.DataFrame(lines)


def _cell(rows: pd.DataFrame) -> str:
    if rows.empty:
        return ""
    metric, unset = str(rows["metric"].iloc[0]), rows[rows["lr"].isna()]
    if len(unset):
        return shown(metric, float(unset["loss"].iloc[0]))
    best = best_of(rows)
    spread = f" ({good_range(rows):.1f})" if len(rows) > 1 else ""
    return f"{shown(metric, float(best['loss']))} at {best['lr']:g}{spread}"
