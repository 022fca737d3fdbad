"""Lines whose slopes are averages of gradients that change in the passes of the step itself, by torch alone.

The first pass computes the new averages in pieces that stay in the cache, adds up what the step needs, and stores
nothing: a step that is skipped leaves the state as it was. The second pass changes the averages in place and moves the
parameters, piece by piece as well. The compiled kernels work alike (`proxsps.optim.kernels.moments`).
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
from proxsps.optim.moments import Moments, least_metric
from proxsps.optim.parts.lines import Lines
from proxsps.optim.passes import COPIES, bucketed

PIECE = 1 << 18  # entries; smaller pieces spend their time on calls
SUMS = 7  # <d, D^-1 d>, <d, x>, ||x||^2, <g, x>, ||D^-1 g||^2, ||D^-1 d||^2, <D^-1 d, x>


class AveragedLines(Lines):
    """Lines that update their averages while they sum and while they write."""

    @staticmethod
    def takes(blocks: Sequence[Block]) -> bool:
        """Whether all blocks have averages, no centres, and dense tensors of full precision in one memory order."""
        return all(map(_dense, blocks)) and any(block.params for block in blocks)

    def sums(self, points: bool) -> Array:
        """One pass; blocks whose squares leave the range of f32 are taken again in f64."""
        found = self._found(points)
        squares = found[[0, 4, 5]]
        tiny = (squares > 0) & (squares < 1e-20) | (found[0] == 0)
        for i in np.flatnonzero(~np.isfinite(found).all(axis=0) | tiny.any(axis=0)):
            found[:, i] = block_sums(self.blocks[i], points, exact=True)
        self._further = found[3:]
        return found[:3]

    def _found(self, points: bool) -> Array:
        """All sums as rows with one column per block."""
        self.measure()
        return np.array([block_sums(block, points, exact=False) for block in self.blocks]).T

    def extras(self) -> list[list[Array]]:
        """From the same pass."""
        return [[g_dot_x, g_sq, np.float64(0.0), *step] for g_dot_x, g_sq, *step in self._further.T]

    def move(self, update: Affine, ok: Array) -> None:
        """One pass, which stores the new averages too."""
        if not ok:
            return
        self._write(update)
        for block in self.blocks:
            block.moments.written = True

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


def block_sums(block: Block, points: bool, exact: bool) -> list[float]:
    """The sums of a block with the averages that the step would make, 0 for what is not needed; in f64 if `exact`."""
    own, total = block.moments, [0.0] * SUMS
    scratch = _scratch(block, exact)
    for members, squares in _members(own):
        columns = [[column[i] for i in members] for column in _columns(block)]
        for vectors in bucketed(zip(*columns, strict=True), *COPIES, piece=PIECE):
            if exact:
                vectors = tuple(map(Tensor.double, vectors))
            for row, number in _vector_sums(vectors, own, squares, points, scratch):
                total[row] += number.item()
    return total


def _scratch(block: Block, exact: bool) -> list[Tensor]:
    """Memory for d, D and D^-1 d of a piece: fresh memory for each of them would cost more than the arithmetic."""
    if not block.params:
        return []
    longest = max(COPIES[1], min(PIECE, max(x.numel() for x in block.params)))
    count = 1 if block.moments.squares is None else 3
    return [torch.empty(longest, dtype=torch.float64 if exact else block.params[0].dtype) for _ in range(count)]


def _columns(block: Block) -> list[list[Tensor]]:
    own = block.moments
    return [block.params, own.grads, own.averages, *([] if own.squares is None else [own.squares])]


def _members(own: Moments) -> Iterator[tuple[Sequence[int], Weights | None]]:
    """Places of tensors whose second moments have the same weights."""
    if own.squares is None or len(set(own.square_weights)) <= 1:
        yield range(len(own.grads)), own.square_weights[0] if own.square_weights else None
        return
    for weights in dict.fromkeys(own.square_weights):
        yield [i for i, other in enumerate(own.square_weights) if other == weights], weights


def _vector_sums(
    vectors: Sequence[Tensor], own: Moments, weights: Weights | None, points: bool, scratch: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """The sums that are needed, each with its row."""
    x, g, d, *v = vectors
    room = [buffer[: len(x)] for buffer in scratch]
    slope = torch.lerp(d, g, own.weights.new, out=room[0])
    yield 1, torch.dot(slope, x)
    yield 3, torch.dot(g, x)
    if points:
        yield 2, torch.dot(x, x)
    if not v or weights is None:
        yield 0, torch.dot(slope, slope)
        if own.sizes:
            yield 4, torch.dot(g, g)
        return
    metric = _metric(torch.mul(v[0], weights.old, out=room[1]).addcmul_(g, g, value=weights.new), own.eps)
    direction = torch.div(slope, metric, out=room[2])
    yield 0, torch.dot(slope, direction)
    if own.moves:
        yield 5, torch.dot(direction, direction)
        yield 6, torch.dot(direction, x)
    if own.sizes:
        scaled = torch.div(g, metric, out=metric)
        yield 4, torch.dot(scaled, scaled)


def _metric(square: Tensor, eps: float) -> Tensor:
    """D from v, in the place of v."""
    root = square.sqrt_()
    return root.add_(eps) if eps else root.clamp_min_(least_metric(root.dtype))


def write_block(block: Block, keep: float, move: float) -> None:
    """Take the gradients into the averages, and x <- keep x + move D^-1 d."""
    own = block.moments
    for members, weights in _members(own):
        columns = [[column[i] for i in members] for column in _columns(block)]
        if weights is not None and move and own.eps and weights.old < 1:
            _fused_adam(columns, own, weights, keep, move)
            continue
        for lists in _pieces(columns):
            _write(lists, own, weights, keep, move)


def _pieces(columns: Sequence[Sequence[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Lists of tensors, or of pieces of them, that stay in the cache together."""
    waiting: list[tuple[Tensor, ...]] = []
    size = 0
    for item in zip(*columns, strict=True):
        entries = item[0].numel()
        if entries > PIECE and item[0].is_contiguous():
            yield from ([[t] for t in part] for part in zip(*(t.view(-1).split(PIECE) for t in item), strict=True))
            continue
        if waiting and size + entries > PIECE:
            yield list(map(list, zip(*waiting, strict=True)))
            waiting, size = [], 0
        waiting.append(item)
        size += entries
    if waiting:
        yield list(map(list, zip(*waiting, strict=True)))


