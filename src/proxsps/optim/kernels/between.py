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
from proxsps.optim.kernels.layout import CHUNK, RUN, Layout, pointer, run_memory
from proxsps.optim.rule import Heights

ROOM = CHUNK // 32  # entries of a chunk that are listed at most: lists take 3/32 of the memory of the parameters
WORD = 8  # marks that are looked at together
WORDS = np.empty(0, np.uint64)


class Lists(NamedTuple):
    """The listed entries of each chunk, in rows with room for the same number of them."""

    count: np.ndarray  # of each chunk, also beyond the room
    x: np.ndarray
    d: np.ndarray
    r: np.ndarray  # 1/D


def lists(like: np.ndarray, chunks: int, room: int) -> Lists:
    """Memory for lists."""
    return Lists(np.zeros(chunks, np.int64), *(np.empty((chunks, room), like.dtype) for _ in range(3)))


@inlined()
def list_marked(x, g, d, v, own, marks, i, listed):
    """List the marked entries of a run of chunk i."""
    words, count = (len(x) + WORD - 1) // WORD, listed.count[i]
    marks[len(x) : WORD * words] = 0
    at_once = numba.carray(pointer(marks.ctypes.data, WORDS), words)
    for w in range(words):
        if at_once[w] == 0:
            continue
        for k in range(WORD * w, WORD * w + WORD):
            if marks[k]:
                if count < listed.x.shape[1]:
                    listed.x[i, count] = x[k]
                    listed.d[i, count] = g[k] if d is None else new_slope(g[k], d[k], own)
                    listed.r[i, count] = own[6] if v is None else inverse_metric(new_square(g[k], v[k], own), own)
                count += 1
    listed.count[i] = count


@compiled()
def _listed_heights(like, block, count, x, d, r, kinds, psi, caps, u, out):
    """h at the points u, and its slopes, over all listed entries."""
    steps = numba.carray(run_memory(like), len(u))
    for i in range(len(count)):
        n, b = count[i], block[i]
        add_heights(like, x[i, :n], d[i, :n], r[i, :n], kinds[b], psi, caps, b, u, steps, out)


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
        self._args = (layout.chunks.columns[0], *listed, kinds, psi, np.array([caps]))
        self._like, self._caps, (self._low, self._high) = listed.x[:0, 0], list(caps), u
        self._known = bool(listed.count.max(initial=0) <= ROOM)
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
        _listed_heights(self._like, *self._args, np.array(u, np.float64), out)
        h, slope = out.reshape(2, -1).tolist()
        return Heights(h, slope)
