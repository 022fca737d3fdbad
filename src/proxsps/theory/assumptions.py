"""The assumptions of the theorems, and errors that name the one that does not hold.

Symbols are the paper's: alpha_k steps, lam strong convexity of phi, L smoothness, mu strong and rho weak convexity of
f, beta bound on the gradient noise, G on the subgradients, eta parameter of the envelope, theta > 1 of the proofs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ROUNDING = 1e-12  # relative; a step that was computed from the limit itself is allowed


class AssumptionError(ValueError):
    """An assumption of a theorem does not hold; the message names it and says what is allowed."""


def check_positive(meaning: str, **values: float) -> None:
    """Raise an error for a constant that has to be positive and finite, for instance lam in a strongly convex case."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise AssumptionError(f"{meaning}: needs 0 < {name} < inf, got {name} = {value:g}.")


def check_nonnegative(meaning: str, **values: float) -> None:
    """Raise an error for a constant that is negative, infinite or not a number."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise AssumptionError(f"{meaning}: needs a finite {name} >= 0, got {name} = {value:g}.")


def check_count(K: Any) -> np.ndarray:
    """The numbers of steps as a float array; at least 1 each."""
    counts = np.asarray(K, dtype=float)
    if not (counts >= 1).all():
        raise AssumptionError(f"Number of steps: needs K >= 1, got K = {K}.")
    return counts


def check_step(alpha: float, allowed: float, condition: str) -> None:
    """Raise an error for a step size above the largest allowed one."""
    check_positive("Step size", alpha=alpha)
    if alpha > allowed * (1 + ROUNDING):
        raise AssumptionError(
            f"Step condition {condition}: alpha = {alpha:g} is too large; the largest allowed value is {allowed:.6g}."
        )


def check_envelope(eta: float, rho: float, lam: float) -> None:
    """Raise an error for an envelope parameter for which psi + ||.||^2 / (2 eta) need not be strongly convex."""
    check_positive("Moreau envelope", eta=eta)
    check_nonnegative("Weak convexity of f", rho=rho)
    check_nonnegative("Strong convexity of phi", lam=lam)
    if rho >= 1 / eta + lam:
        raise AssumptionError(
            f"Envelope condition rho < 1/eta + lam: rho = {rho:g}, but 1/eta + lam = {1 / eta + lam:g}; "
            f"eta must be below 1/(rho - lam) = {1 / (rho - lam):.6g}."
        )


def smooth_alpha(*, L: float, theta: float) -> float:
    """Largest step of the smooth convex theorem, (1 - 1/theta) / L."""
    check_nonnegative("Smoothness of f", L=L)
    _check_theta(theta)
    return (1 - 1 / theta) / L if L else math.inf


def envelope_alpha(*, L: float, theta: float, eta: float, lam: float = 0.0, rho: float = 0.0) -> float:
    """Largest step of the smooth weakly convex theorem: (1 - 1/theta) / (L + 1/eta), and not above `repair_alpha`."""
    check_nonnegative("Smoothness of f", L=L)
    check_envelope(eta, rho, lam)
    return min(smooth_alpha(L=L + 1 / eta, theta=theta), repair_alpha(eta=eta, lam=lam, rho=rho))


def repair_alpha(*, eta: float, lam: float, rho: float) -> float:
    """1 / (1/eta + 2 lam - rho): a limit that the weakly convex theorem needs and the paper does not state.

    See `proxsps.theory.bounds`. It matters only if 2 lam > L + rho.
    """
    extra = 1 / eta + 2 * lam - rho
    return 1 / extra if extra > 0 else math.inf


def smallest_theta(alpha: float, curvature: float) -> float:
    """The smallest theta with alpha <= (1 - 1/theta) / curvature: the bounds grow with theta. At least 1."""
    if alpha * curvature >= 1:
        raise AssumptionError(
            f"Step condition alpha_k <= (1 - 1/theta)/{curvature:.6g} for some theta: alpha = {alpha:g} is too large; "
            f"the largest allowed value is below {1 / curvature:.6g}."
        )
    return 1 / (1 - alpha * curvature)


def _check_theta(theta: float) -> None:
    if not theta > 1:
        raise AssumptionError(f"Constant of the proof: needs theta > 1, got theta = {theta:g}.")
