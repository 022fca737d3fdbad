"""Heights between two points from few entries: those of strips in which some entry changes its branch there.

Over all other strips the heights are one line, which follows from one height and slope of everything. In a narrow
bracket around the dual variable hardly any entries change their branch, so all further rounds of a search read a small
part of the memory. The result is as exact as that of a pass over everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from proxsps.optim.kernels.heights import STRIP
from proxsps.optim.kernels.layout import Chunks, Layout
from proxsps.optim.rule import Heights

MOST = 0.5  # part of the strips: with more of them a pass over everything takes about as long

Evaluate = Callable[[Layout, Sequence[float]], Heights]


class Bracket:
    """What a pass at two points has found out about heights between them.

    Args:
        layout: of everything.
        crossed: whether entries change their branch there, one row per chunk with one column per strip.
        alpha: the caps of the pass.
        u: its points.
        heights: its result.
    """

    def __init__(
        self, layout: Layout, crossed: np.ndarray, alpha: Sequence[float], u: Sequence[float], heights: Heights
    ) -> None:
        self._alpha, self._low, self._high = list(alpha), u[0], u[-1]
        self._h, self._slope = heights.h[0], heights.slope[0]
        chunks, places = np.nonzero(crossed)
        self.few = len(chunks) * STRIP <= MOST * layout.chunks.total
        if self.few:
            block, tensor, origin, length = (column[chunks] for column in layout.chunks.columns)
            size = np.minimum(STRIP, length - places * STRIP)
            columns = block, tensor, origin + places * STRIP, size
            self._layout = Layout(Chunks(columns, size, layout.chunks.threads), layout.count)

    def covers(self, alpha: Sequence[float], u: Sequence[float]) -> bool:
        """Whether heights at these points follow."""
        return self.few and list(alpha) == self._alpha and self._low <= min(u) and max(u) <= self._high

    def heights(self, u: Sequence[float], evaluate: Evaluate) -> Heights:
        """Heights at the points u; `evaluate` returns those over a layout."""
        if not len(self._layout.chunks.sizes):
            own = Heights([0.0] * (len(u) + 1), [0.0] * (len(u) + 1))
        else:
            own = evaluate(self._layout, [self._low, *u])
        h, slope = self._h - own.h[0], self._slope - own.slope[0]
        at = [h + slope * (v - self._low) + found for v, found in zip(u, own.h[1:], strict=True)]
        return Heights(at, [slope + found for found in own.slope[1:]])