def _write(lists: Sequence[list[Tensor]], own: Moments, weights: Weights | None, keep: float, move: float) -> None:
    xs, gs, ds, *squares = lists
    torch._foreach_lerp_(ds, gs, own.weights.new)
    if keep != 1:  # a tensor, because torch takes far longer for hundreds of products with a Python number
        torch._foreach_mul_(xs, torch.tensor(keep, dtype=xs[0].dtype))
    if weights is None:
        torch._foreach_add_(xs, ds, alpha=move)
        return
    (vs,) = squares
    torch._foreach_mul_(vs, weights.old)
    torch._foreach_addcmul_(vs, gs, gs, weights.new)
    torch._foreach_addcdiv_(xs, ds, [_metric(v.clone(), own.eps) for v in vs], move)


def _fused_adam(columns: Sequence[list[Tensor]], own: Moments, weights: Weights, keep: float, move: float) -> None:
    """The same by torch's own kernel, after so many steps that its bias correction is over: ours is in the weights."""
    xs, gs, ds, vs = columns
    torch._fused_adamw_(
        xs,
        gs,
        ds,
        vs,
        [],
        [torch.tensor(1e30)] * len(xs),
        lr=-move,
        beta1=own.weights.old,
        beta2=weights.old,
        weight_decay=(keep - 1) / move,
        eps=own.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
