"""How far parameters are from the start of the run, from a sample of their entries.

Every 17th entry of a tensor is compared (`proxsps.core.distance`) by the pass that computes the sums of a step, while
the entries are in the cache: a separate pass would read nearly all memory again, because cache lines have 16 entries.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numba
import numpy as np
from torch import Tensor

from proxsps.core.distance import STRIDE, sample_size
from proxsps.optim.kernels.layout import REORDER, contiguous_addresses


class Start(NamedTuple):
    """Where the sampled entries of x_0 lie, and the factor for a sum over those of one tensor."""

    at: np.ndarray
    scale: np.ndarray


NO_START = Start(np.empty(0, np.int64), np.empty(0))


def start_of(params: Sequence[Sequence[Tensor]], samples: Sequence[Sequence[Tensor]], like: np.ndarray) -> Start | None:
    """The memory of a start, or None if the kernels do not apply.

    They need contiguous parameters, because a sample counts entries in the order of their indices.

    Args:
        params: one list per block.
        samples: the sampled entries of x_0 (`proxsps.core.distance.sample`), in the same form.
        like: an array of the type of the parameters.
    """
    xs = list(itertools.chain(*params))
    taken, scale = _scales(tuple(map(Tensor.numel, xs)))
    found = contiguous_addresses(list(itertools.chain(*samples)))
    if found is None or found.like is not like or found.sizes != taken:
        return None
    if not all(map(Tensor.is_contiguous, xs)):
        return None
    return Start(found.at, scale)


@lru_cache(maxsize=32)
def _scales(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], np.ndarray]:
    """The number of sampled entries of each tensor, and the factor for a sum over them."""
    taken = tuple(map(sample_size, sizes))
    return taken, np.array(sizes, np.float64) / np.maximum(taken, 1)


@numba.njit(fastmath=REORDER)
def moved_sq(x, start, origin):
    """||x - x_0||^2 over the sampled entries among x, the first of which is entry `origin` of its tensor."""
    first, skipped = -(-origin // STRIDE), -origin % STRIDE
    count = max(0, (len(x) - skipped + STRIDE - 1) // STRIDE)
    sampled = start[first : first + count]
    total = 0.0
    for k in range(count):
        moved = np.float64(x[skipped + STRIDE * k] - sampled[k])
        total += moved * moved
    return total


@numba.njit
def sample_end(entries):
    """The number of sampled entries among the first entries of a tensor."""
    return (entries + STRIDE - 1) // STRIDE
