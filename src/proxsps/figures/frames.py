"""What the figures read from the stored rows: checks of a frame, and the averages over runs that the captions name.

A mean over runs exists only where all runs have values. A run that diverged has none from then on, so the mean of its
group ends there too: averaging the survivors would draw a diverging method as a good one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

METRICS = ("objective", "train_loss", "val_error", "val_accuracy", "model_norm", "nonzeros")
RUN_COLUMNS = ("run", "method", "schedule", "lr", "weight_decay", "epoch", "status")


def require(frame: pd.DataFrame, columns: Sequence[str], name: str) -> pd.DataFrame:
    """The frame itself, if it has these columns and at least one row; else a ValueError that names what is missing."""
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"{name} lacks the columns {missing}; it has {list(frame.columns)}")
    if frame.empty:
        raise ValueError(f"{name} is empty: there is nothing to draw")
    return frame


def require_runs(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The frame of runs, checked for one metric."""
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}: choose one of {', '.join(METRICS)}")
    require(runs, (*RUN_COLUMNS, metric), "runs")
    if "regularizer" in runs.columns:
        require_one(runs, "regularizer", "A figure")
    return runs


def require_one(frame: pd.DataFrame, column: str, figure: str) -> None:
    """Raise an error for a frame that mixes values of a column that the figure cannot distinguish."""
    values = sorted(frame[column].unique())
    if len(values) > 1:
        raise ValueError(f"{figure} draws one {column} at a time, but runs holds {values}: select one first")


def require_one_schedule(runs: pd.DataFrame, figure: str) -> None:
    """Raise an error for a method with several schedules: a figure has one line for each method and alpha_0."""
    for method, rows in runs.groupby("method"):
        if rows["schedule"].nunique() > 1:
            raise ValueError(
                f"{figure} draws one schedule at a time for each method, but {method} has "
                f"{sorted(rows['schedule'].unique())}: select one first"
            )


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation over the runs of one group, indexed by epoch; NaN from the first divergence on."""

    mean: pd.Series
    std: pd.Series
    diverged: bool


def _table(runs: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Epochs by runs; a value that is not finite, or a row that is not there, is NaN."""
    table = runs.pivot(index="epoch", columns="run", values=metric).sort_index().astype(float)
    return table.where(np.isfinite(table))


def curve(runs: pd.DataFrame, metric: str, window: int = 1) -> Curve:
    """Mean over runs, then the rolling median over ``window`` epochs; the deviation is that of the runs themselves."""
    table = _table(runs, metric)
    mean = table.mean(axis=1, skipna=False)
    if window > 1:
        mean = mean.rolling(min(window, len(mean))).median()
    std = table.std(axis=1, skipna=False) if table.shape[1] > 1 else mean * np.nan
    return Curve(mean, std.where(mean.notna()), bool((runs["status"] == "diverged").any()))


def final_median(runs: pd.DataFrame, metric: str, last: int, epochs: int) -> pd.Series:
    """Per run, the median over the ``last`` of ``epochs`` epochs; NaN for a run that diverged."""
    table = _table(runs, metric)
    tail = table[table.index > epochs - last]
    return tail.median(axis=0, skipna=False) if len(tail) else pd.Series(np.nan, index=table.columns)


def grouped(runs: pd.DataFrame) -> Iterator[tuple[str, float, pd.DataFrame]]:
    """(method, alpha_0, rows) of each line in a panel."""
    for (method, lr), rows in runs.groupby(["method", "lr"], sort=True):
        yield str(method), float(lr), rows
