"""The distance cap of a step: how far the parameters have come since the start, from a sample of their entries.

State of a parameter: `start` holds the sampled entries of x_0, every 17th of the flat tensor (`proxsps.core.distance`).
The numbers rbar, G and k are in the groups.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.distance import (
    Travel,
    distance_cap,
    keep_travel,
    sample,
    sample_size,
    start_travel,
    update_travel,
)
from proxsps.optim.blocks import PLAIN
from proxsps.optim.memory import State, store_all
from proxsps.optim.numbers import Host, Numbers
from proxsps.optim.passes import widened
from proxsps.optim.reduce import Ranks

KEYS = ("reach", "g_sq", "k")


class Distance:
    """How far the run has come, and the cap that follows from it.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        numbers: those of the step.
        ranks: the ranks that step together.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], state: State, numbers: Numbers, ranks: Ranks) -> None:
        self._groups, self._state, self._numbers = groups, state, numbers
        self._before = Travel(*(numbers.scalar(groups[0][key]) for key in KEYS))
        # Whether this is the first step, as far as that can be known without waiting for a device.
        self._first = not isinstance(numbers, Host) or bool(self._before.taken == 0)
        self._fresh: list[tuple[dict[str, Any], Tensor]] = []
        self._samples: list[Tensor] = []
        self._starts: list[Tensor] = []
        self._factors: list[float] = []  # from the sum over a sample to that over all entries, and the share of a rank
        for owner in self._owners():
            self._take(owner, ranks)

    def _owners(self) -> Iterator[Tensor]:
        """All parameters with a gradient, and those that had one before."""
        for group in self._groups:
            for param in group["params"]:
                if param.grad is not None or "start" in self._state.get(param, ()):
                    yield param

    def _take(self, owner: Tensor, ranks: Ranks) -> None:
        own, count = self._state.get(owner, {}), owner.numel()
        share, sampled = 1 / ranks.size, None
        if type(owner) not in PLAIN and "torch.distributed.tensor" in sys.modules:
            from proxsps.optim.shards import sampled_piece

            share, sampled = sampled_piece(owner, ranks)
        if sampled is None:
            entries = torch.view_as_real(owner.detach()) if owner.is_complex() else owner.detach()
            count = entries.numel()
            sampled = sample(entries.reshape(-1))
        start = own.get("start")
        if start is None or (self._first and isinstance(self._numbers, Host)):
            start = sampled.clone()
            self._fresh.append((owner, start))
        self._samples.append(widened(sampled))
        self._starts.append(widened(start))
        self._factors.append(share * count / max(1, sample_size(count)))

    def sums(self) -> Array:
        """||x - x_0||^2 and, where it may be needed, ||x||^2, of what this rank holds."""
        if not self._samples:
            return self._numbers.vector([0.0, 0.0])
        moved = self._squares(torch._foreach_sub(self._samples, self._starts))
        return self._numbers.vector([moved, self._squares(self._samples) if self._first else 0.0])

    def _squares(self, tensors: Sequence[Tensor]) -> Array:
        norms = self._numbers.column(torch.stack(torch._foreach_norm(tensors)))
        return (self._numbers.vector(self._factors) * norms**2).sum()

    def cap(self, sums: Array, g_sq: Array) -> Array:
        """A_k, from the sums and ||D^-1 g||^2 over all ranks."""
        moved_sq, x_sq = sums[0], sums[1]
        before, xp = self._before, array_namespace(moved_sq)
        reach = xp.where(before.taken <= 0, start_travel(x_sq).reach, before.reach) if self._first else before.reach
        self._after = update_travel(before._replace(reach=reach), moved_sq, g_sq)
        return distance_cap(self._after)

    def commit(self, ok: Array) -> None:
        """Keep the new numbers."""
        after = keep_travel(ok, self._after, self._before)
        store_all(self._groups, **dict(zip(KEYS, map(self._numbers.factor, after), strict=True)))
        for owner, start in self._fresh:
            self._state[owner]["start"] = start
