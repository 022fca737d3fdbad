"""Searches of a plan on the host, over blocks that are not affine: for the dual variable, or for the matched step.

Large problems start from a sample of their entries, which gives an estimate of the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from proxsps.core import plain
from proxsps.core.dual import DOUBLE, SINGLE, geometric
from proxsps.core.plain_search import Found, search
from proxsps.core.rules import Decision
from proxsps.optim.plan import Plan
from proxsps.optim.rule import Heights, Table

LIMIT = 64  # evaluated points; pure bisection down to the last bit of a double takes fewer
SAMPLE, COARSEST = 16, 64  # a search starts from a sample of one entry in 16; one in 64 if there are many
ENOUGH = 1 << 18  # entries of a sample that give the root to half a percent: more cost more than they save
WORTH = 1 << 20  # entries from which on a pass over a sample saves time

Floats = Sequence[float]


class Model(NamedTuple):
    """The linear model of a step, with one number per block in each list."""

    gap: float  # m - C
    table: Table
    alpha: list[float]  # caps, or shares of one cap
    lam: list[float]  # strengths of the squared l2 norm; 0 for blocks that are not affine


class Search:
    """Searches of a step over the blocks of a plan that are not affine.

    Args:
        plan: the plan.
        model: the linear model, with caps or shares.
        ahead: points that were evaluated with the sums.
        known: the heights there.
    """

    def __init__(self, plan: Plan, model: Model, ahead: Sequence[float] = (), known: Heights | None = None) -> None:
        self._plan, self._model, self._ahead, self._known = plan, model, list(ahead), known
        self._eps = plan.eps

    def line(self, alpha: Floats) -> tuple[float, float]:
        """h(0) and how far h falls, of the affine blocks."""
        gap, table, _, lam = self._model
        affine = [a if own else 0.0 for a, own in zip(alpha, self._plan.affine, strict=True)]
        return plain.l2_line(gap, table.d_sq, table.d_dot_x, affine, lam)

    def heights(self, alpha: Floats, u: list[float], every: int = 1) -> tuple[list[float], list[float]]:
        """h and its slope at the points u, with the line of the affine blocks."""
        start, fall = self.line(alpha)
        if every == 1 and self._known is not None and u == self._ahead:
            h, slope = self._known
        else:
            h, slope = self._plan.heights(alpha, u, every)
        return [start - fall * v + own for v, own in zip(u, h, strict=True)], [own - fall for own in slope]

    def dual(self, alpha: Floats) -> Decision:
        """The dual variable of the truncated model."""
        start, _ = self.line(alpha)
        tolerance, noise = self._stopping(start)
        points, several = self._ahead, 1
        if not points:
            points = first_points(self._plan, lambda u, n: self.heights(alpha, u, n), start)
            several = self._plan.points if len(points) == self._plan.points else 1
        found = search(lambda u: self.heights(alpha, u), tolerance, self._eps, LIMIT, noise, points, several)
        return Decision(found.unclipped_root(), found.u, found.h, float(found.evaluations))

    def matched(self, longest: float) -> tuple[Decision, float]:
        """The step of the matched cap: its report, and its size s."""
        gap, table, share, lam = self._model
        if gap <= 0:
            return Decision(0.0, 0.0, gap), 0.0
        d_sq = sum([w * e for w, e in zip(share, table.d_sq, strict=True)])
        ratio = plain.ray_ratio(gap, d_sq, longest)
        lines = [w if own else 0.0 for w, own in zip(share, self._plan.affine, strict=True)]

        def height(steps: list[float], every: int = 1) -> list[float]:
            found = self._plan.ray(share, steps, every)
            return [
                plain.l2_matched_height(gap, table.d_sq, table.d_dot_x, lines, lam, s) + h
                for s, h in zip(steps, found, strict=True)
            ]

        def evaluate(v: list[float], every: int = 1) -> tuple[list[float], list[float]]:
            positive = [plain.ray_step(one, longest, ratio) for one in v if one > 0]
            found = iter(height(positive, every)) if positive else iter(())
            return [next(found) if one > 0 else gap for one in v], [math.nan] * len(v)

        start = [1.0]
        if self._plan.entries >= WORTH:
            every, noise = _sample(self._plan.entries)
            about = search(lambda v: evaluate(v, every), noise / 100 * gap, 1e-3, LIMIT, 0.0, [1.0], at_zero=gap).u
            if about < 1 - noise:
                start = [1.0, *(about * (1 + noise * k) for k in (-1.0, 0.0, 1.0))]
        tolerance, noise = self._stopping(gap)
        found = search(evaluate, tolerance, self._eps, LIMIT, noise, start, at_zero=gap)
        s, h = plain.ray_step(found.u, longest, ratio), found.h
        shortest = plain.shortest_step(gap, d_sq, longest)
        if s < shortest:
            s, h = shortest, height([shortest])[0]
        u = s / longest
        steep = longest * d_sq
        root = u if u < 1 else max(gap / steep if steep > 0 else gap, 1.0)
        return Decision(root, u, h, float(found.evaluations)), s

    def _stopping(self, gap: float) -> tuple[float, float]:
        """The certificate, and the size of h, at which a search stops (`proxsps.core.dual.stopping`)."""
        products = math.sqrt(self._plan.noise_sq(self._model.table))
        return (SINGLE if self._eps > 1e-10 else DOUBLE) * abs(gap), 2 * self._eps * products


def _sample(entries: int) -> tuple[int, float]:
    """One entry in how many a sample has, and the accuracy of h on it, relative to h(0)."""
    every = min(max(SAMPLE, entries // ENOUGH), COARSEST)
    return every, 3 * math.sqrt(every / entries)


def first_points(
    plan: Plan, heights: Callable[[list[float], int], tuple[list[float], list[float]]], start: float, doubt: float = 0.0
) -> list[float]:
    """Points for the first round: around the root that a sample of the entries gives, or all over [0, 1].

    Args:
        plan: the plan.
        heights: (points, one entry in how many) -> h and its slope.
        start: h(0); infinity if the step will be the cap.
        doubt: the possible error of `start`.
    """
    if start == math.inf:
        return [1.0]
    if plan.entries < WORTH:
        return list(geometric(plan.points))
    every, accuracy = _sample(plan.entries)
    noise = accuracy * abs(start) + doubt
    found: Found = search(lambda u: heights(u, every), noise / 100, 1e-3, 8, 0.0, geometric(4), 4)
    u = found.u if found.done else found.estimate
    if not 0 < u < 1 or (plan.points == 1 and found.slope < 0):
        return [u]
    spread = min(-noise / found.slope, u / 4) if found.slope < 0 else u / 4
    return [min(u + spread * k, 1.0) for k in (-1.0, 0.0, 1.0)]
