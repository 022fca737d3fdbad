"""Sharded parameters (DTensor) as plain tensors: the shards themselves where the regulariser allows it, else whole.

A regulariser that is a sum over the shards is applied to each rank's own. Any other one sees whole tensors: they and
their gradients are gathered for the step, every rank solves the same, and keeps its shard of the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from proxsps.optim.blocks import Block
from proxsps.optim.reduce import Ranks
from proxsps.regularizers import L2, Regularizer


class Pieces:
    """The regularisers of the shards that a rank holds of a group's tensors, by their places in the group."""

    joint = False

    def __init__(self, pieces: dict[int, Regularizer]) -> None:
        self._pieces = pieces

    def at(self, index: int) -> Regularizer:
        """That of one tensor."""
        return self._pieces[index]


def is_sharded(param: Tensor) -> bool:
    """Whether a parameter is distributed over a mesh of ranks, be it in shards or in copies."""
    return isinstance(param, DTensor)


def sharded_blocks(group: dict[str, Any], phi: Regularizer, ranks: Ranks) -> list[Block]:
    """The blocks of a group with distributed parameters: one for each number of shards that tensors are cut into."""
    size = ranks.size
    blocks: dict[int, Block] = {}
    pieces: dict[int, dict[int, Regularizer]] = {}
    for i, param in enumerate(group["params"]):
        count = shard_count(param, ranks)
        piece = phi.at(i) if count == 1 else piece_of(phi, i, param)
        whole = piece is None
        count = 1 if whole else count
        block = blocks.setdefault(count, Block(group, group["lr"], phi, [], [], [], count / size, count > 1))
        if param.grad is None:
            continue
        pieces.setdefault(count, {})[i] = phi.at(i) if whole else piece
        block.indices.append(i)
        block.slopes.append(full_or_local(param.grad, param, whole))
        block.params.append(full_or_local(param, param, whole))
        if whole:
            block.afterwards.append(lambda param=param, y=block.params[-1]: param.to_local().copy_(cut(y, param)))
    for count, found in pieces.items():
        blocks[count].phi = _joined(phi, found, len(group["params"]))
    return list(blocks.values())


def shard_count(param: Tensor, ranks: Ranks) -> int:
    """Into how many shards a parameter is cut."""
    if not isinstance(param, DTensor):
        return 1
    mesh = param.device_mesh
    count = math.prod(mesh.size(i) for i, placement in enumerate(param.placements) if hasattr(placement, "dim"))
    if count > 1 and not ranks.cover(mesh):
        raise ValueError(
            f"A parameter is sharded over ranks {mesh.mesh.flatten().tolist()}, which do not all step together: leave "
            "process_group at None, or give a group that has them all."
        )
    return count


def piece_of(phi: Regularizer, index: int, param: DTensor) -> Regularizer | None:
    """The regulariser on this rank's shard of a parameter, None where it needs the whole."""
    dims = tuple(placement.dim for placement in param.placements if hasattr(placement, "dim"))
    return None if phi.joint else phi.at(index).piece(param.ndim, dims, lambda array: cut(array, param))


def cut(array: Any, param: DTensor) -> Tensor:
    """This rank's shard of an array that has the shape of a parameter."""
    mesh = param.device_mesh
    if not isinstance(array, DTensor):
        everywhere = torch.as_tensor(array, device=param.device)
        array = DTensor.from_local(everywhere, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return array.redistribute(mesh, param.placements).to_local()


def full_or_local(tensor: Tensor, param: Tensor, whole: bool) -> Tensor:
    """A parameter or its gradient, whole or as the shard of this rank."""
    if not isinstance(param, DTensor):
        return tensor
    if whole:
        return tensor.full_tensor()
    if tensor.placements != param.placements:  # a gradient that is still to be summed over ranks
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    return tensor.to_local()


def _joined(phi: Regularizer, pieces: dict[int, Regularizer], size: int) -> Regularizer | Pieces:
    """The regularisers of single tensors as one for their block."""
    if all(piece is phi for piece in pieces.values()):
        return phi
    if isinstance(phi, L2):
        return L2(phi.lam, [pieces[i].center if i in pieces else None for i in range(size)])
    return Pieces(pieces)
