"""Blocks whose directions are orthogonalised averages of gradients, for matrices and filters.

Matrices of one shape are orthogonalised together. Filters are matrices with one row per output channel, and a tensor
may hold several matrices along its first dim. On accelerators the iteration runs in bf16, as it does in Muon.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.schedule_free import QUINTIC, ROUNDS, TINY
from proxsps.optim.lists import widened
from proxsps.optim.rule import Heights

Floats = Sequence[float]


class Stack(NamedTuple):
    """Tensors of one shape and block, whose matrices are orthogonalised together."""

    block: int
    members: list[int]  # positions in the block
    shape: tuple[int, int, int]  # matrices per tensor, rows, columns


def stacks(shapes: Sequence[torch.Size], packed: int, block: int = 0) -> list[Stack]:
    """The tensors of a block by shape."""
    found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, shape in enumerate(shapes):
        if math.prod(shape):
            found[packed, shape[0] // packed, math.prod(shape[1:])].append(i)
    return [Stack(block, members, shape) for shape, members in found.items()]


def directions(slopes: Tensor, rho: Any) -> Tensor:
    """p of a batch of matrices: `proxsps.core.schedule_free.orthogonalized`, with three operations per round."""
    a, b, c = QUINTIC
    tall = slopes.shape[-2] > slopes.shape[-1]
    X = slopes.mT if tall else slopes
    X = (X / (torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True) + TINY)).to(precision(slopes))
    for _ in range(ROUNDS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    p: Tensor = X.to(slopes.dtype) * (rho * math.sqrt(max(slopes.shape[-2:])))
    return p.mT if tall else p


def precision(slopes: Tensor) -> torch.dtype:
    """The dtype of the iteration: bf16 on accelerators, which orthogonalises well enough."""
    return slopes.dtype if slopes.is_cpu else torch.bfloat16


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
        self._options = opt.param_groups[0]

    def bind(self, gradients: Sequence[int]) -> None:
        """Nothing: the plan sets the gradients of its blocks."""

    def set_weights(self, new: float, beta2: float | None) -> None:
        """Nothing: the weights of old gradients depend on the number of steps."""

    def count(self) -> None:
        """Nothing: there are no averages of squares."""

    def sums(self, alpha: Floats, u: Floats, moving: bool) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, with new averages and directions, which are kept for the write."""
        mu, squares = self._plan.momentum
        rows = [[0.0] * len(self._blocks) for _ in range(9)]
        self._new = []
        for stack in self._stacks:
            block, own = self._blocks[stack.block], stack.members
            d = torch.stack([widened(self._averages[stack.block][i]) for i in own])
            d.lerp_(torch.stack([widened(block.slopes[i]).to(d.dtype) for i in own]), 1 - mu)
            p = directions(d.reshape(-1, *stack.shape[1:]), math.sqrt(squares)).reshape(d.shape)
            z = torch.stack([block.params[i] for i in own])
            self._new.append((d, p))
            pairs = [(d, p), (d, z), (), (z, z), (), (), (p, p), (p, z)]
            for row, pair in zip(rows, pairs, strict=False):
                if pair and (moving or row is rows[0] or row is rows[1]):
                    row[stack.block] += float(torch.sum(pair[0] * pair[1], dtype=torch.float64))
            rows[5][stack.block] += d.numel()
        return rows, Heights([], [])

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, relax: float) -> None:
        """z <- keep z + move p; stores new averages."""
        for stack, (d, p) in zip(self._stacks, self._new, strict=True):
            block, own = self._blocks[stack.block], stack.members
            zs = [block.params[i] for i in own]
            torch._foreach_mul_(zs, keep[stack.block])
            torch._foreach_add_(zs, list(p.unbind()), alpha=move[stack.block])
            torch._foreach_copy_([self._averages[stack.block][i] for i in own], list(d.unbind()))
        self._new = []
