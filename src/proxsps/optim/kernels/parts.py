"""What the parts of a plan share: where tensors lie in memory, and the numbers that a step changes averages with.

A part is blocks that compiled kernels process together, in dense f32 or f64 memory on the CPU. Numbers that go in and
out of parts are Python floats, one per block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from proxsps.core import plain
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.kernels.layout import Chunks, entries, pointer, run
from proxsps.optim.rule import Rule

Floats = Sequence[float]
NOWHERE = np.empty(0, np.int64)

_corrected = inlined()(plain.corrected_weight)


class Memory(NamedTuple):
    """Where the entries of tensors lie, and what makes slopes of them; valid while the tensors live.

    What a method does not have is None, and numba compiles a kernel for each kind of slopes.
    """

    like: np.ndarray  # an array of the type of the entries
    x_at: np.ndarray
    g_at: np.ndarray
    d_at: np.ndarray | None  # averages
    v_at: np.ndarray | None  # averages of squares, in Adam's metric
    y_at: np.ndarray | None  # the parameters of the schedule-free form, where x is z
    counts_at: np.ndarray  # numbers of gradients; empty in the identity metric
    start_at: np.ndarray  # see `sampling.Start`
    start_scale: np.ndarray
    coupling: np.ndarray  # lam of each block whose slope is g + lam x
    weights: np.ndarray  # old, new, old_v, new_v of each tensor, b and the share of a new point; one row per tensor
    eps: float
    least: float


# Kernels unpack the memory once: a tuple that is passed on counts references to all its arrays, in every call.


@inlined()
def tensors(like, x_at, g_at, d_at, v_at, y_at, j, low, n):
    """x, g, d, v and y: the n entries of tensor j from `low` on."""
    x, g, d = entries(like, x_at, j, low, n), entries(like, g_at, j, low, n), entries(like, d_at, j, low, n)
    return x, g, d, entries(like, v_at, j, low, n), entries(like, y_at, j, low, n)


@inlined()
def cut(entries, low, high):
    """A part of these entries, if there are any."""
    return None if entries is None else entries[low:high]


@inlined()
def weights(like, own, eps, least, j):
    """old, new, old_v, new_v of a tensor, eps, least and 1 in the type of the entries."""
    of = like.dtype.type
    return of(own[j, 0]), of(own[j, 1]), of(own[j, 2]), of(own[j, 3]), of(eps), of(least), of(1)


@compiled()
def _set_weights(counts_at, k, beta, beta2, mix, weights):
    """Set the weights of old and new values in averages, and b of the schedule-free form; returns that of a new value.

    In a metric, averages have Adam's correction, and those of squares depend on the number of gradients of a tensor.
    """
    like = np.empty(0, np.float32)
    new = _corrected(k, beta) if len(counts_at) else 1 - beta * min(k, 1.0)
    weights[:, 0], weights[:, 1], weights[:, 4] = 1 - new, new, mix
    for j in range(len(counts_at)):
        of_squares = _corrected(numba.carray(pointer(counts_at[j], like), 1)[0], beta2)
        weights[j, 2], weights[j, 3] = 1 - of_squares, of_squares
    return new


@compiled()
def _count(counts_at):
    """One gradient more for each tensor."""
    like = np.empty(0, np.float32)
    for j in range(len(counts_at)):
        numba.carray(pointer(counts_at[j], like), 1)[0] += like.dtype.type(1)


class Part:
    """Blocks that are processed together."""

    l1: Sequence[float] | None = None  # strengths of the l1 norm, if blocks that are not affine have that alone

    def __init__(self, at: Memory) -> None:
        self.at, self._memory = at, tuple(at)  # kernels take plain tuples faster
        self._turns = itertools.cycle((False, True))  # every second pass goes backwards
        self.mixes = at.y_at is not None  # whether a write moves the parameters of the schedule-free form too

    def bind(self, gradients: Sequence[int]) -> None:
        """Use gradients at other addresses."""
        self.at.g_at[:] = gradients

    def set_weights(self, k: float, rule: Rule) -> float:
        """Set the weights of averages for step number k; returns that of new values."""
        numbers = k, rule.beta or 0.0, rule.beta2 or 0.0, rule.mix or 0.0
        new: float = _set_weights(self.at.counts_at, *numbers, self.at.weights)
        return new

    def set_share(self, share: float) -> None:
        """The share of the new point in the average of the schedule-free form."""
        self.at.weights[:, 5] = share

    def set_coupling(self, lam: Floats) -> None:
        """How much of x is in the slopes of coupled methods."""
        self.at.coupling[:] = lam

    def count(self) -> None:
        """Count one more gradient of each tensor."""
        _count(self.at.counts_at)

    def _run(self, kernel: Any, chunks: Chunks, weight: float, *args: Any) -> None:
        """A pass over chunks, whose kernel has `weight` times the work of a plain sum."""
        run(kernel, chunks, self._memory, chunks.columns, *args, weight=weight, backwards=next(self._turns))
