"""Blocks that are read again for each point of a search, by entries or by their prox; and the choice of a part."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.jax.groups import TreeBlock
from proxsps.jax.parts import Curve, LinePart, Part, RowsPart, Sums, like, over, positive, settled, times
from proxsps.jax.passes import add_up, dot, joined
from proxsps.regularizers.base import flatten, prox_all, prox_jvp_all, unflatten
from proxsps.regularizers.structure import Entries, Prox, Quadratic, Rows, Scalar, Structure


class Point(NamedTuple):
    """A point of a curve: the prox, with the step size `cap`, of x - `step` D^-1 d."""

    step: Array
    cap: Array


class Measured(Curve):
    """A block that is read again for each point."""

    def heights(self, own: Sums, scale: Array, u: Array) -> tuple[Array, Array]:
        """h'(u) = -alpha <d, J D^-1 d>, with J the derivative of the prox."""
        alpha = self.block.alpha
        h, bend = self.measure(scale, [Point(u[i] * alpha, alpha) for i in range(u.shape[-1])], matched=False)
        return h, -alpha * scale * bend

    def ray_heights(self, own: Sums, scale: Array, s: Array) -> tuple[Array, Array]:
        """H'(s) = <d, J (x+ - x)> / s, as `proxsps.core.model` derives it."""
        taus = [s[i] * self.block.alpha for i in range(s.shape[-1])]
        h, bend = self.measure(scale, [Point(tau, tau) for tau in taus], matched=True)
        return h, bend / positive(s)

    @abstractmethod
    def measure(self, scale: Array, points: Sequence[Point], matched: bool) -> tuple[Array, Array]:
        """<e, y - x> and <e, J v> at points, with e = d / scale; v is y - x for the matched cap, else D^-1 e."""


class EntriesPart(Measured):
    """A block whose regulariser acts on each entry: a pass for each round of the search."""

    def __init__(self, block: TreeBlock, dtype: Any, psi: Scalar | Prox) -> None:
        super().__init__(block, dtype)
        self._psi = psi
        self._tensors = joined(block.xs, block.ds, block.metric)

    def sums(self, factor: Array | None) -> Sums:
        """All sums in one pass."""
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
                tangent = self._psi_of(x).prox_jvp(z, y, y - x if matched else over(e, metric), positive(cap))
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
        return z, jnp.where(cap > 0, self._psi_of(x).prox(z, positive(cap)), z), cap

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


def make_part(block: TreeBlock, dtype: Any) -> Part:
    """The part of a block: the cheapest one that the structure of all its tensors allows."""
    structures = block.structures
    if block.quadratic:
        return LinePart(block, dtype)
    alike = all(block.phi.at(i) is block.phi for i in block.indices)
    if block.metric is not None:
        psi = _entry_function(structures[0]) if alike else None
        return ProxPart(block, dtype) if psi is None else EntriesPart(block, dtype, psi)
    rows = [own for own in structures if isinstance(own, Rows)]
    if rows and len(rows) == len(structures) and (all(own.dims is None for own in rows) or not block.phi.joint):
        return RowsPart(block, dtype, rows)
    entries = [own for own in structures if isinstance(own, Entries)]
    if entries and len(entries) == len(structures) and alike:
        return EntriesPart(block, dtype, entries[0].psi)
    return ProxPart(block, dtype)


def _entry_function(structure: Structure | None) -> Scalar | None:
    """The function of each entry whose prox takes one step size per entry; None if there is none."""
    if isinstance(structure, Quadratic) and structure.center is None:
        return Scalar(l2=structure.lam)
    if isinstance(structure, Entries) and isinstance(structure.psi, Scalar):
        return structure.psi
    return None


def prox_at(block: TreeBlock, zs: Sequence[Array], cap: Array) -> list[Array]:
    """The prox of the block's regulariser; z itself where its step size is 0."""
    phi, size = block.phi, positive(cap)
    if block.metric is None:
        ys = prox_all(phi, zs, size, block.indices)
    elif phi.joint:
        ys = unflatten(phi.prox_diagonal(flatten(zs), flatten(block.step_sizes(size))), zs)
    else:
        parts = zip(block.indices, zs, block.step_sizes(size), strict=True)
        ys = [phi.at(i).prox_diagonal(z, sizes) for i, z, sizes in parts]
    return [jnp.where(cap > 0, y, z) for y, z in zip(ys, zs, strict=True)]


def prox_tangents(
    block: TreeBlock, zs: Sequence[Array], ys: Sequence[Array], vs: Sequence[Array], cap: Array
) -> list[Array] | None:
    """The derivative of `prox_at` along v; None where it is not cheap."""
    phi, size = block.phi, positive(cap)
    if block.metric is None:
        return prox_jvp_all(phi, zs, ys, vs, size, block.indices)
    if phi.joint or not phi.separable:
        return None
    parts = zip(block.indices, zs, ys, vs, block.step_sizes(size), strict=True)
    tangents = [phi.at(i).prox_jvp(z, y, v, sizes) for i, z, y, v, sizes in parts]
    return None if any(tangent is None for tangent in tangents) else tangents
