"""Notice a run whose measured distance stays at zero although it takes steps: its steps cannot grow.

Some rest of the largest distance is normal: a run that has arrived moves around its solution, and one that starts close
to it never goes further than the first estimate. So this does not look at that maximum, but compares the measured
distance with the steps themselves. By the triangle inequality, a step of length L begins or ends at least L/2 from the
start. If after 100 steps the measured distance was never more than 1 % of the longest of them, the entries that moved
are not those that are measured. Only runs that are observed from their first step are judged: later, steps are short.
"""

from __future__ import annotations

import math

from proxsps.core.sampling import BLOCK_BITS, WHOLE
from proxsps.optim.last_step import Chosen

LIMITED = 100  # steps
STILL = 0.01  # of the longest step

REASON = (
    f"In {LIMITED} steps that were limited by the distance from the start, the measured distance was never more than "
    f"{STILL:.0%} of the longest of these steps, and steps do not become longer while it rests. Of parameters with "
    f"more than {WHOLE:,} entries one in {1 << BLOCK_BITS} is measured: either few entries move and none of those, or "
    "parameters are set back after the steps"
)
EFFECT = (
    "Training hardly proceeds. Check that all parameters get the gradients that you expect; if only a few entries of a "
    "large parameter do, pass a number as lr."
)


class Rest:
    """The steps since the start of a run, for as long as the measured distance rests."""

    def __init__(self) -> None:
        self.steps: int | None = None  # None if the start was not observed, or the distance has grown
        self._longest = 0.0

    def lasts(self, taken: float, moved: float, length: float) -> bool:
        """Whether the distance has rested for so many steps that it is to be said, which is so once.

        Args:
            taken: steps before this one.
            moved: the measured distance before this step.
            length: `limited_length` of the step.
        """
        if taken == 0:
            self.steps, self._longest = 0, 0.0
        if self.steps is None or moved > STILL * self._longest:
            self.steps = None
            return False
        self.steps, self._longest = self.steps + (length > 0), max(self._longest, length)
        if self.steps < LIMITED:
            return False
        self.steps = None  # said, so that later steps need no lengths
        return True


def limited_length(gap: float, d_sq: float, g_sq: float, chosen: Chosen) -> float:
    """How far a step goes if the distance cap limits it, else 0.

    A regulariser, or a share of 0, may keep entries where they are. A part q of the fall of the linear model is left
    then, and at most sqrt(q) of the length: ||x+ - x||^2 <= tau <d, x - x+> where x minimises the regulariser.

    Args:
        gap: m - C.
        d_sq: <d, D^-1 d> over all blocks.
        g_sq: ||D^-1 g||^2 over all blocks.
        chosen: the step.
    """
    decision, free = chosen.decided, float(chosen.longest) * d_sq
    if decision.u < 1 or chosen.distance > chosen.longest or not free > 0:
        return 0.0
    return float(chosen.caps) * math.sqrt(g_sq * min(1.0, max(0.0, (gap - float(decision.height)) / free)))
