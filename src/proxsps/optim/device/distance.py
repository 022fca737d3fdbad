"""The distance cap of a step on a device, from samples of the parameters and of their start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.distance import Travel, advance_travel, distance_cap, start_reach
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.distance import KEYS, ORIGIN, sampled
from proxsps.optim.lists import widened


class DistanceCap:
    """The distance of the run from its start, and the cap that follows from it.

    Args:
        opt: the optimizer.
        numbers: the numbers of the step.
    """

    def __init__(self, opt: Any, numbers: Numbers) -> None:
        self._state, self._numbers = opt.state, numbers
        self._before = Travel(*(numbers.scalar(opt.param_groups[0][key]) for key in KEYS))
        # All parameters that have a gradient, or had one before.
        params = [p for group in opt.param_groups for p in group["params"]]
        owners = [p for p in params if p.grad is not None or ORIGIN in self._state.get(p, ())]
        self._samples = sampled(owners, opt._ranks, opt._places)
        self._fresh: list[tuple[Tensor, Tensor]] = []

    def sums(self) -> Array:
        """||x - x_0||^2 and ||x||^2 of the entries on this rank."""
        if not self._samples:
            return self._numbers.vector([0.0, 0.0])
        starts = []
        for found in self._samples:
            own = self._state.get(found.owner, {})
            if ORIGIN in own:
                starts.append(widened(found.read(own[ORIGIN])))
            else:
                self._fresh.append((found.owner, found.keep()))
                starts.append(widened(found.entries.clone()))
        points = [widened(found.entries) for found in self._samples]
        # From sums over samples to sums over all entries.
        scales = [found.factor**0.5 for found in self._samples]
        weighted = torch._foreach_mul([*torch._foreach_sub(points, starts), *points], scales * 2)
        norms = torch.stack(torch._foreach_norm(weighted, 2, self._numbers.dtype)).to(self._numbers.dtype)
        return (norms**2).reshape(2, -1).sum(1)

    def cap(self, sums: Array, g_sq: Array, factor: Array | float) -> Array:
        """A_k, from the sums and ||D^-1 g||^2 over all ranks, and from the factor on the step."""
        before, xp = self._before, array_namespace(sums)
        moved, length = xp.sqrt(sums)
        first = xp.where(before.taken <= 0, start_reach(length), before.first)
        self._after = advance_travel(before._replace(first=first), moved, g_sq, factor)
        return distance_cap(self._after)

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the groups, after this step and before."""
        return dict(zip(KEYS, zip(self._after, self._before, strict=True), strict=True))

    def commit(self) -> None:
        """Keep the start of tensors that are new."""
        for owner, start in self._fresh:
            self._state[owner][ORIGIN] = start
