"""Constraints as regularisers: phi is 0 on a convex set and infinite outside; the prox is the projection.

Projections are rounded, so `value` allows a relative slack of (8 + sqrt(size)) eps of the tensor's dtype on the
bounds: value(prox(z)) is always 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import array_api_compat
import numpy as np

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._support import (
    check_bounds,
    check_radius,
    clip,
    guarded,
    indicator,
    sign,
    tolerance,
    where_or_zero,
    wide,
    widened,
)
from proxsps.regularizers.base import Regularizer
from proxsps.regularizers.structure import Entries, Rows, Scalar, Units


@widened
def project_box(z: Array, lower: Array | float, upper: Array | float) -> Array:
    """The nearest point with lower <= y <= upper, entry by entry."""
    return clip(z, lower, upper)


@widened
def project_box_jvp(z: Array, v: Array, lower: Array | float, upper: Array | float) -> Array:
    """Derivative of `project_box` at z along v: v strictly inside, 0 elsewhere."""
    return where_or_zero((z > lower) & (z < upper), v)


@widened
def project_l2_ball(z: Array, radius: Array | float) -> Array:
    """The nearest point with ||y|| <= radius: z min(1, radius / ||z||)."""
    xp = array_namespace(z)
    norm = xp.sqrt(xp.sum(z * z))
    outside = norm > radius
    return xp.where(outside, z * (radius / guarded(outside, norm)), z)


@widened
def project_l2_ball_jvp(z: Array, v: Array, radius: Array | float) -> Array:
    """Derivative of `project_l2_ball` at z along v: v inside, radius/||z|| (v - <e, v> e) with e = z/||z|| outside."""
    xp = array_namespace(z)
    norm = xp.sqrt(xp.sum(z * z))
    outside = norm > radius
    norm = guarded(outside, norm)
    unit = z / norm
    return xp.where(outside, (radius / norm) * (v - xp.sum(unit * v) * unit), v)


@widened
def project_simplex(z: Array, radius: Array | float) -> Array:
    """The nearest point with y >= 0 and sum(y) = radius: max(z - theta, 0) with theta such that the sum is the radius.

    With z sorted downwards, theta = max_k (z_1 + ... + z_k - radius) / k: the quotient grows with k as long as z_{k+1}
    lies above it, and falls from then on. No index depends on data.
    """
    xp = array_namespace(z)
    # A common shift does not change the projection; with the largest entry at 0, sums do not cancel.
    z = z - xp.max(z)
    ordered = xp.sort(xp.reshape(z, (-1,)), descending=True)
    if array_api_compat.is_numpy_array(ordered):
        # NumPy rounds a running sum at every entry; torch and JAX add up in blocks or in a wider type.
        ordered = xp.astype(ordered, xp.float64)
    count = xp.cumulative_sum(xp.ones_like(ordered), axis=0)
    theta = xp.max((xp.cumulative_sum(ordered, axis=0) - radius) / count)
    theta = xp.astype(theta, z.dtype, copy=False)
    y = where_or_zero(z > theta, z - theta)
    # The rounding of theta counts once for each entry that is left.
    return y * (radius / xp.sum(y))


@widened
def project_simplex_jvp(z: Array, y: Array, v: Array) -> Array:
    """Derivative of `project_simplex` at z along v, y the projection: v minus its mean where y > 0, 0 elsewhere."""
    xp = array_namespace(z)
    active = y > 0
    mean = xp.sum(where_or_zero(active, v)) / xp.sum(xp.astype(active, v.dtype))
    return where_or_zero(active, v - mean)


@widened
def project_l1_ball(z: Array, radius: Array | float) -> Array:
    """The nearest point with ||y||_1 <= radius: z itself, or |z| projected onto the simplex, with the signs of z."""
    xp = array_namespace(z)
    if 0 in z.shape:
        return z
    size = xp.abs(z)
    return xp.where(xp.sum(size) > radius, sign(z) * project_simplex(size, radius), z)


@widened
def project_l1_ball_jvp(z: Array, y: Array, v: Array, radius: Array | float) -> Array:
    """Derivative of `project_l1_ball` at z along v: v inside; outside, v minus its mean growth of |y| where y != 0."""
    xp = array_namespace(z)
    signs = sign(y)
    outside = xp.sum(xp.abs(z)) > radius
    count = xp.sum(signs * signs)
    growth = xp.sum(signs * v) / guarded(count > 0, count)
    return xp.where(outside, where_or_zero(y != 0, v - growth * signs), v)


@dataclass(frozen=True)
class NonNegative(Regularizer):
    """phi = indicator of {x >= 0}; prox(z) = max(z, 0). Acts per entry."""

    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def value(self, x: Array) -> Array:
        """0 where all entries are >= 0, else infinity."""
        return indicator(array_namespace(x).all(x >= 0), x)

    def structure(self, shape: tuple[int, ...]) -> Entries:
        """A lower bound for each entry."""
        return Entries(Scalar(lower=0.0))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """max(z, 0)."""
        return project_box(z, 0.0, math.inf)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """The projection, which does not depend on step sizes."""
        return self.prox(z, 1.0)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The entries of v where z > 0, 0 elsewhere."""
        return project_box_jvp(z, v, 0.0, math.inf)


@dataclass(frozen=True)
class Box(Regularizer):
    """phi = indicator of {lower <= x <= upper}; prox(z) = min(max(z, lower), upper). Acts per entry.

    Args:
        lower: lower bound of all entries, -inf for none.
        upper: upper bound of all entries, inf for none.
    """

    lower: float
    upper: float
    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self, self.lower, self.upper)

    def value(self, x: Array) -> Array:
        """0 where all entries lie between the bounds, else infinity."""
        slack = tolerance(x)
        lower, upper = self.lower - slack * abs(self.lower), self.upper + slack * abs(self.upper)
        x = wide(x)
        return indicator(array_namespace(x).all((x >= lower) & (x <= upper)), x)

    def structure(self, shape: tuple[int, ...]) -> Entries:
        """Two bounds for each entry."""
        return Entries(Scalar(lower=self.lower, upper=self.upper))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Each entry clipped to the bounds."""
        return project_box(z, self.lower, self.upper)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """The projection, which does not depend on step sizes."""
        return self.prox(z, 1.0)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The entries of v where lower < z < upper, 0 elsewhere."""
        return project_box_jvp(z, v, self.lower, self.upper)


@dataclass(frozen=True)
class LInfBall(Regularizer):
    """phi = indicator of {max |x_i| <= radius}; prox(z) = min(max(z, -radius), radius). Acts per entry."""

    radius: float
    separable: ClassVar[bool] = True
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_radius(self, self.radius)

    def value(self, x: Array) -> Array:
        """0 where no entry exceeds the radius, else infinity."""
        xp = array_namespace(x)
        return indicator(xp.all(xp.abs(wide(x)) <= self.radius * (1 + tolerance(x))), x)

    def structure(self, shape: tuple[int, ...]) -> Entries:
        """Two bounds for each entry."""
        return Entries(Scalar(lower=-self.radius, upper=self.radius))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Each entry clipped to [-radius, radius]."""
        return project_box(z, -self.radius, self.radius)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """The projection, which does not depend on step sizes."""
        return self.prox(z, 1.0)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The entries of v where |z| < radius, 0 elsewhere."""
        return project_box_jvp(z, v, -self.radius, self.radius)


@dataclass(frozen=True)
class L2Ball(Regularizer):
    """phi = indicator of {||x|| <= radius}; prox(z) = z min(1, radius / ||z||).

    Acts per tensor, or with joint=True on the whole parameter group as one vector.
    """

    radius: float
    joint: bool = False
    one_kind: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_radius(self, self.radius)

    def value(self, x: Array) -> Array:
        """0 where the Euclidean norm is at most the radius, else infinity."""
        xp = array_namespace(x)
        work = wide(x)
        return indicator(xp.sqrt(xp.sum(work * work)) <= self.radius * (1 + tolerance(x)), x)

    def structure(self, shape: tuple[int, ...]) -> Rows:
        """A bound on the norm of the entire tensor, or of all tensors together."""
        return Rows(Scalar(upper=self.radius), None)

    def joint_structure(self, shapes: Sequence[tuple[int, ...]]) -> Units:
        """One group with all entries of all tensors."""
        dims = [tuple(range(len(shape))) for shape in shapes]
        return Units(Scalar(upper=self.radius), dims, np.zeros(len(shapes), np.int64))

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Projection onto the ball."""
        return project_l2_ball(z, self.radius)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """Derivative of the projection."""
        return project_l2_ball_jvp(z, v, self.radius)


@dataclass(frozen=True)
class L1Ball(Regularizer):
    """phi = indicator of {||x||_1 <= radius}; prox(z) = sign(z) max(|z| - theta, 0), smallest theta >= 0 that fits.

    Acts per tensor, or with joint=True on the whole parameter group as one vector.
    """

    radius: float
    joint: bool = False
    batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_radius(self, self.radius)

    def value(self, x: Array) -> Array:
        """0 where the sum of absolute values is at most the radius, else infinity."""
        xp = array_namespace(x)
        return indicator(xp.sum(xp.abs(wide(x))) <= self.radius * (1 + tolerance(x)), x)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Projection onto the ball."""
        return project_l1_ball(z, self.radius)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """Derivative of the projection."""
        return project_l1_ball_jvp(z, y, v, self.radius)


@dataclass(frozen=True)
class Simplex(Regularizer):
    """phi = indicator of {x >= 0, sum(x) = radius}; prox(z) = max(z - theta, 0), theta such that the sum is radius.

    Acts per tensor, or with joint=True on the whole parameter group as one vector.
    """

    radius: float = 1.0
    joint: bool = False
    batches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_radius(self, self.radius)

    def value(self, x: Array) -> Array:
        """0 where no entry is negative and the sum is the radius, else infinity."""
        xp = array_namespace(x)
        work = wide(x)
        off = xp.abs(xp.sum(work) - self.radius)
        return indicator(xp.all(work >= 0) & (off <= self.radius * tolerance(x)), x)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Projection onto the simplex."""
        return project_simplex(z, self.radius)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """Derivative of the projection."""
        return project_simplex_jvp(z, y, v)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor without entries: its sum cannot be the radius."""
        if 0 in shape:
            raise ValueError(
                f"Simplex: needs a tensor with at least one entry, got shape {tuple(shape)}; leave this tensor out."
            )


__all__ = [
    "Box",
    "L1Ball",
    "L2Ball",
    "LInfBall",
    "NonNegative",
    "Simplex",
    "project_box",
    "project_box_jvp",
    "project_l1_ball",
    "project_l1_ball_jvp",
    "project_l2_ball",
    "project_l2_ball_jvp",
    "project_simplex",
    "project_simplex_jvp",
]
