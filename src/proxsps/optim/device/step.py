"""One step on a device, on tensors that are never read back: it can be captured, compiled and traced.

A step that may not be taken is computed all the same, and masked where it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks, times
from proxsps.core.caps import shares
from proxsps.core.distance import moving_weights
from proxsps.core.rules import Decision, Model, StepMemory, dec_sps, linear, sps_max, truncated
from proxsps.core.step import admissible
from proxsps.optim.blocks import Block
from proxsps.optim.device.distance import DistanceCap
from proxsps.optim.device.estimate import Averaged, Estimate
from proxsps.optim.device.numbers import Numbers, keep_numbers, store
from proxsps.optim.device.parts import Parts
from proxsps.optim.last_step import Chosen, Taken, report
from proxsps.optim.plan import Rule
from proxsps.optim.reduce import Sums, join


class Caps:
    """How long a step may be: by learning rates, and by the distance from the start.

    Caps that are known before the step are the learning rates. Else a block has a share w_j in [0, 1], its learning
    rate divided by the largest one, and its cap is w_j times one number for all blocks.

    Args:
        opt: the optimizer.
        rule: its rule.
        blocks: its blocks, which get their caps or shares.
        numbers: the numbers of the step.
    """

    def __init__(self, opt: Any, rule: Rule, blocks: Sequence[Block], numbers: Numbers) -> None:
        self._rule, self._numbers = rule, numbers
        self.scaled = rule.matched or rule.distance
        self._distance = DistanceCap(opt, numbers) if rule.distance else None
        rates = [block.alpha for block in blocks]
        if not self.scaled:
            self.alpha = numbers.vector(rates)
            return
        if any(isinstance(rate, Tensor) for rate in rates):
            self._largest, self.alpha = shares(numbers.vector(rates))
            own = list(self.alpha)
            self._even = len(own) == 1
        else:
            self._largest = max(map(float, rates))
            own = [rate / (self._largest or 1.0) for rate in rates]
            self.alpha = numbers.vector(own)
            self._even = len(set(own)) == 1
        for block, share in zip(blocks, own, strict=True):
            block.alpha = share

    def sums(self) -> list[Array]:
        """The sums that the distance cap needs, on this rank: one vector, or none."""
        return [] if self._distance is None else [self._distance.sums()]

    def longest(self, travelled: Sequence[Array], g_sq: Array) -> tuple[Array, Array | float, Array | float]:
        """The number that shares are multiplied by, the factor on the step, and the distance cap."""
        if self._distance is None:
            return self._numbers.scalar(self._largest), 1.0, math.nan
        total = over_blocks(g_sq if self._even else moving_weights(self.alpha) * g_sq)
        factor = self._largest if self._rule.factor else 1.0
        distance = self._distance.cap(travelled[0], total, factor)
        return distance if self._rule.factor else distance.clip(max=self._largest), factor, distance

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """Numbers in the groups that a step changes: their values after and before it."""
        return {} if self._distance is None else self._distance.changes()

    def commit(self) -> None:
        """Store the start of new parameters."""
        if self._distance is not None:
            self._distance.commit()


class Known(NamedTuple):
    """The numbers that choose a step, over all ranks."""

    gap: Tensor  # m - C
    sums: Sums
    lam: Tensor  # strengths of the squared l2 norm
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
    rates = []  # that schedulers keep on the device
    for block in blocks:
        if isinstance(block.alpha, Tensor):
            block.alpha = numbers.scalar(block.alpha)
            rates.append(block.alpha)
    caps = Caps(opt, rule, blocks, numbers)
    averaged = rule.beta is not None
    estimate = Averaged(rule, blocks, numbers, opt.state) if averaged else Estimate(rule, blocks, numbers)
    lam = numbers.vector([block.lam for block in blocks])
    parts = Parts(blocks, numbers, ranks, estimate.known, rule.coupled, caps.scaled)
    sums = parts.sums(points=rule.coupled or rule.max_move is not None)
    extras, travelled = estimate.extras(), caps.sums()
    agreed, active = True, ranks.size
    if ranks.size > 1:
        own = sums, extras, travelled
        f, C, sums, extras, travelled, agreed, active = join(
            ranks, numbers.vector, blocks, f, C, weight, *own, active=True
        )
    m = estimate.value(f, extras, sums, lam)
    gap = _above(m, C)
    # An averaged model may be below the bound, even if no loss is.
    above, further = (_above(f, C), (gap,)) if averaged else (gap, ())
    ok = admissible(above, sums.d_sq, sums.d_dot_x, bound is not None, *further)
    ok = ok if agreed is True else ok & agreed
    ok = ok & _are_rates(torch.stack(rates)) if rates else ok
    known = Known(gap, sums, lam, travelled, estimate.g_sq(extras, sums), bound is not None, ok)
    step = _choose(rule, caps, parts, known)
    s = parts.write(step, estimate.move_sums(extras, sums), caps.alpha, lam, ok, rule.max_move)
    keep_numbers(opt.param_groups, ok, estimate.changes() | caps.changes())
    estimate.commit(ok)
    caps.commit()
    for block in blocks:
        for finish in block.afterwards:
            finish()
    taken = Taken(_by_group(opt.param_groups, blocks, caps.alpha, numbers), ok, gap, step, s)
    if ranks.check and 1 < ranks.size == active:
        ranks.compare(report(taken).tau, opt._named())
    return taken


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
        one = parts.numbers.scalar(1.0) if parts.searched else 1.0
        return Chosen(found, one, times(factor, s), total, distance, longest)
    parts.set_reach(longest)
    decision = _decide(rule, parts.model(gap, sums, longest * caps.alpha, lam), parts, known)
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


def _by_group(groups: Sequence[Any], blocks: Sequence[Block], alpha: Tensor, numbers: Numbers) -> Tensor:
    """The cap of each group; shards and whole tensors of one group are two blocks."""
    if len(blocks) == len(groups):
        return alpha
    places = {id(block.group): i for i, block in reversed(list(enumerate(blocks)))}
    return numbers.vector([alpha[places[id(group)]] for group in groups])


def _are_rates(rates: Tensor) -> Tensor:
    """Whether all caps on the step are finite numbers >= 0."""
    return ((rates >= 0) & (rates < math.inf)).all()


def _above(m: Array, C: Array | float) -> Array:
    """m - C; without an operation for the usual C = 0."""
    return m if isinstance(C, float) and C == 0 else m - C
