"""The prox of a sum of norms in a diagonal metric: argmin_y sum_g ||y_g|| + sum_i (y_i - z_i)^2 / (2 t_i).

A group is 0 where ||z_g / t_g|| <= 1. Elsewhere y_i = z_i r / (r + t_i), with r = ||y_g|| the root of

    1 / ||z_g / (r + t_g)|| = 1.

The left side is concave and increasing in r, so that Newton's method from a point below the root climbs to it without
passing it. No entry of the quotient exceeds 1 at the root, which gives the start max_i |z_i| - t_i. An entry with
t_i = 0 keeps its value, and its group with it.

The formula stands here twice: as operations on whole arrays of any library, and as loops, compiled by numba,
in which a group stays in the cache until it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import array_api_compat
import numpy as np
import numpy.typing as npt

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._support import clip, compiled, guarded, repeat, where_or_zero

# Newton steps. Step sizes over six orders of magnitude take eight to reach the last digit of a double, over thirty
# orders twenty.
ROUNDS = 24
MOST_ROUNDS = 100  # of the loops, which end when they have converged; some five are usual

Vector = npt.NDArray[Any]
Kernel = Callable[[Vector, Vector, Vector, Vector], None]


class Groups(Protocol):
    """How entries form groups."""

    def total(self, x: Array) -> Array:
        """The sum of each group."""

    def largest(self, x: Array) -> Array:
        """The largest entry of each group."""

    def spread(self, numbers: Array) -> Array:
        """One number per group, in a shape that broadcasts to that of the entries."""


class Segments(NamedTuple):
    """Groups as stretches of a vector."""

    starts: npt.NDArray[np.int64]  # the first entry of each, and the end of the last
    order: npt.NDArray[np.int64] | None = None  # where the entries of the stretches are; None for all, in order


def threshold_norms(z: Array, t: Array, groups: Groups) -> Array:
    """The prox by operations on whole arrays; t has the shape and dtype of z."""
    xp = array_namespace(z)
    free = t <= 0
    # Beyond 1 the size of a quotient does not matter, and its square could overflow.
    quotient = clip(z / guarded(~free, t), -2.0, 2.0)
    kept = xp.astype(free & (z != 0), z.dtype)
    alive = (groups.total(quotient * quotient) > 1) | (groups.total(kept) > 0)
    # From here on no quotient z / (r + t) exceeds 1, and no width is 0.
    tiny = float(xp.finfo(z.dtype).smallest_normal)
    start = groups.largest(xp.abs(z) - t)
    start = xp.where(start > tiny, start, xp.full_like(start, tiny))

    def climb(r: Array) -> Array:
        width = groups.spread(r) + t
        square = (z / width) ** 2
        norm_sq, slope = groups.total(square), groups.total(square / width)
        newton = r + (xp.sqrt(norm_sq) - 1) * norm_sq / guarded(slope > 0, slope)
        return xp.where(newton > start, newton, start)

    r = groups.spread(repeat(ROUNDS, climb, start))
    factor = xp.where(free, xp.ones_like(z), r / (r + t))
    return where_or_zero(groups.spread(xp.astype(alive, z.dtype)) > 0, factor) * z


def _threshold_segments(z: Any, t: Any, starts: Any, out: Any) -> None:
    # Only loops and scalars: numba compiles this function. Sums are in double precision.
    of = z.dtype.type
    tiny, rounding, one = np.finfo(z.dtype).tiny, 4 * np.finfo(z.dtype).eps, of(1)
    for group in range(len(starts) - 1):
        first, last = starts[group], starts[group + 1]
        start, square, free = float(tiny), 0.0, False
        for i in range(first, last):
            size, threshold = abs(z[i]), t[i]
            start = max(start, size - threshold)
            if threshold > 0:
                quotient = min(size / threshold, of(2))
                square += quotient * quotient
            else:
                free = free or size > 0
        if square <= 1 and not free:
            out[first:last] = 0
            continue
        r = start
        for _ in range(MOST_ROUNDS):
            norm_sq, slope, radius = 0.0, 0.0, of(r)
            for i in range(first, last):
                inverse = one / (radius + t[i])
                quotient = z[i] * inverse
                norm_sq += quotient * quotient
                slope += quotient * quotient * inverse
            before, r = r, max(start, r + (np.sqrt(norm_sq) - 1) * norm_sq / slope)
            if not abs(r - before) > rounding * r:
                break
        radius = of(r)
        for i in range(first, last):
            out[i] = z[i] if t[i] <= 0 else z[i] * (radius / (radius + t[i]))


@cache
def _kernel() -> Kernel | None:
    return compiled(_threshold_segments, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


def threshold_segments(z: Array, t: Array, segments: Segments) -> Array | None:
    """The prox by compiled loops, for vectors in memory that NumPy can read; None without numba.

    Args:
        z: the point, f32 or f64; entries outside of the segments stay.
        t: t_i >= 0, of the shape and dtype of z.
        segments: the groups.
    """
    kernel, order = _kernel(), segments.order
    if kernel is None:
        return None
    point, sizes = (np.ascontiguousarray(_on_host(array)) for array in (z, t))
    if order is None:
        out = np.empty_like(point)
        kernel(point, sizes, segments.starts, out)
    else:
        found, out = np.empty(len(order), point.dtype), point.copy()
        kernel(point[order], sizes[order], segments.starts, found)
        out[order] = found
    return array_namespace(z).asarray(out)


def _on_host(array: Array) -> Vector:
    return np.asarray(array.detach() if array_api_compat.is_torch_array(array) else array)
