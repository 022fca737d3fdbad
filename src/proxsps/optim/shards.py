"""Sharded parameters (DTensor) as plain tensors: the shards themselves where the regulariser allows it, else whole.

A regulariser that is a sum over the shards is applied to each rank's own shard. Any other needs whole tensors: these
and their gradients are gathered for the step, every rank solves the same step, and keeps its shard of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from proxsps.core.array import Array
from proxsps.optim.blocks import Block, is_l2
from proxsps.optim.distance import Rows
from proxsps.optim.reduce import Ranks
from proxsps.regularizers import L2, Regularizer


class Pieces(Regularizer):
    """The regularisers of a rank's shards of a group's tensors, by their positions in the group."""

    def __init__(self, pieces: dict[int, Regularizer]) -> None:
        self._pieces = pieces

    def at(self, index: int) -> Regularizer:
        """The regulariser of one tensor."""
        return self._pieces[index]

    def value(self, x: Array) -> Array:
        """Raises: each tensor has its own regulariser."""
        raise TypeError("The shards of a group have one regulariser each: call the methods of at(i).")

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Raises as `value` does."""
        return self.value(z)


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
        block = blocks.setdefault(count, Block(group, group["lr"], phi, [], [], [], [], count / size, count > 1))
        block.gathered = block.gathered or whole
        if param.grad is None:
            block.resting = [*block.resting, i]
            continue
        pieces.setdefault(count, {})[i] = phi.at(i) if piece is None else piece
        x = full_or_local(param, param, whole)
        block.params.append(x)
        block.slopes.append(full_or_local(param.grad, param, whole))
        if whole:
            block.afterwards.append(partial(_write_shard, param, x))
    for count, found in pieces.items():
        blocks[count].indices = list(found)
        blocks[count].phi = _joined(phi, found, len(group["params"]))
    return list(blocks.values())


def shard_count(param: Tensor, ranks: Ranks) -> int:
    """The number of shards of a parameter."""
    if not isinstance(param, DTensor):
        return 1
    mesh = param.device_mesh
    count = math.prod(mesh.size(i) for i, placement in enumerate(param.placements) if hasattr(placement, "dim"))
    if count > 1 and not ranks.cover(mesh):
        raise ValueError(
            f"A parameter is sharded over ranks {mesh.mesh.flatten().tolist()}, which do not all step together: leave "
            "process_group at None, or pass a group that contains them all."
        )
    return count


def piece_of(phi: Regularizer, index: int, param: DTensor) -> Regularizer | None:
    """The regulariser on this rank's shard of a parameter, None if it needs the whole tensor."""
    dims = tuple(placement.dim for placement in param.placements if hasattr(placement, "dim"))
    return None if phi.joint else phi.at(index).piece(param.ndim, dims, lambda array: cut(array, param))


def cut(array: Any, param: DTensor) -> Tensor:
    """This rank's shard of an array that has the shape of a parameter."""
    mesh = param.device_mesh
    if not isinstance(array, DTensor):
        everywhere = torch.as_tensor(array, device=param.device)
        array = DTensor.from_local(everywhere, mesh, [Replicate()] * mesh.ndim, run_check=False)
    local: Tensor = array.redistribute(mesh, param.placements).to_local()
    return local


def _write_shard(param: DTensor, whole: Tensor) -> None:
    """Write this rank's shard of the new entries into a parameter."""
    param.to_local().copy_(cut(whole, param))


def sharded_like(owner: DTensor, local: Tensor, shape: Sequence[int]) -> DTensor:
    """The shards of the ranks as one tensor of this shape, with the placements of a parameter."""
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    mesh = owner.device_mesh
    return DTensor.from_local(
        local, mesh, owner.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def rows_of(param: DTensor) -> Rows:
    """The rows of this rank; raises if its part is not a set of rows."""
    if any(getattr(p, "dim", 0) != 0 or type(p).__name__ == "_StridedShard" for p in param.placements):
        raise ValueError(
            f"The distance cap samples rows, and a parameter is sharded as {tuple(param.placements)}: shard it along "
            "its first dim (Shard(0), as fully_shard does), or pass a number as lr and leave distance_cap out."
        )
    shape, first = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    count, total = (shape[0], param.shape[0]) if param.dim() else (1, 1)
    length = math.prod(param.shape[1:]) * (2 if param.is_complex() else 1)
    return Rows(first[0] if count and param.dim() else 0, count, length, total)


def full_or_local(tensor: Tensor, param: Tensor, whole: bool) -> Tensor:
    """A parameter or its gradient, whole or as the shard of this rank."""
    if not isinstance(param, DTensor):
        return tensor
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"A sharded parameter (DTensor) has a gradient of the class {type(tensor).__name__}: make it a DTensor "
            "with the placements of the parameter, as backward does."
        )
    if whole:
        return tensor.full_tensor()
    if tensor.placements != param.placements:  # a gradient that still has to be summed over ranks
        tensor = tensor.redistribute(param.device_mesh, param.placements)
    return tensor.to_local()


def _joined(phi: Regularizer, pieces: dict[int, Regularizer], size: int) -> Regularizer:
    """The regularisers of single tensors as one regulariser for their block."""
    if phi.joint or all(piece is phi for piece in pieces.values()):
        return phi
    if is_l2(phi):
        found = [pieces.get(i) for i in range(size)]
        return L2(phi.lam, [piece.center if isinstance(piece, L2) else None for piece in found])
    return Pieces(pieces)
