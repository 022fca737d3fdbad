"""The average of squares of gradients as a metric, for hosts and devices."""

from __future__ import annotations

import torch
from torch import Tensor

from proxsps.optim.memory import least_metric


def new_metric(
    old: Tensor, g: Tensor, new: Tensor | float, eps: float, least_of: torch.dtype, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """The new average of squares v, and the metric D.

    Args:
        old: the old average.
        g: the gradient.
        new: the weight of its square, or one for each entry.
        eps: what is added to the root.
        least_of: the dtype of the average in the state, which decides how small D may be.
        in_place: whether the old average is overwritten.
    """
    if isinstance(new, Tensor):
        v = torch.lerp(old, g * g, new)
    elif in_place:
        v = old.mul_(1 - new).addcmul_(g, g, value=new)
    else:  # in no memory of its own: a wrapper would add twice
        v = torch.addcmul(old * (1 - new), g, g, value=new)
    D, least = v.sqrt().add_(eps), least_metric(least_of)
    return v, D if eps >= least else D.clamp_min_(least)
