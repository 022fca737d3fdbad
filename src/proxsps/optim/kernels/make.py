"""The parts of a plan: which kernels its blocks need, and where their tensors lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from proxsps.optim.blocks import ENTRIES, LINES, PROXES, ROWS, UNITS, Block
from proxsps.optim.kernels import metric_rows, row_layout
from proxsps.optim.kernels.averages import correct_weights, count
from proxsps.optim.kernels.entrywise import NOWHERE, Sources
from proxsps.optim.kernels.layout import addresses, layout
from proxsps.optim.kernels.parts import EntryPart, MetricRowPart, RowPart
from proxsps.optim.kernels.sampling import NO_START, Start, start_of
from proxsps.optim.kernels.scalar import Psi
from proxsps.optim.travel import ORIGIN
from proxsps.regularizers.structure import Entries, Rows, Scalar, Structure

METRIC_ROWS = "rows in a metric"


def make_parts(plan: Any, opt: Any) -> bool:
    """Give a plan its parts, and look up where its tensors lie; False if the kernels do not apply."""
    members = _members(plan.blocks)
    if members is None or not _look_up(plan, [i for _, places in members for i in places]):
        return False
    first = 0
    for kind, places in members:
        blocks = [plan.blocks[i] for i in places]
        last = first + sum(len(block.params) for block in blocks)
        part = _part(plan, opt, kind, blocks, slice(first, last))
        if part is None:
            return False
        plan.parts.append((part, places))
        first = last
    return True


def _members(blocks: Sequence[Block]) -> list[tuple[str, list[int]]] | None:
    """The places of the blocks of each part, by kind; None if some block has no kernel.

    Affine blocks and those of entries come last: other parts tell their sums quickly.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for i, block in enumerate(blocks):
        kind = block.kind
        if kind == PROXES and block.in_metric and _only_norms(block.structures):
            kind = METRIC_ROWS
        if kind == PROXES or (kind == ENTRIES and not _constant(block.entries.psi)):
            return None
        place = i if kind == UNITS else 0
        found.setdefault((ENTRIES if kind == LINES else kind, place), []).append(i)
    order = (UNITS, ROWS, METRIC_ROWS, ENTRIES)
    return [(key[0], places) for key, places in sorted(found.items(), key=lambda item: order.index(item[0][0]))]


def _constant(psi: Any) -> TypeGuard[Scalar]:
    return isinstance(psi, Scalar) and all([isinstance(c, (int, float)) for c in psi])


def _only_norms(structures: Sequence[Structure | None]) -> bool:
    """Whether the regulariser is a multiple of the norm of each row, over the same dims of all tensors."""
    rows = [one for one in structures if isinstance(one, Rows) and one.psi == Scalar(l1=one.psi.l1)]
    return len(rows) == len(structures) and len({one.dims for one in rows}) == 1


def _look_up(plan: Any, order: Sequence[int]) -> bool:
    """The addresses of parameters, gradients and averages, in the order of the parts."""
    rule, blocks = plan.rule, [plan.blocks[i] for i in order]
    xs = [x for block in blocks for x in block.params]
    grads = [g for block in blocks for g in block.slopes]
    plan.owners = owners = [p for block in blocks for p in block.owners]
    plan.names = [name for name, beta in (("average", rule.beta), ("square", rule.beta2)) if beta is not None]
    states = [[plan.held(p, name) for p in owners] for name in plan.names]
    found = addresses(xs, grads, *states)
    if found is None or any([t.shape != x.shape for ts in states for t, x in zip(ts, xs, strict=True)]):
        return False
    plan.like, plan.at = found
    plan.weights = np.zeros((len(xs), 4))
    if rule.beta2 is not None:
        counts = [plan.held(p, "steps") for p in owners]
        if any([type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu for t in counts]):
            return False
        plan.names.append("steps")
        counts_at = np.array([t.data_ptr() for t in counts], np.int64)
        plan.correct_weights = partial(correct_weights, counts_at, rule.beta2, plan.weights)
        plan.count = partial(count, counts_at)
    if rule.distance:
        plan.names.append(ORIGIN)
    return True


