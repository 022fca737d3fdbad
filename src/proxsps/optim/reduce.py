"""The ranks that take a step together: their sums in one all-reduce, and a check that they agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers.base import flatten, unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from proxsps.optim.blocks import Block
    from proxsps.optim.numbers import Numbers
    from proxsps.optim.parts import Sums

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds without distributed do not have


class Ranks:
    """The ranks of a process group, asked for when a step is taken; one rank where there is no group.

    Args:
        group: None for the default group, if torch.distributed runs; a group; False for a rank that steps alone.
        check: whether to compare replicas after every step.
    """

    def __init__(self, group: ProcessGroup | Literal[False] | None = None, check: bool = False) -> None:
        if group is True:
            raise ValueError("process_group must be None, a process group or False, got True: None is the default.")
        self._group = group
        self.check = check
        self._covered: set[DeviceMesh] = set()  # asked for with every parameter of every step

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a process group exists once

    def __reduce__(self) -> tuple[Any, ...]:
        if self._group not in (None, False):
            raise TypeError(
                "An optimizer with a process_group of its own cannot be pickled, because the group lives in this "
                "process; save its state_dict() instead."
            )
        return Ranks, (self._group, self.check)

    @property
    def size(self) -> int:
        """How many ranks step together."""
        if self._group is False or not dist.is_available() or not dist.is_initialized():
            return 1
        size = dist.get_world_size(self._group)
        if size < 1:
            raise ValueError("This rank is not in the process_group of the optimizer; give it one that it is in.")
        return size

    def cover(self, mesh: DeviceMesh) -> bool:
        """Whether all ranks of a mesh step together."""
        if mesh not in self._covered and self.size > 1:
            members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
            if set(members).issuperset(mesh.mesh.flatten().tolist()):
                self._covered.add(mesh)
        return mesh in self._covered

    def sum(self, *arrays: Array) -> list[Array]:
        """Sums over the ranks of arrays of one library and dtype, in one all-reduce."""
        pack = torch.as_tensor(flatten(arrays))
        dist.all_reduce(pack, group=self._group)
        return unflatten(array_namespace(*arrays).asarray(pack), arrays)

    def compare(self, tau: Tensor, params: Iterable[tuple[str, Tensor]]) -> None:
        """Raise on every rank, where replicas on some rank have another step or other bits than on the first."""
        names, flags = ["tau"], [_differs(tau, self._group)]
        for name, param in params:
            for local, group in _replicas(param, self._group):
                names.append(name)
                flags.append(_differs(local, group))
        verdict = torch.stack(flags).to(tau.device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=self._group)
        bad = [name for name, flag in zip(names, verdict.tolist(), strict=True) if flag]
        if bad:
            listed = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            raise RuntimeError(
                f"check_replicas: {listed} differ between ranks. Gradients have to be averaged over ranks "
                "(DistributedDataParallel, fully_shard), and all ranks need the same start and the same options; "
                "ranks that train different models need process_group=False."
            )


class Joint(NamedTuple):
    """What a step is solved with, over all ranks."""

    m: Array  # mean of the losses
    C: Array  # mean of the lower bounds
    addition: Array
    sums: Sums
    agreed: Array  # whether all ranks have gradients for the same number of parameters


def join(
    ranks: Ranks,
    numbers: Numbers,
    blocks: Sequence[Block],
    m: Array,
    C: Array,
    weight: float,
    addition: Array,
    sums: Sums,
) -> Joint:
    """Add up over the ranks, in one all-reduce; losses and bounds are weighted by `weight`.

    Every sum is divided by the number of ranks that hold the same entries. So all ranks go on with the same bits, also
    where replicas were summed in different order. What is not finite on one rank is not finite on any.
    """
    w, count = numbers.scalar(weight), numbers.scalar(float(sum(len(block.params) for block in blocks)))
    share = numbers.vector([block.share for block in blocks])
    packed = numbers.vector([w * m, w * C, w, addition, count, count * count])
    packed, *totals = ranks.sum(packed, *(share * part for part in sums))
    wm, wC, w, addition, counts, squares = packed
    agreed = ranks.size * squares == counts * counts
    if numbers.refuses(agreed):
        raise RuntimeError(
            "The ranks have gradients for different parameters. Average gradients over the ranks before the step "
            "(DistributedDataParallel, fully_shard); ranks that train different models need process_group=False."
        )
    return Joint(wm / w, wC / w, addition, type(sums)(*totals), agreed)


def _differs(local: Tensor, group: ProcessGroup | None) -> Tensor:
    """1 where the bits of a tensor are not those of the group's first rank, else 0."""
    mine = local.detach().reshape(-1).contiguous()
    first = mine.clone()
    dist.broadcast(first, src=dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
    return (mine.view(torch.uint8) != first.view(torch.uint8)).any().to(torch.int32)


def _replicas(param: Tensor, group: ProcessGroup | None) -> Iterator[tuple[Tensor, ProcessGroup | None]]:
    """What this rank holds of a parameter, with each group of ranks that hold the same."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        yield param, group
        return
    for i, placement in enumerate(param.placements):
        if placement.is_replicate() and mesh.size(i) > 1:
            yield param.to_local(), mesh.get_group(i)
