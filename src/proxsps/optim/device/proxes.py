"""Blocks with only a prox: it is called on whole tensors, and on tensors of one shape together if that is allowed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.device.part import Searched, masked, relaxed, stepping
from proxsps.optim.lists import widened
from proxsps.regularizers import Regularizer
from proxsps.regularizers.base import flatten, unflatten


class Pile(NamedTuple):
    """Tensors of a block to which the prox is applied in one call, in at least f32."""

    block: int
    phi: Regularizer
    params: list[Tensor]
    x: Tensor  # one tensor; several stacked; or the entries of several joined as one vector
    d: Tensor
    e: Tensor  # D^-1 d; d itself in the identity metric
    metric: Tensor | None = None  # D
    stacked: bool = False
    joined: bool = False

    def shrunk(self, scale: Tensor) -> Pile:
        """The same with slopes over a common norm."""
        d = self.d / scale
        return self._replace(d=d, e=d if self.e is self.d else self.e / scale)

    def prox(self, z: Tensor, alpha: Tensor | float) -> Tensor:
        """The prox of each tensor; in the metric, if there is one."""
        prox: Callable[..., Array] = self.phi.prox
        if self.metric is not None:
            y: Tensor = self.phi.prox_diagonal(z, alpha / self.metric)
        else:
            y = torch.func.vmap(prox, in_dims=(0, None))(z, alpha) if self.stacked else prox(z, alpha)
        return y

    def tensors(self, y: Tensor) -> list[Tensor]:
        """The points of the parameters."""
        if self.stacked:
            return list(y.unbind())
        return unflatten(y, self.params) if self.joined else [y]


def piles(block: Block, place: int) -> Iterator[Pile]:
    """The piles of a block: a joint prox takes all tensors, others take what is alike."""
    phi, found = block.phi, defaultdict(list)
    for i, x in enumerate(block.params):
        key: object = i
        if phi.joint:
            key = None
        elif phi.at(block.indices[i]) is not phi:
            pass
        elif block.in_metric:  # all tensors of one dtype as one vector, if each entry is independent
            key = x.dtype if phi.separable else i
        elif getattr(phi, "batches", False):
            key = x.shape, x.dtype, block.slopes[i].dtype
        found[key].append(i)
    for members in found.values():
        several = len(members) > 1
        joined = phi.joint or (several and block.in_metric)
        own = phi if phi.joint else phi.at(block.indices[members[0]])

        def pile(tensors: Sequence[Tensor], members: Sequence[int] = members, joined: bool = joined) -> Tensor:
            chosen = [tensors[i] for i in members]
            if joined:
                return flatten(list(map(widened, chosen)))
            return widened(torch.stack(chosen) if len(chosen) > 1 else chosen[0])

        d = pile(block.slopes)
        metric = (pile(block.along), pile(block.metrics)) if block.in_metric else (d,)
        xs = [block.params[i] for i in members]
        yield Pile(place, own, xs, pile(block.params), d, *metric, stacked=several and not joined, joined=joined)


class SearchedProxes(Searched):
    """Any regulariser, by its prox."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int]) -> None:
        super().__init__(numbers, blocks, places)
        self._piles = [pile for i, block in enumerate(blocks) for pile in piles(block, i)]

    def sums(self, points: bool) -> Array:
        """Inner products of whole tensors; slopes are divided by their common norm from then on."""
        norms = [torch.linalg.vector_norm(pile.d, dtype=self.numbers.dtype) for pile in self._piles]
        self._scale = scale = scale_of(torch.linalg.vector_norm(torch.stack(norms)))
        self._piles = [pile.shrunk(scale) for pile in self._piles]
        columns = []
        for i in range(len(self.blocks)):
            own = [pile for pile in self._piles if pile.block == i]
            square = self.numbers.total([self._dot(pile.d, pile.e) for pile in own])
            product = self.numbers.total([self._dot(pile.d, pile.x) for pile in own])
            columns += [scale**2 * square, scale * product, self.numbers.scalar(0.0)]
        return torch.stack(columns).reshape(-1, 3).T

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        return (left.to(self.numbers.dtype) * right).sum()

    def heights(self, u: Array) -> Array:
        """Every point takes one prox of all tensors."""
        found = []
        for i in range(len(u)):
            parts = [self._dot(pile.d, y - pile.x) for pile, y in zip(self._piles, self._at(u[i]), strict=True)]
            found.append(self._scale * self.numbers.total(parts))
        return self.numbers.vector(found)

    def _at(self, u: Array) -> list[Tensor]:
        """y(u) of each pile; x itself where the cap is 0."""
        found = []
        for pile in self._piles:
            alpha = self.cap(pile.block)
            y = pile.prox(pile.x - u * alpha * self._scale * pile.e, stepping(alpha))
            found.append(torch.where(alpha == 0, pile.x, y) if isinstance(alpha, Tensor) else y)
        return found

    def move_sq(self, u: Array) -> Array:
        """From y(u)."""
        moves = [y - pile.x for pile, y in zip(self._piles, self._at(u), strict=True)]
        return self.numbers.total([self._dot(move, move) for move in moves])

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- y(u), or part of the way."""
        for pile, y in zip(self._piles, self._at(u), strict=True):
            y = masked(relaxed(pile.x, y, s), pile.x, ok, self.cap(pile.block))
            torch._foreach_copy_(pile.params, pile.tensors(y))
