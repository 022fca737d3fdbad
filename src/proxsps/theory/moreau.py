"""The Moreau envelope: env^eta(x) = min_y psi(y) + ||y - x||^2 / (2 eta), its gradient, and the gradient mapping.

env is smooth where psi is not, and the norm of its gradient (x - p) / eta, where p = prox_{eta psi}(x) minimises,
measures how far x is from stationary. Points are rows: x has shape (..., n), values have shape (...).

If psi has no known prox, two solvers compute it: `prox_by_gradient` for a smooth f and a phi with a prox, and
`prox_by_cuts` for any psi of a few variables with subgradients. Both are accurate to a given tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from proxsps.core.array import Array, array_namespace
from proxsps.theory.assumptions import check_envelope, check_positive

MAPPING_LOWER, MAPPING_UPPER = 1 / 4, 3 / 2 * (1 + 1 / math.sqrt(2))


class Envelope(NamedTuple):
    """env(x), its gradient, and the proximal point."""

    value: Array
    gradient: Array
    prox: Array


def moreau_envelope(
    psi: Callable[[Array], Array], prox: Callable[[Array, float], Array], x: Array, eta: float
) -> Envelope:
    """The envelope of psi at x, given psi's values and its prox or a solver for it.

    Args:
        psi: values psi(y) at rows y, shape (..., n) to (...).
        prox: prox(x, eta) = argmin_y psi(y) + ||y - x||^2 / (2 eta).
        x: points, shape (..., n).
        eta: parameter, below 1/rho if psi is rho-weakly convex.
    """
    check_positive("Moreau envelope", eta=eta)
    p = prox(x, eta)
    away = x - p
    return Envelope(psi(p) + square(away) / (2 * eta), away / eta, p)


def gradient_mapping(x: Array, gradient: Array, prox: Callable[[Array, float], Array], eta: float) -> Array:
    """(x - prox_{eta phi}(x - eta grad f(x))) / eta: zero where x is stationary for f + phi."""
    check_positive("Gradient mapping", eta=eta)
    return (x - prox(x - eta * gradient, eta)) / eta


class Interval(NamedTuple):
    """lower <= quantity <= upper."""

    lower: Array
    upper: Array


def gradient_mapping_range(envelope_gradient_norm: Array) -> Interval:
    """The range of the norm of the gradient mapping with eta = 1/L, from that of grad env^{1/(2L)} (auxiliary lemma).

    1/4 ||grad env|| <= ||G_{1/L}|| <= 3/2 (1 + 1/sqrt(2)) ||grad env||, for L-smooth f and convex phi.
    """
    return Interval(MAPPING_LOWER * envelope_gradient_norm, MAPPING_UPPER * envelope_gradient_norm)


class Norms(NamedTuple):
    """Three numbers that are equal for a differentiable psi: ||grad psi(p)||, ||x - p|| / eta and ||grad env(x)||."""

    gradient_at_prox: Array
    scaled_distance: Array
    envelope_gradient: Array


def norm_identity(
    psi_gradient: Callable[[Array], Array], prox: Callable[[Array, float], Array], x: Array, eta: float
) -> Norms:
    """The three sides of the identity between gradient, distance and envelope, for differentiable psi."""
    xp = array_namespace(x)
    p = prox(x, eta)
    away = x - p
    return Norms(xp.sqrt(square(psi_gradient(p))), xp.sqrt(square(away)) / eta, xp.sqrt(square(away / eta)))


def square(v: Array) -> Array:
    """||v||^2 of each row."""
    return array_namespace(v).sum(v * v, axis=-1)


def prox_by_gradient(
    gradient: Callable[[np.ndarray], np.ndarray],
    phi_prox: Callable[[np.ndarray, float], np.ndarray],
    x: np.ndarray,
    eta: float,
    *,
    L: float,
    rho: float,
    lam: float = 0.0,
    tolerance: float = 1e-12,
    limit: int = 100_000,
) -> np.ndarray:
    """prox_{eta (f + phi)}(x) by proximal gradient steps, to within `tolerance` (1 + ||x||) of the exact point.

    f is L-smooth and rho-weakly convex, phi is lam-strongly convex with the given prox, and rho < 1/eta + lam, so that
    f + phi + ||. - x||^2 / (2 eta) is strongly convex and a short step means a close point.

    Args:
        gradient: grad f at rows, shape (..., n) to (..., n).
        phi_prox: prox of phi at rows.
        x: points, shape (..., n).
        eta: parameter of the envelope.
        L: smoothness of f.
        rho: weak convexity of f.
        lam: strong convexity of phi.
        tolerance: accuracy.
        limit: the largest number of steps.
    """
    check_envelope(eta, rho, lam)
    curvature = L + 1 / eta
    modulus = 1 / eta + lam - rho
    y = phi_prox(x, eta)
    scale = 1 + np.sqrt(square(x))
    for _ in range(limit):
        z = phi_prox(y - (gradient(y) + (y - x) / eta) / curvature, 1 / curvature)
        # A subgradient at z has norm 2 curvature ||z - y|| at most; over the modulus it bounds the distance.
        error = 2 * curvature / modulus * np.sqrt(square(z - y))
        y = z
        if (error <= tolerance * scale).all():
            return y
    raise RuntimeError(f"prox_by_gradient is {error.max():.2g} from the solution after {limit} steps; raise `limit`.")


class Cut(NamedTuple):
    """Value and subgradient of psi at rows; value infinity and an outward normal where a row is outside the domain."""

    value: np.ndarray
    subgradient: np.ndarray


def prox_by_cuts(
    oracle: Callable[[np.ndarray], Cut | tuple[np.ndarray, np.ndarray]],
    x: np.ndarray,
    eta: float,
    *,
    rho: float,
    radius: float,
    tolerance: float = 1e-6,
    limit: int = 5_000,
) -> np.ndarray:
    """prox_{eta psi}(x) by the ellipsoid method, to within `tolerance` of the exact point; for a few variables.

    psi needs subgradients only: each one cuts the ellipsoid that holds the solution in half. The objective is
    (1/eta - rho)-strongly convex, so that the gap between its best value and the lower bound that the cuts give bounds
    the distance.

    Args:
        oracle: psi's `Cut` at rows (rows, n).
        x: points, shape (rows, n).
        eta: parameter of the envelope, below 1/rho.
        rho: weak convexity of psi.
        radius: a bound on ||x - prox(x)||, for instance 2 eta G in the domain of a psi with slopes up to G.
        tolerance: accuracy.
        limit: the largest number of cuts.
    """
    check_envelope(eta, rho, 0.0)
    check_positive("Ball around x that holds the proximal point", radius=radius)
    n = x.shape[-1]
    modulus = 1 / eta - rho
    center, shape = x.copy(), np.broadcast_to(radius**2 * np.eye(n), (*x.shape, n)).copy()
    best, best_value = x.copy(), np.full(len(x), np.inf)
    floor = np.full(len(x), -np.inf)
    for _ in range(limit):
        value, g = oracle(center)
        inside = np.isfinite(value)
        value = value + square(center - x) / (2 * eta)
        g = np.where(inside[:, None], g + (center - x) / eta, g)
        step = np.einsum("rij,rj->ri", shape, g)
        width = np.sqrt(np.maximum(np.einsum("ri,ri->r", g, step), 1e-300))
        better = inside & (value < best_value)
        best, best_value = np.where(better[:, None], center, best), np.where(better, value, best_value)
        floor = np.where(inside, np.maximum(floor, value - width), floor)
        if (2 * np.maximum(best_value - floor, 0) / modulus <= tolerance**2).all():
            return best
        step /= width[:, None]
        center = center - step / (n + 1)
        outer = step[:, :, None] * step[:, None, :]
        stretch = n * n / (n * n - 1) if n > 1 else 1.0
        shape = stretch * (shape - (2 / (n + 1) if n > 1 else 0.75) * outer)
    raise RuntimeError(f"prox_by_cuts did not reach {tolerance:g} in {limit} cuts; raise `limit` or the tolerance.")


__all__ = [
    "Cut",
    "Envelope",
    "Interval",
    "Norms",
    "gradient_mapping",
    "gradient_mapping_range",
    "moreau_envelope",
    "norm_identity",
    "prox_by_cuts",
    "prox_by_gradient",
    "square",
]
