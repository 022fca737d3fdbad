"""Two passes over all parameters at once on the CPU: the sums a step needs, then x <- keep x + move g.

Compiled by numba (extra `fast`) and cached on disk. The kernels release the GIL, and a small thread pool of our own
runs them on slices of the work, because numba's threading layers are unsafe from several threads or after a fork.
Partial sums are kept per chunk of memory and added in one order: the result does not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from proxsps.optim.blocks import same_order

CHUNK = 16_384  # entries; 64 KiB of f32, so that both streams of a chunk stay in a core's own cache
RUN = 2_048  # entries summed in their own precision before they go into a double
SHARE = 64 * CHUNK  # entries handed to a thread at a time; smaller ones even out better, larger ones cost fewer calls
ALONE = 256 * CHUNK  # entries below which waking a second thread costs more than it brings

LIKE = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}

# Sums may be reordered into vector lanes and multiply-adds contracted; NaN and infinity keep their meaning.
REORDER = {"reassoc", "contract", "nsz"}


@intrinsic
def _pointer(typingctx, address, like):
    """The integer `address` as a pointer to entries of the type of `like`."""
    target = types.CPointer(like.dtype)

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(address, like), build


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _sum_chunks(like, tensor, start, length, x_at, g_at, lam, partial, first, last):
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(_pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(_pointer(g_at[j], like), start[i] + n)[start[i] :]
        coupling = like.dtype.type(lam[j])
        dd, dx, xx = 0.0, 0.0, 0.0
        for low in range(0, n, RUN):
            a, b, c = like.dtype.type(0), like.dtype.type(0), like.dtype.type(0)
            for k in range(low, min(low + RUN, n)):
                d = g[k] + coupling * x[k]
                a += d * d
                b += d * x[k]
                c += x[k] * x[k]
            dd += a
            dx += b
            xx += c
        partial[i, 0], partial[i, 1], partial[i, 2] = dd, dx, xx


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _write_chunks(like, tensor, start, length, x_at, g_at, keep, move, first, last):
    for i in range(last - 1, first - 1, -1):
        j, n = tensor[i], length[i]
        x = numba.carray(_pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(_pointer(g_at[j], like), start[i] + n)[start[i] :]
        a, b = like.dtype.type(keep[j]), like.dtype.type(move[j])
        for k in range(n):
            x[k] = a * x[k] + b * g[k]


class Layout(NamedTuple):
    """How the entries of a list of tensors are cut into chunks, and these into shares that threads take in turn."""

    tensor: np.ndarray
    start: np.ndarray
    length: np.ndarray
    shares: list[tuple[int, int]]
    threads: int


@lru_cache(maxsize=32)
def _layout(sizes: tuple[int, ...], threads: int) -> Layout:
    chunks = [(j, low, min(CHUNK, size - low)) for j, size in enumerate(sizes) for low in range(0, size, CHUNK)]
    tensor, start, length = np.array(chunks, np.int64).reshape(-1, 3).T.copy()
    total = sum(sizes)
    threads = min(threads, max(1, total // ALONE))
    count = max(threads, total // SHARE)
    cuts = np.searchsorted(np.cumsum(length), total * np.arange(1, count) / count) + 1
    edges = [0, *cuts.tolist(), len(chunks)]
    return Layout(tensor, start, length, list(itertools.pairwise(edges)), threads)


class Memory(NamedTuple):
    """Where the entries of parameters and gradients lie; valid while the tensors live."""

    like: np.ndarray
    layout: Layout
    x_at: np.ndarray
    g_at: np.ndarray


def memory(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Memory | None:
    """The memory of CPU tensors, or None where the kernels do not apply: not dense, or not all f32 or all f64."""
    # Whole lists at a time: with hundreds of tensors the questions cost as much as the arithmetic.
    tensors = [*params, *grads]
    dtypes = {t.dtype for t in tensors}
    like = LIKE.get(dtypes.pop())
    if like is None or dtypes:
        return None
    if not all([t.is_contiguous() for t in tensors]) and not all(map(same_order, params, grads)):
        return None
    layout = _layout(tuple([x.numel() for x in params]), torch.get_num_threads())
    address = np.array([t.data_ptr() for t in tensors], np.int64)
    return Memory(like, layout, address[: len(params)], address[len(params) :])


def sums(at: Memory, lam: np.ndarray) -> np.ndarray:
    """||d||^2, <d, x> and ||x||^2 for d = g + lam x, a row a tensor; lam has an entry a tensor."""
    tensor, start, length, shares, threads = at.layout
    partial = np.empty((len(tensor), 3))
    _run(_sum_chunks, shares, threads, at.like, tensor, start, length, at.x_at, at.g_at, lam, partial)
    out = np.zeros((len(at.x_at), 3))
    np.add.at(out, tensor, partial)
    return out


def write(at: Memory, keep: np.ndarray, move: np.ndarray) -> None:
    """x <- keep x + move g, with an entry of keep and move a tensor."""
    tensor, start, length, shares, threads = at.layout
    # Backwards: what the summing pass read last is still in the cache, and so is what the next one reads first.
    _run(_write_chunks, shares[::-1], threads, at.like, tensor, start, length, at.x_at, at.g_at, keep, move)


def _run(kernel: Callable[..., None], shares: list[tuple[int, int]], threads: int, *args: Any) -> None:
    """Run a kernel on every share of the chunks; whoever is free takes the next one."""
    waiting = deque(shares)

    def work() -> None:
        while waiting:
            try:
                share = waiting.popleft()
            except IndexError:  # another thread was quicker
                return
            kernel(*args, *share)

    helpers = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="proxsps")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
