"""Worst cases on the line, where the bounds are tight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from proxsps.core.array import Array
from proxsps.problems.composite import Composite, scalar_quadratic
from proxsps.regularizers import L1, L2, NonNegative, Regularizer

RARE = (0.5, 0.5, 0.5, 0.5, -2.0)  # of variance 1: many short steps down, a few long ones up


@dataclass(frozen=True)
class Wall(Regularizer):
    """phi(x) = lam/2 x^2 for x >= 0, infinity below; prox(z) = max(z, 0) / (1 + alpha lam). Acts per entry."""

    lam: float
    separable: ClassVar[bool] = True

    @property
    def strong_convexity(self) -> float:
        """The weight lam."""
        return self.lam

    def value(self, x: Array) -> Array:
        """lam/2 x^2 on the right side."""
        return NonNegative().value(x) + L2(self.lam).value(x)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Projection, then shrinkage."""
        return self.prox_diagonal(z, alpha)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """Projection, then shrinkage by 1 + alpha_i lam."""
        return L2(self.lam).prox_diagonal(NonNegative().prox(z, 1.0), alpha)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """The direction over 1 + alpha lam where z > 0."""
        return L2(self.lam).prox_jvp(z, y, NonNegative().prox_jvp(z, y, v, alpha), alpha)


def drift_to_wall(lam: float = 0.0) -> Composite:
    """A noisy, almost linear loss pushes x against a wall: means of points have no smaller gap than the points.

    Tight in the noise of (b), and with a small lam > 0 in that of (a).
    """
    return scalar_quadratic(Wall(lam), name="drift to a wall", curvature=1e-4, slope=0.3, noise=RARE, start=0.0)


def noisy_shrinkage(start: float = 2.0) -> Composite:
    """A noisy, almost flat loss beside the squared l2 norm: tight in both terms of (c)."""
    return scalar_quadratic(L2(1.0), name="noisy shrinkage", curvature=1e-4, slope=0.0, noise=(-1.0, 1.0), start=start)


def pure_shrinkage() -> Composite:
    """The same without noise: tight in the start of (a) and of the weakly convex theorem."""
    return scalar_quadratic(L2(1.0), name="pure shrinkage", curvature=1e-4, slope=0.0, noise=(0.0,), start=1.0)


def soft_landing() -> Composite:
    """An almost flat loss beside the l1 norm, which carries x to 0 in some 100 steps: tight in the start of (b)."""
    return scalar_quadratic(L1(0.054), name="soft landing", curvature=1e-4, slope=0.0, noise=(0.0,), start=1.0)
