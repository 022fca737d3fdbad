"""The ranks that take a step together: their sums in one all-reduce, and a check that they agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from proxsps.core.array import Array, array_namespace
from proxsps.core.plain_step import Loss
from proxsps.optim.lists import is_sharded
from proxsps.optim.rule import Rule, Table
from proxsps.regularizers.base import flatten, unflatten

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from proxsps.optim.blocks import Block

ProcessGroup = Any  # torch.distributed.ProcessGroup, which builds without distributed do not have

PACK = 64  # the all-reduce of a step is padded to a multiple of this length
PRIME = 2**61 - 1
PLACE = 0x1B873593CC9E2D51  # an arbitrary number below the prime


class Ranks:
    """The ranks of a process group, looked up when a step is taken; one rank if there is no group.

    Args:
        group: None for the default group, if torch.distributed runs; a group; False for a rank that steps alone.
        check: whether to compare replicas after every step.
    """

    def __init__(self, group: ProcessGroup | Literal[False] | None = None, check: bool = False) -> None:
        if group is True:
            raise ValueError("process_group must be None, a process group or False, got True: None is the default.")
        self._group = group
        self.check = check
        self.joined_divide = True  # whether gradients are divided by the number of all ranks when some are out of data
        self._covered: set[DeviceMesh] = set()  # looked up for every parameter in every step

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # a process group exists once

    def __reduce__(self) -> tuple[Any, ...]:
        if self._group not in (None, False):
            raise TypeError(
                "An optimizer with its own process_group cannot be pickled, because the group exists only in this "
                "process; save its state_dict() instead."
            )
        return Ranks, (self._group, self.check)

    @property
    def group(self) -> ProcessGroup:
        """The process group itself."""
        return self._group or dist.group.WORLD

    @property
    def size(self) -> int:
        """The number of ranks that step together."""
        if self._group is False or not dist.is_available() or not dist.is_initialized():
            return 1
        size = dist.get_world_size(self._group)
        if size < 1:
            raise ValueError("This rank is not in the process_group of the optimizer; pass a group that contains it.")
        return size

    def cover(self, mesh: DeviceMesh) -> bool:
        """Whether all ranks of a mesh step together."""
        if mesh not in self._covered and self.size > 1:
            members = dist.get_process_group_ranks(self.group)
            if set(members).issuperset(mesh.mesh.flatten().tolist()):
                self._covered.add(mesh)
        return mesh in self._covered

    def sum(self, *arrays: Array, multiple: int = 1) -> list[Array]:
        """Sums over the ranks of arrays of one library and dtype, in one all-reduce of padded length."""
        pack = torch.as_tensor(flatten(arrays))
        pack = torch.nn.functional.pad(pack, (0, -len(pack) % multiple))
        dist.all_reduce(pack, group=self._group)
        return unflatten(array_namespace(*arrays).asarray(pack), arrays)

    @property
    def rank(self) -> int:
        """The place of this rank in the group."""
        return dist.get_rank(self._group or None)

    def gather(self, vector: Tensor) -> list[Tensor]:
        """The vectors of all ranks, which have one length."""
        found = [torch.empty_like(vector) for _ in range(self.size)]
        dist.all_gather(found, vector, group=self._group)
        return found

    def compare(self, tau: Tensor, params: Iterable[tuple[str, Tensor]]) -> None:
        """Raise on every rank if step or replicas of some rank differ bitwise from the first rank."""
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


class Sums(NamedTuple):
    """Reductions over the blocks, one entry per block."""

    d_sq: Array  # ||d||^2
    d_dot_x: Array  # <d, x - center>
    x_sq: Array  # ||x - center||^2; only in coupled methods


def further_rows(rule: Rule) -> int:
    """The number of rows of sums besides these on a device: `Estimate.extras`."""
    return int(rule.coupled) if rule.beta is None and rule.mix is None else 3


def join(
    ranks: Ranks,
    vector: Callable[[Sequence[Array]], Array],
    blocks: Sequence[Block],
    m: Array | float,
    C: Array | float,
    weight: float,
    rows: Sequence[Array],
    travelled: Sequence[Array],
    active: bool = True,
) -> tuple[Array, Array, list[Array], list[Array], Array, Array]:
    """Add up over the ranks, in one all-reduce; losses and bounds are weighted by `weight`.

    Returns the means of losses and bounds, the rows, `travelled`, whether all ranks have gradients for the same
    parameters, and the number of ranks that step.

    `vector` makes arrays of numbers: `numpy.array` on the host, or that of a device, where nothing is read.

    Every row of sums over blocks is divided by the number of ranks that hold the same entries; `travelled` already is.
    So all ranks continue with bitwise the same numbers, even if replicas were summed in different order. A number that
    is not finite on one rank is not finite on any. A rank that is not `active` has run out of batches: it adds nothing,
    and only keeps the all-reduce complete.
    """
    present = float(active)
    words = present * vector(_words(blocks))
    share = vector([block.share for block in blocks])
    parts = [vector([weight * m, weight * C, weight, present]), words, words * words]
    parts += [*(share * row for row in rows), *travelled]
    # Ranks with other groups have other numbers of sums. Padded, they are still added up, and the words differ.
    packed, words, squares, *totals = ranks.sum(*parts, multiple=PACK)
    wm, wC, w, active_ranks = packed
    # Equal if and only if all words are: a variance. Words are small enough for sums without rounding.
    agreed = (active_ranks * squares == words * words).all()
    if not isinstance(agreed, Tensor) and not agreed:
        raise RuntimeError(
            f"The ranks have gradients for different parameters. {_present(blocks)} Average gradients over the ranks "
            "before the step (DistributedDataParallel, fully_shard); ranks that train different models need "
            "process_group=False."
        )
    part = active_ranks / ranks.size if ranks.joined_divide else 1.0  # the part that the gradient has of the mean
    whole = ranks.size / active_ranks  # replicas that sit out leave their share of the sums to the others
    totals = [whole * total for total in totals]
    return wm / w * part, wC / w * part, totals[: len(rows)], totals[len(rows) :], agreed, active_ranks


def join_tables(
    ranks: Ranks,
    plan: Any,
    loss: Loss,
    weight: float,
    table: Table,
    travelled: tuple[list[float], list[float]],
    resting: list[float],
) -> tuple[Loss, Table, tuple[list[float], list[float]]]:
    """The numbers of a plan over all ranks, in one all-reduce."""
    rows = {name: np.array(row or [0.0] * len(plan.blocks)) for name, row in table._asdict().items()}
    rows["g_dot_x"] += resting  # <d, x> of resting tensors is in both products
    rows["d_dot_c"] += resting
    own = [*rows.values(), plan.penalties], [np.concatenate(travelled)] * plan.rule.distance
    f, C, found, squares, _, active = join(ranks, np.array, plan.blocks, loss.f, loss.C, weight, *own)
    *totals, penalties = [row.tolist() for row in found]
    plan.active, plan.penalty = int(active), sum(penalties)
    moved_sq, start_sq = squares[0].reshape(2, -1).tolist() if squares else travelled
    return loss._replace(f=float(f), C=float(C)), Table(*totals), (moved_sq, start_sq)


def _words(blocks: Sequence[Block]) -> list[float]:
    """Which parameters of which blocks have gradients, as four numbers below 2^16.

    The value at a fixed point, modulo a prime, of the polynomial whose coefficients are the positions of the
    parameters: two lists that differ in one position never have the same value, others with probability 2^-61.
    """
    value = 0
    for block in blocks:
        value = (value * PLACE + 1) % PRIME
        for i in block.indices:
            value = (value * PLACE + i + 2) % PRIME
    return [float(value >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]


def _present(blocks: Sequence[Block]) -> str:
    """Which parameters have gradients on this rank."""
    groups = list({id(block.group): block.group for block in blocks}.values())
    found = {(id(block.group), i) for block in blocks for i in block.indices}
    names = [
        group["param_names"][i] if "param_names" in group else f"parameter {i} of group {j}"
        for j, group in enumerate(groups)
        for i in range(len(group["params"]))
        if (id(group), i) not in found
    ]
    total = sum(len(group["params"]) for group in groups)
    lacking = f": {', '.join(names)} lack{'s' if len(names) == 1 else ''} one" if 0 < len(names) <= 3 else ""
    return f"On this rank {total - len(names)} of {total} have one{lacking}."


def _differs(local: Tensor, group: ProcessGroup | None) -> Tensor:
    """1 where the bits of a tensor are not those of the group's first rank, else 0."""
    mine = local.detach().reshape(-1).contiguous()
    first = mine.clone()
    members: ProcessGroup = group or dist.group.WORLD
    dist.broadcast(first, src=dist.get_global_rank(members, 0), group=group)
    return (mine.view(torch.uint8) != first.view(torch.uint8)).any().to(torch.int32)


def _replicas(param: Tensor, group: ProcessGroup | None) -> Iterator[tuple[Tensor, ProcessGroup | None]]:
    """The part of a parameter on this rank, with each group of ranks that hold the same part."""
    if not is_sharded(param):
        yield param, group
        return
    mesh = param.device_mesh
    for i, placement in enumerate(param.placements):
        if placement.is_replicate() and mesh.size(i) > 1:
            yield param.to_local(), mesh.get_group(i)
