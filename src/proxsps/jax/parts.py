"""The parts of a step by what regularisers say of themselves: lines, rows, entries, and those with a prox alone.

A part sums up one block of parameters, computes h and h' at several u from those sums or by further passes, and gives
the move that a u leads to. Everything that is linear in the slopes d is taken over a common scale (see `model`).

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
from typing import Any, NamedTuple, Self

import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.model import RowSums, row_factors, row_heights, row_ray_heights
from proxsps.core.step import prox_coefficients
from proxsps.jax.groups import Block
from proxsps.jax.passes import add_up, dot, gathered, joined, spread
from proxsps.regularizers.base import flatten, prox_all, prox_jvp_all, unflatten
from proxsps.regularizers.structure import Entries, Prox, Quadratic, Rows, Scalar, Structure


class Sums(NamedTuple):
    """Reductions over one block, with slopes over the scale."""

    d_sq: Array
    d_dot_x: Array  # <d, x - center>
    products_sq: Array  # the square of how much h is rounded, over eps^2
    rows: RowSums | None = None


class Part(ABC):
    """One block. `dtype` is that of the numbers of the step."""

    def __init__(self, block: Block, dtype: Any) -> None:
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
        ds = times(factor, self.block.ds)
        directions = self.block.directions(ds)
        return Sums(dot(ds, directions, self.dtype), dot(ds, self.block.offsets, self.dtype), jnp.zeros((), self.dtype))

    def moves(self, u: Array) -> list[Array]:
        """Without cancellation: as keep = 1 - pull, x+ - x is move d - pull (x - center)."""
        block = self.block
        _, move, pull = prox_coefficients(u, block.alpha, block.lam)
        moves = [like(move, d) * d for d in block.directions(block.ds)]
        if _is_zero(block.lam):
            return moves
        return [m - like(pull, x) * x for m, x in zip(moves, block.offsets, strict=True)]


class RowsPart(Curve):
    """A block whose regulariser sees rows of entries by their norms: one pass, then a few numbers per row."""

    def __init__(self, block: Block, dtype: Any, structures: Sequence[Rows]) -> None:
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
        """From the sums alone. Slopes over the scale belong to caps times the scale, and weights over it."""
        return row_heights(own.rows, self._scaled_psi(scale), self.block.alpha * scale, u)

    def ray_heights(self, own: Sums, scale: Array, s: Array) -> tuple[Array, Array]:
        """From the sums alone, scaled as `heights`."""
        return row_ray_heights(own.rows, self._scaled_psi(scale), self.block.alpha * scale, s)

    def _scaled_psi(self, scale: Array) -> Scalar:
        psi = self._psi()
        l1, l2 = (part if _is_zero(part) else part / scale for part in psi[:2])
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


class Point(NamedTuple):
    """A point of a curve: the prox, with the step size `cap`, of x - `step` D^-1 d."""

    step: Array
    cap: Array


class Measured(Curve):
    """A block that is evaluated again for each point."""

    def heights(self, own: Sums, scale: Array, u: Array) -> tuple[Array, Array]:
        """h'(u) = -alpha <d, J D^-1 d>, with J the derivative of the prox."""
        alpha = self.block.alpha
        h, bend = self.measure(scale, [Point(u[i] * alpha, alpha) for i in range(u.shape[-1])], matched=False)
        return h, -alpha * scale * bend

    def ray_heights(self, own: Sums, scale: Array, s: Array) -> tuple[Array, Array]:
        """H'(s) = <d, J (x+ - x)> / s, as `proxsps.core.model` derives it."""
        taus = [s[i] * self.block.alpha for i in range(s.shape[-1])]
        h, bend = self.measure(scale, [Point(tau, tau) for tau in taus], matched=True)
        return h, bend / _positive(s)

    @abstractmethod
    def measure(self, scale: Array, points: Sequence[Point], matched: bool) -> tuple[Array, Array]:
        """<e, y - x> and <e, J v> at points, with e = d / scale; v is y - x for the matched cap, else D^-1 e."""


