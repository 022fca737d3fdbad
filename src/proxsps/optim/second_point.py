"""The two points of the schedule-free form, as lists of tensors: parameters hold y, or x while a model is evaluated.

The formulas are those of `proxsps.core.schedule_free`, on many tensors per call and in place. Compiled kernels compute
bitwise the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.blocks import LINES, Block, pieces
from proxsps.optim.distance import Sample, sampled
from proxsps.optim.lists import bundles, join, widened
from proxsps.optim.memory import HALF, Y, Z
from proxsps.regularizers.structure import Entries, Scalar, Structure

PIECE = 1 << 18  # entries that are processed at a time


def move_points(block: Block, held: Callable[[int, str], Tensor]) -> None:
    """Let the steps of a block move z, the state tensors that `held` returns; parameters become its y.

    Parameters of half precision have y as f32 too: rounded, it would not show the short moves of an average.
    """
    block.ys = list(block.params)
    for i, owner in enumerate(block.owners):
        if owner.dtype in HALF:
            shown, block.ys[i] = block.ys[i], held(i, Y)
            changed = block.ys[i].to(shown.dtype) != shown  # by the user, since the last step
            block.ys[i].copy_(torch.where(changed, shown.to(block.ys[i].dtype), block.ys[i]))
            block.afterwards.insert(0, partial(shown.copy_, block.ys[i]))
    block.params = [held(i, Z) for i in range(len(block.ys))]


def measured(owners: Sequence[Tensor], opt: Any, mix: float | None) -> list[Sample]:
    """The sampled entries of the points whose distance is measured: x in the schedule-free form."""
    known = [p for p in owners if mix is not None and Z in opt.state.get(p, {})]
    zs, ys = [opt.state[p][Z] for p in known], [opt.state[p].get(Y, p) for p in known]
    rest = [p for p in owners if mix is None or Z not in opt.state.get(p, {})]
    found = sampled([*rest, *zs, *ys], opt._ranks, opt._places)
    if not known:
        return found
    ends, starts = ([own.entries for own in part] for part in (found[len(rest) : -len(known)], found[-len(known) :]))
    starts = [y.to(z.dtype) for y, z in zip(starts, ends, strict=True)]  # a model may have changed its dtype
    averages = torch._foreach_lerp(ends, starts, 1 / (mix or 1.0))
    by_owner = {id(own.owner): own for own in found[: len(rest)]}
    for p, x, own in zip(known, averages, found[-len(known) :], strict=True):
        by_owner[id(p)] = own._replace(entries=x, owner=p)
    return [by_owner[id(p)] for p in owners]


def bounds_of(block: Block) -> tuple[float, float] | None:
    """The bounds of a constraint on the entries of a block, which rounding must not leave; None without.

    A block with the factor 0 does not move, not even onto its constraint.
    """
    return None if block.kind == LINES else bounds_on_entries(block.structures[0])


def bounds_on_entries(structure: Structure | None) -> tuple[float, float] | None:
    """The bounds of a constraint on entries, None for anything else."""
    psi = structure.psi if isinstance(structure, Entries) else None
    return (psi.lower, psi.upper) if isinstance(psi, Scalar) and psi.bounded else None


def averages(block: Block, b: float, apart: bool) -> list[Tensor]:
    """The averages x of a block: in the memory of y, or `apart` from it."""
    points = [y.clone() for y in block.ys] if apart else block.ys
    for xs, zs in pieces((points, block.params), PIECE):
        to_averages(xs, zs, b)
    return points


def next_points(block: Block, averages: list[Tensor], b: float, share: float) -> None:
    """Let y be the next points, from the last averages and the new z."""
    if averages and averages is not block.ys:
        torch._foreach_copy_(block.ys, averages)
    bounds = bounds_of(block)
    for xs, zs in pieces((block.ys, block.params), PIECE):
        to_next_points(xs, zs, b, share, bounds)


def to_averages(ys: list[Tensor], zs: list[Tensor], b: float) -> None:
    """y <- x."""
    torch._foreach_lerp_(ys, zs, 1 - 1 / b)


def to_next_points(
    xs: list[Tensor], zs: list[Tensor], b: float, share: float, bounds: tuple[float, float] | None = None
) -> None:
    """x <- the next y, from the last averages, which are where y was, and the new z.

    The last three operations are those of `gradient_point`, each rounded: y comes back from an average by the same.
    """
    torch._foreach_lerp_(xs, zs, share)
    torch._foreach_sub_(xs, zs)
    torch._foreach_mul_(xs, b)
    torch._foreach_add_(xs, zs)
    if bounds is not None:
        torch._foreach_clamp_min_(xs, bounds[0])
        torch._foreach_clamp_max_(xs, bounds[1])


def dots(gs: Sequence[Tensor], zs: Sequence[Tensor], ys: Sequence[Tensor], exact: bool) -> float:
    """<g, z - y>."""
    total = 0.0
    for columns in bundles((gs, zs, ys), PIECE):
        g, z, y = (widened(join(tensors)) for tensors in columns)
        g, z, y = (t.double() for t in (g, z, y)) if exact else (g, z, y)
        total += float(torch.dot(g, z.to(g.dtype) - y.to(g.dtype)))
    return total
