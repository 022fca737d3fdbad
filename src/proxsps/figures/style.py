"""One house style: a colour and a marker per method, a shade per alpha_0, words with symbols on every axis.

Colours are those of Okabe and Ito, which can be distinguished with all common kinds of colour vision; markers
distinguish the methods in grey. Shades run from light (small alpha_0) to dark (large alpha_0). Figures are laid out for
a width of 10 inches, that is 1000 pixels at 100 dots per inch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from proxsps.methods import METHODS, looks

method = looks  # how a method is drawn
P = ParamSpec("P")
Colour = tuple[float, float, float]

WIDTH = 10.0
INK = "#22262b"
REFERENCE = "#4d5560"

RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#8a9099",
    "axes.formatter.limits": (-3, 4),
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 11.5,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 12,
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.7,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "legend.handlelength": 1.7,
    "lines.linewidth": 1.7,
    "mathtext.fontset": "dejavusans",
    "text.color": INK,
    "xtick.color": "#5b626c",
    "xtick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.color": "#5b626c",
    "ytick.labelcolor": INK,
    "ytick.labelsize": 10.5,
}

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


METRIC_LABELS = {
    "objective": r"Objective $\psi(x^k)$",
    "train_loss": r"Training loss $f(x^k)$",
    "val_error": "Validation error",
    "val_accuracy": "Validation accuracy",
    "model_norm": r"Model norm $\|x^k\|$",
    "nonzeros": "Share of entries that are not zero",
}
SCHEDULE_TITLES = {
    "constant": r"constant: $\alpha_k = \alpha_0$",
    "sqrt": r"sqrt: $\alpha_k = \alpha_0/\sqrt{j}$ in epoch $j$",
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the house style, and leave the caller's matplotlib settings as they were."""

    @functools.wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(RC):
            return draw(*args, **kwargs)

    return inside


def in_order(names: Iterable[str]) -> list[str]:
    """Methods in the order of the table, for any order of the rows."""
    present = set(names)
    for name in sorted(present):
        method(name)  # gives spare looks to one that is not in the table, in the same order every time
    return [name for name in METHODS if name in present]


def shades(name: str, values: Iterable[float]) -> dict[float, Colour]:
    """A shade of the method's colour for each alpha_0: light for the smallest, dark for the largest."""
    base = np.array(to_rgb(method(name).colour))
    ordered = sorted(set(values))
    if len(ordered) == 1:
        return {ordered[0]: _colour(base)}
    light, dark = base + 0.55 * (1 - base), 0.55 * base
    place = np.linspace(-1, 1, len(ordered))
    blend = [base + t * (dark - base) if t > 0 else base - t * (light - base) for t in place]
    return {value: _colour(rgb) for value, rgb in zip(ordered, blend, strict=True)}


def _colour(rgb: np.ndarray) -> Colour:
    red, green, blue = (float(part) for part in rgb)
    return red, green, blue


def number(value: float, power: bool = False) -> str:
    """A number in mathtext without the dollars: 0.5, 10, 10^{-3}, 5 x 10^{-5}; ``power`` writes 0.1 as a power too."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    if not power and -3 <= int(exponent) <= 3:
        return f"{value:.4g}"
    ten = f"10^{{{int(exponent)}}}"
    digits = f"{float(mantissa):g}"
    return ten if digits == "1" else rf"{digits} \times {ten}"


def tick_text(value: float) -> str:
    """A number of a logarithmic axis in plain letters, such as 10⁻³: mathtext takes most of the drawing time."""
    if not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    ten = "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    digits = f"{float(mantissa):g}"
    return ten if digits == "1" else f"{digits}\u00d7{ten}"


def plain(value: float, power: bool = False) -> str:
    """As `number`, in plain letters, with all digits of the values of a grid such as 0.26875."""
    return f"{value:g}" if value == 0 or (not power and 1e-3 <= abs(value) < 1e4) else tick_text(value)


def lambda_title(value: float) -> str:
    """A panel's title: its lambda."""
    return f"λ = {plain(value, power=True)}"


def alpha_label(value: float) -> str:
    """A line's label: its alpha_0."""
    return f"α₀ = {plain(value)}"


def new_figure(width: float, height: float) -> Figure:
    """A figure that lays itself out and belongs to no global state."""
    return Figure(figsize=(width, height), layout="constrained")


