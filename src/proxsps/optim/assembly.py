"""A step put together from its parts: their sums, the model for the rules, and the write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from proxsps.core.array import Array, array_namespace, over_blocks
from proxsps.core.caps import (
    Matched,
    l2_matched_height,
    l2_matched_step,
    matched_decision,
)
from proxsps.core.dual import eager_loop, fixed_loop
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
from proxsps.optim.blocks import LINES, ORDER, UNITS, Block
from proxsps.optim.numbers import Device, Host
from proxsps.optim.parts import Curve, Lines, Part, Sums, make_curve, make_lines
from proxsps.optim.reduce import Ranks
from proxsps.optim.search import Gap, Search

ROUNDS = 4  # of the search on a device for the matched step of several blocks with weight decay; two are usual


class L2Matched(NamedTuple):
    """A step of the matched cap with weight decay: its size s, and the numbers for its report."""

    gap: Array
    d_sq: Array
    d_dot_x: Array
    share: Array
    lam: Array
    longest: Array
    s: Array

    def decision(self) -> Decision:
        """The full report of a step, which takes more operations than the step itself."""
        gap, d_sq, d_dot_x, share, lam, longest, s = self
        found = Matched(s, l2_matched_height(gap, d_sq, d_dot_x, share, lam, s))
        return matched_decision(gap, over_blocks(share * d_sq), found, longest)


class Assembly:
    """The parts of a step over some blocks.

    Args:
        blocks: the blocks of the step.
        numbers: where its numbers are computed.
        ranks: the ranks that take the step together.
        coupled: whether the slopes include the squared l2 norm.
    """

    def __init__(self, blocks: Sequence[Block], numbers: Host | Device, ranks: Ranks, coupled: bool) -> None:
        self.blocks, self.numbers, self._coupled = blocks, numbers, coupled
        self._ranks = ranks
        self._reach: Array | float = 1.0
        kinds = [block.kind for block in blocks]
        self._affine = [kind == LINES for kind in kinds]
        self._sharded = any(block.sharded for block, affine in zip(blocks, self._affine, strict=True) if not affine)
        members: dict[tuple[str, float, int], list[int]] = defaultdict(list)
        for i, kind in enumerate(kinds):
            # Whole tensors are on every rank, shards on one: sums over the ranks use weights.
            share = blocks[i].share if self._sharded and kind != LINES else 1.0
            members[kind, share, i if kind == UNITS else 0].append(i)
        self.lines: Lines | None = None
        self.curves: list[Curve] = []
        for (kind, share, _), places in sorted(members.items(), key=lambda item: ORDER[item[0][0]]):
            own = [blocks[i] for i in places]
            if kind == LINES:
                self.lines = make_lines(numbers, own, places, coupled)
            else:
                self.curves.append(make_curve(kind, numbers, own, places))
                self.curves[-1].share = share
        self._search = Search(blocks, self.lines, self.curves, numbers, ranks, self._sharded)

    @property
    def parts(self) -> list[Part]:
        """All parts."""
        return self._search.parts

    @property
    def _of_lines(self) -> Array:
        """1 for blocks whose prox is affine, 0 for the others."""
        return self.numbers.vector([float(affine) for affine in self._affine])

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
            points: whether to compute ||x||^2 too.
            gap: m - C if a search follows, infinity if the step is the cap: the pass over entries that computes the
                sums is then also the first round of the search. If m - C follows from the sums, it is a function of
                them, and a sample of the entries gives an estimate.
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
                curve.ahead = self._search.begin(columns, gap, curve)
            d_sq = take(curve)[0]
            if host and not _ordinary(d_sq):
                self.curves[i] = make_curve(curve.kind, self.numbers, curve.blocks, curve.places, exact=True)
                self.curves[i].share = curve.share
                take(self.curves[i])
        return Sums(*array_namespace(columns[0]).stack(columns, axis=1))

    def model(self, gap: Array, sums: Sums, alpha: Array, lam: Array) -> Model:
        """The linear model of the step."""
        if not self.curves:
            line = Line(gap, (alpha * sums.d_sq).sum()) if self._coupled else l2_line(gap, *sums[:2], alpha, lam)
            return Model(gap, sums.d_sq, alpha, line)
        if self.lines is None:
            line = Line(gap, self.numbers.scalar(0.0))
        else:
            line = l2_line(gap, sums.d_sq, sums.d_dot_x, self._of_lines * alpha, lam)
        find = partial(self._search.find, lambda: alpha @ sums.d_sq, gap)
        return Model(gap, sums.d_sq, alpha, line, find, self._search.top)

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
        found = self._search.zero(gap, d_sq, sums, self._of_lines * share, lam, longest)
        return matched_decision(gap, d_sq, found, longest), found.s

    def write(self, u: Array, sums: Sums, alpha: Array, lam: Array, ok: Array, max_move: float | None) -> Array | float:
        """Move all blocks; returns the factor by which `max_move` shortens the move.

        Args:
            u: the dual variable.
            sums: the sums that give the length of the move.
            alpha: caps, or shares that are multiplied by `reach`.
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
        # Autograd does not notice writes of the kernels and of torch's fused operations: backward through a graph of
        # before would use the new parameters.
        for x in () if torch.compiler.is_compiling() else [x for block in self.blocks for x in block.params]:
            torch.autograd.graph.increment_version(x)
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
        affine = self._of_lines
        return total + prox_move_sq(update, *(affine * part for part in sums))


def _ordinary(d_sq: Array) -> bool:
    """Whether squares of slopes are well inside the range of f32; a sum of 0 may be one of squares below it."""
    return bool(1e-20 < d_sq.sum() < 1e20)
