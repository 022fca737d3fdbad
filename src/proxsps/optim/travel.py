"""The distance cap of a step: the distance of the parameters from the start, from a sample of their entries.

State of a parameter: `origin` holds the sampled entries of x_0 (`proxsps.core.sampling`). For a sharded parameter, and
in checkpoints, they are a padded matrix with one row for each row of the parameter, which can be sharded and resharded
like the parameter. The numbers rbar, G, k, the first estimate of the distance and the sum of
squared factors are in the groups.

Earlier versions sampled other entries, as `start`. That is dropped when it is loaded: the distance is then measured
from the loaded parameters, and rbar, which is a maximum over all steps, remains valid.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.distance import Travel, advance_travel, distance_cap, start_reach
from proxsps.core.sampling import block_bits, sample_size, sampled_at, sampled_blocks
from proxsps.optim.blocks import PLAIN, Block
from proxsps.optim.memory import State, local_entries
from proxsps.optim.numbers import Host, Numbers
from proxsps.optim.parts import Part
from proxsps.optim.passes import Places, widened
from proxsps.optim.reduce import Ranks

KEYS = ("reach", "g_sq", "k", "first_reach", "factors_sq")
ORIGIN, EARLIER = "origin", "start"  # keys of the state


class Distance:
    """The distance of the run from its start, and the cap that follows from it.

    Args:
        groups: the parameter groups.
        state: the optimizer's state.
        numbers: the numbers of the step.
        ranks: the ranks that step together.
        places: the indices of sampled entries.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], state: State, numbers: Numbers, ranks: Ranks, places: Places
    ) -> None:
        self._groups, self._state, self._numbers = groups, state, numbers
        self._before = Travel(*(numbers.scalar(groups[0][key]) for key in KEYS))
        # Whether this is the first step, if that is known without waiting for a device.
        self._first = not isinstance(numbers, Host) or bool(self._before.taken == 0)
        self._ranks, self._places = ranks, places
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
            starts: list[Any] = [own.get(ORIGIN) for own in owns]
            if not block.sharded and all([type(start) is Tensor for start in starts]):
                block.starts, block.places = starts, self._places

    def _owners(self) -> Iterator[Tensor]:
        """All parameters that have a gradient, or had one before."""
        for group in self._groups:
            for param in group["params"]:
                if param.grad is not None or ORIGIN in self._state.get(param, ()):
                    yield param

    def _take(self, owners: Sequence[Tensor]) -> None:
        for found in sampled(owners, self._ranks, self._places):
            own = self._state.get(found.owner, {})
            if ORIGIN not in own or (self._first and isinstance(self._numbers, Host)):
                self._fresh.append((found.owner, found.keep()))
                start = found.entries.clone()
            else:
                start = found.read(own[ORIGIN])
            self._samples.append(widened(found.entries))
            self._starts.append(widened(start))
            self._factors.append(found.factor)

    def start(self) -> None:
        """Create the state of all parameters with a gradient, if there is none."""
        self._take(list(self._owners()))
        self._keep()

    def _keep(self) -> None:
        for owner, start in self._fresh:
            self._state[owner][ORIGIN] = start

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
            self._take([owner for owner in self._owners() if id(owner) not in measured])
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
    """The sampled entries that this rank holds of a parameter, and where they are in its `origin`."""

    entries: Tensor
    size: int  # entries of the whole parameter
    share: float  # one over the number of ranks that hold the same entries
    rows: Rows | None  # the rows that these entries are from; None for all of a tensor
    owner: Tensor

    @property
    def factor(self) -> float:
        """From a sum over the sample to one over all entries, times the rank's share."""
        return self.share * self.size / max(1, sample_size(self.size))

    def keep(self) -> Tensor:
        """The entries as state: a vector, or for a sharded tensor a matrix that is sharded in the same way."""
        if self.rows is not None:
            from proxsps.optim.shards import is_sharded, sharded_like

            if is_sharded(self.owner):
                return sharded_like(self.owner, self.matrix(self.entries), (self.rows.total, self._width(self.rows)))
        return self.entries.clone()

    def read(self, start: Tensor) -> Tensor:
        """The inverse of `keep`."""
        return start if self.rows is None else self.vector(local_entries(start))

    def matrix(self, entries: Tensor) -> Tensor:
        """Sampled entries with one row for each row of the tensor, padded with zeros."""
        rows = self.rows or _all_rows(self.owner)
        width = self._width(rows)
        local = entries.new_zeros(rows.held * width)
        local[self._slots(rows)] = entries
        return local.view(rows.held, width)

    def vector(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return matrix.reshape(-1)[self._slots(self.rows or _all_rows(self.owner))]

    def _width(self, rows: Rows) -> int:
        """The largest number of blocks that a row has entries of."""
        bits, length = block_bits(self.size), rows.length
        aligned = length % (1 << bits) == 0
        return length >> bits if aligned else ((length - 2) >> bits) + 2

    def _slots(self, rows: Rows) -> Tensor:
        """Where the entries are in the matrix of these rows: the place of their block among those of their row."""
        low, bits = rows.first * rows.length, block_bits(self.size)
        blocks = sampled_blocks(self.size, low, low + rows.held * rows.length)
        block = torch.arange(blocks.start, blocks.stop, device=self.entries.device)
        row = sampled_at(block, bits) // max(1, rows.length)
        slots: Tensor = (row - rows.first) * self._width(rows) + block - (row * rows.length >> bits)
        return slots


def sampled(owners: Sequence[Tensor], ranks: Ranks, places: Places) -> list[Sample]:
    """The samples of parameters."""
    found = [_unsampled(owner, ranks) for owner in owners]
    whole = iter(places.samples([own.entries for own in found if own.rows is None]))
    out = []
    for own in found:
        if own.rows is None:
            out.append(own._replace(entries=next(whole)))
        else:
            low = own.rows.first * own.rows.length
            out.append(own._replace(entries=places.sample(own.entries, own.size, low)))
    return out


def _unsampled(owner: Tensor, ranks: Ranks) -> Sample:
    """All entries of a parameter that this rank holds."""
    x, rows, share = owner.detach(), None, 1 / ranks.size
    if type(owner) not in PLAIN and "torch.distributed.tensor" in sys.modules:
        from proxsps.optim.shards import is_sharded, rows_of, shard_count

        if is_sharded(owner):
            rows, share = rows_of(owner), shard_count(owner, ranks) / ranks.size
            x = local_entries(x)
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return Sample(x.reshape(-1), owner.numel() * (2 if owner.is_complex() else 1), share, rows, owner)


def _all_rows(owner: Tensor) -> Rows:
    total = owner.shape[0] if owner.dim() else 1
    return Rows(0, total, math.prod(owner.shape[1:]) * (2 if owner.is_complex() else 1), total)


def packed(owner: Tensor, origin: Tensor, ranks: Ranks) -> Tensor:
    """An `origin` as it goes into a checkpoint: the same matrix, whether the parameter is sharded or not."""
    found = _unsampled(owner, ranks)
    return origin if found.rows is not None else found.matrix(origin)


def unpacked(owner: Tensor, origin: Tensor, ranks: Ranks) -> Tensor:
    """The inverse of `packed`."""
    found = _unsampled(owner, ranks)
    return origin if found.rows is not None else found.vector(origin)
