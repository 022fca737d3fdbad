"""The metric at the end of training over lr: one panel per task, one line per method."""

from __future__ import annotations

import math
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from proxsps.figures import frames, style

COLUMNS = ("task", "title", "metric", "method", "lr", "seed", "ending", "value")
LEGEND_COLUMNS = 4  # with the longest names of methods
TITLE_WIDTH = 36  # letters of a line
FLAT: dict[str, Any] = {"lw": 1.6, "ls": (0, (5, 2))}  # a line for lr not set
ROOM = 0.35  # of the range of good values, beyond which a panel is cut off


@style.styled
def over_lr(trials: pd.DataFrame) -> Figure:
    """Mean over seeds of the metric over lr, with the range of the seeds; lr not set as a horizontal line."""
    frames.require(trials, COLUMNS, "trials")
    rows = trials[trials["ending"] == "none"]
    widely = rows.groupby("task", sort=False)["lr"].nunique()
    tasks = list(widely[widely > 2].index)  # the others have no grid
    columns = min(3, len(tasks))
    lines = math.ceil(len(tasks) / columns)
    figure = style.new_figure(style.WIDTH, 2.9 * lines + 0.7)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, task in zip(panels, tasks, strict=False):
        _panel(axes, rows[rows["task"] == task])
    for axes in panels[len(tasks) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(tasks) - columns) : len(tasks)]:
        axes.set_xlabel("lr")
    methods = style.in_order(rows["method"])
    unset = rows["lr"].isna().groupby(rows["method"]).all()
    handles = [[_handle(name, bool(unset[name]))] for name in methods]
    if not np.isfinite(rows["value"]).all():
        handles.append([style.cross_handle()])
    entries = [handle for column in handles for handle in column]
    figure.legend(handles=entries, loc="outside lower center", ncols=min(LEGEND_COLUMNS, len(entries)))
    return figure


def _handle(name: str, flat: bool) -> Line2D:
    look = style.method(name)
    if flat:
        return Line2D([], [], color=look.colour, label=f"{look.label} (no lr)", **FLAT)
    return Line2D([], [], color=look.colour, marker=look.marker, markersize=6, label=look.label)


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    metric = rows["metric"].iloc[0]
    title = fill(rows["title"].iloc[0], TITLE_WIDTH)
    axes.set(title=title, xscale="log", yscale="linear" if metric == "accuracy" else "log")
    axes.title.set_fontsize(9.8)
    low, high = _limits(rows, metric)
    axes.set_ylim(low, high)
    worst = low if metric == "accuracy" else high
    for name in style.in_order(rows["method"]):
        own = rows[rows["method"] == name]
        _line(axes, name, own[own["lr"].notna()], worst)
        unset = own[own["lr"].isna()]["value"]
        if len(unset) and unset.notna().all():
            axes.axhline(unset.mean(), color=style.method(name).colour, zorder=2, **FLAT)
    axes.xaxis.set_major_locator(LogLocator(numticks=5))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.tick_text(value)))
    style.log_ticks(axes)


def _line(axes: Axes, name: str, rows: pd.DataFrame, worst: float) -> None:
    """Means with ranges; a setting with a run that diverged is a cross on the bad edge of the panel."""
    groups = rows.groupby("lr")["value"]
    table = pd.DataFrame(
        {"mean": groups.agg(lambda v: v.mean(skipna=False)), "low": groups.min(), "high": groups.max()}
    )
    colour = style.method(name).colour
    axes.plot(table.index, table["mean"], **{**style.marked(name, colour, 1), "markevery": 1})
    axes.fill_between(table.index, table["low"], table["high"], color=colour, alpha=0.14, linewidth=0)
    for lr in table.index[table["mean"].isna()]:
        style.cross(axes, lr, worst, colour)


def _limits(rows: pd.DataFrame, metric: str) -> tuple[float, float]:
    """Limits that show what each method does at its best lr, and some room towards worse values."""
    means = rows.groupby(["method", "lr"], dropna=False)["value"].mean()
    means = means[np.isfinite(means)]
    best = means.groupby("method").max() if metric == "accuracy" else means.groupby("method").min()
    if metric == "accuracy":
        low, high = float(best.min()), float(best.max())
        return max(0.0, low - 3 * ROOM * max(high - low, 0.1)), min(1.0, high + ROOM * max(high - low, 0.05))
    low, high = math.log10(max(float(best.min()), 1e-9)), math.log10(max(float(best.max()), 1e-9))
    reach = max(high - low, 0.15)
    return 10 ** (low - 0.3 * ROOM * reach), 10 ** (high + 4 * ROOM * reach)
