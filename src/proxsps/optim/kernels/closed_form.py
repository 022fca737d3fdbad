"""Steps of a plan whose blocks are all affine: two passes, and one compiled call for all numbers between them.

They are the steps of `proxsps.optim.host.take`, in fewer calls: with few parameters, Python takes most of the time. The
numbers are those of `proxsps.core.affine_step`, which is compiled as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from inspect import isfunction
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numba.extending import register_jitable

from proxsps.core import plain
from proxsps.core.affine_step import INEXACT, SKIPPED, TAKEN, Blocks, Loss, Method, Numbers, Room, Step, affine_step
from proxsps.core.rules import Decision
from proxsps.optim.distance import TRAVEL
from proxsps.optim.kernels.averages import D_DOT_X, D_SQ, G_DOT_X, G_SQ, MOVED_SQ, SUMS
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.last_step import Chosen, L2Step, Taken

FIRST = TRAVEL.index("first_reach")

for formula in {**vars(plain), **affine_step.__globals__}.values():  # all of the two modules
    if isfunction(formula):
        register_jitable(forceinline=True)(formula)


@inlined()
def _ordinary(sums, least, most):
    """Whether all sums are finite, and squares well inside the range of the entries' type."""
    total = 0.0
    for row in sums:
        for number in row:
            total += number
    for number in sums[D_SQ]:
        if not least < number < most:
            return False
    return math.isfinite(total)


@compiled()
def fold_and_choose(partial, block, least, most, loss, method, numbers, rates, lam, of, before, sums, room):
    """Add up the sums of all chunks, then choose the step; squares beyond `least` and `most` need doubles."""
    sums[:] = 0
    for i in range(len(partial)):
        for row in range(len(sums)):
            sums[row, block[i]] += partial[i, row]
    found = affine_step(
        loss, method, numbers,
        Blocks(rates, lam, of, sums[D_SQ], sums[D_DOT_X], sums[G_DOT_X], sums[G_SQ], sums[MOVED_SQ], before), room,
    )  # fmt: skip
    return found if _ordinary(sums, least, most) else (INEXACT, *found[1:])


class ClosedForm:
    """The steps of a plan in closed form.

    Args:
        plan: the plan.
        least: sums of squares have all their digits above this number, and below `most`.
    """

    def __init__(self, plan: Any, least: float, most: float) -> None:
        rule, count = plan.rule, len(plan.blocks)
        self._plan, self._rule, self._part = plan, rule, plan.parts[0].part
        self._limits = least, most
        self._method = Method(
            rule.beta is not None, rule.mix is not None, rule.beta2 is not None, rule.matched, rule.distance,
            rule.factor, float(rule.scale), plan.longest,
        )  # fmt: skip
        self._of = np.array(plan.sets.of_block, np.int64)
        self._travel = itemgetter(*TRAVEL)
        self._first = [groups[0] for groups in plan.sets.groups]
        self._before = np.zeros((len(self._first), len(TRAVEL)))
        self._room = Room(np.zeros(count), np.zeros((len(self._first), 5)), *self._part.lines)
        self._gradients = G_SQ if rule.beta is not None or rule.mix is not None else D_SQ
        self._seen: object = None  # the numbers of the groups that these arrays are made of
        self._lam = self._rates = np.empty(0)

    def ready(self) -> bool:
        """Whether there is nothing to begin: new state, or a set that has taken no step yet."""
        if self._plan.fresh:
            return False
        if self._rule.distance:
            self._before[:] = [self._travel(group) for group in self._first]
            return bool(self._before[:, FIRST].min() > 0)
        return True

    def take(self, opt: Any, f: float, C: float, bounded: bool) -> Taken | None:
        """Take the step, or none if it has to be skipped; None if its numbers need doubles."""
        rule, options, part = self._rule, opt.param_groups[0], self._part
        if self._seen is not opt._scheduled:
            self._seen, self._lam = opt._scheduled, np.array(self._plan.lam)
            self._rates = np.array([float(block.group["lr"]) for block in self._plan.blocks])
        k, new, value, offset, total, latest = float(options.get("k", 0.0)), 1.0, 0.0, 0.0, 0.0, 0.0
        if rule.beta is not None:
            value, offset = float(options["model_value"]), float(options["model_offset"])
        elif rule.mix is not None:
            total, latest = float(options["total"]), float(options["longest"])
        if rule.beta is not None or rule.mix is not None:
            new = part.set_weights(k, rule)
        chunks, of_chunk = part.chunk_sums()
        sums = np.empty((SUMS, len(self._rates)))
        found = fold_and_choose(
            chunks, of_chunk, *self._limits, Loss(f, C, bounded), self._method,
            Numbers(k, value, offset, total, latest, new), self._rates, self._lam, self._of, self._before, sums,
            self._room,
        )  # fmt: skip
        step = Step(*found)
        if step.code == INEXACT:
            return None
        share = self._room.share.copy()
        if step.code != TAKEN:
            if step.code == SKIPPED:
                opt._explain_skip(f, C, bounded)
            else:
                opt._skip_far_move()
            return Taken(share, False, step.gap)
        opt._skips = 0
        part.write_lines(step.share)
        torch.autograd.graph.increment_version(self._plan.owners)
        self._keep_numbers(opt.param_groups, k, step, share.tolist())
        chosen = partial(self._chosen, step, sums, share, self._lam, bounded)
        if rule.distance and (opt._rest.steps is not None or k == 0):
            moved_sq, d_sq, g_sq = (float(sums[row].sum()) for row in (MOVED_SQ, D_SQ, self._gradients))
            opt._notice_rest(k, moved_sq, step.gap, d_sq, g_sq, chosen())
        if bounded and (step.gap <= 0 or opt._low) and (rule.beta is not None or rule.mix is not None):
            opt._notice_low(step.gap, C)
        return Taken(share, True, step.gap, chosen)

    def _keep_numbers(self, groups: Sequence[dict[str, Any]], k: float, step: Step, share: Sequence[float]) -> None:
        """Write the numbers of a step into the groups."""
        rule, after, of_sets = self._rule, dict[str, float](), list[dict[str, float]]()
        if rule.beta is not None:
            after = {"model_value": step.value, "model_offset": step.offset, "k": k + 1}
        elif rule.mix is not None:
            squares = plain.gradient_squares(k, float(groups[0]["squares"]))
            after = {"total": step.total, "longest": step.latest, "squares": squares, "k": k + 1}
        if rule.distance:
            of_sets = [dict(zip(TRAVEL, numbers, strict=False), k=k + 1) for numbers in self._room.after.tolist()]
        self._plan.keep_numbers(groups, after, of_sets, step.u * step.reach, share)

    def _chosen(self, step: Step, sums: np.ndarray, share: np.ndarray, lam: np.ndarray, bounded: bool) -> Chosen:
        """The step for its report."""
        rule = self._rule
        decision: Decision | L2Step = Decision(step.root, step.u, step.height)
        if not (rule.matched or rule.distance):
            return Chosen(decision, step.u)
        if rule.matched and bounded and step.longest > 0:
            gap, longest, s = np.array([step.gap, step.longest, step.height])
            decision = L2Step(gap, sums[D_SQ], sums[D_DOT_X], share, lam, longest, s)
        caps = (step.largest if rule.factor else 1.0) * step.longest
        distance = step.distance if rule.distance else math.nan
        return Chosen(decision, step.u, step.reach, caps, distance, step.longest)
