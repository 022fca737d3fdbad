"""A part of a plan on the host for blocks of rows, and for those with only a prox.

Numbers are floats. New averages of whole tensors are made before the sums, and stored by the write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.rule import Heights, Table
from proxsps.optim.vectors.averages import Averages
from proxsps.optim.vectors.proxes import Proxes
from proxsps.optim.vectors.rows import Rows
from proxsps.optim.vectors.searched import Floats


class WholePart:
    """Blocks of one kind that are searched."""

    curved, mixes, entries = True, False, 0

    def __init__(self, plan: Any, places: Sequence[int], kind: type[Rows] | type[Proxes]) -> None:
        self._plan, self._kind, self.points = plan, kind, kind.host_points
        self._given: list[Block] = [plan.blocks[i] for i in places]
        self._numbers = Numbers(torch.device("cpu"), host=True, exact=plan.exact)
        self._new: list[tuple[Averages, Tensor, Tensor | None]] = []  # d and v of each tensor

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, and heights at the points u."""
        table = {name: [0.0] * len(self._given) for name in Table._fields[:6]}
        self._blocks = [self._averaged(j, table) for j in range(len(self._given))]
        self._searched = None
        if not all([block.empty for block in self._blocks]):
            self._searched = self._kind(self._numbers, self._blocks, False)
            for j, (d_sq, d_dot_x) in enumerate(self._searched.sums()):
                table["d_sq"][j] += float(d_sq)
                table["d_dot_x"][j] += float(d_dot_x)
            table["noise_sq"] = self._searched.noise_sq()
        return list(table.values()), self.heights(alpha, u)

    def _averaged(self, j: int, table: dict[str, list[float]]) -> Block:
        """A block whose slopes are new averages; sums over its gradients go into the table."""
        block, plan = self._given[j], self._plan
        own = replace(block, directions=None, metrics=[])
        if not plan.averages:
            return own
        own.slopes = []
        for i, slope in enumerate(block.slopes):
            held = [[plan.entries_of(block, i, name)] for name in plan.averages]
            averages, g = Averages(held, plan.count_of(block, i)), self._numbers.entries(slope)
            d, D, v = averages.slopes(plan, g, lambda tensors: self._numbers.entries(tensors[0]))
            self._new.append((averages, d, v))
            own.slopes.append(d)
            if D is not None:
                own.metrics.append(D)
            x, q = self._numbers.entries(block.params[i]), g if D is None else g / D
            table["g_dot_x"][j] += float(torch.sum(g * x, dtype=torch.float64))
            table["g_sq"][j] += float(torch.sum(q * q, dtype=torch.float64))
            if averages.overflows(g):
                table["d_sq"][j] = math.nan
        if own.metrics:
            own.directions = [d / D for d, D in zip(own.slopes, own.metrics, strict=True)]
        return own

    def _heights(self, caps: Floats, u: Floats, reach: Floats, slopes: bool) -> tuple[list[float], list[float]]:
        if self._searched is None or not u:
            return [0.0] * len(u), [0.0] * len(u)
        for block, cap in zip(self._blocks, caps, strict=True):
            block.alpha = cap
        return self._searched.host_heights(u, reach, slopes)

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u."""
        return Heights(*self._heights(alpha, u, [1.0] * len(u), True))

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        return self._heights(share, [1.0] * len(s), s, False)[0]

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- y(u); stores new averages."""
        for averages, d, v in self._new:
            averages.store(self._plan, d, v)
        if self._searched is not None and moves:
            for block, cap in zip(self._blocks, alpha, strict=True):
                block.alpha = cap
            self._searched.write(u, 1.0, True)
