"""A limit on the length of the move of all parameters together, which is measured after the move was written.

So no other part of a step needs to know of it: for the step of a limited optimizer, copies of the parameters are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from proxsps.optim.blocks import Block, pieces
from proxsps.optim.lists import LAUNCH, join, spread, widened


class Start:
    """The parameters of blocks before a step; z in the schedule-free form."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._copies = [[x.clone() for x in block.params] for block in blocks]

    def moves_sq(self, dtype: torch.dtype) -> list[Tensor | float]:
        """||x+ - x||^2 of each block on this rank."""
        found: list[Tensor | float] = []
        for i in range(len(self._blocks)):
            moves = [widened(join(ys)) - widened(join(xs)) for xs, ys in self._pieces(i)]
            squares = [torch.linalg.vector_norm(move, dtype=dtype).square() for move in moves]
            found.append(torch.stack(squares).sum() if squares else 0.0)
        return found

    def shorten(self, s: Tensor | float) -> None:
        """x <- x + s (x+ - x); bitwise x+ where s is 1."""
        for i in range(len(self._blocks)):
            for xs, ys in self._pieces(i):
                start, end = widened(join(xs)), widened(join(ys))
                if isinstance(s, Tensor):
                    new = torch.where(s < 1, torch.lerp(start, end, s.to(end.dtype)), end)
                else:
                    new = torch.lerp(start, end, s)
                spread(new.to(ys[0].dtype), ys)

    def _pieces(self, i: int) -> Iterator[list[list[Tensor]]]:
        """Copies and parameters of a block."""
        return pieces((self._copies[i], self._blocks[i].params), LAUNCH)
