"""The step of the matched cap by a fixed number of rounds, for devices.

On an accelerator every operation on a number is a launch, and nothing may be read back to stop early. Each round
evaluates H at several points and keeps the four around its lowest change of sign. The lines through neighbours among
these four meet zero at three places, which are points of the next round, together with the middles between them and
towards both ends of the bracket. As long as H was positive only at 0, the lowest point is nearer to 0 by three orders
of magnitude, because H may jump there: if x violates a constraint, a step of any size restores it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxsps.core.array import Array, array_namespace
from proxsps.core.dual import Found

# The points of the first round are 0, 1, 7, 63, 1023 typical steps, and the longest (`proxsps.core.caps.Ray`).
FIRST = (0.0, 1 / 2, 7 / 8, 63 / 64, 1023 / 1024, 1.0)
POINTS = 7
SHRINK = 1 / 1024  # of the lowest point, as long as H was positive only at 0


def refine_zero(evaluate: Callable[[Array], tuple[Array, Any]], like: Array, rounds: int) -> Found:
    """1 where H(1) > 0, else the lowest zero on [0, 1] that was seen, for a function with H(0) > 0.

    The result is an interpolated zero that was not evaluated: its height is NaN, for the caller to evaluate. No slopes
    are used.

    Args:
        evaluate: points in ascending order, shape (points,) -> (H, anything).
        like: a 0-d float array, which names library, dtype and device.
        rounds: the number of rounds.
    """
    xp = array_namespace(like)
    v = xp.stack([xp.full_like(like, point) for point in FIRST])
    height = evaluate(v)[0]
    capped, top = height[-1] > 0, height[-1]
    four, zeros = _nearest(xp.stack([v, height]))
    for _ in range(rounds - 1):
        ends = xp.concat([four[0, 1:2], zeros, four[0, 2:3]])
        middles = (ends[1:] + ends[:-1]) / 2
        lowest = xp.where(ends[:1] > 0, middles[:1], SHRINK * zeros[1:2])
        v = xp.sort(xp.concat([zeros, lowest, middles[1:]]))
        known = xp.stack([v, evaluate(v)[0]])
        four, zeros = _nearest(xp.concat([four[:, :2], known, four[:, 2:]], axis=1))
    low, high, zero = four[0, 1], four[0, 2], zeros[1]
    u = xp.where(capped, xp.ones_like(zero), zero)
    h = xp.where(capped, top, xp.full_like(top, xp.nan))
    count = xp.full_like(h, float(len(FIRST) + POINTS * (rounds - 1)))
    return Found(u, h, h * xp.nan, u, count, low <= high, low, high)


def _nearest(known: Array) -> tuple[Array, Array]:
    """The four points around the lowest change of sign, and the zeros of the lines through neighbours among them.

    The second zero is that of the bracket itself, and all of them are inside the bracket.

    Args:
        known: (2, points): v in ascending order, and H there.
    """
    xp = array_namespace(known)
    after = xp.sum(xp.astype(known[1] > 0, xp.int64).cumprod(0))
    around = xp.stack([after - 2, after - 1, after, after + 1]).clip(0, known.shape[1] - 1)
    four = xp.take(known, around, axis=1)
    v, h = four
    rise = h[1:] - h[:-1]
    flat = rise == 0  # also for a line through a point and itself
    zeros = v[:-1] - h[:-1] * (v[1:] - v[:-1]) / xp.where(flat, xp.ones_like(rise), rise)
    return four, xp.minimum(xp.maximum(zeros, v[1]), v[2])
