"""The numbers of a step on the host, on Python floats: from the sums of the blocks to the coefficients of the write.

The step itself is that of `proxsps.core.plain_step`. Blocks that are not affine need a search: for the dual variable,
or for the matched step. In large problems it starts from a sample of the entries, which gives an estimate of the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from proxsps.core import plain
from proxsps.core.dual import DOUBLE, SINGLE, geometric
from proxsps.core.plain_step import (
    Blocks,
    Choice,
    Found,
    Loss,
    Numbers,
    Room,
    Step,
    closed_form,
    linear_model,
    search,
    take_step,
)
from proxsps.optim.plan import Plan
from proxsps.optim.reduce import join_tables
from proxsps.optim.rule import Heights, Solved, Table

Floats = Sequence[float]
Sampled = Callable[[list[float], int], tuple[list[float], list[float]]]
LIMIT = 64  # evaluated points; pure bisection down to the last bit of a double takes fewer
SAMPLE, COARSEST = 16, 128  # a search starts from a sample of one entry in 16; one in 128 if there are many
ENOUGH = 1 << 18  # entries of a sample that give the root to half a percent: more cost more than they save
WORTH = 1 << 20  # entries from which on a pass over a sample saves time
NARROW = 0.1  # of u: half the width of a bracket in which few entries change their branch
SPREAD = {points: list(geometric(points)) for points in (1, 3)}  # without a sample, by the points of a round
MARGIN = 1e-3  # of the gap


def solve(opt: Any, plan: Plan, loss: Loss, weight: float) -> Solved | None:
    """The step of a plan; None if its numbers need doubles.

    The loss is that of this rank, with its weight among the ranks.
    """
    rule, options = plan.rule, opt.param_groups[0]
    rates, lam, k = plan.rates, plan.lam, float(options.get("k", 0.0))
    plan.prepare(k, lam)
    numbers, resting = plan.numbers(options, k, plan.weight), plan.resting_dots()
    ahead: list[float] = []
    if plan.curves and not (rule.matched or rule.distance) and plan.ranks == 1:
        ahead = _ahead(plan, numbers, loss, rates, lam, resting)
    table, heights = plan.sums(rates, ahead)
    if not plan.ordinary(table):
        return None
    travelled: tuple[list[float], list[float]] = plan.distance_sq(opt, table) if rule.distance else ([], [])
    if plan.ranks > 1:
        loss, table, travelled = join_tables(opt._ranks, plan, loss, weight, table, travelled, resting)
        resting = []
    if rule.coupled:
        squares = sum([b * e for b, e in zip(lam, table.x_sq, strict=True)])
        loss = loss._replace(f=loss.f + plan.penalty + squares / 2)
    before = plan.sets_before() if rule.distance else []
    blocks = Blocks(rates, lam, table.d_sq, table.d_dot_x, table.g_sq, plan.sets.of_block, *travelled, before)
    room = Room([0.0] * len(rates), [[0.0] * 5 for _ in before], [0.0] * len(rates), [0.0] * len(rates))
    found = Search(plan, table, lam, ahead, heights)
    step = Step(*take_step(loss, plan.method, numbers, *_products(table, resting), blocks, room, found.choose))
    write = partial(_write, plan, step, blocks, room)
    return Solved(step, k, loss, blocks, room.share, room.after, write, found.memory)


def _products(table: Table, resting: Floats) -> tuple[float, float]:
    """<g, x> and <d, x> over all parameters."""
    at_rest = sum(resting)
    return sum(table.g_dot_x) + at_rest, sum(table.d_dot_x) + sum(table.d_dot_c) + at_rest


class Search:
    """Chooses the step of a plan whose blocks are not all affine; heights at points `ahead` are `known`."""

    def __init__(
        self, plan: Plan, table: Table, lam: Floats, ahead: Sequence[float] = (), known: Heights | None = None
    ) -> None:
        self._plan, self._table, self._lam, self._ahead, self._known = plan, table, lam, list(ahead), known
        self._eps, self._some_affine = plan.eps, any(plan.affine)
        self.memory: list[float] = []  # of DecSPS after the step

    def choose(
        self, bounded: bool, matched: bool, gap: float, longest: float, factor: float, blocks: Blocks, share: Floats
    ) -> Choice:
        """The step of ProxSPS and its relatives, like `plain_step.closed_form`."""
        if self._plan.rule.name != "truncated":
            root, u, height = self._coupled(gap, share)
            return root, u, height, 0.0, u, 1.0
        if all(self._plan.affine):
            return closed_form(bounded, matched, gap, longest, factor, blocks, share)
        if matched and bounded:
            return self._matched(gap, longest, factor, share)
        start, heights = self.curve(gap, [longest * w for w in share])
        if not bounded:
            return 1.0, 1.0, heights([1.0])[0][0], 0.0, 1.0, factor * longest
        return (*self._dual(start, heights), factor * longest)

    def _coupled(self, gap: float, alpha: Floats) -> tuple[float, float, float]:
        """Root, u and height of SPS or DecSPS; the memory of that is in the groups."""
        rule, groups, d_sq = self._plan.rule, [block.group for block in self._plan.blocks], self._table.d_sq
        if rule.name == "sps_max":
            return plain.sps_max(gap, d_sq, alpha, rule.c)
        before, self.memory = [float(group["memory"]) for group in groups], [0.0] * len(groups)
        c = rule.c * math.sqrt(float(groups[0]["k"]) + 1)
        return plain.dec_sps(gap, d_sq, alpha, c, before, self.memory)

    def curve(self, gap: float, alpha: Floats) -> tuple[float, Callable[..., tuple[list[float], list[float]]]]:
        """h(0) for caps alpha, and what evaluates h and its slope at points, on one entry in `every`."""
        start, fall = gap, 0.0
        if self._some_affine:
            start, fall = plain.l2_line(gap, self._table.d_sq, self._table.d_dot_x, self._lines(alpha), self._lam)

        def heights(u: list[float], every: int = 1) -> tuple[list[float], list[float]]:
            if every == 1 and self._known is not None and u == self._ahead:
                h, slope = self._known
            else:
                h, slope = self._plan.heights(alpha, u, every)
            return [start - fall * v + own for v, own in zip(u, h, strict=True)], [own - fall for own in slope]

        return start, heights

    def _lines(self, alpha: Floats) -> list[float]:
        """The caps or shares of affine blocks, 0 for others."""
        return [a if own else 0.0 for a, own in zip(alpha, self._plan.affine, strict=True)]

    def _dual(self, start: float, heights: Callable[..., Any]) -> tuple[float, float, float, float, float]:
        """The dual variable of the truncated model."""
        tolerance, noise = self._stopping(start)
        points = self._ahead or first_points(self._plan, heights, start)
        several = self._plan.points if len(points) == 2 or not self._ahead else 1
        found = search(heights, tolerance, self._eps, LIMIT, noise, points, several)
        return found.unclipped_root(), found.u, found.h, float(found.evaluations), found.u

    def _matched(self, gap: float, longest: float, factor: float, share: Floats) -> Choice:
        """The step of the matched cap."""
        if gap <= 0:
            return 0.0, 0.0, gap, 0.0, 1.0, 0.0
        table, lines = self._table, self._lines(share)
        d_sq = plain.slope_fall(table.d_sq, share)
        if factor == 1 and self._surely_capped(gap, longest, share):  # and the write tells the height
            return plain.matched_root(1.0, gap, longest * d_sq), 1.0, math.nan, 0.0, 1.0, factor * longest
        ratio = plain.ray_ratio(gap, d_sq, longest)

        def height(steps: list[float], every: int = 1) -> list[float]:
            found = self._plan.ray(share, steps, every)
            return [
                plain.l2_matched_height(gap, table.d_sq, table.d_dot_x, lines, self._lam, s) + h
                for s, h in zip(steps, found, strict=True)
            ]

        def evaluate(v: list[float], every: int = 1) -> tuple[list[float], list[float]]:
            positive = [plain.ray_step(one, longest, ratio) for one in v if one > 0]
            found = iter(height(positive, every)) if positive else iter(())
            return [next(found) if one > 0 else gap for one in v], [math.nan] * len(v)

        start = [1.0] if self._plan.entries < WORTH else matched_points(self._plan, evaluate, gap)
        tolerance, noise = self._stopping(gap)
        found = search(evaluate, tolerance, self._eps, LIMIT, noise, start, at_zero=gap)
        s, h = plain.ray_step(found.u, longest, ratio), found.h
        shortest = plain.shortest_step(gap, d_sq, longest)
        if s < shortest:
            s, h = shortest, height([shortest])[0]
        root = plain.matched_root(s / longest, gap, longest * d_sq)
        return root, s / longest, h, float(found.evaluations), 1.0, factor * s

    def _surely_capped(self, gap: float, longest: float, share: Floats) -> bool:
        """Whether the sums alone show that the model stays above its bound; their rounding is far below the margin."""
        table, plan = self._table, self._plan
        if not plan.l1 or plan.ranks > 1 or plan.rule.max_move is not None:
            return False
        sums = table.d_sq, table.d_dot_x, table.p_abs
        return plain.least_height(gap, *sums, share, self._lam, plan.l1, longest) > MARGIN * gap

    def _stopping(self, gap: float) -> tuple[float, float]:
        """The certificate, and the size of h, at which a search stops (`proxsps.core.dual.stopping`)."""
        products = math.sqrt(sum(self._table.noise_sq))
        return (SINGLE if self._eps > 1e-10 else DOUBLE) * abs(gap), 2 * self._eps * products


def _ahead(plan: Plan, numbers: Numbers, loss: Loss, alpha: Floats, lam: Floats, resting: Floats) -> list[float]:
    """Points at which the pass that computes the sums evaluates heights as well; none if they would not help."""
    if not loss.bounded:
        return [1.0]
    if plan.entries < WORTH:
        return SPREAD[plan.points]
    if len(plan.parts) > 1:
        return []
    m, doubt, table = loss.f, 0.0, Table(*[[0.0] * len(alpha)] * 6)
    if plan.rule.beta is not None or any(plan.affine):
        table = Table(*plan.parts[0].part.sampled_sums(SAMPLE))
        m, *_ = linear_model(loss.f, plan.method, numbers, *_products(table, resting))
    if plan.rule.beta is not None:  # a sum over a sample is off by about the root of its squares, scaled up
        doubt = 2 * math.sqrt(SAMPLE * sum(table.noise_sq))
    if not math.isfinite(m + doubt):
        return []
    start, heights = Search(plan, table, lam).curve(m - loss.C, alpha)
    return first_points(plan, heights, start, doubt)


# Where a search starts: in large problems around the root that a sample of the entries gives


def _sample(entries: int) -> tuple[int, float]:
    """One entry in how many a sample has, and the accuracy of h on it, relative to h(0)."""
    every = min(max(SAMPLE, entries // ENOUGH), COARSEST)
    return every, 3 * math.sqrt(every / entries)


def first_points(plan: Any, heights: Sampled, start: float, doubt: float = 0.0) -> list[float]:
    """Points for the first round: on either side of the root that a sample of the entries gives, or all over [0, 1].

    Args:
        plan: the plan.
        heights: (points, one entry in how many) -> h and its slope.
        start: h(0); infinity if the step will be the cap.
        doubt: the possible error of `start`.
    """
    if start == math.inf:
        return [1.0]
    if plan.entries < WORTH:
        return SPREAD[plan.points]
    every, accuracy = _sample(plan.entries)
    noise = accuracy * abs(start) + doubt
    found: Found = search(lambda u: heights(u, every), noise / 100, 1e-3, 8, 0.0, geometric(4), 4)
    u = found.u if found.done else found.estimate
    if not 0 < u < 1 or (plan.points == 1 and found.slope < 0):
        return [u]
    spread = min(-noise / found.slope, u / 4) if found.slope < 0 else u / 4
    inner = [] if spread <= NARROW * u else [u]
    return [u - spread, *inner, min(u + spread, 1.0)]


def matched_points(plan: Any, heights: Sampled, gap: float) -> list[float]:
    """The same for the matched step, which often is the cap: that, and points around a root that a sample gives."""
    every, noise = _sample(plan.entries)
    about = search(lambda v: heights(v, every), noise / 100 * gap, 1e-3, LIMIT, 0.0, [1.0], at_zero=gap).u
    return [1.0] if about >= 1 - noise else [1.0, *(about * (1 + noise * k) for k in (-1.0, 0.0, 1.0))]


# The write


def _write(plan: Plan, step: Step, blocks: Blocks, room: Room) -> Step:
    """Move all blocks; where there is no step, averages are stored and nothing moves, not even onto a constraint.

    Returns the step with its relaxation, and with the height of the new point if kernels have found it meanwhile.
    """
    alpha = [step.reach * a for a in room.share]
    relaxation = plan.write(room.keep, room.move, alpha, step.u, step.reach > 0, step.share)
    step = step if relaxation == 1 else step._replace(relaxation=relaxation)
    if not plan.l1 or not math.isnan(step.height):
        return step
    lines = [w if own else 0.0 for w, own in zip(room.share, plan.affine, strict=True)]
    curved = sum([member.part.height for member in plan.curves])
    affine = plain.l2_matched_height(step.gap, blocks.d_sq, blocks.d_dot_x, lines, blocks.lam, step.longest)
    return step._replace(height=float(curved) + affine)
