"""The structure of a regulariser that a step can use: a square, a function of each entry, or of the norm of each row.

A regulariser declares its structure (`Regularizer.structure`) instead of being recognised by its class. Without a
structure, steps call its prox, which always works but is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._support import clip


class Prox(Protocol):
    """The prox of a function of each entry, as arrays."""

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """The prox, entry by entry."""

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array | None:
        """Its derivative along v, or None if it is not cheap."""


class Scalar(NamedTuple):
    """psi(t) = l1 |t| + l2/2 t^2 on lower <= t <= upper: a convex function of one number.

    The compiled kernels support this family. The constants are numbers, or arrays of the shape of t.
    """

    l1: Array | float = 0.0
    l2: Array | float = 0.0
    lower: Array | float = -math.inf
    upper: Array | float = math.inf

    @property
    def bounded(self) -> bool:
        """Whether there may be a bound."""
        return not (_is(self.lower, -math.inf) and _is(self.upper, math.inf))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Soft thresholding at alpha l1, division by 1 + alpha l2, then the nearest point between the bounds."""
        t = alpha * self.l1
        y = z if _is(self.l1, 0) else z - clip(z, -t, t)
        y = y if _is(self.l2, 0) else y / (1 + alpha * self.l2)
        return clip(y, self.lower, self.upper) if self.bounded else y

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """v / (1 + alpha l2) where |z| > alpha l1 and y lies strictly between the bounds, else 0."""
        xp = array_namespace(z)
        out = v if _is(self.l2, 0) else v / (1 + alpha * self.l2)
        if not _is(self.l1, 0):
            out = xp.where(abs(z) > alpha * self.l1, out, xp.zeros_like(out))
        if self.bounded:
            out = xp.where((y > self.lower) & (y < self.upper), out, xp.zeros_like(out))
        return out


class Quadratic(NamedTuple):
    """phi(x) = lam/2 ||x - center||^2, whose prox is affine; a step with it has a closed form."""

    lam: Array | float = 0.0
    center: Any = None  # None for the origin, a number, or an array of the tensor's shape


class Entries(NamedTuple):
    """phi(x) = sum_i psi(x_i): each entry separately. psi is a `Scalar`, or any object with a prox on arrays."""

    psi: Scalar | Prox


class Rows(NamedTuple):
    """phi(x) = sum_g psi(||x_g||): each group of entries by its Euclidean norm.

    The norms are taken over `dims`, with one group per index of the other dims; None takes the entire tensor.
    """

    psi: Scalar
    dims: tuple[int, ...] | None


class Units(NamedTuple):
    """phi(x) = sum_g psi_g(||x_g||), where a group g has slices of several tensors."""

    psi: Scalar  # constants as numbers, or as arrays with one number per group
    dims: Sequence[tuple[int, ...]]  # for each tensor the dims of a slice; one dim, or none, counts the slices
    groups: npt.NDArray[np.int64]  # the group of each slice, tensor after tensor; -1 for slices without a penalty


Structure = Quadratic | Entries | Rows


def _is(constant: Any, value: float) -> bool:
    """Whether a constant is known to be this number; arrays are not checked."""
    return isinstance(constant, (int, float)) and constant == value


def group_dims(structure: Structure | None, ndim: int) -> tuple[int, ...] | None:
    """The dims over which entries of a tensor form groups: none for single entries, None if there is no such form."""
    if isinstance(structure, Rows):
        return tuple(range(ndim)) if structure.dims is None else structure.dims
    return () if isinstance(structure, Entries) else None


__all__ = ["Entries", "Prox", "Quadratic", "Rows", "Scalar", "Structure", "Units", "group_dims"]
