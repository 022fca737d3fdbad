"""Averages of gradients as the slopes of a step, and Adam's metric from averages of their squares.

A block that takes part in such a step has a record of them, `Moments`: the gradients, the averages before the step and
the weights to update them with. Nothing is calculated when the record is made, so that a part of the step may choose:

- `Moments.make` calculates the new averages, and with them slopes, directions and metric of the block, as tensors. It
  is what parts without a way of their own get (`Assembly` calls it), and all that `Lines`, curves and kernels for plain
  slopes need. The new averages replace the old ones when the step is accepted (`Moments.keep`).
- A part that updates averages while it sums does not call it. It reads the record, answers `Part.extras` itself, and
  writes new averages into the tensors of the record (`averages`, `squares`) in its write pass, where the step is
  accepted. `Moments.keep` then has nothing to do. `make_lines` is where such a part is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import Weights
from proxsps.optim.passes import COPIES, bucketed, widened

if TYPE_CHECKING:
    from proxsps.optim.blocks import Block
    from proxsps.optim.numbers import Numbers

Store = Callable[[int, str, Tensor], None]  # (place in the block, key of the state, new tensor)

ROWS = 5  # sums of a block that are not sums of slopes: see `Moments.extras`


@dataclass
class Moments:
    """What a step needs of the averages of one block; lists have one entry per tensor, as `Block.params` has.

    Tensors are real views of complex ones, and have single precision at least.
    """

    grads: list[Tensor]  # g; zeros for a parameter without a gradient
    averages: list[Tensor]  # d before the step
    weights: Weights  # with which d takes in g
    squares: list[Tensor] | None = None  # v before the step; None in the identity metric
    square_weights: Sequence[Weights] = ()  # with which v takes in g^2: each tensor has its own count
    eps: float = 0.0
    slopes: list[Tensor] = field(default_factory=list)  # d after the step
    new_squares: list[Tensor] = field(default_factory=list)
    metrics: list[Tensor] = field(default_factory=list)  # D = sqrt(v) + eps
    made: bool = False

    def make(self, block: Block) -> None:
        """Calculate the new averages, and give the block its slopes, directions and metric."""
        if self.made:
            return
        self.made = True
        grads, (old, new) = list(map(widened, self.grads)), self.weights
        if grads:
            self.slopes = torch._foreach_mul(self.averages, old)
            torch._foreach_add_(self.slopes, grads, alpha=new)
        block.slopes = self.slopes
        if self.squares is None:
            return
        if grads:
            olds, news = (list(column) for column in zip(*self.square_weights, strict=True))
            self.new_squares = torch._foreach_mul(self.squares, olds)
            torch._foreach_addcmul_(self.new_squares, grads, grads, news)
            self.metrics = metrics(self.new_squares, self.eps)
        block.directions = torch._foreach_div(self.slopes, self.metrics) if grads else []
        block.metrics = self.metrics

    def extras(self, numbers: Numbers, block: Block, moves: bool) -> list[Array]:
        """<g, x>, ||D^-1 g||^2, <d, center>, and for `moves` in a metric ||D^-1 d||^2 and <D^-1 d, x>.

        The third completes <d, x>, of which sums of blocks with a centre have <d, x - center>.
        """
        columns = [block.params, self.grads]
        if self.squares is not None:
            columns += [self.metrics, block.directions if moves else self.metrics]
        sums = self._sums(numbers, columns, moves, exact=False)
        if not all(number == 0 or 1e-20 < abs(number) < 1e30 for number in sums):  # beyond the range of f32
            sums = self._sums(numbers, columns, moves, exact=True)
        if block.quadratic and block.centered:
            sums[2] = numbers.total([(d * c).sum() for d, c in zip(self.slopes, block.centers, strict=True)])
        return sums

    def _sums(self, numbers: Numbers, columns: Sequence[Sequence[Tensor]], moves: bool, exact: bool) -> list[Array]:
        found: list[list[Tensor]] = [[] for _ in range(ROWS)]
        for vectors in bucketed(zip(*columns, strict=True), *COPIES):
            x, g, *rest = map(Tensor.double, vectors) if exact else vectors
            found[0].append(torch.dot(g, x))
            q = g / rest[0] if rest else g
            found[1].append(torch.dot(q, q))
            if rest and moves:
                found[3].append(torch.dot(rest[1], rest[1]))
                found[4].append(torch.dot(rest[1], x))
        return [numbers.total(parts) for parts in found]

    def keep(self, store: Store) -> None:
        """Hand over the new averages; nothing where a part has written them already."""
        if not self.made:
            return
        for i, d in enumerate(self.slopes):
            store(i, "average", d)
        for i, v in enumerate(self.new_squares):
            store(i, "square", v)


def metrics(squares: Sequence[Tensor], eps: float) -> list[Tensor]:
    """D = sqrt(v) + eps of each tensor; without eps, entries without any gradient get one that can be divided by."""
    found = torch._foreach_sqrt(squares)
    if eps:
        torch._foreach_add_(found, eps)
    else:
        for D in found:
            D.clamp_min_(torch.finfo(D.dtype).tiny ** 0.5)
    return found
