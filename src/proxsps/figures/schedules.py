"""Stability against the choice of alpha_0: all methods in one panel for each step-size schedule, at one lambda."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxsps.figures import frames, style

HEADROOM = 3.0  # how far above the curves that stay finite a panel reaches


@style.styled
def stability(runs: pd.DataFrame, metric: str = "objective") -> Figure:
    """Mean over runs of a metric per epoch, one line for each (method, alpha_0), one panel for each schedule.

    The objective is drawn as its gap to the best value that any method found at any epoch of the frame. A line ends
    with a cross where the first of its runs diverges; the cross sits on the upper edge if the values left the panel.
    """
    frames.require_runs(runs, metric)
    frames.require_one(runs, "weight_decay", "stability")
    schedules = [name for name in style.SCHEDULE_TITLES if name in set(runs["schedule"])]
    if not schedules:
        raise ValueError(f"stability can draw the schedules {list(style.SCHEDULE_TITLES)}, but runs holds none of them")
    best = float(runs[metric].where(np.isfinite(runs[metric])).min()) if metric == "objective" else 0.0
    colours = {name: style.shades(name, rows["lr"]) for name, rows in _by_method(runs)}

    figure = style.new_figure(style.WIDTH, 4.3)
    panels = np.atleast_1d(figure.subplots(1, len(schedules), sharey=True))
    curves = {schedule: _curves(runs[runs["schedule"] == schedule], metric, best) for schedule in schedules}
    limits = _limits([curve for group in curves.values() for curve in group.values()])
    for axes, schedule in zip(panels, schedules, strict=True):
        axes.set(title=style.SCHEDULE_TITLES[schedule], xlabel="Epoch", yscale="log", ylim=limits)
        for (name, lr), curve in curves[schedule].items():
            _draw(axes, name, colours[name][lr], curve)
        style.log_ticks(axes)
        style.epoch_ticks(axes)
    panels[0].set_ylabel(
        r"Objective gap $\psi(x^k) - \min_k\,\psi(x^k)$" if metric == "objective" else style.METRIC_LABELS[metric]
    )
    diverged = any(curve.diverged for group in curves.values() for curve in group.values())
    columns = style.alpha_columns(colours, diverged)
    style.draw_legend(figure, columns, "outside right center", stacked=True)
    return figure


def _by_method(runs: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(name, runs[runs["method"] == name]) for name in style.in_order(runs["method"])]


def _curves(runs: pd.DataFrame, metric: str, best: float) -> dict[tuple[str, float], frames.Curve]:
    curves = {}
    for name, lr, rows in frames.grouped(runs):
        curve = frames.curve(rows, metric)
        gap = curve.mean - best
        curves[name, lr] = frames.Curve(gap.where(gap > 0), curve.std, curve.diverged)
    return curves


def _limits(curves: list[frames.Curve]) -> tuple[float, float] | None:
    """Limits that show every line that stays finite, and ignore diverging lines."""
    settled = [curve.mean for curve in curves if not curve.diverged] or [curve.mean for curve in curves]
    values = pd.concat(settled).dropna()
    if values.empty:
        return None
    return 0.6 * float(values.min()), HEADROOM * float(values.max())


def _draw(axes: Axes, name: str, colour: style.Colour, curve: frames.Curve) -> None:
    axes.plot(curve.mean.index, curve.mean, **style.marked(name, colour, len(curve.mean)))
    if curve.diverged:
        style.end_cross(axes, curve.mean, colour)
