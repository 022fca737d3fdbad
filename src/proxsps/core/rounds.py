"""The step of the matched cap by a fixed number of rounds, for devices.

On an accelerator every operation on a number is a launch, and nothing may be read back to stop early. Each round
evaluates H at several points and keeps the four around its lowest change of sign. The lines through neighbours among
these four meet zero at three places, which are points of the next round. The other points divide the bracket into parts
of equal ratio, because the zero may be smaller than the step without a regulariser by many orders of magnitude: where
the regulariser is much stronger than the gradient, H falls at once and is nearly flat from there on, and lines say
little.

The end is on the safe side. The zero of the last round was not evaluated yet, so that it is evaluated last, together
with points a little before it, and the largest of them at which H is not negative is the step. If there is none, it is
the lower end of the bracket.
"""

from __future__ import annotations

from collections.abc import Callable

from proxsps.core.array import Array, array_namespace
from proxsps.core.caps import SMALLEST, Matched, shortest_step

DECADES = (-9.0, 3.0, 5)  # around the step without a regulariser: the points of the first round besides both ends
PARTS = 5  # of equal ratio, into which a round divides the bracket
LAST = (3.0, 0.0, 4)  # the points of the last round are nearer to 0 than the zero by 8^3, 8^2, 8 and 1 roundings


def refine_zero(
    heights: Callable[[Array], Array], gap: Array, d_sq: Array, longest: Array, rounds: int, eps: float
) -> Matched:
    """`longest` where H is positive there, else about the lowest zero that was seen, and H at that very point.

    Args:
        heights: steps s > 0 in ascending order, shape (points,) -> H(s) - gap.
        gap: m - C, 0-d.
        d_sq: sum_j w_j <d_j, D_j^-1 d_j>, which gives the search its scale; 0-d.
        longest: the largest s that is allowed, finite; 0-d.
        rounds: the number of rounds before the last one.
        eps: relative rounding of the coarsest entries.
    """
    xp = array_namespace(gap)
    tiny = float(xp.finfo(gap.dtype).smallest_normal)

    def even(start: float, stop: float, count: int) -> Array:
        return xp.linspace(start, stop, count, dtype=gap.dtype, device=gap.device)

    def known(s: Array) -> Array:
        return xp.stack([s, gap + heights(s)])

    shortest = shortest_step(gap, d_sq, longest)
    ladder = xp.clip(shortest / SMALLEST * 10.0 ** even(*DECADES), shortest, longest)
    first = known(xp.concat([shortest[None], ladder, longest[None]]))
    around = xp.arange(-2, 2, device=gap.device)
    four, zeros = _nearest(first, around)
    parts = even(1 / PARTS, 1 - 1 / PARTS, PARTS - 1)
    for _ in range(rounds - 1):
        low, high = four[0, 1:2], four[0, 2:3]
        between = high * (low / xp.clip(high, tiny)) ** parts
        new = known(xp.sort(xp.concat([zeros, between])))
        four, zeros = _nearest(xp.concat([four[:, :2], new, four[:, 2:]], axis=1), around)
    last = known(xp.maximum(zeros[1] * (1 - eps * 8.0 ** even(*LAST)), four[0, 1]))
    last = xp.concat([four[:, 1:2], last, first[:, -1:]], axis=1)
    step = xp.argmax(xp.where(last[1] >= 0, last[0], last[0, :1]), axis=0)
    s, height = xp.take(last, step[None], axis=1)[:, 0]
    evaluations = first.shape[1] + (PARTS + 2) * (rounds - 1) + LAST[2]
    return Matched(xp.where(gap > 0, s, xp.zeros_like(s)), xp.where(gap > 0, height, gap), evaluations)


def _nearest(known: Array, around: Array) -> tuple[Array, Array]:
    """The four points around the lowest change of sign, and the zeros of the lines through neighbours among them.

    The second zero is that of the bracket itself, and all of them are inside the bracket.

    Args:
        known: (2, points): steps in ascending order, and H there.
        around: the places -2, -1, 0, 1.
    """
    xp = array_namespace(known)
    after = xp.sum(xp.astype(known[1] > 0, xp.int64).cumprod(0))
    four = xp.take(known, (around + after).clip(0, known.shape[1] - 1), axis=1)
    s, h = four
    rise = h[1:] - h[:-1]
    zeros = s[:-1] - h[:-1] * ((s[1:] - s[:-1]) / (rise + (rise == 0)))  # which is 0 between a point and itself
    return four, xp.where(zeros > s[1], xp.minimum(zeros, s[2]), s[1])
