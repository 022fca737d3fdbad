"""Figures of the theory: rates and their bounds, how tight they are, the floor of SPS_max, robustness to alpha_0."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from proxsps.figures import frames, style

DASHED = (0, (4, 2))
COLUMNS = 3
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # of the problems in a panel, in their order
MARKERS = ("o", "s", "^", "D")
CEILING = 30.0  # of the robustness panels, over the gap at the start
MODEL_NAMES = {"prox-sgd": "linear", "prox-sps": "truncated", "prox-point": "full"}  # of the loss


@style.styled
def rates(checks: pd.DataFrame) -> Figure:
    """A panel for each rate: measured mean and confidence band over K, and the bound, for each of its problems."""
    needed = ("check", "place", "symbol", "problem", "K", "measured", "half", "bound", "exact")
    frames.require(checks, needed, "checks")
    runs = frames.require(checks[~checks["exact"].astype(bool)], needed, "checks of rates")
    names = list(dict.fromkeys(runs["check"]))
    rows = -(-(len(names) + 1) // COLUMNS)  # one more for the legend
    figure = style.new_figure(style.WIDTH, 2.75 * rows)
    panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        _rate_panel(axes, runs[runs["check"] == name])
    for axes in panels[len(names) :]:
        axes.axis("off")
    bound = Line2D([], [], color=style.REFERENCE, ls=DASHED, label="bound")
    measured = Line2D([], [], color=style.REFERENCE, marker="o", ms=4.5, mec="white", label="measured, mean over runs")
    band = Patch(color=style.REFERENCE, alpha=0.25, lw=0, label="99 % confidence")
    panels[len(names)].legend(handles=[bound, measured, band], loc="center")
    return figure


def _rate_panel(axes: Axes, rows: pd.DataFrame) -> None:
    title = "\n".join(textwrap.wrap(rows["place"].iloc[0].replace("alpha/sqrt", "\u03b1/\u221a"), 31))
    axes.set(xscale="log", yscale="log")
    axes.set_title(title, fontsize=10.5)
    axes.set_xlabel("Steps $K$", fontsize=10)
    axes.set_ylabel(rows["symbol"].iloc[0], fontsize=10)
    groups = rows.groupby("problem", sort=False)
    for (problem, group), colour, marker in zip(groups, COLOURS, MARKERS, strict=False):
        group = group.sort_values("K")
        K, mean, half = (group[column].to_numpy(dtype=float) for column in ("K", "measured", "half"))
        axes.plot(K, group["bound"], ls=DASHED, color=colour, lw=1.4)
        line: dict[str, Any] = {"marker": marker, "ms": 4, "mec": "white", "mew": 0.5}
        axes.plot(K, mean, color=colour, label=str(problem), **line)
        low = np.maximum(mean - half, mean / 10)  # a band that reaches 0 has no lower end on a logarithmic axis
        axes.fill_between(K, low, mean + half, color=colour, alpha=0.22, lw=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** (0.09 * groups.ngroups))  # room for the names above the curves
    axes.legend(loc="upper right", fontsize=8.5, handlelength=1.3, labelspacing=0.2, borderaxespad=0.1)
    _ticks(axes)


def _ticks(axes: Axes) -> None:
    """Powers of ten on both axes, without minor ticks."""
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: style.tick_text(value))
    style.log_ticks(axes)


@style.styled
def tightness(summary: pd.DataFrame) -> Figure:
    """Quotients of measured value and bound at their largest, a row for each check, a dot for each problem."""
    frames.require(summary, ("check", "problem", "ratio", "exact", "holds"), "summary")
    names = list(dict.fromkeys(summary["check"]))
    figure = style.new_figure(style.WIDTH, 1.3 + 0.29 * len(names))
    axes = figure.subplots()
    place = {name: len(names) - i for i, name in enumerate(names)}
    looks = ((True, COLOURS[0], "every sample enumerated"), (False, COLOURS[1], "mean over runs"))
    for exact, colour, label in looks:
        part = summary[summary["exact"].astype(bool) == exact]
        y = [place[name] for name in part["check"]]
        axes.plot(part["ratio"], y, "o", color=colour, ms=6.5, mec="white", mew=0.7, alpha=0.85, label=label)
    broken = summary[~summary["holds"].astype(bool)]
    for name, ratio in zip(broken["check"], broken["ratio"], strict=True):
        style.cross(axes, ratio, place[name], style.INK)
    axes.axvline(1, color=style.REFERENCE, lw=1.2)
    axes.axvline(0.5, color=style.REFERENCE, lw=1.0, ls=DASHED)
    axes.set(xscale="log", xlabel="Measured value over bound, at its largest", ylim=(0.3, len(names) + 0.7))
    axes.set_yticks(list(place.values()), list(place))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles = [*axes.get_legend_handles_labels()[0]]
    handles.append(Line2D([], [], color=style.REFERENCE, ls=DASHED, lw=1.0, label="half of the bound"))
    if len(broken):
        handles.append(Line2D([], [], ls="none", marker="X", color=style.INK, label="does not hold"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


@style.styled
def floor(curves: pd.DataFrame, floors: pd.DataFrame) -> Figure:
    """Left: mean gap over the steps, by method and kind of steps; right: what is left, against sigma^2."""
    frames.require(curves, ("method", "steps", "K", "gap", "std"), "curves")
    frames.require(floors, ("method", "steps", "sigma_sq", "limit", "gap"), "floors")
    figure = style.new_figure(style.WIDTH, 4.2)
    left, right = figure.subplots(1, 2)
    for (name, steps), group in curves.groupby(["method", "steps"], sort=False):
        colour = style.method(str(name)).colour
        group = group.sort_values("K")
        options = style.marked(str(name), colour, len(group)) | {"linestyle": DASHED if steps == "constant" else "-"}
        left.plot(group["K"], group["gap"], label=f"{_floor_name(str(name))}, {steps}", **options)
        low = np.maximum(group["gap"] - group["std"], group["gap"] / 10)
        left.fill_between(group["K"], low, group["gap"] + group["std"], color=colour, alpha=0.15, lw=0)
    left.set(xscale="log", yscale="log", xlabel="Steps $K$", ylabel=r"Mean of $\psi(x^k) - \psi^*$ over $k \leq K$")
    left.legend(loc="lower left", title=r"Method, steps $\alpha_k$", alignment="left")
    for (name, steps), group in floors.groupby(["method", "steps"], sort=False):
        look = style.method(str(name))
        group = group.sort_values("sigma_sq")
        options = {"color": look.colour, "marker": look.marker, "ms": 6, "mec": "white", "mew": 0.6}
        label = f"{_floor_name(str(name))}, {steps}"
        right.plot(group["sigma_sq"], group["gap"], ls=DASHED if steps == "constant" else "-", label=label, **options)
    limit = floors.drop_duplicates("sigma_sq").sort_values("sigma_sq")
    right.plot(limit["sigma_sq"], limit["limit"], color=style.REFERENCE, lw=1.3, ls=":")
    right.annotate(
        r"bound $2\gamma_b\sigma^2/\alpha$ of SPS$_{\max}$",
        (limit["sigma_sq"].iloc[len(limit) // 2], limit["limit"].iloc[len(limit) // 2]),
        xytext=(4, 14),
        textcoords="offset points",
        fontsize=10.5,
        color=style.REFERENCE,
        ha="right",
    )
    right.set(
        xscale="log",
        yscale="log",
        xlabel=r"Interpolation constant $\sigma^2$ of the regularised loss",
        ylabel=r"Gap $\psi(x^k) - \psi^*$ at the end",
    )
    low, high = right.get_ylim()
    right.set_ylim(low, high * 10)
    for axes in (left, right):
        _ticks(axes)
    return figure


def _floor_name(name: str) -> str:
    return r"SPS$_{\max}$" if name == "sps" else style.method(name).label


@style.styled
def robustness(frame: pd.DataFrame) -> Figure:
    """Gap at the end over that at the start as a function of alpha_0: a panel for each loss, a line for each model."""
    frames.require(frame, ("loss", "method", "alpha", "steps", "gap", "low", "high"), "robustness")
    losses = list(dict.fromkeys(frame["loss"]))
    figure = style.new_figure(style.WIDTH, 4.3)
    panels = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    bottom = float(frame.loc[frame["low"] > 0, "low"].min())
    for axes, loss in zip(panels, losses, strict=True):
        rows = frame[frame["loss"] == loss]
        axes.set(title=loss[:1].upper() + loss[1:], xscale="log", yscale="log", ylim=(bottom / 2, CEILING))
        axes.set_xlabel(r"Step size $\alpha_0$, with $\alpha_k = \alpha_0/\sqrt{k+1}$")
        axes.axhline(1, color=style.REFERENCE, lw=1.0, ls=":")
        for name in style.in_order(rows["method"]):
            _robust_line(axes, name, rows[rows["method"] == name].sort_values("alpha"))
        _ticks(axes)
    steps = int(frame["steps"].iloc[0])
    panels[0].set_ylabel(rf"$\psi(x^{{{steps}}}) - \psi^*$ over $\psi(x^0) - \psi^*$")
    names = style.in_order(frame["method"])
    handles = [
        Line2D(
            [],
            [],
            color=style.method(name).colour,
            marker=style.method(name).marker,
            ms=6,
            mec="white",
            label=f"{MODEL_NAMES.get(name, name)} model ({style.method(name).label})",
        )
        for name in names
    ]
    handles.append(Line2D([], [], color=style.REFERENCE, lw=1.0, ls=":", label="start"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _robust_line(axes: Axes, name: str, rows: pd.DataFrame) -> None:
    """A line that ends with a cross where it leaves the panel, or where runs overflow."""
    colour = style.method(name).colour
    alpha, gap = rows["alpha"].to_numpy(), rows["gap"].to_numpy(dtype=float)
    shown = gap <= CEILING
    options = style.marked(name, colour, len(rows)) | {"markevery": 2, "markersize": 5.5}
    axes.plot(alpha[shown], gap[shown], **options)
    low, high = (np.minimum(rows[side].to_numpy(dtype=float), CEILING)[shown] for side in ("low", "high"))
    axes.fill_between(alpha[shown], low, high, color=colour, alpha=0.15, lw=0)
    if not shown.all():
        first = int(np.argmin(shown))
        axes.plot(alpha[first - 1 : first + 1], [gap[first - 1], CEILING], color=colour, lw=1.7)
        style.cross(axes, float(alpha[first]), CEILING, colour)
