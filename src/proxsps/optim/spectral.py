"""Blocks whose directions are orthogonalised averages of gradients, for matrices and filters.

Matrices of one shape are orthogonalised together. Filters are matrices with one row per output channel, and a tensor
may hold several matrices along its first dim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from proxsps.core.schedule_free import QUINTIC, ROUNDS
from proxsps.optim.memory import least_metric

PIECE = 1 << 18  # entries of tensors that are iterated together: more would leave the cache
WIDE = 2  # times as many columns as rows, from which on the iteration works on A = X X^T
FIRST = 3  # rounds in bf16 after which A is computed from X again: errors of A grow twelvefold in each round
LARGE = 128  # rows and columns from which on bf16 is faster than f32 on CPUs that multiply it


def piles(tensors: Sequence[Tensor], most: float) -> list[list[int]]:
    """Tensors of one shape and dtype that together have at most so many entries, or one tensor; by their positions."""
    alike: dict[tuple[torch.Size, torch.dtype], list[int]] = defaultdict(list)
    for i, x in enumerate(tensors):
        if x.numel():
            alike[x.shape, x.dtype].append(i)
    found = []
    for (shape, _), members in alike.items():
        count = min(len(members), max(1, int(most // math.prod(shape)))) if most < math.inf else len(members)
        found += [members[first : first + count] for first in range(0, len(members), count)]
    return found


def solved(slopes: Sequence[Tensor], packed: int, rho: Any, few: bool, reuse: bool = False) -> list[Tensor]:
    """The directions of whole tensors; `few` and `reuse` as in `orthogonal`."""
    found = list(slopes)  # those without entries stay as they are
    for pile in piles(slopes, math.inf if few else PIECE):
        d = torch.stack([slopes[i] for i in pile]) if len(pile) > 1 else slopes[pile[0]][None]
        shape = packed, d.shape[1] // packed, math.prod(d.shape[2:])
        p = orthogonal(d.reshape(-1, *shape[1:]), few, reuse).mul_(rho * math.sqrt(max(shape[1:])))
        for i, part in zip(pile, p.reshape(d.shape).unbind(), strict=True):
            found[i] = part
    return found


def orthogonal(slopes: Tensor, few: bool = False, reuse: bool = False) -> Tensor:
    """`proxsps.core.schedule_free.orthogonalized` of a batch of matrices.

    Args:
        slopes: the matrices.
        few: whether to take the fewest operations, because each of them is a launch.
        reuse: whether the result may overwrite the matrices.
    """
    tall = slopes.shape[-2] > slopes.shape[-1]
    X = slopes.mT if tall else slopes
    norms = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp_min(least_metric(X.dtype))
    if few or not X.is_cpu:
        X = X / norms
        X = _iterated(X) if X.is_cpu or X.dtype is torch.float64 else _iterated(X.bfloat16()).to(X.dtype)
    elif not faster_in_bf16(X):
        X = X / norms
        X = _by_gram(X, ROUNDS) if _is_wide(X) else _iterated(X)
    else:  # one by one: a batch takes longer there
        found = slopes if reuse else torch.empty_like(slopes)
        for out, one, norm in zip(found, X, norms, strict=True):
            own = one.bfloat16() / norm.bfloat16()
            own = _by_gram(_by_gram(own, FIRST), ROUNDS - FIRST) if _is_wide(own) else _iterated(own)
            out.copy_(own.mT if tall else own)
        return found
    return X.mT if tall else X


def faster_in_bf16(X: Tensor) -> bool:
    """Whether the iteration on the host runs in bf16, as in Muon: for large matrices on CPUs that multiply it."""
    return X.dtype is torch.float32 and X.shape[-2] >= LARGE and _multiplies_bf16()


@cache
def _multiplies_bf16() -> bool:
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and bool(known())


def _is_wide(X: Tensor) -> bool:
    return X.shape[-1] >= WIDE * X.shape[-2]


def _iterated(X: Tensor) -> Tensor:
    """Three operations per round, for one matrix or a batch."""
    a, b, c = QUINTIC
    added = _added(X)
    for _ in range(ROUNDS):
        A = X @ X.mT
        X = added(X, added(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def _by_gram(X: Tensor, rounds: int) -> Tensor:
    """The same for wide matrices: X is multiplied by a polynomial in A = X X^T, which follows from A alone.

    With P = a I + B, B = b A + c A^2 of a round, the next A is P A P, and Q is the product of all P. Rounding of A
    grows by a^2 in each round, and hardly changes P if there are few of them.
    """
    a, b, c = QUINTIC
    added = _added(X)
    A = X @ X.mT
    Q = added(A, A, A, beta=b, alpha=c)
    B = Q.clone()
    Q.diagonal(dim1=-2, dim2=-1).add_(a)
    for _ in range(1, rounds):
        A = added(A, B, A, beta=a)
        A = added(A, A, B, beta=a)
        B = added(A, A, A, beta=b, alpha=c)
        Q = added(Q, B, Q, beta=a)
    # In the order of X in memory: Q is symmetric, and the result is copied to where the matrix came from.
    found: Tensor = Q @ X if X.stride(-1) == 1 else (X.mT @ Q).mT
    return found


def _added(X: Tensor) -> Any:
    """M, A, B -> beta M + alpha A B for one matrix, or for a batch."""
    return torch.addmm if X.dim() == 2 else torch.baddbmm
