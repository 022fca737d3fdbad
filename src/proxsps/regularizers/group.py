"""Regularisers that set whole groups of entries to zero together: rows, columns, filters, tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._diagonal import Segments, threshold_norms, threshold_segments
from proxsps.regularizers._support import (
    check_weight,
    guarded,
    numbers_are_read,
    sign,
    where_or_zero,
    wide,
    widened,
)
from proxsps.regularizers.base import Regularizer
from proxsps.regularizers.separable import soft_threshold, soft_threshold_jvp
from proxsps.regularizers.structure import Rows, Scalar

# The dims of a tensor that are normed together; None stands for all of them.
Dims = tuple[int, ...] | None


def group_norms(x: Array, *, dims: Dims = None) -> Array:
    """Euclidean norm of each group; the dims that the norm is taken over stay, with length one."""
    xp = array_namespace(x)
    axis = tuple(range(x.ndim)) if dims is None else dims
    return xp.sqrt(xp.sum(x * x, axis=axis, keepdims=True))


@widened
def block_soft_threshold(z: Array, threshold: Array | float, *, dims: Dims = None) -> Array:
    """Prox of threshold * (sum of the groups' norms): max(1 - threshold / ||z_g||, 0) z_g for each group g."""
    norm = group_norms(z, dims=dims)
    alive = norm > threshold
    return where_or_zero(alive, 1 - threshold / guarded(alive, norm)) * z


@widened
def block_soft_threshold_jvp(z: Array, v: Array, threshold: Array | float, *, dims: Dims = None) -> Array:
    """Derivative of `block_soft_threshold` at z along v.

    With e = z_g / ||z_g|| and r = threshold / ||z_g||: (1 - r) v_g + r <e, v_g> e where r < 1, 0 elsewhere.
    """
    xp = array_namespace(z)
    norm = group_norms(z, dims=dims)
    alive = norm > threshold
    norm = guarded(alive, norm)
    ratio, unit = threshold / norm, z / norm
    axis = tuple(range(z.ndim)) if dims is None else dims
    along = xp.sum(unit * v, axis=axis, keepdims=True)
    return where_or_zero(alive, (1 - ratio) * v + ratio * along * unit)


@widened
def block_soft_threshold_diagonal(z: Array, thresholds: Array | float, *, dims: Dims = None) -> Array:
    """Prox of the sum of the groups' norms in a diagonal metric: argmin_y ||y_g|| + sum_i (y_i - z_i)^2 / (2 t_i).

    Args:
        z: the point.
        thresholds: t_i >= 0, in any shape that broadcasts to that of z.
        dims: the dims that the norm of a group is taken over.
    """
    if 0 in z.shape:
        return z
    thresholds = thresholds + array_namespace(z).zeros_like(z)
    axis = tuple(range(z.ndim)) if dims is None else tuple(d % z.ndim for d in dims)
    if numbers_are_read() and (y := _threshold_rows(z, thresholds, axis)) is not None:
        return y
    return threshold_norms(z, thresholds, _Axes(axis))


class _Axes(NamedTuple):
    """Groups of entries along some dims of an array."""

    axis: tuple[int, ...]

    def total(self, x: Array) -> Array:
        return array_namespace(x).sum(x, axis=self.axis, keepdims=True)

    def largest(self, x: Array) -> Array:
        return array_namespace(x).max(x, axis=self.axis, keepdims=True)

    def spread(self, numbers: Array) -> Array:
        return numbers


def _threshold_rows(z: Array, thresholds: Array, axis: tuple[int, ...]) -> Array | None:
    """The same by compiled loops over the groups; None without numba."""
    xp = array_namespace(z)
    order = (*[dim for dim in range(z.ndim) if dim not in axis], *axis)
    length = math.prod(z.shape[dim] for dim in axis)
    ordered = [xp.permute_dims(array, order) for array in (z, thresholds)]
    starts = np.arange(0, math.prod(z.shape) + 1, length)
    point, sizes = (xp.reshape(array, (-1,)) for array in ordered)
    y = threshold_segments(point, sizes, Segments(starts))
    if y is None:
        return None
    return xp.permute_dims(xp.reshape(y, ordered[0].shape), tuple(sorted(range(z.ndim), key=order.__getitem__)))


@dataclass(frozen=True)
class GroupLasso(Regularizer):
    """phi(x) = lam sum_g w_g ||x_g||; prox(z)_g = max(1 - alpha lam w_g / ||z_g||, 0) z_g. Acts per tensor.

    Args:
        lam: weight.
        dims: the dims that the norm of a group is taken over; there is one group per index of the other dims. (1,)
            makes each row of a matrix a group, (0,) each column; None makes the entire tensor one group.
        scale_by_size: w_g = sqrt(number of entries of the group) instead of 1.
    """

    lam: float
    dims: Dims = None
    scale_by_size: bool = False
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_weight(self, lam=self.lam)
        object.__setattr__(self, "dims", _as_dims(self, self.dims))

    @classmethod
    def rows(cls, lam: float, *, scale_by_size: bool = False) -> Self:
        """Each row of a matrix is a group (in torch's linear layers: the weights into one output)."""
        return cls(lam, (1,), scale_by_size)

    @classmethod
    def columns(cls, lam: float, *, scale_by_size: bool = False) -> Self:
        """Each column of a matrix is a group (in torch's linear layers: the weights out of one input)."""
        return cls(lam, (0,), scale_by_size)

    @classmethod
    def filters(cls, lam: float, *, scale_by_size: bool = False) -> Self:
        """Each output filter of a two-dimensional convolution, a tensor of four dims, is a group."""
        return cls(lam, (1, 2, 3), scale_by_size)

    def value(self, x: Array) -> Array:
        """Weighted sum of the groups' norms."""
        return self._weight(x) * array_namespace(x).sum(group_norms(wide(x), dims=self.dims))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Block soft thresholding at alpha lam w_g."""
        return block_soft_threshold(z, alpha * self._weight(z), dims=self.dims)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """A group is 0 or z_i r / (r + alpha_i lam w_g), where r is its own norm, found by Newton's method."""
        return block_soft_threshold_diagonal(z, alpha * self._weight(z), dims=self.dims)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """Derivative of block soft thresholding."""
        return block_soft_threshold_jvp(z, v, alpha * self._weight(z), dims=self.dims)

    def structure(self, shape: tuple[int, ...]) -> Rows:
        """lam w_g times the norm of each group."""
        return Rows(Scalar(l1=self.lam * (_root_size(shape, self.dims) if self.scale_by_size else 1.0)), self.dims)

    def subgradient(self, x: Array) -> Array:
        """Entries lam w_g x_g / ||x_g||, and 0 for groups that are 0."""
        return self._weight(x) * _directions(x, dims=self.dims)

    def piece(self, ndim: int, dims: tuple[int, ...], cut: Callable[[Array], Array]) -> Self | None:
        """This regulariser where no group is cut."""
        return self if _leaves_whole(self.dims, ndim, dims) else None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor that lacks one of the dims."""
        _check_dims(self, self.dims, shape)

    def _weight(self, x: Array) -> float:
        return self.lam * (_root_size(x.shape, self.dims) if self.scale_by_size else 1.0)


@dataclass(frozen=True)
class SparseGroupLasso(Regularizer):
    """phi(x) = l1 ||x||_1 + lam sum_g w_g ||x_g||. Acts per tensor.

    Its prox is the prox of `L1` followed by that of `GroupLasso`: with s = sign(z) max(|z| - alpha l1, 0),
    prox(z)_g = max(1 - alpha lam w_g / ||s_g||, 0) s_g.

    Args:
        l1: weight of single entries.
        lam: weight of groups.
        dims: the dims that the norm of a group is taken over, as in `GroupLasso`.
        scale_by_size: w_g = sqrt(number of entries of the group) instead of 1.
    """

    l1: float
    lam: float
    dims: Dims = None
    scale_by_size: bool = False
    batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_weight(self, l1=self.l1, lam=self.lam)
        object.__setattr__(self, "dims", _as_dims(self, self.dims))

    def value(self, x: Array) -> Array:
        """l1 ||x||_1 plus lam times the weighted sum of the groups' norms."""
        xp = array_namespace(x)
        x = wide(x)
        return self.l1 * xp.sum(xp.abs(x)) + self._weight(x) * xp.sum(group_norms(x, dims=self.dims))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding, then block soft thresholding."""
        return block_soft_threshold(soft_threshold(z, alpha * self.l1), alpha * self._weight(z), dims=self.dims)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding at alpha_i l1, then the prox of `GroupLasso`, as in `prox`."""
        inner = soft_threshold(z, alpha * self.l1)
        return block_soft_threshold_diagonal(inner, alpha * self._weight(z), dims=self.dims)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """Chain rule through the two thresholds."""
        inner, inner_v = soft_threshold(z, alpha * self.l1), soft_threshold_jvp(z, v, alpha * self.l1)
        return block_soft_threshold_jvp(inner, inner_v, alpha * self._weight(z), dims=self.dims)

    def subgradient(self, x: Array) -> Array:
        """l1 sign(x) + lam w_g x_g / ||x_g||, the second term 0 for groups that are 0."""
        return self.l1 * sign(x) + self._weight(x) * _directions(x, dims=self.dims)

    def piece(self, ndim: int, dims: tuple[int, ...], cut: Callable[[Array], Array]) -> Self | None:
        """This regulariser where no group is cut."""
        return self if _leaves_whole(self.dims, ndim, dims) else None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor that lacks one of the dims."""
        _check_dims(self, self.dims, shape)

    def _weight(self, x: Array) -> float:
        return self.lam * (_root_size(x.shape, self.dims) if self.scale_by_size else 1.0)


@widened
def _directions(x: Array, *, dims: Dims) -> Array:
    norm = group_norms(x, dims=dims)
    return where_or_zero(norm > 0, x / guarded(norm > 0, norm))


def _root_size(shape: tuple[int, ...], dims: Dims) -> float:
    return math.sqrt(math.prod(shape if dims is None else [shape[d] for d in dims]))


def _leaves_whole(dims: Dims, ndim: int, cut: tuple[int, ...]) -> bool:
    """Whether no group of a tensor of `ndim` dims is divided where the tensor is cut along the dims `cut`."""
    return not (set(range(ndim)) if dims is None else {d % ndim for d in dims}) & set(cut)


def _as_dims(owner: Regularizer, dims: Dims) -> Dims:
    if dims is None:
        return None
    out = (dims,) if isinstance(dims, int) else tuple(dims)
    if not out or not all(isinstance(d, int) for d in out) or len(set(out)) < len(out):
        raise ValueError(
            f"{type(owner).__name__}: dims must be distinct integers, at least one, got {dims!r}; "
            "use dims=None for one norm of the entire tensor, or L1 for each entry by itself."
        )
    return out


def _check_dims(owner: Regularizer, dims: Dims, shape: tuple[int, ...]) -> None:
    if dims is None:
        return
    ndim = len(shape)
    if any(not -ndim <= d < ndim for d in dims) or len({d % ndim for d in dims}) < len(dims):
        raise ValueError(
            f"{type(owner).__name__}: dims={dims} do not name distinct dims of a tensor of shape {tuple(shape)}; "
            "put this tensor into another parameter group, or use dims=None for one norm of the entire tensor."
        )


__all__ = [
    "GroupLasso",
    "SparseGroupLasso",
    "block_soft_threshold",
    "block_soft_threshold_diagonal",
    "block_soft_threshold_jvp",
    "group_norms",
]
