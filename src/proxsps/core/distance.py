"""The distance cap: a limit on the step, from the distance between a run and its start, and from its gradients.

    A_k = c rbar_k / sqrt(Ghat_k),    rbar_k = max{r0 (1 + ||x_0||), ||x_i - x_0|| for i <= k}

Ghat_k is k + 1 times the average of ||D^-1 g||^2, which decays with the rate b. Without decay it is the sum of
all of them, and A_k the step of DoG (Ivgi, Hinder and Carmon, 2023). In pure noise rbar grows like k^(c^2/2), so that c
must stay below 1.

The start x_0 is kept as a sample of the entries (`proxsps.core.sampling`).
"""

from __future__ import annotations

from typing import NamedTuple

from proxsps.core.array import Array, array_namespace
from proxsps.core.estimate import averaged, corrected_weights

SCALE, FORGETTING, START = 0.85, 0.99, 1e-2  # c, b and r0
LARGEST = 1e37  # a cap beyond the range of f32 would be infinite there


class Travel(NamedTuple):
    """The numbers of a distance cap, each of the shape of the runs."""

    reach: Array  # rbar
    g_sq: Array  # G, the average of ||D^-1 g||^2, with bias correction
    taken: Array  # k, steps so far, without those that were skipped


def start_travel(x_sq: Array, r0: float = START) -> Travel:
    """Before the first step.

    Args:
        x_sq: ||x_0||^2, shape (...).
        r0: the first estimate of the distance to a solution, relative to 1 + ||x_0||; safe from 1e-4 to 1e-2.
    """
    xp = array_namespace(x_sq)
    zero = xp.zeros_like(x_sq)
    return Travel(start_reach(xp.sqrt(x_sq), r0), zero, zero)


def start_reach(norm: Array, r0: float = START) -> Array:
    """rbar before the first step, from ||x_0||."""
    return r0 * (1 + norm)


def update_travel(travel: Travel, moved_sq: Array, g_sq: Array, b: float = FORGETTING) -> Travel:
    """Update with the current point.

    Args:
        travel: the numbers before.
        moved_sq: ||x_k - x_0||^2, shape (...).
        g_sq: ||D^-1 g_k||^2, shape (...). In Adam's metric the number of parameters is nearly as good.
        b: forgetting, in [0, 1).
    """
    return advance_travel(travel, array_namespace(travel.reach).sqrt(moved_sq), g_sq, b)


def advance_travel(travel: Travel, moved: Array, g_sq: Array, b: float = FORGETTING) -> Travel:
    """The same from ||x_k - x_0||."""
    reach = array_namespace(travel.reach).maximum(travel.reach, moved)
    return Travel(reach, averaged(travel.g_sq, g_sq, corrected_weights(travel.taken, b)), travel.taken + 1)


def distance_cap(travel: Travel, c: float = SCALE) -> Array:
    """A_k, from numbers already updated with the current step; 0 if there never was a gradient."""
    xp = array_namespace(travel.reach)
LARGEST = 1e37  # a cap beyond the range of f32 would be infinite there
    total = travel.taken * travel.g_sq  # multiplied by its root and divided by itself, so that 0 gives 0
    tiny = float(xp.finfo(total.dtype).smallest_normal)
    return (c * travel.reach * xp.sqrt(total) / total.clip(tiny)).clip(max=LARGEST)
