"""How far parameters are from the start of the run, from a sample of their entries.

The sampled entries (`proxsps.core.sampling`) are compared by the pass that computes the sums of a step, while they are
in the cache: a separate pass would read nearly all memory again, because cache lines have 16 entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from torch import Tensor

from proxsps.core.sampling import BLOCK_BITS, block_bits, position, sample_size
from proxsps.optim.kernels.caching import inlined
from proxsps.optim.kernels.layout import ENTRYWISE, REORDER, addresses, pointer


class Start(NamedTuple):
    """Where the sampled entries of x_0 lie, and the factor for a sum over those of one tensor."""

    at: np.ndarray  # rows: addresses, `block_bits` and `sample_size`; one column per tensor, no rows without a start
    scale: np.ndarray


NO_START = Start(np.empty((0, 0), np.int64), np.empty(0))

_position = inlined()(position)


@inlined()
def _at(block):
    """`sampled_at` with a constant number of bits."""
    return (block << BLOCK_BITS) + _position(block, BLOCK_BITS)


def start_of(params: Sequence[Tensor], samples: Sequence[Tensor], like: np.ndarray) -> Start | None:
    """The memory of a start, or None if the kernels do not apply.

    They need contiguous parameters, because a sample counts entries in the order of their indices.

    Args:
        params: the parameters.
        samples: the sampled entries of x_0 (`proxsps.core.sampling`) of each of them.
        like: an array of the type of the parameters.
    """
    bits, taken, scale = _samples(tuple([x.numel() for x in params]))
    found = addresses(samples)
    if found is None or found[0] is not like or tuple([start.numel() for start in samples]) != taken:
        return None
    if not all([t.is_contiguous() for t in (*params, *samples)]):
        return None
    return Start(np.array([found[1][0], bits, taken]), scale)


@lru_cache(maxsize=32)
def _samples(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], np.ndarray]:
    """`block_bits` and the number of sampled entries of each tensor, and the factor for a sum over them."""
    taken = tuple(map(sample_size, sizes))
    return tuple(map(block_bits, sizes)), taken, np.array(sizes, np.float64) / np.maximum(taken, 1)


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def _square(x, y, b, at, start):
    moved = np.float64((x[at] if y is None else x[at] + (y[at] - x[at]) / b) - start)
    return moved * moved


@inlined(fastmath=REORDER, error_model="numpy")
def _moved_whole(x, y, b, start):
    total = 0.0
    for k in range(len(x)):
        total += _square(x, y, b, k, start[k])
    return total


@inlined(fastmath=ENTRYWISE, error_model="numpy")
def _moved_at(x, y, b, places, start):
    """The sum over places: four sums that need not wait for each other; vector units gather more slowly."""
    one, two, three, four, n = 0.0, 0.0, 0.0, 0.0, len(start)
    for k in range(0, n - 3, 4):
        one += _square(x, y, b, np.uint64(places[k]), start[k])
        two += _square(x, y, b, np.uint64(places[k + 1]), start[k + 1])
        three += _square(x, y, b, np.uint64(places[k + 2]), start[k + 2])
        four += _square(x, y, b, np.uint64(places[k + 3]), start[k + 3])
    for k in range(n - n % 4, n):
        one += _square(x, y, b, np.uint64(places[k]), start[k])
    return (one + two) + (three + four)


@inlined()
def moved_sq(like, start_at, j, x, origin, places, y=None, b=None):
    """||x - x_0||^2 over the sampled entries among x, the first of which is entry `origin` of tensor j.

    In the schedule-free form x is z, and the average of y and z (`proxsps.core.schedule_free`) is compared. `places` is
    memory for one number per sampled entry.
    """
    bits, count, n = start_at[1, j], start_at[2, j], len(x)
    start = numba.carray(pointer(start_at[0, j], like), count)
    if bits == 0:
        return _moved_whole(x, y, b, start[origin : origin + n])
    first, last = origin >> BLOCK_BITS, min(count, ((origin + n - 1) >> BLOCK_BITS) + 1)
    if first < last and _at(first) < origin:  # as in `sampled_blocks`
        first += 1
    if first < last and _at(last - 1) >= origin + n:
        last -= 1
    for k in range(last - first):
        places[k] = np.uint32(_at(first + k) - origin)
    return _moved_at(x, y, b, places, start[first:last])
