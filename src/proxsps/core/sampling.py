"""Which entries of a tensor the distance cap compares with their start.

A tensor of up to 4,096 entries is measured whole. A longer one is cut into blocks of 16 consecutive entries, and one
entry per block is taken. Its place in the block is a hash of the number of the block: with a fixed stride, or a shift
from row to row, there are rows, columns or channels of which the sample sees all or nothing, and a run whose sampled
entries rest would stall. A squared distance over n entries is estimated as n/p times that over the p sampled entries,
tensor by tensor.

The sample depends on the number of entries of the whole tensor only, so that all ranks, and a run that is resumed on
another number of ranks, take the same entries. An incomplete block at the end (fewer than 16 entries) is left out. A
complex entry counts as two real ones, its real and its imaginary part.
"""

from __future__ import annotations

from typing import Any

from proxsps.core.array import Array, array_namespace

WHOLE = 1 << 12  # the most entries of a tensor that is measured whole
BLOCK_BITS = 4  # blocks of 16
HASH_BITS = 31  # so that all constants are in the range of int32
MASK, FACTOR = (1 << HASH_BITS) - 1, 0x45D9F3B


def block_bits(n: int) -> int:
    """The base-2 logarithm of the length of a block in a tensor of n entries; 0 if every entry is taken."""
    return BLOCK_BITS if n > WHOLE else 0


def sample_size(n: int) -> int:
    """How many of n entries are taken."""
    return n >> block_bits(n)


def position(block: Any, bits: int) -> Any:
    """The place of the sampled entry in each block, below 2^bits.

    Args:
        block: the number of the block; a Python integer, or an array of any library, of uint32 or int64.
        bits: `block_bits` of the tensor.
    """
    # No product exceeds 64 bits, and uint32 loses only bits that the mask drops.
    mixed = (block ^ (block >> 16)) * FACTOR & MASK
    return ((mixed ^ (mixed >> 16)) * FACTOR & MASK) >> (HASH_BITS - bits)


def sampled_at(block: Any, bits: int) -> Any:
    """The index of the sampled entry of each block in the flat tensor; not for uint32, which may overflow."""
    return (block << bits) + position(block, bits)


def sampled_blocks(n: int, low: int = 0, high: int | None = None) -> range:
    """The blocks whose sampled entry is one of the entries from `low` to `high` of a flat tensor of n entries."""
    bits, high = block_bits(n), n if high is None else high
    first, last = low >> bits, min(sample_size(n), ((high - 1) >> bits) + 1)
    first += first < last and sampled_at(first, bits) < low
    last -= first < last and sampled_at(last - 1, bits) >= high
    return range(first, last)


def sampled_square(sampled: Array, n: int, start: Array | None = None) -> Array:
    """Estimate of ||x - x_0||^2 over the n entries of a tensor, or of ||x||^2 without a start; 0-d.

    Args:
        sampled: the sampled entries of x.
        n: the number of entries of the tensor; of the whole tensor if the samples of all pieces are joined.
        start: the sampled entries of x_0.
    """
    moved = sampled if start is None else sampled - start
    xp = array_namespace(moved)
    return xp.sum(moved * moved) * (n / max(1, moved.shape[0]))
