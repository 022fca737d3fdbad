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

from proxsps.optim.blocks import plain, same_order, stored

CHUNK = 16_384  # entries; 64 KiB of f32, so that both streams of a chunk stay in a core's own cache
RUN = 2_048  # entries summed in their own precision before they go into a double
SHARES = 8  # parts of the work a thread, so that one that wakes late or is held up takes fewer of them
ALONE = 64 * CHUNK  # entries a thread at least: below, waking a helper costs more than it brings

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
def _sum_two(like, block, tensor, start, length, x_at, g_at, partial, first, last):
    """||g||^2 and <g, x> of each chunk."""
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(_pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(_pointer(g_at[j], like), start[i] + n)[start[i] :]
        gg, gx = 0.0, 0.0
        for low in range(0, n, RUN):
            a, b = like.dtype.type(0), like.dtype.type(0)
            for k in range(low, min(low + RUN, n)):
                a += g[k] * g[k]
                b += g[k] * x[k]
            gg += a
            gx += b
        partial[0, i], partial[1, i] = gg, gx


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _sum_three(like, block, tensor, start, length, x_at, g_at, lam, partial, first, last):
    """||d||^2, <d, x> and ||x||^2 of each chunk, for d = g + lam x."""
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(_pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(_pointer(g_at[j], like), start[i] + n)[start[i] :]
        coupling = like.dtype.type(lam[block[i]])
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
        partial[0, i], partial[1, i], partial[2, i] = dd, dx, xx


@numba.njit(nogil=True, cache=True, fastmath=REORDER)
def _write(like, block, tensor, start, length, x_at, g_at, keep, move, first, last):
    """x <- keep x + move g in each chunk."""
    for i in range(first, last):
        j, n = tensor[i], length[i]
        x = numba.carray(_pointer(x_at[j], like), start[i] + n)[start[i] :]
        g = numba.carray(_pointer(g_at[j], like), start[i] + n)[start[i] :]
        a, b = like.dtype.type(keep[block[i]]), like.dtype.type(move[block[i]])
        for k in range(n):
            x[k] = a * x[k] + b * g[k]


class Layout(NamedTuple):
    """How the entries of tensors in blocks are cut into chunks, and these into shares that threads take in turn."""

    chunks: tuple[np.ndarray, ...]  # block and tensor that a chunk lies in, its first entry there, and its length
    blocks: tuple[np.ndarray, np.ndarray]  # those with entries, and the first chunk of each
    shares: list[tuple[int, int]]
    threads: int


@lru_cache(maxsize=32)
def _layout(sizes: tuple[tuple[int, ...], ...], threads: int) -> Layout:
    places = enumerate((i, size) for i, block in enumerate(sizes) for size in block)
    chunks = [(i, j, low, min(CHUNK, size - low)) for j, (i, size) in places for low in range(0, size, CHUNK)]
    columns = np.array(chunks, np.int64).reshape(-1, 4).T.copy()
    total = sum(map(sum, sizes))
    threads = min(threads, max(1, total // ALONE))
    count = SHARES * threads if threads > 1 else 1
    cuts = np.searchsorted(np.cumsum(columns[-1]), total * np.arange(1, count) / count) + 1
    edges = [0, *cuts.tolist(), len(chunks)]
    return Layout(tuple(columns), np.unique(columns[0], return_index=True), list(itertools.pairwise(edges)), threads)


class Memory(NamedTuple):
    """Where the entries of parameters and gradients lie; valid while the tensors live."""

    like: np.ndarray
    layout: Layout
    x_at: np.ndarray
    g_at: np.ndarray


def memory(params: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Tensor]]) -> Memory | None:
    """The memory of CPU tensors, a list a block, or None where the kernels do not apply.

    They need tensors with memory of their own and without gaps, parameter and gradient in the same order, all f32 or
    all f64, and no lazy sign (`Tensor.is_neg`), which `blocks.gather` has written out.
    """
    # Whole lists at a time: with hundreds of tensors the questions cost as much as the arithmetic.
    xs, gs = list(itertools.chain(*params)), list(itertools.chain(*grads))
    dtypes = {t.dtype for t in itertools.chain(xs, gs)}
    like = LIKE.get(dtypes.pop())
    if like is None or dtypes or not plain(xs, gs) or not same_order(xs, gs):
        return None
    layout = _layout(tuple([tuple([x.numel() for x in block]) for block in params]), torch.get_num_threads())
    x_at, g_at = (np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors)) for tensors in (xs, gs))
    if not (x_at.all() and g_at.all()) and not (stored(xs) and stored(gs)):
        return None
    return Memory(like, layout, x_at, g_at)


def sums(at: Memory, lam: np.ndarray, points: bool) -> np.ndarray:
    """||d||^2, <d, x> and ||x||^2 as rows, a column a block, for d = g + lam x.

    Without `points` d = g, and the last row is left at 0.
    """
    chunks, (blocks, firsts), shares, threads = at.layout
    rows = 3 if points else 2
    partial = np.empty((rows, len(chunks[0])))
    kernel, coupling = (_sum_three, (lam,)) if points else (_sum_two, ())
    _run(kernel, shares, threads, at.like, *chunks, at.x_at, at.g_at, *coupling, partial)
    out = np.zeros((3, len(lam)))
    out[:rows, blocks] = np.add.reduceat(partial, firsts, axis=1)
    return out


def write(at: Memory, keep: np.ndarray, move: np.ndarray) -> None:
    """x <- keep x + move g, with an entry of keep and move a block."""
    chunks, _, shares, threads = at.layout
    _run(_write, shares, threads, at.like, *chunks, at.x_at, at.g_at, keep, move)


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


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
