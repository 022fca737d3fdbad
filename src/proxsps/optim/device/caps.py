"""How long a step on a device may be: by learning rates, and by the distance from the start.

Caps that are known before the step are the learning rates. Else a block has a share w_j in [0, 1], its learning rate
divided by the largest one, and its cap is w_j times one number for all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.caps import shares
from proxsps.core.distance import Travel, advance_travel, distance_cap, moving_weights, start_reach
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.distance import KEYS, by_set, constant, set_factors
from proxsps.optim.lists import widened
from proxsps.optim.memory import ORIGIN
from proxsps.optim.rule import Rule
from proxsps.optim.second_point import measured


class Caps:
    """The caps of one step; blocks get their caps or shares."""

    def __init__(self, opt: Any, rule: Rule, blocks: Sequence[Block], numbers: Numbers) -> None:
        self._opt, self._rule, self._numbers = opt, rule, numbers
        self.scaled = rule.matched or rule.distance
        self._present: set[int] = set()  # sets with parameters that had a gradient
        self._blocks, self.sets = blocks, by_set(blocks)
        self._alone = len(self.sets.members) == len(blocks)  # whether each block is a set
        if rule.distance:
            values = [groups[0][key] for key in KEYS for groups in self.sets.groups]
            self._before = Travel(*numbers.vector(values).reshape(len(KEYS), -1))
        rates = [block.alpha for block in blocks]
        self.valid: Tensor | bool = True  # whether all rates are finite numbers >= 0, if some are tensors
        if any(isinstance(rate, Tensor) for rate in rates):
            self.alpha = numbers.vector(rates)
            self.valid = ((self.alpha >= 0) & (self.alpha < math.inf)).all()
            if self.scaled:
                self._largest, self.alpha = shares(self.alpha)
            own, self._even = list(self.alpha), len(rates) == 1
        elif self.scaled:
            self._largest = max(map(float, rates))
            own = [rate / (self._largest or 1.0) for rate in rates]
            self._even = len(set(own)) == 1
            if not (rule.distance and self._even and self._largest and len(self.sets.members) > 1):
                self.alpha = numbers.vector(own)  # else found by `longest`
        else:
            self.alpha, own = numbers.vector(rates), rates
        for block, share in zip(blocks, own, strict=True):
            block.alpha = share

    def sums(self) -> list[Tensor]:
        """||x - x_0||^2 of each set, then ||x||^2, on this rank, estimated from samples; nothing if not needed.

        Stores the start of new parameters.
        """
        if not self._rule.distance:
            return []
        opt, dtype, sets = self._opt, self._numbers.dtype, len(self.sets.members)
        params = [p for group in opt.param_groups for p in group["params"]]
        owners = [p for p in params if p.grad is not None or ORIGIN in opt.state.get(p, ())]
        if not owners:
            return [self._numbers.vector([0.0, 0.0] * sets)]
        points, starts = [], []
        samples = measured(owners, opt, self._rule.mix)
        for found in samples:
            own = opt.state[found.owner]
            if ORIGIN not in own:
                own[ORIGIN] = found.keep()
            points.append(widened(found.entries))
            starts.append(widened(found.read(own[ORIGIN])))
        norms = torch.stack(torch._foreach_norm([*torch._foreach_sub(points, starts), *points], 2, dtype)).to(dtype)
        # From sums over samples to sums over all entries, and over the tensors of each set.
        places = [self.sets.of[id(p)] for p in owners]
        self._present = set(places)
        own_factors = tuple([found.factor for found in samples])
        factors = constant(opt._places, set_factors, own_factors, tuple(places), sets, self._numbers.device, dtype)
        return [(norms.square().reshape(2, -1) @ factors).reshape(-1)]

    def longest(self, travelled: Sequence[Tensor], g_sq: Tensor) -> tuple[Tensor, Array | float, Array | float]:
        """The number that shares are multiplied by, the factor on the step, and the distance cap.

        Args:
            travelled: `sums` over all ranks.
            g_sq: ||D_j^-1 g_j||^2 of each block over all ranks.
        """
        if not self._rule.distance:
            return self._numbers.scalar(self._largest), 1.0, math.nan
        moved, length = torch.sqrt(travelled[0]).reshape(2, -1)
        factor = self._largest if self._rule.factor else 1.0
        own_factor: Any = factor
        several = len(self.sets.members) > 1
        if several and self._rule.factor and not self._even:  # the factor of a set is the largest one of its blocks
            shares = self._by_set(self.alpha, torch.amax)
            own_factor, resting = factor * shares, shares <= 0  # whose average goes on
            own = resting if self._alone else torch.stack([resting[i] for i in self.sets.of_block])
            total = self._by_set((self.alpha + own) ** 2 * g_sq, torch.sum) / (shares**2 + resting)
        else:
            total = self._by_set(g_sq if self._even else moving_weights(self.alpha) * g_sq, torch.sum)
        fresh = self._before.first <= 0
        if len(self._present) < len(self.sets.members):  # a set may get its first gradients later than others
            fresh = fresh & (length + total > 0)
        first = torch.where(fresh, start_reach(length), self._before.first)
        self._after = advance_travel(self._before._replace(first=first), moved, total, own_factor)
        distance = distance_cap(self._after, self._rule.scale)
        caps = distance if self._rule.factor else distance.clip(max=self._largest)
        longest = self._shared(caps) if several else caps[0]
        return longest, factor, longest if self._rule.factor else distance.max()

    def _by_set(self, numbers: Tensor, over: Callable[[Tensor], Tensor]) -> Tensor:
        """One number per set from one per block; nothing to do where each block is a set."""
        if self._alone:
            return numbers
        return torch.stack([over(torch.stack([numbers[j] for j in own])) for own in self.sets.members])

    def _shared(self, caps: Tensor) -> Tensor:
        """The largest cap of a set; shares of blocks are multiplied by that of their set, divided by it."""
        longest = caps.max()
        own = caps / (longest + (longest <= 0))
        own = own if self._alone else torch.stack([own[i] for i in self.sets.of_block])
        self.alpha = own if self._even and self._largest else self.alpha * own  # even shares are 1
        for block, share in zip(self._blocks, self.alpha, strict=True):
            block.alpha = share
        return longest

    def changes(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """Numbers in the groups of each set that a step changes: their values after and before it."""
        if not self._rule.distance:
            return [{}]
        pairs = [zip(*pair, strict=True) for pair in zip(self._after, self._before, strict=True)]
        return [dict(zip(KEYS, own, strict=True)) for own in zip(*pairs, strict=True)]
