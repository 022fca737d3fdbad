"""The dual variable by a fixed number of rounds, with as few operations as possible.

On an accelerator every operation on a number is a launch, and nothing may be read back to stop early. There this
search replaces that of `proxsps.core.dual`: each round evaluates h at seven points and keeps the four around the change
of sign. The lines through neighbours among these four meet zero at three places: the chord of the bracket, and one
secant from either side. Where h bends one way, the root lies between chord and secants; so the next points are these
three, the middles between them, and one more on either side for where h bends both ways. These lie at geometric means,
because the root may be smaller than the bracket by many orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable

from proxsps.core.array import Array, array_namespace
from proxsps.core.dual import Found

POINTS = 7
FAR = 1000.0
POWER = 4  # the first points are (k/n)^4, closer together towards 0


def refine_dual(evaluate: Callable[[Array], Array], like: Array, rounds: int, first: int = POINTS) -> Found:
    """The dual variable of one run after this many rounds.

    Inside (0, 1) the answer is an interpolated root that was not evaluated; its h is reported as zero. No slopes are
    asked for: that of the answer is the mean one near u = 1, where it tells how far beyond the cap the root lies.

    Args:
        evaluate: points u in ascending order, shape (points,) -> h(u).
        like: a 0-d float array, which names library, dtype and device.
        rounds: how often to evaluate.
        first: the number of points of the first round.
    """
    xp = array_namespace(like)
    options = {"dtype": like.dtype, "device": like.device}
    u = xp.linspace(0.0, 1.0, first, **options) ** POWER
    known = xp.stack([u, evaluate(u)])
    rise, run = known[1, -1] - known[1, -2], known[0, -1] - known[0, -2]
    around = xp.arange(-2, 2, device=like.device)
    four, zeros = _nearest(known, around)
    for _ in range(rounds - 1):
        ends = four[0, 1:3]
        middles = (zeros[1:] + zeros[:-1]) / 2
        means = (ends * xp.maximum(zeros[::2], zeros[1])) ** 0.5
        u = xp.sort(xp.concat([zeros, middles, means]))
        known = xp.concat([four[:, :2], xp.stack([u, evaluate(u)]), four[:, 2:]], axis=1)
        four, zeros = _nearest(known, around)
    low, high, above, below = four[0, 1], four[0, 2], four[1, 1], four[1, 2]
    # Far out on a bend the chord says nothing. Then the upper end is the better answer if its duality gap is.
    bent = (below < -FAR * above) & (above + high * below > 0)
    # Where the two ends are one point, h has one sign on all of [0, 1].
    h = xp.where(low == high, above, xp.where(bent, below, xp.zeros_like(low)))
    root = xp.where(bent, high, zeros[1])
    evaluations = first + POINTS * (rounds - 1)
    return Found(root, h, rise / run, zeros[1], evaluations, low <= high, low, high)


def _nearest(known: Array, around: Array) -> tuple[Array, Array]:
    """The four points around the change of sign, and where the lines through neighbours among them meet zero.

    Args:
        known: (2, points): u in ascending order, and h there.
        around: the places -2, -1, 0, 1.
    """
    xp = array_namespace(known)
    after = xp.sum(xp.astype(known[1] > 0, around.dtype))
    four = xp.take(known, (around + after).clip(0, known.shape[1] - 1), axis=1)
    u, h = four
    step = four[:, 1:] - four[:, :-1]
    zeros = u[:-1] - h[:-1] * (step[0] / step[1])
    # Inside the bracket; a line through a point and itself is none, and gets its lower end.
    return four, xp.fmin(xp.fmax(zeros, u[1]), u[2])
