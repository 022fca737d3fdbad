"""The dual variable of a step in which some blocks have a prox that is not affine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.dual import stopping
from proxsps.core.step import Affine, l2_line, prox_coefficients, prox_move_sq, relax, relaxation
from proxsps.optim.arithmetic import Arithmetic, Sums
from proxsps.optim.blocks import Block
from proxsps.optim.passes import widened
from proxsps.optim.reduce import Ranks
from proxsps.regularizers.base import prox_all, prox_jvp_all


class ProxRay:
    """The curve u -> y(u) of a step and the height h(u) of the linear model above C along it.

    Affine blocks enter by their sums; the others are evaluated, and the points of the last evaluation kept. Where these
    are shards, each evaluation adds up over the ranks, in one all-reduce.
    """

    def __init__(self, arithmetic: Arithmetic, ranks: Ranks, gap: Array, sums: Sums, alpha: Array, lam: Array) -> None:
        self._arithmetic = arithmetic
        self._gap, self._sums, self._alpha, self._lam = gap, sums, alpha, lam
        self._affine = affine = arithmetic.vector([float(block.affine) for block in arithmetic.blocks])
        self._line = l2_line(gap, sums.d_sq, sums.d_dot_x, affine * alpha, lam)
        self.blocks = [block for block in arithmetic.blocks if not block.affine]
        sharded = any(block.sharded for block in self.blocks)
        self._shares = [block.share if sharded else 1.0 for block in self.blocks]
        self._over_ranks = ranks.sum if sharded else lambda *parts: parts
        self._xs = [[widened(x) for x in block.params] for block in self.blocks]
        # Gradients over a common scale, lest their squares leave the range of f32.
        self._scale = arithmetic.scale(((1 - affine) * sums.d_sq).sum())
        s = arithmetic.factor(self._scale)
        as_is = not isinstance(s, Tensor) and s == 1
        self._ds = [[widened(g) if as_is else widened(g) / s for g in block.grads] for block in self.blocks]
        self.points: list[list[Tensor]] = []

    @property
    def eps(self) -> float:
        """Relative rounding of the coarsest parameters that are searched over."""
        return max(torch.finfo(x.dtype).eps for xs in self._xs for x in xs)

    def __call__(self, u: Array) -> tuple[Array, Array]:
        """h(u) and h'(u), the latter NaN where some prox has no cheap derivative."""
        height = curvature = self._arithmetic.scalar(0.0)
        self.points = []
        for block, share, xs, ds in zip(self.blocks, self._shares, self._xs, self._ds, strict=True):
            tau = self._arithmetic.factor(u * block.alpha * self._scale)
            ys, tangents = _prox_along(block, xs, ds, tau)
            height = height + share * self._arithmetic.dot(ds, [y - x for x, y in zip(xs, ys, strict=True)])
            bend = math.nan if tangents is None else self._arithmetic.dot(ds, tangents)
            curvature = curvature + share * block.alpha * bend
            self.points.append(ys)
        height, curvature = self._over_ranks(height, curvature)
        h = self._line.start - self._line.fall * u + self._scale * height
        return h, -self._line.fall - self._scale**2 * curvature

    def write(self, u: Array, ok: Array, max_move: float | None) -> Array | float:
        """Move the affine blocks to u, the others to the points of the last evaluation, which was at u.

        Returns the factor on the move that `max_move` asks for.
        """
        update = prox_coefficients(u, self._alpha, self._lam)
        s: Array | float = 1.0
        if max_move is not None:
            s = relaxation(self._move_sq(update), max_move)
            update = relax(update, s)
            back = self._arithmetic.factor(1 - s)
            self.points = [
                [y + back * (x - y) for x, y in zip(xs, ys, strict=True)]
                for xs, ys in zip(self._xs, self.points, strict=True)
            ]
        rest = [i for i, block in enumerate(self._arithmetic.blocks) if block.affine and block.params]
        if rest:
            self._arithmetic.restricted(rest).move(Affine(*(part[rest] for part in update)), ok)
        for block, ys in zip(self.blocks, self.points, strict=True):
            self._arithmetic.assign(block, ys, ok)
        return s

    def _move_sq(self, update: Affine) -> Array:
        """||x+ - x||^2 over all blocks."""
        squares = self._arithmetic.scalar(0.0)
        for share, xs, ys in zip(self._shares, self._xs, self.points, strict=True):
            moves = [y - x for x, y in zip(xs, ys, strict=True)]
            squares = squares + share * self._arithmetic.dot(moves, moves)
        (squares,) = self._over_ranks(squares)
        return squares + prox_move_sq(update, *(self._affine * part for part in self._sums))

    def stopping(self) -> tuple[Array, Array]:
        """Tolerance and noise of the search."""
        square = self._arithmetic.scalar(0.0)
        for share, xs, ds in zip(self._shares, self._xs, self._ds, strict=True):
            products = [x * d for x, d in zip(xs, ds, strict=True)]
            square = square + share * self._arithmetic.dot(products, products)
        (square,) = self._over_ranks(square)
        return stopping(self._gap, self._scale * square**0.5, self.eps)


def _prox_along(
    block: Block, xs: Sequence[Tensor], ds: Sequence[Tensor], tau: Tensor | float
) -> tuple[list[Tensor], list[Tensor] | None]:
    """prox(x - tau d) and its derivative along d; x itself where alpha = 0."""
    alpha, resting = block.alpha, block.alpha == 0
    if resting is True:
        return list(xs), [torch.zeros_like(d) for d in ds]
    if isinstance(alpha, Tensor):
        alpha = torch.where(resting, torch.ones_like(alpha), alpha)
    zs = [x - tau * d for x, d in zip(xs, ds, strict=True)]
    ys = prox_all(block.phi, zs, alpha, block.indices)
    tangents = prox_jvp_all(block.phi, zs, ys, ds, alpha, block.indices)
    if isinstance(alpha, Tensor):
        ys = [torch.where(resting, x, y) for x, y in zip(xs, ys, strict=True)]
    return ys, tangents
