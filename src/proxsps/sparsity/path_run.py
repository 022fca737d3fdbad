"""Training, measuring and the state of the network along a path over the strength."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from proxsps.regularizers import L1
from proxsps.sparsity.counts import counted
from proxsps.sparsity.groups import ParameterGroups, rows, sparse_groups, starting_strength
from proxsps.sparsity.inputs import constant, outputs
from proxsps.sparsity.points import Folder, Point, State, finite
from proxsps.sparsity.shrinking import shrunk
from proxsps.sparsity.units import Units, clear_dead, unit_groups

Train = Callable[[nn.Module, Any], None]
MakeOptimizer = Callable[[ParameterGroups], Optimizer]
Evaluate = Callable[[nn.Module], float]
Kind = Literal["units", "weights", "rows"] | Callable[[nn.Module, float], ParameterGroups]


class Run:
    """A network, the functions that train and evaluate it, what becomes zero in it, and its optimizer if it has one."""

    def __init__(
        self,
        model: nn.Module,
        train: Train,
        evaluate: Evaluate,
        inputs: Any,
        units: Units,
        kind: Kind,
        make_optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.model, self.train, self.evaluate, self.inputs, self.units = model, train, evaluate, inputs, units
        self.kind, self.make_optimizer = kind, make_optimizer
        self.optimizer: Optimizer | None = None
        self.structured = kind == "units" or callable(kind)
        self.total = sum(param.numel() for param in model.parameters())
        if kind == "units" and not units.sets:
            unit_groups(model, inputs, 1.0, units=units)  # raises, and says why

    def groups(self, strength: float) -> ParameterGroups:
        """Parameter groups of this strength; the same without a regulariser if it is 0."""
        if not strength:
            return ParameterGroups({**group, "regularizer": None} for group in self.groups(1.0))
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
            self.restore(saved.state)
            return saved.point
        self._train(strength)
        if not finite(self.model.parameters()):
            return self._diverged(strength)
        clear_dead(self.model, self.units)
        found = self._measured(strength)
        store.save(index, found, self.state())
        return found

    def _train(self, strength: float) -> None:
        groups = self.groups(strength)
        optimizer = self._optimizer(groups)
        if optimizer is None:
            self.train(self.model, groups)
            return
        if len(groups) != len(optimizer.param_groups):
            raise ValueError("With one optimizer, kind must return groups of the same parameters for all strengths.")
        for group, new in zip(optimizer.param_groups, groups, strict=True):
            group["regularizer"] = new["regularizer"]
        self.train(self.model, optimizer)

    def _optimizer(self, groups: ParameterGroups) -> Optimizer | None:
        if self.optimizer is None and self.make_optimizer is not None:
            self.optimizer = self.make_optimizer(groups)
        return self.optimizer

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

    def state(self) -> State:
        """A copy of the network's tensors and of the optimizer's state."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        return State(tensors, {} if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict()))

    def restore(self, state: State) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state.model)
        optimizer = self._optimizer(self.groups(0.0))
        if optimizer is not None:
            # The next training sets the regularisers; those of the state would only give a warning.
            own = [{"regularizer": group["regularizer"]} for group in optimizer.param_groups]
            saved = [{**group, **mine} for group, mine in zip(state.optimizer["param_groups"], own, strict=True)]
            optimizer.load_state_dict({**state.optimizer, "param_groups": saved})

    def everything_dead(self) -> bool:
        """Whether the output no longer depends on the input."""
        return constant(outputs(self.model, self.inputs))


__all__ = ["Evaluate", "Kind", "MakeOptimizer", "Run", "Train"]
