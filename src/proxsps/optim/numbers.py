"""The numbers of a step: on the host, as NumPy doubles, or on the device, as tensors that are never read back.

Optimizers use both in the same way: both make scalars, add up, and search for the dual variable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.caps import Matched
from proxsps.core.dual import Evaluate, Found, eager_loop, height_off, search_dual
from proxsps.core.rounds import refine_zero
from proxsps.optim.blocks import Block
from proxsps.optim.refine import POINTS, refine_dual

array_namespace(torch.empty(0))  # fills its cache, so that a step is compiled only once

LIMIT = 64  # evaluated points; pure bisection down to the last bit of a double takes fewer
ROUNDS = {False: 4, True: 7}  # of a search on a device, in single and in double precision
ZERO_ROUNDS = {False: 6, True: 8}  # the same for the step of the matched cap


class Numbers(ABC):
    """Scalars of one step, and operations on them."""

    dtype: torch.dtype = torch.float64  # of sums over tensors

    @abstractmethod
    def scalar(self, value: Tensor | Array | float) -> Array:
        """A number, from a tensor or a Python float."""

    def number(self, value: Tensor | Array | float) -> Array | float:
        """A number that may stay a Python number if that saves an operation."""
        return self.scalar(value)

    @abstractmethod
    def vector(self, values: Sequence[Tensor | Array | float]) -> Array:
        """Numbers on one axis."""

    @abstractmethod
    def column(self, values: Tensor) -> Array:
        """The entries of a tensor with one dim as numbers."""

    @abstractmethod
    def factor(self, value: Array | float) -> Tensor | float:
        """A number in the form that multiplies tensors."""

    @abstractmethod
    def total(self, parts: Sequence[Tensor]) -> Array:
        """Sum of 0-d tensors."""

    @abstractmethod
    def refuses(self, ok: Array) -> bool:
        """Whether to stop here because `ok` is false; a device does not read it, and masks what it writes."""

    def vanishes(self, number: Array) -> bool:
        """Whether to stop here because a number is not positive; a device does not read it."""
        return False

    def unchecked(self) -> AbstractContextManager[Any]:
        """A context without warnings about numbers that are not finite."""
        return nullcontext()

    @abstractmethod
    def flag(self, ok: Array | bool) -> Array:
        """A truth value as an array."""

    @abstractmethod
    def chosen(self, values: Array, places: Sequence[int]) -> Sequence[Array]:
        """Some of the numbers on one axis."""

    def assign(self, xs: Sequence[Tensor], ys: Sequence[Tensor], ok: Array) -> None:
        """x <- y where `ok`."""
        for x, y in zip(xs, ys, strict=True):
            x.copy_(self.masked(x, y, ok))

    @abstractmethod
    def masked(self, x: Tensor, y: Tensor, ok: Array) -> Tensor:
        """y where `ok`, else x."""


class Host(Numbers):
    """Numbers as NumPy doubles, for CPU tensors, where reading a number costs nothing."""

    dtype = torch.float64

    def __init__(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.alpha = float(block.alpha)

    def scalar(self, value: Tensor | Array | float) -> Array:
        """A NumPy double."""
        return np.float64(float(value))

    def vector(self, values: Sequence[Tensor | Array | float]) -> Array:
        """An array of doubles."""
        return np.array([float(value) for value in values])

    def column(self, values: Tensor) -> Array:
        """An array of doubles."""
        if type(values) is not Tensor or torch._is_functional_tensor(values):  # memory may not hold their entries
            return np.array([value.item() for value in values.unbind()], np.float64)
        return values.double().numpy()

    def factor(self, value: Array | float) -> float:
        """A Python float."""
        return float(value)

    def total(self, parts: Sequence[Tensor]) -> Array:
        """A NumPy double."""
        return np.float64(sum(map(Tensor.item, parts)))

    def refuses(self, ok: Array) -> bool:
        """As above; the host reads `ok`."""
        return not ok

    def vanishes(self, number: Array) -> bool:
        """As above; the host reads the number."""
        return not number > 0

    def unchecked(self) -> AbstractContextManager[Any]:
        """A context in which NumPy does not warn about infinity and NaN."""
        return np.errstate(invalid="ignore", over="ignore")

    def flag(self, ok: Array | bool) -> Array:
        """A NumPy truth value."""
        return np.asarray(ok)

    def find(
        self,
        evaluate: Evaluate,
        gap: Array,
        tolerance: Array,
        noise: Array,
        eps: float,
        start: Array | Sequence[float],
        points: int,
    ) -> Found:
        """The dual variable by a search that stops at its tolerance; see `search_dual` for the arguments."""
        return search_dual(evaluate, gap, tolerance, eps, LIMIT, eager_loop, noise, start, points)

    def find_zero(
        self,
        evaluate: Evaluate,
        gap: Array,
        tolerance: Array,
        noise: Array,
        eps: float,
        start: Array | Sequence[float] = (1.0,),
    ) -> Found:
        """The step of the matched cap, on [0, 1]: a function that starts at the gap and need not be monotone."""
        options = {"slopes": False, "certificate": height_off, "at_zero": gap}
        return search_dual(evaluate, gap, tolerance, eps, LIMIT, eager_loop, noise, start, **options)

    def chosen(self, values: Array, places: Sequence[int]) -> Sequence[Array]:
        """An array of doubles."""
        found: Sequence[Array] = values[places]
        return found

    def masked(self, x: Tensor, y: Tensor, ok: Array) -> Tensor:
        """Read once for the whole step."""
        return y if ok else x


class Device(Numbers):
    """Numbers as tensors on the parameters' device; nothing is read back, so that a step can be captured."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        params = [x for block in blocks for x in block.params]
        self._device = device
        self.dtype = torch.float32 if self._device.type == "mps" else torch.float64  # mps has no doubles
        double = any(x.dtype is torch.float64 for x in params)
        self._rounds, self._zero_rounds = ROUNDS[double], ZERO_ROUNDS[double]
        for block in blocks:
            block.alpha = self.scalar(block.alpha) if isinstance(block.alpha, Tensor) else block.alpha

    def scalar(self, value: Tensor | Array | float) -> Array:
        """A 0-d tensor."""
        if isinstance(value, Tensor):
            return value.to(self._device, self.dtype).reshape(())
        return torch.full((), value, dtype=self.dtype, device=self._device)  # a kernel, not a copy from the host

    def number(self, value: Tensor | Array | float) -> Array | float:
        """A 0-d tensor from a tensor; a float from a number."""
        return self.scalar(value) if isinstance(value, Tensor) else float(value)

    def vector(self, values: Sequence[Tensor | Array | float]) -> Array:
        """A tensor with one dim."""
        if len(values) == 1:
            return self.scalar(values[0]).reshape(1)
        plain = [value for value in values if not isinstance(value, Tensor)]
        if len(plain) == len(values):
            if len(set(plain)) == 1:
                return torch.full((len(plain),), plain[0], dtype=self.dtype, device=self._device)
            if len(plain) == 2 and all(map(math.isfinite, plain)):  # one kernel for two different numbers
                return torch.linspace(plain[0], plain[1], 2, dtype=self.dtype, device=self._device)
        return torch.stack([self.scalar(value) for value in values])

    def column(self, values: Tensor) -> Array:
        """A tensor with one dim."""
        return values.to(self.dtype)

    def factor(self, value: Array | float) -> Tensor | float:
        """As it is."""
        return value

    def total(self, parts: Sequence[Tensor]) -> Array:
        """A 0-d tensor."""
        if len(parts) == 1:
            return self.scalar(parts[0])
        return torch.stack(list(parts)).sum(dtype=self.dtype) if parts else self.scalar(0.0)

    def refuses(self, ok: Array) -> bool:
        """Never: `ok` is not read back from the device."""
        return False

    def flag(self, ok: Array | bool) -> Array:
        """As it is; admissible steps are tensors already."""
        return ok

    def refine(self, evaluate: Callable[[Array], Array], like: Array, points: int, ratio: Array) -> Found:
        """The dual variable by a fixed number of rounds; see `refine_dual` for the arguments.

        With many points in the first round, fewer rounds are enough.
        """
        fewer = (points > 4 * POINTS) + (points > 32 * POINTS)
        return refine_dual(evaluate, like, self._rounds - fewer, points, ratio)

    def refine_zero(
        self, heights: Callable[[Array], Array], gap: Array, d_sq: Array, longest: Array, eps: float
    ) -> Matched:
        """The step of the matched cap by a fixed number of rounds; see `refine_zero` for the arguments."""
        return refine_zero(heights, gap, d_sq, longest, self._zero_rounds, eps)

    def chosen(self, values: Array, places: Sequence[int]) -> Sequence[Array]:
        """One by one, because a list of places would have to be copied to the device."""
        return [values[i] for i in places]

    def masked(self, x: Tensor, y: Tensor, ok: Array) -> Tensor:
        """Chosen entry by entry on the device."""
        return torch.where(ok, y.to(x.dtype), x)


def choose(blocks: Sequence[Block], capturable: bool) -> Host | Device:
    """The numbers for a step over these blocks."""
    params = [x for block in blocks for x in block.params] or [x for block in blocks for x in block.group["params"]]
    on_cpu = all([x.is_cpu for x in params])  # cheaper for each tensor than its device
    if on_cpu and not capturable and not torch.compiler.is_compiling():
        return Host(blocks)
    devices = {x.device for x in params}
    if len(devices) > 1:
        raise ValueError(f"All parameters of one optimizer must be on one device, got {sorted(map(str, devices))}.")
    return Device(blocks, devices.pop())
