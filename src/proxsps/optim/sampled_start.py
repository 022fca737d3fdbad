"""Where a search on the host starts: in large problems around the root that a sample of the entries gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from proxsps.core.dual import geometric
from proxsps.core.plain_step import Found, search

LIMIT = 64  # evaluated points; pure bisection down to the last bit of a double takes fewer
SAMPLE, COARSEST = 16, 128  # a search starts from a sample of one entry in 16; one in 128 if there are many
ENOUGH = 1 << 18  # entries of a sample that give the root to half a percent: more cost more than they save
WORTH = 1 << 20  # entries from which on a pass over a sample saves time
NARROW = 0.1  # of u: half the width of a bracket in which few entries change their branch
SPREAD = {points: list(geometric(points)) for points in (1, 3)}  # without a sample, by the points of a round

Sampled = Callable[[list[float], int], tuple[list[float], list[float]]]


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
