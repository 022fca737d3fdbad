"""The dual variable by a fixed number of rounds, with as few operations as possible.

On an accelerator every operation on a number is a launch, and nothing may be read back to stop early. There this
search replaces that of `proxsps.core.dual`: each round evaluates h at a ladder of points, picks the two between which h
changes sign, and interpolates its inverse there. The next ladder narrows towards that estimate from both ends of the
bracket, at several scales: near it if the interpolation was good, and no worse than a fixed part of the bracket if it
was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from proxsps.core.array import Array, array_namespace
from proxsps.core.dual import Evaluate, Found

POINTS = 6
LADDER = (0.0, *(4.0**-k for k in range(POINTS - 2, -1, -1)))
# How far from the estimate the points of a later round lie, as parts of its distance to either end of the bracket.
NEARNESS = (1 / 8, 1 / 64, 1 / 2048)


def refine_dual(evaluate: Evaluate, like: Array, rounds: int) -> Found:
    """The dual variable of one run after this many rounds of six points; see `search_dual` for the arguments.

    Inside (0, 1) the answer is an interpolated root that was not evaluated; its h is reported as zero.
    """
    xp = array_namespace(like)
    nowhere = [0.0] * len(NEARNESS)
    to_low, to_high = _constants(like, [*NEARNESS, *nowhere]), _constants(like, [*nowhere, *reversed(NEARNESS)])
    u = _constants(like, LADDER)
    known = xp.stack([u, *evaluate(u)])
    ends, estimate = _bracket(xp, known)
    for _ in range(rounds - 1):
        u = estimate + (ends[0, 0] - estimate) * to_low + (ends[0, 1] - estimate) * to_high
        known = xp.stack([u, *evaluate(u)])
        ends, estimate = _bracket(xp, xp.concat([ends[:, :1], known, ends[:, 1:]], axis=1))
    (low, high), (h, _), (slope, _) = ends
    # Where the two ends are one point, h has one sign on all of [0, 1].
    h = xp.where(low == high, h, xp.zeros_like(h))
    evaluations = xp.full_like(h, float(POINTS * rounds))
    return Found(estimate, h, slope, estimate, evaluations, low <= high, low, high)


def _bracket(xp: ModuleType, known: Array) -> tuple[Array, Array]:
    """The two neighbours between which h changes sign, and the root by interpolation.

    Args:
        xp: the array library.
        known: (3, points): u in ascending order, h and h' there.
    """
    after = xp.sum(xp.astype(known[1] > 0, xp.int64))
    places = xp.stack([after - 1, after]).clip(0, known.shape[1] - 1)
    ends = xp.take(known, places, axis=1)
    (low, high), (above, below), slopes = ends
    # Hermite's cubic for the inverse of h, in t = 0 ... 1 from the lower end to the higher. Derivatives of at most
    # three times the chord keep it monotone (Fritsch and Carlson, 1980), and make sense of slopes that are zero.
    width = high - low
    t = above / (above - below)
    inverse = xp.minimum((above - below) / xp.abs(slopes), 3 * width)  # the sign of a zero slope means nothing
    first, last = xp.where(xp.isnan(slopes), width, inverse)  # a chord where slopes are not known
    s = 1 - t
    curved = low + t * (width * t * (1 + 2 * s) + s * (s * first - t * last))
    return ends, xp.where(width > 0, curved, low)


def _constants(like: Array, numbers: Sequence[float]) -> Array:
    """Constants on one axis, each filled in on the device instead of copied to it."""
    xp = array_namespace(like)
    return xp.stack([xp.full_like(like, number) for number in numbers])
