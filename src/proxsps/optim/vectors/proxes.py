"""Blocks with only a prox: it is called on whole tensors, and on tensors of one shape together if that is allowed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block, plain, stored
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.vectors.searched import Floats, Part, SearchedParts, moved, part_of, stepping
from proxsps.regularizers import Regularizer
from proxsps.regularizers._support import reading_numbers
from proxsps.regularizers.base import flatten, unflatten


class Pile(NamedTuple):
    """Tensors of a block to which any prox is applied in one call."""

    block: int
    phi: Regularizer
    members: list[int]  # their positions in the block
    in_metric: bool
    stacked: bool  # tensors of one shape on a first axis
    joined: bool  # the entries of all tensors as one vector

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors as one."""
        if self.joined:
            vector: Tensor = flatten(list(tensors))
            return vector
        return torch.stack(list(tensors)) if self.stacked else tensors[0]

    def split(self, y: Tensor, like: list[Tensor]) -> list[Tensor]:
        """The inverse of `gather`."""
        if self.joined:
            return unflatten(y, like)
        return list(y.unbind()) if self.stacked else [y]

    def prox(self, z: Tensor, step: Tensor | float) -> Tensor:
        """The prox of each tensor, with one step size, or in a metric with one for each entry."""
        y: Tensor = self.phi.prox_diagonal(z, step) if self.in_metric else self._each(self.phi.prox, z, step)
        return y

    def tangent(self, z: Tensor, y: Tensor, p: Tensor, step: Tensor | float) -> Tensor | None:
        """The derivative of the prox along p, or None if it is not cheap."""
        if self.in_metric:
            return self.phi.prox_jvp(z, y, p, step) if self.phi.separable else None
        if self.stacked and type(self.phi).prox_jvp is Regularizer.prox_jvp:
            return None
        found: Tensor | None = self._each(self.phi.prox_jvp, z, y, p, step)
        return found

    def _each(self, formula: Callable[..., Array], *args: Tensor | float) -> Array:
        """A formula of one tensor and a last number, for one tensor or for each of a stack."""
        if not self.stacked:
            return formula(*args)
        return torch.func.vmap(formula, in_dims=(*[0] * (len(args) - 1), None))(*args)


def piles(block: Any, place: int) -> Iterator[Pile]:
    """The piles of a block: a joint prox takes all tensors, others take what is alike."""
    phi, params, slopes = block.phi, block.params, block.slopes
    everything = list(range(len(params)))
    if phi.joint:
        yield Pile(place, phi, everything, block.in_metric, False, True)
        return
    found: dict[object, list[int]] = defaultdict(list)
    for i, x in enumerate(params):
        own = phi.at(block.indices[i]) is phi
        together: object = i
        if block.in_metric and phi.separable and own:
            together = x.dtype
        elif not block.in_metric and getattr(phi, "batches", False) and own:
            together = (x.shape, x.dtype, slopes[i].dtype)
        found[together].append(i)
    for members in found.values():
        several, in_metric, own = len(members) > 1, block.in_metric, phi.at(block.indices[members[0]])
        yield Pile(place, own, members, in_metric, several and not in_metric, several and in_metric)


class Proxes(SearchedParts):
    """Any regulariser, by its prox."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], scaled: bool) -> None:
        super().__init__(numbers, blocks, scaled)
        self._piles = [pile for i, block in enumerate(blocks) for pile in piles(block, i)]
        self._count = len(self._piles)
        tensors = [x for block in blocks for x in block.params]
        self._reads = numbers.host and plain(tensors) and stored(tensors)
        self._last: dict[int, tuple[Any, Tensor]] = {}  # the last point on the host, and y there

    def _load(self, k: int) -> Part:
        pile = self._piles[k]
        block = self.blocks[pile.block]
        columns = [block.params, block.slopes, *([block.along, block.metrics] if block.in_metric else [])]
        return part_of(
            pile.block, *(pile.gather([self.numbers.entries(ts[i]) for i in pile.members]) for ts in columns)
        )

    def _prox(self, k: int, z: Tensor, cap: Any, part: Part) -> Tensor:
        y = self._piles[k].prox(z, part.sizes(stepping(cap)))
        return torch.where(cap == 0, z, y) if isinstance(cap, Tensor) else y

    def _at(self, k: int, part: Part, u: Array | float, reach: Array | float) -> Tensor:
        if not self.numbers.host:
            return super()._at(k, part, u, reach)
        point = u, reach, self.blocks[part.block].alpha
        if self._last.get(k, (None,))[0] != point:  # the write often takes the last point of the search
            with reading_numbers() if self._reads else nullcontext():
                self._last[k] = point, super()._at(k, part, u, reach)
        return self._last[k][1]

    def host_heights(self, u: Floats, reach: Floats, slopes: bool) -> tuple[list[float], list[float]]:
        """Heights at points, with derivatives where all proxes have them."""
        h, bends = [], []
        for point in zip(u, reach, strict=True):
            h.append(float(self._scale * self._height(*point)))
            bends.append(self._slope(*point) if slopes else math.nan)
        return h, bends

    def _slope(self, u: float, reach: float) -> float:
        total = 0.0
        for k, (pile, part) in enumerate(zip(self._piles, self._parts(), strict=True)):
            y = self._at(k, part, u, reach)
            cap = reach * float(self.blocks[part.block].alpha)
            tangent = pile.tangent(moved(part.x, part.e, u * (self._scale * -cap)), y, part.e, part.sizes(cap))
            total -= math.nan if tangent is None else cap * float(self._scale.square() * self._dot(part.d, tangent))
        return total

    def noise_sq(self) -> list[float]:
        """The sum of (d x)^2 over each block."""
        found = [0.0] * len(self.blocks)
        for part in self._parts():
            products = part.d * part.x
            found[part.block] += float(self._scale.square() * self._dot(products, products))
        return found

    def _store(self, k: int, y: Tensor) -> None:
        pile = self._piles[k]
        xs = [self.blocks[pile.block].params[i] for i in pile.members]
        torch._foreach_copy_(xs, pile.split(y, xs))
