"""Regularisers other than the squared l2 norm, for runs that share a tensor program.

Runs with equal regularisers are stepped together. A regulariser that treats all entries in the same way is applied to
all parameters of a run as one row; others need the shapes of the parameters, and their runs are run one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from proxsps import runs
from proxsps.regularizers import Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Scalar
from proxsps.sweep.spec import RunSpec

Move = tuple[Tensor, Tensor, Tensor]  # some runs, their new points (runs, n), and the roots of their models


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


class Penalties:
    """The regularisers of a batch, without the squared l2 norm that `RunSpec` has by default."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        rows: defaultdict[tuple[Regularizer, str, bool], list[int]] = defaultdict(list)
        for i, spec in enumerate(specs):
            if spec.regularizer is not None:
                rows[spec.phi, spec.method, spec.definition.coupled].append(i)
        self._groups = [(*key, torch.tensor(found)) for key, found in rows.items()]

    def couple(self, x: Tensor, d: Tensor, values: Tensor) -> Tensor:
        """Add subgradients to the slopes, in place; returns the values plus those of the regularisers."""
        for phi, _, coupled, rows in self._groups:
            if coupled:
                d[rows] += phi.subgradient(x[rows])
                values = values.index_add(0, rows, _values(phi, x[rows]))
        return values

    def add(self, x: Tensor, values: Tensor) -> Tensor:
        """The values plus those of all regularisers."""
        for phi, _, _, rows in self._groups:
            values = values.index_add(0, rows, _values(phi, x[rows]))
        return values

    def steps(self, x: Tensor, gap: Tensor, d: Tensor, alpha: Tensor, rules: Mapping[str, runs.Rule]) -> list[Move]:
        """The steps of all runs that apply their regulariser by its prox."""
        moves = []
        for phi, method, coupled, rows in self._groups:
            if not coupled:
                points, decision = runs.step(x[rows], gap[rows], d[rows], alpha[rows], phi, rules[method])
                moves.append((rows, points, decision.root))
        return moves


def _values(phi: Regularizer, x: Tensor) -> Tensor:
    """One value for each row."""
    values: Tensor = vmap(phi.value)(x) if phi.traceable else torch.stack([phi.value(row) for row in x])
    return values
