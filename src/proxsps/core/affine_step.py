"""The numbers of a step in closed form: from the sums of its blocks to the coefficients that are written.

Like `proxsps.core.plain`, this is run by Python on lists and compiled by numba on arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from proxsps.core.array import Array
from proxsps.core.plain import (
    averaged_model,
    clipped,
    distances,
    l2_line,
    line_root,
    next_share,
    share_out,
    shares,
)

Floats = Sequence[float]
TINY = 2.2250738585072014e-308  # the smallest normal double
ROUNDS = 64
TAKEN, SKIPPED, BEYOND, INEXACT = range(4)  # a step is taken, may not be taken, leaves the numbers, needs doubles


class Method(NamedTuple):
    """What sets methods apart."""

    averaged: bool  # models are averaged
    mixed: bool  # the schedule-free form
    in_metric: bool
    matched: bool
    distance: bool  # there is a distance cap
    factor: bool  # rates are factors on the step
    scale: float  # c of the distance cap
    beyond: float  # a move that leaves the range of numbers


class Loss(NamedTuple):
    """The loss of a step."""

    f: float
    C: float
    bounded: bool  # whether there is a C


class Numbers(NamedTuple):
    """What the groups hold, besides the numbers of sets."""

    k: float  # steps so far
    value: float  # fbar of averaged models
    offset: float  # their gamma
    total: float  # W of the schedule-free form
    latest: float  # its taumax
    new: float  # weight of this model in the average


class Blocks(NamedTuple):
    """The blocks of a step, and their sums."""

    rates: Floats
    lam: Floats  # strengths of the squared l2 norm
    of: Sequence[int]  # the set of each block
    d_sq: Floats  # <d, p>
    d_dot_x: Floats
    g_dot_x: Floats  # <g, z - y> in the schedule-free form
    g_sq: Floats  # ||D^-1 g||^2
    moved_sq: Floats  # ||x - x_0||^2
    before: Sequence[Floats]  # of each set, as in `plain.distances`


class Room(NamedTuple):
    """Where results go: lists or arrays."""

    share: Array  # caps of the blocks, or their shares of one cap
    after: Array  # of each set, as in `plain.distances`
    keep: Array  # x <- keep x + move p
    move: Array


class Step(NamedTuple):
    """The result."""

    code: int
    gap: float
    largest: float = 0.0  # rate
    distance: float = math.inf  # cap
    longest: float = 1.0  # cap of all blocks
    root: float = 0.0
    u: float = 0.0
    height: float = 0.0  # at u; of the matched cap, how long the step is
    reach: float = 0.0
    share: float = 1.0  # of the new point in the average of the schedule-free form
    value: float = 0.0  # of `Numbers` after the step, like what follows
    offset: float = 0.0
    total: float = 0.0
    latest: float = 0.0


def affine_step(loss: Loss, method: Method, numbers: Numbers, blocks: Blocks, room: Room) -> tuple[float, ...]:
    """Choose a step of affine blocks; returns the entries of `Step`, because numba makes tuples faster."""
    largest = shares(blocks.rates, room.share)
    scaled = method.matched or method.distance
    for j in range(0 if scaled else len(blocks.rates)):
        room.share[j] = blocks.rates[j]
    m, value, offset = _model(loss.f, method, numbers, blocks)
    gap, above = m - loss.C, (loss.f if method.averaged or method.mixed else m) - loss.C
    cap, longest, root, u, height, reach = math.inf, 1.0, 0.0, 0.0, 0.0, 0.0
    share, total, latest = 1.0, numbers.total, numbers.latest
    code = TAKEN
    if not (math.isfinite(gap) and math.isfinite(above)) or (loss.bounded and above < 0):
        code = SKIPPED
    else:
        if method.distance:
            cap = _distance_cap(method, numbers.k, largest, blocks, room)
        if scaled:
            longest = cap if method.factor else min(largest, cap)
        factor = largest if method.factor else 1.0
        root, u, height, reach = _choose(gap, loss.bounded, method.matched, longest, factor, blocks, room.share)
        for j in range(len(blocks.rates)):
            length = 1.0 if method.in_metric else math.sqrt(blocks.d_sq[j])  # in Adam's metric directions are about 1
            if not u * reach * room.share[j] * length < method.beyond:
                code = BEYOND
            alpha = reach * room.share[j]
            room.keep[j] = 1 / (1 + alpha * blocks.lam[j])
            room.move[j] = -(alpha * room.keep[j]) * u
        if method.mixed:
            share, total, latest = next_share(total, latest, numbers.k, u * reach)
    return code, gap, largest, cap, longest, root, u, height, reach, share, value, offset, total, latest


def _model(f: float, method: Method, numbers: Numbers, blocks: Blocks) -> tuple[float, float, float]:
    """m, and value and offset of the average after the step."""
    g_dot_x, d_dot_x = 0.0, 0.0
    for j in range(len(blocks.rates)):
        g_dot_x += blocks.g_dot_x[j]
        d_dot_x += blocks.d_dot_x[j]
    if method.averaged:
        return averaged_model(f, numbers.new, numbers.value, numbers.offset, g_dot_x, d_dot_x)
    return f + g_dot_x if method.mixed else f, numbers.value, numbers.offset


def _distance_cap(method: Method, k: float, largest: float, blocks: Blocks, room: Room) -> float:
    """The distance cap; shares are multiplied by what the cap of their set is of it."""
    moved_sq, nothing = [0.0] * len(blocks.before), [0.0] * len(blocks.before)
    for j in range(len(blocks.of)):
        moved_sq[blocks.of[j]] += blocks.moved_sq[j]
    squares = blocks.g_sq if method.averaged or method.mixed else blocks.d_sq
    factor, limit = (largest, math.inf) if method.factor else (1.0, largest)
    distances(
        blocks.of, room.share, squares, moved_sq, nothing, k, factor, method.factor, method.scale, blocks.before,
        room.after,
    )  # fmt: skip
    return share_out(blocks.of, room.after, limit, room.share)


def _choose(
    gap: float, bounded: bool, matched: bool, longest: float, factor: float, blocks: Blocks, share: Floats
) -> tuple[float, float, float, float]:
    """Root, u and height of the step, and how far it goes."""
    if not longest > 0:
        return 0.0, 0.0, gap, 0.0
    if matched and bounded:
        s = l2_matched(gap, blocks.d_sq, blocks.d_dot_x, share, blocks.lam, longest)
        return 0.0, 1.0, s, factor * s
    alpha = [0.0] * len(share)
    for j in range(len(share)):
        alpha[j] = longest * share[j]
    start, fall = l2_line(gap, blocks.d_sq, blocks.d_dot_x, alpha, blocks.lam)
    root = line_root(start, fall) if bounded else 1.0
    u = clipped(root)
    return root, u, start - fall * u, factor * longest


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
