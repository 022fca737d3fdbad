"""Where the entries of tensors lie in memory, how they are cut into chunks, and the threads that process these.

The kernels release the GIL, and our own small thread pool runs them on slices of the work, because numba's
threading layers are unsafe from several threads or after a fork. Partial sums are kept per chunk of memory and added in
one order: the result does not depend on the number of threads.

Every second pass over tensors that fit into the last cache goes backwards: it begins with what the previous pass has
left there. Longer passes are faster forwards.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numba
import numpy as np
import torch
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from proxsps.optim.blocks import same_order
from proxsps.optim.kernels.caching import compiled, inlined
from proxsps.optim.lists import PLAIN

CHUNK = 16_384  # entries; 64 KiB of f32, so that both streams of a chunk stay in a core's own cache
RUN = 1_024  # entries summed in their own precision before they go into a double
PIECE = 256  # least entries of a chunk that a sample reads
SHARES = 8  # parts of the work per thread, so that a thread that wakes late or is held up gets fewer of them
# Entries that even a backward pass reads forwards: memory is prefetched in this direction, and a turn after every chunk
# would cost more than the cache saves.
STRETCH = 16 * CHUNK
NEAR = 1 << 22  # most entries of a pass that goes backwards; four streams of f32 then have 64 MiB
ALONE = 64 * CHUNK  # least entries per thread: with fewer, waking a helper costs more than it saves

LIKE: dict[torch.dtype, np.ndarray] = {torch.float32: np.empty(0, np.float32), torch.float64: np.empty(0, np.float64)}

# Sums may be reordered into vector lanes and multiply-adds contracted; NaN and infinity keep their meaning.
REORDER = {"reassoc", "contract", "nsz"}
# Single entries are computed as they are written: reordered, z - clip(z) need not be an exact zero.
ENTRYWISE = {"contract", "nsz"}


@intrinsic
def pointer(typingctx, address, like):
    """The integer `address` as a pointer to entries of the type of `like`."""
    target = types.CPointer(like.dtype)

    def build(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(target))

    return target(address, like), build


@intrinsic
def run_memory(typingctx, like):
    """A pointer to memory for a run, of the type of `like`, on the stack of the kernel.

    Slices of arrays that numba allocates count their references, which costs more than a sum over a short run.
    """
    of = like.dtype if isinstance(like, types.Array) else like.instance_type

    def build(context, builder, signature, args):
        memory = cgutils.alloca_once(builder, context.get_data_type(of), size=RUN)
        memory.align = 64
        return memory

    return types.CPointer(of)(like), build


@inlined()
def entries(like, at, j, low, n):
    """The n entries of tensor j from `low` on, as an array; None without addresses."""
    if at is None:
        return None
    return numba.carray(pointer(at[j], like), low + n)[low:]


@dataclass(frozen=True, eq=False)
class Chunks:
    """Pieces of memory, as columns that a kernel reads."""

    columns: tuple[np.ndarray, ...]
    sizes: np.ndarray  # entries of each chunk
    threads: int  # at most

    @cached_property
    def total(self) -> int:
        """Entries of all chunks."""
        return int(self.sizes.sum())


@lru_cache(maxsize=128)
def shares(chunks: Chunks, threads: int, backwards: bool = False) -> list[tuple[int, int]]:
    """Ranges of chunks with about the same number of entries, in the order of processing."""
    ends, count = np.cumsum(chunks.sizes), SHARES * threads if threads > 1 else 1
    if backwards:
        count = max(count, chunks.total // STRETCH)
    cuts = np.searchsorted(ends, chunks.total * np.arange(1, count) / count) + 1
    edges = [0, *np.minimum(cuts, len(ends)).tolist(), len(ends)]
    pairs = [pair for pair in itertools.pairwise(edges) if pair[0] < pair[1]]
    return pairs[::-1] if backwards else pairs


@compiled()
def _fold(numbers, owners, out):
    for i in range(len(owners)):
        for row in range(len(out)):
            out[row, owners[i]] += numbers[row, i]


def fold(numbers: np.ndarray, owners: np.ndarray, count: int) -> np.ndarray:
    """Rows of numbers added up over those with the same owner; always in the same order."""
    out = np.zeros((len(numbers), count))
    _fold(np.ascontiguousarray(numbers), owners, out)
    return out


@lru_cache(maxsize=32)
def layout(sizes: tuple[tuple[int, ...], ...], threads: int) -> Chunks:
    """How tensors of the given sizes, one tuple per block, are cut into chunks.

    The columns: the block and the tensor that a chunk lies in, its first entry there, and its length.
    """
    places = enumerate((i, size) for i, block in enumerate(sizes) for size in block)
    chunks = [(i, j, low, min(CHUNK, size - low)) for j, (i, size) in places for low in range(0, size, CHUNK)]
    columns = np.array(chunks, np.int64).reshape(-1, 4).T.copy()
    return Chunks(tuple(columns), columns[-1], threads)


@lru_cache(maxsize=32)
def sampled(whole: Chunks, every: int) -> tuple[Chunks, np.ndarray]:
    """One piece of each chunk, about one entry in `every`, and the factor for its sums.

    Every tensor has its part in the sample, which depends only on the sizes of the tensors.
    """
    block, tensor, start, length = whole.columns
    wanted = np.maximum(PIECE, -(-length // (64 * every)) * 64)
    piece = np.minimum(length, wanted)
    # The golden ratio spreads the places: pieces at one place of all chunks could be the same columns of a matrix.
    place = np.modf(np.arange(len(length)) * 0.6180339887498949)[0]
    start = start + (place * (length - piece)).astype(np.int64) // 16 * 16
    return Chunks((block, tensor, start, piece), piece, whole.threads), length / piece


def addresses(*lists: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray] | None:
    """An array of the type of CPU tensors, and the first entry of each of them; None if the kernels do not apply.

    They need lists of the same length, one row of addresses each, of tensors without gaps, the first of all lists in
    the same order and so on, all f32 or all f64, whose memory is their own.
    """
    # Whole lists at a time: with hundreds of tensors these checks cost as much as the arithmetic.
    tensors = list(itertools.chain(*lists))
    if not tensors:
        return LIKE[torch.float64], np.empty((len(lists), 0), np.int64)
    dtypes = {t.dtype for t in tensors}
    like = LIKE.get(dtypes.pop())
    if like is None or dtypes or not all(map(_plain, set(map(type, tensors)))) or not same_order(*lists):
        return None
    if not all(map(attrgetter("is_cpu"), tensors)) or any(map(Tensor.is_neg, tensors)):
        return None
    try:
        at = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
    except RuntimeError:  # tensors inside torch.func transforms have no address
        return None
    if not at.all() and any(t.numel() and not t.data_ptr() for t in tensors):
        return None
    return like, at.reshape(len(lists), -1)


@cache
def _plain(kind: type[Tensor]) -> bool:
    """Whether tensors of this type hold their entries themselves instead of wrapping other tensors."""
    return kind in PLAIN or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def run(kernel: Callable[..., None], chunks: Chunks, *args: Any, weight: float = 1.0, backwards: bool = False) -> None:
    """Call kernel(*args, first, last) on every share of the chunks; each free thread takes the next share.

    Args:
        kernel: compiled function that releases the GIL, and takes the chunks of range(first, last).
        chunks: the pieces of memory.
        args: arguments of the kernel.
        weight: work per entry, as a multiple of that of a plain sum: heavier passes use threads for fewer entries.
        backwards: whether to begin with the last share.
    """
    work_ahead = chunks.total * weight
    threads = min(chunks.threads, max(1, int(work_ahead) // ALONE))
    backwards = backwards and chunks.total <= NEAR
    if threads == 1 and (not backwards or chunks.total <= STRETCH):
        kernel(*args, 0, len(chunks.sizes))
        return
    waiting = deque(shares(chunks, threads, backwards))

    def work() -> None:
        while waiting:
            try:
                share = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            kernel(*args, *share)

    helpers = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(workers, thread_name_prefix="proxsps")


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
