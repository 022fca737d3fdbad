"""Accuracy against size: how much of a network can be removed, for several ways of making it smaller."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from proxsps.figures import style

COLUMNS = ("method", "accuracy", "size")
# Colours of Okabe and Ito, as in the other figures, each with its own marker.
LOOKS = (
    ("#4d5560", "*"),
    ("#56B4E9", "X"),
    ("#0072B2", "o"),
    ("#009E73", "s"),
    ("#D55E00", "^"),
    ("#E69F00", "D"),
    ("#CC79A7", "v"),
)
SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # ticks


@style.styled
def accuracy_against_size(
    points: pd.DataFrame, x_label: str = "Share of parameters kept", y_label: str = "Validation accuracy"
) -> Figure:
    """One line for each method through its points, the mean over seeds at each point; bars are standard deviations.

    Args:
        points: columns `method`, `accuracy` (0 to 1), `size` (0 to 1), and, where there are several seeds, `seed` and
            `point`, a different value for each point of one run.
        x_label: what `size` is.
        y_label: what `accuracy` is measured on.
    """
    missing = [name for name in COLUMNS if name not in points]
    if missing:
        raise ValueError(f"accuracy_against_size needs the columns {', '.join(COLUMNS)}; {', '.join(missing)} missing.")
    figure = style.new_figure(style.WIDTH, 4.3)
    axes = figure.subplots()
    axes.set(xscale="log", xlabel=x_label, ylabel=y_label)
    methods = points.groupby("method", sort=False, observed=True)
    for (colour, marker), (name, rows) in zip(LOOKS * 9, methods, strict=False):
        key = "point" if "point" in rows else "size"
        mean = rows.groupby(key)[["size", "accuracy"]].mean().sort_values("size")
        spread = rows.groupby(key)["accuracy"].std(ddof=0).reindex(mean.index)
        look: dict[str, Any] = {"color": colour, "marker": marker, "capsize": 2, "label": str(name)}
        axes.errorbar(mean["size"], mean["accuracy"], yerr=spread, **look)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    smallest = points["size"].min()
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(shown := [size for size in SIZES if size >= smallest / 2], [f"{100 * size:g} %" for size in shown])
    axes.set_xlim(0.9 * smallest, 1.1)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure
