"""Accuracy against size: how much of a network can go, for several ways of making it smaller."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from proxsps.figures import style

COLUMNS = ("method", "accuracy", "size")
MARKERS = ("o", "s", "^", "D", "v", "P")


@style.styled
def accuracy_against_size(points: pd.DataFrame, x_label: str = "Share of parameters kept") -> Figure:
    """One line for each method through its points, the mean over seeds at each point; bars are standard deviations.

    Args:
        points: columns `method`, `accuracy` (0 to 1), `size` (0 to 1), and, where there are several seeds, `seed` and
            `point`, a different value for each point of one run.
        x_label: what `size` is.
    """
    missing = [name for name in COLUMNS if name not in points]
    if missing:
        raise ValueError(f"accuracy_against_size needs the columns {', '.join(COLUMNS)}; {', '.join(missing)} missing.")
    figure = style.new_figure(style.WIDTH, 4.3)
    axes = figure.subplots()
    axes.set(xscale="log", xlabel=x_label, ylabel="Validation accuracy")
    for marker, (name, rows) in zip(MARKERS * 9, points.groupby("method", sort=False), strict=False):
        key = "point" if "point" in rows else "size"
        mean = rows.groupby(key)[["size", "accuracy"]].mean().sort_values("size")
        spread = rows.groupby(key)["accuracy"].std(ddof=0).reindex(mean.index)
        axes.errorbar(mean["size"], mean["accuracy"], yerr=spread, marker=marker, capsize=2, label=str(name))
    style.log_ticks(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.legend()
    return figure
