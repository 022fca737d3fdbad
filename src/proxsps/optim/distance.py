"""Where parameters started, from which the distance cap measures: a sample of their entries.

State of a parameter: `origin` holds the sampled entries of x_0 (`proxsps.core.sampling`). For a sharded parameter, and
in checkpoints, they are a padded matrix with one row for each row of the parameter, which can be sharded and resharded
like the parameter. The numbers rbar, G, k, the first estimate of the distance and the sum of squared factors are in the
groups.

Earlier versions sampled other entries, as `start`. That is dropped when it is loaded: the distance is then measured
from the loaded parameters, and rbar, which is a maximum over all steps, remains valid.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.sampling import WHOLE, block_bits, sample_size, sampled_at, sampled_blocks
from proxsps.optim.lists import is_sharded, join
from proxsps.optim.memory import local_entries
from proxsps.optim.reduce import Ranks

KEYS = ("reach", "g_sq", "k", "first_reach", "factors_sq")
TRAVEL = ("reach", "g_sq", "first_reach", "factors_sq")  # of each set, in the order of `plain.distances`
ORIGIN, EARLIER = "origin", "start"  # keys of the state
MEDIUM = 1 << 16  # entries up to which tensors are joined before they are sampled


class Places:
    """The indices of sampled entries, and factors on sums over them, as tensors.

    An optimizer keeps them: they take time to compute, tensors of one size share them, and a captured step reads them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def _constant(self, make: Callable[..., Tensor], *key: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return make(*key)
        if (make, key) in self._known:
            return self._known[make, key]
        made = make(*key)
        if type(made) is Tensor:  # not a fake one
            self._known[make, key] = made
        return made

    def _index(self, sizes: tuple[int, ...], low: int, high: int, device: torch.device) -> Tensor:
        return self._constant(sample_index, sizes, low, high, device)

    def factors(
        self, samples: Sequence[Sample], sets: Sequence[int], count: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """From squares over samples to sums over the tensors of each of `count` sets, as a matrix to multiply by."""
        return self._constant(set_factors, tuple([own.factor for own in samples]), tuple(sets), count, device, dtype)

    def sample(self, x: Tensor, n: int, low: int = 0) -> Tensor:
        """The sampled entries of a vector that is a part of a flat tensor of n entries, from entry `low` on."""
        return x.index_select(0, self._index((n,), low, low + len(x), x.device)) if block_bits(n) else x

    def samples(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The sampled entries of whole flat tensors; many tensors of medium size take three calls."""
        found, together = list(xs), defaultdict(list)
        for i, x in enumerate(xs):
            if type(x) is Tensor and WHOLE < len(x) <= MEDIUM:
                together[x.dtype, x.device].append(i)
            else:
                found[i] = self.sample(x, len(x))
        for (_, device), members in together.items():
            sizes = tuple([len(xs[i]) for i in members])
            vector = join([xs[i] for i in members]).index_select(0, self._index(sizes, 0, sum(sizes), device))
            for i, part in zip(members, vector.split(list(map(sample_size, sizes))), strict=True):
                found[i] = part
        return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # else every compiled step would contain it
def sample_index(sizes: tuple[int, ...], low: int, high: int, device: torch.device) -> Tensor:
    """Indices of the sampled entries of joined flat tensors, from entry `low` of the first to `high`, from `low` on."""
    parts, first = [], -low
    for n in sizes:
        blocks = sampled_blocks(n, low, high) if len(sizes) == 1 else sampled_blocks(n)
        parts.append(first + sampled_at(torch.arange(blocks.start, blocks.stop, device=device), block_bits(n)))
        first += n
    return torch.cat(parts).to(torch.int32 if high - low < 1 << 31 else torch.int64)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def set_factors(
    factors: tuple[float, ...], sets: tuple[int, ...], count: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A matrix with one row per tensor, which has its factor in the column of its set."""
    rows = [[factor * (i == own) for i in range(count)] for factor, own in zip(factors, sets, strict=True)]
    return torch.tensor(rows, dtype=dtype, device=device)


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
        if self.rows is not None and is_sharded(self.owner):
            from proxsps.optim.shards import sharded_like

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
    if is_sharded(owner):
        from proxsps.optim.shards import rows_of, shard_count

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
