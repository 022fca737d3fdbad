"""The schedule-free form: what the average inherits from the steps of z, and how far noise carries it.

Points are those of `proxsps.core.schedule_free`: gradients at y, steps of z, the average x. The inequality of one step
is `matched_inequality` with z in place of x. Proofs are on the page "Theory of the step without a learning rate".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from proxsps.theory.assumptions import check_count, check_nonnegative, check_positive
from proxsps.theory.recursions import Number, Sides


def average_inequality(*, weight: Number, total: Number, gap: Number, last_gap: Number, model_gap: Number) -> Sides:
    """W (f(x) - C) <= (W - w) (f(x') - C) + w (m - C), m = f(y) + <g, z - y>, for each convex sample f.

    The average is x = x' + (w/W) (z - x'), and y lies between x and z.

    Args:
        weight: w, that of z.
        total: W, that of all points up to z.
        gap: f(x) - C.
        last_gap: f(x') - C, where x' is the average before z.
        model_gap: m - C, the linear model of f at y, evaluated at z.
    """
    return Sides(total * gap, (total - weight) * last_gap + weight * model_gap)


def schedule_free_neighbourhood(
    K: Any, *, cap: float, G: float, sigma_sq: float, penalty: float, D_sq: float, power: float = 1.0
) -> Number:
    """E f(x^K) - C for weights (k+1)^r and the constant cap A, every f_i convex, subgradients bounded by G, phi >= 0.

    (G sqrt(S sum w^2) + max w S / (2 A)) / sum w, S = D_sq + 2 A (K + 1) (sigma^2 + phi(u)), for any point u with
    D_sq = ||x^0 - u||^2 and sigma^2 = E f_i(u) - C. For sigma^2 = phi(u) = 0 it falls like 1 / sqrt(K).
    """
    counts = check_count(K)
    check_positive("Cap on the step", cap=cap)
    check_positive("Bound on the subgradients", G=G)
    check_nonnegative("Distance of the start from u", D_sq=D_sq)
    check_nonnegative("Mean of f_i(u) - C", sigma_sq=sigma_sq)
    check_nonnegative("phi(u)", penalty=penalty)
    weights = np.arange(1.0, np.max(counts) + 1) ** power
    at = np.asarray(counts).astype(int) - 1
    total, squares, largest = (
        part[at] for part in (weights.cumsum(), (weights**2).cumsum(), np.maximum.accumulate(weights))
    )
    S = D_sq + 2 * cap * (counts + 1) * (sigma_sq + penalty)
    return ((G * np.sqrt(S * squares) + largest * S / (2 * cap)) / total)[()]
