"""Blocks whose prox is affine: sums in few launches, and x <- keep x + move d + pull center."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.step import Affine
from proxsps.optim.blocks import Block, plain, stored
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.lists import LAUNCH, bundles, join, spread, widened


class AffinePart:
    """The part of a step that has a closed form.

    Args:
        numbers: the numbers of the step.
        blocks: the blocks.
        places: their positions among all blocks of the step.
        known: ||d||^2 and <d, x> of blocks, by their positions, as lists of numbers to be added up.
        coupled: whether the slopes include the squared l2 norm, d = g + lam (x - center).
    """

    def __init__(
        self,
        numbers: Numbers,
        blocks: Sequence[Block],
        places: Sequence[int],
        known: Mapping[int, Sequence[list[Tensor]]],
        coupled: bool,
    ) -> None:
        self._numbers, self._blocks, self.places = numbers, blocks, places
        self._known, self._coupled = known, coupled

    def sums(self, points: bool) -> Array:
        """The sums."""
        d_sq, d_dot_x, x_sq = self.rows(points)
        return torch.stack([d_sq, d_dot_x, x_sq if points else torch.zeros_like(d_sq)])

    def rows(self, points: bool) -> list[Array]:
        """The same, row by row; ||x||^2 is the number 0 if it is not needed."""
        columns = []
        for place, block in zip(self.places, self._blocks, strict=True):
            found = self._sums(block, points) if points or place not in self._known else self._known[place]
            columns.append([self._numbers.total(part) for part in found[: 3 if points else 2]])
        return [*map(self._numbers.vector, zip(*columns, strict=True)), *([] if points else [0.0])]

    def _sums(self, block: Block, points: bool) -> Sequence[list[Tensor]]:
        """Sums over vectors of a block, of f32 beyond the range of its squares, without reading a result."""
        d_sq, d_dot_x, x_sq = [], [], []
        dtype = self._numbers.dtype
        for x, d, *e in self._vectors(block):
            norm = torch.linalg.vector_norm(d, dtype=dtype)
            scale = scale_of(norm)
            d_sq.append(torch.dot(d / scale, e[0]) * scale if e else norm.square())
            d_dot_x.append(torch.dot(d / scale, x) * scale)
            if points:
                x_sq.append(torch.linalg.vector_norm(x, dtype=dtype).square())
        return d_sq, d_dot_x, x_sq

    def _vectors(self, block: Block) -> Iterator[tuple[Tensor, ...]]:
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
            yield x, torch.add(d, x, alpha=block.lam) if self._coupled and block.lam else d

    def move(self, update: Affine, ok: Tensor) -> None:
        """x <- keep x + move d + pull center where `ok`."""
        places = {i: block for i, block in zip(self.places, self._blocks, strict=True) if block.params}
        fused = {i for i, block in places.items() if _fuses(block)}
        if fused:
            skipped = 1 - ok.float()
            keep = None if isinstance(update.keep, float) else torch.where(ok, update.keep.float(), skipped)
            move = update.move.float()
        for i, block in places.items():
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
    else:
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
