"""The rates of the paper as functions of named constants. Each raises an error for steps that it does not allow.

    bounded subgradients   bounded_weakly_convex     constant alpha             E ||grad env(drawn x)||^2
                           bounded_strongly_convex   2 / (lam (k + 1))          E psi((k+1)-weighted mean) - psi*
    smooth, convex    (a)  smooth_strongly_convex    1 / (lam (k + k_0))        E psi(mean) - psi*
                      (b)  smooth_convex             alpha / sqrt(k + 1)        E psi(alpha-weighted mean) - psi*
                      (c)  smooth_constant_step      alpha                      E ||x^K - x*||^2
    smooth, weakly convex  envelope_sum              any                        sum_k alpha_k E ||grad env(x^k)||^2
                           envelope_sqrt             alpha / sqrt(k + 1)        min_k E ||grad env(x^k)||^2
                           envelope_horizon          alpha / sqrt(K)            E ||grad env(drawn x)||^2

K is a number of steps or an array of them. D_sq is ||x^0 - x*||^2, Delta is env(x^0) - inf psi. `theta=None` uses the
smallest theta that the steps allow, for which the bound is smallest.

One step of the paper's proof of the weakly convex theorem is not right for lam > 0: with r = 1/eta + lam - rho > 0 it
estimates 1 - alpha r / (1 + alpha lam) by 1 - alpha r from above. The prox inequality of the proof holds with the
further term r/2 ||x^{k+1} - prox(x^k)||^2, which gives 1 - 2 alpha r / (1 + alpha (lam + r)) instead; that is at most
1 - alpha r if alpha (lam + r) <= 1. So the theorem holds under this further condition, alpha <= 1/(1/eta + 2 lam -
rho), which is no restriction if 2 lam <= L + rho. Without this condition it is false: for f = 0, phi = lam/2 x^2 and a
constant alpha, with t = alpha lam, the two sides have the quotient (1 + t)^2 / (2 + t) as K grows, which is above 1 for
t > (sqrt(5) - 1)/2 = 0.618 (and t itself for K = 1). Under the further condition, t is below 1/2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from proxsps.theory.assumptions import (
    AssumptionError,
    check_count,
    check_envelope,
    check_nonnegative,
    check_positive,
    check_step,
    repair_alpha,
    smallest_theta,
    smooth_alpha,
)

Number = Any  # a float, or an array if K is one


# Globally bounded subgradients


def bounded_weakly_convex_alpha(*, K: int, rho: float, G: float, Delta: float) -> float:
    """The constant step of the corollary, 1 / (2 rho + sqrt(4 rho G^2 K / Delta)), for K steps."""
    check_positive("Weak convexity of f", rho=rho)
    check_positive("Bounded subgradients", G=G)
    check_positive("Distance of the envelope from inf psi", Delta=Delta)
    return 1 / (2 * rho + math.sqrt(4 * rho * G**2 * float(check_count(K)) / Delta))


def bounded_weakly_convex(K: Any, *, rho: float, G: float, Delta: float, alpha: float | None = None) -> Number:
    """E ||grad env^{1/(2 rho)}(x)||^2 for x drawn uniformly from x^0 ... x^{K-1} (corollary, weakly convex case).

    With the corollary's own step (`alpha=None`), 8 rho Delta / K + 16 G sqrt(rho Delta / K). With any other constant
    alpha < 1/(2 rho), 4 Delta / (alpha K) + 16 rho G^2 / (1/alpha - 2 rho), of which the former is the minimum.
    """
    counts = check_count(K)
    check_positive("Weak convexity of f", rho=rho)
    check_positive("Bounded subgradients", G=G)
    check_nonnegative("Distance of the envelope from inf psi", Delta=Delta)
    if alpha is None:
        return (8 * rho * Delta / counts + 16 * G * np.sqrt(rho * Delta / counts))[()]
    check_positive("Step size", alpha=alpha)
    if 2 * rho * alpha >= 1:
        raise AssumptionError(
            f"Step condition alpha < 1/(2 rho): alpha = {alpha:g} is too large; the largest allowed value is below "
            f"{1 / (2 * rho):.6g}."
        )
    return (4 * Delta / (alpha * counts) + 16 * rho * G**2 / (1 / alpha - 2 * rho))[()]


def bounded_strongly_convex(K: Any, *, lam: float, G: float, D_sq: float) -> Number:
    """E psi(mean of x^1 ... x^K with weights k + 1) - psi* for alpha_k = 2 / (lam (k + 1)) (corollary, convex case).

    lam/(K+1)^2 D_sq + 8 G^2 / (lam (K+1)), as published. The recursion behind it (`recursions.bounded_recursion`) gives
    8 G^2 (K + H_K) / (lam K (K+3)), H_K = 1 + ... + 1/K, for the second term: up to a tenth more, the same for large K.
    """
    counts = check_count(K)
    check_positive("Strong convexity of phi", lam=lam)
    check_positive("Bounded subgradients", G=G)
    check_nonnegative("Distance from the solution", D_sq=D_sq)
    return (lam / (counts + 1) ** 2 * D_sq + 8 * G**2 / (lam * (counts + 1)))[()]


# Smooth f, bounded gradient noise, convex


def smooth_strongly_convex(
    K: Any, *, lam: float, k_0: float, L: float, beta: float, D_sq: float, theta: float | None = None
) -> Number:
    """(a): E psi(mean of x^1 ... x^K) - psi* for alpha_k = 1 / (lam (k + k_0)) with k_0 >= 1.

    lam k_0 / (2 K) D_sq + theta beta (1 + ln K) / (2 lam K).
    """
    counts = check_count(K)
    check_positive("Strong convexity of phi", lam=lam)
    if not k_0 >= 1:
        raise AssumptionError(f"Shift of the steps 1/(lam (k + k_0)): needs k_0 >= 1, got k_0 = {k_0:g}.")
    theta = _convex_theta(1 / (lam * k_0), L, theta)
    _check_noise(beta, D_sq)
    return (lam * k_0 / (2 * counts) * D_sq + theta * beta * (1 + np.log(counts)) / (2 * lam * counts))[()]


def smooth_convex(K: Any, *, alpha: float, L: float, beta: float, D_sq: float, theta: float | None = None) -> Number:
    """(b): E psi(mean of x^1 ... x^K with weights alpha_0 ... alpha_{K-1}) - psi* for alpha_k = alpha / sqrt(k + 1).

    [D_sq / alpha + theta beta alpha (1 + ln K)] / (4 (sqrt(K + 1) - 1)).
    """
    counts = check_count(K)
    theta = _convex_theta(alpha, L, theta)
    _check_noise(beta, D_sq)
    return ((D_sq / alpha + theta * beta * alpha * (1 + np.log(counts))) / (4 * (np.sqrt(counts + 1) - 1)))[()]


def smooth_constant_step(
    K: Any, *, alpha: float, L: float, mu: float, lam: float, beta: float, D_sq: float, theta: float | None = None
) -> Number:
    """(c): E ||x^K - x*||^2 for alpha_k = alpha and f mu-strongly convex, mu + lam > 0.

    (1 + alpha (mu + 2 lam))^{-K} D_sq + theta beta alpha / (mu + 2 lam): linear down to a neighbourhood.
    """
    counts = check_count(K)
    check_nonnegative("Strong convexity of f", mu=mu)
    check_nonnegative("Strong convexity of phi", lam=lam)
    check_positive("Strong convexity of f or phi", **{"mu + 2 lam": mu + 2 * lam})
    theta = _convex_theta(alpha, L, theta)
    _check_noise(beta, D_sq)
    rate = mu + 2 * lam
    return ((1 + alpha * rate) ** -counts * D_sq + theta * beta * alpha / rate)[()]


# Smooth f, bounded gradient noise, weakly convex


def envelope_sum(
    alphas: Any,
    *,
    L: float,
    rho: float,
    lam: float,
    eta: float,
    beta: float,
    Delta: float,
    theta: float | None = None,
) -> Number:
    """sum_{k<K} alpha_k E ||grad env^eta(x^k)||^2 for K = 1, 2, ..., len(alphas), with any steps below the limit.

    [2 Delta + beta theta / eta sum_{k<K} alpha_k^2] / (1 - eta (rho - lam)).
    """
    steps = np.asarray(alphas, dtype=float)
    check_positive("Smallest step", alpha=float(steps.min()))
    theta = _envelope_theta(float(steps.max()), L, rho, lam, eta, theta)
    _check_noise(beta, Delta)
    return (2 * Delta + beta * theta / eta * np.cumsum(steps**2)) / (1 - eta * (rho - lam))


def envelope_sqrt(
    K: Any,
    *,
    alpha: float,
    L: float,
    rho: float,
    lam: float,
    eta: float,
    beta: float,
    Delta: float,
    theta: float | None = None,
) -> Number:
    """min_{k<K} E ||grad env^eta(x^k)||^2 for alpha_k = alpha / sqrt(k + 1).

    [Delta / alpha + beta theta alpha (1 + ln K) / (2 eta)] / [(1 - eta (rho - lam)) (sqrt(K + 1) - 1)].
    """
    counts = check_count(K)
    theta = _envelope_theta(alpha, L, rho, lam, eta, theta)
    _check_noise(beta, Delta)
    top = Delta / alpha + beta * theta * alpha * (1 + np.log(counts)) / (2 * eta)
    return (top / ((1 - eta * (rho - lam)) * (np.sqrt(counts + 1) - 1)))[()]


def envelope_horizon(
    K: int,
    *,
    alpha: float,
    L: float,
    rho: float,
    lam: float,
    eta: float,
    beta: float,
    Delta: float,
    theta: float | None = None,
) -> Number:
    """E ||grad env^eta(x)||^2 for x drawn uniformly from x^0 ... x^{K-1}, and alpha_k = alpha / sqrt(K).

    [2 Delta / alpha + beta theta alpha / eta] / [(1 - eta (rho - lam)) sqrt(K)].
    """
    root = float(np.sqrt(check_count(K)))
    theta = _envelope_theta(alpha / root, L, rho, lam, eta, theta)
    _check_noise(beta, Delta)
    return (2 * Delta / alpha + beta * theta * alpha / eta) / ((1 - eta * (rho - lam)) * root)


def _convex_theta(largest: float, L: float, theta: float | None) -> float:
    """Check the largest step against (1 - 1/theta) / L, and return theta."""
    check_nonnegative("Smoothness of f", L=L)
    check_positive("Step size", alpha=largest)
    if theta is None:
        return smallest_theta(largest, L)
    check_step(largest, smooth_alpha(L=L, theta=theta), "alpha_k <= (1 - 1/theta)/L")
    return theta


def _envelope_theta(largest: float, L: float, rho: float, lam: float, eta: float, theta: float | None) -> float:
    """Check the largest step against both parts of `envelope_alpha`, and return theta."""
    check_nonnegative("Smoothness of f", L=L)
    check_envelope(eta, rho, lam)
    check_positive("Step size", alpha=largest)
    if theta is None:
        theta = smallest_theta(largest, L + 1 / eta)
    else:
        check_step(largest, smooth_alpha(L=L + 1 / eta, theta=theta), "alpha_k <= (1 - 1/theta)/(L + 1/eta)")
    check_step(largest, repair_alpha(eta=eta, lam=lam, rho=rho), "alpha_k <= 1/(1/eta + 2 lam - rho)")
    return theta


def _check_noise(beta: float, start: float) -> None:
    check_nonnegative("Bounded gradient noise", beta=beta)
    check_nonnegative("Distance of the start from the solution", start=start)
