"""The units of a network, and parameter groups with a unit lasso on them.

torch-pruning says which layers belong together. A trial checks that units can really be removed: on a copy with random
weights half of the units are set to zero and removed, then the other half, and the output must not change. So layers
that are not a plain product of channels (a padded shortcut, a normalisation over channels, an activation that does not
keep zero) are found without special rules, and are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from proxsps.regularizers.units import UnitLasso, UnitTensor
from proxsps.sparsity.equality import expected_outputs, first_difference
from proxsps.sparsity.graph import MIXING, Graph, Left, Member, UnitSet, shortened
from proxsps.sparsity.groups import ParameterGroups, with_penalty_one
from proxsps.sparsity.inputs import TraceError, duplicate, first_line, in_double, outputs
from proxsps.sparsity.tables import Table


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a model by sets, and the layers that have none."""

    sets: tuple[UnitSet, ...]
    left: tuple[Left, ...]

    def __len__(self) -> int:
        return sum(map(len, self.sets))

    @property
    def members(self) -> dict[str, Member]:
        """Each parameter with the units of its slices, numbered over all sets."""
        found: dict[str, Member] = {}
        first = 0
        for one in self.sets:
            for member in one.members:
                ids = np.where(member.ids < 0, -1, member.ids + first)
                if member.name in found:  # behind a concatenation, one tensor has channels of several sets
                    ids = np.where(ids < 0, found[member.name].ids, ids)
                found[member.name] = Member(member.name, member.dim, ids)
            first += len(one)
        return found

    def dead(self, model: nn.Module, weights_only: bool = False) -> list[np.ndarray]:
        """For each set, which units are exactly zero: in all their tensors, or in their weight matrices only."""
        params = dict(model.named_parameters(remove_duplicate=False))
        flags = []
        for one in self.sets:
            alive = np.zeros(len(one), dtype=bool)
            for member in one.members:
                if weights_only and params[member.name].ndim < 2:
                    continue
                alive[member.ids[(member.ids >= 0) & _nonzero(params[member.name], member.dim)]] = True
            flags.append(~alive)
        return flags

    @property
    def table(self) -> Table:
        """One row for each set, and one for layers without units."""
        rows: list[list[Any]] = [[one.name, len(one), shortened(one.layers), ""] for one in self.sets]
        rows += [["-", 0, shortened(left.layers), left.reason] for left in self.left]
        return Table(["set", "units", "layers", "not removed because"], rows)

    def __str__(self) -> str:
        return str(self.table)

    def __rich__(self) -> Any:
        return self.table


def find_units(
    model: nn.Module, example_inputs: Any, *, exclude: str | Iterable[str] = (), frozen: bool = False
) -> Units:
    """The units of a model that can be removed, once they are zero, without changing the output.

    Args:
        model: a model in plain torch; it is not changed.
        example_inputs: its inputs: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
            One or two samples are enough.
        exclude: names of layers, with wildcards, whose units are not removed.
        frozen: whether to include units with parameters that are not trained.

    Raises:
        TraceError: the model cannot be called or traced.
        ValueError: a pattern matches no layer.
    """
    outputs(model, example_inputs)  # so that an error of the call is not reported as one of tracing
    sets, left = Graph(duplicate(model), example_inputs).sets()
    places = {name: place for place, (name, _) in enumerate(model.named_modules())}
    sets.sort(key=lambda one: min(places.get(layer, len(places)) for layer in one.layers))
    kept, dropped = _excluded(sets, [exclude] if isinstance(exclude, str) else list(exclude), model)
    left += dropped
    fixed = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    candidates = []
    for one in kept:
        if len(one) < 2:
            left.append(Left(one.layers, "there is only one unit"))
        elif not frozen and fixed & {member.name for member in one.members}:
            left.append(Left(one.layers, "some of the parameters are frozen"))
        else:
            candidates.append(one)
    return Units(tuple(_tried(model, example_inputs, candidates, left)), tuple(left))


