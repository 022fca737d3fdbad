"""Regularisers of the singular values of a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._support import check_weight, wide, widened
from proxsps.regularizers.base import Regularizer
from proxsps.regularizers.separable import soft_threshold


def as_matrix(x: Array) -> Array:
    """The tensor as a matrix with shape[0] rows, with all other dims in the columns."""
    return array_namespace(x).reshape(x, (x.shape[0], math.prod(x.shape[1:])))


@widened
def singular_value_threshold(z: Array, threshold: Array | float) -> Array:
    """Prox of threshold ||y||_*: with z = U diag(s) V^T, the matrix U diag(max(s - threshold, 0)) V^T."""
    xp = array_namespace(z)
    U, s, Vh = xp.linalg.svd(as_matrix(z), full_matrices=False)
    return xp.reshape((U * soft_threshold(s, threshold)) @ Vh, z.shape)


@widened
def polar_factor(x: Array) -> Array:
    """U V^T over the non-zero singular values of x = U diag(s) V^T."""
    xp = array_namespace(x)
    U, s, Vh = xp.linalg.svd(as_matrix(x), full_matrices=False)
    # Below this, a computed singular value is a rounding error of the largest.
    floor = xp.max(s) * float(xp.finfo(s.dtype).eps) * max(U.shape[0], Vh.shape[1])
    return xp.reshape((U * xp.astype(s > floor, s.dtype)) @ Vh, x.shape)


@dataclass(frozen=True)
class NuclearNorm(Regularizer):
    """phi(x) = lam sum_i s_i(x), s the singular values; prox(U diag(s) V^T) = U diag(max(s - alpha lam, 0)) V^T.

    Acts per tensor: a matrix, or a tensor of more dims as a matrix of shape[0] rows with the other dims in the columns.
    """

    lam: float
    batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_weight(self, lam=self.lam)

    def value(self, x: Array) -> Array:
        """Weighted sum of singular values."""
        xp = array_namespace(x)
        return self.lam * xp.sum(xp.linalg.svdvals(as_matrix(wide(x))))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding of the singular values at alpha lam."""
        return singular_value_threshold(z, alpha * self.lam)

    def subgradient(self, x: Array) -> Array:
        """The matrix lam U V^T over the non-zero singular values."""
        return self.lam * polar_factor(x)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor of fewer than two dims."""
        if len(shape) < 2:
            raise ValueError(
                f"NuclearNorm: needs a matrix or a tensor of more dims, got shape {tuple(shape)}; "
                "put vectors (biases, scales) into another parameter group."
            )


__all__ = ["NuclearNorm", "as_matrix", "polar_factor", "singular_value_threshold"]
