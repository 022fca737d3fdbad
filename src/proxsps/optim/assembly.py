"""A step put together from its parts: their sums, the model for the rules, and the write."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from proxsps.core.array import Array, array_namespace, over_blocks
from proxsps.core.caps import (
    Matched,
    find_matched,
    l2_matched_height,
    l2_matched_step,
    l2_ray_heights,
    matched_decision,
    polyak_ray,
)
from proxsps.core.dual import Evaluate, Found, eager_loop, fixed_loop, geometric, search_dual, stopping
from proxsps.core.model import line_heights
from proxsps.core.rules import Decision, Model
from proxsps.core.step import (
    Affine,
    Line,
    coupled_coefficients,
    coupled_move_sq,
    l2_line,
    prox_coefficients,
    prox_move_sq,
    relax,
    relaxation,
)
from proxsps.optim.blocks import LINES, ORDER, PROXES, UNITS, Block
from proxsps.optim.numbers import Device, Host
from proxsps.optim.parts import Curve, Lines, Part, Sums, make_curve, make_lines
from proxsps.optim.reduce import Ranks
from proxsps.optim.refine import POINTS

SAMPLE, COARSEST = 16, 64  # a search starts from what one in so many entries says: one in 16, of many entries fewer
ENOUGH = 1 << 18  # entries of a sample that tell the root to half a percent: more of them cost more than they save
ROUNDS = 4  # in which a device closes in on the matched step of several blocks with weight decay; two are usual
SMALLEST = 1e-30  # of the longest step, for a matched step with a prox
WORTH = 1 << 20  # entries from which on a pass over a sample is worth its while

NOTHING = np.empty(0)
Gap = Array | float | Callable[[Array, Array], Array]  # m - C, or how it follows from <g, x> and <d, x>


class L2Matched(NamedTuple):
    """A step of the matched cap with weight decay: its size s, and the numbers that the report of it follows from."""

    gap: Array
    d_sq: Array
    d_dot_x: Array
    share: Array
    lam: Array
    longest: Array
    s: Array

    def decision(self) -> Decision:
        """All that a step tells, which takes more operations than the step itself."""
        gap, d_sq, d_dot_x, share, lam, longest, s = self
        found = Matched(s, l2_matched_height(gap, d_sq, d_dot_x, share, lam, s))
        return matched_decision(gap, over_blocks(share * d_sq), found, longest)


class Assembly:
    """The parts of a step over some blocks.

    Args:
        blocks: the blocks of the step.
        numbers: where its numbers live.
        ranks: the ranks that take it together.
        fused: whether to use the compiled kernels: True, False, or None for where they apply.
        coupled: whether the slopes are those of loss and squared l2 norm together.
    """

    def __init__(
        self, blocks: Sequence[Block], numbers: Host | Device, ranks: Ranks, fused: bool | None, coupled: bool
    ) -> None:
        self.blocks, self.numbers, self._coupled = blocks, numbers, coupled
        self._ranks = ranks
        self._fused = fused
        self._reach: Array | float = 1.0
        kinds = [block.kind for block in blocks]
        self._affine = [kind == LINES for kind in kinds]
        self._sharded = any(block.sharded for block, affine in zip(blocks, self._affine, strict=True) if not affine)
        members: dict[tuple[str, float, int], list[int]] = defaultdict(list)
        for i, kind in enumerate(kinds):
            # Whole tensors count on every rank, shards on one: sums over the ranks weigh them.
            share = blocks[i].share if self._sharded and kind != LINES else 1.0
            members[kind, share, i if kind == UNITS else 0].append(i)
        self.lines: Lines | None = None
        self.curves: list[Curve] = []
        for (kind, share, _), places in sorted(members.items(), key=lambda item: ORDER[item[0][0]]):
            own = [blocks[i] for i in places]
            if kind == LINES:
                self.lines = make_lines(numbers, own, places, fused, coupled)
            else:
                self.curves.append(make_curve(kind, numbers, own, places, fused))
                self.curves[-1].share = share
        self._start: Array | None = None

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return [*self.curves] if self.lines is None else [self.lines, *self.curves]

    @property
    def reach(self) -> Array | float:
        """The caps of the blocks are `alpha` times this number."""
        return self._reach

    @reach.setter
    def reach(self, reach: Array | float) -> None:
        self._reach = reach
        for curve in self.curves:
            curve.reach = self.numbers.factor(reach)

    def sums(self, points: bool, gap: Gap | None = None) -> Sums:
        """The sums of all blocks, in their order.

        Args:
            points: whether ||x||^2 is wanted too.
            gap: m - C where a search will follow, infinity where the step will be the cap: then the pass over entries
                that makes the sums is also the first round of the search. Where m - C follows from sums, it is a
                function of them, and a sample of the entries says what it will be about.
        """
        if not self.curves and self.lines is not None:
            return Sums(*self.lines.rows(points))
        columns: list[Array] = [None] * len(self.blocks)

        def take(part: Part) -> Array:
            found = part.sums(points)
            for j, place in enumerate(part.places):
                columns[place] = found[:, j]
            return found

        if self.lines is not None:
            take(self.lines)
        host = isinstance(self.numbers, Host)
        for i, curve in enumerate(self.curves):
            if host and gap is not None and curve.entries:
                self._start = self._first_points(columns, gap, curve)
                curve.ahead = NOTHING if self._start is None else self._start
            d_sq = take(curve)[0]
            if host and not _ordinary(d_sq):
                self.curves[i] = make_curve(
                    curve.kind, self.numbers, curve.blocks, curve.places, self._fused, exact=True
                )
                self.curves[i].share = curve.share
                take(self.curves[i])
        return Sums(*array_namespace(columns[0]).stack(columns, axis=1))

    def _first_points(self, columns: Sequence[Array], gap: Gap, curve: Curve) -> Array | None:
        """Points for the pass that makes the sums of a curve, the last part; None where they would be of no use."""
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

    def model(self, gap: Array, sums: Sums, alpha: Array, lam: Array) -> Model:
        """The linear model of the step."""
        if not self.curves:
            line = Line(gap, (alpha * sums.d_sq).sum()) if self._coupled else l2_line(gap, *sums[:2], alpha, lam)
            return Model(gap, sums.d_sq, alpha, line)
        if self.lines is None:
            line = Line(gap, self.numbers.scalar(0.0))
        else:
            affine = self.numbers.vector([float(affine) for affine in self._affine])
            line = l2_line(gap, sums.d_sq, sums.d_dot_x, affine * alpha, lam)
        return Model(gap, sums.d_sq, alpha, line, self._find, self._top)

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

    def _top(self, line: Line) -> Array:
        """h(1)."""
        return self._values(line, self.numbers.vector([1.0]))[0]

    def _find(self, line: Line) -> Found:
        """The dual variable."""
        if isinstance(self.numbers, Device):
            return self.numbers.refine(lambda u: self._values(line, u), line.start, self._points)
        tolerance, noise, eps = self._stopping(line.start)
        start, points = self._start, 1
        if start is None:
            start = self._guess(line)
            points = self._points if len(start) == self._points else 1
        return self.numbers.find(lambda u: self._heights(line, u), line.start, tolerance, noise, eps, start, points)

    # The matched cap

    def matched(
        self, gap: Array, sums: Sums, share: Array, lam: Array, longest: Array
    ) -> tuple[Decision | L2Matched, Array]:
        """The step of the matched cap, and its size s; its u is s / longest."""
        if not self.curves:
            loop = fixed_loop(ROUNDS) if isinstance(self.numbers, Device) else eager_loop
            s = l2_matched_step(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, loop)
            return L2Matched(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, s), s
        d_sq = over_blocks(share * sums.d_sq)
        affine = self.numbers.vector([float(affine) for affine in self._affine])
        heights = partial(self._ray_heights, sums, affine * share, lam)
        start = self._ray_start(heights, gap, d_sq, longest)
        found = find_matched(heights, gap, d_sq, longest, partial(self._zero, gap, start))
        # H may jump at 0, where x violates a constraint. A step of any size then restores it.
        xp = array_namespace(gap)
        found = found._replace(s=xp.where(gap > 0, xp.maximum(found.s, SMALLEST * longest), found.s))
        return matched_decision(gap, d_sq, found, longest), found.s

    def _ray_start(self, heights: Callable[..., tuple[Array, Array]], gap: Array, d_sq: Array, longest: Array) -> Array:
        """Points for the first round on the ray: 1, and where a sample of the entries says that the zero is."""
        numbers = self.numbers
        if isinstance(numbers, Device) or not self._samples or gap <= 0:
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

    def _zero(self, gap: Array, start: Array, evaluate: Evaluate) -> Found:
        if isinstance(self.numbers, Device):
            return self.numbers.refine_zero(evaluate, gap)
        return self.numbers.find_zero(evaluate, gap, *self._stopping(gap), start)

    def _stopping(self, gap: Array) -> tuple[Array, Array, float]:
        """How exact a search has to be: its tolerance, the rounding of h, and that of the entries."""
        eps = max(curve.eps for curve in self.curves)
        products = sum(curve.share * curve.products_sq() for curve in self.curves)
        if self._sharded:
            (products,) = self._ranks.sum(products)
        return *stopping(gap, products**0.5, eps), eps

    # The search for the dual variable

    @property
    def _points(self) -> int:
        """Of a round of the search; over shards the same on all ranks, whatever each of them holds."""
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
        """Points for the first round: where a sample of the entries says that the root is, or all over [0, 1].

        `doubt` is how much h(0) may be off.
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

    def write(self, u: Array, sums: Sums, alpha: Array, lam: Array, ok: Array, max_move: float | None) -> Array | float:
        """Move all blocks; returns the factor by which `max_move` shortens the move.

        Args:
            u: the dual variable.
            sums: those that the length of the move follows from.
            alpha: caps, or shares where `reach` is to be multiplied with them.
            lam: strengths of the squared l2 norm.
            ok: whether the step is taken.
            max_move: limit on the length of the move, or None.
        """
        if not (isinstance(self.reach, float) and self.reach == 1):
            if self.numbers.vanishes(self.reach):
                return 1.0
            alpha = self.reach * alpha
        s: Array | float = 1.0
        if self.lines is not None or max_move is not None:
            update = (coupled_coefficients if self._coupled else prox_coefficients)(u, alpha, lam)
        if max_move is not None:
            s = relaxation(self._moves_sq(update, u, sums), max_move)
            update = relax(update, s)
        if self.lines is not None:
            self.lines.move(Affine(*(self.numbers.chosen(part, self.lines.places) for part in update)), ok)
        for curve in self.curves:
            curve.write(u, self.numbers.factor(s), ok)
        return s

    def _moves_sq(self, update: Affine, u: Array, sums: Sums) -> Array:
        """||x+ - x||^2 over all blocks."""
        if self._coupled:
            return coupled_move_sq(update, sums.d_sq)
        if not self.curves:
            return prox_move_sq(update, *sums)
        total = sum(curve.share * curve.moves_sq(u) for curve in self.curves)
        if self._sharded:
            (total,) = self._ranks.sum(total)
        affine = self.numbers.vector([float(affine) for affine in self._affine])
        return total + prox_move_sq(update, *(affine * part for part in sums))


def _ordinary(d_sq: Array) -> bool:
    """Whether squares of slopes keep well inside the range of f32."""
    total = d_sq.sum()
    return bool(total == 0 or 1e-20 < total < 1e20)
