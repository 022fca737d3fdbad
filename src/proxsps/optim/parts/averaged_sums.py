"""The sums of lines with averages, without the kernels, in pieces that stay in the cache; no state is stored.

In the identity metric the new average d' = old d + new g is not computed: its products follow from those of d, g and x.
In Adam's metric torch's own fused kernel, run on copies of a piece, computes d' and D^-1 d' in one operation, which is
faster than several operations. If f32 has lost digits, both are replaced by a computation in doubles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import Weights
from proxsps.core.sampling import WHOLE
from proxsps.optim.blocks import Block
from proxsps.optim.lists import join
from proxsps.optim.moments import Moments, least_metric, overflows
from proxsps.optim.passes import Distance, pieces

PIECE = 1 << 18  # entries; with smaller pieces, calls take most of the time
JOINED = (1 << 14, 1 << 16)  # most entries of a tensor that is joined with others, and of all of these together
SUMS = 7  # <d, D^-1 d>, <d, x>, ||x||^2, <g, x>, ||D^-1 g||^2, ||D^-1 d||^2, <D^-1 d, x>
CANCELLED = 0.1  # of old^2 ||d||^2 + new^2 ||g||^2, below which ||d'||^2 has lost a digit
ENDLESS = torch.tensor(1e30, device="cpu")  # steps; Adam's bias correction is then 1, because ours is in the weights
STILL = 1 - 2.0**-53  # the beta with which an average of ones stays the same


def block_sums(block: Block, points: bool, exact: bool, distance: Distance | None = None) -> Array:
    """The sums of a block with its new averages, 0 for sums that are not needed; in f64 if `exact`.

    Parameters are also compared with their start if a `distance` is passed. Without `exact` a sum may be NaN although
    all entries are finite: then call again with `exact`.
    """
    own, total = block.known_moments, np.zeros(SUMS)
    for members, weights in members_of(own):
        columns = [[column[i] for i in members] for column in columns_of(block)]
        vectors = _vectors(columns, members, distance)
        if exact or (weights is not None and not (fuses(columns, own, weights) and _has_inverse(columns, own))):
            total += _plain_sums(vectors, own, weights, points, exact)
        elif weights is None:
            total += _linear_sums(vectors, own, points)
        else:
            total += _fused_sums(vectors, _scratch(columns[0], 4), own, weights, points)
    return total


def _vectors(
    columns: Sequence[Sequence[Tensor]], places: Sequence[int], distance: Distance | None
) -> Iterator[tuple[Tensor, ...]]:
    """Columns of tensors of one dtype as vectors, small tensors joined and long ones cut into pieces."""
    sizes = tuple([x.numel() for x in columns[0]])
    for members in _plan(sizes):
        low = 0
        for vectors in pieces(*(join([column[i] for i in members]) for column in columns), piece=PIECE):
            yield vectors
            if distance is not None:  # when the sums are made, and x is still in the cache
                distance.add([places[i] for i in members], [sizes[i] for i in members], low, vectors[0])
            low += len(vectors[0])


@lru_cache(maxsize=16)
def _plan(sizes: tuple[int, ...]) -> list[list[int]]:
    """Which tensors are joined; cached, because with hundreds of tensors this takes time."""
    plan = [[i] for i, size in enumerate(sizes) if size > JOINED[0]]
    for whole in (True, False):  # apart: tensors that are measured whole need no indices
        room = 0
        for i, size in enumerate(sizes):
            if 0 < size <= JOINED[0] and (size <= WHOLE) == whole:
                if size > room:
                    plan.append([])
                    room = JOINED[1]
                plan[-1].append(i)
                room -= size
    return plan


def columns_of(block: Block) -> list[list[Tensor]]:
    """Parameters, gradients, averages and, in a metric, averages of squares."""
    own = block.known_moments
    return [block.params, own.grads, own.averages, *([] if own.squares is None else [own.squares])]


def members_of(own: Moments) -> Iterator[tuple[Sequence[int], Weights | None]]:
    """Positions of tensors whose second moments have the same weights, with these weights."""
    if own.squares is None or len(set(own.square_weights)) <= 1:
        yield range(len(own.grads)), own.square_weights[0] if own.square_weights else None
        return
    for weights in dict.fromkeys(own.square_weights):
        yield [i for i, other in enumerate(own.square_weights) if other == weights], weights


def fuses(columns: Sequence[Sequence[Tensor]], own: Moments, weights: Weights) -> bool:
    """Whether torch's fused kernel can use these weights and this eps: it divides by sqrt(v) + eps."""
    return bool(columns[0]) and weights.old < 1 and own.weights.old < 1 and own.eps >= least_metric(columns[0][0].dtype)


def _has_inverse(columns: Sequence[Sequence[Tensor]], own: Moments) -> bool:
    """Whether D^-1 is not needed, or torch's kernel can compute it: in doubles an average of ones would change."""
    return not own.sizes or columns[0][0].dtype is torch.float32


def fused_adam(
    columns: Sequence[list[Tensor]], betas: tuple[float, float], eps: float, lr: float, weight_decay: float
) -> None:
    """Torch's kernel: d <- lerp(g, d, beta1), v likewise with g^2, and x <- (1 - lr weight_decay) x - lr D^-1 d."""
    xs, gs, ds, vs = columns
    torch._fused_adamw_(
        xs,
        gs,
        ds,
        vs,
        [],
        [ENDLESS] * len(xs),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )


