"""The dual variable of a step in which some blocks have a prox that is not affine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.dual import stopping
from proxsps.core.step import l2_line, prox_coefficients
from proxsps.optim.arithmetic import Arithmetic, Sums
from proxsps.optim.blocks import Block
from proxsps.optim.passes import widened
from proxsps.regularizers.base import prox_all, prox_jvp_all


class ProxRay:
    """The curve u -> y(u) of a step and the height h(u) of the linear model above C along it.

    Affine blocks enter by their sums; the others are evaluated, and the points of the last evaluation kept.
    """

    def __init__(self, arithmetic: Arithmetic, gap: Array, sums: Sums, alpha: Array, lam: Array) -> None:
        self._arithmetic = arithmetic
        self._gap = gap
        affine = arithmetic.vector([float(block.affine) for block in arithmetic.blocks])
        self._line = l2_line(gap, sums.d_sq, sums.d_dot_x, affine * alpha, lam)
        self.blocks = [block for block in arithmetic.blocks if not block.affine]
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
        h, slope = self._line.start - self._line.fall * u, -self._line.fall
        self.points = []
        for block, xs, ds in zip(self.blocks, self._xs, self._ds, strict=True):
            tau = self._arithmetic.factor(u * block.alpha * self._scale)
            ys, tangents = _prox_along(block, xs, ds, tau)
            h = h + self._scale * self._arithmetic.dot(ds, [y - x for x, y in zip(xs, ys, strict=True)])
            curvature = math.nan if tangents is None else self._arithmetic.dot(ds, tangents)
            slope = slope - block.alpha * self._scale**2 * curvature
            self.points.append(ys)
        return h, slope

    def write(self, u: Array, alpha: Array, lam: Array, ok: Array) -> None:
        """Move the affine blocks to u, the others to the points of the last evaluation, which was at u."""
        rest = [i for i, block in enumerate(self._arithmetic.blocks) if block.affine and block.params]
        if rest:
            self._arithmetic.restricted(rest).move(prox_coefficients(u, alpha[rest], lam[rest]), ok)
        for block, ys in zip(self.blocks, self.points, strict=True):
            self._arithmetic.assign(block, ys, ok)

    def stopping(self) -> tuple[Array, Array]:
        """Tolerance and noise of the search."""
        products = [x * d for xs, ds in zip(self._xs, self._ds, strict=True) for x, d in zip(xs, ds, strict=True)]
        return stopping(self._gap, self._scale * self._arithmetic.dot(products, products) ** 0.5, self.eps)


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
