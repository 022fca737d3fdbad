"""From dense to sparse: a path over the strength, each point started from the one before it.

The first point is trained without a regulariser. A finished point is written to disk, so that the same call continues
where an interrupted one stopped. Files hold tensors and plain data, and nothing is unpickled when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from proxsps.regularizers import L1
from proxsps.regularizers.base import value_all
from proxsps.sparsity.counts import sparsity_report
from proxsps.sparsity.groups import ParameterGroups, rows, sparse_groups
from proxsps.sparsity.inputs import outputs
from proxsps.sparsity.points import Folder, PathError, Point
from proxsps.sparsity.shrinking import shrink
from proxsps.sparsity.tables import Table
from proxsps.sparsity.units import Units, clear_dead, find_units, unit_groups

FORMAT = 1
# Times the strength at which the penalty of the dense weights is 1.
DEFAULT_STEPS = (0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)

Train = Callable[[nn.Module, ParameterGroups], None]
Evaluate = Callable[[nn.Module], float]
Kind = Literal["units", "weights", "rows"] | Callable[[nn.Module, float], ParameterGroups]


@dataclass
class StrengthPath:
    """The points of a path, the one that was chosen, and why it ended."""

    points: list[Point] = field(default_factory=list)
    chosen: int = 0
    reason: str = ""

    @property
    def best(self) -> Point:
        """The smallest network that is good enough."""
        return self.points[self.chosen]

    @property
    def table(self) -> Table:
        """One row for each point."""
        lines = [
            [
                "dense" if not point.strength else f"{point.strength:.3g}",
                f"{point.accuracy:.2%}",
                f"{point.size:.1%}",
                f"{point.zeros:.1%}",
                point.parameters,
                f"{point.dead_units}/{point.units}",
                "<- chosen" if i == self.chosen else "",
            ]
            for i, point in enumerate(self.points)
        ]
        return Table(["strength", "accuracy", "size", "zero weights", "parameters", "dead units", ""], lines)

    @property
    def frame(self) -> Any:
        """One row for each point, as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame([{**asdict(p), "chosen": i == self.chosen} for i, p in enumerate(self.points)])

    def __str__(self) -> str:
        return f"{self.table}\n{self.reason}"


def strength_path(
    model: nn.Module,
    train: Train,
    evaluate: Evaluate,
    example_inputs: Any,
    *,
    kind: Kind = "units",
    strengths: Sequence[float] | None = None,
    keep: float | None = None,
    max_drop: float = 0.01,
    refine: int = 2,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    watch: Callable[[Point], None] = lambda point: None,
) -> StrengthPath:
    """Train along growing strengths, and leave the model as the smallest network that is good enough.

    The path ends where the network is as small as `keep`, where its accuracy has fallen by more than `max_drop`, where
    everything is dead, or with the last strength.

    Args:
        model: the network with its starting weights; afterwards it has those of the chosen point.
        train: `train(model, groups)` trains the model as it is, with an optimizer made for these groups.
        evaluate: `evaluate(model)` returns the accuracy, or any number of which more is better.
        example_inputs: what the model is called with, at least two samples.
        kind: what is to become zero: "units" (`UnitLasso`), "weights" (`L1`), "rows" (`GroupLasso` of rows), or a
            function of model and strength that returns groups.
        strengths: growing and positive; by default doubled from 0.4 to 25.6 times the strength at which the penalty of
            the dense weights is 1.
        keep: wanted size: the share of parameters that the shrunk model has, or for weights and rows the share of
            weights that are not zero. None to continue as long as the accuracy allows.
        max_drop: how much accuracy may be lost against the best network of the path so far.
        refine: how many strengths to try between the last good one and the first that lost too much accuracy.
        folder: where to keep a checkpoint of each point, and to continue from.
        settings: plain data that the training depends on, such as epochs and seed: a folder with
            other settings gives an error.
        watch: called with each finished point.

    Raises:
        ValueError: strengths that do not grow, or are zero or infinite; a size outside (0, 1).
        PathError: the folder belongs to another path.
    """
    _check(strengths, keep, max_drop, refine)
    units = find_units(model, example_inputs)
    run = _Run(model, train, evaluate, example_inputs, units, kind)
    store = Folder(folder, _facts(model, kind, settings))
    walk = _Walk(run, store, keep, max_drop, watch)
    walk.start()
    wanted = [factor * run.reference() for factor in DEFAULT_STEPS] if strengths is None else list(strengths)
    for strength in wanted:
        if walk.ended or not walk.take(strength):
            break
    else:
        walk.end(f"The last strength {wanted[-1]:.3g} was reached; larger ones may give a smaller network.")
    for _ in range(refine):
        if walk.ended:
            break
        walk.take_between()
    if not walk.ended:
        walk.end(walk.advice())
    model.load_state_dict(walk.good)
    return walk.path


