"""How long a step on the host may be, by the distance of each set of blocks from its start; Python floats.

The formulas are those of `proxsps.core.distance` and `proxsps.core.schedule_free`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from proxsps.core import plain
from proxsps.core.distance import FORGETTING, LARGEST, START
from proxsps.core.schedule_free import POWER
from proxsps.optim.plan import Plan
from proxsps.optim.rule import Table

Floats = Sequence[float]


class Travelled(NamedTuple):
    """The distance cap of a set of blocks, and its numbers after the step."""

    cap: float
    after: dict[str, float]


def distances(
    plan: Plan, travelled: Sequence[tuple[float, float]], table: Table, share: Floats, factor: float
) -> list[Travelled]:
    """The distance cap of each set (`proxsps.core.distance`).

    The factor of a set is the largest one of its blocks, and their shares are those of it.
    """
    squares = table.d_sq if plan.rule.beta is None and plan.rule.mix is None else table.g_sq
    found = []
    for own, groups, squared in zip(plan.sets.members, plan.sets.groups, travelled, strict=True):
        largest = max([share[j] for j in own])
        # Where all shares are 0, the average goes on while nothing moves.
        moving = sum([(share[j] / largest) ** 2 * squares[j] if largest > 0 else squares[j] for j in own])
        if plan.rule.factor:
            found.append(_distance(groups[0], *squared, moving, factor * largest, plan.rule.scale))
        else:
            found.append(_distance(groups[0], *squared, largest**2 * moving, factor, plan.rule.scale))
    return found


def _distance(
    options: dict[str, Any], moved_sq: float, start_sq: float, moving: float, factor: float, scale: float
) -> Travelled:
    k = float(options["k"])
    first = float(options["first_reach"])
    if not first > 0 and start_sq + moving > 0:  # a set may get its first gradients later than others
        first = START * (1 + math.sqrt(start_sq))
    reach = max(float(options["reach"]), math.sqrt(moved_sq), factor * first)
    new = plain.corrected_weight(k, FORGETTING)
    g_sq = (1 - new) * float(options["g_sq"]) + new * moving
    factors_sq = float(options["factors_sq"]) + factor * factor
    total = math.sqrt(factors_sq * g_sq)
    cap = min(scale * reach / total, LARGEST) if total > 0 else 0.0
    after = {"reach": reach, "g_sq": g_sq, "k": k + 1, "first_reach": first, "factors_sq": factors_sq}
    return Travelled(cap, after)


def shared(plan: Plan, alpha: list[float], found: Sequence[Travelled], limit: float) -> tuple[float, list[float]]:
    """The largest distance cap, and the shares of the blocks with the cap of their set divided by it; up to a limit."""
    longest = max([own.cap for own in found])
    if len(found) == 1 or not min(longest, limit) > 0:
        return longest, alpha
    shares = list(alpha)
    for members, own in zip(plan.sets.members, found, strict=True):
        for j in members:
            shares[j] *= min(own.cap, limit) / min(longest, limit)
    return longest, shares


def next_share(options: dict[str, Any], k: float, tau: float) -> tuple[float, dict[str, float]]:
    """The share of the new point in the average, and the numbers after the step (`proxsps.core.schedule_free`)."""
    longest = max(float(options["longest"]), tau)
    weight = (k + 1) ** POWER * longest * longest
    total = float(options["total"]) + weight
    return weight / total if total > 0 else 1.0, {"total": total, "longest": longest}