def _part(plan: Any, opt: Any, kind: str, blocks: Sequence[Block], own: slice) -> Any:
    """The part of blocks of one kind, or None if the kernels do not apply."""
    start = _start(plan, opt, kind, blocks) if plan.rule.distance else NO_START
    x_at, g_at, *averages = [row[own] for row in plan.at]
    d_at, v_at = [*averages, NOWHERE, NOWHERE][:2]
    eps, least = plan.rule.eps, 0.0
    if plan.rule.beta2 is not None:
        least = math.sqrt(np.finfo(plan.like.dtype).tiny)
    at = Sources(x_at, g_at, d_at, v_at, *start, np.zeros(len(blocks)), plan.weights[own], float(eps), least)
    if kind == ENTRIES:
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in blocks])
        psi = [None if block.kind == LINES else block.entries.psi for block in blocks]
        return EntryPart(at, plan.like, layout(sizes, torch.get_num_threads()), psi)
    tensors = np.repeat(np.arange(len(blocks)), [len(block.params) for block in blocks])
    if kind == UNITS:
        return _units(plan, at, blocks[0], tensors)
    structures = [block.rows for block in blocks]
    params = [block.params for block in blocks]
    memory = row_layout.memory(params, plan.like, [rows[0].dims for rows in structures])
    if memory is None:
        return None
    psi, owners = _row_constants(blocks, structures)
    if kind == ROWS:
        return RowPart(at, memory, psi, owners, tensors, len(blocks))
    rows = metric_rows.memory(memory)
    return None if rows is None else MetricRowPart(at, rows, psi.l1, owners, tensors, len(blocks))


def _start(plan: Any, opt: Any, kind: str, blocks: Sequence[Block]) -> Start:
    """Where the start of the parameters lies; those that the part cannot compare are measured apart."""
    owners = [p for block in blocks for p in block.owners]
    starts = [plan.start(p, opt) for p in owners]
    if kind in (ENTRIES, METRIC_ROWS):
        found = start_of([x for block in blocks for x in block.params], starts, plan.like)
        if found is not None:
            return found
    plan.apart += owners
    return NO_START


def _row_constants(blocks: Sequence[Block], structures: Sequence[Sequence[Rows]]) -> tuple[Psi, np.ndarray]:
    """The function of each row, and its block."""
    columns: list[list[np.ndarray]] = [[np.empty(0)] for _ in Psi._fields]
    owners = []
    for i, (block, own) in enumerate(zip(blocks, structures, strict=True)):
        for x, rows in zip(block.params, own, strict=True):
            normed = range(x.dim()) if rows.dims is None else {d % x.dim() for d in rows.dims}
            count = math.prod(x.shape[d] for d in range(x.dim()) if d not in normed)
            owners.append(np.full(count, i, np.int64))
            for column, constant in zip(columns, rows.psi, strict=True):
                column.append(np.broadcast_to(np.float64(constant), (count,)))
    return Psi(*map(np.concatenate, columns)), np.concatenate(owners)


def _units(plan: Any, at: Sources, block: Block, tensors: np.ndarray) -> RowPart | None:
    """Groups of slices of several tensors; slices without a penalty are one more group, without a function."""
    structure = block.phi.joint_structure([x.shape for x in block.params])
    if structure is None or plan.rule.beta2 is not None:
        return None
    count = int(structure.groups.max()) + 1
    free = structure.groups < 0
    ids, extra = np.where(free, count, structure.groups), int(free.any())
    memory = row_layout.memory([[x] for x in block.params], plan.like, structure.dims, ids)
    if memory is None:
        return None
    pairs = zip(structure.psi, Scalar(), strict=True)
    psi = Psi(*[np.append(np.broadcast_to(np.float64(c), (count,)), [b] * extra) for c, b in pairs])
    return RowPart(at, memory, psi, np.zeros(count + extra, np.int64), tensors, 1)


__all__ = ["Entries", "make_parts"]
