"""Heights between two points from few entries: those that change their branch there, which the pass of the sums lists.

The heights of all other entries are lines between the two points (`proxsps.optim.kernels.heights`). A sample of the
entries tells where the root of a search is, up to a few percent at most: the first pass over the memory evaluates h on
either side of it, and what it lists, about one entry in a hundred, is all that later rounds read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proxsps.optim.kernels.averages import inverse_metric, new_slope, new_square
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.heights import add_heights
from proxsps.optim.kernels.layout import CHUNK
from proxsps.optim.rule import Heights

ROOM = CHUNK // 64  # entries of a chunk that are listed at most: lists take 3/64 of the memory of the parameters


@inlined()
def list_marked(x, g, d, v, own, marks, count, room):
    """List x, d and 1/D of the marked entries of a run, of which there were `count` before; returns the new count."""
    words = marks.view(np.uint64)
    for w in range(-(-len(x) // 8)):
        if words[w] != 0:  # eight marks at once
            for k in range(8 * w, min(8 * w + 8, len(x))):
                if marks[k]:
                    if count < ROOM:
                        room[0, count] = x[k]
                        room[1, count] = g[k] if d is None else new_slope(g[k], d[k], own)
                        room[2, count] = own[6] if v is None else inverse_metric(new_square(g[k], v[k], own), own)
                    count += 1
    return count


@compiled()
def _listed_heights(block, counts, found, kinds, psi, caps, u, out):
    """h at the points u, and its slopes, over all listed entries."""
    for i in range(len(counts)):
        n, b = counts[i], block[i]
        add_heights(found[i, 0, :n], found[i, 1, :n], found[i, 2, :n], kinds[b], psi, caps, b, u, out)


class Between:
    """Heights between two points.

    Args:
        like: an array of the type of the entries.
        block: of each chunk.
        kinds: of the functions of the blocks.
        psi: constants of these functions.
    """

    def __init__(self, like: np.ndarray, block: np.ndarray, kinds: np.ndarray, psi: np.ndarray) -> None:
        self.entries = np.empty((len(block), 3, ROOM), like.dtype)  # that are listed of each chunk
        self.counts = np.zeros(len(block), np.int64)  # of them, also beyond the room
        self._args = block, self.counts, self.entries, kinds, psi

    def begin(self, caps: Sequence[float], u: Sequence[float], heights: Heights) -> bool:
        """Take two points and the heights there; False if there is no room for all entries that change their branch."""
        if self.counts.max(initial=0) > ROOM:
            return False
        self._caps, (self._low, self._high) = list(caps), u
        own = self._listed(u)
        self._h = heights.h[0] - own.h[0]
        self._slope = (heights.h[1] - own.h[1] - self._h) / (self._high - self._low)
        return True

    def covers(self, caps: Sequence[float], u: Sequence[float]) -> bool:
        """Whether heights at the points u follow."""
        return list(caps) == self._caps and self._low <= min(u) and max(u) <= self._high

    def heights(self, u: Sequence[float]) -> Heights:
        """Heights at the points u, and their slopes."""
        h, slope = self._listed(u)
        lines = [self._h + self._slope * (v - self._low) for v in u]
        return Heights([a + b for a, b in zip(lines, h, strict=True)], [self._slope + b for b in slope])

    def _listed(self, u: Sequence[float]) -> Heights:
        out = np.zeros(2 * len(u))
        _listed_heights(*self._args, np.array([self._caps]), np.array(u, np.float64), out)
        h, slope = out.reshape(2, -1).tolist()
        return Heights(h, slope)
