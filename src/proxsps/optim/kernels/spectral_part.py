"""Blocks with spectral directions in dense memory: compiled passes around torch's orthogonalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxsps.core.schedule_free import counted
from proxsps.optim.kernels.averages import G_SQ, P_SQ, SUMS
from proxsps.optim.kernels.layout import addresses, fold, layout, run
from proxsps.optim.kernels.sampling import NO_START, start_of
from proxsps.optim.kernels.spectral import blend, reduce, write
from proxsps.optim.rule import Heights
from proxsps.optim.spectral import SpectralPart, orthogonal

Floats = Sequence[float]


class CompiledSpectralPart(SpectralPart):
    """Spectral blocks in dense memory."""

    mixes = True

    def set_share(self, share: float) -> None:
        """The share of the new point in the average."""
        self._mix = self._plan.rule.mix, share

    def fits(self, starts: Sequence[Tensor]) -> bool:
        """Whether the kernels apply; `starts` are the sampled entries of x_0."""
        names = "params", "slopes", "ys"
        zs, grads, ys = ([t for block in self._blocks for t in getattr(block, name)] for name in names)
        averages = [t for ts in self._averages for t in ts]
        found = addresses(zs, grads, ys, averages)
        if found is None or not all([t.is_contiguous() for t in (*zs, *grads, *ys, *averages)]):
            return False
        self.set_share(0.0)
        self._start = start_of(zs, starts, found.like) or NO_START
        self._like, (self._z_at, self._g_at, self._y_at, self._d_at) = found
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in self._blocks])
        self._entries = list(map(sum, sizes))
        self._layout = layout(sizes, torch.get_num_threads())
        firsts = np.cumsum([0, *map(len, sizes)])
        self._places = [[firsts[stack.block] + i for i in stack.members] for stack in self._stacks]
        return True

    @property
    def measures(self) -> bool:
        """Whether the sums contain distances from the start."""
        return len(self._start.at) > 0

    def bind(self, gradients: Sequence[int]) -> None:
        """Use gradients at other addresses."""
        self._g_at[:] = gradients

    def sums(self, alpha: Floats, u: Floats, moving: bool) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with new averages and directions, which are kept for the write."""
        mu, squares = self._plan.momentum
        self._p_at, scales = np.zeros_like(self._z_at), np.zeros(len(self._z_at))
        dtype = torch.float32 if self._like.dtype == np.float32 else torch.float64
        slopes = [torch.empty(len(stack.members), *stack.shape, dtype=dtype) for stack in self._stacks]
        for places, own in zip(self._places, slopes, strict=True):
            self._p_at[places] = _rows_at(own)
        chunks = self._layout.chunks
        run(blend, chunks, self._like, *chunks.columns, self._d_at, self._g_at, self._p_at, mu, weight=1.5)
        alone = self._plan.ranks == 1
        scaled = [] if alone else self._directions(slopes, math.sqrt(squares))
        found = scaled or [orthogonal(own.flatten(0, 1), reuse=True) for own in slopes]
        self._found = [own.contiguous() for own in found]
        for stack, places, own in zip(self._stacks, self._places, self._found, strict=True):
            self._p_at[places] = _rows_at(own.view(len(places), -1))
            scales[places] = math.sqrt(squares * max(stack.shape[1:])) if alone else 1.0
        partial = np.empty((len(chunks.sizes), SUMS))
        self._points = (self._z_at, self._g_at, self._y_at, self._d_at, self._p_at, mu, scales)
        run(
            reduce, chunks, self._like, *chunks.columns, *self._points, *self._start, self._mix[0], moving, partial,
            weight=2.0,
        )  # fmt: skip
        rows = fold(partial.T, chunks.columns[0], self._layout.count).tolist()
        rows[G_SQ] = [counted(p_sq / squares, n) for p_sq, n in zip(rows[P_SQ], self._entries, strict=True)]
        return rows, Heights([], [])

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, relax: float) -> None:
        """z <- keep z + move p, and y; stores new averages."""
        chunks = self._layout.chunks
        args = (*self._points, np.array(keep), np.array(move), *self._mix)
        run(write, chunks, self._like, *chunks.columns, *args, weight=2.0)
        self._found = []


def _rows_at(stacked: Tensor) -> Any:
    """The addresses of the tensors of a stack."""
    return stacked.data_ptr() + np.arange(len(stacked)) * (stacked[0].numel() * stacked.element_size())


def make_spectral(plan: Any, opt: Any, places: Sequence[int]) -> CompiledSpectralPart | None:
    """The part of spectral blocks, or None if the kernels do not apply."""
    part = CompiledSpectralPart(plan, opt, places)
    blocks = [plan.blocks[i] for i in places]
    if any([block.gathered or block.afterwards or block.sharded for block in blocks]):
        return None
    owners = [p for block in blocks for p in block.owners]
    if not part.fits([plan.start(p, opt) for p in owners]):
        return None
    plan.apart += [] if part.measures else owners
    return part
