"""A smaller model with the same output: torch-pruning removes dead channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from proxsps.optim.hints import warn
from proxsps.sparsity.counts import WEAKER, dying
from proxsps.sparsity.equality import expected_outputs, first_difference
from proxsps.sparsity.graph import Graph, Left
from proxsps.sparsity.inputs import constant, difference, duplicate, in_double, outputs
from proxsps.sparsity.measure import Cost, costs
from proxsps.sparsity.tables import Table
from proxsps.sparsity.units import Units, find_units


class ShrinkError(RuntimeError):
    """A smaller model whose output is not that of the large one. The large one was not changed."""


@dataclass(frozen=True)
class ShrinkReport:
    """What was removed, what was left, and the costs before and after.

    Attributes:
        before: cost of the large model.
        after: cost of the small one.
        removed: for each set of units, the number of removed units and of all units.
        left: layers whose units were not removed, and why.
        difference: largest difference of the outputs for the example inputs, relative to the largest output.
        collapsed: whether the output no longer depends on the input.
    """

    before: Cost
    after: Cost
    removed: dict[str, tuple[int, int]]
    left: tuple[Left, ...]
    difference: float
    collapsed: bool = False

    @property
    def table(self) -> Table:
        """Costs before and after."""
        rows: list[list[Any]] = []
        for name, old, new in zip(Cost._fields, self.before, self.after, strict=True):
            if math.isnan(old):  # not measured
                continue
            rows.append([name.replace("_", " "), old, new, f"{new / old:.1%}" if old else "-"])
        units = [sum(counts) for counts in zip(*self.removed.values(), strict=True)] or [0, 0]
        kept = units[1] - units[0]
        rows.append(["units", units[1], kept, f"{kept / units[1]:.1%}" if units[1] else "-"])
        return Table(["", "before", "after", "share"], rows)

    @property
    def notes(self) -> list[str]:
        """What the table does not say: a network that is dead, and what was not removed."""
        dead = [f"Everything is dead: the output no longer depends on the input. {WEAKER}"] if self.collapsed else []
        return [*(dead or dying(self.removed)), *map(str, self.left)]

    def __str__(self) -> str:
        lines = [str(self.table), f"Outputs differ by {self.difference:.1e} of the largest."]
        return "\n".join([*lines, *self.notes])


class Shrunk(NamedTuple):
    """The smaller model and the report about it."""

    model: nn.Module
    report: ShrinkReport


def shrink(model: nn.Module, example_inputs: Any, *, units: Units | None = None, timing_seconds: float = 1.0) -> Shrunk:
    """A copy of the model without its dead units; the model itself is not changed.

    A unit is dead if all its tensors are exactly zero (see `unit_groups`), so that its channel is zero for every
    input. One unit of a set stays, dead or not, since layers without channels do not run. The output is compared with
    that of the large model, for the example inputs and for variations of them (random, negated, scaled, shuffled), as
    far as the large model takes these. The model must take the same path for all inputs.

    Args:
        model: a model in plain torch.
        example_inputs: its inputs, as in `find_units`.
        units: the units, if `find_units` was called before.
        timing_seconds: how long to time both models; 0 for no timing.

    Raises:
        TraceError: the model cannot be called or traced.
        ShrinkError: the output changed.

    Warns:
        RuntimeWarning: everything is dead, so that the output no longer depends on the input.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from proxsps.sparsity import shrink
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> with torch.no_grad():
        ...     for tensor in model[0].parameters():
        ...         tensor[2:6] = 0.0
        >>> small, report = shrink(model, torch.randn(3, 4))
        >>> small[0], report.before.parameters, report.after.parameters
        (Linear(in_features=4, out_features=4, bias=True), 58, 30)
    """
    found = shrunk(model, example_inputs, units, timing_seconds)
    if found.report.collapsed:
        warn(found.report.notes[0])
    return found


def shrunk(model: nn.Module, example_inputs: Any, units: Units | None = None, timing_seconds: float = 0.0) -> Shrunk:
    """As `shrink`, without a warning."""
    units = find_units(model, example_inputs, frozen=True) if units is None else units
    dead = units.dead(model)
    small = duplicate(model)
    removed = _remove(small, example_inputs, units, dead)
    _put_back(model, small)
    apart = _check_equal(model, small, example_inputs)
    before, after = costs([model, small], example_inputs, timing_seconds)
    left = (*_almost_dead(model, units, dead), *units.left)
    collapsed = bool(dead) and any(map(np.all, dead)) and constant(outputs(model, example_inputs))
    return Shrunk(small, ShrinkReport(before, after, removed, left, apart, collapsed))


def load_shrunk(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Shrink the layers of a model to the sizes in a checkpoint of its shrunk form, and load that checkpoint.

    Args:
        model: a new large model; it is changed.
        state: `state_dict` of the model that `shrink` returned.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from proxsps.sparsity import load_shrunk
        >>> small = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> load_shrunk(model, small.state_dict())[0]
        Linear(in_features=4, out_features=3, bias=True)
    """
    for name, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                wanted = state.get(f"{name}.{key}" if name else key)
                if tensor is not None and wanted is not None and wanted.shape != tensor.shape:
                    new = tensor.new_empty(wanted.shape)
                    resized = nn.Parameter(new, tensor.requires_grad) if kind == "_parameters" else new
                    getattr(module, kind)[key] = resized
        _note_sizes(module)
    model.load_state_dict(state)
    return model


