"""One step of a method: the two sides of the inequalities from which the rates are summed up.

Arguments are conditional expectations given x^k, which for finitely many samples are means over all of them: no
sampling is needed to check these. Terms are arranged so that both sides are at least 0; `left / right` then says how
tight an inequality is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from proxsps.theory.assumptions import check_envelope, check_positive, check_step

Number = Any


class Sides(NamedTuple):
    """left <= right."""

    left: Number
    right: Number


def basic_inequality(
    *,
    alpha: float,
    lam: float,
    distance_sq: Number,
    next_distance_sq: Number,
    move_sq: Number,
    model: Number,
    next_model: Number,
) -> Sides:
    """Lemma: (1 + alpha lam) ||x+ - x||^2 <= ||x^k - x||^2 - ||x+ - x^k||^2 + 2 alpha (psi_k(x) - psi_k(x+)).

    It holds for each sample and any x; psi_k is the model of the sample around x^k, of which x+ is the proximal point.

    Args:
        alpha: step size.
        lam: strong convexity of phi.
        distance_sq: ||x^k - x||^2.
        next_distance_sq: ||x+ - x||^2.
        move_sq: ||x+ - x^k||^2.
        model: psi_k(x).
        next_model: psi_k(x+).
    """
    check_positive("Step size", alpha=alpha)
    return Sides((1 + alpha * lam) * next_distance_sq, distance_sq - move_sq + 2 * alpha * (model - next_model))


def convex_recursion(
    *,
    alpha: float,
    lam: float,
    theta: float,
    beta: float,
    distance_sq: Number,
    next_distance_sq: Number,
    next_gap: Number,
) -> Sides:
    """Smooth convex theorem, for alpha <= (1 - 1/theta) / L and gradient noise up to beta.

    (1 + alpha lam) E ||x+ - x*||^2 + 2 alpha E [psi(x+) - psi*] <= ||x - x*||^2 + theta beta alpha^2.
    """
    left = (1 + alpha * lam) * next_distance_sq + 2 * alpha * next_gap
    return Sides(left, distance_sq + theta * beta * alpha**2)


def bounded_recursion(
    *, alpha: float, lam: float, G: float, distance_sq: Number, next_distance_sq: Number, next_gap: Number
) -> Sides:
    """Behind the strongly convex corollary: convex f with bounded subgradients, any alpha.

    (1 + alpha lam) E ||x+ - x*||^2 + 2 alpha E [psi(x+) - psi*] <= ||x - x*||^2 + 4 alpha^2 G^2.
    """
    left = (1 + alpha * lam) * next_distance_sq + 2 * alpha * next_gap
    return Sides(left, distance_sq + 4 * alpha**2 * G**2)


def bounded_envelope_recursion(
    *, alpha: float, rho: float, eta: float, G: float, distance_sq: Number, next_distance_sq: Number
) -> Sides:
    """Behind the weakly convex corollary: bounded subgradients, alpha < eta < 1/rho, p = prox_{eta psi}(x).

    E ||x+ - p||^2 <= (1 - alpha (1/eta - rho)) ||x - p||^2 + 4 alpha^2 G^2 / (1 - alpha/eta).
    """
    check_envelope(eta, rho, 0.0)
    check_step(alpha, eta, "alpha < eta")
    right = (1 - alpha * (1 / eta - rho)) * distance_sq + 4 * alpha**2 * G**2 / (1 - alpha / eta)
    return Sides(next_distance_sq, right)


def envelope_recursion(
    *,
    alpha: float,
    lam: float,
    rho: float,
    eta: float,
    theta: float,
    beta: float,
    gap: Number,
    next_gap: Number,
    gradient_sq: Number,
) -> Sides:
    """Smooth weakly convex theorem, in the envelope.

    E env(x+) + alpha/2 (1 - eta (rho - lam)) ||grad env(x)||^2 <= env(x) + alpha^2 theta beta / (2 eta).

    Args:
        alpha: step size, at most `envelope_alpha`.
        lam: strong convexity of phi.
        rho: weak convexity of f.
        eta: parameter of the envelope.
        theta: constant of the proof.
        beta: bound on the gradient noise.
        gap: env(x) - inf psi.
        next_gap: E env(x+) - inf psi.
        gradient_sq: ||grad env(x)||^2.
    """
    check_envelope(eta, rho, lam)
    left = next_gap + alpha / 2 * (1 - eta * (rho - lam)) * gradient_sq
    return Sides(left, gap + alpha**2 * theta * beta / (2 * eta))
