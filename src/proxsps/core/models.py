"""Models of the loss around x, and the step with the full model, which truncates nothing.

A model-based method minimises model + phi + ||y - x||^2 / (2 alpha). The linear model gives (proximal) SGD, the
truncated one SPS and ProxSPS, the full one stochastic proximal point (Asi and Duchi, 2019; Davis and Drusvyatskiy,
2019).
Models take arrays of one shape (the point's) and return 0-d values; the steps take runs on leading axes.
"""

from __future__ import annotations

from collections.abc import Callable

from proxsps.core.array import Array, array_namespace, inner


def linear_model(m: Array, d: Array, x: Array, y: Array) -> Array:
    """m + <d, y - x>."""
    return m + inner(d, y - x)


def truncated_model(m: Array, d: Array, C: Array, x: Array, y: Array) -> Array:
    """max{m + <d, y - x>, C}: the linear model, cut off at a lower bound of the loss."""
    xp = array_namespace(d, x, y)
    value = linear_model(m, d, x, y)
    return xp.maximum(value, xp.zeros_like(value) + C)


def prox_sps_model(m: Array, d: Array, C: Array, x: Array, y: Array, phi: Callable[[Array], Array]) -> Array:
    """ProxSPS's model of loss + phi: the loss truncated, phi as it is."""
    return truncated_model(m, d, C, x, y) + phi(y)


def sps_model(m: Array, d: Array, C: Array, x: Array, y: Array) -> Array:
    """SPS's model of loss + phi, where m and d already are value and slope of the sum: everything is truncated at C."""
    return truncated_model(m, d, C, x, y)


def proximal_objective(model: Array, x: Array, y: Array, alpha: Array | float) -> Array:
    """What a step minimises over y: the model's value there plus ||y - x||^2 / (2 alpha)."""
    return model + inner(y - x, y - x) / (2 * alpha)


def full_squared_step(x: Array, a: Array, b: Array | float, alpha: Array | float, lam: Array | float = 0.0) -> Array:
    """Stochastic proximal point on 1/2 (<a, y> - b)^2 + lam/2 ||y||^2, one sample per run; closed form.

    Args:
        x: points, shape (..., n).
        a: samples, shape (..., n).
        b: targets, a number or shape (..., 1), as are alpha and lam.
        alpha: step sizes.
        lam: strengths of the squared l2 norm.
    """
    shrink = 1 / (1 + alpha * lam)
    residual = shrink * _rows(a, x) - b
    return shrink * x - (alpha * shrink * residual / (1 + alpha * shrink * _rows(a, a))) * a


def full_logistic_step(
    x: Array, a: Array, b: Array | float, alpha: Array | float, lam: Array | float = 0.0, rounds: int = 40
) -> Array:
    """Stochastic proximal point on log(1 + exp(-b <a, y>)) + lam/2 ||y||^2, with labels b of -1 or 1.

    y = (x + alpha b p a) / (1 + alpha lam) with p in (0, 1) the root of p = sigmoid(-b <a, y(p)>): the right-hand side
    falls in p, so that Newton's method inside a shrinking bracket finds it. Shapes are those of `full_squared_step`.
    """
    xp = array_namespace(x, a)
    shrink = 1 / (1 + alpha * lam)
    margin, gain = shrink * b * _rows(a, x), alpha * shrink * _rows(a, a)
    low = xp.zeros_like(margin)
    high = xp.ones_like(margin)
    p = (low + high) / 2
    for _ in range(rounds):
        target = _sigmoid(-(margin + gain * p))
        excess = p - target
        low, high = xp.where(excess < 0, p, low), xp.where(excess < 0, high, p)
        newton = p - excess / (1 + gain * target * (1 - target))
        p = xp.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
    return shrink * x + (alpha * shrink * b * p) * a


def _rows(a: Array, b: Array) -> Array:
    """Inner products along the last axis, which stays as one entry."""
    return array_namespace(a, b).sum(a * b, axis=-1, keepdims=True)


def _sigmoid(t: Array) -> Array:
    xp = array_namespace(t)
    decay = xp.exp(-xp.abs(t))  # never overflows
    return xp.where(t >= 0, 1 / (1 + decay), decay / (1 + decay))
