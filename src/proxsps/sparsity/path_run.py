"""Training, measuring and the state of the network along a path over the strength."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from proxsps.regularizers import L1
from proxsps.sparsity.counts import counted
from proxsps.sparsity.groups import ParameterGroups, rows, sparse_groups, starting_strength
from proxsps.sparsity.inputs import constant, outputs
from proxsps.sparsity.points import Folder, Point, finite
from proxsps.sparsity.shrinking import shrunk
from proxsps.sparsity.units import Units, clear_dead, unit_groups

Train = Callable[[nn.Module, ParameterGroups], None]
Evaluate = Callable[[nn.Module], float]
Kind = Literal["units", "weights", "rows"] | Callable[[nn.Module, float], ParameterGroups]


class Run:
    """A network, the functions that train and evaluate it, and what becomes zero in it."""

    def __init__(
        self, model: nn.Module, train: Train, evaluate: Evaluate, inputs: Any, units: Units, kind: Kind
    ) -> None:
        self.model, self.train, self.evaluate, self.inputs, self.units = model, train, evaluate, inputs, units
        self.kind = kind
        self.structured = kind == "units" or callable(kind)
        self.total = sum(param.numel() for param in model.parameters())
        if kind == "units" and not units.sets:
            unit_groups(model, inputs, 1.0, units=units)  # raises, and says why

    def groups(self, strength: float) -> ParameterGroups:
        """Parameter groups of this strength; without a regulariser if it is 0."""
        if not strength:
            return ParameterGroups([{"params": _trained(self.model), "regularizer": None}])
        if self.kind == "units":
            return unit_groups(self.model, self.inputs, strength, units=self.units)
        if self.kind == "weights":
            return sparse_groups(self.model, L1(strength))
        if self.kind == "rows":
            return sparse_groups(self.model, rows(strength))
        return self.kind(self.model, strength)

    def reference(self) -> float:
        """The strength at which the penalty of the present weights is 1."""
        return starting_strength(self.groups(1.0))

    def point(self, strength: float, store: Folder, index: int) -> Point:
        """Train at a strength, or load the point from the folder."""
        saved = store.load(index, strength)
        if saved is not None:
            self.model.load_state_dict(saved.state)
            return saved.point
        self.train(self.model, self.groups(strength))
        if not finite(self.model.parameters()):
            return self._diverged(strength)
        clear_dead(self.model, self.units)
        found = self._measured(strength)
        store.save(index, found, self.state())
        return found

    def _diverged(self, strength: float) -> Point:
        """A point that is not kept: its accuracy is NaN, whatever `evaluate` would return for such weights."""
        if not strength:
            raise ValueError("The dense network has weights that are not finite: its training diverged. Check `train`.")
        return Point(strength, math.nan, 1.0, 0.0, self.total, 0, len(self.units))

    def _measured(self, strength: float) -> Point:
        report = counted(self.model, self.units)
        accuracy = float(self.evaluate(self.model))
        if not strength and not math.isfinite(accuracy):
            raise ValueError(
                f"evaluate returned {accuracy} for the dense network, which all others are compared with: check "
                "evaluate, and whether the training diverged."
            )
        small = shrunk(self.model, self.inputs, self.units).report.after.parameters
        size = small / self.total if self.structured else 1 - report.zeros
        return Point(strength, accuracy, size, report.zeros, small, report.dead_units, report.units)

    def state(self) -> dict[str, Any]:
        """A copy of the network's tensors."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def everything_dead(self) -> bool:
        """Whether the output no longer depends on the input."""
        return constant(outputs(self.model, self.inputs))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


__all__ = ["Evaluate", "Kind", "Run", "Train"]
