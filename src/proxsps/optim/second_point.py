"""The two points of the schedule-free form, as lists of tensors: parameters hold y, or x while a model is evaluated.

The formulas are those of `proxsps.core.schedule_free`, on many tensors per call and in place. Compiled kernels compute
bitwise the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxsps.optim.lists import bundles, join, widened

# Keys of the state: z; y of half-precision parameters; y while a model with the zeros of a regulariser is evaluated.
Z, Y, HELD = "z", "y", "held"
AVERAGING = ("total", "longest", "tau", "squares")  # W, taumax, the last step and rho^2, in the groups
PIECE = 1 << 18  # entries that are processed at a time


def to_averages(ys: list[Tensor], zs: list[Tensor], b: float) -> None:
    """y <- x."""
    torch._foreach_sub_(ys, zs)
    torch._foreach_div_(ys, b)
    torch._foreach_add_(ys, zs)


def to_next_points(xs: list[Tensor], zs: list[Tensor], b: float, share: float) -> None:
    """x <- the next y, from the last average and the new z."""
    steps = torch._foreach_sub(zs, xs)
    torch._foreach_mul_(steps, share)
    torch._foreach_add_(xs, steps)
    torch._foreach_sub_(xs, zs)
    torch._foreach_mul_(xs, b)
    torch._foreach_add_(xs, zs)


def dots(gs: Sequence[Tensor], zs: Sequence[Tensor], ys: Sequence[Tensor], exact: bool) -> float:
    """<g, z - y>."""
    total = 0.0
    for columns in bundles((gs, zs, ys), PIECE):
        g, z, y = (widened(join(tensors)) for tensors in columns)
        g, z, y = (t.double() for t in (g, z, y)) if exact else (g, z, y)
        total += float(torch.dot(g, z.to(g.dtype) - y.to(g.dtype)))
    return total
