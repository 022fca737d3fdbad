"""The numbers of an affine step, compiled: the formulas of `proxsps.core.affine_step` as they are."""

from __future__ import annotations

import math
from inspect import isfunction

from numba.extending import register_jitable

from proxsps.core.affine_step import INEXACT, Blocks, affine_step
from proxsps.core.plain import l2_matched
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.entrywise import D_DOT_X, D_SQ, G_DOT_X, G_SQ, MOVED_SQ

for formula in {**l2_matched.__globals__, **affine_step.__globals__}.values():  # all of the two modules
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
