"""Sharded parameters (DTensor) as plain tensors: the shards themselves where the regulariser allows it, else whole.

A regulariser that is a sum over the shards is applied to each rank's own shard. Any other needs whole tensors: these
and their gradients are gathered for the step, every rank solves the same step, and keeps its shard of the result.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from proxsps.core.array import Array
from proxsps.optim.blocks import Block, gradient_of, is_frozen, is_l2, takes_part
from proxsps.optim.reduce import Ranks
from proxsps.optim.travel import Rows
from proxsps.regularizers import L2, Regularizer, Zero


class Pieces(Regularizer):
    """The regularisers of a rank's shards of a group's tensors, by their positions in the group."""

    def __init__(self, pieces: dict[int, Regularizer]) -> None:
        self._pieces = pieces

    def at(self, index: int) -> Regularizer:
        """The regulariser of one tensor."""
        return self._pieces[index]

    def value(self, x: Array) -> Array:
        """Raises: each tensor has its own regulariser."""
        raise TypeError("The shards of a group have one regulariser each: call at(i).value(x) of the i-th tensor.")

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Raises: each tensor has its own regulariser."""
        raise TypeError(
            "The shards of a group have one regulariser each: call at(i).prox(z, alpha) for the i-th tensor."
        )


def is_sharded(param: Tensor) -> TypeGuard[DTensor]:
    """Whether a parameter is distributed over a mesh of ranks, in shards or in copies."""
    return isinstance(param, DTensor)


def sharded_blocks(group: dict[str, Any], phi: Regularizer, ranks: Ranks, kept: Container[Tensor] = ()) -> list[Block]:
    """The blocks of a group with distributed parameters: one for each number of shards that tensors are cut into.

    Frozen parameters that are `kept` follow in the same way.
    """
    size, params = ranks.size, list(enumerate(group["params"]))
    frozen = [(i, p) for i, p in params if is_frozen(p) and takes_part(p, kept)]
    blocks: dict[tuple[bool, int], Block] = {}
    pieces: dict[tuple[bool, int], dict[int, Regularizer]] = {}
    for own, resting, alpha in ((phi, False, group["lr"]), (Zero(), True, 0.0)):
        for i, param in frozen if resting else params:
            count = shard_count(param, ranks)
            piece = own.at(i) if count == 1 else piece_of(own, i, param)
            whole = piece is None
            count = 1 if whole else count
            block = blocks.setdefault((resting, count), Block(group, alpha, own, [], [], [], count / size, count > 1))
            if not takes_part(param, kept) or is_frozen(param) != resting:
                continue
            pieces.setdefault((resting, count), {})[i] = own.at(i) if piece is None else piece
            block.params.append(full_or_local(param, param, whole))
            grad = param.grad
            x = block.params[-1]
            block.slopes.append(gradient_of(x) if grad is None else full_or_local(grad, param, whole))
            if whole:
                block.gathered = True
                block.afterwards.append(partial(_write_shard, param, x))
    for key, found in pieces.items():
        blocks[key].indices = list(found)
        blocks[key].phi = _joined(blocks[key].phi, found, len(group["params"]))
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


def held_entries(held: Tensor, whole: bool) -> Tensor:
    """The part of a state tensor for a block: the shard of this rank, or all of it."""
    if not isinstance(held, DTensor):
        return held
    return held.full_tensor() if whole else held.to_local()


def keep_entries(owner: Tensor, own: dict[str, Any], key: str, new: Tensor, whole: bool) -> bool:
    """Store new entries, a shard or all, in state that is sharded like its parameter; False for whole tensors."""
    if not isinstance(owner, DTensor):
        return False
    own[key] = sharded_like(owner, cut(new, owner) if whole else new, owner.shape)
    return True


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
