"""Averages of gradients as vectors, for parts by torch on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from proxsps.core.plain import corrected_weight
from proxsps.optim.lists import spread
from proxsps.optim.memory import least_metric


class Averages(NamedTuple):
    """State tensors of a piece, which follow from one number of gradients so far."""

    held: list[list[Tensor]]  # averages, then averages of squares; in the schedule-free form only these
    gradients: Tensor | None  # how many squares were averaged

    def slopes(
        self, plan: Any, g: Tensor, vector: Callable[[Sequence[Tensor]], Tensor], in_place: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The new d, the metric D and the new v; the last two are None for the identity.

        `in_place` stores new averages right away, where `vector` returns the memory of the old ones.
        """
        d, rule = g, plan.rule
        if rule.beta is not None and (in_place or plan.weight != 1):
            d = (Tensor.lerp_ if in_place else torch.lerp)(vector(self.held[0]), g, plan.weight)
        if rule.beta2 is None:
            return d, None, None
        new, old = corrected_weight(float(cast(Tensor, self.gradients)), rule.beta2), vector(self.held[-1])
        kept = old.mul_(1 - new) if in_place else old * (1 - new)
        v = (Tensor.addcmul_ if in_place else torch.addcmul)(kept, g, g, value=new)
        D, least = v.sqrt().add_(rule.eps), least_metric(self.held[-1][0].dtype)
        return d, D if rule.eps >= least else D.clamp_min_(least), v

    def overflows(self, g: Tensor) -> bool:
        """Whether the square of a gradient leaves the range of the state's type: v would stay infinite."""
        if self.gradients is None or not g.numel():
            return False
        most, flat = torch.finfo(self.held[-1][0].dtype).max, g.reshape(-1)
        if float(torch.dot(flat, flat)) <= most:  # usual, and twice as fast
            return False
        largest = float(g.abs().amax())
        return not largest * largest <= most

    def store(self, plan: Any, d: Tensor, v: Tensor | None) -> None:
        """Store the new averages."""
        if plan.rule.beta is not None:
            spread(d.reshape(-1).to(self.held[0][0].dtype), self.held[0])
        if v is not None:
            spread(v.reshape(-1).to(self.held[-1][0].dtype), self.held[-1])
