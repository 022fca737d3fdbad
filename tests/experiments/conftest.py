"""Tables of results with chosen values, in the layout of a store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from proxsps.experiments import EXPERIMENTS
from proxsps.experiments.base import Frames
from proxsps.sweep.spec import METRICS, RunSpec

sys.path.insert(0, str(Path(__file__).parent))  # tests of claims share `judging`

SEEDS, EPOCHS, STEPS = 2, 12, 20
Value = Callable[[RunSpec], Any]  # of a run: a number, or one for each epoch


def fake(experiment: str, zeta: Value = lambda spec: 1.0, epochs: int = EPOCHS, **metrics: Value) -> Frames:
    """Results of a whole grid. Metrics that are not given are 1; a run with an objective of NaN has diverged."""
    specs = EXPERIMENTS[experiment].specs(SEEDS, epochs)
    runs = _constants(specs, epochs).assign(experiment=experiment, epoch=np.tile(np.arange(1, epochs + 1), len(specs)))
    for name in METRICS:
        value = metrics.get(name, lambda spec: 1.0)
        runs[name] = np.concatenate([np.broadcast_to(value(spec), epochs) for spec in specs])
    runs = runs.assign(val_accuracy=1 - runs["val_error"], alpha=runs["lr"])
    runs["status"] = np.where(runs["objective"].isna(), "diverged", "ok")
    firsts = [spec for spec in specs if spec.seed == 0]
    steps = _constants(firsts, epochs * STEPS)
    steps["step"] = np.tile(np.arange(epochs * STEPS), len(firsts))
    steps["epoch"] = steps["step"] // STEPS + 1
    steps["zeta"] = np.concatenate([np.broadcast_to(zeta(spec), (epochs, STEPS)).ravel() for spec in firsts])
    return {"runs": runs, "steps": steps.assign(alpha=steps["lr"])}


def _constants(specs: list[RunSpec], rows: int) -> pd.DataFrame:
    """Id and constants of each run, repeated."""
    table = pd.DataFrame([{"run": spec.id, **spec.columns()} for spec in specs])
    return table.loc[table.index.repeat(rows)].reset_index(drop=True)


@pytest.fixture(scope="session")
def made() -> Callable[..., Frames]:
    return fake
