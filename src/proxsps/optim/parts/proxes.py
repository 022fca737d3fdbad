"""Blocks with only a prox: it is called on whole tensors, and on tensors of one shape together if that is allowed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block, plain, stored
from proxsps.optim.numbers import Device, Numbers
from proxsps.optim.parts.base import Curve, masked, relaxed, stepping
from proxsps.optim.passes import dots, flat, scale_of, widened
from proxsps.optim.refine import POINTS
from proxsps.regularizers import Regularizer
from proxsps.regularizers._support import reading_numbers
from proxsps.regularizers.base import flatten, unflatten


class Pile(NamedTuple):
    """Tensors of a block to which the prox is applied in one call, in at least f32."""

    block: int
    phi: Regularizer
    params: list[Tensor]
    x: Tensor  # one tensor; several stacked; or the entries of several joined as one vector
    d: Tensor
    stacked: bool
    e: Tensor  # D^-1 d; d itself in the identity metric
    metric: Tensor | None = None  # D
    joined: bool = False

    def prox(self, z: Tensor, alpha: Tensor | float) -> Tensor:
        """The prox of each tensor; in the metric, if there is one."""
        if self.metric is not None:
            y: Tensor = self.phi.prox_diagonal(z, alpha / self.metric)
        else:
            y = _each(self.phi.prox, self.stacked, z, alpha)
        return y

    def tangent(self, z: Tensor, y: Tensor, alpha: Tensor | float) -> Tensor | None:
        """Its derivative along e, or None if that is not cheap."""
        if self.metric is not None:
            return self.phi.prox_jvp(z, y, self.e, alpha / self.metric) if self.phi.separable else None
        if self.stacked and type(self.phi).prox_jvp is Regularizer.prox_jvp:
            return None
        tangent: Tensor | None = _each(self.phi.prox_jvp, self.stacked, z, y, self.d, alpha)
        return tangent

    def tensors(self, y: Tensor) -> list[Tensor]:
        """The points of the parameters."""
        if self.stacked:
            return list(y.unbind())
        return unflatten(y, self.params) if self.joined else [y]


def _each(formula: Callable[..., Array], stacked: bool, *args: Tensor | float) -> Array:
    if not stacked:
        return formula(*args)
    return torch.func.vmap(formula, in_dims=(*[0] * (len(args) - 1), None))(*args)


def piles(block: Block, place: int, wide: Callable[[Tensor], Tensor]) -> Iterator[Pile]:
    """The piles of a block."""
    phi, params, slopes = block.phi, block.params, block.slopes
    if block.in_metric:
        yield from _metric_piles(block, place, wide)
        return
    if phi.joint:
        x, d = (flatten([wide(t) for t in ts]) for ts in (params, slopes))
        yield Pile(place, phi, params, x, d, False, d, joined=True)
        return
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, x in enumerate(params):
        own = phi.at(block.indices[i])
        found[(x.shape, x.dtype, slopes[i].dtype) if getattr(phi, "batches", False) and own is phi else (i,)].append(i)
    for members in found.values():
        xs, ds = ([tensors[i] for i in members] for tensors in (params, slopes))
        stacked = len(members) > 1
        x, d = (wide(torch.stack(ts) if stacked else ts[0]) for ts in (xs, ds))
        yield Pile(place, phi.at(block.indices[members[0]]), xs, x, d, stacked, d)


def _metric_piles(block: Block, place: int, wide: Callable[[Tensor], Tensor]) -> Iterator[Pile]:
    """The piles of a block in a metric: all tensors of one dtype as one vector if each entry is independent."""
    phi, parts = block.phi, (block.params, block.slopes, block.along, block.metrics)
    own = [phi if phi.joint else phi.at(i) for i in block.indices]
    found: dict[object, list[int]] = defaultdict(list)
    for i, x in enumerate(block.params):
        found[0 if phi.joint else x.dtype if phi.separable and own[i] is phi else i].append(i)
    for members in found.values():
        xs = [block.params[i] for i in members]
        joined = len(members) > 1 or phi.joint
        columns = [[wide(tensors[i]) for i in members] for tensors in parts]
        x, d, e, metric = (flatten(column) if joined else column[0] for column in columns)
        yield Pile(place, own[members[0]], xs, x, d, False, e, metric, joined)


class Proxes(Curve):
    """Any regulariser, by its prox."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], exact: bool = False) -> None:
        super().__init__(numbers, blocks, places)
        self._device = isinstance(numbers, Device)
        if self._device:
            self.points = POINTS
        tensors = [x for block in blocks for x in block.params]
        self._reads = not self._device and plain(tensors) and stored(tensors)
        wide = torch.Tensor.double if exact else widened
        self._piles = [pile for i, block in enumerate(blocks) for pile in piles(block, i, wide)]
        self._scale: Array | float = 1.0
        # The point of the last evaluation, None before the first; and y there.
        self._last: tuple[tuple[Array, Array | float] | None, list[Tensor]] = (None, [])

    def sums(self, points: bool) -> Array:
        """Inner products of whole tensors; on a device, slopes are divided by their common norm from then on."""
        if self._device:
            norms = [torch.linalg.vector_norm(pile.d, dtype=self.numbers.dtype) for pile in self._piles]
            self._scale = scale_of(torch.linalg.vector_norm(torch.stack(norms)))
            self._piles = [self._shrunk(pile) for pile in self._piles]
        scale, columns = self._scale, []
        for i in range(len(self.blocks)):
            own = [pile for pile in self._piles if pile.block == i]
            square = self.numbers.total([part for pile in own for part in self._dots(pile.d, pile.e)])
            product = self.numbers.total([part for pile in own for part in self._dots(pile.d, pile.x)])
            columns += [scale**2 * square, scale * product, self.numbers.scalar(0.0)]
        if self._device:
            return torch.stack(columns).reshape(-1, 3).T
        return np.array(columns).reshape(-1, 3).T

    def _shrunk(self, pile: Pile) -> Pile:
        d = pile.d / self._scale
        return pile._replace(d=d, e=d if pile.e is pile.d else pile.e / self._scale)

    def _dots(self, left: Tensor, right: Tensor) -> list[Tensor]:
        if self._device:
            return [(left.to(self.numbers.dtype) * right).sum()]
        return dots(flat(left), flat(right))

    def _heights(self, u: Array) -> tuple[Array, Array | None]:
        found = [self._height(u[i]) for i in range(len(u))]
        h, slope = zip(*found, strict=True)
        return self.numbers.vector(h), None if self._device else self.numbers.vector(slope)

    def _height(self, u: Array) -> tuple[Array, Array | float]:
        heights, bend, points = [], 0.0, []
        for pile in self._piles:
            alpha = self.cap(pile.block)
            z, y = self._along(pile, u, alpha)
            heights += self._dots(pile.d, y - pile.x)
            if not self._device:
                tangent = pile.tangent(z, y, stepping(alpha))
                bend += alpha * (math.nan if tangent is None else self.numbers.total(self._dots(pile.d, tangent)))
            points.append(y)
        self._last = ((u, self.reach), points)
        return self._scale * self.numbers.total(heights), -bend

    def _along(self, pile: Pile, u: Array, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
        """x - tau d and its prox; x itself where alpha = 0."""
        z = pile.x - self.numbers.factor(u * alpha * self._scale) * pile.e
        with reading_numbers() if self._reads else nullcontext():
            y = pile.prox(z, stepping(alpha))
        return z, torch.where(alpha == 0, pile.x, y) if isinstance(alpha, Tensor) else y

    def _at(self, u: Array) -> list[Tensor]:
        """y(u); from the last evaluation if that was at u."""
        if self._device or self._last[0] != (u, self.reach):
            self._height(u)
        return self._last[1]

    def products_sq(self) -> Array:
        """From all entries; a device stops after a fixed number of rounds, and does not need them."""
        if self._device:
            return self.numbers.scalar(0.0)
        products = [pile.x * pile.d for pile in self._piles]
        return self.numbers.total([part for product in products for part in self._dots(product, product)])

    def moves_sq(self, u: Array) -> Array:
        """From y(u)."""
        moves = [y - pile.x for pile, y in zip(self._piles, self._at(u), strict=True)]
        return self.numbers.total([part for move in moves for part in self._dots(move, move)])

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- y(u), or part of the way."""
        if self.numbers.refuses(ok):
            return
        for pile, y in zip(self._piles, self._at(u), strict=True):
            y = relaxed(pile.x, y, s)
            if self._device:
                y = masked(y, pile.x, ok, self.cap(pile.block))
            torch._foreach_copy_(pile.params, pile.tensors(y))
