"""The formulas of one step on plain numbers, in loops over blocks or over sets of them.

On the host, a step of a small model works on a handful of numbers, and each operation of an array library on them takes
as long as a pass over thousands of parameters. These are the formulas of `proxsps.core.step`, `caps`, `estimate`,
`rules` and `distance` once more, without arrays; tests compare the two. Python runs them on lists, and numba compiles
them on arrays: so there are no comprehensions, objects or keywords in them. `plain_step` makes a step of them.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence, Sequence

from proxsps.core.caps import LARGEST_RATIO, SMALLEST
from proxsps.core.distance import FORGETTING, LARGEST, START
from proxsps.core.schedule_free import LATEST, POWER, WINDOW

Floats = Sequence[float]
TINY = 2.2250738585072014e-308  # the smallest normal double
ROUNDS = 64


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


def next_share(total: float, longest: float, k: float, tau: float) -> tuple[float, float, float]:
    """The share of the new point in the average, then W and taumax after the step (`schedule_free.next_share`)."""
    longest = max(longest, tau)
    weight = (k + 1) ** POWER * longest * longest
    total += weight
    return weight / total if total > 0 else 1.0, total, longest


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


# The squared l2 norm as a part of the loss


def sps_max(gap: float, d_sq: Floats, alpha: Floats, c: float) -> tuple[float, float, float]:
    """Root, u and height of SPS and SPS_max (`rules.sps_max`)."""
    fall = slope_fall(d_sq, alpha)
    root = line_root(gap, c * fall)
    u = clipped(root)
    return root, u, gap - u * fall


def dec_sps(
    gap: float, d_sq: Floats, alpha: Floats, c: float, memory: Floats, after: MutableSequence[float]
) -> tuple[float, float, float]:
    """The same of DecSPS, for c = c_0 sqrt(k + 1) (`rules.dec_sps`); `after` gets the memory of each block."""
    fall = slope_fall(d_sq, alpha)
    root = line_root(gap, c * fall)
    u = clipped(root) if fall > 0 else 1.0
    for j in range(len(alpha)):
        if alpha[j] > 0:
            u = min(u, memory[j] / alpha[j] / c)
    for j in range(len(alpha)):
        after[j] = c * u * alpha[j] if alpha[j] > 0 else memory[j]
    return root, u, gap - u * fall


def slope_fall(d_sq: Floats, alpha: Floats) -> float:
    """How far the linear model falls along the slopes, or directions, for steps alpha."""
    fall = 0.0
    for j in range(len(alpha)):
        fall += alpha[j] * d_sq[j]
    return fall


# The matched cap


def l2_matched_height(gap: float, d_sq: Floats, d_dot_x: Floats, share: Floats, lam: Floats, s: float) -> float:
    """H(s) (`caps.l2_matched_height`)."""
    fall = 0.0
    for j in range(len(d_sq)):
        fall += (d_sq[j] + lam[j] * d_dot_x[j]) * s * share[j] / (1 + s * share[j] * lam[j])
    return gap - fall


def l2_matched(gap: float, d_sq: Floats, d_dot_x: Floats, share: Floats, lam: Floats, longest: float) -> float:
    """The step of the matched cap for the squared l2 norm (`caps.l2_matched_step`)."""
    if gap <= 0:
        return 0.0
    if len(d_sq) == 1:
        steep = share[0] * (d_sq[0] + lam[0] * (d_dot_x[0] - gap))
        return min(gap / max(steep, (1 + gap) * TINY), longest)
    decay, push, terms = [0.0] * len(d_sq), [0.0] * len(d_sq), 0
    for j in range(len(d_sq)):
        i = 0
        while i < terms and decay[i] != share[j] * lam[j]:  # blocks with the same decay have one term
            i += 1
        terms = max(terms, i + 1)
        decay[i] = share[j] * lam[j]
        push[i] += share[j] * (d_sq[j] + lam[j] * d_dot_x[j])
    if terms <= 2:
        return _two_terms(gap, decay, push, longest)
    return first_zero(gap, decay[:terms], push[:terms], longest)


def first_zero(gap: float, decay: Floats, push: Floats, longest: float) -> float:
    """The first zero of H(s) = gap - sum_j push_j s / (1 + decay_j s) on (0, longest], from below; else `longest`.

    Terms with push >= 0 are convex, the others concave. On [low, high], tangents of the first and chords of the others
    make a line below H, whose zero is the new `low`: a valid step at all times. With convex terms alone this is
    Newton's method. A `high` where H is not positive makes the chords tight.
    """
    low, high, above = 0.0, longest, gap
    for _ in range(ROUNDS):
        fall = 0.0
        for j in range(len(push)):
            end = low if push[j] >= 0 else high
            fall += push[j] / ((1 + decay[j] * low) * (1 + decay[j] * end))
        if fall * (high - low) <= above:
            return high
        move = above / fall
        for ahead in (math.sqrt((low + move) * high), low + 2 * move):
            if ahead < high and _height(gap, decay, push, ahead) <= 0:
                high = ahead
        if not move > 1e-16 * low:
            break
        low += move
        above = _height(gap, decay, push, low)
        if above <= 0:  # rounding
            break
    return low


def _height(gap: float, decay: Floats, push: Floats, s: float) -> float:
    fall = 0.0
    for j in range(len(push)):
        fall += push[j] * s / (1 + decay[j] * s)
    return gap - fall


def _two_terms(gap: float, decay: Floats, push: Floats, longest: float) -> float:
    """The same for two terms, by the roots of a square (`caps._two_blocks`)."""
    left, right, one, two = decay[0], decay[1], push[0], push[1]
    b = gap * (left + right) - one - two
    a = gap * (left * right) - one * right - two * left
    inside = b * b - 4 * gap * a
    if inside < 0 or (b >= 0 and a >= 0):
        return longest
    root = math.sqrt(inside)
    return min(2 * gap / (root - b) if b < 0 else (b + root) / (-2 * a), longest)


def matched_root(part: float, gap: float, steep: float) -> float:
    """The root in the report of a step that is this part of the longest one (`caps.matched_decision`).

    `steep` is how far the model falls along the longest step without a regulariser.
    """
    return part if part < 1 else max(gap / steep if steep > 0 else gap, 1.0)


def least_height(
    gap: float, d_sq: Floats, d_dot_x: Floats, p_abs: Floats, share: Floats, lam: Floats, l1: Floats, s: float
) -> float:
    """A lower bound of H(s) for blocks with the squared l2 norm or the l1 norm, from sums.

    Soft thresholding moves no entry of x - s w p by more than s w l1 / D, and p_abs is ||p||_1 = ||D^-1 d||_1.
    """
    pull = 0.0
    for j in range(len(d_sq)):
        pull += share[j] * l1[j] * p_abs[j]
    return l2_matched_height(gap, d_sq, d_dot_x, share, lam, s) - s * pull


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
