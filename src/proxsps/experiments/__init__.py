"""The paper's experiments by name.

`CATALOGUE` lists the experiments, with numbers and one line each. `EXPERIMENTS[name]` and `find(name)` load one.
"""

from typing import TYPE_CHECKING

from proxsps._lazy import attach as _attach
from proxsps.experiments.catalogue import CATALOGUE, EXPERIMENTS, Entry

if TYPE_CHECKING:
    from proxsps.experiments.base import Claim, Drawing, Experiment

find = EXPERIMENTS.find

__all__ = ["CATALOGUE", "EXPERIMENTS", "Claim", "Drawing", "Entry", "Experiment", "find"]

__getattr__, __dir__ = _attach(__name__, dict.fromkeys(("Claim", "Drawing", "Experiment"), "base"))