class EntriesPart(Measured):
    """A block whose regulariser acts on each entry: a pass for each round of the search."""

    def __init__(self, block: Block, dtype: Any, psi: Scalar | Prox) -> None:
        super().__init__(block, dtype)
        self._psi = psi
        self._tensors = joined(block.xs, block.ds, block.metric)

    def sums(self, factor: Array | None) -> Sums:
        """All of them in one pass."""
        found = []
        for x, d, metric in self._tensors:
            e = d if factor is None else like(factor, d) * d
            found.append(add_up([e * over(e, metric), e * x, (e * x) ** 2]))
        return Sums(*self._totals(found))

    def _totals(self, found: Sequence[Sequence[Array]]) -> list[Array]:
        return [jnp.sum(jnp.stack([part.astype(self.dtype) for part in parts])) for parts in zip(*found, strict=True)]

    def measure(self, scale: Array, points: Sequence[Point], matched: bool) -> tuple[Array, Array]:
        """One pass for all points."""
        found = []
        for x, d, metric in self._tensors:
            e = d * like(1 / scale, d)
            terms = []
            for point in points:
                z, y, cap = self._along(x, d, metric, point)
                tangent = self._psi_of(x).prox_jvp(z, y, y - x if matched else over(e, metric), _positive(cap))
                terms += [e * (y - x), jnp.full_like(e, math.nan) if tangent is None else e * tangent]
            found.append(add_up(terms))
        totals = self._totals(found)
        return jnp.stack(totals[::2]), jnp.stack(totals[1::2])

    def _psi_of(self, x: Array) -> Prox:
        return settled(self._psi, x.dtype) if isinstance(self._psi, Scalar) else self._psi

    def _along(self, x: Array, d: Array, metric: Array | None, point: Point) -> tuple[Array, Array, Array]:
        """z = x - step D^-1 d, its prox, and its step sizes; z itself where they are 0."""
        cap = over(like(point.cap, x), metric)
        z = x - like(point.step, x) * over(d, metric)
        return z, jnp.where(cap > 0, self._psi_of(x).prox(z, _positive(cap)), z), cap

    def moves(self, u: Array) -> list[Array]:
        """Tensor by tensor."""
        block, alpha = self.block, self.block.alpha
        point = Point(u * alpha, alpha)
        return [self._along(x, d, metric, point)[1] - x for x, d, metric in block.tensors]


class ProxPart(Measured):
    """A block with any other regulariser, by its prox."""

    def sums(self, factor: Array | None) -> Sums:
        """Three inner products."""
        xs, es = self.block.xs, times(factor, self.block.ds)
        products = [x * e for x, e in zip(xs, es, strict=True)]
        directions = self.block.directions(es)
        return Sums(dot(es, directions, self.dtype), dot(es, xs, self.dtype), dot(products, products, self.dtype))

    def measure(self, scale: Array, points: Sequence[Point], matched: bool) -> tuple[Array, Array]:
        """One evaluation of the prox for each point."""
        found = [self._height(scale, point, matched) for point in points]
        h, bend = zip(*found, strict=True)
        return jnp.stack(h), jnp.stack(bend)

    def _height(self, scale: Array, point: Point, matched: bool) -> tuple[Array, Array]:
        block = self.block
        es = times(1 / scale, block.ds)
        zs, ys = self._along(point)
        moves = [y - x for x, y in zip(block.xs, ys, strict=True)]
        h = dot(es, moves, self.dtype)
        tangents = prox_tangents(block, zs, ys, moves if matched else block.directions(es), point.cap)
        return h, jnp.full_like(h, math.nan) if tangents is None else dot(es, tangents, self.dtype)

    def _along(self, point: Point) -> tuple[list[Array], list[Array]]:
        """z = x - step D^-1 d and its prox."""
        block = self.block
        pairs = zip(block.xs, block.directions(block.ds), strict=True)
        zs = [x - like(point.step, x) * d for x, d in pairs]
        return zs, prox_at(block, zs, point.cap)

    def moves(self, u: Array) -> list[Array]:
        """By one more evaluation."""
        alpha = self.block.alpha
        return [y - x for x, y in zip(self.block.xs, self._along(Point(u * alpha, alpha))[1], strict=True)]


