"""The paper's experiments by name."""

from __future__ import annotations

import difflib

from proxsps.experiments.base import Claim, Drawing, Experiment
from proxsps.experiments.deep import EXPERIMENTS as DEEP
from proxsps.experiments.illustrations import FLOW, INTERPOLATION, MODEL_COMPARE
from proxsps.experiments.matrix_fac import EXPERIMENTS as MATRIX_FAC
from proxsps.experiments.sensor import SENSOR
from proxsps.experiments.theory import EXPERIMENTS as THEORY

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (*MATRIX_FAC, SENSOR, INTERPOLATION, MODEL_COMPARE, FLOW, *THEORY, *DEEP)
}


def find(name: str) -> Experiment:
    """The experiment of this name; a near miss is told what it may have meant."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    near = difflib.get_close_matches(name, EXPERIMENTS, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(EXPERIMENTS)}."
    raise ValueError(f"Unknown experiment {name!r}. {hint}")


__all__ = ["EXPERIMENTS", "Claim", "Drawing", "Experiment", "find"]
