"""Affine blocks and those whose prox acts on each entry, by torch on the host: any dtype and any memory layout.

The formulas are those of `proxsps.optim.kernels.entrywise`. Entries are processed in pieces that fit into the cache:
parts of long tensors, or short tensors joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.optim.blocks import FULL, plain
from proxsps.optim.lists import bundles, join, spread, widened
from proxsps.optim.rule import Heights, Table
from proxsps.optim.vectors.averages import Averages
from proxsps.optim.vectors.entries import entry_move, entry_prox, entry_tangent

PIECE = 1 << 18  # entries: few enough for the cache, and enough that the time of calls does not matter
Floats = Sequence[float]


class Piece(NamedTuple):
    """Slices of tensors of one block that are processed together."""

    block: int
    xs: list[Tensor]
    gs: list[Tensor]
    centers: list[Tensor]  # empty without a centre
    averages: Averages


class EntryPart:
    """Affine blocks, and those whose prox acts on each entry."""

    points, mixes = 1, False  # points of a round: each takes as long as a pass

    def __init__(self, plan: Any, places: Sequence[int]) -> None:
        self._plan, self._exact = plan, plan.exact
        self._blocks = [plan.blocks[i] for i in places]
        self._psi: list[Any] = [None if plan.affine[i] else plan.blocks[i].entries.psi for i in places]
        tensors = [x for block in self._blocks for x in block.params]
        self._plain = plain(tensors) and not any(map(torch._is_functional_tensor, tensors))
        self.coupling = [0.0] * len(places)
        self._pieces = [piece for i, block in enumerate(self._blocks) for piece in self._cut(block, i)]
        self._curves = [piece for piece in self._pieces if self._psi[piece.block] is not None]
        self.curved, self.entries = any(psi is not None for psi in self._psi), 0
        if self.curved:
            self.entries = sum(x.numel() for piece in self._curves for x in piece.xs)

    def set_coupling(self, lam: Sequence[float]) -> None:
        """How much of x is in the slopes of coupled methods."""
        self.coupling = list(lam)

    def _cut(self, block: Any, place: int) -> Iterator[Piece]:
        centers = [block.centers] if block.centered else []
        for count, members in self._plan.by_count(block):
            columns = [[tensors[i] for i in members] for tensors in (block.params, block.slopes, *centers)]
            held = [[self._plan.entries_of(block, i, name) for i in members] for name in self._plan.averages]
            for lists in bundles([*columns, *held], PIECE):
                xs, gs, *rest = lists
                yield Piece(place, xs, gs, rest.pop(0) if centers else [], Averages(rest, count))

    def _vectors(
        self, piece: Piece, every: int = 1, in_place: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """x, g, d, the metric D and v of a piece as vectors, in at least f32, in doubles if the plan is exact."""

        def vector(tensors: Sequence[Tensor]) -> Tensor:
            found = widened(join(tensors))
            found = found.double() if self._exact else found
            return found if every == 1 else found[: max(1, found.numel() // every)]

        x, g = vector(piece.xs), vector(piece.gs)
        d, D, v = piece.averages.slopes(self._plan, g, vector, in_place)
        if self.coupling[piece.block]:
            shifted = x - vector(piece.centers) if piece.centers else x
            d = torch.add(d, shifted, alpha=self.coupling[piece.block])
        return x, g, d, D, v

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        rows = [[0.0] * len(self._blocks) for _ in Table._fields]
        heights, slopes = [0.0] * len(u), [0.0] * len(u)
        for piece in self._pieces:
            x, g, d, D, _ = self._vectors(piece)
            for row, number in zip(rows, self._sums(piece, x, g, d, D), strict=True):
                row[piece.block] += number
            if u and self._psi[piece.block] is not None:
                self._add(piece, x, d, D, alpha, u, heights, slopes)
        return rows, Heights(heights, slopes)

    def _in_place(self, piece: Piece) -> bool:
        """Whether the vectors of a piece and of its averages are their memory."""
        x = piece.xs[0]
        alone = len(piece.xs) == 1 and not piece.centers
        if not (self._plain and alone and not self._exact and x.dtype in FULL):
            return False
        # Averages keep the order of memory that the parameter had when they were made, or that of a checkpoint.
        return all([t.is_contiguous() for t in (x, *(held[0] for held in piece.averages.held))])

    def _sums(self, piece: Piece, x: Tensor, g: Tensor, d: Tensor, D: Tensor | None) -> tuple[float, ...]:
        """The row of a table for one piece."""
        p, averaged = d if D is None else d / D, bool(self._plan.averages)
        center = widened(join(piece.centers)).to(x.dtype) if piece.centers else None
        near = x if center is None else x - center
        d_sq, noise = float(torch.dot(d, p)), 0.0
        if self._psi[piece.block] is not None:
            products = d * x
            noise = float(torch.dot(products, products))
        g_dot_x = g_sq = 0.0
        if averaged:
            q = p if d is g else g if D is None else g / D
            g_dot_x, g_sq = float(torch.dot(g, x)), float(torch.dot(q, q))
            if piece.averages.overflows(g):
                d_sq = math.nan
        d_dot_c = 0.0 if center is None else float(torch.dot(d, center))
        x_sq = float(torch.dot(near, near)) if self.coupling[piece.block] else 0.0
        return d_sq, float(torch.dot(d, near)), noise, g_dot_x, g_sq, 0.0, 0.0, x_sq, d_dot_c

    def _add(
        self,
        piece: Piece,
        x: Tensor,
        d: Tensor,
        D: Tensor | None,
        alpha: Floats,
        u: Floats,
        heights: list[float],
        slopes: list[float],
        scale: float = 1.0,
    ) -> None:
        """Add h and its slope at the points u."""
        psi, cap = self._psi[piece.block], alpha[piece.block]
        p, step = (d, cap) if D is None else (d / D, cap / D)
        for i, v in enumerate(u):
            z = torch.add(x, p, alpha=-v * cap)
            y = entry_prox(psi, z, step)
            tangent = entry_tangent(psi, z, y, p, step)
            slopes[i] += math.nan if tangent is None else -scale * cap * float(torch.dot(d, tangent))
            heights[i] += scale * float(torch.dot(d, entry_move(psi, x, y)))

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u."""
        heights, slopes = [0.0] * len(u), [0.0] * len(u)
        for piece in self._curves:
            x, _, d, D, _ = self._vectors(piece, every)
            scale = sum([t.numel() for t in piece.xs]) / x.numel()
            self._add(piece, x, d, D, alpha, u, heights, slopes, scale)
        return Heights(heights, slopes)

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        heights = [0.0] * len(s)
        for piece in self._curves:
            x, _, d, D, _ = self._vectors(piece, every)
            scale = sum([t.numel() for t in piece.xs]) / x.numel()
            for i, v in enumerate(s):
                heights[i] += scale * float(torch.dot(d, self._point(piece, x, d, D, v * share[piece.block], 1.0) - x))
        return heights

    def _point(self, piece: Piece, x: Tensor, d: Tensor, D: Tensor | None, alpha: float, u: float) -> Tensor:
        """y(u) with the cap alpha."""
        psi = self._psi[piece.block]
        p, step = (d, alpha) if D is None else (d / D, alpha / D)
        return entry_prox(psi, torch.add(x, p, alpha=-u * alpha), step)

    def sampled_sums(self, every: int) -> list[list[float]]:
        """The sums of a step, estimated from a sample."""
        rows = [[0.0] * len(self._blocks) for _ in Table._fields]
        for piece in self._pieces:
            x, g, d, D, _ = self._vectors(piece, every)
            scale = sum([t.numel() for t in piece.xs]) / x.numel()
            for row, number in zip(rows, self._sums(piece._replace(centers=[]), x, g, d, D), strict=True):
                row[piece.block] += scale * number
        return rows

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- keep x + move p + (1 - keep) center, or y(u); stores new averages."""
        for piece in self._pieces:
            b, in_place = piece.block, self._in_place(piece)
            x, g, d, D, v = self._vectors(piece, in_place=in_place)
            if not in_place:
                piece.averages.store(self._plan, d, v)
            if self._psi[b] is not None:
                y = self._point(piece, x, d, D, alpha[b], u) if moves else x
            else:
                d = g if self.coupling[b] else d  # `keep` has the part of the slope that is lam x
                if in_place:
                    x.mul_(keep[b])
                    x.add_(d, alpha=move[b]) if D is None else x.addcdiv_(d, D, value=move[b])
                    continue
                y = torch.add(keep[b] * x, d if D is None else d / D, alpha=move[b])  # a wrapper would add twice
                if piece.centers:
                    y = torch.add(y, widened(join(piece.centers)), alpha=1 - keep[b])
            spread(y.to(piece.xs[0].dtype), piece.xs)
