"""The formulas of one step on Python floats, one list entry per block.

On the host, a step of a small model works on a handful of numbers, and each operation of an array library on them takes
as long as a pass over thousands of parameters. These are the formulas of `proxsps.core.step`, `caps`, `estimate` and
`dual` once more, without arrays; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from proxsps.core.caps import LARGEST_RATIO, SMALLEST
from proxsps.core.dual import FLOOR, NEAR, OFFSETS

Floats = Sequence[float]
Evaluate = Callable[[list[float]], tuple[Floats, Floats]]
TINY = 2.2250738585072014e-308  # the smallest normal double
ROUNDS = 64


def corrected_weight(k: float, beta: float) -> float:
    """The weight of a new value in an average with Adam's bias correction (`estimate.corrected_weight`)."""
    return 1 / (1 + math.expm1(k * math.log(beta)) * (beta / (beta - 1))) if beta > 0 else 1.0


def l2_line(gap: float, d_sq: Floats, d_dot_x: Floats, alpha: Floats, lam: Floats) -> tuple[float, float]:
    """h(0) and how far h falls until u = 1, for the squared l2 norm (`step.l2_line`)."""
    shrunk = [a / (1 + a * b) for a, b in zip(alpha, lam, strict=True)]
    pull = sum([a * b * e for a, b, e in zip(shrunk, lam, d_dot_x, strict=True)])
    return gap - pull, sum([a * e for a, e in zip(shrunk, d_sq, strict=True)])


def line_root(start: float, fall: float) -> float:
    """Where a line from `start` reaches 0; 0 if it is flat."""
    return start / fall if fall > 0 else 0.0


def clipped(root: float) -> float:
    """The number of [0, 1] nearest to a root."""
    return min(max(root, 0.0), 1.0)


def l2_matched(gap: float, d_sq: Floats, d_dot_x: Floats, share: Floats, lam: Floats, longest: float) -> float:
    """The step of the matched cap for the squared l2 norm (`caps.l2_matched_step`)."""
    if gap <= 0:
        return 0.0
    if len(d_sq) == 1:
        steep = share[0] * (d_sq[0] + lam[0] * (d_dot_x[0] - gap))
        return min(gap / max(steep, (1 + gap) * TINY), longest)
    push: dict[float, float] = {}  # blocks with the same decay have one term
    for e, f, w, b in zip(d_sq, d_dot_x, share, lam, strict=True):
        push[w * b] = push.get(w * b, 0.0) + w * (e + b * f)
    return first_zero(gap, list(push), list(push.values()), longest)


def l2_matched_height(gap: float, d_sq: Floats, d_dot_x: Floats, share: Floats, lam: Floats, s: float) -> float:
    """H(s) (`caps.l2_matched_height`)."""
    terms = zip(d_sq, d_dot_x, share, lam, strict=True)
    return gap - sum([(e + b * f) * s * w / (1 + s * w * b) for e, f, w, b in terms])


def first_zero(gap: float, decay: Floats, push: Floats, longest: float) -> float:
    """The first zero of H(s) = gap - sum_j push_j s / (1 + decay_j s) on (0, longest], from below; else `longest`.

    Terms with push >= 0 are convex, the others concave. On [low, high], tangents of the first and chords of the others
    make a line below H, whose zero is the new `low`: a valid step at all times. With convex terms alone this is
    Newton's method. A `high` where H is not positive makes the chords tight.
    """
    if len(push) < 3:
        return _two_terms(gap, [*decay, 0.0][:2], [*push, 0.0][:2], longest)
    terms = list(zip(decay, push, strict=True))

    def height(s: float) -> float:
        return gap - sum([b * s / (1 + a * s) for a, b in terms])

    low, high, above = 0.0, longest, gap
    for _ in range(ROUNDS):
        fall = sum([b / ((1 + a * low) * (1 + a * (low if b >= 0 else high))) for a, b in terms])
        if fall * (high - low) <= above:
            return high
        move = above / fall
        for ahead in (math.sqrt((low + move) * high), low + 2 * move):
            if ahead < high and height(ahead) <= 0:
                high = ahead
        if not move > 1e-16 * low:
            break
        low, above = low + move, height(low + move)
        if above <= 0:  # rounding
            break
    return low


def _two_terms(gap: float, decay: Floats, push: Floats, longest: float) -> float:
    """The same for two terms, by the roots of a square (`caps._two_blocks`)."""
    (left, right), (one, two) = decay, push
    b = gap * (left + right) - one - two
    a = gap * (left * right) - one * right - two * left
    inside = b * b - 4 * gap * a
    if inside < 0 or (b >= 0 and a >= 0):
        return longest
    root = math.sqrt(inside)
    return min(2 * gap / (root - b) if b < 0 else (b + root) / (-2 * a), longest)


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


def ray_ratio(gap: float, d_sq: float, longest: float) -> float:
    """How much longer the longest step is than a typical one (`caps.polyak_ray`)."""
    return min(max(longest * d_sq / gap, 1.0), LARGEST_RATIO)


def ray_step(v: float, longest: float, ratio: float) -> float:
    """The step at v in [0, 1] of a ray (`caps.Ray`)."""
    return v * longest / (v + (1 - v) * ratio)


def shortest_step(gap: float, d_sq: float, longest: float) -> float:
    """A step far below any zero (`caps.shortest_step`)."""
    return SMALLEST * min(gap / d_sq if d_sq > 0 else gap, longest)


def relaxation(move_sq: float, max_move: float) -> float:
    """The factor on a move that is too long (`step.relaxation`)."""
    return max_move / math.sqrt(move_sq) if move_sq > max_move * max_move else 1.0
