"""Lines whose slopes are averages of gradients, updated in the passes of the step; without the kernels.

The first pass computes the new averages in pieces that stay in the cache, adds up what the step needs, and stores
nothing: a skipped step leaves the state as it was. The second pass changes the averages in place and moves the
parameters, piece by piece as well. The compiled kernels do the same (`proxsps.optim.kernels.moments`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import Weights
from proxsps.core.step import Affine
from proxsps.optim.blocks import FULL, Block, plain, same_order, stored
from proxsps.optim.moments import Moments
from proxsps.optim.parts.averaged_sums import (
    PIECE,
    block_sums,
    columns_of,
    fused_adam,
    fuses,
    members_of,
    new_metric,
)
from proxsps.optim.parts.lines import Lines
from proxsps.optim.passes import Distance, comparable, fused_sgd, safe_decay


class AveragedLines(Lines):
    """Lines that update their averages while they sum and while they write."""

    @staticmethod
    def takes(blocks: Sequence[Block]) -> bool:
        """Whether all blocks have averages, no centres, and dense tensors of full precision in one memory order."""
        return all(map(_dense, blocks)) and any(block.params for block in blocks)

    def sums(self, points: bool) -> Array:
        """One pass; blocks whose squares leave the range of f32 are summed again in f64."""
        found = self._found(points)
        squares = found[[0, 4, 5]]
        tiny = (squares > 0) & (squares < 1e-20) | (found[0] == 0)
        for i in np.flatnonzero(~np.isfinite(found).all(axis=0) | tiny.any(axis=0)).tolist():
            found[:, i] = block_sums(self.blocks[i], points, exact=True)
        self._further = found[3:]
        return found[:3]

    def _found(self, points: bool) -> Array:
        """All sums as rows with one column per block."""
        if not all(map(comparable, self.blocks)):
            return np.array([block_sums(block, points, exact=False) for block in self.blocks]).T
        distances = list(map(Distance, self.blocks))
        pairs = zip(self.blocks, distances, strict=True)
        sums = np.array([block_sums(block, points, False, distance) for block, distance in pairs]).T
        self.moved_sq = np.array([distance.moved_sq for distance in distances])
        return sums

    def extras(self) -> list[list[Array]]:
        """From the same pass."""
        return [[g_dot_x, g_sq, np.float64(0.0), *step] for g_dot_x, g_sq, *step in self._further.T]

    def move(self, update: Affine, ok: Array) -> None:
        """One pass, which stores the new averages too."""
        if not ok:
            return
        self._write(update)
        for block in self.blocks:
            block.known_moments.written = True

    def _write(self, update: Affine) -> None:
        for block, keep, move in zip(self.blocks, update.keep, update.move, strict=True):
            write_block(block, float(keep), float(move))


def _dense(block: Block) -> bool:
    own = block.moments
    if own is None or block.centered:
        return False
    lists = [block.params, own.grads, own.averages, *([] if own.squares is None else [own.squares])]
    if not block.params:
        return True
    dtypes = {t.dtype for tensors in lists for t in tensors}
    return len(dtypes) == 1 and dtypes <= FULL and plain(*lists) and same_order(*lists) and all(map(stored, lists))


def write_block(block: Block, keep: float, move: float) -> None:
    """Update the averages with the gradients, and x <- keep x + move D^-1 d."""
    own = block.known_moments
    for members, weights in members_of(own):
        columns = [[column[i] for i in members] for column in columns_of(block)]
        if weights is not None and fuses(columns, own, weights):
            betas = own.weights.old, weights.old
            fused_adam(columns, betas, own.eps, lr=-move, weight_decay=(keep - 1) / move if move else 0.0)
            if not move:
                _scale(columns[0], keep)
            continue
        for lists in _pieces(columns):
            _write(lists, own, weights, keep, move)


def _pieces(columns: Sequence[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Lists of tensors, or of pieces of them, that stay in the cache together."""
    first, size = 0, 0
    for i, x in enumerate(columns[0]):
        entries = x.numel()
        if size + entries > PIECE and i > first:
            yield [column[first:i] for column in columns]
            first, size = i, 0
        size += entries
        if entries > PIECE and x.is_contiguous():
            yield from (
                [[t] for t in part] for part in zip(*(c[i].view(-1).split(PIECE) for c in columns), strict=True)
            )
            first, size = i + 1, 0
    if first < len(columns[0]):
        yield [column[first:] for column in columns]


def _write(lists: Sequence[list[Tensor]], own: Moments, weights: Weights | None, keep: float, move: float) -> None:
    xs, gs, ds, *squares = lists
    _average(ds, gs, own.weights.new)
    if weights is None and (decay := safe_decay(keep, move)) is not None:
        fused_sgd(xs, ds, -move, decay)
        return
    _scale(xs, keep)
    if weights is None:
        if move:
            torch._foreach_add_(xs, ds, alpha=move)
        return
    (vs,) = squares
    torch._foreach_mul_(vs, weights.old)
    torch._foreach_addcmul_(vs, gs, gs, weights.new)
    torch._foreach_addcdiv_(xs, ds, [new_metric(v.clone(), own.eps, v.dtype) for v in vs], move)


def _average(ds: list[Tensor], gs: list[Tensor], new: float) -> None:
    """d <- d + new (g - d); bitwise g if the old d has weight 0."""
    if new == 1:
        torch._foreach_copy_(ds, gs)
    else:
        fused_sgd(ds, gs, -new, -1.0)


def _scale(xs: list[Tensor], keep: float) -> None:
    if keep != 1:  # a tensor, because torch takes far longer for hundreds of products with a Python number
        torch._foreach_mul_(xs, torch.tensor(keep, dtype=xs[0].dtype))
