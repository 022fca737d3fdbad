"""The search of a step over the blocks that are not affine: for the dual variable, or for the matched step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.caps import Matched, l2_ray_heights
from proxsps.core.dual import Found
from proxsps.core.rounds import refine_zero
from proxsps.core.step import Line
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.part import Searched
from proxsps.optim.device.refine import POINTS, refine_dual
from proxsps.optim.reduce import Ranks

ROUNDS = {False: 4, True: 7}  # of a search, in single and in double precision
MATCHED_ROUNDS = {False: 6, True: 8}  # the same for the step of the matched cap


class Search:
    """Heights of the model over the parts of a step, and where they reach zero, in a fixed number of rounds.

    Args:
        parts: the parts that are searched.
        affine: whether there are affine blocks beside them.
        numbers: the numbers of the step.
        ranks: the ranks that take the step together.
        sharded: whether ranks hold pieces of these parts.
        double: whether some parameter of the step has double precision.
    """

    def __init__(
        self, parts: Sequence[Searched], affine: bool, numbers: Numbers, ranks: Ranks, sharded: bool, double: bool
    ) -> None:
        self._parts, self._affine, self._numbers, self._double = parts, affine, numbers, double
        self._ranks, self._sharded = ranks, sharded

    def _heights(self, line: Line, u: Tensor) -> Array:
        """h at the points u, with the line of the affine blocks."""
        values = [part.heights(u) for part in self._parts]
        if self._sharded:
            shares = [part.share for part in self._parts]
            values = self._ranks.sum(sum(share * h for share, h in zip(shares, values, strict=True)))
        return sum(values, start=line.start - line.fall * u if self._affine else line.start)

    def top(self, line: Line) -> Array:
        """h(1)."""
        return self._heights(line, self._numbers.vector([1.0]))[0]

    def dual(self, ratio: Tensor, line: Line) -> Found:
        """The dual variable; `ratio` is 1 over that of a step without a regulariser.

        With many points in the first round, fewer rounds are enough.
        """
        points = POINTS if self._sharded else min(part.points for part in self._parts)
        rounds = ROUNDS[self._double] - (points > 4 * POINTS) - (points > 32 * POINTS)
        return refine_dual(lambda u: self._heights(line, u), line.start, rounds, points, ratio)

    def matched(self, gap: Tensor, d_sq: Tensor, longest: Tensor, lines: tuple[Array, Array, Array, Array]) -> Matched:
        """The step of the matched cap.

        Args:
            gap: m - C.
            d_sq: sum_j w_j <d_j, D_j^-1 d_j> over all blocks.
            longest: the longest step.
            lines: ||d||^2, <d, x>, shares and strengths of the affine blocks, with share 0 for the others.
        """

        def heights(s: Tensor) -> Array:
            height = sum(part.share * part.ray_heights(s) for part in self._parts)
            if self._sharded:
                (height,) = self._ranks.sum(height)
            return height + l2_ray_heights(*lines, s)[0] if self._affine else height

        eps = max(part.eps for part in self._parts)
        return refine_zero(heights, gap, d_sq, longest, MATCHED_ROUNDS[self._double], eps)

    def move_sq(self, u: Tensor) -> Array:
        """||y(u) - x||^2."""
        total = sum(part.share * part.move_sq(u) for part in self._parts)
        if self._sharded:
            (total,) = self._ranks.sum(total)
        return total
