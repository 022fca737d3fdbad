"""The methods in the paper's order, one line per formula, for one parameter vector. The fast code must agree with it.

Slow and plain on purpose: no groups, no blocks, no reductions shared between methods. Tests run both together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def sps(x: Tensor, g: Tensor, f: float, alpha: float, C: float = 0.0, c: float = 1.0) -> Tensor:
    """Algorithm 1 (c = 1) and SPS_max."""
    if not g.any():
        return x
    gamma = min(alpha, (f - C) / (c * float(g @ g)))
    return x - gamma * g


def regularized_sps(x: Tensor, g: Tensor, f: float, alpha: float, lam: float, C: float = 0.0, c: float = 1.0) -> Tensor:
    """The paper's baseline: SPS on the loss with lam/2 ||x||^2 added to it."""
    return sps(x, g + lam * x, f + lam / 2 * float(x @ x), alpha, C, c)


def prox_sps_l2(x: Tensor, g: Tensor, f: float, alpha: float, lam: float, C: float = 0.0) -> Tensor:
    """Algorithm 3."""
    if not g.any():
        return x / (1 + alpha * lam)
    zeta = max(0.0, ((1 + alpha * lam) * (f - C) - alpha * lam * float(g @ x)) / float(g @ g))
    tau = min(alpha, zeta)
    return (x - tau * g) / (1 + alpha * lam)


def prox_sps(
    x: Tensor, g: Tensor, f: float, alpha: float, prox: Callable[[Tensor, float], Tensor], C: float = 0.0
) -> Tensor:
    """Algorithm 2 by the lemma on the general update, with the bisection its remark proposes."""

    def y(u: float) -> Tensor:
        return prox(x - u * alpha * g, alpha)

    def model(point: Tensor) -> float:
        return f + float(g @ (point - x))

    if model(y(1.0)) > C:
        return y(1.0)
    if model(y(0.0)) < C:
        return y(0.0)
    low, high = 0.0, 1.0
    while low < (u := (low + high) / 2) < high:
        low, high = (u, high) if model(y(u)) > C else (low, u)
    return y(u)


def prox_sgd(x: Tensor, g: Tensor, alpha: float, prox: Callable[[Tensor, float], Tensor]) -> Tensor:
    """Proximal stochastic gradient descent: the linear model."""
    return prox(x - alpha * g, alpha)


def dec_sps(
    x: Tensor, g: Tensor, f: float, k: int, previous: float | None, gamma_b: float, c0: float = 1.0, C: float = 0.0
) -> tuple[Tensor, float]:
    """DecSPS: the new point and gamma_k. `previous` is gamma_{k-1}, None at k = 0: c_{-1} gamma_{-1} = c_0 gamma_b."""
    c = c0 * (k + 1) ** 0.5
    memory = c0 * gamma_b if previous is None else c0 * k**0.5 * previous
    ratio = (f - C) / float(g @ g) if g.any() else torch.inf
    gamma = min(ratio, memory) / c
    return x - gamma * g, gamma
