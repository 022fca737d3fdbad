"""The matched cap: gradient step and regulariser use the same step size, the first at which the model reaches C.

    x_j+(s) = prox^{D_j}_{tau_j phi_j}(x_j - tau_j D_j^-1 d_j),    tau_j = s w_j,
    H(s)    = m - C + sum_j <d_j, x_j+(s) - x_j>

The shares w_j are in [0, 1]: the block's step size divided by the largest one. The step is the first zero of H on
(0, longest], `longest` if there is none, and 0 if m <= C. Wherever H(s) >= 0, x+(s) minimises the truncated model plus
regulariser plus sum_j ||y_j - x_j||^2 / (2 tau_j), so that the basic inequality of the paper holds with tau_j in the
place of alpha_j; further caps only lower `longest`. Unlike h(u) of the proximal cap, H need not be monotone: it
can rise where the regulariser pulls against the slope. Any zero is a valid step; the first one is taken.

The squared l2 norm needs only sums: a quotient for one block, and for several a bracket that closes on the first zero.
Other regularisers are searched, by their heights at several s (`proxsps.core.model`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from proxsps.core.array import Array, array_namespace, over_blocks
from proxsps.core.dual import Evaluate, Found, Loop
from proxsps.core.rules import Decision

ROUNDS = 64  # at most, of the bracket for the squared l2 norm; two are usual
INTERVALS = 6  # per round
SMALLEST = 1e-20  # of a typical step: shorter than all that are searched for, and not too small for f32
LARGEST_RATIO = 1e15  # of the longest step to a typical one: squares of it stay in the range of f32


class Matched(NamedTuple):
    """The step of the matched cap, shape (...)."""

    s: Array  # the step size of blocks with share 1
    height: Array  # H(s): of the linear model above C at the new point
    evaluations: Array | float = 0.0


def shares(lr: Array) -> tuple[Array, Array]:
    """The largest step size, and all step sizes divided by it, shape (..., blocks); shares are 0 if all are 0."""
    xp = array_namespace(lr)
    largest = xp.max(lr, axis=-1)
    return largest, lr / _or_one(largest)[..., None]


# The squared l2 norm, from sums


def l2_matched(
    gap: Array, d_sq: Array, d_dot_x: Array, share: Array, lam: Array, longest: Array, loop: Loop
) -> Matched:
    """The step for phi_j = lam_j/2 ||. - c_j||^2 in the metric of the block, so that decay is decoupled.

    With q_j(s) = s w_j / (1 + s w_j lam_j) and K_j = <d_j, D_j^-1 d_j> + lam_j <d_j, x_j - c_j>,

        H(s) = gap - sum_j K_j q_j(s).

    Args:
        gap: m - C, shape (...).
        d_sq: <d_j, D_j^-1 d_j>, shape (..., blocks).
        d_dot_x: <d_j, x_j - c_j>, shape (..., blocks).
        share: w_j, shape (..., blocks).
        lam: strengths lam_j >= 0, shape (..., blocks).
        longest: the largest s that is allowed, finite, shape (...).
        loop: one of the loops of `proxsps.core.dual`, or `jax.lax.while_loop`.
    """
    s = l2_matched_step(gap, d_sq, d_dot_x, share, lam, longest, loop)
    return Matched(s, l2_matched_height(gap, d_sq, d_dot_x, share, lam, s))


def l2_matched_step(
    gap: Array, d_sq: Array, d_dot_x: Array, share: Array, lam: Array, longest: Array, loop: Loop
) -> Array:
    """The step size of `l2_matched` alone."""
    xp = array_namespace(d_sq)
    if isinstance(lam, float) and lam == 0:
        return _on_a_line(gap, over_blocks(share * d_sq), longest)
    if d_sq.shape[-1] == 1:
        return _on_a_line(gap, over_blocks(share * (d_sq + lam * (d_dot_x - gap[..., None]))), longest)
    if d_sq.shape[-1] == 2:
        return _two_blocks(gap, share * (d_sq + lam * d_dot_x), share * lam, longest)
    s = _first_zero(gap, d_sq + lam * d_dot_x, share, lam, longest + 0 * gap, loop)
    return xp.where(gap > 0, s, xp.zeros_like(s))


def l2_matched_height(gap: Array, d_sq: Array, d_dot_x: Array, share: Array, lam: Array, s: Array) -> Array:
    """H(s)."""
    return gap - over_blocks((d_sq + lam * d_dot_x) * _reach(s, share, lam))


def matched_decision(gap: Array, d_sq: Array, found: Matched, longest: Array) -> Decision:
    """The step as a part of the longest one; beyond that, the root is that of a step without a regulariser.

    Args:
        gap: m - C, shape (...).
        d_sq: sum_j w_j <d_j, D_j^-1 d_j>, shape (...).
        found: the step of the matched cap.
        longest: the largest s that was allowed, shape (...).
    """
    xp = array_namespace(gap)
    u, steep = found.s / _or_one(longest), longest * d_sq
    free = xp.maximum(gap / _or_one(steep), xp.ones_like(gap))
    return Decision(xp.where(u < 1, u, free), u, found.height, found.evaluations)


def l2_ray_heights(d_sq: Array, d_dot_x: Array, share: Array, lam: Array, s: Array) -> tuple[Array, Array]:
    """sum_j <d_j, x_j+(s) - x_j> and its derivative for the blocks of `l2_matched`, at points s (..., points)."""
    xp = array_namespace(d_sq)
    K, share, lam = (part[..., None, :] for part in (d_sq + lam * d_dot_x, share + 0 * d_sq, lam + 0 * d_sq))
    width = 1 + s[..., None] * (share * lam)
    return -xp.sum(K * share * s[..., None] / width, axis=-1), -xp.sum(K * share / width**2, axis=-1)


def _reach(s: Array, share: Array, lam: Array) -> Array:
    """q_j(s)."""
    tau = s[..., None] * share
    return tau / (1 + tau * lam)


def _on_a_line(gap: Array, steep: Array, longest: Array) -> Array:
    """gap / steep, the only zero; there is none where that is not positive. 0 where the gap is not.

    For one block, H(s) (1 + s w lam) = gap - s w (K - lam gap).
    """
    xp = array_namespace(steep)
    # A steepness that is not positive is replaced by one with which the quotient is as large as possible.
    least = (1 + xp.abs(gap)) * float(xp.finfo(steep.dtype).smallest_normal)
    return xp.minimum(gap / xp.maximum(steep, least), longest).clip(0.0)


def _two_blocks(gap: Array, push: Array, decay: Array, longest: Array) -> Array:
    """The first positive zero of H(s) = gap - sum_j push_j s / (1 + decay_j s): H times both denominators is a square.

    H has the sign of N(s) = gap + 2 h s + a s^2 for s > 0. With q = |h| + sqrt(h^2 - gap a), in which nothing cancels,
    the first positive root is gap / q for h < 0, and else q / -a, if a < 0.
    """
    xp = array_namespace(push)
    if xp.finfo(push.dtype).bits < 64:  # squares stay in the range of f32
        size = _or_one(xp.maximum(xp.max(xp.abs(push), axis=-1), gap))
        gap, push = gap / size, push / size[..., None]
    rise = gap[..., None] * decay - push
    h = xp.sum(rise, axis=-1) / 2
    a = rise[..., 0] * decay[..., 1] - push[..., 1] * decay[..., 0]
    inside, falls = h * h - gap * a, h < 0
    q = xp.abs(h) + xp.sqrt(inside.clip(0.0))
    bottom = xp.where(falls, q, -a)
    meets = (inside >= 0) & (bottom > 0)
    root = xp.where(falls, gap, q) / xp.where(meets, bottom, 1.0)
    return xp.where(meets, xp.minimum(root, longest), longest) * (gap > 0)


class Squeeze(NamedTuple):
    """Where the first zero is, if there is one: H >= 0 on [0, low], and H(high) <= 0 unless high is `longest`."""

    low: Array
    high: Array
    rounds: Array


def _first_zero(gap: Array, K: Array, share: Array, lam: Array, longest: Array, loop: Loop) -> Array:
    """The first zero of H, from below.

    q_j is concave, so that -K_j q_j is convex for K_j >= 0 and concave for K_j < 0. On an interval, tangents of the
    convex terms and chords of the concave ones make a line below H; chords of the convex ones and tangents of the
    others make a line above H. Each round divides [low, high] into intervals that grow from the first safe move on. The
    first zero of a line below H is the new `low`, and the first point where H or a line above it is not positive the
    new `high`. `low` is a valid step at all times.
    """
    xp = array_namespace(K)
    eps = float(xp.finfo(longest.dtype).eps)
    none = xp.full_like(longest, xp.inf)[..., None]
    decay, push = _joined(share * lam + 0 * K, K * share)
    decay, push, rising = decay[..., None, :], push[..., None, :], (push < 0)[..., None, :]

    def unfinished(state: Squeeze) -> Array:
        return (state.high - state.low > 2 * eps * state.high) & (state.rounds < ROUNDS)

    def lines(nodes: Array) -> tuple[Array, Array, Array]:
        """H at the nodes, and the zeros between them, or infinity, of the lines below and above H."""
        width = 1 + nodes[..., None] * decay
        height = gap[..., None] - xp.sum(push * nodes[..., None] / width, axis=-1)
        tangent = push / width[..., :-1, :] ** 2
        chord = push / (width[..., :-1, :] * width[..., 1:, :])
        left, start = nodes[..., :-1], xp.maximum(height[..., :-1], xp.zeros_like(height[..., :-1]))

        def zero(falls: Array) -> Array:
            fall = xp.sum(falls, axis=-1)
            meets = fall * (nodes[..., 1:] - left) > start
            return xp.where(meets, left + start / xp.where(meets, fall, xp.ones_like(fall)), none)

        return height, zero(xp.where(rising, chord, tangent)), zero(xp.where(rising, tangent, chord))

    def squeeze(state: Squeeze) -> Squeeze:
        low, high = state.low[..., None], state.high[..., None]
        _, safe, _ = lines(xp.concat([low, high], axis=-1))
        # Rounding may leave no move.
        move = xp.maximum(xp.minimum(safe, high) - low, eps * high)
        growth = ((high - low) / move) ** (1 / INTERVALS)
        nodes = [low, *(xp.minimum(low + move * growth**i, high) for i in range(INTERVALS)), high]
        height, below, above = lines(xp.concat(nodes, axis=-1))
        nodes = xp.concat(nodes, axis=-1)
        reached = xp.min(xp.where(height <= 0, nodes, none), axis=-1)
        new_high = xp.minimum(xp.minimum(reached, xp.min(above, axis=-1)), state.high)
        return Squeeze(xp.minimum(xp.min(below, axis=-1), new_high), new_high, state.rounds + 1)

    zero = xp.zeros_like(longest)
    return loop(unfinished, squeeze, Squeeze(zero, longest, zero)).low


def _joined(decay: Array, push: Array) -> tuple[Array, Array]:
    """Merge blocks with the same decay: the first of them gets the sum. Terms that cancel would give loose bounds."""
    xp = array_namespace(push)
    same = decay[..., :, None] == decay[..., None, :]
    total = xp.sum(xp.where(same, push[..., None, :], xp.zeros_like(push[..., None, :])), axis=-1)
    earlier = xp.sum(xp.tril(xp.astype(same, push.dtype), k=-1), axis=-1)
    return decay, xp.where(earlier == 0, total, xp.zeros_like(total))


# The search


class Ray(NamedTuple):
    """A map of [0, 1] onto [0, longest] that spreads steps around `typical` evenly, shape (...)."""

    longest: Array
    ratio: Array  # longest / typical, at least 1

    def s(self, v: Array) -> Array:
        """The step at v; exactly `longest` at 1."""
        longest, ratio = (_beside(part, v) for part in self)
        return v * longest / (v + (1 - v) * ratio)

    def v(self, s: Array) -> Array:
        """The inverse of `s`."""
        return s * self.ratio / (self.longest - s + s * self.ratio)

    def rate(self, v: Array) -> Array:
        """ds/dv."""
        longest, ratio = (_beside(part, v) for part in self)
        return longest * ratio / (v + (1 - v) * ratio) ** 2


def polyak_ray(gap: Array, d_sq: Array, longest: Array) -> Ray:
    """The ray whose typical step is gap / d_sq, at which the model reaches C where there is no regulariser.

    Args:
        gap: m - C, shape (...).
        d_sq: sum_j w_j <d_j, D_j^-1 d_j>, shape (...).
        longest: the largest s that is allowed, finite, shape (...).
    """
    return Ray(longest + 0 * gap, (longest * d_sq / _or_one(gap.clip(0.0))).clip(1.0, LARGEST_RATIO))


def shortest_step(gap: Array, d_sq: Array, longest: Array) -> Array:
    """A step far below any zero, to take where H jumps at 0: if x violates a constraint, any step restores it.

    Args:
        gap: m - C, shape (...).
        d_sq: sum_j w_j <d_j, D_j^-1 d_j>, shape (...).
        longest: the largest s that is allowed, finite, shape (...).
    """
    xp = array_namespace(gap)
    typical = xp.minimum(gap / _or_one(d_sq), longest)
    return SMALLEST * xp.where(gap > 0, typical, xp.zeros_like(typical))  # finite even if the gap is NaN


def find_matched(
    heights: Evaluate,
    gap: Array,
    d_sq: Array,
    longest: Array,
    find: Callable[[Evaluate], Found],
) -> Matched:
    """The step for any regulariser.

    Args:
        heights: points s on the last axis -> (sum_j <d_j, x_j+(s) - x_j>, its derivative or NaN).
        gap: m - C, shape (...).
        d_sq: sum_j w_j <d_j, D_j^-1 d_j>, which gives the search its scale; shape (...).
        longest: the largest s that is allowed, finite; shape (...).
        find: the search on [0, 1] for a function that may not be monotone: `search_dual` with the certificate
            `height_off` and at_zero = gap. It evaluates 1 in its first round, which is the answer whenever
            H(longest) > 0.
    """
    xp = array_namespace(d_sq)
    ray = polyak_ray(gap, d_sq, longest)
    positive = gap > 0

    def evaluate(v: Array) -> tuple[Array, Array]:
        height, slope = heights(ray.s(v))
        # A prox with step size 0 may not exist; H is the gap there.
        height = gap[..., None] + xp.where(v > 0, height, xp.zeros_like(height))
        # If there is nothing to search for, 1 is the answer at once.
        height = xp.where(positive[..., None], height, xp.ones_like(height))
        return height, slope * ray.rate(v)

    found = find(evaluate)
    s = xp.where(positive, ray.s(found.u), xp.zeros_like(found.u))
    return Matched(s, xp.where(positive, found.h, gap), found.evaluations)


def _beside(part: Array, v: Array) -> Any:
    """Numbers per run beside points on a last axis."""
    return part[..., None] if v.ndim > part.ndim else part


def _or_one(number: Array) -> Array:
    """A number that is not negative, to divide by."""
    return number + (number <= 0)
