"""Losses of one number t = <a, x> against a target b, with the constants of their shape; the infimum of each is 0.

They are convex or weakly convex; `strong` and `weak` are the largest mu and the smallest rho >= 0 for which
loss - mu/2 t^2 and loss + rho/2 t^2 are convex, `smooth` bounds the second derivative (infinity where there is none).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Loss(ABC):
    """A loss of one number; value and slope work entry by entry."""

    smooth: ClassVar[float]
    strong: ClassVar[float] = 0.0
    weak: ClassVar[float] = 0.0

    @abstractmethod
    def value(self, t: Floats, b: Floats) -> Floats:
        """The loss."""

    @abstractmethod
    def slope(self, t: Floats, b: Floats) -> Floats:
        """Its derivative, or one of its subgradients."""

    @abstractmethod
    def steepest(self, reach: Floats, b: Floats) -> Floats:
        """The largest |slope| over |t| <= reach; reach may be infinity."""


class Squared(Loss):
    """(t - b)^2 / 2."""

    smooth, strong = 1.0, 1.0

    def value(self, t: Floats, b: Floats) -> Floats:
        """Half the squared residual."""
        return (t - b) ** 2 / 2

    def slope(self, t: Floats, b: Floats) -> Floats:
        """The residual."""
        return t - b

    def steepest(self, reach: Floats, b: Floats) -> Floats:
        """reach + |b|."""
        return reach + np.abs(b)


class Logistic(Loss):
    """ln(1 + exp(-b t)) with labels b of -1 and 1."""

    smooth = 0.25

    def value(self, t: Floats, b: Floats) -> Floats:
        """The logistic loss, without overflow."""
        return np.logaddexp(0, -b * t)

    def slope(self, t: Floats, b: Floats) -> Floats:
        """-b / (1 + exp(b t))."""
        return -b * np.exp(-np.logaddexp(0, b * t))

    def steepest(self, reach: Floats, b: Floats) -> Floats:
        """1 / (1 + exp(-reach))."""
        return np.exp(-np.logaddexp(0, -reach))


class Absolute(Loss):
    """|t - b|."""

    smooth = math.inf

    def value(self, t: Floats, b: Floats) -> Floats:
        """The absolute residual."""
        return np.abs(t - b)

    def slope(self, t: Floats, b: Floats) -> Floats:
        """Its sign."""
        return np.sign(t - b)

    def steepest(self, reach: Floats, b: Floats) -> Floats:
        """1."""
        return np.ones_like(b)


class Cauchy(Loss):
    """ln(1 + (t - b)^2) / 2: quadratic near b, flat far away, and concave from a distance of 1 on."""

    smooth, weak = 1.0, 0.125  # the second derivative (1 - r^2) / (1 + r^2)^2 is least at r^2 = 3

    def value(self, t: Floats, b: Floats) -> Floats:
        """The loss."""
        return np.log1p((t - b) ** 2) / 2

    def slope(self, t: Floats, b: Floats) -> Floats:
        """r / (1 + r^2)."""
        return (t - b) / (1 + (t - b) ** 2)

    def steepest(self, reach: Floats, b: Floats) -> Floats:
        """1/2, at a residual of 1."""
        return np.full_like(b, 0.5)


class Phase(Loss):
    """|t^2 - b| with b >= 0: the square of t is measured, its sign is lost."""

    smooth, weak = math.inf, 2.0  # |t^2 - b| + t^2 is the larger one of 2 t^2 - b and b

    def value(self, t: Floats, b: Floats) -> Floats:
        """The loss."""
        return np.abs(t**2 - b)

    def slope(self, t: Floats, b: Floats) -> Floats:
        """2 t, with the sign of t^2 - b."""
        return 2 * t * np.sign(t**2 - b)

    def steepest(self, reach: Floats, b: Floats) -> Floats:
        """2 reach."""
        return 2 * reach + 0 * b
