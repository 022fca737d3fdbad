"""A step put together from its parts: their sums, the model for the rules, and the write."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np

from proxsps.core.array import Array, array_namespace
from proxsps.core.caps import find_matched, l2_matched, l2_ray_heights
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
from proxsps.optim.numbers import Device, Host, Numbers
from proxsps.optim.parts import Curve, Lines, Part, Sums, make_curve, make_lines
from proxsps.optim.reduce import Ranks
from proxsps.optim.refine import POINTS

SAMPLE, COARSEST = 16, 64  # a search starts from what one in so many entries says: one in 16, of many entries fewer
ENOUGH = 1 << 18  # entries of a sample that tell the root to half a percent: more of them cost more than they save
ROUNDS = 4  # in which a device closes in on the matched step of several blocks with weight decay; two are usual
SMALLEST = 1e-30  # of the longest step, for a matched step with a prox
WORTH = 1 << 20  # entries from which on a pass over a sample is worth its while


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
        self, blocks: Sequence[Block], numbers: Numbers, ranks: Ranks, fused: bool | None, coupled: bool
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

    def sums(self, points: bool, gap: Array | None = None) -> Sums:
        """The sums of all blocks, in their order.

        Args:
            points: whether ||x||^2 is wanted too.
            gap: m - C where it is known already and a search will follow, infinity where the step will be the cap: then
                the pass over entries that makes the sums is also the first round of the search.
        """
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
                curve.ahead = self._start = self._guess(self._known_line(columns, gap))
            d_sq = take(curve)[0]
            if host and not _ordinary(d_sq):
                self.curves[i] = make_curve(
                    curve.kind, self.numbers, curve.blocks, curve.places, self._fused, exact=True
                )
                self.curves[i].share = curve.share
                take(self.curves[i])
        return Sums(*array_namespace(columns[0]).stack(columns, axis=1))

    def _known_line(self, columns: Sequence[Array | None], gap: Array) -> Line:
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
            height, slope = height + curve.share * own, slope + curve.share * bend
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

    def matched(self, gap: Array, sums: Sums, share: Array, lam: Array, longest: Array) -> Decision:
        """The step of the matched cap; its u is s / longest."""
        xp = array_namespace(gap)
        d_sq = (share * sums.d_sq).sum()
        if not self.curves:
            loop = fixed_loop(ROUNDS) if isinstance(self.numbers, Device) else eager_loop
            found = l2_matched(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, loop)
        else:
            affine = self.numbers.vector([float(affine) for affine in self._affine])
            found = find_matched(
                partial(self._ray_heights, sums, affine * share, lam), gap, d_sq, longest, partial(self._zero, gap)
            )
        steep = longest * d_sq
        u = xp.where(longest > 0, found.s / xp.where(longest > 0, longest, xp.ones_like(longest)), 0 * found.s)
        if self.curves:
            # H may jump at 0, where x violates a constraint. A step of any size then restores it.
            u = xp.where((gap > 0) & (longest > 0), xp.maximum(u, xp.full_like(u, SMALLEST)), u)
        # Beyond the longest step, the root is that of a step without a regulariser.
        free = xp.maximum(gap / xp.where(steep > 0, steep, xp.ones_like(steep)), xp.ones_like(gap))
        return Decision(xp.where(u < 1, u, free), u, found.height, found.evaluations)

    def _ray_heights(self, sums: Sums, share: Array, lam: Array, s: Array) -> tuple[Array, Array]:
        """sum <d, x+(s) - x> of all blocks; no slopes."""
        height = sum(curve.share * curve.ray_heights(s) for curve in self.curves)
        if self._sharded:
            (height,) = self._ranks.sum(height)
        if self.lines is not None:
            height = height + l2_ray_heights(sums.d_sq, sums.d_dot_x, share, lam, s)[0]
        return height, s * math.nan

    def _zero(self, gap: Array, evaluate: Evaluate) -> Found:
        if isinstance(self.numbers, Device):
            return self.numbers.refine_zero(evaluate, gap)
        return self.numbers.find_zero(evaluate, gap, *self._stopping(gap))

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
            return 1 if any(curve.kind == PROXES for curve in self.curves) else 3
        return min(curve.points for curve in self.curves)

    def _guess(self, line: Line) -> Array:
        """Points for the first round: where a sample of the entries says that the root is, or all over [0, 1]."""
        if line.start == math.inf:
            return np.ones(1)
        entries = sum(curve.entries for curve in self.curves)
        if self._sharded or entries < WORTH or any(curve.kind == PROXES for curve in self.curves):
            return np.array(geometric(self._points))
        every = min(max(SAMPLE, entries // ENOUGH), COARSEST)
        noise = 3 * math.sqrt(every / entries) * abs(line.start)  # about the accuracy of h on the sample

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
            if self.numbers.refuses(self.reach > 0):
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
