"""Steps of a plan whose blocks are all affine: two passes, and one compiled call for all numbers between them.

They are the steps of `proxsps.optim.host.solve`, in fewer calls: with few parameters, Python takes most of the time.
Both take the step of `proxsps.core.plain_step`, which is compiled as it is.
"""

from __future__ import annotations

import math
from functools import partial
from inspect import isfunction
from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable

from proxsps.core import plain, plain_step
from proxsps.core.plain_step import INEXACT, Blocks, Loss, Room, Step, closed_form, take_step
from proxsps.optim.kernels.averages import D_DOT_X, D_SQ, G_DOT_X, G_SQ, MOVED_SQ, SUMS
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.rule import TRAVEL, Solved

FIRST = TRAVEL.index("first_reach")

for formula in {**vars(plain), **vars(plain_step)}.values():
    if isfunction(formula):
        register_jitable(forceinline=True)(formula)


@inlined()
def _ordinary(sums, least, most):
    """Whether all sums are finite, and squares well inside the range of the entries' type."""
    for number in sums[D_SQ]:
        if not least < number < most:
            return False
    return math.isfinite(sums.sum())


@compiled()
def fold_and_step(partial, block, least, most, loss, method, numbers, sums, blocks, room):
    """Add up the sums of all chunks, then choose the step; squares beyond `least` and `most` need doubles."""
    sums[:] = 0
    for i in range(len(partial)):
        for row in range(len(sums)):
            sums[row, block[i]] += partial[i, row]
    blocks.moved_sq[:] = 0
    for j in range(len(blocks.of)):
        blocks.moved_sq[blocks.of[j]] += sums[MOVED_SQ, j]
    g_dot_x, d_dot_x = sums[G_DOT_X].sum(), sums[D_DOT_X].sum()
    found = take_step(loss, method, numbers, g_dot_x, d_dot_x, blocks, room, closed_form)
    return found if _ordinary(sums, least, most) else (INEXACT, *found[1:])


class ClosedForm:
    """The steps of a plan in closed form.

    Args:
        plan: the plan.
        least: sums of squares have all their digits above this number, and below `most`.
    """

    def __init__(self, plan: Any, least: float, most: float) -> None:
        self._plan, self._part, self._limits = plan, plan.parts[0].part, (least, most)
        count, sets = len(plan.blocks), len(plan.sets.groups)
        self._sums = np.zeros((SUMS, count))
        self._blocks = Blocks(
            np.zeros(count), np.zeros(count), self._sums[D_SQ], self._sums[D_DOT_X], self._sums[G_SQ],
            np.array(plan.sets.of_block, np.int64), np.zeros(sets), np.zeros(sets), np.zeros((sets, len(TRAVEL))),
        )  # fmt: skip
        self._room = Room(np.zeros(count), np.zeros((sets, 5)), *self._part.lines)
        self._averages = plan.rule.beta is not None or plan.rule.mix is not None
        self._seen: object = None  # the numbers of the groups that rates and strengths are

    def ready(self) -> bool:
        """Whether there is nothing to begin: new state, or a set that has taken no step yet."""
        if self._plan.fresh:
            return False
        if self._plan.rule.distance:
            self._blocks.before[:] = self._plan.sets_before()
            return bool(self._blocks.before[:, FIRST].min() > 0)
        return True

    def solve(self, opt: Any, loss: Loss) -> Solved | None:
        """The step; None if its numbers need doubles."""
        plan, part, options = self._plan, self._part, opt.param_groups[0]
        if self._seen is not opt._scheduled:
            self._seen, self._blocks.rates[:], self._blocks.lam[:] = opt._scheduled, plan.rates, plan.lam
        k = float(options.get("k", 0.0))
        numbers = plan.numbers(options, k, part.set_weights(k, plan.rule) if self._averages else 1.0)
        found = fold_and_step(
            *part.chunk_sums(), *self._limits, loss, plan.method, numbers, self._sums, self._blocks, self._room
        )
        step = Step(*found)
        if step.code == INEXACT:
            return None
        share, after = self._room.share.tolist(), self._room.after.tolist()
        return Solved(step, k, loss, self._blocks, share, after, partial(self._write, step))

    def _write(self, step: Step) -> Step:
        self._part.write_lines(step.share)
        torch.autograd.graph.increment_version(self._plan.owners)
        return step
