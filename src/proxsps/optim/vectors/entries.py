"""Blocks whose regulariser acts on each entry: its functions, and the search over joined entries on a device.

There tensors are joined into a few long ones, and all points of a round take one pass over them, with few launches and
bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, times
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.refine import POINTS
from proxsps.optim.lists import bundles, join, spread, widened
from proxsps.optim.vectors.searched import Part, SearchedParts, part_of, per_point, resting, stepping
from proxsps.regularizers.structure import Prox, Scalar

ROOM = 32 << 20  # bytes that the search over entries may use, or twice those of the parameters, if that is more

# Functions of each entry. They take tensors that nobody else uses, because proxes of known functions are computed in
# their memory.


def entry_prox(psi: Any, z: Tensor, step: Tensor | float) -> Tensor:
    """The prox, in the memory of z if psi is known; z itself where a step on a device is 0."""
    if not isinstance(psi, Scalar):
        y: Tensor = psi.prox(z, stepping(step))
        return torch.where(step == 0, z, y) if isinstance(step, Tensor) else y
    if psi.l1:
        z = _shrink(z, step * psi.l1)
    if psi.l2:
        z.div_(1 + step * psi.l2)
    return z.clamp_(psi.lower, psi.upper) if psi.bounded else z


def _shrink(z: Tensor, threshold: Tensor | float) -> Tensor:
    """Soft thresholding in the memory of z; with a threshold as a tensor in twice as much."""
    if isinstance(threshold, Tensor):
        return z.sub_(z.clamp(-threshold, threshold))
    threshold = min(threshold, torch.finfo(z.dtype).max)  # torch raises beyond it
    if torch.compiler.is_compiling():
        return torch.nn.functional.softshrink(z, threshold)
    torch.ops.aten.softshrink.out(z, threshold, out=z)
    return z


def entry_tangent(psi: Any, z: Tensor, y: Tensor, p: Tensor, step: Tensor | float) -> Tensor | None:
    """The derivative of the prox along p, or None if it is not cheap; for known functions it follows from y alone."""
    if not isinstance(psi, Scalar):
        found: Tensor | None = psi.prox_jvp(z, y, p, step)
        return found
    # The derivatives of torch's own functions are 0 where they do not move, else p.
    p = torch.ops.aten.softshrink_backward(p, y, 0.0) if psi.l1 else p
    p = p / (1 + step * psi.l2) if psi.l2 else p
    return torch.ops.aten.hardtanh_backward(p, y, psi.lower, psi.upper) if psi.bounded else p


def entry_move(psi: Any, x: Tensor, y: Tensor) -> Tensor:
    """y - x for what `entry_prox` returned; a function of a user may return memory of its own."""
    return y.sub_(x) if isinstance(psi, Scalar) else y - x


class Entries(SearchedParts):
    """Blocks whose regulariser acts on each entry, in the identity metric or in Adam's.

    Each round of the search needs one vector of entries for each of its points, so it works on pieces of the entries
    for which there is room. If there is room for them too, joined copies of x and d are kept for all rounds; in a
    metric also of D^-1 d and D^-1.
    """

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], scaled: bool) -> None:
        super().__init__(numbers, blocks, scaled)
        params = [x for block in blocks for x in block.params]
        entries = sum(x.numel() for x in params)
        self._dtype = torch.float64 if any(x.dtype is torch.float64 for x in params) else torch.float32
        room = max(2 * sum(x.numel() * x.dtype.itemsize for x in params), ROOM) // self._dtype.itemsize
        in_metric = any(block.in_metric for block in blocks)
        twice = scaled or in_metric or any(isinstance(block.alpha, Tensor) for block in blocks)
        rows, kept = POINTS * (2 if twice else 1), 4 if in_metric else 2
        self._piece, loose = (room - kept * entries) // rows, room // (rows + kept)
        # Seven operations on a piece that has to be joined first, four on one that is kept.
        self._keeps = self._piece > 0 and math.ceil(entries / self._piece) <= 2 * math.ceil(entries / loose)
        self._lists: list[tuple[int, list[list[Tensor]]]] = []
        for i, block in enumerate(blocks):
            metric = (block.along, block.metrics) if block.in_metric else ()
            found = bundles((block.params, block.slopes, *metric), entries if self._keeps else loose)
            self._lists += [(i, lists) for lists in found]
        self._count = len(self._lists)
        self._psi = [resting(block.entries.psi, block.alpha) for block in blocks]

    def _load(self, k: int) -> Part:
        i, lists = self._lists[k]
        return part_of(i, *(widened(join(tensors)) for tensors in lists))

    def _dot(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.dot(left, right)  # in one launch

    def _pieces(self, points: int) -> Iterator[Part]:
        """Pieces for which there is room at this number of points; one point needs fewer and longer ones."""
        for block, *vectors, inverse in self._parts():
            size = max(1, self._piece * POINTS // points if self._keeps else vectors[0].numel())
            columns = [vector.split(size) for vector in vectors]
            inverses = [None] * len(columns[0]) if inverse is None else inverse.split(size)
            yield from (Part(block, *parts) for parts in zip(*columns, inverses, strict=True))

    def heights(self, u: Array, reach: Array | float) -> Array:
        """All points in one pass, if the prox takes one step size for each of them."""
        several = per_point(reach)
        if several and not all(isinstance(psi, Scalar) for psi in self._psi):
            return super().heights(u, reach)
        caps = [times(reach, block.alpha) for block in self.blocks]
        steps = [(u * (self._scale * -cap)).to(self._dtype)[:, None] for cap in caps]
        sizes = [cap.to(self._dtype)[:, None] for cap in caps] if several else caps
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for part in self._pieces(len(u)):
            i = part.block
            found[i].append(_products(part, steps[i].to(part.x.dtype), self._psi[i], sizes[i]))
        own = [self.numbers.total(parts) for parts in found if parts]
        return self._scale * sum(own[1:], start=own[0])

    def _prox(self, k: int, z: Tensor, cap: Any, part: Part) -> Tensor:
        return entry_prox(self._psi[part.block], z, part.sizes(cap))

    def _store(self, k: int, y: Tensor) -> None:
        _, (xs, *_) = self._lists[k]
        spread(y.to(xs[0].dtype), xs)


def _products(part: Part, steps: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """<d, y - x> for each of the steps, a column."""
    y = entry_prox(psi, torch.addcmul(part.x, part.e, steps), part.sizes(alpha))  # one row per step
    return entry_move(psi, part.x, y) @ part.d
