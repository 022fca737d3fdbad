"""The dual variable u of a step with any prox: the root of a decreasing function on [0, 1].

    y_j(u) = prox_{alpha_j phi_j}(x_j - u alpha_j d_j),    h(u) = m - C + sum_j <d_j, y_j(u) - x_j>

h is continuous and non-increasing. u = 1 if h(1) >= 0, u = 0 if h(0) <= 0, else h(u) = 0 (Lemma on the general update).
One evaluation of h costs one prox of everything, so evaluations are what the search saves: it starts at u = 1, which
has to be tried anyway, and goes on by Hermite interpolation of the inverse of h where slopes are known, by secants
where not, inside a bracket that halves at the latest when progress stops.

A point u is good enough when its duality gap, (1 - u) h(u) where h > 0 and -u h(u) where h < 0, is: that is how far
the model at y(u) can be from its minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace

# Duality gap at which a search stops, relative to the gap m - C of the loss: in single and in double precision. About
# the last digit: searches that add up in another order, as on several ranks, are to end at the same point.
SINGLE, DOUBLE = 1e-7, 1e-12

Evaluate = Callable[[Array], tuple[Array, Array]]


class Search(NamedTuple):
    """State of the search; every field has the shape of the runs."""

    u: Array  # the point to evaluate next; at the end, the answer
    low: Array  # bracket: h(low) > 0 once `low_seen`, h(high) < 0 after the first evaluation
    high: Array
    low_seen: Array
    at: Array  # last evaluated point, h and h' there
    h: Array
    slope: Array
    stale: Array  # |h| two evaluations ago
    evaluations: Array
    done: Array


Loop = Callable[[Callable[[Search], Array], Callable[[Search], Search], Search], Search]


def search_dual(
    evaluate: Evaluate,
    like: Array,
    tolerance: Array,
    resolution: float,
    limit: int,
    loop: Loop,
    noise: Array | float = 0.0,
) -> Search:
    """Find u; the answer is `result.u`, the point at which h was evaluated last.

    Args:
        evaluate: u -> (h(u), h'(u)); the slope is NaN where it is not known.
        like: a float array with the shape of the runs, which names library, dtype and device.
        tolerance: the duality gap at which to stop.
        resolution: the width of the bracket, relative to u, at which to stop because h cannot tell points apart.
        limit: the largest number of evaluations.
        loop: loop(condition, body, state), for instance `fixed_loop(limit)` or `jax.lax.while_loop`.
        noise: the size of h at which to stop because its sign is rounding.
    """
    xp = array_namespace(like)
    one, zero, no = xp.ones_like(like), xp.zeros_like(like), xp.zeros_like(like, dtype=xp.bool)
    nan, inf = one * math.nan, one * math.inf
    start = Search(one, zero, one, no, nan, nan, nan, inf, zero, no)

    def unfinished(state: Search) -> Array:
        return ~state.done & (state.evaluations < limit)

    def advance(state: Search) -> Search:
        after = _advance(state, *evaluate(state.u), tolerance, resolution, noise)
        after = after._replace(u=xp.where(unfinished(after), after.u, after.at))
        busy = unfinished(state)
        return Search(*(xp.where(busy, new, old) for new, old in zip(after, state, strict=True)))

    return loop(unfinished, advance, start)


def stopping(gap: Array, products: Array, eps: float) -> tuple[Array, Array]:
    """Duality gap and size of h at which to stop: `tolerance` and `noise` of a search.

    Each entry of y(u) carries a rounding error of eps |x_i|, which reaches h as eps ||d * x||.

    Args:
        gap: m - C.
        products: the norm ||d * x|| of the entries' products.
        eps: relative rounding of the coarsest entries.
    """
    return (SINGLE if eps > 1e-10 else DOUBLE) * abs(gap), 2 * eps * products


def fixed_loop(count: int) -> Loop:
    """A while loop that never looks at its condition: `count` rounds, in which finished runs stay as they are."""

    def loop(condition: Callable[[Search], Array], body: Callable[[Search], Search], state: Search) -> Search:
        for _ in range(count):
            state = body(state)
        return state

    return loop


def unclipped_root(search: Search) -> Array:
    """Where h would reach zero beyond [0, 1] if it went on with its last slope; inside, u itself."""
    xp = array_namespace(search.u)
    outside = ((search.u >= 1) & (search.h > 0)) | ((search.u <= 0) & (search.h < 0))
    beyond = search.u - _divide(search.h, search.slope)
    return xp.where(outside & xp.isfinite(beyond), beyond, search.u)


def _advance(
    state: Search, h: Array, slope: Array, tolerance: Array, resolution: float, noise: Array | float
) -> Search:
    """Take in h and h' at state.u, and choose the next point."""
    xp = array_namespace(h)
    u = state.u
    low, high = xp.where(h > 0, u, state.low), xp.where(h > 0, state.high, u)
    low_seen = state.low_seen | (h > 0)

    # From the finest to the plainest; an estimate that leaves the bracket gives way to the next one.
    trial = xp.where(low_seen, (low + high) / 2, low)
    chord = _divide(h - state.h, u - state.at)
    newton = u - _divide(h, slope)
    for estimate in (u - _divide(h, chord), newton, _inverse_hermite(u, h, slope, state.at, state.h, state.slope)):
        trial = xp.where((estimate > low) & (estimate < high), estimate, trial)
    stuck = xp.abs(h) > state.stale / 2
    trial = xp.where(stuck, xp.where(low_seen, (low + high) / 2, low), trial)

    duality_gap = xp.where(h > 0, (1 - u) * h, -u * h)  # 0 at u = 1 with h > 0 and at u = 0 with h < 0
    stale = xp.where(xp.isnan(state.h), state.stale, xp.abs(state.h))
    done = (duality_gap <= tolerance) | (xp.abs(h) <= noise) | (low_seen & (high - low <= resolution * high))
    return Search(trial, low, high, low_seen, u, h, slope, stale, state.evaluations + 1, done)


def _inverse_hermite(u: Array, h: Array, slope: Array, u0: Array, h0: Array, slope0: Array) -> Array:
    """Value at h = 0 of the cubic in h through (h, u) and (h0, u0) with the slopes 1/h' there."""
    width = h0 - h
    t = _divide(-h, width)
    s = 1 - t
    ends = s * s * (1 + 2 * t) * u + t * t * (3 - 2 * t) * u0
    return ends + width * t * s * (s * _divide(1.0, slope) - t * _divide(1.0, slope0))


def _divide(a: Array | float, b: Array) -> Array:
    """a / b, NaN where b = 0."""
    xp = array_namespace(b)
    return a / xp.where(b == 0, xp.full_like(b, math.nan), b)
