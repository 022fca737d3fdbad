"""A parameter group made ready for a step: its tensors with gradients, its cap alpha and its regulariser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from proxsps.regularizers import L2, Regularizer, Zero


@dataclass
class Block:
    """The tensors of one parameter group that have a gradient; complex ones as real views."""

    alpha: float | Tensor
    phi: Regularizer
    params: list[Tensor]
    grads: list[Tensor]
    indices: Sequence[int]  # their places in the group

    @property
    def lam(self) -> float:
        """Strength of the squared l2 norm, 0 for any other regulariser."""
        return self.phi.lam if isinstance(self.phi, L2) else 0.0

    @property
    def affine(self) -> bool:
        """Whether the prox is affine, as that of nothing is, so that the block enters the closed form."""
        return isinstance(self.phi, (L2, Zero)) or not self.params

    @cached_property
    def centers(self) -> list[Tensor] | None:
        """A centre a tensor, where the squared l2 norm has one."""
        if not isinstance(self.phi, L2) or self.phi.center is None:
            return None
        return [
            torch.as_tensor(self.phi.at(i).center, dtype=x.dtype, device=x.device)
            for i, x in zip(self.indices, self.params, strict=True)
        ]

    @cached_property
    def aligned(self) -> bool:
        """Whether parameters and gradients lie in memory alike, so that a flat pass over both is right."""
        return all(map(same_order, self.params, self.grads))

    @property
    def double(self) -> bool:
        """Whether some parameter has double precision."""
        return any([x.dtype is torch.float64 for x in self.params])


def same_order(x: Tensor, g: Tensor) -> bool:
    """Whether two tensors are of one dtype and their entries lie in memory without gaps, in the same order."""
    if x.dtype is not g.dtype:
        return False
    if x.is_contiguous() and g.is_contiguous():
        return True
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return (
        channels_last is not None
        and x.is_contiguous(memory_format=channels_last)
        and g.is_contiguous(memory_format=channels_last)
    )


def gather(groups: Sequence[dict[str, Any]]) -> list[Block]:
    """A block a group, in order; groups without gradients give empty blocks."""
    return [_block(group) for group in groups]


def _block(group: dict[str, Any]) -> Block:
    params, indices = group["params"], range(len(group["params"]))
    grads = [param.grad for param in params]
    if any([grad is None for grad in grads]):
        indices = [i for i in indices if grads[i] is not None]
        params, grads = [params[i] for i in indices], [grads[i] for i in indices]
    if {grad.layout for grad in grads} - {torch.strided}:
        raise TypeError(
            "Sparse gradients are not supported: a Polyak step needs <g, x> and ||g||^2 over all entries. "
            "Use dense gradients, for instance nn.Embedding(..., sparse=False)."
        )
    if any(dtype.is_complex for dtype in {param.dtype for param in params}):
        params, grads = _real(params), _real(grads)
    return Block(group["lr"], regularizer_of(group), params, grads, indices)


def regularizer_of(group: dict[str, Any]) -> Regularizer:
    """The regulariser of a group; `weight_decay` is the squared l2 norm by another name."""
    if group["regularizer"] is not None:
        return group["regularizer"]
    return L2(group["weight_decay"]) if group["weight_decay"] else Zero()


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex tensors as views with real and imaginary part on a last axis."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
