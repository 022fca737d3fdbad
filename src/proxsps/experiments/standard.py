"""Drawings of sweeps: one figure each, and the set that fits any sweep, for your own grids and experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from proxsps import figures
from proxsps.experiments.base import Drawing, Frames

if TYPE_CHECKING:
    from proxsps.sweep.spec import RunSpec

TEXTS = {
    "objective": "Objective",
    "val_error": "Validation error",
    "model_norm": "Norm of the iterates",
    "nonzeros": "Share of entries that are not zero",
}
AT_END = "as a function of lambda: median over the last ten epochs, mean over {runs}, shaded one standard deviation."


def over_epochs(name: str, metric: str, caption: str, schedule: str = "", **options: Any) -> Drawing:
    """A metric over the epochs, one panel for each lambda; `options` are those of `figures.per_lambda`."""
    return Drawing(name, caption, lambda f: figures.per_lambda(_of(f, "runs", schedule), metric, **options))


def over_lambda(name: str, metric: str, caption: str, schedule: str = "") -> Drawing:
    """A metric at the end as a function of lambda."""
    return Drawing(name, caption, lambda f: figures.lambda_path(_of(f, "runs", schedule), metric))


def step_sizes(name: str, caption: str, schedule: str = "") -> Drawing:
    """The adaptive steps of one run."""
    return Drawing(name, caption, lambda f: figures.step_sizes(*(_of(f, t, schedule) for t in ("steps", "runs"))))


def _of(frames: Frames, table: str, schedule: str) -> pd.DataFrame:
    rows = frames[table]
    return rows[rows["schedule"] == schedule] if schedule else rows


def standard_drawings(specs: Sequence[RunSpec]) -> tuple[Drawing, ...]:
    """Objective, validation error and norm over the epochs, over lambda where there are several, and step sizes.

    Args:
        specs: what is run; a single seed is enough.
    """
    schedules = {(spec.method, spec.schedule) for spec in specs}
    endings = {"": ("", "")}  # of names and captions, by schedule
    if len(schedules) > len({method for method, _ in schedules}):
        endings = {s: (f"-{s}", f" Schedule: {s}.") for s in sorted({schedule for _, schedule in schedules})}
    metrics = ["objective", "val_error", "model_norm"]
    metrics += ["nonzeros"] if any(spec.regularizer is not None for spec in specs) else []
    each = [(metric, *ending, schedule) for metric in metrics for schedule, ending in endings.items()]
    text = "over the epochs for each lambda, mean over {runs}."
    drawings = [over_epochs(m + name, m, f"{TEXTS[m]} {text}{note}", schedule) for m, name, note, schedule in each]
    strengths = {spec.weight_decay for spec in specs}
    if len(strengths) > 1 and min(strengths) > 0:
        text = "over lambda: median over the last ten epochs, mean over {runs}."
        drawings += [
            over_lambda(f"lambda-path-{m}{name}", m, f"{TEXTS[m]} {text}{note}", schedule)
            for m, name, note, schedule in each
        ]
    if any(spec.definition.bounded for spec in specs):
        text = "Adaptive step sizes of one run (dots), their medians over each epoch (lines), and the caps."
        drawings += [step_sizes(f"step-sizes{name}", text + note, s) for s, (name, note) in endings.items()]
    return tuple(drawings)
