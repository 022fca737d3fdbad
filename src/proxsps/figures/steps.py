"""What the adaptive step size does: zeta_k of every iteration beside its cap alpha_k."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from proxsps.figures import frames, style
from proxsps.methods import METHODS, OWN_TABLE

STEP_COLUMNS = ("run", "method", "lr", "weight_decay", "step", "epoch", "zeta")
EPOCH_COLUMNS = ("run", "method", "lr", "weight_decay", "epoch", "zeta_median", "alpha")


@style.styled
def step_sizes(steps: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """zeta_k as dots, its median over each epoch as a line, and alpha_k as black steps.

    Methods without an adaptive step are left out. Rows of panels are values of alpha_0, columns are values of lambda.
    Only rows of ``runs`` whose run is also in ``steps`` are used. zeta_k of ProxSPS can be zero: these dots, and
    others out of range, are drawn on the edge. The dots are one picture per panel inside the vector drawing,
    so that its size does not grow with their number.
    """
    frames.require(steps, STEP_COLUMNS, "steps")
    frames.require(runs, EPOCH_COLUMNS, "runs")
    measured = steps["zeta"].notna().groupby(steps["method"]).any()
    has_step = [name for name in measured.index[measured] if name not in OWN_TABLE or METHODS[name].bounded]
    steps = steps[steps["method"].isin(has_step)]
    frames.require(steps, (), "steps (of methods with an adaptive step, such as ProxSPS and SPS)")
    runs = runs[runs["run"].isin(steps["run"].unique())]
    frames.require(runs, (), "runs (of the runs that steps holds)")
    alphas, lambdas = sorted(steps["lr"].unique()), sorted(steps["weight_decay"].unique())
    limits = _limits(steps["zeta"], runs["alpha"])

    figure = style.new_figure(style.WIDTH, max(3.6, 0.9 + 2.0 * len(alphas)))
    panels = figure.subplots(len(alphas), len(lambdas), sharex=True, sharey=True, squeeze=False)
    for row, lr in zip(panels, alphas, strict=True):
        for axes, lam in zip(row, lambdas, strict=True):
            axes.set(yscale="log", ylim=limits)
            style.log_ticks(axes)
            style.epoch_ticks(axes)
            _panel(axes, _select(steps, lr, lam), _select(runs, lr, lam), limits)
    for axes, lam in zip(panels[0], lambdas, strict=True):
        axes.set_title(style.lambda_title(lam))
    for axes, lr in zip(panels[:, 0], alphas, strict=True):
        axes.set_ylabel(style.alpha_label(lr))
    figure.supxlabel("Epoch", fontsize=11.5)
    figure.supylabel(r"Adaptive step size $\zeta_k$", fontsize=11.5)
    style.draw_legend(figure, _legend(steps["method"]), "outside upper center")
    return figure


def _select(frame: pd.DataFrame, lr: float, lam: float) -> pd.DataFrame:
    return frame[(frame["lr"] == lr) & (frame["weight_decay"] == lam)]


def _limits(zeta: pd.Series, alpha: pd.Series) -> tuple[float, float]:
    """The range of nearly all positive values, so that a few outliers do not flatten the rest."""
    positive = zeta[(zeta > 0) & np.isfinite(zeta)]
    caps = alpha[alpha > 0].dropna()
    low = min([*positive.quantile([0.002]).dropna(), *caps.nsmallest(1)], default=0.1)
    high = max([*positive.quantile([0.998]).dropna(), *caps.nlargest(1)], default=10.0)
    return 0.6 * float(low), 1.7 * float(high)


def _panel(axes: Axes, steps: pd.DataFrame, runs: pd.DataFrame, limits: tuple[float, float]) -> None:
    # in the order of the iterations, so that neither method hides the other
    steps = steps.sort_values(["epoch", "step"], kind="stable")
    per_epoch = steps.groupby(["run", "epoch"])["step"]
    within = (steps["step"] - per_epoch.transform("min") + 0.5) / per_epoch.transform("count")
    axes.scatter(
        steps["epoch"] - 1 + within,
        steps["zeta"].clip(*limits),
        c=steps["method"].map({name: style.method(name).colour for name in steps["method"].unique()}),
        s=2.8,
        linewidths=0,
        alpha=float(np.clip(1400 / max(len(steps), 1), 0.12, 0.5)),
        rasterized=True,
        zorder=0.8,
    )
    for name in style.in_order(runs["method"])[::-1]:
        median = runs[runs["method"] == name].groupby("epoch")["zeta_median"].median()
        looks = style.marked(name, style.shades(name, [0, 1])[1], len(median)) | {"lw": 1.6}
        axes.plot(median.index - 0.5, median.clip(*limits), **looks)
    cap = runs.groupby("epoch")["alpha"].first().dropna()
    if len(cap):
        edges = np.append(cap.index - 1, cap.index[-1])
        axes.step(edges, np.append(cap, cap.iloc[-1]), where="post", color=style.INK, lw=1.3, zorder=12)


def _legend(methods: pd.Series) -> list[list[Artist]]:
    handles: list[list[Artist]] = []
    for name in style.in_order(methods):
        look, dark = style.method(name), style.shades(name, [0, 1])[1]
        dot = Line2D([], [], ls="none", marker=".", ms=6, color=look.colour, label=rf"{look.label} $\zeta_k$")
        line = Line2D([], [], color=dark, ls=style.line_style(name), marker=look.marker, ms=4.5)
        line.set_label(f"{look.label} median of the epoch")
        handles += [[dot], [line]]
    return [*handles, [Line2D([], [], color=style.INK, lw=1.3, label=r"cap $\alpha_k$")]]
