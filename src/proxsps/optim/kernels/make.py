"""Makes the parts of a plan: which kernels blocks need, and where their tensors lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from proxsps.optim.blocks import ENTRIES, LINES, PROXES, SPECTRAL, UNITS, Block
from proxsps.optim.kernels.entrywise import EntryPart
from proxsps.optim.kernels.layout import addresses, layout
from proxsps.optim.kernels.metric_rows import MetricRowPart
from proxsps.optim.kernels.parts import Memory
from proxsps.optim.kernels.row_layout import RowGroups, row_layout
from proxsps.optim.kernels.rows import RowPart
from proxsps.optim.kernels.sampling import NO_START, Start, start_of
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
    at = _look_up(plan, kind, blocks)
    groups = None if at is None or kind == ENTRIES else _row_groups(kind, blocks)
    if at is None or (groups is None and kind != ENTRIES):
        return None
    if plan.rule.distance:
        start = _start(plan, opt, kind, blocks, at.like)
        at = at._replace(start_at=start.at, start_scale=start.scale)
    if groups is None:
        sizes = tuple([tuple([x.numel() for x in block.params]) for block in blocks])
        functions: list[Any] = [None if block.kind == LINES else block.entries.psi for block in blocks]
        return EntryPart(at, layout(sizes, torch.get_num_threads()), functions)
    of_tensors = np.repeat(np.arange(len(blocks)), [len(block.params) for block in blocks])
    return (MetricRowPart if kind == PROXES else RowPart)(at, groups, of_tensors)


def _constant(psi: Any) -> TypeGuard[Scalar]:
    return isinstance(psi, Scalar) and all([isinstance(c, (int, float)) for c in psi])


def _only_norms(structures: Sequence[Structure | None]) -> bool:
    """Whether the regulariser is a multiple of the norm of each row, over the same dims of all tensors."""
    rows = [one for one in structures if isinstance(one, Rows) and one.psi == Scalar(l1=one.psi.l1)]
    return len(rows) == len(structures) and len({one.dims for one in rows}) == 1


def _look_up(plan: Any, kind: str, blocks: Sequence[Block]) -> Memory | None:
    """Where parameters, gradients, averages and the numbers of gradients lie."""
    rule = plan.rule
    pairs = [(block, i) for block in blocks for i in range(len(block.params))]
    lists = {"x": [x for block in blocks for x in block.params], "g": [g for block in blocks for g in block.slopes]}
    lists |= {name: [plan.entries_of(block, i, name) for block, i in pairs] for name in plan.averages}
    if rule.mix is not None:
        lists["y"] = [y for block in blocks for y in block.ys]
    found = addresses(*lists.values())
    if found is None or any([t.shape != x.shape for ts in lists.values() for t, x in zip(ts, lists["x"], strict=True)]):
        return None
    counts = [] if rule.beta2 is None else [plan.held(block.owner(i), "steps") for block, i in pairs]
    if any([type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu for t in counts]):
        return None
    like, rows = found
    at: dict[str, Any] = dict(zip(lists, rows, strict=True))
    if rule.mix is not None and kind != ENTRIES:  # the plan moves y, and an average with the weights 0 and 1 is g
        at |= {"average": at["g"], "y": None}
    return Memory(
        like, at["x"], at["g"], at.get("average"), at.get("square"), at.get("y"),
        np.array([t.data_ptr() for t in counts], np.int64), *NO_START, np.zeros(len(blocks)),
        np.zeros((len(pairs), 6)), float(rule.eps),
        0.0 if rule.beta2 is None else math.sqrt(np.finfo(like.dtype).tiny),
    )  # fmt: skip


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


def _row_groups(kind: str, blocks: Sequence[Block]) -> RowGroups | None:
    """How rows lie in memory, the function of each group of them, and its block; None if the kernels do not apply."""
    if kind == UNITS:
        return _units(blocks[0])
    found = row_layout([block.params for block in blocks], [block.rows[0].dims for block in blocks])
    if found is None or (kind == PROXES and (found.cut.any() or not found.in_order)):
        return None  # in a metric each row lies in memory as one piece that fits into a chunk
    functions = [rows.psi for block in blocks for rows in block.rows]
    columns = [
        [np.broadcast_to(np.float64(constant), (count,)) for constant in psi]
        for psi, count in zip(functions, found.counts, strict=True)
    ]
    return RowGroups(found, found.owner, False, np.concatenate([np.empty((4, 0)), *columns], axis=1), found.block)


def _units(block: Block) -> RowGroups | None:
    """Groups of slices of several tensors; slices without a penalty are one more group."""
    structure = None if block.in_metric else block.phi.joint_structure([x.shape for x in block.params])
    found = None if structure is None else row_layout([[x] for x in block.params], structure.dims)
    if structure is None or found is None:
        return None
    groups, count = structure.groups, int(structure.groups.max()) + 1
    if len(groups) != len(found.block):
        raise ValueError(f"groups must have one entry per row: got {len(groups)} for {len(found.block)} rows.")
    ids, extra = np.where(groups < 0, count, groups), int((groups < 0).any())
    pairs = zip(structure.psi, Scalar(), strict=True)
    psi = np.array([np.append(np.broadcast_to(np.float64(c), (count,)), [b] * extra) for c, b in pairs])
    return RowGroups(found, ids[found.owner], True, psi, np.zeros(count + extra, np.int64))


__all__ = ["make_part"]
