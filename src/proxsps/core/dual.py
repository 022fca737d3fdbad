"""The dual variable u of a step with any prox: the root of a decreasing function on [0, 1].

    y_j(u) = prox_{alpha_j phi_j}(x_j - u alpha_j d_j),    h(u) = m - C + sum_j <d_j, y_j(u) - x_j>

h is continuous and non-increasing. u = 1 if h(1) >= 0, u = 0 if h(0) <= 0, else h(u) = 0 (Lemma on the general update).
A search costs passes over the parameters, and one pass can evaluate h at several points while the entries are
in the cache. So the search works in rounds: each evaluates h at a few points, narrows the bracket of the root, and
interpolates the inverse of h between the points nearest to it, by Hermite's cubic where slopes are known and by
Lagrange's otherwise. If two rounds did not halve |h|, the next one divides the bracket evenly: with one point that
is bisection, with more it is faster.

A point u is good enough when its duality gap is small: (1 - u) h(u) where h > 0 and -u h(u) where h < 0 bound how far
the objective at y(u) is from its minimum. For a large cap, whose u is tiny, the second says little about the step: the
truncated model is flat below C, and of a step that is far too long only ||y - x||^2 / (2 alpha) would tell. So for
small u it is -h/8 instead: the linear model may end below C by 8 tolerances at most, whatever the cap is.

The bracket is that of the lowest change of sign among all evaluated points, so that the search also serves functions
that are positive at 0 and not monotone (`proxsps.core.caps`): it then ends at some zero, or at 1 if h(1) >= 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from proxsps.core.array import Array, array_namespace

# Certificate at which a search stops, relative to the gap m - C of the loss: in single and in double precision. About
# the last digit: searches that add up in another order, as on several ranks, are to end at the same point.
SINGLE, DOUBLE = 1e-7, 1e-12

FLOOR = 1 / 8  # of u, in the duality gap of points below C

NEAR = {True: 2, False: 4}  # points that are kept for interpolation, with their slopes or without
# Points of a round around the estimate of the root, in units of how far the two finest estimates are apart: at several
# scales, because that distance only hints at the error.
OFFSETS = (0.0, -1 / 8, 1 / 8, -1 / 64, 1 / 64, -1.0, 1.0, -1 / 512)

Evaluate = Callable[[Array], tuple[Array, Array]]
Certificate = Callable[[Array, Array], Array]  # (u, h(u)) -> how much u is off, 0 for an answer


class Search(NamedTuple):
    """State of a search. Fields have the shape of the runs; those with points have one more axis for them."""

    next: Array  # points to evaluate next
    near: Array  # (3, ..., points): u, h and h' where |h| was smallest, smallest first
    trial: Array  # the root by interpolation
    low: Array  # bracket: h(low) > 0 once `low_seen`, h(high) <= 0 once `high_seen`
    high: Array
    low_seen: Array
    high_seen: Array
    before: Array  # the smallest |h| one and two rounds ago
    stale: Array
    evaluations: Array  # points so far
    done: Array


class Found(NamedTuple):
    """The end of a search."""

    u: Array  # the evaluated point nearest to the root
    h: Array
    slope: Array  # NaN if it is not known
    estimate: Array  # the root by interpolation, not evaluated; for searches that were ended early
    evaluations: Array
    done: Array
    low: Array
    high: Array
    root: Array | None = None  # where h would reach zero beyond [0, 1], if the search has found that too


State = TypeVar("State", bound=tuple[Any, ...])  # a named tuple of arrays
Condition = Callable[[Any], Array]
Body = Callable[[Any], Any]
Loop = Callable[[Condition, Body, Any], Any]


def dual_off(u: Array, h: Array) -> Array:
    """The duality gap, but at least -h/8 where h < 0; 0 at u = 1 with h > 0 and u = 0 with h < 0, which are answers."""
    xp = array_namespace(u)
    below = -h * xp.maximum(u, xp.full_like(u, FLOOR))
    return xp.where(h > 0, (1 - u) * h, xp.where(u <= 0, xp.zeros_like(h), below))  # NaN for NaN


def height_off(u: Array, h: Array) -> Array:
    """|h|, but 0 at u = 1 with h > 0, which is an answer whatever h is."""
    xp = array_namespace(u)
    return xp.where((u >= 1) & (h > 0), xp.zeros_like(h), xp.abs(h))


def search_dual(
    evaluate: Evaluate,
    like: Array,
    tolerance: Array | float,
    resolution: float,
    limit: int,
    loop: Loop,
    noise: Array | float = 0.0,
    start: Array | Sequence[float] = (1.0,),
    points: int = 1,
    slopes: bool = True,
    certificate: Certificate = dual_off,
    at_zero: Array | None = None,
) -> Found:
    """Find u.

    Args:
        evaluate: points u, on the last axis -> (h(u), h'(u)); the slope is NaN where it is not known.
        like: a float array with the shape of the runs, which names library, dtype and device.
        tolerance: the certificate at which to stop.
        resolution: the width of the bracket, relative to u, at which to stop because h cannot distinguish points.
        limit: after this number of evaluated points there is no further round.
        loop: loop(condition, body, state): one of the loops below, or `jax.lax.while_loop`.
        noise: the size of h at which to stop because its sign is rounding.
        start: the points of the first round: numbers, or an array with a last axis of points.
        points: the number of points of each later round, at most eight.
        slopes: False if no slope is ever known; the interpolation then does not use slopes.
        certificate: what is compared with the tolerance.
        at_zero: h(0) > 0 if it is known, so that it is not evaluated.
    """
    xp = array_namespace(like)
    one, zero, no = xp.ones_like(like), xp.zeros_like(like), xp.zeros_like(like, dtype=xp.bool)
    first = _ladder(xp, like, start) if isinstance(start, Sequence) else start
    inf = one * math.inf
    near = xp.stack([xp.stack([one * math.nan] * NEAR[slopes], axis=-1)] * 3)
    seen = no
    if at_zero is not None:
        seen = ~no
        near = xp.concat([xp.stack([zero, at_zero + zero, one * math.nan])[..., None], near[..., 1:]], axis=-1)
    state = Search(first, near, one, zero, one, seen, no, inf, inf, zero, no)

    def unfinished(state: Search) -> Array:
        return ~state.done & (state.evaluations < limit)

    def advance(state: Search) -> Search:
        return _advance(xp, state, *evaluate(state.next), tolerance, resolution, noise, points, slopes, certificate)

    if first.shape[-1] != points:  # loops that compile need states of one shape
        state = advance(state)
    state = loop(unfinished, advance, state)
    u, h, slope = (state.near[i, ..., 0] for i in range(3))
    return Found(u, h, slope, state.trial, state.evaluations, state.done, state.low, state.high)


def eager_loop(condition: Condition, body: Body, state: State) -> State:
    """The loop of a single run whose numbers may be read by the host."""
    while condition(state):
        state = body(state)
    return state


def shared_loop(condition: Condition, body: Body, state: State) -> State:
    """The loop of several runs at once, until all have ended; finished runs stay as they are."""
    while (busy := condition(state)).any():
        state = _masked(busy, body(state), state)
    return state


def fixed_loop(count: int) -> Loop:
    """A loop that never reads a number: `count` rounds, in which finished runs stay as they are."""

    def loop(condition: Condition, body: Body, state: State) -> State:
        for _ in range(count):
            state = _masked(condition(state), body(state), state)
        return state

    return loop


def _masked(busy: Array, new: State, old: State) -> State:
    """The new state of the runs that are busy."""
    xp = array_namespace(busy)
    fields = []
    for after, before in zip(new, old, strict=True):
        fields.append(xp.where(busy[..., None] if after.ndim > busy.ndim else busy, after, before))
    return type(old)(*fields)


def stopping(gap: Array, products: Array, eps: float) -> tuple[Array, Array]:
    """Certificate and size of h at which to stop: `tolerance` and `noise` of a search.

    Each entry of y(u) carries a rounding error of eps |x_i|, which reaches h as eps ||d * x||.

    Args:
        gap: m - C.
        products: the norm ||d * x|| of the entries' products.
        eps: relative rounding of the coarsest entries.
    """
    return (SINGLE if eps > 1e-10 else DOUBLE) * abs(gap), 2 * eps * products


def unclipped_root(found: Found) -> Array:
    """Where h would reach zero beyond [0, 1] if it went on with its last slope; inside, u itself."""
    if found.root is not None:
        return found.root
    xp = array_namespace(found.u)
    outside = ((found.u >= 1) & (found.h > 0)) | ((found.u <= 0) & (found.h < 0))
    beyond = found.u - _divide(xp, found.h, found.slope)
    return xp.where(outside & xp.isfinite(beyond), beyond, found.u)


def geometric(points: int, ratio: float = 4.0) -> tuple[float, ...]:
    """First points for a search without a guess: 1, where it often ends, 0, and powers of 1/ratio."""
    return (1.0, *(ratio**-k for k in range(1, points - 1)), 0.0)[:points]


def _advance(
    xp: ModuleType,
    state: Search,
    h: Array,
    slope: Array,
    tolerance: Array | float,
    resolution: float,
    noise: Array | float,
    points: int,
    slopes: bool,
    certificate: Certificate,
) -> Search:
    """Update with h and h' at state.next, and choose the points of the next round."""
    u, below = state.next, h <= 0
    high = xp.minimum(state.high, xp.min(xp.where(below, u, xp.ones_like(u)), axis=-1))
    above = (h > 0) & (u < high[..., None])  # rounding may order two values the wrong way
    low = xp.maximum(state.low, xp.max(xp.where(above, u, xp.zeros_like(u)), axis=-1))
    bracket = Bracket(low, high, state.low_seen | xp.any(~below, axis=-1), state.high_seen | xp.any(below, axis=-1))

    known = xp.concat([xp.stack([u, h, slope]), state.near], axis=-1)
    # An end that is the answer comes first: where h is flat, rounding may make it smaller elsewhere. NaN comes last.
    far = xp.where(certificate(known[0], known[1]) == 0, xp.zeros_like(known[1]), xp.abs(known[1]))
    order = xp.argsort(far, axis=-1)[..., : NEAR[slopes]]
    if order.ndim == 1:
        near = known[:, order]
    else:
        near = xp.take_along_axis(known, xp.broadcast_to(order, (3, *order.shape)), axis=-1)

    nearest, height = near[0, ..., 0], near[1, ..., 0]
    size = xp.abs(height)
    close = (certificate(nearest, height) <= tolerance) | (size <= noise)
    done = close | (bracket.closed & (high - low <= resolution * high))
    trial, spread = _estimate(xp, near, bracket, slopes)
    following = _round(xp, trial, spread, bracket, size > state.stale / 2, points)
    evaluations = state.evaluations + u.shape[-1]
    return Search(following, near, trial, *bracket, size, state.before, evaluations, done)


class Bracket(NamedTuple):
    """Where the root lies; an end that was not seen was not evaluated."""

    low: Array
    high: Array
    low_seen: Array
    high_seen: Array

    @property
    def closed(self) -> Array:
        """Whether both ends were evaluated."""
        return self.low_seen & self.high_seen

    def fallback(self, xp: ModuleType) -> Array:
        """The middle, or an end that has not been evaluated."""
        return xp.where(self.closed, (self.low + self.high) / 2, xp.where(self.high_seen, self.low, self.high))


def _estimate(xp: ModuleType, near: Array, bracket: Bracket, slopes: bool) -> tuple[Array, Array]:
    """The root by the finest interpolation that stays in the bracket, and how far the one before it was away."""
    low, high = bracket.low, bracket.high
    u, h, slope = (near[..., 0][i] for i in range(3))
    u0, h0, slope0 = (near[..., 1][i] for i in range(3))
    estimates = [u - _divide(xp, h, _divide(xp, h - h0, u - u0))]
    if slopes:
        estimates += [u - _divide(xp, h, slope), _inverse_hermite(xp, u, h, slope, u0, h0, slope0)]
    else:
        estimates += [_inverse_lagrange(xp, near[0, ...], near[1, ...])]
    trial, spread = bracket.fallback(xp), high - low
    for estimate in estimates:
        inside = (estimate > low) & (estimate < high)
        spread = xp.where(inside, xp.abs(estimate - trial), spread)
        trial = xp.where(inside, estimate, trial)
    return trial, spread


def _round(xp: ModuleType, trial: Array, spread: Array, bracket: Bracket, stuck: Array, points: int) -> Array:
    """The points of the next round: around the trial, or spread over the bracket if the last rounds did not help."""
    if points == 1:
        return xp.where(stuck, bracket.fallback(xp), trial)[..., None]
    low, high = bracket.low[..., None], bracket.high[..., None]
    even = low + (high - low) * _ladder(xp, trial, [(k + 1) / (points + 1) for k in range(points)])
    around = trial[..., None] + spread[..., None] * _ladder(xp, trial, OFFSETS[:points])
    inside = (around > low) & (around < high) & ~stuck[..., None]
    chosen = xp.where(inside, around, even)
    # An end that was not evaluated yet is not inside, and may be the answer.
    first = xp.where(bracket.closed | inside[..., 0], chosen[..., 0], bracket.fallback(xp))
    return xp.concat([first[..., None], chosen[..., 1:]], axis=-1)


def _inverse_hermite(xp: ModuleType, u: Array, h: Array, slope: Array, u0: Array, h0: Array, slope0: Array) -> Array:
    """Value at h = 0 of the cubic in h through (h, u) and (h0, u0) with the slopes 1/h' there."""
    width = h0 - h
    t = _divide(xp, -h, width)
    s = 1 - t
    ends = s * s * (1 + 2 * t) * u + t * t * (3 - 2 * t) * u0
    return ends + width * t * s * (s * _divide(xp, 1.0, slope) - t * _divide(xp, 1.0, slope0))


def _inverse_lagrange(xp: ModuleType, u: Array, h: Array) -> Array:
    """Value at h = 0 of the polynomial in h through the points; points without a finite h do not count."""
    seen = xp.isfinite(h)
    h, u = xp.where(seen, h, xp.zeros_like(h)), xp.where(seen, u, xp.zeros_like(u))
    difference = h[..., None, :] - h[..., :, None]
    counts = seen[..., None, :] & (difference != 0)  # not a point with itself, nor with another of the same height
    one = xp.ones_like(difference)
    factors = xp.where(counts, h[..., None, :] / xp.where(counts, difference, one), one)
    return xp.sum(xp.where(seen, u * xp.prod(factors, axis=-1), xp.zeros_like(u)), axis=-1)


def _ladder(xp: ModuleType, like: Array, numbers: Sequence[float]) -> Array:
    """Constants on a last axis behind those of `like`."""
    row = xp.asarray(numbers, dtype=like.dtype)
    return row if like.ndim == 0 else xp.zeros_like(like)[..., None] + row


def _divide(xp: ModuleType, a: Array | float, b: Array) -> Array:
    """a / b, NaN where b = 0."""
    return a / xp.where(b == 0, b * math.nan, b)
