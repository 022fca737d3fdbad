"""What the distance cap measures: which blocks share one, and a sample of the entries from which parameters started.

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
from proxsps.optim.blocks import Block
from proxsps.optim.lists import is_sharded, join
from proxsps.optim.memory import local_entries
from proxsps.optim.reduce import Ranks

KEYS = ("reach", "g_sq", "k", "first_reach", "factors_sq")  # of the groups, in the order of a `Travel`
MEDIUM = 1 << 16  # entries up to which tensors are joined before they are sampled


class Sets(NamedTuple):
    """Blocks that share a distance cap: all blocks of an optimizer, or those whose groups name the same set."""

    members: list[list[int]]  # places of blocks
    groups: list[list[dict[str, Any]]]
    of: dict[int, int]  # the set of each parameter, by its id
    of_block: list[int]  # the set of each block


def by_set(blocks: Sequence[Block]) -> Sets:
    """The blocks by the set of their group; all are one set if groups name none."""
    names = list(dict.fromkeys([block.group.get("set") for block in blocks]))
    of_block = [names.index(block.group.get("set")) for block in blocks]
    members = [[j for j, own in enumerate(of_block) if own == i] for i in range(len(names))]
    groups = [list({id(blocks[j].group): blocks[j].group for j in own}.values()) for own in members]
    of = {id(p): i for i, own in enumerate(groups) for group in own for p in group["params"]}
    return Sets(members, groups, of, of_block)


Known = dict[tuple[Any, ...], Tensor]  # the constants of an optimizer


def constant(known: Known, make: Callable[..., Tensor], *key: Any) -> Tensor:
    """A tensor that takes time to compute, and that captured steps read: kept, unless it is a fake one."""
    if torch.compiler.is_compiling():
        return make(*key)
    if (make, key) in known:
        return known[make, key]
    made = make(*key)
    if type(made) is Tensor:
        known[make, key] = made
    return made


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
    """From squares over samples to sums over the tensors of each of `count` sets, as a matrix to multiply by."""
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
    rows: Rows  # that these entries are from
    owner: Tensor

    @property
    def factor(self) -> float:
        """From a sum over the sample to one over all entries, times the rank's share."""
        return self.share * self.size / max(1, sample_size(self.size))

    def keep(self) -> Tensor:
        """The entries as state: a vector, or for a sharded tensor a matrix that is sharded in the same way."""
        if is_sharded(self.owner):
            from proxsps.optim.shards import sharded_like

            return sharded_like(self.owner, self.matrix(self.entries), (self.rows.total, self._width))
        return self.entries.clone()

    def read(self, start: Tensor) -> Tensor:
        """The inverse of `keep`."""
        return self.vector(local_entries(start)) if is_sharded(self.owner) else start

    def matrix(self, entries: Tensor) -> Tensor:
        """Sampled entries with one row for each row of the tensor, padded with zeros."""
        local = entries.new_zeros(self.rows.held * self._width)
        local[self._slots()] = entries
        return local.view(self.rows.held, self._width)

    def vector(self, matrix: Tensor) -> Tensor:
        """The inverse of `matrix`."""
        return matrix.reshape(-1)[self._slots()]

    @property
    def _width(self) -> int:
        """The largest number of blocks that a row has entries of."""
        bits, length = block_bits(self.size), self.rows.length
        aligned = length % (1 << bits) == 0
        return length >> bits if aligned else ((length - 2) >> bits) + 2

    def _slots(self) -> Tensor:
        """Where the entries are in the matrix: the place of their block among those of their row."""
        first, held, length, _ = self.rows
        low, bits = first * length, block_bits(self.size)
        blocks = sampled_blocks(self.size, low, low + held * length)
        block = torch.arange(blocks.start, blocks.stop, device=self.entries.device)
        row = sampled_at(block, bits) // max(1, length)
        slots: Tensor = (row - first) * self._width + block - (row * length >> bits)
        return slots


def sampled(owners: Sequence[Tensor], ranks: Ranks, known: Known) -> list[Sample]:
    """The samples of parameters; many tensors of medium size take three calls."""
    found, together = [unsampled(owner, ranks) for owner in owners], defaultdict(list)
    for i, own in enumerate(found):
        x = own.entries
        if type(x) is Tensor and WHOLE < len(x) == own.size <= MEDIUM:
            together[x.dtype, x.device].append(i)
        else:
            found[i] = own._replace(entries=entries_at(x, (own.size,), own.rows.first * own.rows.length, known))
    for members in together.values():
        sizes = tuple([found[i].size for i in members])
        vector = entries_at(join([found[i].entries for i in members]), sizes, 0, known)
        for i, x in zip(members, vector.split(list(map(sample_size, sizes))), strict=True):
            found[i] = found[i]._replace(entries=x)
    return found


def entries_at(x: Tensor, sizes: tuple[int, ...], low: int, known: Known) -> Tensor:
    """The sampled entries of a vector, which holds the entries from `low` on of joined flat tensors of these sizes."""
    if not block_bits(sizes[0]):  # a small tensor, alone
        return x
    return x.index_select(0, constant(known, sample_index, sizes, low, low + len(x), x.device))


def unsampled(owner: Tensor, ranks: Ranks) -> Sample:
    """All entries of a parameter that this rank holds."""
    x, parts = owner.detach(), 2 if owner.is_complex() else 1
    if is_sharded(owner):
        from proxsps.optim.shards import rows_of, shard_count

        x, rows, share = local_entries(x), rows_of(owner), shard_count(owner, ranks) / ranks.size
    else:
        total = owner.shape[0] if owner.dim() else 1
        rows, share = Rows(0, total, parts * math.prod(owner.shape[1:]), total), 1 / ranks.size
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return Sample(x.reshape(-1), parts * owner.numel(), share, rows, owner)
