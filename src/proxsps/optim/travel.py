"""The distance cap of a step: the distance of the parameters from the start, from a sample of their entries.

State of a parameter: `start` holds the sampled entries of x_0, every 17th of the flat tensor (`proxsps.core.distance`).
For a sharded parameter, and in checkpoints, they are a padded matrix with one row for each row of the parameter, which
can be sharded and resharded like the parameter.
The numbers rbar, G, k, the first estimate of the distance and the sum of squared factors are in the groups.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.distance import (
    STRIDE,
    Travel,
    advance_travel,
    distance_cap,
    sample,
    sample_size,
    start_reach,
)
from proxsps.optim.blocks import PLAIN, Block
from proxsps.optim.memory import State, local_entries
from proxsps.optim.numbers import Host, Numbers
from proxsps.optim.parts import Part
from proxsps.optim.passes import widened
from proxsps.optim.reduce import Ranks

KEYS = ("reach", "g_sq", "k", "first_reach", "factors_sq")


class Distance:
    """The distance of the run from its start, and the cap that follows from it.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        numbers: the numbers of the step.
        ranks: the ranks that step together.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], state: State, numbers: Numbers, ranks: Ranks) -> None:
        self._groups, self._state, self._numbers = groups, state, numbers
        self._before = Travel(*(numbers.scalar(groups[0][key]) for key in KEYS))
        # Whether this is the first step, if that is known without waiting for a device.
        self._first = not isinstance(numbers, Host) or bool(self._before.taken == 0)
        self._ranks = ranks
        self._fresh: list[tuple[Tensor, Tensor]] = []
        self._samples: list[Tensor] = []
        self._starts: list[Tensor] = []
        self._factors: list[float] = []  # from a sum over a sample to one over all entries, times the rank's share

    def offer(self, blocks: Sequence[Block]) -> None:
        """Give blocks the start of their tensors, for parts that compare it while they sum (`Part.moved_sq`)."""
        if self._first:
            return
        for block in blocks:
            owns = [self._state.get(owner, {}) for owner in block.owners] if block.owns is None else block.owns
            starts: list[Any] = [own.get("start") for own in owns]
            if not block.sharded and all([type(start) is Tensor for start in starts]):
                block.starts = starts

    def _owners(self) -> Iterator[Tensor]:
        """All parameters that have a gradient, or had one before."""
        for group in self._groups:
            for param in group["params"]:
                if param.grad is not None or "start" in self._state.get(param, ()):
                    yield param

    def _take(self, owner: Tensor) -> None:
        own, found = self._state.get(owner, {}), sampled(owner, self._ranks)
        if "start" not in own or (self._first and isinstance(self._numbers, Host)):
            self._fresh.append((owner, found.keep()))
            start = found.entries.clone()
        else:
            start = found.read(own["start"])
        self._samples.append(widened(found.entries))
        self._starts.append(widened(start))
        self._factors.append(found.share * found.size / max(1, sample_size(found.size)))

    def start(self) -> None:
        """Create the state of all parameters with a gradient, if there is none."""
        for owner in self._owners():
            self._take(owner)
        self._keep()

    def _keep(self) -> None:
        for owner, start in self._fresh:
            self._state[owner]["start"] = start

    def sums(self, parts: Iterable[Part]) -> Array:
        """||x - x_0||^2 and, if it may be needed, ||x||^2, of the entries on this rank."""
        known: Array | float = 0.0
        blocks: list[Block] = []
        for part in parts:
            if part.moved_sq is not None:
                known = known + sum(
                    block.share * moved for block, moved in zip(part.blocks, part.moved_sq, strict=True)
                )
                blocks += part.blocks
        if sum(len(block.params) for block in blocks) < sum(len(group["params"]) for group in self._groups):
            measured = {id(owner) for block in blocks for owner in block.owners}
            for owner in self._owners():
                if id(owner) not in measured:
                    self._take(owner)
        if not self._samples:
            return self._numbers.vector([known, 0.0])
        moves = torch._foreach_sub(self._samples, self._starts)
        squares = self._squares([moves, self._samples] if self._first else [moves])
        if self._first and isinstance(known, float):
            return squares
        return self._numbers.vector([known + squares[0], squares[1] if self._first else 0.0])

    def _squares(self, lists: Sequence[Sequence[Tensor]]) -> Array:
        """The sum of the squares of each list, estimated from its samples."""
        tensors, scales = [t for ts in lists for t in ts], [factor**0.5 for factor in self._factors]
        weighted = torch._foreach_mul(tensors, scales * len(lists))
        norms = self._numbers.column(torch.stack(torch._foreach_norm(weighted, 2, self._numbers.dtype)))
        return (norms**2).reshape(len(lists), -1).sum(1)

    def cap(self, sums: Array, g_sq: Array, factor: Array | float) -> Array:
        """A_k, from the sums and ||D^-1 g||^2 over all ranks, and from the factor on the step."""
        before, xp = self._before, array_namespace(sums)
        moved, length = xp.sqrt(sums)
        first = before.first
        if self._first:
            first = xp.where(before.taken <= 0, start_reach(length), first)
        self._after = advance_travel(before._replace(first=first), moved, g_sq, factor)
        return distance_cap(self._after)

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the groups, after this step and before."""
        return dict(zip(KEYS, zip(self._after, self._before, strict=True), strict=True))

    def commit(self) -> None:
        """Keep the start of tensors that are new."""
        self._keep()


class Rows(NamedTuple):
    """The rows of a parameter on a rank: its entries are a contiguous part of the flat tensor."""

    first: int
    held: int
    length: int  # entries per row
    total: int


class Sample(NamedTuple):
    """The sampled entries that this rank holds of a parameter, and where they are in its `start`."""

    entries: Tensor
    size: int  # entries of the whole parameter
    share: float  # one over the number of ranks that hold the same entries
    rows: Rows | None  # the rows that these entries are from; None for all of a tensor
    owner: Tensor

    def keep(self) -> Tensor:
        """The entries as state: a vector, or for a sharded tensor a matrix that is sharded in the same way."""
        if self.rows is not None:
            from proxsps.optim.shards import is_sharded, sharded_like

            if is_sharded(self.owner):
                return sharded_like(self.owner, self.matrix(self.entries), (self.rows.total, _width(self.rows)))
        return self.entries.clone()

    def read(self, start: Tensor) -> Tensor:
        """The inverse of `keep`."""
        return start if self.rows is None else self.vector(local_entries(start))

    def matrix(self, entries: Tensor) -> Tensor:
        """Sampled entries with one row for each row of the tensor, padded with zeros."""
        rows = self.rows or _all_rows(self.owner)
        local = entries.new_zeros(rows.held * _width(rows))
        local[self._places(rows)] = entries
        return local.view(rows.held, _width(rows))

    def vector(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return matrix.reshape(-1)[self._places(self.rows or _all_rows(self.owner))]

    def _places(self, rows: Rows) -> Tensor:
        """Where the entries are in the matrix of these rows."""
        before = rows.first * rows.length
        first = before + -before % STRIDE
        place: Tensor = first + STRIDE * torch.arange(self.entries.shape[0], device=self.entries.device)
        return (place // rows.length - rows.first) * _width(rows) + place % rows.length // STRIDE


def sampled(owner: Tensor, ranks: Ranks) -> Sample:
    """The sample of a parameter."""
    x, rows, share = owner.detach(), None, 1 / ranks.size
    if type(owner) not in PLAIN and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import is_sharded, rows_of, shard_count

        if is_sharded(owner):
            rows, share = rows_of(owner), shard_count(owner, ranks) / ranks.size
            x = local_entries(x)
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    offset = 0 if rows is None else rows.first * rows.length
    count = owner.numel() * (2 if owner.is_complex() else 1)
    return Sample(sample(x.reshape(-1), offset), count, share, rows, owner)


def _width(rows: Rows) -> int:
    """The largest number of sampled entries in a row."""
    return -(-rows.length // STRIDE)


def _all_rows(owner: Tensor) -> Rows:
    total = owner.shape[0] if owner.dim() else 1
    return Rows(0, total, math.prod(owner.shape[1:]) * (2 if owner.is_complex() else 1), total)


def packed(owner: Tensor, start: Tensor, ranks: Ranks) -> Tensor:
    """A `start` as it goes into a checkpoint: the same matrix, whether the parameter is sharded or not."""
    found = sampled(owner, ranks)
    return start if found.rows is not None else found.matrix(start)


def unpacked(owner: Tensor, start: Tensor, ranks: Ranks) -> Tensor:
    """The inverse of `packed`."""
    found = sampled(owner, ranks)
    return start if found.rows is not None else found.vector(start)