def marked(name: str, colour: Colour | str, points: int) -> dict[str, Any]:
    """Line options of a method: its colour, and a few of its markers, placed apart from those of other methods."""
    every = max(points // 6, 1)
    start = (list(METHODS).index(name) * 2) % every
    return {
        "color": colour,
        "marker": method(name).marker,
        "markevery": (start, every),
        "markersize": 4.5,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
        "linestyle": line_style(name),
        "zorder": 3 + len(METHODS) - list(METHODS).index(name) + 2 * (method(name).dashes is not None),
    }


def line_style(name: str) -> Any:
    """Dashes of a method's lines; most are solid."""
    return method(name).dashes or "-"


def cross(axes: Axes, x: float, y: float, colour: Colour | str) -> None:
    """The mark of divergence."""
    axes.plot([x], [y], "X", color=colour, markersize=8.5, markeredgecolor="white", clip_on=False, zorder=20)


def end_cross(axes: Axes, mean: pd.Series, colour: Colour | str) -> None:
    """A cross where a diverging line ends: at its last value, or on the upper edge where it leaves the panel."""
    top = axes.get_ylim()[1]
    inside = mean[mean <= top]
    left = mean[mean > top]
    if len(inside) and (left.empty or left.index[-1] < inside.index[-1]):
        cross(axes, float(inside.index[-1]), float(inside.iloc[-1]), colour)
        return
    after = left[left.index > inside.index[-1]] if len(inside) else left
    cross(axes, float(after.index[0] if len(after) else mean.index[0]), top, colour)


def log_ticks(axes: Axes) -> None:
    """Ticks of a logarithmic y axis: powers of ten over two decades or more, else a few plain numbers such as 0.3.

    There are no minor ticks: the grid does not show them, and laying them out takes half of the drawing time.
    """
    low, high = axes.get_ylim()
    if axes.get_yscale() != "log":
        return
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
    if high < 100 * low:
        subs = (1, 3) if high > 12 * low else (1, 2, 3, 5) if high > 5 * low else (1, 1.5, 2, 3, 5)
        axes.yaxis.set_major_locator(LogLocator(subs=subs) if high > 2.5 * low else MaxNLocator(5))
        plain = 1e-3 <= low <= 1e3
        if plain:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def epoch_ticks(axes: Axes) -> None:
    """Ticks at whole epochs."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def lambda_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Ticks of a logarithmic x axis at the values of lambda that were run."""
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(values, [tick_text(value) for value in values])


def cross_handle() -> Line2D:
    """What the mark of divergence means, for a legend."""
    return Line2D([], [], marker="X", ls="none", color=INK, markersize=8, markeredgecolor="white", label="diverged")


def alpha_columns(lines: dict[str, dict[float, Colour]], diverged: bool) -> list[list[Artist]]:
    """Legend entries, one column for each method: its name with its marker, then a line for each alpha_0.

    ``diverged`` adds the mark of divergence at the end.
    """
    columns: list[list[Artist]] = []
    for name, colours in lines.items():
        look = method(name)
        head = Line2D([], [], ls="none", color=look.colour, marker=look.marker, markersize=6.5, label=look.label)
        tail = [
            Line2D([], [], color=shade, ls=line_style(name), lw=2.4, label=alpha_label(lr))
            for lr, shade in colours.items()
        ]
        columns.append([head, *tail])
    if diverged:
        columns[-1].append(cross_handle())
    return columns


def draw_legend(
    owner: Figure | Axes, columns: Sequence[Sequence[Artist]], loc: str, *, stacked: bool = False, bold: bool = True
) -> Legend:
    """One legend for the whole figure: columns side by side, padded to one length, or stacked; their heads bold."""
    heads = {column[0].get_label() for column in columns if bold and len(column) > 1}
    if stacked:
        handles = [handle for column in columns for handle in column]
    else:
        rows = max(len(column) for column in columns)
        blank = [Line2D([], [], ls="none", label=" ")]
        handles = [handle for column in columns for handle in [*column, *blank * (rows - len(column))]]
    layout: dict[str, Any] = {"loc": loc, "ncols": 1 if stacked else len(columns)}
    legend = owner.legend(handles=handles, labelspacing=0.35, columnspacing=1.8, **layout)
    for text in legend.get_texts():
        if text.get_text() in heads:
            text.set_fontweight("bold")
    return legend
