"""Blocks with spectral directions, by torch on the host: dense or not, of any dtype, on one rank or several."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.schedule_free import counted
from proxsps.optim.blocks import Block, plain
from proxsps.optim.lists import bundles, widened
from proxsps.optim.rule import Heights, Table
from proxsps.optim.second_point import to_averages, to_next_points
from proxsps.optim.spectral import PIECE, piles
from proxsps.optim.spreading import directions_of

Floats = Sequence[float]


class SpectralPart:
    """Blocks whose directions are orthogonalised averages of gradients.

    Tensors are processed a pile at a time, in all passes that touch them, while they are in the cache. New averages of
    gradients are computed again for the write, because a step may be skipped.

    Args:
        plan: the plan.
        opt: the optimizer.
        places: the positions of the blocks in the plan.
    """

    curved, mixes, points, entries = False, True, 1, 0
    most = PIECE  # entries of tensors that are processed together

    def __init__(self, plan: Any, opt: Any, places: Sequence[int]) -> None:
        self._plan, self._opt, self._blocks = plan, opt, [plan.blocks[i] for i in places]
        self._averages = [
            [plan.entries_of(block, i, "average") for i in range(len(block.params))] for block in self._blocks
        ]
        self._counts = [sum([x.numel() for x in block.params]) for block in self._blocks]
        self._piles = [(i, pile) for i, block in enumerate(self._blocks) for pile in self._divided(block)]
        self._moves: list[list[Tensor]] = []  # p of each pile
        self._share = 0.0

    def _divided(self, block: Block) -> list[list[int]]:
        """The tensors that are processed together."""
        if block.sharded or self._opt._ranks.size > 1:  # in one exchange of messages
            return [list(range(len(block.params)))]
        return piles(block.params, self.most if plain(block.ys) else 0)

    def set_share(self, share: float) -> None:
        """The share of the new point in the average."""
        self._share = share

    def _columns(self, i: int, pile: Sequence[int]) -> list[list[Tensor]]:
        """Old averages, gradients, z and y of a pile."""
        block, averages = self._blocks[i], self._averages[i]
        d = [averages[j] for j in pile]
        g = [widened(block.slopes[j]).to(averages[j].dtype) for j in pile]
        return [d, g, [block.params[j] for j in pile], [block.ys[j] for j in pile]]

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with directions, which are kept for the write."""
        rows = {name: [0.0] * len(self._blocks) for name in Table._fields[:-1]}  # without centres
        mu, squares = self._plan.momentum
        self._moves = []
        for i, pile in self._piles:
            old, gs, zs, ys = self._columns(i, pile)
            slopes = [torch.lerp(d, g, 1 - mu) for d, g in zip(old, gs, strict=True)]
            moves = directions_of(self._blocks[i], slopes, math.sqrt(squares), self._opt)
            for tensors in bundles((slopes, moves, gs, zs, ys), PIECE):
                for name, number in self._dots(tensors).items():
                    rows[name][i] += number
            self._moves.append(moves)
        rows["g_sq"] = self._counted(rows["g_sq"])
        return list(rows.values()), Heights([], [])

    def _dots(self, columns: Sequence[Sequence[Tensor]]) -> dict[str, float]:
        """The sums over tensors, with ||p||^2 as the last one, from d, p, g, z and y; d is overwritten."""
        found: dict[str, float] = defaultdict(float)
        for tensors in zip(*columns, strict=True):
            d, p, g, z, y = [t.reshape(-1).double() if self._plan.exact else t.reshape(-1) for t in tensors]
            for name, (a, b) in {"d_sq": (d, p), "d_dot_x": (d, z), "g_sq": (p, p)}.items():
                found[name] += float(torch.dot(a, b))
            found["g_dot_x"] += float(torch.dot(g, torch.sub(z, y, out=d)))  # new memory would not be in the cache
        return found

    def _counted(self, p_sq: Floats) -> list[float]:
        """What the directions of each block count in the distance cap."""
        squares = self._plan.momentum[1]
        return [counted(own / squares, n) for own, n in zip(p_sq, self._counts, strict=True)]

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """z <- keep z + move p, and y; stores new averages."""
        b, mu = self._plan.rule.mix, self._plan.momentum[0]
        for (i, pile), own in zip(self._piles, self._moves, strict=True):
            for ds, gs, zs, ys, ps in bundles((*self._columns(i, pile), own), PIECE):
                to_averages(ys, zs, b)
                torch._foreach_mul_(zs, keep[i])
                torch._foreach_add_(zs, ps, alpha=move[i])
                to_next_points(ys, zs, b, self._share)
                torch._foreach_lerp_(ds, gs, 1 - mu)
        self._moves = []
