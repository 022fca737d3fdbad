"""One picture of what the method is for: final values over the cap alpha_0, and over the strength lambda."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxsps.figures import frames, style


@style.styled
def overview(stability: pd.DataFrame, path: pd.DataFrame, *, last: int = 10, stacked: bool = False) -> Figure:
    """How much the result depends on alpha_0 (left: objective gap) and on lambda (right: validation error).

    Every point is the median over the last epochs, averaged over the runs.

    Args:
        stability: runs at one lambda with constant steps, over alpha_0; runs with other schedules are left out.
        path: runs over lambda; of each method, those with the largest alpha_0 are drawn.
        last: number of epochs that the median is taken over.
        stacked: one panel above the other, for narrow screens.
    """
    frames.require_runs(stability, "objective")
    frames.require_runs(path, "val_error")
    constant = frames.require(stability[stability["schedule"] == "constant"], (), "runs with constant steps")
    frames.require_one(constant, "weight_decay", "overview")
    longest = path[path["lr"] == path.groupby("method")["lr"].transform("max")]
    frames.require_one_schedule(longest, "overview")

    figure = style.new_figure(*((4.2, 6.9) if stacked else (style.WIDTH, 3.6)))
    left, right = figure.subplots(2, 1) if stacked else figure.subplots(1, 2)
    best = float(constant["objective"].min())
    gap = {name: values - best for name, values in _finals(constant, "objective", "lr", last)}
    _draw(left, gap)
    left.set(
        title=f"Objective gap, {style.lambda_title(constant['weight_decay'].iloc[0])}",
        xlabel=r"Cap on the step $\alpha_0$ (constant)",
    )
    _draw(right, dict(_finals(longest, "val_error", "weight_decay", last)))
    right.set(
        title=f"Validation error, {style.alpha_label(longest['lr'].max())}",
        xlabel=r"Regularisation parameter $\lambda$",
        xscale="log",
    )
    style.lambda_ticks(right, sorted(longest["weight_decay"].unique()))
    handles, labels = left.get_legend_handles_labels()
    if any(values.isna().any() for values in gap.values()):
        handles, labels = [*handles, style.cross_handle()], [*labels, "diverged"]
    place = {"loc": "outside upper center", "ncols": 2} if stacked else {"loc": "outside right center"}
    figure.legend(handles, labels, **place)
    return figure


def _finals(runs: pd.DataFrame, metric: str, over: str, last: int) -> list[tuple[str, pd.Series]]:
    """(method, final value by a column) in the order of the table; NaN where a run diverged."""
    epochs = int(runs["epoch"].max())
    found = []
    for name in style.in_order(runs["method"]):
        groups = runs[runs["method"] == name].groupby(over)
        values = {x: frames.final_median(rows, metric, last, epochs).mean(skipna=False) for x, rows in groups}
        found.append((name, pd.Series(values, dtype=float).sort_index()))
    return found


def _draw(axes: Axes, lines: dict[str, pd.Series]) -> None:
    for name, values in lines.items():
        look = style.marked(name, style.method(name).colour, len(values)) | {"markevery": None, "markersize": 7}
        axes.plot(values.index, values, label=style.method(name).label, **look)
    axes.set_yscale("log")
    style.log_ticks(axes)
    for name, values in lines.items():
        for x in values.index[np.isnan(values)]:
            style.cross(axes, x, axes.get_ylim()[1], style.method(name).colour)
