"""How sparse a network is, layer by layer: cheap enough for every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from proxsps._install import require
from proxsps.optim.hints import warn
from proxsps.sparsity.graph import shortened
from proxsps.sparsity.tables import Table
from proxsps.sparsity.units import Units

# Advice for a strength at which a network dies.
WEAKER = 'Train again with a smaller strength: start with lam="auto", or let strength_path find it.'
MOST = 0.9  # share of a layer's units; where more are dead, the network has often lost what it needs


class LayerSparsity(NamedTuple):
    """Counts of one weight tensor; rows are its slices along the first dim, units those of `find_units`."""

    name: str
    entries: int
    zeros: int
    rows: int
    dead_rows: int
    units: int
    dead_units: int


@dataclass(frozen=True)
class SparsityReport:
    """Counts of all weight tensors; biases and normalisation layers are not counted."""

    layers: tuple[LayerSparsity, ...]
    units: int = 0
    dead_units: int = 0

    @property
    def zeros(self) -> float:
        """Share of weights that are exactly zero."""
        return _share(sum(layer.zeros for layer in self.layers), sum(layer.entries for layer in self.layers))

    @property
    def dead_rows(self) -> float:
        """Share of rows that are exactly zero."""
        return _share(sum(layer.dead_rows for layer in self.layers), sum(layer.rows for layer in self.layers))

    @property
    def dead_channels(self) -> float:
        """Share of units that are exactly zero in all their tensors; NaN if no units were passed."""
        return self.dead_units / self.units if self.units else float("nan")

    def summary(self) -> dict[str, float]:
        """The three shares by name, without unknown ones."""
        shares = {"zeros": self.zeros, "dead_rows": self.dead_rows, "dead_units": self.dead_channels}
        return {name: share for name, share in shares.items() if share == share}

    @property
    def table(self) -> Table:
        """One row for each layer."""
        rows = [
            [
                layer.name,
                layer.entries,
                f"{_share(layer.zeros, layer.entries):.1%}",
                f"{layer.dead_rows}/{layer.rows}",
                f"{layer.dead_units}/{layer.units}" if layer.units else "-",
            ]
            for layer in self.layers
        ]
        return Table(["weight", "entries", "zeros", "dead rows", "dead units"], rows)

    @property
    def frame(self) -> Any:
        """One row for each layer, as a pandas DataFrame of counts."""
        require("SparsityReport.frame", "sparsity", "pandas")
        import pandas

        return pandas.DataFrame(list(self.layers), columns=list(LayerSparsity._fields))

    @property
    def notes(self) -> list[str]:
        """What the table does not say: a network that is dead, or nearly so."""
        if self.units and self.dead_units == self.units:
            return [f"Everything is dead: all {self.units:,} units are zero. {WEAKER}"]
        if self.layers and all(layer.zeros == layer.entries for layer in self.layers):
            return [f"Everything is dead: all weights are zero. {WEAKER}"]
        return dying({layer.name: (layer.dead_units, layer.units) for layer in self.layers})

    def __str__(self) -> str:
        return "\n".join([str(self.table), *self.notes])

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(self.table, *self.notes)


def sparsity_report(model: nn.Module, units: Units | None = None) -> SparsityReport:
    """Count zeros, dead rows and dead units of all weights with two dims or more.

    It warns if more than 90 % of the units of a layer are dead, or all weights are zero.

    Args:
        model: any module.
        units: the result of `find_units`, to count dead units (channels) too.

    Examples:
        >>> import torch
        >>> from proxsps.sparsity import sparsity_report
        >>> model = torch.nn.Linear(4, 3)
        >>> _ = model.weight.data[1].zero_()
        >>> print(sparsity_report(model))
        weight  entries  zeros  dead rows  dead units
        ------  -------  -----  ---------  ----------
        weight       12  33.3%  1/3        -
    """
    report = counted(model, units)
    for note in report.notes:
        warn(note)
    return report


@torch.no_grad()
def counted(model: nn.Module, units: Units | None = None) -> SparsityReport:
    """As `sparsity_report`, without a warning."""
    names, counts = [], []
    params = dict(model.named_parameters())
    dead = None if units is None else _dead(params, units)
    members = {} if units is None else units.members
    for name, param in params.items():
        if param.ndim < 2:
            continue
        alive = param != 0
        found = [alive.sum(), alive.flatten(1).any(1).sum()]
        of_units = torch.zeros(2, dtype=torch.long, device=param.device)
        if dead is not None and name in members:
            ids = torch.from_numpy(members[name].ids.copy()).to(param.device)
            ids = ids[ids >= 0]
            of_units = torch.stack([of_units[0] + len(ids), dead.to(param.device)[ids].sum()])
        names.append((name, param.numel(), len(param)))
        counts.append(torch.cat([torch.stack(found), of_units]))
    # One transfer for all numbers: reading them one by one would wait for the device each time.
    table = torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []
    layers = tuple(
        LayerSparsity(name, entries, entries - nonzero, rows, rows - live, of, gone)
        for (name, entries, rows), (nonzero, live, of, gone) in zip(names, table, strict=True)
    )
    return SparsityReport(layers, 0 if units is None else len(units), 0 if dead is None else int(dead.sum()))


def dying(counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """A note on layers that have lost most of their units, by their numbers of dead and of all units."""
    names = [f"{name} ({dead} of {units})" for name, (dead, units) in counts.items() if dead > MOST * units]
    text = f"More than {MOST:.0%} of the units are dead in {shortened(names)}. Check the accuracy. If it fell: {WEAKER}"
    return [text] if names else []


def _dead(params: Mapping[str, Tensor], units: Units) -> Tensor:
    """Which of all units are zero in all their tensors."""
    alive = None
    for member in units.members.values():
        param = params[member.name]
        flags = (param != 0).movedim(member.dim, 0).flatten(1).any(1) if param.ndim > 1 else param != 0
        ids = torch.from_numpy(member.ids.copy()).to(param.device)
        alive = torch.zeros(len(units) + 1, dtype=torch.bool, device=param.device) if alive is None else alive
        # Index -1, of slices without a unit, is the last place, which is cut off.
        alive = alive.index_put((ids.to(alive.device),), flags.to(alive.device), accumulate=True)
    return torch.zeros(0, dtype=torch.bool) if alive is None else ~alive[:-1]


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


__all__ = ["LayerSparsity", "SparsityReport", "sparsity_report"]
