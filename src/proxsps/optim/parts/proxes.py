"""Blocks of which only the prox is known: evaluated whole at one point after the other, tensors of one shape together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.numbers import Device, Numbers
from proxsps.optim.parts.base import Curve, relaxed, stepping
from proxsps.optim.passes import dots, flat, widened
from proxsps.regularizers.base import prox_all, prox_jvp_all


class Proxes(Curve):
    """Any regulariser, by its prox."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], exact: bool = False) -> None:
        super().__init__(numbers, blocks, places)
        self._device = isinstance(numbers, Device)
        self._exact = exact
        self._xs, self._ds = ([self._wide(part) for part in parts] for parts in _lists(blocks))
        self._scale: Array | float = 1.0
        self._last: tuple[Array, list[list[Tensor]]] | None = None

    def _wide(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x.double() if self._exact else widened(x) for x in tensors]

    def sums(self, points: bool) -> Array:
        """Inner products of whole tensors."""
        rows = []
        for xs, ds in zip(self._xs, self._ds, strict=True):
            rows.append([self._dot(ds, ds), self._dot(ds, xs), self._dot(xs, xs) if points else self.numbers.scalar(0)])
        if self._device:
            sums = torch.stack([torch.stack(row) for row in rows], dim=1)
            square = sums[0].sum()
            self._scale = torch.where(square > 0, square, torch.ones_like(square)).sqrt()
            self._ds = [[d / self._scale.to(d.dtype) for d in ds] for ds in self._ds]
            return sums
        return np.array(rows).T

    def _dot(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Array:
        pairs = zip(left, right, strict=True)
        if self._device:
            pairs = ((a.to(self.numbers.dtype), b.to(self.numbers.dtype)) for a, b in pairs)
        return self.numbers.total([part for a, b in pairs for part in dots(flat(a), flat(b))])

    def _heights(self, u: Array) -> tuple[Array, Array]:
        found = [self._height(u[i]) for i in range(len(u))]
        h, slope = (self.numbers.vector(part) for part in zip(*found, strict=True))
        return h, slope

    def _height(self, u: Array) -> tuple[Array, Array | float]:
        h = bend = self.numbers.scalar(0.0)
        points = []
        for block, xs, ds in zip(self.blocks, self._xs, self._ds, strict=True):
            tau = self.numbers.factor(u * block.alpha * self._scale)
            zs, ys = self._along(block, xs, ds, tau)
            h = h + self._dot(ds, [y - x for x, y in zip(xs, ys, strict=True)])
            tangents = prox_jvp_all(block.phi, zs, ys, ds, stepping(block.alpha), block.indices)
            bend = bend + block.alpha * (math.nan if tangents is None else self._dot(ds, tangents))
            points.append(ys)
        self._last = (u, points)
        return self._scale * h, -(self._scale**2) * bend

    def _along(
        self, block: Block, xs: Sequence[Tensor], ds: Sequence[Tensor], tau: Tensor | float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """x - tau d and its prox; x itself where alpha = 0."""
        zs = [x - tau * d for x, d in zip(xs, ds, strict=True)]
        ys = proxes(block, zs)
        if isinstance(block.alpha, Tensor):
            ys = [torch.where(block.alpha == 0, x, y) for x, y in zip(xs, ys, strict=True)]
        return zs, ys

    def _at(self, u: Array) -> list[list[Tensor]]:
        """y(u); that of the last evaluation where it was there."""
        if self._last is None or self._device or self._last[0] != u:
            self._height(u)
        return self._last[1]

    def products_sq(self) -> Array:
        """From all entries; a device stops by rounds, and does not need them."""
        if self._device:
            return self.numbers.scalar(0.0)
        pairs = [
            (x * d).ravel() for xs, ds in zip(self._xs, self._ds, strict=True) for x, d in zip(xs, ds, strict=True)
        ]
        return self._dot(pairs, pairs)

    def moves_sq(self, u: Array) -> Array:
        """From y(u)."""
        total = self.numbers.scalar(0.0)
        for xs, ys in zip(self._xs, self._at(u), strict=True):
            moves = [y - x for x, y in zip(xs, ys, strict=True)]
            total = total + self._dot(moves, moves)
        return total

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """x <- y(u), or part of the way."""
        if self.numbers.refuses(ok):
            return
        for block, xs, ys in zip(self.blocks, self._xs, self._at(u), strict=True):
            new = [relaxed(x, y, s) for x, y in zip(xs, ys, strict=True)]
            self.numbers.assign(block.params, new, ok)


def proxes(block: Block, zs: Sequence[Tensor]) -> list[Tensor]:
    """The prox of all tensors of a block; those of one shape in one call, where the regulariser can be batched."""
    phi, alpha = block.phi, stepping(block.alpha)
    if phi.joint or not getattr(phi, "batches", False):
        return prox_all(phi, zs, alpha, block.indices)
    shapes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, z in enumerate(zs):
        shapes[z.shape, z.dtype].append(i)
    out: list[Tensor] = list(zs)
    for members in shapes.values():
        if len(members) == 1:
            out[members[0]] = phi.prox(zs[members[0]], alpha)
            continue
        together = torch.func.vmap(phi.prox, in_dims=(0, None))(torch.stack([zs[i] for i in members]), alpha)
        for i, y in zip(members, together.unbind(), strict=True):
            out[i] = y
    return out


def _lists(blocks: Sequence[Block]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    return [block.params for block in blocks], [block.slopes for block in blocks]
