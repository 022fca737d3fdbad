"""Makes the parts of a plan: which kernels blocks need, and where their tensors lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from proxsps.optim.blocks import ENTRIES, LINES, PROXES, SPECTRAL, UNITS, Block
from proxsps.optim.kernels import row_layout
from proxsps.optim.kernels.entrywise import NOWHERE, Sources
from proxsps.optim.kernels.layout import Addresses, addresses, layout
from proxsps.optim.kernels.metric_rows import MetricRowPart
from proxsps.optim.kernels.parts import EntryPart, RowGroups, RowPart
from proxsps.optim.kernels.sampling import NO_START, Start, start_of
from proxsps.optim.kernels.scalar import Psi
from proxsps.optim.kernels.spectral import make_spectral
from proxsps.regularizers.structure import Rows, Scalar, Structure


def make_part(plan: Any, opt: Any, kind: str, places: Sequence[int]) -> Any:
    """The part of blocks of one kind, or None if the kernels do not apply.

    They need dense CPU tensors of one dtype, f32 or f64, in one order of memory, and regularisers that are convex
    functions of entries or of norms of rows, of the family `Scalar`, without centres.
    """
    if kind == SPECTRAL:
        return make_spectral(plan, opt, places)
    blocks = [plan.blocks[i] for i in places]
    if any([b.gathered or b.afterwards or b.centered for b in blocks]):
        return None
    if kind == PROXES:
        if not all([block.in_metric and _only_norms(block.structures) for block in blocks]):
            return None
    elif not all([b.kind != ENTRIES or _constant(b.entries.psi) for b in blocks]):
        return None
    found = _look_up(plan, blocks)
    return None if found is None else _part(plan, opt, kind, blocks, *found)


def _constant(psi: Any) -> TypeGuard[Scalar]:
    return isinstance(psi, Scalar) and all([isinstance(c, (int, float)) for c in psi])


def _only_norms(structures: Sequence[Structure | None]) -> bool:
    """Whether the regulariser is a multiple of the norm of each row, over the same dims of all tensors."""
    rows = [one for one in structures if isinstance(one, Rows) and one.psi == Scalar(l1=one.psi.l1)]
    return len(rows) == len(structures) and len({one.dims for one in rows}) == 1


def _look_up(plan: Any, blocks: Sequence[Block]) -> tuple[Addresses, np.ndarray] | None:
    """The addresses of parameters, gradients and averages, and of the numbers of gradients."""
    xs = [x for block in blocks for x in block.params]
    grads = [g for block in blocks for g in block.slopes]
    pairs = [(block, i) for block in blocks for i in range(len(block.params))]
    states = [[plan.entries_of(block, i, name) for block, i in pairs] for name in plan.averages]
    if plan.rule.mix is not None:
        states.insert(0, [y for block in blocks for y in block.ys])
    found = addresses(xs, grads, *states)
    if found is None or any([t.shape != x.shape for ts in states for t, x in zip(ts, xs, strict=True)]):
        return None
    if plan.rule.beta2 is None:
        return found, NOWHERE
    counts = [plan.held(block.owner(i), "steps") for block, i in pairs]
    if any([type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu for t in counts]):
        return None
    return found, np.array([t.data_ptr() for t in counts], np.int64)


def _part(
    plan: Any, opt: Any, kind: str, blocks: Sequence[Block], found: Addresses, counts_at: np.ndarray
) -> EntryPart | RowPart | None:
    like, (x_at, g_at, *averages) = found
    groups: Any = () if kind == ENTRIES else _row_groups(kind, blocks, like)
    if groups is None:
        return None
    mixes = plan.rule.mix is not None
    start = _start(plan, opt, kind, blocks, like) if plan.rule.distance else NO_START
    d_at, v_at = [*averages, NOWHERE, NOWHERE][:2]
    if mixes and kind != ENTRIES:
        d_at = g_at  # averages with the weights 0 and 1
    least = 0.0 if plan.rule.beta2 is None else math.sqrt(np.finfo(like.dtype).tiny)
    weights = np.zeros((len(x_at), 6))
    at = Sources(x_at, g_at, d_at, v_at, *start, np.zeros(len(blocks)), weights, float(plan.rule.eps), least)
    if kind == ENTRIES:
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in blocks])
        functions: list[Any] = [None if block.kind == LINES else block.entries.psi for block in blocks]
        return EntryPart(at, counts_at, like, layout(sizes, torch.get_num_threads()), functions, mixes)
    tensors = np.repeat(np.arange(len(blocks)), [len(block.params) for block in blocks])
    part = MetricRowPart if kind == PROXES else RowPart
    return part(at, counts_at, groups, tensors, len(blocks))


def _start(plan: Any, opt: Any, kind: str, blocks: Sequence[Block], like: np.ndarray) -> Start:
    """Where the start of the parameters lies; those that the part cannot compare are measured apart."""
    owners = [p for block in blocks for p in block.owners]
    starts = [plan.start(p, opt) for p in owners]
    kinds = (ENTRIES,) if plan.rule.mix is not None else (ENTRIES, PROXES)
    if kind in kinds and not any([block.sharded for block in blocks]):
        found = start_of([x for block in blocks for x in block.params], starts, like)
        if found is not None:
            return found
    plan.apart += owners
    return NO_START


def _row_groups(kind: str, blocks: Sequence[Block], like: np.ndarray) -> RowGroups | None:
    """How rows lie in memory, the function of each group of them, and its block; None if the kernels do not apply."""
    if kind == UNITS:
        return _units(blocks[0], like)
    memory = row_layout.memory([block.params for block in blocks], like, [block.rows[0].dims for block in blocks])
    if memory is None or (kind == PROXES and not (memory.layout.whole.all() and memory.layout.in_order)):
        return None  # in a metric each row lies in memory as one piece that fits into a chunk
    of_tensors = [rows.psi for block in blocks for rows in block.rows]
    columns: list[list[np.ndarray]] = [[np.empty(0)] for _ in Psi._fields]
    for psi, count in zip(of_tensors, memory.layout.counts, strict=True):
        for column, constant in zip(columns, psi, strict=True):
            column.append(np.full(count, constant, np.float64))
    return RowGroups(memory, Psi(*map(np.concatenate, columns)), memory.layout.block)


def _units(block: Block, like: np.ndarray) -> RowGroups | None:
    """Groups of slices of several tensors; slices without a penalty are one more group."""
    structure = None if block.in_metric else block.phi.joint_structure([x.shape for x in block.params])
    if structure is None:
        return None
    groups, count = structure.groups, int(structure.groups.max()) + 1
    ids, extra = np.where(groups < 0, count, groups), int((groups < 0).any())
    memory = row_layout.memory([[x] for x in block.params], like, structure.dims, ids)
    pairs = zip(structure.psi, Scalar(), strict=True)
    psi = Psi(*[np.append(np.broadcast_to(np.float64(c), (count,)), [b] * extra) for c, b in pairs])
    return None if memory is None else RowGroups(memory, psi, np.zeros(count + extra, np.int64))


__all__ = ["make_part"]
