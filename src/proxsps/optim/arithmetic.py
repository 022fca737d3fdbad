"""Where the numbers of a step live: on the host, as NumPy doubles, or on the device, as tensors never read back.

Both do the same things for the optimizers, which do not know which of the two they have: make scalars, reduce blocks to
sums, move parameters, and drive the search for the dual variable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.dual import Loop, Search, fixed_loop
from proxsps.core.step import Affine
from proxsps.optim.blocks import Block, stored
from proxsps.optim.passes import (
    COPIES,
    LAUNCHES,
    bucketed,
    combined,
    displaced,
    dots,
    flat,
    pair_sums,
    update_masked,
)


class Sums(NamedTuple):
    """Reductions over the blocks, an entry a block."""

    d_sq: Array  # ||d||^2
    d_dot_x: Array  # <d, x - center>
    x_sq: Array  # ||x - center||^2; only where asked for


class Arithmetic(ABC):
    """Scalars, reductions and updates over the blocks of one step."""

    limit: int  # evaluations in a search

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks

    @abstractmethod
    def scalar(self, value: Tensor | float) -> Array:
        """A number, from a tensor or a Python float."""

    @abstractmethod
    def vector(self, values: Sequence[Tensor | float]) -> Array:
        """Numbers on one axis, one a block."""

    @abstractmethod
    def factor(self, value: Array | float) -> Tensor | float:
        """A number in the form that multiplies parameters."""

    @abstractmethod
    def total(self, parts: Sequence[Tensor]) -> Array:
        """Sum of 0-d tensors."""

    @abstractmethod
    def sums(self, coupled: bool, points: bool) -> Sums:
        """The sums for d = g, or for d = g + lam (x - center) where `coupled`; with ||x - center||^2 for `points`."""

    @abstractmethod
    def move(self, update: Affine, ok: Array) -> None:
        """x <- keep x + move g + pull center where `ok`."""

    @abstractmethod
    def assign(self, block: Block, new: Sequence[Tensor], ok: Array) -> None:
        """x <- the given tensors where `ok`."""

    @abstractmethod
    def restricted(self, indices: Sequence[int]) -> Arithmetic:
        """The same arithmetic over some of the blocks."""

    @abstractmethod
    def refuses(self, ok: Array) -> bool:
        """Whether to stop here because `ok` is false; a device does not ask, and masks what it writes."""

    @property
    @abstractmethod
    def loop(self) -> Loop:
        """The loop of the search."""

    @abstractmethod
    def scale(self, square: Array) -> Array:
        """A number to divide a vector of this squared norm by, so that its own squares neither overflow nor vanish."""

    def dot(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> Array:
        """Inner product of two lists of tensors."""
        return self.total([part for a, b in zip(left, right, strict=True) for part in dots(flat(a), flat(b))])


class Host(Arithmetic):
    """Numbers as NumPy doubles, for CPU tensors, where a look at a number costs nothing."""

    limit = 64  # pure bisection down to the last bit of a double takes fewer

    def __init__(self, blocks: Sequence[Block], fused: bool | None) -> None:
        super().__init__(blocks)
        for block in blocks:
            block.alpha = float(block.alpha)
        self._fused = fused
        self._memory = self._kernel_memory()

    def _kernel_memory(self) -> Any:
        """Addresses for the compiled kernels, or None where they are not wanted or do not apply."""
        if self._fused is False:
            return None
        if not any(block.params for block in self.blocks):
            return None
        centered = any(block.centered for block in self.blocks)
        kernels, memory = load_kernels(), None
        if kernels is not None and not centered:
            memory = kernels.memory([block.params for block in self.blocks], [block.grads for block in self.blocks])
        if memory is None and self._fused:
            raise RuntimeError(
                "fused=True needs numba (pip install 'proxsps[fast]') and dense f32 or f64 CPU tensors of one dtype, "
                "contiguous or channels-last, without centres. fused=None falls back to torch where this does not hold."
            )
        return memory

    def scalar(self, value: Tensor | float) -> Array:
        return np.float64(float(value))

    def vector(self, values: Sequence[Tensor | float]) -> Array:
        return np.array([float(value) for value in values])

    def factor(self, value: Array | float) -> float:
        return float(value)

    def total(self, parts: Sequence[Tensor]) -> Array:
        return np.float64(sum(map(Tensor.item, parts)))

    def sums(self, coupled: bool, points: bool) -> Sums:
        if self._memory is not None:
            lam = np.array([block.lam if coupled else 0.0 for block in self.blocks])
            sums = load_kernels().sums(self._memory, lam, points or coupled)
        else:
            sums = np.array([self._torch_sums(block, coupled, points, exact=False) for block in self.blocks]).T
        # Squares of entries above 1e19 overflow in f32, those of entries below 1e-19 vanish; in f64 they do not.
        for i in np.flatnonzero(~np.isfinite(sums).all(axis=0) | (sums[0] < 1e-20)):
            sums[:, i] = self._torch_sums(self.blocks[i], coupled, points, exact=True)
        return Sums(*sums)

    def _torch_sums(self, block: Block, coupled: bool, points: bool, exact: bool) -> list[Array]:
        pairs = bucketed(displaced(block, coupled), *COPIES)
        if exact:
            pairs = ((x.double(), d.double()) for x, d in pairs)
        return [self.total(parts) for parts in pair_sums(pairs, points)]

    def move(self, update: Affine, ok: Array) -> None:
        if not ok:
            return
        if self._memory is not None:
            load_kernels().write(self._memory, update.keep, update.move)
            return
        for block, *coefficients in zip(self.blocks, *update, strict=True):
            keep, move, pull = (float(c) for c in coefficients)
            if not block.params:
                continue
            if block.centered or not block.aligned:
                for x, y in zip(block.params, combined(block, keep, move, pull), strict=True):
                    x.copy_(y)
                continue
            if keep != 1:  # a tensor, because torch takes far longer for hundreds of products with a Python number
                dtype = torch.float64 if block.double else torch.float32
                torch._foreach_mul_(block.params, torch.tensor(keep, dtype=dtype))
            if move != 0:
                torch._foreach_add_(block.params, block.grads, alpha=move)

    def assign(self, block: Block, new: Sequence[Tensor], ok: Array) -> None:
        if ok:
            for x, y in zip(block.params, new, strict=True):
                x.copy_(y)

    def scale(self, square: Array) -> Array:
        return np.float64(1.0) if 1e-20 < square < 1e20 or square == 0 else np.sqrt(square)

    def restricted(self, indices: Sequence[int]) -> Host:
        return Host([self.blocks[i] for i in indices], self._fused)

    def refuses(self, ok: Array) -> bool:
        return not ok

    @property
    def loop(self) -> Loop:
        return _host_loop


class Device(Arithmetic):
    """Numbers as tensors on the parameters' device; nothing is read back, so that a step can be captured."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        super().__init__(blocks)
        params = [x for block in blocks for x in block.params]
        self._device = device
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64  # mps has no doubles
        self.limit = 20 if any(x.dtype is torch.float64 for x in params) else 10
        for block in blocks:
            block.alpha = self.scalar(block.alpha) if isinstance(block.alpha, Tensor) else block.alpha

    def _square(self, d: Tensor) -> Tensor:
        """||d||^2 added up in doubles, in which it does not overflow; the host recomputes it then, a device cannot."""
        return torch.linalg.vector_norm(d, dtype=self._dtype).square()

    def scalar(self, value: Tensor | float) -> Array:
        if isinstance(value, Tensor):
            return value.to(self._device, self._dtype).reshape(())
        return torch.full((), value, dtype=self._dtype, device=self._device)  # a kernel, not a copy from the host

    def vector(self, values: Sequence[Tensor | float]) -> Array:
        return torch.stack([self.scalar(value) for value in values])

    def factor(self, value: Array | float) -> Tensor | float:
        return value

    def total(self, parts: Sequence[Tensor]) -> Array:
        return torch.stack(list(parts)).to(self._dtype).sum() if parts else self.scalar(0.0)

    def sums(self, coupled: bool, points: bool) -> Sums:
        rows = []
        for block in self.blocks:
            parts = pair_sums(bucketed(displaced(block, coupled), *LAUNCHES), points, self._square)
            rows.append(torch.stack([self.total(part) for part in parts]))
        return Sums(*torch.stack(rows, dim=1))

    def move(self, update: Affine, ok: Array) -> None:
        for block, keep, move, pull in zip(self.blocks, *update, strict=True):
            if not block.params:
                continue
            if self._fuses(block):
                update_masked(block, keep.float(), move.float(), ok)
            else:
                self.assign(block, combined(block, keep, move, pull), ok)

    def _fuses(self, block: Block) -> bool:
        """Whether to update many tensors at once by torch's fused kernel, which is worth its conditions on a GPU."""
        if self._device.type == "cpu" or torch.compiler.is_compiling():
            return False
        return not block.centered and block.aligned and not block.double and stored(block.grads)

    def assign(self, block: Block, new: Sequence[Tensor], ok: Array) -> None:
        for x, y in zip(block.params, new, strict=True):
            x.copy_(torch.where(ok, y.to(x.dtype), x))

    def scale(self, square: Array) -> Array:
        return torch.where(square > 0, square, torch.ones_like(square)).sqrt()

    def restricted(self, indices: Sequence[int]) -> Device:
        return Device([self.blocks[i] for i in indices], self._device)

    def refuses(self, ok: Array) -> bool:
        return False

    @property
    def loop(self) -> Loop:
        return fixed_loop(self.limit)


@cache
def load_kernels() -> ModuleType | None:
    """The compiled kernels, or None without numba or without a place for its cache."""
    try:
        from proxsps.optim import kernels
    except (ImportError, RuntimeError):
        return None
    return kernels


def choose(blocks: Sequence[Block], fused: bool | None, capturable: bool) -> Arithmetic:
    """The arithmetic for a step over these blocks."""
    params = [x for block in blocks for x in block.params] or [x for block in blocks for x in block.group["params"]]
    on_cpu = all([x.is_cpu for x in params])  # asks less of each tensor than its device does
    if on_cpu and not capturable and not torch.compiler.is_compiling():
        return Host(blocks, fused)
    devices = {x.device for x in params}
    if len(devices) > 1:
        raise ValueError(f"All parameters of one optimizer must be on one device, got {sorted(map(str, devices))}.")
    return Device(blocks, devices.pop())


def _host_loop(condition: Callable[[Search], Array], body: Callable[[Search], Search], state: Search) -> Search:
    while condition(state):
        state = body(state)
    return state
