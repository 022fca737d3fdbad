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
from proxsps.optim.distance import KEYS, ORIGIN
from proxsps.optim.lists import widened
from proxsps.optim.rule import Rule
from proxsps.optim.second_point import measured
from proxsps.optim.sets import by_set


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
        self._blocks, self.sets = blocks, by_set(blocks)
        if rule.distance:
            firsts = [groups[0] for groups in self.sets.groups]
            self._before = Travel(*(self._per_set([group[key] for group in firsts]) for key in KEYS))
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

    def _per_set(self, values: Sequence[Any]) -> Tensor:
        """One number per set; of no dims if there is one set."""
        return self._numbers.scalar(values[0]) if len(values) == 1 else self._numbers.vector(values)

    def sums(self) -> list[Tensor]:
        """||x - x_0||^2 and ||x||^2 of the entries on this rank, estimated from samples; nothing if not needed.

        One pair per set of blocks.
        """
        if not self._rule.distance:
            return []
        opt, dtype = self._opt, self._numbers.dtype
        params = [p for group in opt.param_groups for p in group["params"]]
        owners = [p for p in params if p.grad is not None or ORIGIN in opt.state.get(p, ())]
        if not owners:
            return [self._numbers.vector([0.0, 0.0] * len(self.sets.members))]
        points, starts, scales = [], [], []
        for found in measured(owners, opt, self._rule.mix):
            own = opt.state.get(found.owner, {})
            if ORIGIN not in own:
                self._fresh.append((found.owner, found.keep()))
            start = found.read(own[ORIGIN]) if ORIGIN in own else found.entries.clone()
            points.append(widened(found.entries))
            starts.append(widened(start))
            scales.append(found.factor**0.5)  # from sums over samples to sums over all entries
        weighted = torch._foreach_mul([*torch._foreach_sub(points, starts), *points], scales * 2)
        norms = torch.stack(torch._foreach_norm(weighted, 2, dtype)).to(dtype)
        squares = (norms**2).reshape(2, -1)
        if len(self.sets.members) == 1:
            return [squares.sum(1)]
        sets = [self.sets.of[id(p)] for p in owners]
        places = [[i for i, own in enumerate(sets) if own == place] for place in range(len(self.sets.members))]
        # Parameters come group by group, so that those of a set are usually neighbours, and slices take fewer launches.
        return [torch.cat([_chosen(squares, own).sum(1) for own in places])]

    def longest(self, travelled: Sequence[Tensor], g_sq: Tensor) -> tuple[Tensor, Array | float, Array | float]:
        """The number that shares are multiplied by, the factor on the step, and the distance cap.

        Args:
            travelled: `sums` over all ranks.
            g_sq: ||D_j^-1 g_j||^2 of each block over all ranks.
        """
        if not self._rule.distance:
            return self._numbers.scalar(self._largest), 1.0, math.nan
        moved, length = torch.sqrt(travelled[0].reshape(-1, 2)).unbind(1)
        squares = g_sq if self._even else moving_weights(self.alpha) * g_sq
        factor = self._largest if self._rule.factor else 1.0
        own_factor: Any = factor
        if len(self.sets.members) == 1:
            moved, length, total = moved[0], length[0], over_blocks(squares)
            fresh = self._before.taken <= 0
        else:  # a set may get its first gradients later than others
            total = torch.stack([_chosen(squares[None], own).sum() for own in self.sets.members])
            if self._rule.factor and not self._even:  # the factor of a set is the largest one of its blocks
                shares = torch.stack([_chosen(self.alpha[None], own).max() for own in self.sets.members])
                total, own_factor = total / (shares**2 + (shares <= 0)), factor * shares
            fresh = (self._before.first <= 0) & (length + total > 0)
        first = torch.where(fresh, start_reach(length), self._before.first)
        self._after = advance_travel(self._before._replace(first=first), moved, total, own_factor)
        distance = distance_cap(self._after, self._rule.scale)
        longest = distance if self._rule.factor else distance.clip(max=self._largest)
        if len(self.sets.members) == 1:
            return longest, factor, distance
        return self._shared(longest), factor, distance.max()

    def _shared(self, caps: Tensor) -> Tensor:
        """The largest cap of a set; shares of blocks are multiplied by that of their set, divided by it."""
        longest = caps.max()
        own = (caps / (longest + (longest <= 0))).unbind()
        factors = {j: own[i] for i, members in enumerate(self.sets.members) for j in members}
        self.alpha = self.alpha * torch.stack([factors[j] for j in range(len(self._blocks))])
        for block, share in zip(self._blocks, self.alpha.unbind(), strict=True):
            block.alpha = share
        return longest

    def changes(self) -> list[dict[str, tuple[Tensor, Tensor]]]:
        """Numbers in the groups of each set that a step changes: their values after and before it."""
        if not self._rule.distance:
            return [{}]
        if len(self.sets.members) == 1:
            return [dict(zip(KEYS, zip(self._after, self._before, strict=True), strict=True))]
        after, before = (torch.stack(list(numbers)).unbind(1) for numbers in (self._after, self._before))
        pairs = zip(after, before, strict=True)
        return [dict(zip(KEYS, zip(new.unbind(), old.unbind(), strict=True), strict=True)) for new, old in pairs]

    def commit(self) -> None:
        """Store the start of new parameters."""
        for owner, start in self._fresh:
            self._opt.state[owner][ORIGIN] = start


def _chosen(columns: Tensor, places: Sequence[int]) -> Tensor:
    """Some columns; a view where they are neighbours."""
    if list(places) == list(range(places[0], places[0] + len(places))):
        return columns[:, places[0] : places[0] + len(places)]
    return torch.stack([columns[:, i] for i in places], dim=1)
