"""The first part of a step: from loss value and gradients to the value m and the slopes d of a linear model.

An estimate owns whatever state it averages over. It prepares that state before the step and commits it only if the step
is taken, so that a step that is skipped leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import coupled_value
from proxsps.optim.blocks import Block
from proxsps.optim.numbers import Numbers
from proxsps.optim.parts import Sums
from proxsps.optim.passes import widened
from proxsps.regularizers import Zero
from proxsps.regularizers.base import subgradient_all, value_all


class Estimate:
    """The loss and its gradient as they are."""

    coupled = False  # whether the squared l2 norm is part of the slope; the passes add it while they read

    def prepare(self, blocks: Sequence[Block], numbers: Numbers) -> Array:
        """Set the slopes of the blocks; what has to be added to the loss on this rank."""
        return numbers.scalar(0.0)

    def value(self, m: Array, addition: Array, sums: Sums, lam: Array) -> Array:
        """The value of the model at x, from the loss and sums over all ranks."""
        return m

    def commit(self, ok: Array) -> None:
        """Keep what was prepared where the step was taken."""


class Coupled(Estimate):
    """Loss and regulariser together, with the gradient of both."""

    coupled = True

    def prepare(self, blocks: Sequence[Block], numbers: Numbers) -> Array:
        """Add subgradients of regularisers other than the squared l2 norm; the sum of their values."""
        penalties: list[Tensor] = []
        for block in blocks:
            if not block.params or block.quadratic:
                continue
            xs = [widened(x) for x in block.params]
            penalties.append(block.share * value_all(block.phi, xs, block.indices))
            slopes = subgradient_all(block.phi, xs, block.indices)
            block.slopes = [widened(g) + s for g, s in zip(block.slopes, slopes, strict=True)]
            block.phi = Zero()
        return numbers.total(penalties)

    def value(self, m: Array, addition: Array, sums: Sums, lam: Array) -> Array:
        """The regularised loss."""
        return coupled_value(m + addition, sums.x_sq, lam)