def make_part(block: Block, dtype: Any) -> Part:
    """The part of a block, by the cheapest thing that its regulariser says of all its tensors."""
    structures = block.structures
    kinds = {type(structure) for structure in structures}
    if block.quadratic:
        return LinePart(block, dtype)
    alike = all(block.phi.at(i) is block.phi for i in block.indices)
    if block.metric is not None:
        psi = _entry_function(structures[0]) if alike else None
        return ProxPart(block, dtype) if psi is None else EntriesPart(block, dtype, psi)
    whole = all(isinstance(own, Rows) and own.dims is None for own in structures)
    if kinds == {Rows} and (whole or not block.phi.joint):
        return RowsPart(block, dtype, structures)
    if kinds == {Entries} and alike:
        return EntriesPart(block, dtype, structures[0].psi)
    return ProxPart(block, dtype)


def _entry_function(structure: Structure | None) -> Scalar | None:
    """The function of each entry whose prox takes one step size per entry; None where it is not known to be one."""
    if isinstance(structure, Quadratic) and structure.center is None:
        return Scalar(l2=structure.lam)
    if isinstance(structure, Entries) and isinstance(structure.psi, Scalar):
        return structure.psi
    return None


def prox_at(block: Block, zs: Sequence[Array], cap: Array) -> list[Array]:
    """The prox of the block's regulariser; z itself where its step size is 0."""
    phi, positive = block.phi, _positive(cap)
    if block.metric is None:
        ys = prox_all(phi, zs, positive, block.indices)
    elif phi.joint:
        ys = unflatten(phi.prox_diagonal(flatten(zs), flatten(block.step_sizes(positive))), zs)
    else:
        parts = zip(block.indices, zs, block.step_sizes(positive), strict=True)
        ys = [phi.at(i).prox_diagonal(z, sizes) for i, z, sizes in parts]
    return [jnp.where(cap > 0, y, z) for y, z in zip(ys, zs, strict=True)]


def prox_tangents(
    block: Block, zs: Sequence[Array], ys: Sequence[Array], vs: Sequence[Array], cap: Array
) -> list[Array] | None:
    """The derivative of `prox_at` along v; None where it is not cheap."""
    phi, positive = block.phi, _positive(cap)
    if block.metric is None:
        return prox_jvp_all(phi, zs, ys, vs, positive, block.indices)
    if phi.joint or not phi.separable:
        return None
    parts = zip(block.indices, zs, ys, vs, block.step_sizes(positive), strict=True)
    tangents = [phi.at(i).prox_jvp(z, y, v, sizes) for i, z, y, v, sizes in parts]
    return None if any(tangent is None for tangent in tangents) else tangents


def settled(psi: Scalar, dtype: Any) -> Scalar:
    """The function with constants that promote no array of this dtype."""
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


def like(number: Array, x: Array) -> Array:
    """A number in the dtype of the array it multiplies."""
    return number.astype(x.dtype)


def _positive(number: Array) -> Array:
    """The number, or 1 where it is 0."""
    return jnp.where(number > 0, number, jnp.ones_like(number))


def _row_count(x: Array, own: Rows) -> int:
    normed = range(x.ndim) if own.dims is None else [dim % x.ndim for dim in own.dims]
    return math.prod(n for dim, n in enumerate(x.shape) if dim not in normed)


def _is_zero(constant: Any) -> bool:
    return isinstance(constant, Real) and constant == 0
