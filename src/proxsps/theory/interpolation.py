"""Published results for other Polyak steps, for comparison: both depend on the interpolation constant sigma^2.

SPS_max (Loizou, Vaswani, Laradji and Lacoste-Julien, 2021; Orvieto, Lacoste-Julien and Loizou, 2022) reaches a
neighbourhood whose size is proportional to sigma^2; DecSPS (Orvieto et al., 2022) shrinks it like 1/sqrt(K). ProxSPS's
rates have no sigma^2 in them. Both bounds are derived again in the documentation, with all their constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from proxsps.theory.assumptions import AssumptionError, check_count, check_nonnegative, check_positive

Number = Any


def interpolation_constant(losses: Any, lower_bounds: Any = 0.0) -> float:
    """sigma^2 = E [f(x*; S) - C(S)]: the losses of all samples at the solution above their lower bounds."""
    gaps = np.asarray(losses, dtype=float) - np.asarray(lower_bounds, dtype=float)
    if (gaps < 0).any():
        raise AssumptionError(
            f"Lower bounds C(s) <= inf f(.; s): a loss lies {-gaps.min():g} below its bound; pass smaller bounds."
        )
    return float(gaps.mean())


def sps_max_rate(*, L_max: float, gamma_b: float, c: float = 1.0) -> float:
    """min{1/(2 c L_max), gamma_b}, called alpha in the theorem: no step of SPS_max is shorter."""
    check_positive("Smoothness of every f_i", L_max=L_max)
    check_positive("Bound on the step", gamma_b=gamma_b)
    if not c >= 1:
        raise AssumptionError(f"Constant of SPS_max: the convex bound needs c >= 1, got c = {c:g}.")
    return min(1 / (2 * c * L_max), gamma_b)


def sps_max_floor(*, L_max: float, gamma_b: float, sigma_sq: float, c: float = 1.0) -> float:
    """2 gamma_b sigma^2 / alpha: what is left of the bound of SPS_max for K -> infinity; see `sps_max_rate`."""
    check_nonnegative("Interpolation constant", sigma_sq=sigma_sq)
    return 2 * gamma_b * sigma_sq / sps_max_rate(L_max=L_max, gamma_b=gamma_b, c=c)


def sps_max_neighbourhood(
    K: Any, *, L_max: float, gamma_b: float, sigma_sq: float, D_sq: float, c: float = 1.0
) -> Number:
    """E f(mean of x^0 ... x^{K-1}) - f* for SPS_max, every f_i convex and L_i-smooth, constant gamma_b, c >= 1.

    D_sq / (alpha K) + 2 gamma_b sigma^2 / alpha. It holds for every gamma_b > 0, but does not go to 0.
    """
    counts = check_count(K)
    check_nonnegative("Distance of the start from the solution", D_sq=D_sq)
    alpha = sps_max_rate(L_max=L_max, gamma_b=gamma_b, c=c)
    return (D_sq / (alpha * counts) + sps_max_floor(L_max=L_max, gamma_b=gamma_b, sigma_sq=sigma_sq, c=c))[()]


def dec_sps_radius(*, mu: float, gamma_b: float, worst_gap: float, D_sq: float) -> float:
    """A bound on ||x^k - x*||^2 for all k and all draws, if every f_i is mu-strongly convex and c_0 >= 1/2.

    max{D_sq, 2 max_i [f_i(x*) - C_i] max{1/mu, gamma_b}}: a step gives (1 - gamma mu) D + 2 gamma [f_i(x*) - C_i] at
    most, with gamma <= gamma_b.
    """
    check_positive("Strong convexity of every f_i", mu=mu)
    check_positive("Bound on the step", gamma_b=gamma_b)
    check_nonnegative("Largest f_i(x*) - C_i", worst_gap=worst_gap)
    return max(D_sq, 2 * worst_gap * max(1 / mu, gamma_b))


def dec_sps_rate(K: Any, *, c_0: float, L_max: float, gamma_b: float, sigma_sq: float, radius_sq: float) -> Number:
    """E f(mean of x^0 ... x^{K-1}) - f* for DecSPS with c_k = c_0 sqrt(k + 1), c_0 >= 1.

    [2 c_0 max{L_max, 1/(2 c_0 gamma_b)} radius_sq + 2 sigma^2 / c_0] / sqrt(K), where radius_sq bounds ||x^k - x*||^2
    for all k: `dec_sps_radius`, which needs strongly convex f_i.
    """
    counts = check_count(K)
    check_positive("Smoothness of every f_i", L_max=L_max)
    check_positive("Bound on the step", gamma_b=gamma_b)
    check_nonnegative("Interpolation constant", sigma_sq=sigma_sq)
    check_nonnegative("Bounded iterates", radius_sq=radius_sq)
    if not c_0 >= 1:
        raise AssumptionError(f"Sequence c_k = c_0 sqrt(k + 1) of DecSPS: needs c_0 >= 1, got c_0 = {c_0:g}.")
    top = 2 * c_0 * max(L_max, 1 / (2 * c_0 * gamma_b)) * radius_sq + 2 * sigma_sq / c_0
    return (top / np.sqrt(counts))[()]
