"""Lines and entries by the compiled kernels, for dense CPU tensors of f32 or f64 in one memory order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from proxsps.core.array import Array
from proxsps.core.step import Affine
from proxsps.optim.blocks import Block
from proxsps.optim.moments import Moments, least_metric
from proxsps.optim.numbers import Numbers
from proxsps.optim.parts.averaged import AveragedLines
from proxsps.optim.parts.averaged_sums import block_sums
from proxsps.optim.parts.base import Curve
from proxsps.optim.parts.lines import Lines
from proxsps.regularizers.structure import Entries


@cache
def load_kernels() -> ModuleType | None:
    """The compiled kernels, or None without numba or without a place for its cache."""
    try:
        from proxsps.optim import kernels
    except (ImportError, RuntimeError):
        return None
    return kernels


def known_kernels() -> ModuleType:
    """The compiled kernels, for a part that needs them."""
    found = load_kernels()
    if found is None:
        raise RuntimeError("The compiled kernels need numba (the extra 'fast'); use fused=None or fused=False.")
    return found


def memory_of(blocks: Sequence[Block]) -> Any:
    """Addresses of parameters and slopes, or None if the kernels do not apply."""
    kernels = load_kernels()
    if kernels is None or not any(block.params for block in blocks):
        return None
    return kernels.memory([block.params for block in blocks], [block.slopes for block in blocks])


class CompiledLines(Lines):
    """Lines by the kernels."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], memory: Any) -> None:
        super().__init__(numbers, blocks, places)
        self._memory = memory

    def sums(self, points: bool) -> Array:
        """One pass."""
        lam = np.array([block.lam if self.coupled else 0.0 for block in self.blocks])
        start = start_of(self.blocks, self._memory)
        if start is None:
            return self.checked(known_kernels().sums(self._memory, lam, points or self.coupled), points)
        *sums, self.moved_sq = known_kernels().sums(self._memory, lam, points or self.coupled, start)
        return self.checked(np.array(sums), points)

    def move(self, update: Affine, ok: Array) -> None:
        """One pass."""
        if ok:
            known_kernels().write(self._memory, update.keep, update.move)


def start_of(blocks: Sequence[Block], memory: Any) -> Any:
    """The memory of the start of the run; None if there is none, or if the kernels cannot compare it."""
    if any(block.starts is None for block in blocks):
        return None
    return known_kernels().start_of([block.params for block in blocks], [block.starts for block in blocks], memory.like)


def averages_of(blocks: Sequence[Block]) -> Any:
    """Addresses of parameters, gradients and averages, or None if the kernels do not apply."""
    kernels = load_kernels()
    if kernels is None or not any(block.params for block in blocks) or any(block.centered for block in blocks):
        return None
    records = [block.known_moments for block in blocks]
    squares = None if records[0].squares is None else [own.squares for own in records]
    weights = np.concatenate(list(map(_weights, records)), axis=1)
    eps, least = records[0].eps, 0.0
    if squares is not None:
        least = least_metric(next(x.dtype for block in blocks for x in block.params))
    params = [block.params for block in blocks]
    grads, averages = ([getattr(own, name) for own in records] for name in ("grads", "averages"))
    return kernels.moments.averages(params, grads, averages, squares, weights, eps, least)


def _weights(own: Moments) -> np.ndarray:
    """Weights of old and new averages as rows, one column per tensor; those of squares may differ by tensor."""
    weights = np.empty((4, len(own.grads)))
    weights[:2] = np.reshape(own.weights, (2, 1))
    if own.squares:
        same = all([pair is own.square_weights[0] for pair in own.square_weights])
        weights[2:] = np.reshape(own.square_weights[0], (2, 1)) if same else np.array(own.square_weights).T
    return weights


class CompiledAverages(AveragedLines):
    """Lines with averages by the kernels."""

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], memory: Any) -> None:
        super().__init__(numbers, blocks, places)
        self._memory = memory

    def _found(self, points: bool) -> Array:
        start = start_of(self.blocks, self._memory)
        if start is not None:
            self._memory = self._memory._replace(start=start)
        *sums, moved_sq = known_kernels().moments.sums(self._memory)
        self.moved_sq = None if start is None else moved_sq
        return np.array(sums)

    def _write(self, update: Affine) -> None:
        known_kernels().moments.write(self._memory, update.keep, update.move)


