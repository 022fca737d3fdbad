"""Blocks whose regulariser acts on each entry: few launches, and bounded memory.

Tensors are joined into a few long ones. A search needs only h from them, at all points of a round together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.refine import POINTS
from proxsps.optim.device.searched import Part, SearchedParts, part_of, resting, stepping
from proxsps.optim.lists import bundles, join, spread, widened
from proxsps.regularizers.structure import Prox, Scalar

ROOM = 32 << 20  # bytes that the search over entries may use, or twice those of the parameters, if that is more


class SearchedEntries(SearchedParts):
    """Blocks whose regulariser acts on each entry, in the identity metric or in Adam's.

    Each round of the search needs one vector of entries for each of its points, so it works on pieces of the entries
    for which there is room. If there is room for them too, joined copies of x and d are kept for all rounds; in a
    metric also of D^-1 d and D^-1.

    Caps are tensors if they are `scaled`: multiplied by a number that is known after the sums.
    """

    def __init__(self, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> None:
        super().__init__(numbers, blocks, places)
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
        self._psi = []
        for block in blocks:
            psi = block.entries.psi
            self._psi.append(resting(psi, block.alpha) if isinstance(psi, Scalar) else psi)

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

    def heights(self, u: Array) -> Array:
        """One pass."""
        blocks = range(len(self.blocks))
        return self._sums_at([self._along(i, u) for i in blocks], list(map(self.cap, blocks)))

    def ray_heights(self, s: Array) -> Array:
        """All points in one pass, if the prox takes one step size for each of them."""
        if not all(isinstance(psi, Scalar) for psi in self._psi):
            return super().ray_heights(s)
        caps = [s * block.alpha for block in self.blocks]
        sizes = [cap.to(self._dtype)[:, None] for cap in caps]
        return self._sums_at([cap * -self._scale for cap in caps], sizes)

    def _sums_at(self, steps: Sequence[Array], sizes: Sequence[Tensor | float]) -> Array:
        """sum <d, y - x> at several points: from factors on the scaled slopes and step sizes of the prox, by block."""
        columns = [step.to(self._dtype)[:, None] for step in steps]
        found: list[list[Tensor]] = [[] for _ in self.blocks]
        for part in self._pieces(len(steps[0])):
            i = part.block
            found[i].append(_products(part, columns[i].to(part.x.dtype), self._psi[i], sizes[i]))
        own = [_added(parts, steps[0].dtype) for parts in found if parts]
        return self._scale * sum(own[1:], start=own[0])

    def _prox(self, k: int, z: Tensor, inverse: Tensor | None) -> Tensor:
        i, _ = self._lists[k]
        return _prox(z, self._psi[i], self.cap(i) if inverse is None else self.cap(i) * inverse)

    def _store(self, k: int, y: Tensor) -> None:
        _, (xs, *_) = self._lists[k]
        spread(y.to(xs[0].dtype), xs)


def _products(part: Part, steps: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """<d, y - x> for each of the steps, a column."""
    _, x, d, e, inverse = part
    y = _prox(torch.addcmul(x, e, steps), psi, alpha if inverse is None else alpha * inverse)  # one row per step
    return (y.sub_(x) if isinstance(psi, Scalar) else y - x) @ d


def _prox(z: Tensor, psi: Scalar | Prox, alpha: Tensor | float) -> Tensor:
    """The prox, in the memory of z if psi is known; z itself where alpha is 0."""
    if not isinstance(psi, Scalar):
        y: Tensor = psi.prox(z, stepping(alpha))
        return torch.where(alpha == 0, z, y) if isinstance(alpha, Tensor) else y
    if psi.l1:
        z = _shrink(z, alpha * psi.l1)
    if psi.l2:
        z.div_(1 + alpha * psi.l2)
    return z.clamp_(psi.lower, psi.upper) if psi.bounded else z


def _shrink(z: Tensor, threshold: Tensor | float) -> Tensor:
    """Soft thresholding in the memory of z; with a threshold on the device in twice as much."""
    if isinstance(threshold, Tensor):
        return z.sub_(z.clamp(-threshold, threshold))
    if torch.compiler.is_compiling():
        return torch.nn.functional.softshrink(z, threshold)
    torch.ops.aten.softshrink.out(z, threshold, out=z)
    return z


def _added(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return parts[0].to(dtype) if len(parts) == 1 else torch.stack(list(parts)).sum(0, dtype=dtype)
