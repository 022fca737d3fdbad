"""The parts of a step by the structure of regularisers: here lines and rows, whose sums are enough.

A part sums up one block of parameters, computes h and h' at several u from those sums or by further passes, and returns
the move for a u. Everything that is linear in the slopes d is divided by a common scale (see `model`).

With the matched cap, the same is computed along another curve, where step and prox have one step size s w; the cap of
the block is then its share w, and the move that of a cap s w with u = 1. In Adam's metric each entry has a step size of
its own. Only decoupled weight decay is then a line, and the norms of rows are not enough.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from numbers import Real
from typing import Any, NamedTuple, Self, cast

import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.model import RowSums, row_factors, row_heights, row_ray_heights
from proxsps.core.step import prox_coefficients
from proxsps.jax.groups import TreeBlock, is_nothing
from proxsps.jax.passes import add_up, dot, gathered, joined, spread
from proxsps.regularizers.structure import Rows, Scalar


class Sums(NamedTuple):
    """Reductions over one block, with slopes divided by the scale."""

    d_sq: Array
    d_dot_x: Array  # <d, x - center>
    products_sq: Array  # the square of the rounding error of h, over eps^2
    rows: RowSums | None = None


class Part(ABC):
    """One block. `dtype` is that of the numbers of the step."""

    def __init__(self, block: TreeBlock, dtype: Any) -> None:
        self.block, self.dtype = block, dtype

    @abstractmethod
    def sums(self, factor: Array | None) -> Sums:
        """The sums with slopes times a factor; None for slopes as they are."""

    @abstractmethod
    def moves(self, u: Array) -> list[Array]:
        """x+ - x of each tensor."""

    def capped(self, alpha: Array) -> Self:
        """The same part with another cap."""
        out = copy(self)
        out.block = self.block._replace(alpha=alpha)
        return out


class Curve(Part):
    """A block whose prox is not affine."""

    @abstractmethod
    def heights(self, own: Sums, scale: Array, u: Array) -> tuple[Array, Array]:
        """sum <d, y(u) - x> and its derivative at points u, both over the scale; NaN for one that is not known."""

    @abstractmethod
    def ray_heights(self, own: Sums, scale: Array, s: Array) -> tuple[Array, Array]:
        """sum <d, x+(s) - x> and its derivative at points s of the matched cap, both over the scale."""


class LinePart(Part):
    """A block with an affine prox: none, the squared l2 norm, or no tensors at all."""

    def sums(self, factor: Array | None) -> Sums:
        """Two inner products."""
        columns: Any = (self.block.offsets, self.block.ds, self.block.directions(self.block.ds))
        xs, es, directions = columns
        if factor is not None:
            es, directions = times(factor, es), times(factor, directions)
            # Rarely used. Short tensors are joined: two sums for each of hundreds would take long to compile.
            xs, es, directions = zip(*joined(xs, es, directions), strict=True) if xs else (xs, es, directions)
        return Sums(dot(es, directions, self.dtype), dot(es, xs, self.dtype), jnp.zeros((), self.dtype))

    def moves(self, u: Array) -> list[Array]:
        """Without cancellation: as keep = 1 - pull, x+ - x is move d - pull (x - center)."""
        block = self.block
        _, move, pull = prox_coefficients(u, block.alpha, block.lam)
        moves = [like(move, d) * d for d in block.directions(block.ds)]
        if is_nothing(block.lam):
            return moves
        return [m - like(pull, x) * x for m, x in zip(moves, block.offsets, strict=True)]


class RowsPart(Curve):
    """A block whose regulariser depends on the norms of rows: one pass, then a few numbers per row."""

    def __init__(self, block: TreeBlock, dtype: Any, structures: Sequence[Rows]) -> None:
        super().__init__(block, dtype)
        self._structures = structures

    def sums(self, factor: Array | None) -> Sums:
        """Three sums per row."""
        found = []
        for x, d, own in self._tensors():
            e = d if factor is None else like(factor, d) * d
            found.append([gathered(part).astype(self.dtype) for part in add_up([x * x, e * x, e * e], own.dims)])
        rows = RowSums(*(jnp.concatenate(parts) for parts in zip(*found, strict=True)))
        if self.block.phi.joint:
            rows = RowSums(*(jnp.sum(part, keepdims=True) for part in rows))
        return Sums(jnp.sum(rows.d_sq), jnp.sum(rows.d_dot_x), jnp.sum(rows.d_dot_x**2), rows)

    def _tensors(self) -> Iterator[tuple[Array, Array, Rows]]:
        return zip(self.block.xs, self.block.ds, self._structures, strict=True)

    def heights(self, own: Sums, scale: Array, u: Array) -> tuple[Array, Array]:
        """From the sums alone. Slopes are divided by the scale, so caps are multiplied and weights divided by it."""
        return row_heights(_rows(own), self._scaled_psi(scale), self.block.alpha * scale, u)

    def ray_heights(self, own: Sums, scale: Array, s: Array) -> tuple[Array, Array]:
        """From the sums alone, scaled as `heights`."""
        return row_ray_heights(_rows(own), self._scaled_psi(scale), self.block.alpha * scale, s)

    def _scaled_psi(self, scale: Array) -> Scalar:
        psi = self._psi()
        l1, l2 = (part if is_nothing(part) else part / scale for part in psi[:2])
        return psi._replace(l1=l1, l2=l2)

    def _psi(self) -> Scalar:
        """The function of the norm, with one constant for each row where they differ."""
        if self.block.phi.joint:
            return resting(settled(self._structures[0].psi, self.dtype), self.block.alpha)
        counts = [_row_count(x, own) for x, _, own in self._tensors()]
        psis = [settled(own.psi, self.dtype) for own in self._structures]
        psi = Scalar(*(spread(values, counts, self.dtype) for values in zip(*psis, strict=True)))
        return resting(psi, self.block.alpha)

    def moves(self, u: Array) -> list[Array]:
        """Each row times its factor, from the norm of the row itself: differences of sums may cancel."""
        alpha = self.block.alpha
        zs = [x - like(u * alpha, x) * d for x, d in zip(self.block.xs, self.block.ds, strict=True)]
        squares = [jnp.sum(z * z, axis=own.dims, keepdims=True) for z, own in zip(zs, self._structures, strict=True)]
        if self.block.phi.joint:
            total = sum(square.astype(self.dtype).reshape(()) for square in squares)
            squares = [like(total, z) for z in zs]
        out = []
        for x, z, square, own in zip(self.block.xs, zs, squares, self._structures, strict=True):
            cap = like(alpha, x)
            c = row_factors(resting(settled(own.psi, x.dtype), cap), jnp.sqrt(square), cap)
            out.append(c * z - x)
        return out


def settled(psi: Scalar, dtype: Any) -> Scalar:
    """The function with constants that do not promote arrays of this dtype."""
    return Scalar(*(float(part) if isinstance(part, Real) else jnp.asarray(part, dtype) for part in psi))


def resting(psi: Scalar, alpha: Array) -> Scalar:
    """The function without its bounds where the cap is 0, so that rows outside of them stay where they are."""
    if not psi.bounded:
        return psi
    moves = alpha > 0
    return psi._replace(lower=jnp.where(moves, psi.lower, -jnp.inf), upper=jnp.where(moves, psi.upper, jnp.inf))


def times(factor: Array | None, arrays: Sequence[Array]) -> Sequence[Array]:
    """Arrays times a number, or as they are."""
    return arrays if factor is None else [like(factor, x) * x for x in arrays]


def over(x: Array, metric: Array | None) -> Array:
    """D^-1 x."""
    return x if metric is None else x / metric


def like(number: Any, x: Array) -> Array:
    """A number in the dtype of the array it multiplies."""
    return jnp.asarray(number, x.dtype)


def positive(number: Array) -> Array:
    """The number, or 1 where it is 0."""
    return jnp.where(number > 0, number, jnp.ones_like(number))


def _rows(own: Sums) -> RowSums:
    """The sums of rows, which those of a `RowsPart` have."""
    return cast(RowSums, own.rows)


def _row_count(x: Array, own: Rows) -> int:
    normed = range(x.ndim) if own.dims is None else [dim % x.ndim for dim in own.dims]
    return math.prod(n for dim, n in enumerate(x.shape) if dim not in normed)
