"""The choice of alpha_k. k counts from 0: steps or epochs, whichever the caller advances."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from proxsps.core.array import Array


def constant(k: int, alpha: float) -> float:
    """alpha_k = alpha (the paper's `constant`)."""
    return alpha


def sqrt_decay(k: float, alpha: Array | float) -> Array | float:
    """alpha_k = alpha / sqrt(k + 1).

    With k the epoch this is the paper's `sqrt` schedule, alpha_0 / sqrt(j) in epoch j = 1, 2, ...; with k the step it
    is that of the theorems on the smooth convex case (b) and on the weakly convex case.
    """
    return alpha / math.sqrt(k + 1)


def horizon(k: int, alpha: Array | float, K: int) -> Array | float:
    """alpha_k = alpha / sqrt(K) for a number K of steps known beforehand (smooth weakly convex theorem)."""
    return alpha / math.sqrt(K)


def strongly_convex(k: int, lam: float, k_0: float = 1.0) -> float:
    """alpha_k = 1 / (lam (k + k_0)) for a lam-strongly convex regulariser (smooth convex theorem, part a)."""
    return 1 / (lam * (k + k_0))


def strongly_convex_bounded(k: int, lam: float) -> float:
    """alpha_k = 2 / (lam (k + 1)) for bounded subgradients and a lam-strongly convex regulariser (corollary)."""
    return 2 / (lam * (k + 1))


def cool_down(k: Array | int, alpha: Array | float, total: int, fraction: float = 0.25) -> Array | float:
    """alpha_k = alpha for the first part of `total` steps, then linearly to 0 over the last `fraction` of them.

    The first step of the line is shorter than alpha, and the last one, k = total - 1, is not 0 yet.
    """
    left = (total - k) / (1 + fraction * total)
    return alpha * (min(1.0, max(0.0, left)) if isinstance(left, float) else left.clip(0.0, 1.0))


def check_horizon(total: int, fraction: float = 0.0) -> None:
    """Raise an error for a number of steps below 1, or a part of them outside of [0, 1]."""
    if total < 1:
        raise ValueError(f"total_steps must be at least 1, got {total}.")
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in [0, 1], got {fraction}: it is a part of total_steps.")


def adaptive(zetas: Iterable[float], fallback: float) -> float:
    """alpha for the next epoch: the median adaptive step zeta of the last one, as the paper's discussion suggests.

    It keeps shrinkage and gradient step in proportion when zeta has fallen far below alpha. Without a positive finite
    median (no step yet, or a model that was truncated throughout) alpha stays at `fallback`.
    """
    values = list(zetas)
    middle = median(values) if values else 0.0
    return middle if 0 < middle < math.inf else fallback
