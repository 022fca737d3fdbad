"""Figures that need no training: the interpolation constant, the two models of a loss, and the two vector fields."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from proxsps.figures import frames, style

MODEL_COLUMNS = ("x0", "y", "objective", "prox_sps_model", "sps_model", "prox_sps_proximal", "sps_proximal")
POINT_COLUMNS = ("x0", "x_prox_sps", "x_sps", "x_star")
DASHED = (0, (4, 2))
# column of the point, curve on which it lies, method whose colour it has, marker, label
POINTS = (
    ("x0", "objective", None, "o", r"start $x^0$"),
    ("x_prox_sps", "prox_sps_proximal", "prox-sps", "D", r"ProxSPS step $x^1$"),
    ("x_sps", "sps_proximal", "sps", "s", r"SPS step $\hat x^1$"),
    ("x_star", "objective", None, "*", r"minimiser $x^*$"),
)


@style.styled
def interpolation(frame: pd.DataFrame) -> Figure:
    """The interpolation constant sigma^2 of the regularised loss as a function of lambda."""
    frames.require(frame, ("lam", "sigma_sq"), "interpolation")
    frame = frame.sort_values("lam")
    figure = style.new_figure(6.2, 3.9)
    axes = figure.subplots()
    colour = style.method("sps").colour
    axes.plot(frame["lam"], frame["sigma_sq"], color=colour, marker="o", ms=4.5, mec="white", mew=0.5)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=r"Regularisation parameter $\lambda$",
        ylabel=r"Interpolation constant $\sigma^2$",
    )
    return figure


@style.styled
def model_compare(models: pd.DataFrame, points: pd.DataFrame) -> Figure:
    """Both models of a loss with regulariser, and what a step minimises over them, in one panel for each start x^0."""
    frames.require(models, MODEL_COLUMNS, "model_compare")
    frames.require(points, POINT_COLUMNS, "model_points")
    starts = sorted(models["x0"].unique())
    figure = style.new_figure(style.WIDTH, 4.4)
    panels = figure.subplots(1, len(starts), sharey=True, squeeze=False)[0]
    for axes, start in zip(panels, starts, strict=True):
        rows = models[models["x0"] == start].sort_values("y")
        at = points[points["x0"] == start]
        if at.empty:
            raise ValueError(f"model_points has no row for x0 = {start:g}")
        axes.plot(rows["y"], rows["objective"], color=style.INK, lw=2.2)
        for name, prefix in (("prox-sps", "prox_sps"), ("sps", "sps")):
            colour = style.method(name).colour
            axes.plot(rows["y"], rows[f"{prefix}_model"], color=colour)
            axes.plot(rows["y"], rows[f"{prefix}_proximal"], color=colour, ls=DASHED, lw=1.4)
        for column, on, owner, marker, _ in POINTS:
            _point(axes, rows, on, float(at[column].iloc[0]), owner, marker)
        axes.set(title=rf"$x^0 = {style.number(start)}$", xlabel=r"$y$", ylim=_model_limits(models))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_ylabel("Value")
    style.draw_legend(figure, _model_legend(), "outside lower center", bold=False)
    return figure


def _point(axes: Axes, rows: pd.DataFrame, on: str, place: float, name: str | None, marker: str) -> None:
    low, high = rows["y"].min(), rows["y"].max()
    if not low <= place <= high:
        raise ValueError(f"model_points: {place:g} lies outside the drawn range [{low:g}, {high:g}] of y")
    value = float(np.interp(place, rows["y"], rows[on]))
    colour = style.INK if name is None else style.method(name).colour
    size = 13 if marker == "*" else 8
    axes.plot([place], [value], marker, color=colour, ms=size, mec="white", mew=0.9, zorder=9, clip_on=False)


def _model_limits(models: pd.DataFrame) -> tuple[float, float]:
    """The objective and the models in full; of the steep proximal objectives what fits above them."""
    core = models[["objective", "prox_sps_model", "sps_model"]]
    low, high = float(core.min().min()), float(core.max().max())
    return low - 0.06 * (high - low), high + 0.12 * (high - low)


def _model_legend() -> list[list[Artist]]:
    marks = {}
    for column, _, name, marker, label in POINTS:
        colour = style.INK if name is None else style.method(name).colour
        size = 11 if marker == "*" else 7
        marks[column] = Line2D([], [], ls="none", marker=marker, ms=size, color=colour, label=label)
    columns: list[list[Artist]] = [
        [Line2D([], [], color=style.INK, lw=2.2, label=r"objective $f + \varphi$"), marks["x0"], marks["x_star"]]
    ]
    for name, point in (("prox-sps", "x_prox_sps"), ("sps", "x_sps")):
        look = style.method(name)
        model = Line2D([], [], color=look.colour, label=f"{look.label} model")
        step = Line2D([], [], color=look.colour, ls=DASHED, lw=1.4, label=f"{look.label} model + proximal term")
        columns.append([model, step, marks[point]])
    return columns


@style.styled
def flow(field: pd.DataFrame, minimum: pd.DataFrame) -> Figure:
    """Streamlines of V(x) = x^1 - x, one panel for each method; a circle marks the minimiser of the objective."""
    frames.require(field, ("method", "x", "y", "dx", "dy"), "flow")
    frames.require(minimum, ("x", "y"), "flow_minimum")
    names = style.in_order(field["method"])
    figure = style.new_figure(style.WIDTH if len(names) > 1 else 5.4, 5.3)
    panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        x, y, dx, dy = _grid(field[field["method"] == name], name)
        colour = style.method(name).colour  # one colour and width: every unbroken streamline is a single path
        axes.streamplot(x, y, dx, dy, color=colour, linewidth=1.2, density=0.6, broken_streamlines=False, zorder=2)
        axes.plot(minimum["x"], minimum["y"], "o", ms=11, mfc="white", mec=style.INK, mew=2.0, zorder=10)
        axes.set(title=style.method(name).label, xlabel="$x_1$", xlim=(x[0], x[-1]), ylim=(y[0], y[-1]), aspect="equal")
    panels[0].set_ylabel("$x_2$")
    return figure


def _grid(field: pd.DataFrame, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The field of one method as arrays over its grid: rows are y, columns are x."""
    dx = field.pivot(index="y", columns="x", values="dx")
    dy = field.pivot(index="y", columns="x", values="dy")
    if dx.isna().to_numpy().any() or dy.isna().to_numpy().any():
        raise ValueError(f"flow: the field of {name!r} is not a full grid of finite values")
    return dx.columns.to_numpy(), dx.index.to_numpy(), dx.to_numpy(), dy.to_numpy()
