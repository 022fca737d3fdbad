"""The formulas of one step on plain numbers, in loops over blocks or over sets of them.

On the host, a step of a small model works on a handful of numbers, and each operation of an array library on them takes
as long as a pass over thousands of parameters. These are the formulas of `proxsps.core.step`, `caps`, `estimate` and
`distance` once more, without arrays; tests compare the two. Python runs them on lists, and numba compiles them on
arrays: so there are no comprehensions, objects or keywords in them. The search at the end is for Python alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSequence, Sequence
from typing import NamedTuple

from proxsps.core.caps import LARGEST_RATIO, SMALLEST
from proxsps.core.distance import FORGETTING, LARGEST, START
from proxsps.core.dual import FLOOR, NEAR, OFFSETS
from proxsps.core.schedule_free import LATEST, POWER, WINDOW

Floats = Sequence[float]
Evaluate = Callable[[list[float]], tuple[Floats, Floats]]


def corrected_weight(k: float, beta: float) -> float:
    """The weight of a new value in an average with Adam's bias correction (`estimate.corrected_weight`)."""
    return 1 / (1 + math.expm1(k * math.log(beta)) * (beta / (beta - 1))) if beta > 0 else 1.0


def averaged_model(
    f: float, new: float, value: float, offset: float, g_dot_x: float, d_dot_x: float
) -> tuple[float, float, float]:
    """m, and the new fbar and gamma, of an average in which f has the weight `new` (`estimate.averaged_value`)."""
    value = (1 - new) * value + new * f
    offset = (1 - new) * offset + new * g_dot_x
    return f + ((value - f) - (offset - d_dot_x)), value, offset


def gradient_weight(k: float) -> float:
    """mu, the weight of the old average of gradients (`schedule_free.gradient_weights`)."""
    return min(k / (k + WINDOW), LATEST)


def gradient_squares(k: float, squares: float) -> float:
    """The sum of the squared weights of all gradients in that average, from the last one."""
    mu = gradient_weight(k)
    return mu * mu * squares + (1 - mu) ** 2


# Caps


def shares(rates: Floats, out: MutableSequence[float]) -> float:
    """The largest rate; `out` gets all of them divided by it."""
    largest = 0.0
    for rate in rates:
        largest = max(largest, rate)
    for j in range(len(rates)):
        out[j] = rates[j] / largest if largest > 0 else 0.0
    return largest


def distances(
    of: Sequence[int],
    share: Floats,
    squares: Floats,
    moved_sq: Floats,
    start_sq: Floats,
    k: float,
    factor: float,
    is_factor: bool,
    scale: float,
    before: Sequence[Floats],
    after: Sequence[MutableSequence[float]],
) -> None:
    """The distance cap of each set of blocks (`distance.update_travel`, `distance.distance_cap`).

    Args:
        of: the set of each block.
        share: of each block in the step.
        squares: ||D_j^-1 g_j||^2 of each block.
        moved_sq: ||x - x_0||^2 of each set.
        start_sq: ||x_0||^2 of each set, at its first step.
        k: steps so far.
        factor: on the step of all blocks.
        is_factor: whether shares are factors on the step, too. That of a set is then the largest one of its blocks.
        scale: c.
        before: rbar, G, the first estimate of the distance and K of each set.
        after: gets the same after the step, and the cap.
    """
    new, moves = corrected_weight(k, FORGETTING), False
    for j in range(len(of)):
        moves = moves or share[j] > 0
    for i in range(len(before)):
        largest = 0.0
        for j in range(len(of)):
            if of[j] == i:
                largest = max(largest, share[j])
        moving = 0.0  # where all shares are 0, the average goes on while nothing moves
        for j in range(len(of)):
            if of[j] == i:
                moving += (share[j] / largest) ** 2 * squares[j] if largest > 0 else squares[j]
        own = factor * largest if is_factor else factor
        moving *= largest**2 if moves and not is_factor else 1.0
        first = before[i][2]
        if not first > 0 and start_sq[i] + moving > 0:  # a set may get its first gradients later than others
            first = START * (1 + math.sqrt(start_sq[i]))
        reach = max(before[i][0], math.sqrt(moved_sq[i]), own * first)
        g_sq = (1 - new) * before[i][1] + new * moving
        weight = before[i][3] + own * own
        total = math.sqrt(weight * g_sq)
        cap = min(scale * reach / total, LARGEST) if total > 0 else 0.0
        after[i][0], after[i][1], after[i][2], after[i][3], after[i][4] = reach, g_sq, first, weight, cap


def share_out(of: Sequence[int], after: Sequence[Floats], limit: float, share: MutableSequence[float]) -> float:
    """The largest distance cap; shares are multiplied by the cap of their set divided by it, each up to a limit."""
    longest = 0.0
    for own in after:
        longest = max(longest, own[4])
    if len(after) > 1 and min(longest, limit) > 0:
        for j in range(len(of)):
            share[j] *= min(after[of[j]][4], limit) / min(longest, limit)
    return longest


def next_share(total: float, longest: float, k: float, tau: float) -> tuple[float, float, float]:
    """The share of the new point in the average, then W and taumax after the step (`schedule_free.next_share`)."""
    longest = max(longest, tau)
    weight = (k + 1) ** POWER * longest * longest
    total += weight
    return weight / total if total > 0 else 1.0, total, longest


# The squared l2 norm


def l2_line(gap: float, d_sq: Floats, d_dot_x: Floats, alpha: Floats, lam: Floats) -> tuple[float, float]:
    """h(0) and how far h falls until u = 1, for the squared l2 norm (`step.l2_line`)."""
    pull, fall = 0.0, 0.0
    for j in range(len(alpha)):
        shrunk = alpha[j] / (1 + alpha[j] * lam[j])
        pull += shrunk * lam[j] * d_dot_x[j]
        fall += shrunk * d_sq[j]
    return gap - pull, fall


def line_root(start: float, fall: float) -> float:
    """Where a line from `start` reaches 0; 0 if it is flat."""
    return start / fall if fall > 0 else 0.0


def clipped(root: float) -> float:
    """The number of [0, 1] nearest to a root."""
    return min(max(root, 0.0), 1.0)


def l2_matched_height(gap: float, d_sq: Floats, d_dot_x: Floats, share: Floats, lam: Floats, s: float) -> float:
    """H(s) (`caps.l2_matched_height`)."""
    fall = 0.0
    for j in range(len(d_sq)):
        fall += (d_sq[j] + lam[j] * d_dot_x[j]) * s * share[j] / (1 + s * share[j] * lam[j])
    return gap - fall


# Rays, and lengths of moves


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


# The search of `proxsps.core.dual`, for one run


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
