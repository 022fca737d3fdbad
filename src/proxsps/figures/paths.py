"""The role of lambda: training curves in one panel for each lambda, and final values as a function of lambda."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxsps.figures import frames, style

ROLLING = {"val_error": 5, "val_accuracy": 5}  # epochs of the rolling median; other metrics are drawn as they are
Scale = Literal["log", "linear"]


@style.styled
def per_lambda(
    runs: pd.DataFrame, metric: str, *, deviations: float = 0.0, window: int | None = None, scale: Scale | None = None
) -> Figure:
    """Mean over runs per epoch, one panel for each lambda, one line for each (method, alpha_0).

    Args:
        runs: rows of runs and epochs, one schedule per method.
        metric: ``objective``, ``train_loss``, ``val_error``, ``val_accuracy`` or ``model_norm``.
        deviations: half width of the shaded band, in standard deviations over the runs; 0 draws none, the paper's
            matrix completion uses 2.
        window: epochs of the rolling median; by default 5 for validation, otherwise 1.
        scale: of the y axis; by default logarithmic for the objective, and where values span more than a decade. On a
            linear axis the first epochs may leave the panel at the top.
    """
    frames.require_runs(runs, metric)
    frames.require_one_schedule(runs, "per_lambda")
    window = ROLLING.get(metric, 1) if window is None else window
    lambdas = sorted(runs["weight_decay"].unique())
    curves = {
        lam: {(name, lr): frames.curve(rows, metric, window) for name, lr, rows in frames.grouped(of_lambda)}
        for lam, of_lambda in runs.groupby("weight_decay")
    }
    scale = scale or _scale(metric, [curve.mean for group in curves.values() for curve in group.values()])
    colours = _colours(runs)

    figure, panels, spare = _panels(len(lambdas))
    for axes, lam in zip(panels, lambdas, strict=True):
        axes.set(title=style.lambda_title(lam), yscale=scale)
        _fill_panel(axes, curves[lam], colours, deviations, scale)
        style.log_ticks(axes)
        style.epoch_ticks(axes)
    for axes in panels[:: _columns(len(panels))]:
        axes.set_ylabel(style.METRIC_LABELS[metric])
    for axes in panels[-_columns(len(panels)) :]:
        axes.set_xlabel("Epoch")
    diverged = any(curve.diverged for group in curves.values() for curve in group.values())
    columns = style.alpha_columns(colours, diverged)
    if spare is None:
        style.draw_legend(figure, columns, "outside lower center")
    else:
        style.draw_legend(spare, columns, "center")
    return figure


@style.styled
def lambda_path(runs: pd.DataFrame, metric: str, *, last: int = 10, scale: Scale | None = None) -> Figure:
    """Median of a metric over the last epochs as a function of lambda: mean over runs, one standard deviation shaded.

    A point with a run that diverged is left out, and marked by a cross on the upper edge.
    """
    frames.require_runs(runs, metric)
    frames.require_one_schedule(runs, "lambda_path")
    if (runs["weight_decay"] <= 0).any():
        raise ValueError("lambda_path has a logarithmic axis of lambda: leave out the runs with weight_decay = 0")
    epochs = int(runs["epoch"].max())
    colours = _colours(runs)
    figure = style.new_figure(7.2, 4.1)
    axes = figure.subplots()
    points = {(name, lr): _path(rows, metric, last, epochs) for name, lr, rows in frames.grouped(runs)}
    scale = scale or _scale(metric, [path["mean"] for path in points.values()])
    axes.set(xscale="log", yscale=scale, xlabel=r"Regularisation parameter $\lambda$", ylabel=_final_label(metric))
    floor = _floor([path["mean"] for path in points.values()], scale)
    lost = []
    for (name, lr), path in points.items():
        colour = colours[name][lr]
        looks = style.marked(name, colour, len(path)) | {"markevery": None, "markersize": 6}
        axes.plot(path.index, path["mean"], **looks)
        _band(axes, path["mean"], path["std"], colour, floor)
        lost += [(lam, colour) for lam in path.index[path["mean"].isna()]]
    if floor is not None and axes.collections:
        axes.set_ylim(bottom=floor)
    for lam, colour in lost:
        style.cross(axes, lam, axes.get_ylim()[1], colour)
    style.log_ticks(axes)
    lambdas = sorted(runs["weight_decay"].unique())
    if len(lambdas) <= 8:
        style.lambda_ticks(axes, lambdas)
    style.draw_legend(figure, style.alpha_columns(colours, bool(lost)), "outside right center", stacked=True)
    return figure


def _path(rows: pd.DataFrame, metric: str, last: int, epochs: int) -> pd.DataFrame:
    """Mean and deviation over the runs, indexed by lambda."""
    final = {lam: frames.final_median(group, metric, last, epochs) for lam, group in rows.groupby("weight_decay")}
    return pd.DataFrame(
        {
            "mean": {lam: values.mean(skipna=False) for lam, values in final.items()},
            "std": {lam: values.std(skipna=False) if len(values) > 1 else np.nan for lam, values in final.items()},
        }
    ).sort_index()


def _final_label(metric: str) -> str:
    return {"model_norm": r"Final model norm $\|x\|$", "objective": r"Final objective $\psi(x)$"}.get(
        metric, style.METRIC_LABELS[metric]
    )


def _colours(runs: pd.DataFrame) -> dict[str, dict[float, style.Colour]]:
    return {name: style.shades(name, runs.loc[runs["method"] == name, "lr"]) for name in style.in_order(runs["method"])}


def _scale(metric: str, series: list[pd.Series]) -> Scale:
    values = pd.concat(series).dropna()
    if values.empty or values.min() <= 0:
        return "linear"
    return "log" if metric == "objective" or values.max() > 10 * values.min() else "linear"


def _columns(count: int) -> int:
    return count if count <= 3 else math.ceil(count / 2)


def _panels(count: int) -> tuple[Figure, list[Axes], Axes | None]:
    """One row up to three panels, else two; a place left over is where the legend goes."""
    columns = _columns(count)
    rows = math.ceil(count / columns)
    figure = style.new_figure(style.WIDTH, 4.2 if rows == 1 else 2.9 * rows)
    panels = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    spare = panels[count] if count < len(panels) else None
    if spare is not None:
        spare.set_axis_off()
        for axes in panels[:columns]:  # the row above the legend has room for its own ticks
            axes.tick_params(labelbottom=True)
    return figure, panels[:count], spare


def _fill_panel(
    axes: Axes,
    curves: dict[tuple[str, float], frames.Curve],
    colours: dict[str, dict[float, style.Colour]],
    deviations: float,
    scale: Scale,
) -> None:
    floor = _floor([curve.mean for curve in curves.values()], scale)
    for (name, lr), curve in curves.items():
        colour = colours[name][lr]
        axes.plot(curve.mean.index, curve.mean, **style.marked(name, colour, len(curve.mean)))
        if deviations > 0:
            _band(axes, curve.mean, deviations * curve.std, colour, floor)
    if floor is not None and axes.collections:
        axes.set_ylim(bottom=floor)
    _focus(axes, list(curves.values()), deviations, scale)
    for (name, lr), curve in curves.items():
        if curve.diverged:
            style.end_cross(axes, curve.mean, colours[name][lr])


def _focus(axes: Axes, curves: list[frames.Curve], deviations: float, scale: Scale) -> None:
    """Limits of y that the lines that stay finite set; a linear axis gives the first fifth of the epochs less room."""
    settled = [curve for curve in curves if not curve.diverged]
    if not settled:
        return
    upper = pd.concat([curve.mean + deviations * curve.std.fillna(0) for curve in settled])
    lower = pd.concat([curve.mean - deviations * curve.std.fillna(0) for curve in settled])
    low, high = float(lower.min()), float(upper.max())
    late = float(upper[upper.index > 0.2 * upper.index.max()].max())
    if scale == "linear" and high - low > 2.5 * (late - low) > 0:
        axes.set_ylim(low - 0.08 * (late - low), late + 0.6 * (late - low))
    elif scale == "log" and len(settled) < len(curves):
        values = pd.concat([curve.mean for curve in settled])
        axes.set_ylim(0.6 * float(values.min()), 3 * float(values.max()))


def _band(axes: Axes, mean: pd.Series, width: pd.Series, colour: style.Colour, floor: float | None) -> None:
    if width.isna().all():
        return
    lower = mean - width
    if floor is not None:
        lower = lower.where(lower > 0, floor)
    axes.fill_between(mean.index, lower, mean + width, color=colour, alpha=0.14, linewidth=0, zorder=1.5)


def _floor(means: list[pd.Series], scale: Scale) -> float | None:
    """Lower limit of a logarithmic axis with bands: below the lines, where a band that reaches zero is cut off."""
    values = pd.concat(means).dropna()
    return 0.4 * float(values.min()) if scale == "log" and len(values) else None
