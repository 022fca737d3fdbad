"""From dense to sparse: a path over the strength; each point starts from the previous one.

The first point is trained without a regulariser. A finished point is written to disk, so that the same call continues
where an interrupted one stopped. Files hold tensors and plain data with a digest; nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from proxsps._install import require
from proxsps.problems.fingerprint import fingerprint
from proxsps.sparsity.path_run import Evaluate, Kind, MakeOptimizer, Run, Train
from proxsps.sparsity.points import Folder, PathError, Point, State
from proxsps.sparsity.tables import Table
from proxsps.sparsity.units import find_units

FORMAT = 3
# Times the strength at which the penalty of the dense weights is 1. Steps of a factor of two are too coarse: units die
# slowly, and a network that has time to lose them at a lower strength is both smaller and better.
DEFAULT_STEPS = tuple(0.8 * 2 ** (step / 2) for step in range(11))


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
        require("StrengthPath.frame", "sparsity", "pandas")
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
    optimizer: MakeOptimizer | None = None,
    kind: Kind = "units",
    strengths: Sequence[float] | None = None,
    keep: float | None = None,
    max_drop: float = 0.01,
    patience: int = 2,
    refine: int = 2,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    watch: Callable[[Point], None] = lambda point: None,
) -> StrengthPath:
    """Train along growing strengths, and leave the model as the smallest network that is good enough.

    The path ends when the network is as small as `keep`, when its accuracy has stayed below the best by more than
    `max_drop`, when all units are dead, or with the last strength.

    Args:
        model: the network with its starting weights; afterwards it has the weights of the chosen point.
        train: `train(model, optimizer)` trains the model from its current weights.
        evaluate: `evaluate(model)` returns the accuracy, or any number for which larger is better. It is used to choose
            the network, so score the chosen one on other data.
        example_inputs: inputs of the model, at least two samples.
        optimizer: `optimizer(groups)` makes the optimizer, for instance `ProxSPSAdam`. It is made once and continues
            along the path, so that steps without a learning rate need not find their length again at each strength.
            None: `train(model, groups)` gets the parameter groups of a strength instead, and makes its own.
        kind: what becomes zero: "units" (`UnitLasso`), "weights" (`L1`), "rows" (`GroupLasso` of rows), or a
            function of model and strength that returns groups.
        strengths: growing and positive; by default from 0.8 to 25.6 times the strength at which the penalty of the
            dense weights is 1, each larger than the one before by a factor of the square root of two.
        keep: wanted size: the share of parameters that the shrunk model has, or for weights and rows the share of
            weights that are not zero. None to continue as long as the accuracy allows.
        max_drop: how much accuracy may be lost, compared with the best network of the path so far.
        patience: the path ends after this many strengths in a row that lost too much accuracy. An accuracy on few
            samples is noisy, so a single one says little.
        refine: how many strengths to try between the last good one and the next that lost too much accuracy.
        folder: where to keep a checkpoint of each point, and to continue from. A folder that was written with other
            starting weights or another `kind` gives an error.
        settings: plain data that the training depends on, such as epochs and seed: a folder with
            other settings gives an error.
        watch: called with each finished point.

    Raises:
        ValueError: strengths that do not grow, or are zero or infinite; a size outside (0, 1); a dense network whose
            accuracy or weights are not finite.
        PathError: the folder belongs to another path, a file in it is damaged, or a point cannot be written.
    """
    _check(strengths, keep, max_drop, patience, refine)
    units = find_units(model, example_inputs)
    run = Run(model, train, evaluate, example_inputs, units, kind, optimizer)
    facts = {} if folder is None else {**_facts(model, kind, settings), "one optimizer": optimizer is not None}
    store = Folder(folder, facts, [name for name, _ in model.named_parameters()])
    walk = _Walk(run, store, keep, max_drop, watch)
    walk.start()
    wanted = [factor * run.reference() for factor in DEFAULT_STEPS] if strengths is None else list(strengths)
    walk.climb(wanted, patience)
    for _ in range(refine):
        if walk.ended:
            break
        walk.take_between()
    if not walk.ended:
        walk.end(walk.advice())
    model.load_state_dict(walk.good.model)
    return walk.path


class _Walk:
    """The points so far, the weights of the last good one, and the point at which the strength was too high."""

    failed: Point  # the last one that was too much; `take` sets it

    def __init__(
        self, run: Run, store: Folder, keep: float | None, max_drop: float, watch: Callable[[Point], None]
    ) -> None:
        self.run, self.store, self.keep, self.max_drop, self.watch = run, store, keep, max_drop, watch
        self.path = StrengthPath()
        self.good: State
        self.dead = False  # whether all units were dead at the failed point

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

    def climb(self, strengths: Sequence[float], patience: int) -> None:
        """Go up until `patience` strengths in a row were too much, or all units are dead."""
        missed: list[tuple[Point, bool]] = []
        for strength in strengths:
            if self.take(strength):
                missed.clear()
            else:
                missed.append((self.failed, self.dead))
            if self.ended or self.dead or len(missed) == patience:
                break
        if not missed:
            self.end(f"The last strength {strengths[-1]:.3g} was reached; larger ones may give a smaller network.")
            return
        self.failed, self.dead = missed[0]
        if self.dead:
            self.end(self.advice())

    def take(self, strength: float) -> bool:
        """Train at a strength from the current weights; returns whether the network is good enough."""
        point = self._add(strength)
        dead = self.run.everything_dead()
        best = max(one.accuracy for one in self.path.points)  # not always the first: warm starts continue training
        if dead or not point.accuracy >= best - self.max_drop:
            self.failed, self.dead = point, dead
            if math.isnan(point.accuracy):
                self.run.restore(self.good)  # no training recovers from weights that diverged
            return False
        self.good, self.path.chosen = self.run.state(), len(self.path.points) - 1
        if self.keep is not None and point.size <= self.keep:
            self.end(f"Size {point.size:.1%} reached {self.keep:.1%} at accuracy {point.accuracy:.2%}.")
        return True

    def take_between(self) -> None:
        """Try strengths between the last good one and the one that was too much, from the last good weights."""
        self.run.restore(self.good)
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
        happened = f"Accuracy fell to {last.accuracy:.2%} {where}, by more than {self.max_drop:.2%}"
        if self.dead:
            happened = f"Everything is dead {where}: the output no longer depends on the input"
        elif math.isnan(last.accuracy):
            happened = f"The accuracy is not a number {where}: the training diverged"
        kept = f"The last good network is kept: strength {best.strength:.3g}, accuracy {best.accuracy:.2%}, "
        missed = "" if self.keep is None or best.size <= self.keep else f" The size {self.keep:.1%} was not reached."
        hint = f"Try strengths up to {self._middle():.3g}, more epochs for each, or a larger max_drop"
        return f"{happened}. {kept}size {best.size:.1%}.{missed} {hint}."


def _facts(model: nn.Module, kind: Kind, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a folder and a path must have in common."""
    state = model.state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    name = kind if isinstance(kind, str) else getattr(kind, "__qualname__", type(kind).__name__)
    facts = {"format": FORMAT, "kind": name, "tensors": shapes, "starting weights": fingerprint(state)}
    if not isinstance(kind, str):
        facts["content of kind"] = fingerprint(kind)
    return {**facts, **dict(settings or {})}


def _check(strengths: Sequence[float] | None, keep: float | None, max_drop: float, patience: int, refine: int) -> None:
    if strengths is not None:
        values = list(strengths)
        growing = all(a < b for a, b in pairwise(values))
        if not values or not all(0 < value < math.inf for value in values) or not growing:
            raise ValueError(
                f"strengths must be positive, finite and growing, at least one, got {values}; the dense network is "
                "always trained first."
            )
    if keep is not None and not 0 < keep < 1:
        raise ValueError(f"keep must be a share between 0 and 1, got {keep!r}; None to let the accuracy decide.")
    if not 0 <= max_drop < math.inf:
        raise ValueError(f"max_drop must be a number >= 0, got {max_drop!r}.")
    if patience < 1:
        raise ValueError(f"patience must be a number >= 1, got {patience!r}.")
    if refine < 0:
        raise ValueError(f"refine must be a number >= 0, got {refine!r}.")


__all__ = ["PathError", "Point", "StrengthPath", "strength_path"]
