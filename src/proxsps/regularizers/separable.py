"""Regularisers that act on each entry separately: none, squared l2, l1, elastic net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._identity import describe
from proxsps.regularizers._support import check_center, check_weight, clip, shape_of, sign, where_or_zero, wide, widened
from proxsps.regularizers.base import Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Scalar


@widened
def shrink(z: Array, weight: Array | float) -> Array:
    """Prox of weight/2 ||y||^2: z / (1 + weight)."""
    return z / (1 + weight)


@widened
def shrink_towards(z: Array, center: Array | float, weight: Array | float) -> Array:
    """Prox of weight/2 ||y - center||^2: (z + weight center) / (1 + weight)."""
    return (z + weight * center) / (1 + weight)


@widened
def soft_threshold(z: Array, threshold: Array | float) -> Array:
    """Prox of threshold ||y||_1: sign(z) max(|z| - threshold, 0), entry by entry."""
    # z minus its projection onto [-t, t]: z - z is an exact zero, and NaN stays NaN.
    return z - clip(z, -threshold, threshold)


@widened
def soft_threshold_jvp(z: Array, v: Array, threshold: Array | float) -> Array:
    """Derivative of `soft_threshold` at z along v: v where |z| > threshold, 0 elsewhere."""
    return where_or_zero(array_namespace(z).abs(z) > threshold, v)


@dataclass(frozen=True)
class Zero(Regularizer):
    """phi(x) = 0; prox(z) = z, the same array. Acts per entry."""

    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def value(self, x: Array) -> Array:
        """0."""
        xp = array_namespace(x)
        return xp.zeros_like(xp.sum(wide(x)))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """The argument itself."""
        return z

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """The argument itself."""
        return z

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The direction itself."""
        return v

    def structure(self, shape: tuple[int, ...]) -> Quadratic:
        """A square with weight 0."""
        return Quadratic()

    def subgradient(self, x: Array) -> Array:
        """Zeros."""
        return array_namespace(x).zeros_like(x)


@dataclass(frozen=True)
class L2(Regularizer):
    """phi(x) = lam/2 ||x - center||^2; prox(z) = (z + alpha lam center) / (1 + alpha lam). Acts per entry.

    Args:
        lam: weight, the weight decay of the step.
        center: None for the origin; a number for all entries; an array of the tensor's shape; or a sequence of them,
            one for each tensor of the parameter group in order; `at(i)` picks the i-th.
    """

    lam: float
    center: Array | float | None = None
    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_weight(self, lam=self.lam)
        check_center(self, self.center)

    def __repr__(self) -> str:
        # As in checkpoints written before centres existed.
        return f"L2(lam={describe(self.lam)})" if self.center is None else super().__repr__()

    @property
    def strong_convexity(self) -> float:
        """The weight lam."""
        return float(self.lam)

    def value(self, x: Array) -> Array:
        """lam/2 ||x - center||^2."""
        xp = array_namespace(x)
        offset = self._offset(x)
        return 0.5 * self.lam * xp.sum(offset * offset)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """(z + alpha lam center) / (1 + alpha lam)."""
        return self._shrink(z, alpha * self.lam)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """(z_i + alpha_i lam center_i) / (1 + alpha_i lam)."""
        return self._shrink(z, alpha * self.lam)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The direction over 1 + alpha lam."""
        return shrink(v, alpha * self.lam)

    def structure(self, shape: tuple[int, ...]) -> Quadratic:
        """The square itself."""
        return Quadratic(self.lam, self._center())

    def subgradient(self, x: Array) -> Array:
        """The gradient lam (x - center)."""
        return array_namespace(x).astype(self.lam * self._offset(x), x.dtype, copy=False)

    def at(self, index: int) -> L2:
        """This regulariser with the index-th centre, if there is one for each tensor."""
        if not isinstance(self.center, (list, tuple)):
            return self
        if not 0 <= index < len(self.center):
            raise ValueError(
                f"L2: center holds {len(self.center)} arrays, but the group has a tensor number {index}; "
                "give one centre for each tensor of the group, in the order of the parameters."
            )
        return L2(self.lam, self.center[index])

    def piece(self, ndim: int, dims: tuple[int, ...], cut: Callable[[Array], Array]) -> L2:
        """This regulariser with the same piece of its centre."""
        center = self._center()
        return L2(self.lam, cut(center)) if shape_of(center) else self

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor whose shape is not that of the centre."""
        own = shape_of(self.center)
        if own and own != tuple(shape):
            raise ValueError(
                f"L2: center has shape {own}, the tensor {tuple(shape)}; "
                "give a centre of the tensor's shape, or a list with one centre for each tensor of the group."
            )

    def _shrink(self, z: Array, weight: Array | float) -> Array:
        center = self._center()
        return shrink(z, weight) if center is None else shrink_towards(z, center, weight)

    def _center(self) -> Array | float | None:
        if isinstance(self.center, (list, tuple)):
            raise ValueError(
                f"L2: center holds {len(self.center)} arrays and belongs to a group of tensors, got one tensor; "
                "use at(i) for the i-th tensor, or prox_all and value_all for the group."
            )
        return self.center

    def _offset(self, x: Array) -> Array:
        center = self._center()
        x = wide(x)
        if center is None:
            return x
        if isinstance(center, Real):
            return x - float(center)
        return x - array_namespace(x).astype(center, x.dtype, copy=False)


