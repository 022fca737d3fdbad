"""The prox of a sum of norms in a diagonal metric, row by row in compiled code (extra `fast`), for arrays on the host.

`proxsps.regularizers.group.block_soft_threshold_diagonal` has the formula; there each Newton step is several operations
on whole arrays, here a row stays in the cache until it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._support import compiled

ROUNDS = 100  # at most; some five are usual
Matrix = npt.NDArray[Any]
Kernel = Callable[[Matrix, Matrix, Matrix], None]


def _threshold_rows(z: Any, t: Any, out: Any) -> None:
    # Only loops and scalars: numba compiles this function. Sums are in double precision.
    of = z.dtype.type
    tiny, rounding, one = np.finfo(z.dtype).tiny, 4 * np.finfo(z.dtype).eps, of(1)
    rows, n = z.shape
    for row in range(rows):
        start, square, free = float(tiny), 0.0, False
        for i in range(n):
            size, threshold = abs(z[row, i]), t[row, i]
            start = max(start, size - threshold)
            if threshold > 0:
                quotient = min(size / threshold, of(2))
                square += quotient * quotient
            else:
                free = free or size > 0
        if square <= 1 and not free:
            out[row] = 0
            continue
        r = start
        for _ in range(ROUNDS):
            norm_sq, slope, radius = 0.0, 0.0, of(r)
            for i in range(n):
                inverse = one / (radius + t[row, i])
                quotient = z[row, i] * inverse
                norm_sq += quotient * quotient
                slope += quotient * quotient * inverse
            before, r = r, max(start, r + (np.sqrt(norm_sq) - 1) * norm_sq / slope)
            if not abs(r - before) > rounding * r:
                break
        radius = of(r)
        for i in range(n):
            out[row, i] = z[row, i] if t[row, i] <= 0 else z[row, i] * (radius / (radius + t[row, i]))


@cache
def _kernel() -> Kernel | None:
    return compiled(_threshold_rows, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


def threshold_rows(z: Array, thresholds: Array, axis: tuple[int, ...]) -> Array | None:
    """The prox, for arrays in memory that NumPy can read; None without numba.

    Args:
        z: the point, f32 or f64.
        thresholds: t_i >= 0, of the shape and dtype of z.
        axis: the dims that are normed together, as numbers from 0 on.
    """
    kernel, xp = _kernel(), array_namespace(z)
    if kernel is None:
        return None
    order = (*[dim for dim in range(z.ndim) if dim not in axis], *axis)
    length = int(np.prod([z.shape[dim] for dim in axis]))
    ordered = [xp.permute_dims(array, order) for array in (z, thresholds)]
    point, sizes = (np.ascontiguousarray(_on_host(array)).reshape(-1, length) for array in ordered)
    out = np.empty_like(point)
    kernel(point, sizes, out)
    y = xp.reshape(xp.asarray(out), ordered[0].shape)
    return xp.permute_dims(y, tuple(sorted(range(z.ndim), key=order.__getitem__)))


def _on_host(array: Array) -> Matrix:
    return np.asarray(array.detach() if array_api_compat.is_torch_array(array) else array)