def unit_groups(
    model: nn.Module,
    example_inputs: Any,
    lam: float | Literal["auto"] = "auto",
    *,
    exclude: str | Iterable[str] = (),
    weights: Literal["size", "one"] = "size",
    units: Units | None = None,
) -> ParameterGroups:
    """Two parameter groups: the tensors of all units under one `UnitLasso`, and the rest without a regulariser.

    Args:
        model: as in `find_units`.
        example_inputs: as in `find_units`.
        lam: strength; "auto" for the one at which the penalty of the present weights is 1, a good start for a search.
        exclude: as in `find_units`.
        weights: w_g of a unit: the square root of its size, or one.
        units: the units, if `find_units` was called before.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from proxsps import ProxSPS
        >>> from proxsps.sparsity import unit_groups
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = ProxSPS(unit_groups(model, torch.zeros(1, 4), lam=1e-3))
        >>> len(optimizer.param_groups[0]["params"])  # weight and bias of the first layer make 8 units
        2
    """
    if (lam != "auto") if isinstance(lam, str) else not 0 < lam < math.inf:
        raise ValueError(
            f"unit_groups: the strength lam must be a finite number > 0 or 'auto', got {lam!r}; for training without a "
            "penalty pass the model's parameters to the optimizer."
        )
    if weights not in ("size", "one"):
        raise ValueError(f"weights must be 'size' or 'one', got {weights!r}.")
    units = find_units(model, example_inputs, exclude=exclude) if units is None else units
    if not units.sets:
        raise ValueError("The model has no units that could be removed. " + " ".join(map(str, units.left)))
    params = dict(model.named_parameters())
    found = units.members
    members = {name: found[name] for name in params if name in found}
    tensors = tuple(UnitTensor(params[name].shape, member.dim, member.ids) for name, member in members.items())
    equal = {"weights": np.ones(len(units))} if weights == "one" else {}
    phi = UnitLasso(1.0 if lam == "auto" else lam, tensors, **equal)
    groups = ParameterGroups([{"params": [(name, params[name]) for name in members], "regularizer": phi}])
    rest = [(name, param) for name, param in params.items() if name not in members and param.requires_grad]
    if rest:
        groups.append({"params": rest, "regularizer": None})
    groups.units = units
    return with_penalty_one(groups) if lam == "auto" else groups


@torch.no_grad()
def clear_dead(model: nn.Module, units: Units) -> None:
    """Set the weights that multiply dead units to zero: products with an exact zero, so the output stays the same."""
    params = dict(model.named_parameters(remove_duplicate=False))
    for one, dead in zip(units.sets, units.dead(model), strict=True):
        for reader in one.readers:
            slices = np.flatnonzero(dead[reader.ids] & (reader.ids >= 0))
            param = params[reader.name]
            param.index_fill_(reader.dim, torch.from_numpy(slices).to(param.device), 0)


def _excluded(sets: list[UnitSet], patterns: list[str], model: nn.Module) -> tuple[list[UnitSet], list[Left]]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_modules()):
            known = ", ".join(layer for one in sets for layer in one.layers[:1])
            raise ValueError(f"exclude={pattern!r} matches no layer of the model. Layers with units: {known}.")
    kept, left = [], []
    for one in sets:
        named = [pattern for pattern in patterns if any(fnmatchcase(layer, pattern) for layer in one.layers)]
        if named:
            left.append(Left(one.layers, f"exclude={named[0]!r} names it"))
        else:
            kept.append(one)
    return kept, left


def _nonzero(param: Tensor, dim: int) -> np.ndarray:
    """Which slices along a dim have an entry that is not zero."""
    other = tuple(d for d in range(param.ndim) if d != dim)
    flags = param.detach() != 0
    return (flags.any(other) if other else flags).cpu().numpy()


# Trials