@dataclass(frozen=True)
class L1(Regularizer):
    """phi(x) = lam ||x||_1; prox(z) = sign(z) max(|z| - alpha lam, 0). Acts per entry."""

    lam: float
    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_weight(self, lam=self.lam)

    def value(self, x: Array) -> Array:
        """Weighted sum of absolute values."""
        xp = array_namespace(x)
        return self.lam * xp.sum(xp.abs(wide(x)))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding at alpha lam."""
        return soft_threshold(z, alpha * self.lam)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding at alpha_i lam."""
        return soft_threshold(z, alpha * self.lam)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The entries of v where |z| > alpha lam, 0 elsewhere."""
        return soft_threshold_jvp(z, v, alpha * self.lam)

    def structure(self, shape: tuple[int, ...]) -> Entries:
        """lam |t| for each entry."""
        return Entries(Scalar(l1=self.lam))

    def subgradient(self, x: Array) -> Array:
        """The vector lam sign(x)."""
        return self.lam * sign(x)


@dataclass(frozen=True)
class ElasticNet(Regularizer):
    """phi(x) = l1 ||x||_1 + l2/2 ||x||^2; prox(z) = sign(z) max(|z| - alpha l1, 0) / (1 + alpha l2). Acts per entry."""

    l1: float
    l2: float
    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_weight(self, l1=self.l1, l2=self.l2)

    @property
    def strong_convexity(self) -> float:
        """The weight l2."""
        return float(self.l2)

    def value(self, x: Array) -> Array:
        """l1 ||x||_1 + l2/2 ||x||^2."""
        xp = array_namespace(x)
        x = wide(x)
        return self.l1 * xp.sum(xp.abs(x)) + 0.5 * self.l2 * xp.sum(x * x)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding at alpha l1, then division by 1 + alpha l2."""
        return shrink(soft_threshold(z, alpha * self.l1), alpha * self.l2)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding at alpha_i l1, then division by 1 + alpha_i l2."""
        return shrink(soft_threshold(z, alpha * self.l1), alpha * self.l2)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The entries of v / (1 + alpha l2) where |z| > alpha l1, 0 elsewhere."""
        return shrink(soft_threshold_jvp(z, v, alpha * self.l1), alpha * self.l2)

    def structure(self, shape: tuple[int, ...]) -> Entries:
        """l1 |t| + l2/2 t^2 for each entry."""
        return Entries(Scalar(self.l1, self.l2))

    def subgradient(self, x: Array) -> Array:
        """l1 sign(x) + l2 x."""
        return self.l1 * sign(x) + self.l2 * x


__all__ = [
    "L1",
    "L2",
    "ElasticNet",
    "Zero",
    "shrink",
    "shrink_towards",
    "soft_threshold",
    "soft_threshold_jvp",
]
