"""Heights between two points from few entries: those that change their branch there, which the pass of the sums lists.

The heights of all other entries are lines between the two points (`proxsps.optim.kernels.heights`). A sample of the
entries tells where the root of a search is, up to a few percent at most: the first pass over the memory evaluates h on
either side of it, and what it lists, about one entry in a hundred, is all that later rounds read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from proxsps.optim.kernels.averages import inverse_metric, new_slope, new_square
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.heights import add_heights
from proxsps.optim.kernels.layout import CHUNK, Layout, in_words, run_memory
from proxsps.optim.rule import Heights

ROOM = CHUNK // 64  # entries of a chunk that are listed at most: lists take 3/64 of the memory of the parameters


class Lists(NamedTuple):
    """The listed entries of each chunk."""

    counts: np.ndarray  # also beyond the room
    entries: np.ndarray  # x, d and 1/D of each chunk
    at: np.ndarray  # their address; empty without lists

    @classmethod
    def of(cls, like: np.ndarray, chunks: int) -> Lists:
        """Memory for lists."""
        found = np.empty((chunks, 3, ROOM), like.dtype)
        return cls(np.zeros(chunks, np.int64), found, np.array([found.ctypes.data] * min(chunks, 1), np.int64))


@inlined()
def list_marked(x, g, d, v, own, marks, count, room):
    """List the marked entries of a run, of which there were `count` before; returns how many there are now."""
    words, single = numba.carray(in_words(marks), -(-len(x) // 8)), numba.carray(marks, len(x))
    for w in range(len(words)):
        if words[w] != 0:  # eight marks at once
            for k in range(8 * w, min(8 * w + 8, len(x))):
                if single[k]:
                    if count < ROOM:
                        room[count] = x[k]
                        room[ROOM + count] = g[k] if d is None else new_slope(g[k], d[k], own)
                        r = own[6] if v is None else inverse_metric(new_square(g[k], v[k], own), own)
                        room[2 * ROOM + count] = r
                    count += 1
    return count


@compiled()
def _listed_heights(like, block, counts, found, kinds, psi, caps, u, out):
    """h at the points u, and its slopes, over all listed entries."""
    steps = numba.carray(run_memory(like), len(u))
    for i in range(len(counts)):
        n, b = counts[i], block[i]
        add_heights(like, found[i, 0, :n], found[i, 1, :n], found[i, 2, :n], kinds[b], psi, caps, b, u, steps, out)


class Between:
    """Heights between two points.

    Args:
        layout: the chunks.
        listed: of each of them.
        kinds: of the functions of the blocks, and their constants.
        psi: constants of these functions.
        caps: of the blocks.
        u: the two points.
        heights: there.
    """

    def __init__(
        self,
        layout: Layout,
        listed: Lists,
        kinds: np.ndarray,
        psi: np.ndarray,
        caps: Sequence[float],
        u: Sequence[float],
        heights: Heights,
    ) -> None:
        like = listed.entries[:0, 0, 0]
        self._args = (like, layout.chunks.columns[0], listed.counts, listed.entries, kinds, psi, np.array([caps]))
        self._caps, (self._low, self._high) = list(caps), u
        self._known = bool(listed.counts.max(initial=0) <= ROOM)
        if self._known:
            own = self._listed(u)
            self._h = heights.h[0] - own.h[0]
            self._slope = (heights.h[1] - own.h[1] - self._h) / (self._high - self._low)

    def covers(self, caps: Sequence[float], u: Sequence[float]) -> bool:
        """Whether heights at the points u follow."""
        return self._known and list(caps) == self._caps and self._low <= min(u) and max(u) <= self._high

    def heights(self, u: Sequence[float]) -> Heights:
        """Heights at the points u, and their slopes."""
        h, slope = self._listed(u)
        lines = [self._h + self._slope * (v - self._low) for v in u]
        return Heights([a + b for a, b in zip(lines, h, strict=True)], [self._slope + b for b in slope])

    def _listed(self, u: Sequence[float]) -> Heights:
        out = np.zeros(2 * len(u))
        _listed_heights(*self._args, np.array(u, np.float64), out)
        h, slope = out.reshape(2, -1).tolist()
        return Heights(h, slope)