def _tried(model: nn.Module, inputs: Any, sets: list[UnitSet], left: list[Left]) -> list[UnitSet]:
    """The sets that can be removed; the others are added to `left`."""
    trial = _Trial(model, inputs)
    doubtful = [one for one in sets if _mixing(one)]
    sure = [one for one in sets if not _mixing(one)]
    good = {one.name for part in ([one] for one in doubtful) for one in _halved(trial, part, left)}
    good |= {one.name for one in _halved(trial, sure, left)}
    return [one for one in sets if one.name in good]


def _mixing(one: UnitSet) -> str | None:
    return next((why for kind, why in MIXING.items() for name in one.kinds if kind.lower() in name.lower()), None)


def _halved(trial: _Trial, sets: Sequence[UnitSet], left: list[Left]) -> list[UnitSet]:
    """Try all sets at once, and halves of them if that fails."""
    if not sets:
        return []
    why = trial.fails(sets)
    if why is None:
        return list(sets)
    if len(sets) == 1:
        left.append(Left(sets[0].layers, f"a trial failed: {_mixing(sets[0]) or why}"))
        return []
    middle = len(sets) // 2
    return _halved(trial, sets[:middle], left) + _halved(trial, sets[middle:], left)


class _Trial:
    """A copy of the model with random weights, in double precision if it runs in it."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model, self.inputs = in_double(model, inputs)
        self._randomize()

    @torch.no_grad()
    def _randomize(self) -> None:
        """Weights as at a start, so that the trial does not depend on how far training has come."""
        generator = torch.Generator().manual_seed(0)
        for param in self.model.parameters():
            if param.is_floating_point():
                fan_in = max(param[0].numel(), 1) if param.ndim > 1 else 1
                values = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.copy_(values * (2 / fan_in) ** 0.5 if param.ndim > 1 else 0.5 + 0.25 * values)

    def fails(self, sets: Sequence[UnitSet]) -> str | None:
        """Try to remove a random half of the units, and the other half, so that each unit is removed once."""
        rng = np.random.default_rng(0)
        orders = [rng.permutation(len(one)) for one in sets]
        halves = [order[: len(order) // 2] for order in orders], [order[len(order) // 2 :] for order in orders]
        return self._fails(sets, halves[0]) or self._fails(sets, halves[1])

    def _fails(self, sets: Sequence[UnitSet], chosen: Sequence[np.ndarray]) -> str | None:
        """Set units to zero, remove them, and compare; None if nothing changes."""
        model = duplicate(self.model)
        params = dict(model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for one, units in zip(sets, chosen, strict=True):
                for member in one.members:
                    slices = np.flatnonzero(np.isin(member.ids, units))
                    param = params[member.name]
                    param.index_fill_(member.dim, torch.from_numpy(slices).to(param.device), 0)
        try:
            expected = expected_outputs(model, self.inputs)
        except TraceError as error:
            return f"with random weights: {error}"
        try:
            graph = Graph(model, self.inputs)
            for one, units in zip(sets, chosen, strict=True):
                graph.remove(one.name, sorted(channel for unit in units for channel in one.roots[unit]))
            found = first_difference(model, expected)
        except Exception as error:  # a model may raise anything with fewer channels than it expects
            cause = error.__cause__ if isinstance(error, TraceError) and error.__cause__ else error
            return f"the model does not run with fewer of these channels ({first_line(cause)}){_advice(cause)}"
        if found is None:
            return None
        if found.elsewhere:
            return f"for {found.name} the output {found.text}: the forward pass takes another path for other inputs"
        return f"zero units change the output (it {found.text}), so they cannot be left out"


def _advice(error: BaseException) -> str:
    if "shapes cannot be multiplied" in str(error):
        return "; the forward pass has a fixed size: instead of x.view(-1, n) write x.flatten(1)"
    return "; the forward pass has a fixed size" if "is invalid for input of size" in str(error) else ""


__all__ = ["Units", "clear_dead", "find_units", "unit_groups"]
