"""The dual variable by a fixed number of rounds, with as few operations as possible.

On an accelerator every operation on a number is a launch, and nothing may be read back to stop early. There this
search replaces that of `proxsps.core.dual`: each round evaluates h at seven points and keeps the four around the change
of sign. The lines through neighbours among these four meet zero at three places: the chord of the bracket, and one
secant from either side. Where h bends one way, the root lies between chord and secants; so the next points are these
three, the middles between them, and one more on either side for where h bends both ways. These lie at geometric means,
because the root may be smaller than the bracket by many orders of magnitude.

The first points reach down to the root of a step without a regulariser. With a large cap that is close to 0, and where
a constraint holds all entries soon after, h is flat at all larger u: lines through these say nothing about the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from proxsps.core.caps import LARGEST_RATIO
from proxsps.core.dual import Found

POINTS = 7
POWER = 6  # the first points are (k/6)^6 or a higher power, closer together towards 0
HIGH = 0.25  # height of the chord's zero, relative to h at 0, from which on the secant from above is chosen


def refine_dual(
    evaluate: Callable[[Tensor], Tensor],
    like: Tensor,
    rounds: int,
    first: int = POINTS,
    ratio: Tensor | None = None,
) -> Found:
    """The dual variable after this many rounds, and its height, which is evaluated once more.

    Args:
        evaluate: points u in ascending order, shape (points,) -> h(u).
        like: a 0-d tensor of about the size of h(0), which names dtype and device.
        rounds: the number of rounds.
        first: the number of points of the first round.
        ratio: 1 over a typical u; None if there is none.
    """
    even = torch.linspace(0.0, 1.0, first, dtype=like.dtype, device=like.device)
    u = even**POWER if ratio is None else even ** _power(ratio)
    known = torch.stack([u, evaluate(u)])
    last = known[:, -1] - known[:, -2]
    around = torch.arange(-2, 2, device=like.device)
    four, zeros = _nearest(known, around)
    for _ in range(rounds - 1):
        middles = torch.lerp(zeros[1:], zeros[:-1], 0.5)
        means = (four[0, 1:3] * torch.maximum(zeros[::2], zeros[1])).sqrt()
        u = torch.cat([zeros, middles, means]).sort().values
        known = torch.cat([four[:, :2], torch.stack([u, evaluate(u)]), four[:, 2:]], dim=1)
        four, zeros = _nearest(known, around)
    low, high = four[0, 1:3]
    # Where h bends down within the bracket, the chord ends before the bend, and the secant from above just behind it.
    behind = torch.maximum(zeros[1:], zeros[1])
    ends = torch.stack([behind, evaluate(behind)])
    u, h = torch.where(ends[1, 0] > HIGH * like, ends[:, 1], ends[:, 0])
    # If the two ends are one point, h has one sign on all of [0, 1]. Beyond the cap it continues as between the last
    # two points of the first round.
    outside = low == high
    root = torch.where(outside, torch.addcmul(u, h, last[0] / last[1], value=-1).clamp(max=torch.finfo(u.dtype).max), u)
    evaluations = first + POINTS * (rounds - 1) + 2
    return Found(u, h, last[1], u, evaluations, outside, low, high, root)


def _power(ratio: Tensor) -> Tensor:
    """log(ratio), if that is more: then the second of seven points, (1/3)^power, is a little below the typical u."""
    return ratio.clamp(math.exp(POWER), LARGEST_RATIO).log()


def _nearest(known: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
    """The four points around the change of sign, and where the lines through neighbours among them meet zero.

    Args:
        known: (2, points): u in ascending order, and h there.
        around: the places -2, -1, 0, 1.
    """
    after = (known[1] > 0).sum()
    four = known[:, (around + after).clamp_(0, known.shape[1] - 1)]
    u, h = four
    step = four[:, :-1] - four[:, 1:]
    zeros = torch.addcmul(u[:-1], h[:-1], step[0] / step[1], value=-1)
    # Inside the bracket; for a line through a point and itself, its lower end.
    return four, torch.fmin(torch.fmax(zeros, u[1]), u[2])
