"""Drawings for any sweep, chosen by its runs: for your own grids and experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from proxsps import figures
from proxsps.experiments.base import Drawing, Frames

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from proxsps.sweep.spec import RunSpec

TEXTS = {
    "objective": "Objective",
    "val_error": "Validation error",
    "model_norm": "Norm of the iterates",
    "nonzeros": "Share of entries that are not zero",
}


def standard_drawings(specs: Sequence[RunSpec]) -> tuple[Drawing, ...]:
    """Objective, validation error and norm over the epochs, over lambda where there are several, and step sizes.

    Args:
        specs: what is run; a single seed is enough.
    """
    schedules = sorted({spec.schedule for spec in specs})
    strengths = {spec.weight_decay for spec in specs}
    metrics = ["objective", "val_error", "model_norm"]
    metrics += ["nonzeros"] if any(spec.regularizer is not None for spec in specs) else []
    several = any(len({spec.schedule for spec in specs if spec.method == name}) > 1 for name in _names(specs))
    drawings = [_over_epochs(metric, schedule) for metric in metrics for schedule in (schedules if several else [""])]
    if len(strengths) > 1 and min(strengths) > 0:
        drawings += [
            _over_strengths(metric, schedule) for metric in metrics for schedule in (schedules if several else [""])
        ]
    if any(spec.definition.bounded for spec in specs):
        drawings += [_step_sizes(schedule) for schedule in (schedules if several else [""])]
    return tuple(drawings)


def _names(specs: Sequence[RunSpec]) -> set[str]:
    return {spec.method for spec in specs}


def _of(frames: Frames, table: str, schedule: str) -> pd.DataFrame:
    rows = frames[table]
    return rows[rows["schedule"] == schedule] if schedule else rows


def _ending(schedule: str) -> tuple[str, str]:
    """The endings of a drawing's name and of its caption."""
    return (f"-{schedule}", f" Schedule: {schedule}.") if schedule else ("", "")


def _over_epochs(metric: str, schedule: str) -> Drawing:
    name, text = _ending(schedule)

    def draw(frames: Frames) -> Figure:
        return figures.per_lambda(_of(frames, "runs", schedule), metric)

    return Drawing(metric + name, f"{TEXTS[metric]} over the epochs for each lambda, mean over {{runs}}.{text}", draw)


def _over_strengths(metric: str, schedule: str) -> Drawing:
    name, text = _ending(schedule)

    def draw(frames: Frames) -> Figure:
        return figures.lambda_path(_of(frames, "runs", schedule), metric)

    caption = f"{TEXTS[metric]} over lambda: median over the last ten epochs, mean over {{runs}}.{text}"
    return Drawing(f"lambda-path-{metric}{name}", caption, draw)


def _step_sizes(schedule: str) -> Drawing:
    name, text = _ending(schedule)

    def draw(frames: Frames) -> Figure:
        return figures.step_sizes(_of(frames, "steps", schedule), _of(frames, "runs", schedule))

    caption = f"Adaptive step sizes of one run (dots), their medians over each epoch (lines), and the caps.{text}"
    return Drawing(f"step-sizes{name}", caption, draw)
