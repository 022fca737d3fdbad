"""How long a step may be: by a learning rate, by the distance from the start, and how the caps enter the step.

Each block has its own cap. If caps are known before the step, they are the learning rates. Else a block has a share w_j
in [0, 1], its learning rate divided by the largest one, and its cap is w_j times one number for all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from proxsps.core.array import Array, over_blocks, times
from proxsps.core.caps import shares
from proxsps.core.distance import moving_weights
from proxsps.core.rules import Decision, linear, truncated
from proxsps.optim.assembly import Assembly, L2Matched
from proxsps.optim.blocks import Block
from proxsps.optim.numbers import Numbers
from proxsps.optim.parts import Part, Sums
from proxsps.optim.travel import Distance

PROXIMAL, MATCHED = "proximal", "matched"


class Known(NamedTuple):
    """The numbers that choose a step, over all ranks."""

    gap: Array  # m - C
    sums: Sums
    alpha: Array  # caps, or shares
    lam: Array  # strengths of the squared l2 norm
    bounded: bool  # whether there is a C
    travelled: Sequence[Array]  # `Caps.sums`
    g_sq: Array  # ||D_j^-1 g_j||^2 of each block


class Step(NamedTuple):
    """A step that was chosen: block j goes u alpha_j reach along its direction, with a prox of size alpha_j reach."""

    decision: Decision | L2Matched
    u: Array | float
    reach: Array | float = 1.0
    caps: Array | float = 1.0  # caps divided by `alpha`, including factors on the step
    distance: Array | float = math.nan  # the distance cap
    longest: Array | float = math.nan  # caps divided by `alpha`, before factors


class Caps:
    """The caps of one step.

    Args:
        matched: whether step and prox have the same size, at which the model reaches C.
        distance: the distance cap, None for none.
        factor: whether learning rates are factors on the step, which is chosen without them.
    """

    def __init__(self, matched: bool = False, distance: Distance | None = None, factor: bool = False) -> None:
        self._matched, self._distance, self._factor = matched, distance, factor
        self.scaled = matched or distance is not None

    def prepare(self, blocks: Sequence[Block], numbers: Numbers) -> Array:
        """The caps of the blocks, or their shares."""
        self._numbers = numbers
        if self._distance is not None:
            self._distance.offer(blocks)
        rates = [block.alpha for block in blocks]
        if not self.scaled:
            return numbers.vector(rates)
        if any(isinstance(rate, Tensor) for rate in rates):
            self._largest, alpha = shares(numbers.vector(rates))
            own = list(alpha)
            self._even = len(own) == 1
        else:
            self._largest = max(map(float, rates))
            own = [rate / (self._largest or 1.0) for rate in rates]
            alpha = numbers.vector(own)
            self._even = len(set(own)) == 1
        for block, share in zip(blocks, own, strict=True):
            block.scaled, block.alpha = True, share
        return alpha

    def sums(self, parts: Iterable[Part]) -> list[Array]:
        """The sums that the distance cap needs, on this rank: one vector, or none."""
        return [] if self._distance is None else [self._distance.sums(parts)]

    def decide(self, assembly: Assembly, known: Known) -> Step:
        """The step of ProxSPS."""
        gap, sums, alpha, lam, bounded, *_ = known
        rule = truncated if bounded else linear
        if not self.scaled:
            decision = rule(assembly.model(gap, sums, alpha, lam))
            return Step(decision, decision.u)
        longest, factor, distance = self._longest(known)
        caps = times(factor, longest)
        if self._numbers.vanishes(longest):
            nothing = self._numbers.scalar(0.0)
            return Step(Decision(nothing, nothing, gap), nothing, 0.0, caps, distance, longest)
        if self._matched and bounded:
            found, s = assembly.matched(gap, sums, alpha, lam, longest)
            one = self._numbers.scalar(1.0) if assembly.curves else 1.0
            return Step(found, one, times(factor, s), caps, distance, longest)
        assembly.reach = longest
        decision = rule(assembly.model(gap, sums, longest * alpha, lam))
        return Step(decision, decision.u, caps, caps, distance, longest)

    def _longest(self, known: Known) -> tuple[Array, Array | float, Array | float]:
        """The number that shares are multiplied by, the factor on the step, and the distance cap."""
        if self._distance is None:
            return self._numbers.scalar(self._largest), 1.0, math.nan
        (sums,) = known.travelled
        g_sq = over_blocks(known.g_sq if self._even else moving_weights(known.alpha) * known.g_sq)
        factor = self._largest if self._factor else 1.0
        distance = self._distance.cap(sums, g_sq, factor)
        return distance if self._factor else distance.clip(max=self._largest), factor, distance

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """Numbers in the groups that a step changes: their values after and before it."""
        return {} if self._distance is None else self._distance.changes()

    def commit(self) -> None:
        """Store the state of the caps."""
        if self._distance is not None:
            self._distance.commit()
