"""A step on plain numbers: from the sums of its blocks to the coefficients that are written.

Like `proxsps.core.plain`, this is run by Python on lists and compiled by numba on arrays. The choice of the dual
variable is an argument: `closed_form` where all blocks are affine. The search for others, at the end, is for Python
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from proxsps.core.array import Array
from proxsps.core.dual import FLOOR, NEAR, OFFSETS
from proxsps.core.plain import (
    averaged_model,
    clipped,
    distances,
    gradient_squares,
    l2_line,
    l2_matched,
    l2_matched_height,
    line_root,
    matched_root,
    next_share,
    share_out,
    shares,
    slope_fall,
)

Floats = Sequence[float]
Evaluate = Callable[[list[float]], tuple[Floats, Floats]]
Choice = tuple[float, float, float, float, float, float]  # root, dual, height, evaluations, u, reach of a `Step`
TAKEN, SKIPPED, BEYOND, INEXACT = range(4)  # a step is taken, may not be taken, leaves the numbers, needs doubles


class Method(NamedTuple):
    """What sets methods apart."""

    averaged: bool  # models are averaged
    mixed: bool  # the schedule-free form
    coupled: bool  # the squared l2 norm is part of the loss
    in_metric: bool
    matched: bool
    distance: bool  # there is a distance cap
    factor: bool  # rates are factors on the step
    scale: float  # c of the distance cap
    beyond: float  # a move that leaves the range of numbers


class Loss(NamedTuple):
    """The loss of a step."""

    f: float  # with the regulariser, if it is a part of it
    C: float
    bounded: bool  # whether there is a C


class Numbers(NamedTuple):
    """What the groups hold, besides the numbers of sets."""

    k: float  # steps so far
    new: float = 1.0  # weight of this model in the average
    value: float = 0.0  # fbar of averaged models
    offset: float = 0.0  # their gamma
    total: float = 0.0  # W of the schedule-free form
    latest: float = 0.0  # its taumax
    squares: float = 0.0  # rho^2 of its spectral blocks


class Blocks(NamedTuple):
    """The blocks of a step, and their sums, in lists or arrays."""

    rates: Array
    lam: Array  # strengths of the squared l2 norm
    d_sq: Array  # <d, p>
    d_dot_x: Array
    g_sq: Array  # ||D^-1 g||^2; only with averages, and in the schedule-free form
    of: Array  # the set of each block
    moved_sq: Array  # ||x - x_0||^2 of each set
    start_sq: Array  # ||x_0||^2 of each set, at its first step
    before: Array  # of each set, as in `plain.distances`


class Room(NamedTuple):
    """Where results go, in lists or arrays."""

    share: Array  # caps of the blocks, or their shares of one cap
    after: Array  # of each set, as in `plain.distances`
    keep: Array  # x <- keep x + move p
    move: Array


class Step(NamedTuple):
    """The result: block j goes u share_j reach along its direction, with a prox of size share_j reach."""

    code: int
    gap: float
    distance: float  # cap; NaN without
    longest: float  # cap of all blocks, before factors
    caps: float  # the same with factors
    root: float  # for the report, as in `rules.Decision`
    dual: float
    height: float
    evaluations: float
    u: float
    reach: float
    relaxation: float  # by a limit on the move
    share: float  # of the new point in the average of the schedule-free form
    value: float  # of `Numbers` after the step, like what follows
    offset: float
    total: float
    latest: float
    squares: float


def take_step(
    loss: Loss,
    method: Method,
    numbers: Numbers,
    g_dot_x: float,
    d_dot_x: float,
    blocks: Blocks,
    room: Room,
    choose: Callable[..., Choice],
) -> tuple[Any, ...]:
    """Choose a step, with `choose` as in `closed_form`; returns the entries of `Step`: numba makes tuples faster.

    The products are those over all parameters; in the schedule-free form the first one is <g, z - y>.
    """
    m, value, offset = linear_model(loss.f, method, numbers, g_dot_x, d_dot_x)
    gap, above = m - loss.C, loss.f - loss.C  # the model may be below the bound, even if the loss is not
    finite = math.isfinite(gap) and math.isfinite(above)
    for j in range(len(blocks.rates)):
        finite = finite and math.isfinite(blocks.d_sq[j]) and math.isfinite(blocks.d_dot_x[j])
    code = TAKEN if finite and not (loss.bounded and above < 0) else SKIPPED
    distance, longest, factor = math.nan, 1.0, 1.0
    root, dual, height, evaluations, u, reach = 0.0, 0.0, gap, 0.0, 0.0, 0.0
    share, total, latest, squares = 1.0, numbers.total, numbers.latest, numbers.squares
    if code == TAKEN:
        distance, longest, factor = caps(method, numbers.k, blocks, room)
        if longest > 0:
            root, dual, height, evaluations, u, reach = choose(
                loss.bounded, method.matched, gap, longest, factor, blocks, room.share
            )
        code = coefficients(method, u, reach, blocks, room)
        if method.mixed:
            share, total, latest = next_share(total, latest, numbers.k, u * reach)
            squares = gradient_squares(numbers.k, squares)
    return (
        code, gap, distance, longest, factor * longest, root, dual, height, evaluations, u, reach, 1.0, share, value,
        offset, total, latest, squares,
    )  # fmt: skip


def linear_model(
    f: float, method: Method, numbers: Numbers, g_dot_x: float, d_dot_x: float
) -> tuple[float, float, float]:
    """m, and value and offset of the average after the step."""
    if method.averaged:
        return averaged_model(f, numbers.new, numbers.value, numbers.offset, g_dot_x, d_dot_x)
    return f + g_dot_x if method.mixed else f, numbers.value, numbers.offset


def caps(method: Method, k: float, blocks: Blocks, room: Room) -> tuple[float, float, float]:
    """The distance cap, the cap of all blocks and the factor on it; those of single blocks, or shares, go to `room`."""
    if not (method.matched or method.distance):
        for j in range(len(blocks.rates)):
            room.share[j] = blocks.rates[j]
        return math.nan, 1.0, 1.0
    largest = shares(blocks.rates, room.share)
    if not method.distance:
        return math.nan, largest, 1.0
    squares = blocks.g_sq if method.averaged or method.mixed else blocks.d_sq
    factor, limit = (largest, math.inf) if method.factor else (1.0, largest)
    distances(
        blocks.of, room.share, squares, blocks.moved_sq, blocks.start_sq, k, factor, method.factor, method.scale,
        blocks.before, room.after,
    )  # fmt: skip
    distance = share_out(blocks.of, room.after, limit, room.share)
    return distance, min(limit, distance), factor


def closed_form(
    bounded: bool, matched: bool, gap: float, longest: float, factor: float, blocks: Blocks, share: Floats
) -> Choice:
    """The step of affine blocks."""
    if matched and bounded:
        s = l2_matched(gap, blocks.d_sq, blocks.d_dot_x, share, blocks.lam, longest)
        height = l2_matched_height(gap, blocks.d_sq, blocks.d_dot_x, share, blocks.lam, s)
        root = matched_root(s / longest, gap, longest * slope_fall(blocks.d_sq, share))
        return root, s / longest, height, 0.0, 1.0, factor * s
    alpha = [0.0] * len(share)
    for j in range(len(share)):
        alpha[j] = longest * share[j]
    start, fall = l2_line(gap, blocks.d_sq, blocks.d_dot_x, alpha, blocks.lam)
    root = line_root(start, fall) if bounded else 1.0
    u = clipped(root)
    return root, u, start - fall * u, 0.0, u, factor * longest


def coefficients(method: Method, u: float, reach: float, blocks: Blocks, room: Room) -> int:
    """Keep and move of each block; returns whether an entry would move beyond the range of numbers."""
    code = TAKEN
    for j in range(len(blocks.rates)):
        alpha, lam = reach * room.share[j], blocks.lam[j]
        length = 1.0 if method.in_metric else math.sqrt(blocks.d_sq[j])  # in Adam's metric directions are about 1
        if not u * reach * room.share[j] * length < method.beyond:
            code = BEYOND
        room.keep[j] = 1 - alpha * u * lam if method.coupled else 1 / (1 + alpha * lam)
        room.move[j] = -alpha * u if method.coupled else -(alpha * room.keep[j]) * u
    return code


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