class _Walk:
    """The points so far, the weights of the last good one, and the strength that was too much."""

    def __init__(
        self, run: _Run, store: Folder, keep: float | None, max_drop: float, watch: Callable[[Point], None]
    ) -> None:
        self.run, self.store, self.keep, self.max_drop, self.watch = run, store, keep, max_drop, watch
        self.path = StrengthPath()
        self.good: dict[str, Any] = {}
        self.failed: Point | None = None
        self.dead = False

    @property
    def ended(self) -> bool:
        return bool(self.path.reason)

    def end(self, reason: str) -> None:
        """Store why the path ends, unless there is a reason already."""
        self.path.reason = self.path.reason or reason

    def start(self) -> None:
        """The dense network."""
        self._add(0.0)
        self.good = self.run.state()

    def take(self, strength: float) -> bool:
        """Train at a strength from where the model is; whether it is good enough."""
        point = self._add(strength)
        self.dead = self.run.everything_dead()
        best = max(one.accuracy for one in self.path.points)  # not always the first: warm starts continue training
        if self.dead or not point.accuracy >= best - self.max_drop:
            self.failed = point
            if self.dead:
                self.end(self.advice())
            return False
        self.good, self.path.chosen = self.run.state(), len(self.path.points) - 1
        if self.keep is not None and point.size <= self.keep:
            self.end(f"Size {point.size:.1%} reached {self.keep:.1%} at accuracy {point.accuracy:.2%}.")
        return True

    def take_between(self) -> None:
        """Between the last good strength and the one that was too much, from the last good weights."""
        self.run.model.load_state_dict(self.good)
        self.take(self._middle())

    def _add(self, strength: float) -> Point:
        point = self.run.point(strength, self.store, len(self.path.points))
        self.path.points.append(point)
        self.watch(point)
        return point

    def _middle(self) -> float:
        low, high = self.path.best.strength, self.failed.strength
        return math.sqrt(low * high) if low else high / 4

    def advice(self) -> str:
        """What happened at the strength that was too much, and what to try."""
        last, best = self.failed, self.path.best
        where = f"at strength {last.strength:.3g}"
        happened = (
            f"Everything is dead {where}: the output no longer depends on the input"
            if self.dead
            else f"Accuracy fell to {last.accuracy:.2%} {where}, by more than {self.max_drop:.2%}"
        )
        kept = f"The last good network is kept: strength {best.strength:.3g}, accuracy {best.accuracy:.2%}, "
        missed = "" if self.keep is None or best.size <= self.keep else f" The size {self.keep:.1%} was not reached."
        hint = f"Try strengths up to {self._middle():.3g}, more epochs for each, or a larger loss of accuracy"
        return f"{happened}. {kept}size {best.size:.1%}.{missed} {hint}."


class _Run:
    """Training, measuring and the state of the network along a path."""

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
        with torch.no_grad():
            values = [
                float(value_all(group["regularizer"], [param.detach() for _, param in group["params"]]))
                for group in self.groups(1.0)
                if group["regularizer"] is not None
            ]
        return 1 / max(sum(values), 1e-12)

    def point(self, strength: float, store: Folder, index: int) -> Point:
        """Train at a strength, or take the point from the folder."""
        saved = store.load(index, strength)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            return Point(**saved["point"])
        self.train(self.model, self.groups(strength))
        clear_dead(self.model, self.units)
        found = self._measured(strength)
        store.save(index, strength, found, self.state())
        return found

    def _measured(self, strength: float) -> Point:
        report = sparsity_report(self.model, self.units)
        accuracy = float(self.evaluate(self.model))
        small = shrink(self.model, self.inputs, units=self.units, timing_seconds=0).report.after.parameters
        size = small / self.total if self.structured else 1 - report.zeros
        return Point(strength, accuracy, size, report.zeros, small, report.dead_units, report.units)

    def state(self) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def everything_dead(self) -> bool:
        """Whether the output no longer depends on the input."""
        found = outputs(self.model, self.inputs)
        return all(bool((one == one[:1]).all()) for one in found if one.ndim and len(one) > 1) and any(
            one.ndim and len(one) > 1 for one in found
        )


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def _facts(model: nn.Module, kind: Kind, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a folder and a path must have in common."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    name = kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__name__)
    return {"format": FORMAT, "kind": name, "tensors": shapes, **dict(settings or {})}


def _check(strengths: Sequence[float] | None, keep: float | None, max_drop: float, refine: int) -> None:
    if strengths is not None:
        values = list(strengths)
        growing = all(a < b for a, b in pairwise(values))
        if not values or not all(0 < value < math.inf for value in values) or not growing:
            raise ValueError(
                f"strengths must be positive, finite and growing, at least one, got {values}; the dense network is "
                "trained first in any case."
            )
    if keep is not None and not 0 < keep < 1:
        raise ValueError(f"keep must be a share between 0 and 1, got {keep!r}; None to let the accuracy decide.")
    if not 0 <= max_drop < math.inf:
        raise ValueError(f"max_drop must be a number >= 0, got {max_drop!r}.")
    if refine < 0:
        raise ValueError(f"refine must be a number >= 0, got {refine!r}.")


__all__ = ["PathError", "Point", "StrengthPath", "strength_path"]
