"""Blocks with only a prox: it is called on whole tensors, and on tensors of one shape together if that is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.device.searched import Searched, masked, relaxed, stepping
from proxsps.optim.lists import widened
from proxsps.optim.vectors.proxes import Pile, piles


class Gathered(NamedTuple):
    """The tensors of a pile as one, in at least f32."""

    pile: Pile
    x: Tensor
    d: Tensor
    e: Tensor  # D^-1 d; d itself in the identity metric
    metric: Tensor | None = None  # D

    def shrunk(self, scale: Tensor) -> Gathered:
        """The same with slopes over a common norm."""
        d = self.d / scale
        return self._replace(d=d, e=d if self.e is self.d else self.e / scale)


def _gathered(block: Block, pile: Pile) -> Gathered:
    columns = [block.params, block.slopes, *([block.along, block.metrics] if block.in_metric else [])]
    x, d, *metric = (pile.gather([widened(tensors[i]) for i in pile.members]) for tensors in columns)
    return Gathered(pile, x, d, *(metric or [d]))


class SearchedProxes(Searched):
    """Any regulariser, by its prox."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int]) -> None:
        super().__init__(numbers, blocks, places)
        self._parts = [_gathered(block, pile) for i, block in enumerate(blocks) for pile in piles(block, i)]

    def sums(self, points: bool) -> Array:
        """Inner products of whole tensors; slopes are divided by their common norm from then on."""
        norms = [torch.linalg.vector_norm(own.d, dtype=self.numbers.dtype) for own in self._parts]
        self._scale = scale = scale_of(torch.linalg.vector_norm(torch.stack(norms)))
        self._parts = [own.shrunk(scale) for own in self._parts]
        columns = []
        for i in range(len(self.blocks)):
            parts = [own for own in self._parts if own.pile.block == i]
            square = self.numbers.total([self._dot(own.d, own.e) for own in parts])
            product = self.numbers.total([self._dot(own.d, own.x) for own in parts])
            columns += [scale**2 * square, scale * product, self.numbers.scalar(0.0)]
        return torch.stack(columns).reshape(-1, 3).T

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.to(self.numbers.dtype) * right).sum()

    def heights(self, u: Array) -> Array:
        """Every point takes one prox of all tensors."""
        found = []
        for i in range(len(u)):
            parts = [self._dot(own.d, y - own.x) for own, y in zip(self._parts, self._at(u[i]), strict=True)]
            found.append(self._scale * self.numbers.total(parts))
        return self.numbers.vector(found)

    def _at(self, u: Array) -> list[Tensor]:
        """y(u) of each pile; x itself where the cap is 0."""
        found = []
        for own in self._parts:
            alpha = self.cap(own.pile.block)
            step = stepping(alpha) if own.metric is None else stepping(alpha) / own.metric
            y = own.pile.prox(own.x - u * alpha * self._scale * own.e, step)
            found.append(torch.where(alpha == 0, own.x, y) if isinstance(alpha, Tensor) else y)
        return found

    def move_sq(self, u: Array) -> Array:
        """From y(u)."""
        moves = [y - own.x for own, y in zip(self._parts, self._at(u), strict=True)]
        return self.numbers.total([self._dot(move, move) for move in moves])

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- y(u), or part of the way."""
        for own, y in zip(self._parts, self._at(u), strict=True):
            block = self.blocks[own.pile.block]
            xs = [block.params[i] for i in own.pile.members]
            y = masked(relaxed(own.x, y, s), own.x, ok, self.cap(own.pile.block))
            torch._foreach_copy_(xs, own.pile.split(y, xs))