class CompiledEntries(Curve):
    """Entries by the kernels."""

    def __init__(
        self,
        numbers: Numbers,
        blocks: Sequence[Block],
        places: Sequence[int],
        structures: Sequence[Entries],
        memory: Any,
    ) -> None:
        super().__init__(numbers, blocks, places)
        self._memory = memory
        self._alpha = np.array([block.alpha for block in blocks])
        constants = np.array([own.psi for own in structures], np.float64).T.copy()
        self._psi = known_kernels().Psi(*constants)
        self._products = np.float64(0.0)
        self.points = 3
        self.entries = sum(x.numel() for block in blocks for x in block.params)

    def sums(self, points: bool) -> Array:
        """One pass, which also computes h at the points of `ahead`."""
        sums, h, slope = self.pass_over(self.ahead)
        self.answered = (self.ahead, h, slope)
        self._products = sums[2].sum()
        sums[2] = 0.0
        return sums

    def pass_over(self, u: Array, every: int = 1) -> tuple[Array, Array, Array]:
        """Sums by block, and h and its slope at the points; from a sample for `every` above 1."""
        points = u if len(u) else np.ones(1)  # there is no separate kernel for the sums alone
        found = known_kernels().entries.reduce(self._memory, self._psi, self.scaled(self._alpha), points, every)
        h, slope = found[3:].reshape(2, len(points), -1).sum(axis=-1)[:, : len(u)]
        return found[:3], h, slope

    def sampled(self, u: Array, every: int) -> tuple[Array, Array]:
        """A short pass."""
        return self.pass_over(u, every)[1:]

    def _heights(self, u: Array) -> tuple[Array, Array]:
        parts = [self.pass_over(u[i : i + 4])[1:] for i in range(0, len(u), 4)]
        heights, slopes = zip(*parts, strict=True)
        return np.concatenate(heights), np.concatenate(slopes)

    def products_sq(self) -> Array:
        """From the first pass."""
        return self._products

    def ray_heights(self, s: Array, every: int = 1) -> Array:
        """One pass for all points."""
        caps = np.multiply.outer(s, self._alpha)
        return known_kernels().entries.ray(self._memory, self._psi, caps, every).sum(axis=-1)

    def moves_sq(self, u: Array) -> Array:
        """One pass."""
        return known_kernels().entries.move_sq(self._memory, self._psi, self.scaled(self._alpha), float(u)).sum()

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass."""
        if ok:
            known_kernels().entries.write(self._memory, self._psi, self.scaled(self._alpha), float(u), float(s))


class CompiledAveragedEntries(CompiledEntries):
    """Entries whose slopes are averages, in the identity metric or in Adam's: updated in the passes of the step."""

    def sums(self, points: bool) -> Array:
        """One pass, which computes `extras` too."""
        start = start_of(self.blocks, self._memory)
        if start is not None:
            self._memory = self._memory._replace(start=start)
        kernels, u = known_kernels().entries, self.ahead if len(self.ahead) else np.ones(1)
        sums, self._further = kernels.first_reduce(self._memory, self._psi, self.scaled(self._alpha), u)
        if len(self.ahead):
            self.answered = (self.ahead, *sums[3:].reshape(2, len(u), -1).sum(axis=-1))
        self.moved_sq = None if start is None else self._further.moved_sq
        self._products = sums[2].sum()
        return np.array([sums[0], self._further.d_dot_x, np.zeros(len(self.blocks))])

    def sampled_dots(self, every: int) -> tuple[Array, Array, Array]:
        """A short pass."""
        args = (self._memory, self._psi, self._alpha, np.ones(1), every)
        sums, further = known_kernels().entries.first_reduce(*args)
        return further.g_dot_x.sum(), sums[1].sum(), sums[2].sum()

    def extras(self) -> list[list[Array]]:
        """From the same pass; blocks whose sums leave the range of f32 are summed again in f64."""
        _, g_dot_x, g_sq, _ = self._further
        for i in np.flatnonzero(~np.isfinite(g_dot_x + g_sq) | (g_sq < 1e-20)).tolist():
            *_, g_dot_x[i], g_sq[i], _, _ = block_sums(self.blocks[i], points=False, exact=True)
        return [[*pair, *np.zeros(3)] for pair in zip(g_dot_x, g_sq, strict=True)]

    def write(self, u: Array, s: Array | float, ok: Array) -> None:
        """One pass, which stores the new averages too."""
        super().write(u, s, ok)
        for block in self.blocks if ok else ():
            block.known_moments.written = True
