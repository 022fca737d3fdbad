"""Total variation of signals, with its exact prox by dynamic programming in time proportional to the length.

For one signal z of length n and weight t, the prox minimises sum_i (x_i - z_i)^2 / 2 + t sum_i |x_{i+1} - x_i|.
Let f_i(x) be the least cost of the first i entries with x_i = x. Then

    f_1'(x) = x - z_1,    f_{i+1}'(x) = clip(f_i'(x), -t, t) + x - z_{i+1},

each f_i' is increasing and piecewise linear, and x_n is the root of f_n'. Let lo_i and hi_i be the points where f_i'
is -t and t; then x_i = clip(x_{i+1}, lo_i, hi_i). Clipping drops the knots outside [lo_i, hi_i] at both ends and adds
these two, so a double-ended queue of knots has at most 2n insertions in total, and no more removals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import array_api_compat
import numpy as np
import numpy.typing as npt

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._support import check_weight, compiled, sign, wide, widened
from proxsps.regularizers.base import Regularizer

Signals = npt.NDArray[np.float64]


def _denoise_rows(z: Signals, weights: Signals, x: Signals) -> None:
    # Only loops and scalars: numba compiles this function.
    rows, n = z.shape
    # Knots in order of position, from index `first` to `last`; across a knot the line slope * x + offset of f' changes.
    position: Any = np.empty(2 * n)
    slope_jump: Any = np.empty(2 * n)
    offset_jump: Any = np.empty(2 * n)
    lo, hi = np.empty(n), np.empty(n)
    for row in range(rows):
        t = float(weights[row])
        first, last = n, n - 1
        left = right = -float(z[row, 0])  # offsets of the outermost lines, whose slope is 1
        for i in range(n - 1):
            slope, offset = 1.0, left
            while first <= last and slope * position[first] + offset <= -t:
                slope += slope_jump[first]
                offset += offset_jump[first]
                first += 1
            lo[i] = (-t - offset) / slope
            first -= 1
            position[first], slope_jump[first], offset_jump[first] = lo[i], slope, offset + t

            slope, offset = 1.0, right
            while last > first and slope * position[last] + offset >= t:
                slope -= slope_jump[last]
                offset -= offset_jump[last]
                last -= 1
            hi[i] = (t - offset) / slope
            last += 1
            position[last], slope_jump[last], offset_jump[last] = hi[i], -slope, t - offset

            left, right = -t - float(z[row, i + 1]), t - float(z[row, i + 1])

        slope, offset = 1.0, left
        while first <= last and slope * position[first] + offset <= 0:
            slope += slope_jump[first]
            offset += offset_jump[first]
            first += 1
        x[row, n - 1] = -offset / slope
        for i in range(n - 2, -1, -1):
            x[row, i] = min(max(x[row, i + 1], lo[i]), hi[i])


@cache
def _kernel() -> Callable[[Signals, Signals, Signals], None]:
    return compiled(_denoise_rows) or _denoise_rows


def denoise_tv1d(z: Array, threshold: Array | float) -> Array:
    """Prox of threshold * total variation along the last dim, exact up to rounding; works on a copy in host memory."""
    t = float(threshold)
    if t == 0 or z.shape[-1] < 2 or 0 in z.shape:
        return z
    signals = _as_signals(z)
    # Offsets are sums of entries and weights: without the mean, and with no larger weight than counts, they stay small.
    # From max|cumsum(z - mean)| on, every weight gives the mean; twice that keeps clear of the border.
    mean = signals.mean(axis=1, keepdims=True)
    signals -= mean
    enough = 2 * np.max(np.abs(np.cumsum(signals, axis=1)), axis=1)
    out = np.empty_like(signals)
    _kernel()(signals, np.minimum(t, enough), out)
    return _like(out + mean, z)


def denoise_tv1d_jvp(y: Array, v: Array) -> Array:
    """Derivative of `denoise_tv1d` along v, where y is its result: the mean of v over each constant run of y."""
    if 0 in y.shape:
        return v
    signals, direction = _as_signals(y), _as_signals(v)
    starts = np.ones(signals.shape, dtype=bool)
    starts[:, 1:] = signals[:, 1:] != signals[:, :-1]
    run = np.cumsum(starts.ravel()) - 1
    means = np.bincount(run, weights=direction.ravel()) / np.bincount(run)
    return _like(means[run], v)


@dataclass(frozen=True)
class TotalVariation1D(Regularizer):
    """phi(x) = lam sum_i |x_{i+1} - x_i|; prox(z) is a piecewise constant signal near z.

    Acts per tensor, along its last dim: each leading index holds one signal. The prox runs on the host in double
    precision, by numba if it is installed, and cannot be traced.
    """

    lam: float
    traceable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_weight(self, lam=self.lam)

    def value(self, x: Array) -> Array:
        """Weighted sum of absolute jumps."""
        xp = array_namespace(x)
        x = wide(x)
        return self.lam * xp.sum(xp.abs(x[..., 1:] - x[..., :-1]))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Exact denoising of each signal with weight alpha lam."""
        return denoise_tv1d(z, alpha * self.lam)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The mean of v over each constant run of y; v itself without penalty."""
        return denoise_tv1d_jvp(y, v) if float(alpha) * self.lam > 0 else v

    def subgradient(self, x: Array) -> Array:
        """The vector lam D^T sign(D x), with D the difference of neighbours."""
        return self.lam * _jump_signs(x)

    def piece(self, ndim: int, dims: tuple[int, ...], cut: Callable[[Array], Array]) -> TotalVariation1D | None:
        """This regulariser where no signal is cut."""
        return None if ndim - 1 in dims else self

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor without dims."""
        if not shape:
            raise ValueError(
                "TotalVariation1D: needs a tensor of at least one dim, got a scalar of shape (); leave this tensor out."
            )


@widened
def _jump_signs(x: Array) -> Array:
    xp = array_namespace(x)
    signs = sign(x[..., 1:] - x[..., :-1])
    edge = xp.zeros_like(x[..., :1])
    return xp.concat([edge, signs], axis=-1) - xp.concat([signs, edge], axis=-1)


def _as_signals(x: Array) -> Signals:
    """A double-precision NumPy copy, one signal per row."""
    host: Any = wide(x)  # NumPy has no bfloat16
    if array_api_compat.is_torch_array(host):
        host = host.detach().cpu()
    return np.asarray(host).astype(np.float64).reshape(-1, x.shape[-1])


def _like(signals: Signals, x: Array) -> Array:
    """Signals as an array of the library, device, dtype and shape of x."""
    xp = array_namespace(x)
    return xp.reshape(xp.asarray(signals, dtype=x.dtype, device=array_api_compat.device(x)), x.shape)


__all__ = ["TotalVariation1D", "denoise_tv1d", "denoise_tv1d_jvp"]
