"""The linear model of the loss in one step: its sums, and its height along the ray, for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.caps import Matched, find_matched, l2_matched, l2_ray_heights, shortest_step
from proxsps.core.dual import Evaluate, Found, height_off, search_dual, stopping
from proxsps.core.model import line_heights
from proxsps.core.rules import Model
from proxsps.core.step import Line, admissible, l2_line
from proxsps.jax.parts import Curve, Part, Sums

LIMIT = 64  # evaluations in a search; pure bisection down to the last bit of a double takes fewer


class Scaled(NamedTuple):
    """The linear model over a common scale, so that squares of gradients stay in the range of the dtype.

    Dual variables do not depend on the scale, because h is linear in everything that is divided by it.
    """

    parts: Sequence[Part]
    gap: Array  # (m - C) / scale
    sums: Sequence[Sums]  # with d / scale in place of d
    scale: Array

    @property
    def d_sq(self) -> Array:
        """||d_j||^2 / scale, one entry per block."""
        return self.scale * jnp.stack([own.d_sq for own in self.sums])

    @property
    def d_dot_x(self) -> Array:
        """<d_j, x_j - c_j> / scale, one entry per block."""
        return jnp.stack([own.d_dot_x for own in self.sums])

    @property
    def alpha(self) -> Array:
        """The caps, one entry per block."""
        return jnp.stack([part.block.alpha for part in self.parts])

    def ok(self, bounded: bool) -> Array:
        """Whether a step may be taken; `bounded` where the loss has a lower bound."""
        return admissible(self.gap, self.d_sq, self.d_dot_x, bounded)

    def model(self, ok: Array) -> Model:
        """The model for the rules; searches end at once where not `ok`."""
        line = l2_line(self.gap, self.d_sq, self.d_dot_x, self._line_caps, self._lam)
        if not self._curves:
            return Model(self.gap, self.d_sq, self.alpha, line)
        return Model(self.gap, self.d_sq, self.alpha, line, lambda line: self._find(line, ok), self._top)

    def matched(self, longest: Array, ok: Array) -> Matched:
        """The step of the matched cap, whose shares are the caps here; 0 where not `ok`.

        Args:
            longest: the largest step size that is allowed.
            ok: whether a step may be taken.
        """
        gap, d_sq, d_dot_x = (jnp.where(ok, part, 0.0) for part in (self.gap, self.d_sq, self.d_dot_x))
        if not self._curves:
            return l2_matched(gap, d_sq, d_dot_x, self.alpha, self._lam, longest, jax.lax.while_loop)

        def heights(s: Array) -> tuple[Array, Array]:
            line = l2_ray_heights(d_sq, d_dot_x, self._line_caps, self._lam, s)
            return _added(line, *(curve.ray_heights(own, self.scale, s) for curve, own in self._curves))

        def find(evaluate: Evaluate) -> Found:
            eps, tolerance, noise = self._stopping(ok)
            loop = jax.lax.while_loop
            return search_dual(evaluate, gap, tolerance, eps, LIMIT, loop, noise, certificate=height_off, at_zero=gap)

        total = jnp.sum(self.alpha * d_sq)
        found = find_matched(heights, gap, total, longest, find)
        s = jnp.where(gap > 0, jnp.maximum(found.s, shortest_step(gap, total, longest)), found.s)
        height = jax.lax.cond(s > found.s, lambda s: gap + heights(s[None])[0][0], lambda _: found.height, s)
        return Matched(s, height, found.evaluations)

    def scaled_caps(self, factor: Array) -> list[Part]:
        """The parts with their caps times a factor."""
        return [part.capped(factor * part.block.alpha) for part in self.parts]

    @property
    def _line_caps(self) -> Array:
        """Caps of the blocks whose prox is affine, 0 for others."""
        affine = jnp.asarray([not isinstance(part, Curve) for part in self.parts], self.gap.dtype)
        return affine * self.alpha

    @property
    def _lam(self) -> Array:
        return jnp.stack([jnp.asarray(part.block.lam, self.gap.dtype) for part in self.parts])

    @property
    def _curves(self) -> list[tuple[Curve, Sums]]:
        pairs = zip(self.parts, self.sums, strict=True)
        return [(part, own) for part, own in pairs if isinstance(part, Curve)]

    def _heights(self, line: Line, u: Array) -> tuple[Array, Array]:
        """h and h' of the whole step at points u."""
        return _added(line_heights(line, u), *(curve.heights(own, self.scale, u) for curve, own in self._curves))

    def _top(self, line: Line) -> Array:
        """h(1)."""
        return self._heights(line, jnp.ones_like(line.start)[None])[0][0]

    def _find(self, line: Line, ok: Array) -> Found:
        """The dual variable."""

        def evaluate(u: Array) -> tuple[Array, Array]:
            h, slope = self._heights(line, u)
            return jnp.where(ok, h, 0.0), slope  # if not `ok`, h = 0 ends the search

        eps, tolerance, noise = self._stopping(ok)
        return search_dual(evaluate, self.gap, tolerance, eps, LIMIT, jax.lax.while_loop, noise)

    def _stopping(self, ok: Array) -> tuple[float, Array, Array]:
        """Resolution, tolerance and noise of a search."""
        eps = max(float(jnp.finfo(x.dtype).eps) for curve, _ in self._curves for x in curve.block.xs)
        products_sq = sum(own.products_sq for _, own in self._curves)
        products = jnp.sqrt(jnp.where(jnp.isfinite(products_sq), products_sq, 0.0))
        tolerance, noise = stopping(self.gap, products, eps)
        noise += float(jnp.finfo(self.gap.dtype).eps) * abs(self.gap)  # h is not a double: adding to the gap rounds
        return eps, jnp.where(ok, tolerance, 0.0), noise


def _added(*found: tuple[Array, Array]) -> tuple[Array, Array]:
    h, slope = zip(*found, strict=True)
    return sum(h), sum(slope)


def linear_model(parts: Sequence[Part], gap: Array) -> Scaled:
    """The model of a loss that is `gap` above its bound and has the slopes of the blocks."""

    def rescaled(gap: Array, scale: Array) -> tuple[Array, list[Sums], Array]:
        return gap / scale, [part.sums(1 / scale) for part in parts], scale

    plain = [part.sums(None) for part in parts]
    total, limits = sum(own.d_sq for own in plain), jnp.finfo(gap.dtype)
    ordinary = (total > limits.tiny**0.75) & (total < limits.max**0.75)
    gap = jnp.where(ordinary, gap, gap)  # if slopes differ between the devices of a shard_map, so does the model
    # Powers of two, by which a division rounds nothing; in f32 they are right for norms from 1e-31 to 1e33.
    up, down = (jnp.asarray(2.0 ** int(part * limits.maxexp), gap.dtype) for part in (12 / 16, -10 / 16))
    # All sums leave by the conditional: the compiler would repeat them, a chain of additions over all tensors, in every
    # kernel that depends on them, and take minutes.
    found = jax.lax.cond(
        ordinary, lambda gap, _: (gap, plain, jnp.ones_like(gap)), rescaled, gap, jnp.where(total > 1, up, down)
    )
    return Scaled(parts, *found)
