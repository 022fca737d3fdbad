"""How long a step on a device may be: by learning rates, and by the distance from the start.

Caps that are known before the step are the learning rates. Else a block has a share w_j in [0, 1], its learning rate
divided by the largest one, and its cap is w_j times one number for all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.caps import shares
from proxsps.core.distance import Travel, advance_travel, distance_cap, moving_weights, start_reach
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.distance import KEYS, ORIGIN, sampled
from proxsps.optim.lists import widened
from proxsps.optim.rule import Rule


class Caps:
    """The caps of one step.

    Args:
        opt: the optimizer.
        rule: its rule.
        blocks: its blocks, which get their caps or shares.
        numbers: the numbers of the step.
    """

    def __init__(self, opt: Any, rule: Rule, blocks: Sequence[Block], numbers: Numbers) -> None:
        self._opt, self._rule, self._numbers = opt, rule, numbers
        self.scaled = rule.matched or rule.distance
        self._fresh: list[tuple[Tensor, Tensor]] = []  # the start of new parameters
        if rule.distance:
            self._before = Travel(*(numbers.scalar(opt.param_groups[0][key]) for key in KEYS))
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

    def sums(self) -> list[Tensor]:
        """||x - x_0||^2 and ||x||^2 of the entries on this rank, estimated from samples; nothing if not needed."""
        if not self._rule.distance:
            return []
        opt, dtype = self._opt, self._numbers.dtype
        params = [p for group in opt.param_groups for p in group["params"]]
        owners = [p for p in params if p.grad is not None or ORIGIN in opt.state.get(p, ())]
        if not owners:
            return [self._numbers.vector([0.0, 0.0])]
        points, starts, scales = [], [], []
        for found in sampled(owners, opt._ranks, opt._places):
            own = opt.state.get(found.owner, {})
            if ORIGIN not in own:
                self._fresh.append((found.owner, found.keep()))
            start = found.read(own[ORIGIN]) if ORIGIN in own else found.entries.clone()
            points.append(widened(found.entries))
            starts.append(widened(start))
            scales.append(found.factor**0.5)  # from sums over samples to sums over all entries
        weighted = torch._foreach_mul([*torch._foreach_sub(points, starts), *points], scales * 2)
        norms = torch.stack(torch._foreach_norm(weighted, 2, dtype)).to(dtype)
        return [(norms**2).reshape(2, -1).sum(1)]

    def longest(self, travelled: Sequence[Tensor], g_sq: Tensor) -> tuple[Tensor, Array | float, Array | float]:
        """The number that shares are multiplied by, the factor on the step, and the distance cap.

        Args:
            travelled: `sums` over all ranks.
            g_sq: ||D_j^-1 g_j||^2 of each block over all ranks.
        """
        if not self._rule.distance:
            return self._numbers.scalar(self._largest), 1.0, math.nan
        moved, length = torch.sqrt(travelled[0])
        first = torch.where(self._before.taken <= 0, start_reach(length), self._before.first)
        total = over_blocks(g_sq if self._even else moving_weights(self.alpha) * g_sq)
        factor = self._largest if self._rule.factor else 1.0
        self._after = advance_travel(self._before._replace(first=first), moved, total, factor)
        distance = distance_cap(self._after)
        return distance if self._rule.factor else distance.clip(max=self._largest), factor, distance

    def changes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Numbers in the groups that a step changes: their values after and before it."""
        return dict(zip(KEYS, zip(self._after, self._before, strict=True), strict=True)) if self._rule.distance else {}

    def commit(self) -> None:
        """Store the start of new parameters."""
        for owner, start in self._fresh:
            self._opt.state[owner][ORIGIN] = start
