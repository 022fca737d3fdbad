"""The search of a step over curves: for the dual variable, or for the step of the matched cap.

Large problems start from a sample of their entries, which gives an estimate of the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from proxsps.core.array import Array
from proxsps.core.caps import Matched, find_matched, l2_ray_heights, polyak_ray, shortest_step
from proxsps.core.dual import Evaluate, Found, eager_loop, geometric, search_dual, stopping
from proxsps.core.model import line_heights
from proxsps.core.step import Line, l2_line
from proxsps.optim.blocks import PROXES, Block
from proxsps.optim.numbers import Device, Host
from proxsps.optim.parts import Curve, Lines, Part, Sums
from proxsps.optim.reduce import Ranks
from proxsps.optim.refine import POINTS

SAMPLE, COARSEST = 16, 64  # a search starts from a sample of one entry in 16; one in 64 if there are many
ENOUGH = 1 << 18  # entries of a sample that give the root to half a percent: more cost more than they save
WORTH = 1 << 20  # entries from which on a pass over a sample saves time

Gap = Array | float | Callable[[Array, Array], Array]  # m - C, or how it follows from <g, x> and <d, x>


class Search:
    """Heights of the model over the parts of a step, and where they reach zero.

    Args:
        blocks: the blocks of the step.
        lines: the part of the blocks whose prox is affine, None without any.
        curves: the other parts; the list may be changed until the search begins.
        numbers: where the numbers of the step are computed.
        ranks: the ranks that take the step together.
        sharded: whether ranks hold pieces of the curves.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        lines: Lines | None,
        curves: list[Curve],
        numbers: Host | Device,
        ranks: Ranks,
        sharded: bool,
    ) -> None:
        self.blocks, self.lines, self.curves, self.numbers = blocks, lines, curves, numbers
        self._ranks, self._sharded = ranks, sharded
        self._start: Array | None = None

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [*self.curves] if self.lines is None else [self.lines, *self.curves]

    def begin(self, columns: Sequence[Array], gap: Gap, curve: Curve) -> Array:
        """Points for the pass that computes the sums of a curve, the last part; none if they would not help.

        Args:
            columns: sums of the blocks so far.
            gap: m - C, or a function of sums that gives it; infinity if the step will be the cap.
            curve: the part.
        """
        self._start = self._first_points(columns, gap, curve)
        return np.empty(0) if self._start is None else self._start

    def _first_points(self, columns: Sequence[Array], gap: Gap, curve: Curve) -> Array | None:
        """The points, or None."""
        if not callable(gap):
            return self._guess(self._known_line(columns, gap))
        if not self._samples:
            return np.array(geometric(self._points))
        if any(block.known_moments.made for block in self.blocks):
            return None
        g_dot_x, d_dot_x, products_sq = curve.sampled_dots(SAMPLE)
        with self.numbers.unchecked():
            for part in self.parts:
                if part is not curve:
                    g_dot_x += sum(extras[0] for extras in part.extras())
                    d_dot_x += sum(columns[i][1] for i in part.places)
            height = gap(g_dot_x, d_dot_x)
        # A sum over a sample is off by about the root of its squares, scaled up.
        doubt = 2 * math.sqrt(SAMPLE * products_sq)
        return self._guess(self._known_line(columns, height), doubt) if math.isfinite(height + doubt) else None

    def _known_line(self, columns: Sequence[Array], gap: Array) -> Line:
        """The line of the affine blocks, before the other blocks are summed."""
        places = [] if self.lines is None else self.lines.places
        own = [self.blocks[i] for i in places]
        alpha, lam = (np.array([getattr(block, key) for block in own]) for key in ("alpha", "lam"))
        d_sq, d_dot_x, _ = np.stack([columns[i] for i in places], axis=1) if places else np.zeros((3, 0))
        return l2_line(gap, d_sq, d_dot_x, alpha, lam)

    def _heights(self, line: Line, u: Array, every: int = 1) -> tuple[Array, Array]:
        """h and h' of the whole step; from a sample for `every` above 1."""
        height = slope = 0.0
        for curve in self.curves:
            own, bend = curve.heights(u) if every == 1 else curve.sampled(u, every)
            height = height + curve.share * own
            slope = slope + curve.share * (math.nan if bend is None else bend)
        if self._sharded:
            height, slope = self._ranks.sum(height, slope)
        start, fall = line_heights(line, u)
        return start + height, fall + slope

    def _values(self, line: Line, u: Array) -> Array:
        """h of the whole step alone, in few operations."""
        values = [curve.heights(u)[0] for curve in self.curves]
        if self._sharded:
            shares = [curve.share for curve in self.curves]
            values = self._ranks.sum(sum(share * h for share, h in zip(shares, values, strict=True)))
        return sum(values, start=line.start if self.lines is None else line.start - line.fall * u)

    def top(self, line: Line) -> Array:
        """h(1)."""
        return self._values(line, self.numbers.vector([1.0]))[0]

    def find(self, fall: Callable[[], Array], gap: Array, line: Line) -> Found:
        """The dual variable.

        Args:
            fall: sum_j alpha_j ||d_j||^2, how far the linear model falls along the slope itself.
            gap: m - C.
            line: the line of the affine blocks.
        """
        if isinstance(self.numbers, Device):
            return self.numbers.refine(lambda u: self._values(line, u), line.start, self._points, fall() / gap)
        tolerance, noise, eps = self._stopping(line.start)
        start, points = self._start, 1
        if start is None:
            start = self._guess(line)
            points = self._points if len(start) == self._points else 1
        return self.numbers.find(lambda u: self._heights(line, u), line.start, tolerance, noise, eps, start, points)

    def zero(self, gap: Array, d_sq: Array, sums: Sums, share: Array, lam: Array, longest: Array) -> Matched:
        """The step of the matched cap; `share` is 0 for the blocks that are curves."""
        heights = partial(self._ray_heights, sums, share, lam)
        numbers = self.numbers
        if isinstance(numbers, Device):
            eps = max(curve.eps for curve in self.curves)
            return numbers.refine_zero(lambda s: heights(s)[0], gap, d_sq, longest, eps)
        start = self._ray_start(numbers, heights, gap, d_sq, longest)

        def find(evaluate: Evaluate) -> Found:
            return numbers.find_zero(evaluate, gap, *self._stopping(gap), start)

        found = find_matched(heights, gap, d_sq, longest, find)
        s = np.maximum(found.s, shortest_step(gap, d_sq, longest))
        if gap <= 0 or s == found.s:
            return found
        return Matched(s, gap + heights(s[None])[0][0], found.evaluations + 1)

    def _ray_start(
        self, numbers: Host, heights: Callable[..., tuple[Array, Array]], gap: Array, d_sq: Array, longest: Array
    ) -> Array:
        """Points for the first round on the ray: 1, and around the zero that a sample of the entries gives."""
        if not self._samples or gap <= 0:
            return np.ones(1)
        noise = 3 * math.sqrt(SAMPLE / self._entries)

        def find(evaluate: Evaluate) -> Found:
            return numbers.find_zero(evaluate, gap, noise / 100 * gap, np.float64(0.0), 1e-3)

        about = find_matched(partial(heights, every=SAMPLE), gap, d_sq, longest, find).s
        v = polyak_ray(gap, d_sq, longest).v(about)
        return np.array([1.0, *(v * (1 + noise * np.array([-1.0, 0.0, 1.0])))]) if v < 1 - noise else np.ones(1)

    def _ray_heights(self, sums: Sums, share: Array, lam: Array, s: Array, every: int = 1) -> tuple[Array, Array]:
        """sum <d, x+(s) - x> of all blocks, from a sample for `every` above 1; no slopes."""
        height = sum(curve.share * curve.ray_heights(s, every) for curve in self.curves)
        if self._sharded:
            (height,) = self._ranks.sum(height)
        if self.lines is not None:
            height = height + l2_ray_heights(sums.d_sq, sums.d_dot_x, share, lam, s)[0]
        return height, s * math.nan

    def _stopping(self, gap: Array) -> tuple[Array, Array, float]:
        """The accuracy of a search: its tolerance, the rounding of h, and that of the entries."""
        eps = max(curve.eps for curve in self.curves)
        products = sum(curve.share * curve.products_sq() for curve in self.curves)
        if self._sharded:
            (products,) = self._ranks.sum(products)
        return *stopping(gap, products**0.5, eps), eps

    @property
    def _points(self) -> int:
        """Points of a round of the search; over shards the same on all ranks."""
        if self._sharded and isinstance(self.numbers, Device):
            return POINTS
        if self._sharded:
            return 1 if any(block.kind == PROXES for block in self.blocks) else 3
        return min(curve.points for curve in self.curves)

    @property
    def _entries(self) -> int:
        """Entries that a pass reads."""
        return sum(curve.entries for curve in self.curves)

    @property
    def _samples(self) -> bool:
        """Whether a search starts from a sample."""
        return not self._sharded and self._entries >= WORTH and not any(curve.kind == PROXES for curve in self.curves)

    def _guess(self, line: Line, doubt: float = 0.0) -> Array:
        """Points for the first round: around the root that a sample of the entries gives, or all over [0, 1].

        `doubt` is the possible error of h(0).
        """
        if line.start == math.inf:
            return np.ones(1)
        if not self._samples:
            return np.array(geometric(self._points))
        every = min(max(SAMPLE, self._entries // ENOUGH), COARSEST)
        noise = 3 * math.sqrt(every / self._entries) * abs(line.start) + doubt  # about the accuracy of h on the sample

        def evaluate(u: Array) -> tuple[Array, Array]:
            return self._heights(line, u, every)

        found = search_dual(evaluate, line.start, noise / 100, 1e-3, 8, eager_loop, 0.0, geometric(4), 4)
        u = found.u if found.done else found.estimate
        if self._points == 1 or not 0 < u < 1:
            return np.array([u])
        spread = np.minimum(-noise / found.slope, u / 4) if found.slope < 0 else u / 4
        return np.minimum(u + spread * np.array([-1.0, 0.0, 1.0]), 1.0)
