"""The linear model of the loss in one step: its sums, its height along the ray of a step, and the move it leads to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.dual import search_dual, stopping, unclipped_root
from proxsps.core.step import Line, l2_line, line_dual, prox_coefficients
from proxsps.jax.groups import Block
from proxsps.regularizers import L2
from proxsps.regularizers.base import prox_all, prox_jvp_all

LIMIT = 64  # evaluations in a search; pure bisection down to the last bit of a double takes fewer


class Outcome(NamedTuple):
    """How a method chose its step."""

    root: Array
    u: Array
    height: Array  # of the linear model above C at the new point, over the model's scale
    evaluations: Array | float = 0.0


class Model(NamedTuple):
    """The linear model, with everything over a common scale lest squares of gradients leave the range of the dtype.

    Dual variables do not feel the scale, for h is linear in all that is divided by it.
    """

    blocks: Sequence[Block]
    gap: Array  # m - C
    d_sq: Array  # ||d_j||^2, an entry a block, as are all below
    d_dot_x: Array  # <d_j, x_j - c_j>
    alpha: Array
    lam: Array
    scale: Array

    def line(self) -> Line:
        """Height above C along the ray, of the affine blocks alone."""
        affine = jnp.asarray([block.affine for block in self.blocks], self.alpha.dtype)
        return l2_line(self.gap, self.d_sq, self.d_dot_x, affine * self.alpha, self.lam)

    def height(self, u: Array) -> tuple[Array, Array]:
        """h(u) and h'(u), the latter NaN where some prox has no cheap derivative."""
        line = self.line()
        h, slope = line.start - line.fall * u, -line.fall
        for block in self._searched:
            zs, ys = prox_along(block, u)
            es = _over(self.scale, block.ds)
            h = h + _dot(es, [y - x for x, y in zip(block.xs, ys, strict=True)], h.dtype)
            tangents = prox_jvp_all(block.phi, zs, ys, es, _positive(block.alpha), block.indices)
            curvature = jnp.nan if tangents is None else _dot(es, tangents, h.dtype)
            slope = slope - block.alpha * self.scale * curvature
        return h, slope

    def prox_dual(self, ok: Array) -> Outcome:
        """The dual variable of the exact step: a quotient where every prox is affine, else the root of a search."""
        if not self._searched:
            line = self.line()
            dual = line_dual(line)
            return Outcome(dual.root, dual.u, line.start - line.fall * dual.u)

        def evaluate(u: Array) -> tuple[Array, Array]:
            h, slope = self.height(u)
            return jnp.where(ok, h, 0.0), slope

        eps = max(float(jnp.finfo(x.dtype).eps) for block in self._searched for x in block.xs)
        tolerance, noise = self._stopping(eps)
        tolerance = jnp.where(ok, tolerance, 0.0)  # where nothing is to be found, h = 0 ends the search
        found = search_dual(evaluate, self.gap, tolerance, eps, LIMIT, jax.lax.while_loop, noise)
        return Outcome(unclipped_root(found), found.u, found.h, found.evaluations)

    @property
    def _searched(self) -> list[Block]:
        return [block for block in self.blocks if not block.affine]

    def _stopping(self, eps: float) -> tuple[Array, Array]:
        """Tolerance and noise of the search."""
        products = [
            x * e for block in self._searched for x, e in zip(block.xs, _over(self.scale, block.ds), strict=True)
        ]
        return stopping(self.gap, jnp.sqrt(_dot(products, products, self.gap.dtype)), eps)


def linear_model(blocks: Sequence[Block], gap: Array) -> Model:
    """The model of a loss that is `gap` above its bound and has the slopes of the blocks."""
    dtype = gap.dtype

    def sums(slopes: Sequence[Sequence[Array]]) -> tuple[Array, Array]:
        d_sq = jnp.stack([_dot(ds, ds, dtype) for ds in slopes])
        return d_sq, jnp.stack([_dot(ds, block.offsets, dtype) for ds, block in zip(slopes, blocks, strict=True)])

    def rescaled(gap: Array, scale: Array) -> tuple[Array, ...]:
        d_sq, d_dot_x = sums([_over(scale, block.ds) for block in blocks])
        return gap / scale, scale * d_sq, d_dot_x, scale

    plain = sums([block.ds for block in blocks])
    total, limits = jnp.sum(plain[0]), jnp.finfo(dtype)
    ordinary = (total > limits.tiny**0.75) & (total < limits.max**0.75)
    # Powers of two, by which a division rounds nothing; in f32 they are right for norms from 1e-31 to 1e33.
    up, down = (jnp.asarray(2.0 ** int(part * limits.maxexp), dtype) for part in (12 / 16, -10 / 16))
    # All sums leave by the conditional: the compiler would repeat them, a chain of additions over all tensors, in every
    # kernel that depends on them, and take minutes.
    gap, d_sq, d_dot_x, scale = jax.lax.cond(
        ordinary, lambda gap, _: (gap, *plain, jnp.ones_like(gap)), rescaled, gap, jnp.where(total > 1, up, down)
    )
    alpha = jnp.stack([block.alpha for block in blocks])
    lam = jnp.stack([jnp.asarray(block.lam, dtype) for block in blocks])
    return Model(blocks, gap, d_sq, d_dot_x, alpha, lam, scale)


def prox_along(block: Block, u: Array) -> tuple[list[Array], list[Array]]:
    """z = x - u alpha d and its prox."""
    zs = [x - _like(u * block.alpha, x) * d for x, d in zip(block.xs, block.ds, strict=True)]
    return zs, prox_at(block, zs)


def prox_at(block: Block, zs: Sequence[Array]) -> list[Array]:
    """The prox of the block's regulariser; z itself where alpha = 0."""
    ys = prox_all(block.phi, zs, _positive(block.alpha), block.indices)
    return [jnp.where(block.alpha > 0, y, z) for y, z in zip(ys, zs, strict=True)]


def displacements(block: Block, u: Array) -> list[Array]:
    """x+ - x of the tensors of a block."""
    if not block.affine:
        return [y - x for x, y in zip(block.xs, prox_along(block, u)[1], strict=True)]
    # As keep = 1 - pull, the difference needs no cancellation: move d - pull (x - center).
    _, move, pull = prox_coefficients(u, block.alpha, block.lam)
    moves = [_like(move, d) * d for d in block.ds]
    if not isinstance(block.phi, L2):
        return moves
    return [m - _like(pull, x) * x for m, x in zip(moves, block.offsets, strict=True)]


def _dot(left: Sequence[Array], right: Sequence[Array], dtype: Any) -> Array:
    """Inner product of two lists of arrays."""
    parts = [jnp.sum(a * b, dtype=dtype) for a, b in zip(left, right, strict=True)]
    return jnp.sum(jnp.stack(parts)) if parts else jnp.zeros((), dtype)


def _over(scale: Array, arrays: Sequence[Array]) -> list[Array]:
    return [x / _like(scale, x) for x in arrays]


def _positive(number: Array) -> Array:
    """The number, or 1 where it is 0."""
    return jnp.where(number > 0, number, jnp.ones_like(number))


def _like(number: Array, x: Array) -> Array:
    """A number in the dtype of the array it multiplies."""
    return number.astype(x.dtype)
