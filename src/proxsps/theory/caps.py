"""Steps without a learning rate: the inequality of the matched cap, its consequences, and the bound from a distance.

A matched step is x+ = prox_{tau phi}(x - tau g) with tau at most a cap A, and so short that the linear model of the
sample is not below its bound C at x+ (`proxsps.core.caps`). Proofs are on the page "Theory of the step without a
learning rate". Terms are arranged as in `proxsps.theory.recursions`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from proxsps.theory.assumptions import check_count, check_nonnegative, check_positive
from proxsps.theory.recursions import Number, Sides


def matched_inequality(
    *,
    tau: Number,
    lam: float,
    distance_sq: Number,
    next_distance_sq: Number,
    move_sq: Number,
    model: Number,
    next_model: Number,
) -> Sides:
    """(1 + tau lam) ||x+ - z||^2 <= ||x - z||^2 - ||x+ - x||^2 + 2 tau (psi_x(z) - psi_x(x+)).

    The basic inequality with the step itself in place of alpha, for each sample, any z and any cap.

    Args:
        tau: the step of each sample.
        lam: strong convexity of phi.
        distance_sq: ||x - z||^2.
        next_distance_sq: ||x+ - z||^2.
        move_sq: ||x+ - x||^2.
        model: psi_x(z), the truncated model of the sample around x plus phi.
        next_model: psi_x(x+).
    """
    return Sides((1 + tau * lam) * next_distance_sq, distance_sq - move_sq + 2 * tau * (model - next_model))


def matched_progress(*, cap: float, L: Number) -> Number:
    """theta(A) = 2 A (1 - L A) for A <= 1/(2L), and 1/(2L) for longer caps: what a step gains per unit of f(x) - C."""
    check_positive("Cap on the step", cap=cap)
    short = np.minimum(cap, 1 / (2 * np.asarray(L, dtype=float)))
    return (2 * short * (1 - L * short))[()]


def matched_recursion(
    *,
    tau: Number,
    cap: float,
    L: Number,
    lam: float,
    distance_sq: Number,
    next_distance_sq: Number,
    gap: Number,
    target_gap: Number,
    penalty: Number,
    next_penalty: Number,
) -> Sides:
    """(1 + tau lam) ||x+ - z||^2 + theta (f(x) - C) + 2 tau phi(x+) <= ||x - z||^2 + 2 tau (f(z) - C + phi(z)).

    For each sample f that is convex and L-smooth, any z and any cap; theta = `matched_progress`.

    Args:
        tau: the step of each sample.
        cap: A.
        L: smoothness of each sample.
        lam: strong convexity of phi.
        distance_sq: ||x - z||^2.
        next_distance_sq: ||x+ - z||^2.
        gap: f(x) - C.
        target_gap: f(z) - C.
        penalty: phi(z).
        next_penalty: phi(x+).
    """
    left = (1 + tau * lam) * next_distance_sq + matched_progress(cap=cap, L=L) * gap + 2 * tau * next_penalty
    return Sides(left, distance_sq + 2 * tau * (target_gap + penalty))


def matched_neighbourhood(K: Any, *, cap: float, L_max: float, sigma_sq: float, penalty: float, D_sq: float) -> Number:
    """E f(mean of x^0 ... x^{K-1}) - C for the matched cap, every f_i convex and L_i-smooth, phi >= 0, any cap A.

    D_sq / (theta K) + 2 (A / theta) (sigma^2 + phi(z)), theta = `matched_progress`, for any point z with
    D_sq = ||x^0 - z||^2 and sigma^2 = E f_i(z) - C. Like the bound of SPS_max it does not go to 0.
    """
    counts = check_count(K)
    check_positive("Smoothness of every f_i", L_max=L_max)
    check_nonnegative("Distance of the start from z", D_sq=D_sq)
    check_nonnegative("Mean of f_i(z) - C", sigma_sq=sigma_sq)
    check_nonnegative("phi(z)", penalty=penalty)
    theta = matched_progress(cap=cap, L=L_max)
    return (D_sq / (theta * counts) + 2 * cap / theta * (sigma_sq + penalty))[()]


def raised_bound(*, value: Number, C: Number, slope: Number, radius: Number) -> Number:
    """max{C, m - r ||d||}: the bound with which a step without regulariser stays within the distance r.

    For convex f and r >= ||x - x*|| it is a lower bound of f(x*).

    Args:
        value: m, the value of the model at x.
        C: the lower bound.
        slope: ||d||, in a metric D the dual norm sqrt(<d, D^-1 d>).
        radius: r.
    """
    return np.maximum(C, value - radius * slope)
