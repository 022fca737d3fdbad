"""Blocks with only a prox: it is called on whole tensors, and on tensors of one shape together if that is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.optim.blocks import plain, stored
from proxsps.optim.lists import widened
from proxsps.optim.proxes import Pile, piles
from proxsps.optim.rule import Heights, Table
from proxsps.optim.vectors.averages import Averages
from proxsps.regularizers._support import reading_numbers

Floats = Sequence[float]


class State(NamedTuple):
    """The numbers of a pile in this step."""

    x: Tensor
    g: Tensor
    d: Tensor
    p: Tensor  # D^-1 d
    D: Tensor | None  # the metric
    vs: list[Tensor | None]  # new averages of squares, tensor by tensor

    def step(self, alpha: float) -> Tensor | float:
        """The step size of the prox."""
        return alpha if self.D is None else alpha / self.D


class ProxPart:
    """Any regulariser, by its prox."""

    curved, mixes, points, entries = True, False, 1, 0

    def __init__(self, plan: Any, places: Sequence[int]) -> None:
        self._plan, self._blocks = plan, [plan.blocks[i] for i in places]
        self._piles = [pile for i, block in enumerate(self._blocks) for pile in piles(block, i)]
        tensors = [x for block in self._blocks for x in block.params]
        self._reads = plain(tensors) and stored(tensors)
        self._states: list[State] = []
        self._last: tuple[object, list[Tensor]] = (None, [])  # the point of the last evaluation, and y there

    def _wide(self, t: Tensor) -> Tensor:
        return t.double() if self._plan.exact else widened(t)

    def _state(self, pile: Pile) -> State:
        block = self._blocks[pile.block]
        xs, gs, ds, Ds, vs = [], [], [], [], []
        for i in pile.members:
            g = self._wide(block.slopes[i])
            d, D, v = self._averages(block, i).slopes(self._plan, g, lambda ts: self._wide(ts[0]))
            xs.append(self._wide(block.params[i]))
            gs.append(g)
            ds.append(d)
            Ds.append(D)
            vs.append(v)
        x, g, d = (pile.gather(ts) for ts in (xs, gs, ds))
        metric = None if Ds[0] is None else pile.gather([D for D in Ds if D is not None])
        return State(x, g, d, d if metric is None else d / metric, metric, vs)

    def _averages(self, block: Any, i: int) -> Averages:
        held = [[self._plan.entries_of(block, i, name)] for name in self._plan.averages]
        return Averages(held, self._plan.count_of(block, i))

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """Inner products of whole tensors, and heights at the points u."""
        self._states, self._last = list(map(self._state, self._piles)), (None, [])
        rows = [[0.0] * len(self._blocks) for _ in Table._fields]
        for pile, (x, g, d, p, D, _) in zip(self._piles, self._states, strict=True):
            q = g if D is None else g / D
            pairs = [(d, p), (d, x), (d * x, d * x), (g, x), (q, q)]
            numbers = [_dot(a, b) for a, b in pairs]
            if self._averages(self._blocks[pile.block], pile.members[0]).overflows(g):
                numbers[0] = math.nan
            for row, number in zip(rows, numbers, strict=False):
                row[pile.block] += number
        return rows, self.heights(alpha, u)

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u; every point takes a prox of all tensors."""
        heights, slopes = [], []
        for v in u:
            h = bend = 0.0
            for pile, own, y in zip(self._piles, self._states, self._points(alpha, v), strict=True):
                cap = alpha[pile.block]
                h += _dot(own.d, y - own.x)
                tangent = pile.tangent(own.x - v * cap * own.p, y, own.p, own.step(cap))
                bend -= math.nan if tangent is None else cap * _dot(own.d, tangent)
            heights.append(h)
            slopes.append(bend)
        return Heights(heights, slopes)

    def _points(self, alpha: Floats, u: float) -> list[Tensor]:
        """y(u) of all piles."""
        key = (tuple(alpha), u)
        if self._last[0] != key:
            with reading_numbers() if self._reads else nullcontext():
                found = [
                    pile.prox(own.x - u * alpha[pile.block] * own.p, own.step(alpha[pile.block]))
                    for pile, own in zip(self._piles, self._states, strict=True)
                ]
            self._last = (key, found)
        return self._last[1]

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        found = []
        for v in s:
            points = self._points([v * w for w in share], 1.0)
            found.append(sum([_dot(own.d, y - own.x) for own, y in zip(self._states, points, strict=True)]))
        return found

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- y(u); stores new averages."""
        points = self._points(alpha, u) if moves else [own.x for own in self._states]
        for pile, own, y in zip(self._piles, self._states, points, strict=True):
            block = self._blocks[pile.block]
            xs = [block.params[i] for i in pile.members]
            for i, d, v in zip(pile.members, pile.split(own.d, xs), own.vs, strict=True):
                self._averages(block, i).store(self._plan, d, v)
            torch._foreach_copy_(xs, pile.split(y, xs))


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.sum(a * b, dtype=torch.float64))
