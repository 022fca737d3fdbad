"""Blocks whose directions are orthogonalised averages of gradients, for matrices and filters.

Matrices of one shape are orthogonalised together. Filters are matrices with one row per output channel, and a tensor
may hold several matrices along its first dim.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.schedule_free import QUINTIC, ROUNDS, counted
from proxsps.optim.lists import widened
from proxsps.optim.memory import least_metric
from proxsps.optim.rule import Heights, Rule, Table

Floats = Sequence[float]
WIDE = 2  # times as many columns as rows, from which on the iteration works on A = X X^T
FIRST = 3  # rounds in bf16 after which A is computed from X again: errors of A grow twelvefold in each round
LARGE = 128  # rows and columns from which on bf16 is faster than f32 on CPUs that multiply it


class Stack(NamedTuple):
    """Tensors of one shape and block, whose matrices are orthogonalised together."""

    block: int
    members: list[int]  # positions in the block
    shape: tuple[int, int, int]  # matrices per tensor, rows, columns


def stacks(shapes: Sequence[torch.Size], packed: int, block: int = 0) -> list[Stack]:
    """The tensors of a block by shape."""
    found: dict[torch.Size, list[int]] = defaultdict(list)
    for i, shape in enumerate(shapes):
        if math.prod(shape):
            found[shape].append(i)
    return [
        Stack(block, members, (packed, shape[0] // packed, math.prod(shape[1:]))) for shape, members in found.items()
    ]


def solved(slopes: Sequence[Tensor], packed: int, rho: Any, few: bool) -> list[Tensor]:
    """The directions of whole tensors, by shape; `few` as in `orthogonal`."""
    found = list(slopes)  # those without entries stay as they are
    for stack in stacks([d.shape for d in slopes], packed):
        d = torch.stack([slopes[i] for i in stack.members])
        p = orthogonal(d.reshape(-1, *stack.shape[1:]), few) * (rho * math.sqrt(max(stack.shape[1:])))
        for i, part in zip(stack.members, p.reshape(d.shape).unbind(), strict=True):
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
    return Q @ X  # type: ignore[no-any-return]


def _added(X: Tensor) -> Any:
    """M, A, B -> beta M + alpha A B for one matrix, or for a batch."""
    return torch.addmm if X.dim() == 2 else torch.baddbmm


class SpectralPart:
    """The spectral blocks of a plan, by torch on the host.

    Args:
        plan: the plan.
        opt: the optimizer.
        places: the positions of the blocks in the plan.
    """

    curved, mixes, points, entries = False, False, 1, 0

    def __init__(self, plan: Any, opt: Any, places: Sequence[int]) -> None:
        self._plan, self._blocks = plan, [plan.blocks[i] for i in places]
        self._averages = [
            [plan.entries_of(block, i, "average") for i in range(len(block.params))] for block in self._blocks
        ]
        self._stacks = [
            stack
            for i, block in enumerate(self._blocks)
            for stack in stacks([x.shape for x in block.params], block.group["packed"], i)
        ]
        self._new: list[tuple[Tensor, Tensor]] = []  # d and p of each stack
        self._opt = opt

    def bind(self, gradients: Sequence[int]) -> None:
        """Nothing: the plan sets the gradients of its blocks."""

    def set_weights(self, k: float, rule: Rule) -> None:
        """Nothing: the weights of old gradients depend on the number of steps."""

    def count(self) -> None:
        """Nothing: there are no averages of squares."""

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with new averages and directions, which are kept for the write."""
        mu, squares = self._plan.momentum
        rows = {name: [0.0] * len(self._blocks) for name in Table._fields[:-1]}  # without centres
        slopes = [self._slopes(stack, 1 - mu) for stack in self._stacks]
        self._new = list(zip(slopes, self._directions(slopes, math.sqrt(squares)), strict=True))
        for stack, (d, p) in zip(self._stacks, self._new, strict=True):
            z = torch.stack([self._blocks[stack.block].params[i] for i in stack.members])
            for name, (a, b) in {"d_sq": (d, p), "d_dot_x": (d, z), "g_sq": (p, p)}.items():
                rows[name][stack.block] += float(torch.sum(a * b, dtype=torch.float64))
        sizes = [sum(x.numel() for x in block.params) for block in self._blocks]
        rows["g_sq"] = [counted(p_sq / squares, n) for p_sq, n in zip(rows["g_sq"], sizes, strict=True)]
        return list(rows.values()), Heights([], [])

    def _slopes(self, stack: Stack, new: float) -> Tensor:
        """The new averages of the gradients of a stack."""
        block, own = self._blocks[stack.block], stack.members
        d = torch.stack([widened(self._averages[stack.block][i]) for i in own])
        return d.lerp_(torch.stack([widened(block.slopes[i]).to(d.dtype) for i in own]), new)

    def _directions(self, slopes: Sequence[Tensor], rho: float) -> list[Tensor]:
        """The directions of all stacks."""
        from proxsps.optim.spreading import directions_of  # which needs this module

        found = [list(averages) for averages in self._averages]  # those without entries stay as they are
        for stack, d in zip(self._stacks, slopes, strict=True):
            for i, part in zip(stack.members, d.unbind(), strict=True):
                found[stack.block][i] = part.view(found[stack.block][i].shape)
        found = [directions_of(block, own, rho, self._opt) for block, own in zip(self._blocks, found, strict=True)]
        return [torch.stack([found[stack.block][i] for i in stack.members]) for stack in self._stacks]

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """z <- keep z + move p; stores new averages."""
        for stack, (d, p) in zip(self._stacks, self._new, strict=True):
            block, own = self._blocks[stack.block], stack.members
            zs = [block.params[i] for i in own]
            torch._foreach_mul_(zs, keep[stack.block])
            torch._foreach_add_(zs, list(p.unbind()), alpha=move[stack.block])
            torch._foreach_copy_([self._averages[stack.block][i] for i in own], list(d.unbind()))
        self._new = []
