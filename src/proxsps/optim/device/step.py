"""One step on a device, on tensors that are never read back: it can be captured, compiled and traced.

A step that may not be taken is computed all the same, and masked where it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.core.rules import Decision, Model, StepMemory, dec_sps, linear, sps_max, truncated
from proxsps.core.step import admissible, relaxation
from proxsps.optim.blocks import Block
from proxsps.optim.device.caps import Caps
from proxsps.optim.device.estimate import Averaged, Given
from proxsps.optim.device.joined import Estimate
from proxsps.optim.device.numbers import Numbers, keep_numbers, store
from proxsps.optim.device.parts import Parts
from proxsps.optim.device.second import SecondPoints
from proxsps.optim.last_step import Chosen, Taken, report
from proxsps.optim.limit import Start
from proxsps.optim.reduce import Sums, join
from proxsps.optim.rule import Rule


class Known(NamedTuple):
    """The numbers that choose a step, over all ranks."""

    gap: Tensor  # m - C
    sums: Sums
    lam: Tensor | float  # strengths of the squared l2 norm
    travelled: Sequence[Array]  # `Caps.sums`
    g_sq: Array  # ||D_j^-1 g_j||^2 of each block
    bounded: bool  # whether there is a C
    ok: Tensor  # whether the step may be taken


def take(opt: Any, blocks: list[Block], device: torch.device, value: Any, weight: float, bound: Any) -> Taken:
    """Take a step of an optimizer, or none where its numbers do not allow one.

    Args:
        opt: the optimizer.
        blocks: its blocks.
        device: where they are.
        value: the loss.
        weight: of this rank's loss.
        bound: its lower bound, None if it has none.
    """
    rule, ranks, numbers = opt._rule(), opt._ranks, Numbers(device)
    f, C = numbers.scalar(value), numbers.scalar(bound) if isinstance(bound, Tensor) else float(bound or 0.0)
    caps = Caps(opt, rule, blocks, numbers)
    averaged = rule.beta is not None or rule.mix is not None
    estimate = _estimate(opt, rule, blocks, numbers)
    lams = [float(block.lam) for block in blocks]
    lam = lams[0] if len(set(lams)) == 1 else numbers.vector(lams)  # a Python number takes no launch
    parts = Parts(estimate, ranks, caps.scaled)
    sums = parts.sums()
    extras, travelled = estimate.extras(), caps.sums()
    agreed, active = True, ranks.size
    if ranks.size > 1:
        own = [*sums, *extras], travelled
        f, C, rows, travelled, agreed, active = join(ranks, numbers.vector, blocks, f, C, weight, *own)
        sums, extras = Sums(*rows[: len(sums)]), rows[len(sums) :]
    m, g_sq = estimate.estimated(f, extras, sums, lam)
    gap = _above(m, C)
    # An averaged model may be below the bound, even if no loss is.
    above, further = (_above(f, C), (gap,)) if averaged else (gap, ())
    ok = admissible(above, sums.d_sq, sums.d_dot_x, bound is not None, *further)
    ok = ok if agreed is True else ok & agreed
    ok = ok if caps.valid is True else ok & caps.valid
    known = Known(gap, sums, lam, travelled, g_sq, bound is not None, ok)
    step = _choose(rule, caps, parts, known)
    start = None if rule.max_move is None else Start(blocks)
    parts.write(step, caps.alpha, lam, ok)
    s = 1.0 if start is None else _shorten(start, blocks, ranks, active, numbers, rule.max_move)
    estimated = estimate.finish(step, caps.alpha, ok)
    by_set = zip(caps.sets.groups, caps.changes(), strict=False)
    keep_numbers(ok, [(groups, estimated | changes) for groups, changes in by_set])
    for block in blocks:
        for finish in block.afterwards:
            finish()
    taken = Taken(_by_group(opt.param_groups, blocks, caps.alpha, numbers), ok, gap, step, s)
    if ranks.check and 1 < ranks.size == active:
        ranks.compare(report(taken).tau, opt._named())
    return taken


def _estimate(opt: Any, rule: Rule, blocks: list[Block], numbers: Numbers) -> Estimate:
    """The linear model of a method."""
    if rule.mix is not None:
        return SecondPoints(rule, blocks, numbers, opt)
    return Given(rule, blocks, numbers) if rule.beta is None else Averaged(rule, blocks, numbers, opt.state)


def _choose(rule: Rule, caps: Caps, parts: Parts, known: Known) -> Chosen:
    """The step of a rule on the linear model."""
    gap, sums, lam, *_ = known
    if not caps.scaled:
        decision = _decide(rule, parts.model(gap, sums, caps.alpha, lam), parts, known)
        return Chosen(decision, decision.u)
    longest, factor, distance = caps.longest(known.travelled, known.g_sq)
    total = times(factor, longest)
    if rule.matched and known.bounded:
        found, s = parts.matched(gap, sums, caps.alpha, lam, longest)
        one = parts.numbers.scalar(1.0) if parts.curved else 1.0
        return Chosen(found, one, times(factor, s), total, distance, longest)
    decision = _decide(rule, parts.model(gap, sums, longest * caps.alpha, lam, longest), parts, known)
    return Chosen(decision, decision.u, total, total, distance, longest)


def _decide(rule: Rule, model: Model, parts: Parts, known: Known) -> Decision:
    """The dual variable."""
    if rule.name == "sps_max":
        return sps_max(model, rule.c)
    if rule.name != "dec_sps":
        return truncated(model) if known.bounded else linear(model)
    groups, numbers = [block.group for block in parts.blocks], parts.numbers
    before = StepMemory(numbers.scalar(groups[0]["k"]), numbers.vector([group["memory"] for group in groups]))
    decision, after = dec_sps(model, before, known.ok, rule.c)
    for i, group in enumerate(groups):
        store(group, "k", after.taken)
        store(group, "memory", after.previous[i])
    return decision


def _shorten(start: Start, blocks: Sequence[Block], ranks: Any, active: Any, numbers: Numbers, max_move: Any) -> Tensor:
    """Shorten a move that is longer than `max_move`; returns the factor."""
    shares = [block.share for block in blocks]
    total = (numbers.vector(shares) * numbers.vector(start.moves_sq(numbers.dtype))).sum()
    if ranks.size > 1:
        total = ranks.size / active * ranks.sum(total)[0]
    s: Tensor = relaxation(total, max_move)
    start.shorten(s)
    return s


def _by_group(groups: Sequence[Any], blocks: Sequence[Block], alpha: Tensor, numbers: Numbers) -> Tensor:
    """The cap of each group; shards and whole tensors of one group are two blocks."""
    if len(blocks) == len(groups):
        return alpha
    places = {id(block.group): i for i, block in reversed(list(enumerate(blocks)))}
    return numbers.vector([alpha[places[id(group)]] for group in groups])


def _above(m: Array, C: Array | float) -> Array:
    """m - C; without an operation for the usual C = 0."""
    return m if isinstance(C, float) and C == 0 else m - C
