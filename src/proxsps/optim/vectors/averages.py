"""Averages of gradients as vectors, for parts by torch on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from proxsps.core.plain import corrected_weight
from proxsps.optim.lists import join, spread
from proxsps.optim.moments import least_metric


class Averages(NamedTuple):
    """State tensors of a piece, which follow from one number of gradients so far."""

    held: list[list[Tensor]]  # averages, then averages of squares
    gradients: Tensor | None  # how many squares were averaged

    def slopes(
        self, plan: Any, g: Tensor, vector: Callable[[Sequence[Tensor]], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The new d, and the inverse metric, None for the identity."""
        if not self.held:
            return g, None
        d = g if plan.weight == 1 else torch.lerp(vector(self.held[0]), g, plan.weight)
        if len(self.held) == 1:
            return d, None
        least = least_metric(self.held[1][0].dtype)
        D = self._squares(plan, g, vector).sqrt_().add_(plan.rule.eps)
        return d, (D if plan.rule.eps >= least else D.clamp_min_(least)).reciprocal_()

    def overflow(self, g: Tensor) -> bool:
        """Whether the square of an entry leaves the range of the state, in which infinity would stay for ever.

        A metric of infinity does not show in sums; in doubles not even the square does.
        """
        largest = float(g.abs().amax()) if g.numel() else 0.0
        return not largest * largest <= torch.finfo(self.held[1][0].dtype).max

    def _squares(self, plan: Any, g: Tensor, vector: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """The new v."""
        new = corrected_weight(float(cast(Tensor, self.gradients)), plan.rule.beta2)
        return torch.addcmul((1 - new) * vector(self.held[1]), g, g, value=new)

    def store(self, plan: Any, g: Tensor, d: Tensor) -> None:
        """Store the new averages."""
        if self.held:
            spread(d.reshape(-1).to(self.held[0][0].dtype), self.held[0])
        if len(self.held) > 1:
            dtype = self.held[1][0].dtype
            spread(self._squares(plan, g.reshape(-1).to(dtype), join), self.held[1])


def bundles(columns: Sequence[Sequence[Tensor]], size: int) -> Iterator[list[list[Tensor]]]:
    """Lists of tensors, cut in the same way: parts of long tensors, short tensors together, at most `size` entries."""
    found: list[tuple[Tensor, ...]] = []
    room = size
    for tensors in zip(*columns, strict=True):
        length = tensors[0].numel()
        if found and (length > room or any([t.dtype != f.dtype for t, f in zip(tensors, found[0], strict=True)])):
            yield list(map(list, zip(*found, strict=True)))
            found, room = [], size
        if length > size:
            yield from ([[part] for part in parts] for parts in _cut(tensors, size))
        elif length:
            found.append(tensors)
            room -= length
    if found:
        yield list(map(list, zip(*found, strict=True)))


def _cut(tensors: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of long tensors, cut in the same way into parts of at most `size` entries."""
    x = tensors[0]
    if all([t.is_contiguous() for t in tensors]):
        yield from zip(*(t.view(-1).split(size) for t in tensors), strict=True)
        return
    # As a vector, this tensor may be a copy, and a write to a copy is lost.
    dim = max(range(x.dim()), key=x.shape.__getitem__)
    length = max(1, size * x.shape[dim] // x.numel())
    for parts in zip(*(t.split(length, dim) for t in tensors), strict=True):
        if parts[0].numel() > size:
            yield from _cut(parts, size)
        else:
            yield parts
