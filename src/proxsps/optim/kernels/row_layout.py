"""How groups of entries that share a norm lie in memory: rows, filters, columns, whole tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.optim.kernels.layout import CHUNK, Chunks

WIDTH = 512  # columns of a chunk at most, so that their sums stay in the cache; no more than `RUN`
TALL = 4 * CHUNK  # entries of a chunk of columns, which leaves one set of sums behind for each of its columns

Dims = tuple[int, ...] | None
Shapes = tuple[tuple[tuple[int, ...], ...], ...]  # of the tensors of each block


@dataclass(frozen=True, eq=False)
class RowLayout:
    """How rows are cut into chunks: many short rows in one, a long row in several, columns in tiles.

    The columns of the chunks: tensor; first entry there; number of rows; entries of each row; distance of its entries;
    first slot; whether the rows lie in no other chunk. Slots are the places for the sums of the rows of a chunk, so a
    row that is cut has several.
    """

    chunks: Chunks
    cut: np.ndarray  # whether the row of a slot lies in other chunks too, for each slot
    owner: np.ndarray  # the row of each slot
    counts: list[int]  # the rows of each tensor, empty ones too
    block: np.ndarray  # the block of each row
    in_order: bool  # whether slot i belongs to row i


class RowGroups(NamedTuple):
    """Groups of entries that share a norm: rows, or several of them."""

    layout: RowLayout
    at: np.ndarray  # the group of each slot
    joined: bool  # whether a group may have several rows
    psi: np.ndarray  # the constants of the functions of their norms, as in `Scalar`: one column per group
    blocks: np.ndarray  # the block of each group


def row_layout(params: Sequence[Sequence[Tensor]], dims: Sequence[Dims]) -> RowLayout | None:
    """How the rows of dense CPU tensors lie in memory; None if the kernels do not apply.

    Args:
        params: the tensors x of each block.
        dims: for each block the dims that a norm is taken over, None for all; the other dims count the rows. Rows are
            counted block by block, tensor by tensor, in the order of memory.
    """
    shapes = tuple([tuple([x.shape for x in block]) for block in params])
    plain = all([x.is_contiguous() for block in params for x in block])
    strides = None if plain else tuple([tuple([x.stride() for x in block]) for block in params])
    return _layout(shapes, strides, tuple(dims), torch.get_num_threads())


def view(shape: Sequence[int], stride: Sequence[int] | None, dims: Dims) -> tuple[int, int, int] | None:
    """A tensor without gaps as (outer, n, inner) in the order of memory, with norms taken over n.

    None if the dims of a norm are not adjacent in memory. Without strides the tensor is contiguous.
    """
    normed = set(range(len(shape))) if dims is None else {d % len(shape) for d in dims}
    order = [i for i in range(len(shape)) if shape[i] != 1]  # dims of length 1 may have any stride
    if stride is not None:
        order.sort(key=lambda i: -stride[i])
    runs = [(key, math.prod(shape[i] for i in run)) for key, run in itertools.groupby(order, normed.__contains__)]
    if sum(key for key, _ in runs) > 1:
        return None
    keys = [key for key, _ in runs]
    if True not in keys:  # each entry is its own group
        return math.prod(shape), 1, 1
    at = keys.index(True)
    return math.prod(s for _, s in runs[:at]), runs[at][1], math.prod(s for _, s in runs[at + 1 :])


@lru_cache(maxsize=32)
def _layout(shapes: Shapes, strides: Shapes | None, dims: tuple[Dims, ...], threads: int) -> RowLayout | None:
    views: list[tuple[int, int, int]] = []
    blocks: list[int] = []
    for i, block in enumerate(shapes):
        for j, shape in enumerate(block):
            own = view(shape, None if strides is None else strides[i][j], dims[i])
            if own is None:
                return None
            views.append(own)
            blocks.append(i)
    chunks, owner, row = [], [np.empty(0, np.int64)], 0
    slot = 0
    for tensor, (outer, n, inner) in enumerate(views):
        for start, first, count, height, stride, uncut in _tiles(outer, n, inner):
            chunks.append((tensor, start, count, height, stride, slot, uncut))
            owner.append(np.arange(row + first, row + first + count))
            slot += count
        row += outer * inner
    columns = np.array(chunks, np.int64).reshape(-1, 7).T.copy()
    owners, counts = np.concatenate(owner), [outer * inner for outer, _, inner in views]
    return RowLayout(
        Chunks(tuple(columns), columns[2] * columns[3], threads),
        np.repeat(columns[6] == 0, columns[2]),
        owners,
        counts,
        np.repeat(blocks, counts).astype(np.int64),
        len(owners) == row and bool((owners == np.arange(row)).all()),
    )


def _tiles(outer: int, n: int, inner: int) -> Iterator[tuple[int, int, int, int, int, bool]]:
    """First entry, first row, rows, entries of each, their distance, and whether rows are whole, for each chunk."""
    if n == 0 or outer == 0 or inner == 0:
        return
    if inner == 1 and n <= CHUNK:
        several = CHUNK // n
        for row in range(0, outer, several):
            yield row * n, row, min(several, outer - row), n, 1, True
    elif inner == 1:
        for row in range(outer):
            for low in range(0, n, CHUNK):
                yield row * n + low, row, 1, min(CHUNK, n - low), 1, False
    else:
        for part, left in itertools.product(range(outer), range(0, inner, WIDTH)):
            width = min(WIDTH, inner - left)
            tall = max(1, TALL // width)
            for low in range(0, n, tall):
                yield (part * n + low) * inner + left, part * inner + left, width, min(tall, n - low), inner, False
