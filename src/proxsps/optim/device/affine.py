"""Blocks whose prox is affine: sums in few launches, and x <- keep x + move d + pull center."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from proxsps.core.step import Affine
from proxsps.optim.blocks import Block, plain, stored
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.lists import LAUNCH, bundles, join, spread, widened


def line_sums(numbers: Numbers, block: Block, points: bool, coupled: bool) -> list[Tensor | float]:
    """||d||^2 (in a metric <d, D^-1 d>), <d, x - center> and, for `points`, ||x - center||^2, as numbers of a step.

    Slopes of f32 may be beyond the range of their squares. If they are `coupled`, d = g + lam (x - center).
    """
    d_sq, d_dot_x, x_sq = [], [], []
    for x, d, *e in _vectors(block, coupled):
        norm = torch.linalg.vector_norm(d, dtype=numbers.dtype)
        scale = scale_of(norm)
        d_sq.append(torch.dot(d / scale, e[0]) * scale if e else norm.square())
        d_dot_x.append(torch.dot(d / scale, x) * scale)
        if points:
            x_sq.append(torch.linalg.vector_norm(x, dtype=numbers.dtype).square())
    return [numbers.total(d_sq), numbers.total(d_dot_x), numbers.total(x_sq) if points else 0.0]


def _vectors(block: Block, coupled: bool) -> Iterator[tuple[Tensor, ...]]:
    """x - center and d as vectors; in a metric x, d and D^-1 d."""
    columns: list[Any] = [block.params, block.slopes]
    if block.directions is not None:
        columns.append(block.directions)
    elif block.centered:
        columns.append(block.centers)
    for lists in bundles(columns, LAUNCH):
        x, d, *rest = (widened(join(tensors)) for tensors in lists)
        if block.directions is not None:
            yield x, d, *rest
            continue
        x = x - rest[0] if rest else x
        yield x, torch.add(d, x, alpha=block.lam) if coupled and block.lam else d


def move_lines(blocks: Mapping[int, Block], update: Affine, ok: Tensor) -> None:
    """x <- keep x + move d + pull center where `ok`; blocks are given by their places in the step."""
    fused = {i for i, block in blocks.items() if block.params and _fuses(block)}
    if fused:
        skipped = 1 - ok.float()
        keep = None if isinstance(update.keep, float) else torch.where(ok, update.keep.float(), skipped)
        move = update.move.float()
    for i, block in blocks.items():
        if i in fused:
            _move_fused(block, None if keep is None else keep[i], move[i], skipped)
        else:
            keep_i, pull_i = (part if isinstance(part, float) else part[i] for part in (update.keep, update.pull))
            _move(block, keep_i, update.move[i], pull_i, ok)


def _fuses(block: Block) -> bool:
    """Whether all tensors of a block can be moved in two calls."""
    fuses = not block.centered and block.aligned and not block.double and not torch.compiler.is_compiling()
    return fuses and stored(block.along)


def _move(block: Block, keep: Tensor | float, move: Tensor, pull: Tensor | float, ok: Tensor) -> None:
    if not block.centered and plain(block.params, block.along):
        for xs, ds in bundles((block.params, block.along), LAUNCH):
            x, d = widened(join(xs)), widened(join(ds))
            spread(torch.where(ok, (keep * x + move * d).to(x.dtype), x).to(xs[0].dtype), xs)
        return
    for x, d, c in zip(block.params, block.along, block.centers, strict=True):
        y = keep * widened(x) + move * widened(d)
        y = y if c is None else y + pull * widened(c)
        x.copy_(torch.where(ok, y.to(x.dtype), x))


def _move_fused(block: Block, keep: Tensor | None, move: Tensor, skipped: Tensor) -> None:
    """x <- keep x + move d in two calls for all tensors of an aligned f32 block.

    Args:
        block: the block.
        keep: the first factor, 1 where the step is skipped; None if it is always 1.
        move: the second one.
        skipped: 1 where the step is skipped, else 0.
    """
    if keep is not None:
        torch._foreach_mul_(block.params, keep)
    torch._fused_sgd_(  # x + lr d, and nothing where `found_inf` is 1
        block.params,
        block.along,
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=move,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=True,
        grad_scale=None,
        found_inf=skipped,
    )