def _note_sizes(module: nn.Module) -> None:
    """Attributes of a layer that say how large its tensors are."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    elif isinstance(module, nn.modules.conv._ConvNd):
        first, second = weight.shape[:2]
        if module.groups > 1 and module.groups == module.out_channels:  # one filter for each channel
            module.groups = module.in_channels = module.out_channels = first
        else:
            outputs, inputs = (second, first) if module.transposed else (first, second)
            module.out_channels, module.in_channels = outputs, inputs * module.groups
    elif isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)):
        module.num_features = len(weight)
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(weight)


def _remove(small: nn.Module, inputs: Any, units: Units, dead: list[np.ndarray]) -> dict[str, tuple[int, int]]:
    removed = {one.name: (0, len(one)) for one in units.sets}
    chosen = {}
    for one, flags in zip(units.sets, dead, strict=True):
        gone = np.flatnonzero(flags)
        gone = gone[1:] if len(gone) == len(one) else gone
        if len(gone):
            chosen[one.name] = sorted(channel for unit in gone for channel in one.roots[unit])
            removed[one.name] = (len(gone), len(one))
    if chosen:
        graph = Graph(small, inputs)
        for name, channels in chosen.items():
            graph.remove(name, channels)
    return removed


def _put_back(model: nn.Module, small: nn.Module) -> None:
    """Modes and flags as in the large model: tracing needs others."""
    for (_, old), (_, new) in zip(model.named_modules(), small.named_modules(), strict=True):
        new.training = old.training
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    for name, param in small.named_parameters():
        param.requires_grad_(flags[name])
        param.grad = None


def _check_equal(model: nn.Module, small: nn.Module, inputs: Any) -> float:
    found = first_difference(in_double(small, inputs)[0], expected_outputs(*in_double(model, inputs)))
    if found is not None:
        reason = (
            "The forward pass takes another path for other inputs, but the units were found on one path: a model must "
            "not branch on data"
            if found.elsewhere
            else "The model depends on the number of its channels in a way that torch-pruning does not detect"
        )
        raise ShrinkError(
            f"The smaller model's output {found.text} for {found.name}, so it was not returned. {reason}; exclude "
            "these layers with find_units(..., exclude=...)."
        )
    return difference(outputs(model, inputs), outputs(small, inputs))


def _almost_dead(model: nn.Module, units: Units, dead: list[np.ndarray]) -> list[Left]:
    """Units whose weights are zero, but not their biases or normalisation: their channel is a constant, not zero."""
    params = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for one, flags, weights in zip(units.sets, dead, units.dead(model, weights_only=True), strict=True):
        almost = np.flatnonzero(weights & ~flags)
        if not len(almost):
            continue
        culprits = [
            member.name
            for member in one.members
            if params[member.name].ndim < 2
            and params[member.name].detach().cpu()[torch.from_numpy(np.isin(member.ids, almost))].any()
        ]
        listed = ", ".join(map(str, almost[:8])) + (", ..." if len(almost) > 8 else "")
        found.append(
            Left(
                one.layers,
                f"their weights are zero, but not {' and '.join(culprits)} (units {listed}); regularise these too, as "
                "unit_groups does",
                f"{len(almost)} units",
            )
        )
    return found


__all__ = ["ShrinkError", "ShrinkReport", "Shrunk", "load_shrunk", "shrink", "shrunk"]
