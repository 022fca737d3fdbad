"""Orthogonalised directions over several ranks, of which each orthogonalises some of the matrices.

The shards of a matrix meet on one rank, which orthogonalises it and sends the shards of its direction back: two
all-to-alls, and a rank holds only its part of the matrices as a whole, for the iteration only. On replicas every rank
has all matrices. Large ones are shared out, and one all-gather tells everybody their directions; small ones take longer
to send than to orthogonalise. Which rank does what depends on the groups alone, so that ranks with gradients for
different parameters still exchange messages of one size, and notice it in the sums of the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from proxsps.optim.blocks import Block
from proxsps.optim.memory import local_entries, memory_dtype
from proxsps.optim.reduce import ProcessGroup, Ranks
from proxsps.optim.spectral import solved

Solve = Callable[[Sequence[Tensor]], list[Tensor]]

# The shorter side from which matrices are shared out: an iteration takes 5 to 7 times as many operations per byte as it
# is long. On CPUs `benchmarks/allreduce_overhead.py` shows what sharing gains. Accelerators do more operations while a
# byte is sent; their limit is an estimate.
SIDE, ACCELERATED = 128, 1024


def directions_of(
    block: Block, slopes: Sequence[Tensor], rho: Any, opt: Any, few: bool = False, reuse: bool = False
) -> list[Tensor]:
    """The directions of the tensors of a block, or of their shards on this rank.

    Args:
        block: the block.
        slopes: the new averages of its gradients.
        rho: what averaging takes away from noise.
        opt: the optimizer.
        few: as in `proxsps.optim.spectral.orthogonal`, like the next one.
        reuse: whether the result may overwrite the slopes.
    """
    solve = partial(solved, packed=block.group["packed"], rho=rho, few=few, reuse=reuse)
    if block.sharded:
        return _over_shards(block, slopes, solve)
    # Under Join, ranks without batches have no averages to orthogonalise.
    if opt._ranks.size > 1 and not opt._join_config.enable:
        return _over_replicas(block, slopes, solve, opt._ranks)
    return solve(slopes)


def _shared_out(shapes: Mapping[int, torch.Size], packed: int, size: int) -> list[list[int]]:
    """The tensors of each rank: those with the most work first, each to the rank with the least work so far."""
    sides = {i: _sides(shape, packed) for i, shape in shapes.items()}
    work = {i: short * short * (2 * long + short) for i, (short, long) in sides.items()}  # multiplications of a round
    found: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    for i in sorted(shapes, key=lambda i: -work[i]):
        rank = load.index(min(load))
        found[rank].append(i)
        load[rank] += work[i]
    return found


def _sides(shape: torch.Size, packed: int) -> list[int]:
    """The shorter and the longer side of the matrices of a tensor."""
    return sorted((shape[0] // packed, math.prod(shape[1:])))


def _over_replicas(block: Block, slopes: Sequence[Tensor], solve: Solve, ranks: Ranks) -> list[Tensor]:
    params, packed = block.group["params"], block.group["packed"]
    known = dict(zip(block.indices, slopes, strict=True))
    shapes = {i: params[i].shape for i in sorted([*block.indices, *block.resting])}
    least = {i: SIDE if params[i].is_cpu else ACCELERATED for i in shapes}
    large = {i: shape for i, shape in shapes.items() if _sides(shape, packed)[0] >= least[i]}
    shares = _shared_out(large, packed, ranks.size)
    here = [i for i in known if i not in large or i in shares[ranks.rank]]
    found = dict(zip(here, solve([known[i] for i in here]), strict=True))
    if large:
        dtypes = {memory_dtype("average", params[i]) for i in large}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        longest = max(sum(params[i].numel() for i in own) for own in shares)
        wire = torch.zeros(longest, dtype=dtype, device=params[min(large)].device)
        for i, part in _parts(wire, shares[ranks.rank], params).items():
            if i in known:
                part.copy_(found[i])
        for own, told in zip(shares, ranks.gather(wire), strict=True):
            found |= {i: part.to(known[i].dtype) for i, part in _parts(told, own, params).items() if i in known}
    return [found[i] for i in block.indices]


def _parts(wire: Tensor, places: Sequence[int], like: Any) -> dict[int, Tensor]:
    """The tensors in a message, by their places in the group."""
    sizes = [like[i].numel() for i in places]
    parts = wire[: sum(sizes)].split(sizes)
    return {i: part.view(like[i].shape) for i, part in zip(places, parts, strict=True)}


def _over_shards(block: Block, slopes: Sequence[Tensor], solve: Solve) -> list[Tensor]:
    params, known = block.group["params"], dict(zip(block.indices, slopes, strict=True))
    teams: dict[tuple[ProcessGroup, torch.dtype], dict[int, torch.Size]] = {}
    for i in sorted([*block.indices, *block.resting]):
        teams.setdefault((_team(params[i]), memory_dtype("average", params[i])), {})[i] = params[i].shape
    for (team, dtype), shapes in teams.items():
        sent = {i: known[i] if i in known else torch.zeros_like(local_entries(params[i]), dtype=dtype) for i in shapes}
        known |= _exchanged(sent, shapes, block.group["packed"], solve, team)
    return [known[i] for i in block.indices]


def _team(owner: Any) -> ProcessGroup:
    """The ranks that hold the shards of a tensor."""
    dims = [i for i, placement in enumerate(owner.placements) if hasattr(placement, "dim")]
    dims = [i for i in dims if owner.device_mesh.size(i) > 1]
    if len(dims) != 1:
        raise ValueError(
            f'metric="spectral" needs matrices that are sharded along one dim of the mesh, as fully_shard does, got '
            f'{tuple(owner.placements)}: use metric="adam" for these.'
        )
    return owner.device_mesh.get_group(dims[0])


def _exchanged(
    slopes: Mapping[int, Tensor], shapes: Mapping[int, torch.Size], packed: int, solve: Solve, team: ProcessGroup
) -> dict[int, Tensor]:
    """The shards of the directions, from those of the slopes."""
    size = dist.get_world_size(team)
    shares = _shared_out(shapes, packed, size)
    own, order = shares[dist.get_rank(team)], [i for share in shares for i in share]
    held = [[_entries_of(shapes[i], size, r) for i in own] for r in range(size)]
    sent, received = [sum(slopes[i].numel() for i in share) for share in shares], list(map(sum, held))
    flat = torch.cat([slopes[i].reshape(-1) for i in order])
    wire = flat.new_empty(sum(received))
    dist.all_to_all_single(wire, flat, received, sent, group=team)
    pieces = [part.split(sizes) for part, sizes in zip(wire.split(received), held, strict=True)]
    whole = [torch.cat(shards).view(shapes[i]) for i, shards in zip(own, zip(*pieces, strict=True), strict=True)]
    found = [p.reshape(-1).split(list(sizes)) for p, sizes in zip(solve(whole), zip(*held, strict=True), strict=True)]
    back = torch.cat([shards[r] for r in range(size) for shards in found]) if found else wire
    told = torch.empty_like(flat)
    dist.all_to_all_single(told, back, sent, received, group=team)
    return _parts(told, order, slopes)


def _entries_of(shape: torch.Size, size: int, rank: int) -> int:
    """The entries of a tensor on one of the ranks that hold its shards along the first dim."""
    rows = -(-shape[0] // size)
    return min(rows, max(0, shape[0] - rank * rows)) * math.prod(shape[1:])
