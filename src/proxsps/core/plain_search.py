"""The search of `proxsps.core.dual` on Python floats, for one run; tests compare the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from proxsps.core.dual import FLOOR, NEAR, OFFSETS

Floats = Sequence[float]
Evaluate = Callable[[list[float]], tuple[Floats, Floats]]


class Found(NamedTuple):
    """The end of a search (`dual.Found`)."""

    u: float
    h: float
    slope: float
    estimate: float
    evaluations: int
    done: bool

    def unclipped_root(self) -> float:
        """Where h would reach zero beyond [0, 1] if it went on with its last slope; inside, u itself."""
        outside = (self.u >= 1 and self.h > 0) or (self.u <= 0 and self.h < 0)
        beyond = self.u - divided(self.h, self.slope)
        return beyond if outside and math.isfinite(beyond) else self.u


def dual_off(u: float, h: float) -> float:
    """How much a dual variable is off (`dual.dual_off`)."""
    if h > 0:
        return (1 - u) * h
    return 0.0 if u <= 0 else -h * max(u, FLOOR)


def height_off(u: float, h: float) -> float:
    """How much a point of the ray is off (`dual.height_off`)."""
    return 0.0 if u >= 1 and h > 0 else abs(h)


def search(
    evaluate: Evaluate,
    tolerance: float,
    resolution: float,
    limit: int,
    noise: float,
    start: Floats,
    points: int = 1,
    at_zero: float | None = None,
) -> Found:
    """The search of `dual.search_dual` for one run.

    With `at_zero`, h(0) > 0, the function need not be monotone: no slopes are used, and what counts is |h|.
    """
    slopes, off = at_zero is None, dual_off if at_zero is None else height_off
    near: list[tuple[float, float, float]] = [] if at_zero is None else [(0.0, at_zero, math.nan)]
    low, high, low_seen, high_seen = 0.0, 1.0, at_zero is not None, False
    before = stale = math.inf
    following, evaluations, done, trial = list(start), 0, False, 1.0
    while not done and evaluations < limit:
        heights, bends = evaluate(following)
        new = list(zip(following, heights, bends, strict=True))
        evaluations += len(new)
        high = min([high, *(u for u, h, _ in new if h <= 0)])
        low = max([low, *(u for u, h, _ in new if h > 0 and u < high)])
        high_seen = high_seen or any([h <= 0 for h in heights])
        low_seen = low_seen or not all([h <= 0 for h in heights])
        # An end that is the answer comes first: where h is flat, rounding may make it smaller elsewhere. NaN is last.
        far = [(0.0 if off(u, h) == 0 else abs(h) if h == h else math.inf) for u, h, _ in [*new, *near]]
        near = [point for _, point in sorted(zip(far, [*new, *near], strict=True), key=lambda pair: pair[0])]
        near = near[: NEAR[slopes]]
        u, h, _ = near[0]
        size = abs(h)
        closed = low_seen and high_seen
        done = off(u, h) <= tolerance or size <= noise or (closed and high - low <= resolution * high)
        fallback = (low + high) / 2 if closed else low if high_seen else high
        trial, spread = _estimate(near, low, high, fallback, slopes)
        following = _round(trial, spread, low, high, fallback, closed, not size <= stale / 2, points)
        before, stale = size, before
    u, h, slope = near[0]
    return Found(u, h, slope, trial, evaluations, done)


def _estimate(
    near: Sequence[tuple[float, float, float]], low: float, high: float, fallback: float, slopes: bool
) -> tuple[float, float]:
    """The root by the finest interpolation that stays in the bracket, and how far the one before it was away."""
    u, h, slope = near[0]
    u0, h0, slope0 = near[1] if len(near) > 1 else (math.nan, math.nan, math.nan)
    estimates = [u - divided(h, divided(h - h0, u - u0))]
    if slopes:
        estimates += [u - divided(h, slope), _inverse_hermite(u, h, slope, u0, h0, slope0)]
    else:
        estimates.append(_inverse_lagrange([(v, g) for v, g, _ in near if math.isfinite(g)]))
    trial, spread = fallback, high - low
    for estimate in estimates:
        if low < estimate < high:
            trial, spread = estimate, abs(estimate - trial)
    return trial, spread


def _round(
    trial: float, spread: float, low: float, high: float, fallback: float, closed: bool, stuck: bool, points: int
) -> list[float]:
    """The points of the next round: around the trial, or spread over the bracket if the last rounds did not help."""
    if points == 1:
        return [fallback if stuck else trial]
    chosen = []
    for k in range(points):
        around = trial + spread * OFFSETS[k]
        inside = low < around < high and not stuck
        if k == 0 and not closed and not inside:  # an end that was not evaluated yet may be the answer
            chosen.append(fallback)
        else:
            chosen.append(around if inside else low + (high - low) * (k + 1) / (points + 1))
    return chosen


def _inverse_hermite(u: float, h: float, slope: float, u0: float, h0: float, slope0: float) -> float:
    width = h0 - h
    t = divided(-h, width)
    s = 1 - t
    ends = s * s * (1 + 2 * t) * u + t * t * (3 - 2 * t) * u0
    return ends + width * t * s * (s * divided(1.0, slope) - t * divided(1.0, slope0))


def _inverse_lagrange(points: Sequence[tuple[float, float]]) -> float:
    total = 0.0
    for u, h in points:
        for _, other in points:
            if other != h:
                u *= other / (other - h)
        total += u
    return total


def divided(a: float, b: float) -> float:
    """a / b, NaN where b = 0."""
    return a / b if b != 0 else math.nan
