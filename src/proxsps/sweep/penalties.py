"""Regularisers other than the squared l2 norm, for runs that share a tensor program.

Runs with equal regularisers are stepped together. A regulariser that treats all entries in the same way is applied to
all parameters of a run as one row; others need the shapes of the parameters, and their runs are run one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from proxsps import runs
from proxsps.regularizers import Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Scalar
from proxsps.sweep.spec import RunSpec

Key = TypeVar("Key", bound=Hashable)


def is_uniform(phi: Regularizer) -> bool:
    """Whether a regulariser treats every entry in the same way, in any tensor."""
    structure = phi.structure((1,))
    if phi.joint or not isinstance(structure, Entries | Quadratic):
        return False
    if isinstance(structure, Quadratic):
        return structure.center is None and _are_numbers(structure.lam)
    return isinstance(structure.psi, Scalar) and _are_numbers(*structure.psi)


def _are_numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)


class Move(NamedTuple):
    """The new points of some runs."""

    rows: Tensor  # which runs
    points: Tensor  # shape (len(rows), n)
    roots: Tensor  # of their models, shape (len(rows),)


class Penalties:
    """The regularisers of a batch, without the squared l2 norm that `RunSpec` has by default."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        own = [(i, spec) for i, spec in enumerate(specs) if spec.regularizer is not None]
        self._all = _grouped((spec.phi, i) for i, spec in own)
        self._coupled = _grouped((spec.phi, i) for i, spec in own if spec.definition.coupled)
        self._proximal = _grouped(((spec.phi, spec.method), i) for i, spec in own if not spec.definition.coupled)

    def couple(self, x: Tensor, d: Tensor, values: Tensor) -> Tensor:
        """Add subgradients to the slopes, in place; returns the values plus those of the regularisers."""
        for phi, rows in self._coupled:
            part = x[rows]
            d[rows] += phi.subgradient(part)
            values = values.index_add(0, rows, _values(phi, part))
        return values

    def add(self, x: Tensor, values: Tensor) -> Tensor:
        """The values plus those of all regularisers."""
        for phi, rows in self._all:
            values = values.index_add(0, rows, _values(phi, x[rows]))
        return values

    def steps(self, x: Tensor, gap: Tensor, d: Tensor, alpha: Tensor, rules: Mapping[str, runs.Rule]) -> list[Move]:
        """The steps of all runs that apply their regulariser by its prox."""
        moves = []
        for (phi, method), rows in self._proximal:
            points, decision = runs.step(x[rows], gap[rows], d[rows], alpha[rows], phi, rules[method])
            moves.append(Move(rows, points, decision.root))
        return moves


def _grouped(pairs: Iterable[tuple[Key, int]]) -> list[tuple[Key, Tensor]]:
    """The rows of each key."""
    found: dict[Key, list[int]] = defaultdict(list)
    for key, row in pairs:
        found[key].append(row)
    return [(key, torch.tensor(rows)) for key, rows in found.items()]


def _values(phi: Regularizer, x: Tensor) -> Tensor:
    """One value for each row."""
    values: Tensor = vmap(phi.value)(x) if phi.traceable else torch.stack([phi.value(row) for row in x])
    return values