def _scratch(params: Sequence[Tensor], count: int) -> list[Tensor]:
    """Memory for a piece: new memory for each piece would cost more than the arithmetic."""
    longest = max(JOINED[1], min(PIECE, max(x.numel() for x in params)))
    return [torch.zeros(longest, dtype=params[0].dtype) for _ in range(count)]


def _added(products: Sequence[Tensor], rows: int) -> Array:
    """Products of several pieces, one per row and piece, as one sum per row."""
    if not products:
        return np.zeros(rows)
    return torch.stack(list(products)).double().view(-1, rows).sum(0).numpy()


def _linear_sums(vectors: Iterator[tuple[Tensor, ...]], own: Moments, points: bool) -> Array:
    """The identity metric: products of d' from those of d and g."""
    products = []
    for x, g, d in vectors:
        products += [torch.dot(d, x), torch.dot(g, x), torch.dot(d, d), torch.dot(d, g), torch.dot(g, g)]
        if points:
            products.append(torch.dot(x, x))
    dx, gx, dd, dg, gg, *xx = _added(products, 6 if points else 5)
    old, new = own.weights
    with np.errstate(invalid="ignore", over="ignore"):
        parts = old * old * dd + new * new * gg
        d_sq = parts + 2 * old * new * dg
        if d_sq < CANCELLED * parts:
            d_sq = math.nan
        return np.array([d_sq, old * dx + new * gx, *(xx or [0.0]), gx, gg if own.sizes else 0.0, 0.0, 0.0])


def _fused_sums(
    vectors: Iterator[tuple[Tensor, ...]], scratch: Sequence[Tensor], own: Moments, weights: Weights, points: bool
) -> Array:
    """Adam's metric, by torch's kernel on copies of a piece.

    With lr = weight_decay = -1 it overwrites x with D^-1 d.
    """
    products, ones = [], scratch[3].fill_(1.0) if own.sizes else scratch[3]
    for x, g, d, v in vectors:
        room = [buffer[: len(x)] for buffer in scratch]
        slope, square, direction = room[:3]
        square.copy_(v)
        if own.sizes:  # D^-1 itself, as the direction of an average that is 1
            inverse = room[2]
            fused_adam([[inverse], [g], [room[3]], [square]], (STILL, weights.old), own.eps, -1.0, -1.0)
            torch.lerp(d, g, own.weights.new, out=slope)
            direction = torch.mul(slope, inverse, out=square)
        else:
            slope.copy_(d)
            fused_adam([[direction], [g], [slope], [square]], (own.weights.old, weights.old), own.eps, -1.0, -1.0)
        products += [torch.dot(slope, direction), torch.dot(slope, x), torch.dot(g, x), torch.dot(g, g)]
        products += [torch.dot(x, x)] if points else []
        products += [torch.dot(direction, direction), torch.dot(direction, x)] if own.moves else []
        if own.sizes:
            scaled = torch.mul(g, inverse, out=square)
            products.append(torch.dot(scaled, scaled))
    rows = [0, 1, 3, -1, *([2] if points else []), *([5, 6] if own.moves else []), *([4] if own.sizes else [])]
    sums = np.zeros(SUMS + 1)
    sums[rows] = _added(products, len(rows))
    if not math.isfinite(sums[-1]) or (own.sizes and not bool((ones == 1).all())):
        sums[0] = math.nan  # the gradient is so large that its square, or the average of ones, may be wrong
    return sums[:SUMS]


def _plain_sums(
    vectors: Iterator[tuple[Tensor, ...]], own: Moments, weights: Weights | None, points: bool, exact: bool
) -> Array:
    """One operation after the other, in doubles if `exact`."""
    total = np.zeros(SUMS)
    for piece in vectors:
        x, g, d, *v = map(Tensor.double, piece) if exact else piece
        slope = torch.lerp(d, g, own.weights.new)
        sums = {1: torch.dot(slope, x), 3: torch.dot(g, x), 2: torch.dot(x, x) if points else 0.0}
        if weights is None:
            sums |= {0: torch.dot(slope, slope), 4: torch.dot(g, g) if own.sizes else 0.0}
        else:
            square = torch.mul(v[0], weights.old).addcmul_(g, g, value=weights.new)
            D = new_metric(square, own.eps, piece[0].dtype)
            direction = slope / D
            sums |= {0: torch.dot(slope, direction)}
            sums |= {5: torch.dot(direction, direction), 6: torch.dot(direction, x)} if own.moves else {}
            scaled = torch.div(g, D, out=D)
            sums |= {4: torch.dot(scaled, scaled)} if own.sizes else {}
            if overflows(piece[1]):
                sums |= {0: math.nan, 3: math.nan}
        for row, number in sums.items():
            total[row] += float(number)
    return total


def new_metric(square: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """D from v, in the memory of v; large enough to divide by in this dtype."""
    root, least = square.sqrt_().add_(eps), least_metric(dtype)
    return root if eps >= least else root.clamp_min_(least)
