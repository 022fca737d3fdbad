"""From a loss and its gradient to the linear model of a step: its value m and its slope d.

The plain estimate is the loss and its gradient. Methods that put the regulariser into the loss (SPS, DecSPS) add its
value to the one and its gradient to the other.
"""

from __future__ import annotations

from proxsps.core.array import Array, array_namespace


def coupled_value(m: Array, x_sq: Array, lam: Array) -> Array:
    """m + sum_j lam_j/2 ||x_j||^2: the loss with the squared l2 norm of its blocks, which are on the last axis."""
    return m + array_namespace(x_sq).sum(lam * x_sq, axis=-1) / 2


def coupled_slope(g: Array, x: Array, lam: Array | float) -> Array:
    """g + lam x: the gradient of the loss with the squared l2 norm."""
    return g + lam * x
