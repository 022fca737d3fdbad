"""The convex function of one number that entries and rows share: psi(t) = l1 |t| + l2/2 t^2 on [lower, upper].

On single entries it makes L1, ElasticNet, NonNegative, Box and LInfBall; on the norms of rows GroupLasso and L2Ball.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from proxsps.optim.kernels.caching import inlined
from proxsps.optim.kernels.layout import ENTRYWISE


class Psi(NamedTuple):
    """The constants of psi as doubles: one number per block for entries, one per group for rows.

    An infinite bound means no bound.
    """

    l1: np.ndarray
    l2: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @classmethod
    def of(cls, count: int, l1: float = 0.0, l2: float = 0.0, lower: float = -np.inf, upper: float = np.inf) -> Psi:
        """The same constants `count` times; arrays of this length are taken as they are."""
        return cls(*(np.broadcast_to(np.asarray(c, np.float64), (count,)).copy() for c in (l1, l2, lower, upper)))


@inlined(fastmath=ENTRYWISE)
def prox(z, threshold, shrink, lower, upper):
    """prox of alpha psi at z, for threshold = alpha l1 and shrink = 1 / (1 + alpha l2)."""
    return min(max((z - min(max(z, -threshold), threshold)) * shrink, lower), upper)
