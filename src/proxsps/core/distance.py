"""The distance cap: a limit on the step, from the distance between a run and its start, and from its gradients.

    A_k = c rbar_k / sqrt(K_k G_k),    rbar_k = max{F_k r0 (1 + ||x_0||), ||x_i - x_0|| for i <= k}

G_k is the average of ||D^-1 g||^2, which decays with the rate b. Steps are f_k A_k with a factor f_k, which is 1 unless
users or schedules set it. F_k is the largest factor so far, and K_k the sum of the squares of all factors, that of this
step included. Without factors, F_k = 1 and K_k = k + 1. Without decay, K_k G_k is then the sum of all squared
gradients, and A_k the step of DoG (Ivgi, Hinder and Carmon, 2023).

Why factors enter in this way: the cap divides a distance by the root of the squared gradients that moved the run.

- In pure noise, a step adds f^2 A^2 G = c^2 r^2 f^2 / K to the squared distance r^2, and f^2 to K. So r = K^(c^2/2), up
  to a constant, with every schedule: it changes the time, and nothing else. (For the same reason, c stays below 1.)
- If all factors are f, then f A_k = c rbar_k / sqrt((k + 1) G_k). Where gradients do not depend on the moves, all moves
  are f times those without a factor, because the first estimate of the distance is scaled too. Where both runs come
  near a solution, their distances and steps become equal. A run cannot tell the two cases apart by its distance r:
  without a factor, it might be at r / f or at r. A rule that is right in the second case takes f^2 in the first.
- F_k is the largest factor, not the first one, so that a schedule may begin at 0.

Several blocks have shares w_j in [0, 1] of one step. ||D^-1 g||^2 then adds up w_j^2 ||D_j^-1 g_j||^2.

The start x_0 is kept as a sample of the entries (`proxsps.core.sampling`).
"""

from __future__ import annotations

from typing import NamedTuple

from proxsps.core.array import Array, array_namespace, times
from proxsps.core.estimate import averaged, corrected_weights

SCALE, FORGETTING, START = 0.85, 0.99, 1e-2  # c, b and r0
LARGEST = 1e37  # a cap beyond the range of f32 would be infinite there


class Travel(NamedTuple):
    """The numbers of a distance cap, each of the shape of the runs."""

    reach: Array  # rbar, 0 before the first step
    g_sq: Array  # G, the average of ||D^-1 g||^2, with bias correction
    taken: Array  # k, steps so far, without those that were skipped
    first: Array = 0.0  # r0 (1 + ||x_0||)
    weight: Array = None  # K; None in a state from before factors were counted


def start_travel(x_sq: Array, r0: float = START) -> Travel:
    """Before the first step.

    Args:
        x_sq: ||x_0||^2, shape (...).
        r0: the first estimate of the distance to a solution, relative to 1 + ||x_0||; safe from 1e-4 to 1e-2.
    """
    xp = array_namespace(x_sq)
    zero = xp.zeros_like(x_sq)
    return Travel(zero, zero, zero, start_reach(xp.sqrt(x_sq), r0), zero)


def start_reach(norm: Array, r0: float = START) -> Array:
    """The first estimate of the distance, from ||x_0||."""
    return r0 * (1 + norm)


def completed(travel: Travel) -> Travel:
    """Numbers from before factors were counted, with those that are missing: all factors were 1."""
    if travel.weight is not None:
        return travel
    return travel._replace(first=array_namespace(travel.reach).zeros_like(travel.reach), weight=travel.taken)


def moving_weights(share: Array) -> Array:
    """w_j^2, shape (..., blocks), or 1 if all shares are 0: the average goes on while nothing moves."""
    return (share + (1 - array_namespace(share).max(share, axis=-1)[..., None])) ** 2


def update_travel(
    travel: Travel, moved_sq: Array, g_sq: Array, factor: Array | float = 1.0, b: float = FORGETTING
) -> Travel:
    """Update with the current point.

    Args:
        travel: the numbers before.
        moved_sq: ||x_k - x_0||^2, shape (...).
        g_sq: ||D^-1 g_k||^2, shape (...). In Adam's metric the number of parameters is nearly as good.
        factor: f_k, shape (...).
        b: forgetting, in [0, 1).
    """
    return advance_travel(travel, array_namespace(travel.reach).sqrt(moved_sq), g_sq, factor, b)


def advance_travel(
    travel: Travel, moved: Array, g_sq: Array, factor: Array | float = 1.0, b: float = FORGETTING
) -> Travel:
    """The same from ||x_k - x_0||."""
    xp = array_namespace(travel.reach)
    return travel._replace(
        reach=xp.maximum(xp.maximum(travel.reach, moved), times(factor, travel.first)),
        g_sq=averaged(travel.g_sq, g_sq, corrected_weights(travel.taken, b)),
        taken=travel.taken + 1,
        weight=travel.weight + factor * factor,
    )


def distance_cap(travel: Travel, c: float = SCALE) -> Array:
    """A_k, from numbers already updated with the current step; 0 if there never was a gradient, or a factor above 0."""
    xp = array_namespace(travel.reach)
    total = travel.weight * travel.g_sq  # multiplied by its root and divided by itself, so that 0 gives 0
    tiny = float(xp.finfo(total.dtype).smallest_normal)
    return (c * travel.reach * xp.sqrt(total) / total.clip(tiny)).clip(max=LARGEST)
