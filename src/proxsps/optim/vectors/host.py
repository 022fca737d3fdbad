"""Parts of a plan by torch: any dtype, memory layout and regulariser.

The formulas are those of `proxsps.optim.kernels.entrywise`. Entries are processed in pieces that fit into the cache:
parts of long tensors, or short tensors joined. Averages are computed again in each pass, which takes less time than to
write them and read them back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from proxsps.core.model import RowSums
from proxsps.core.plain import corrected_weight
from proxsps.optim.blocks import ENTRIES, FULL, PROXES, ROWS, Block, plain, stored
from proxsps.optim.lists import bundles
from proxsps.optim.rule import Heights, Table
from proxsps.optim.vectors.averages import new_metric
from proxsps.optim.vectors.lots import Bundle, Lot, Pile, piles
from proxsps.optim.vectors.rows import RowHeights, RowStack, row_stacks
from proxsps.regularizers._support import reading_numbers

PIECE = 1 << 18  # entries: few enough for the cache, and enough that the time of calls does not matter
SLICE = 1 << 16  # the same for rows
Floats = Sequence[float]

# The C library gives the memory of a piece back to the system, which clears new pages for the next piece: a pass may
# then take three times as long. Once a larger block was freed, it keeps smaller ones. No page of this one is touched.
torch.empty(16 * PIECE)


class Loaded(NamedTuple):
    """The entries of a lot in this step, in at least f32, in doubles if the plan is exact."""

    x: Tensor
    center: Tensor | None
    near: Tensor  # x - center
    g: Tensor
    d: Tensor
    p: Tensor  # D^-1 d; d itself where only D is needed
    D: Tensor | None  # the metric
    v: Tensor | None  # the new average of squares

    def moved(self, alpha: float, u: float) -> Tensor:
        """x - u alpha p."""
        return torch.add(self.x, self.p, alpha=-u * alpha)

    def step(self, alpha: float) -> Tensor | float:
        """The step size of the prox."""
        return alpha if self.D is None else alpha / self.D


class TorchPart:
    """Affine blocks and those whose prox acts on each entry, or blocks with only a prox."""

    mixes, points = False, 1  # points of a round: each takes as long as a pass

    def __init__(self, plan: Any, kind: str, places: Sequence[int]) -> None:
        self._plan, self._kind = plan, kind
        self._blocks: list[Block] = [plan.blocks[i] for i in places]
        self._affine = [plan.affine[i] for i in places]
        tensors = [x for block in self._blocks for x in block.params]
        self._plain = plain(tensors) and not any(map(torch._is_functional_tensor, tensors))
        self._reads = self._plain and stored(tensors)
        self.coupling = [0.0] * len(places)
        self._lots = [lot for i, block in enumerate(self._blocks) for lot in self._cut(block, i)]
        self._curves = [lot for lot in self._lots if not self._affine[lot.block]]
        self.curved = not all(self._affine)
        self.entries = sum([lot.size for lot in self._curves]) if kind == ENTRIES else 0
        self._kept: dict[int, Loaded] = {}  # of blocks with only a prox, and their last points
        self._last: dict[int, tuple[tuple[float, float], Tensor]] = {}

    def set_coupling(self, lam: Sequence[float]) -> None:
        """How much of x is in the slopes of coupled methods."""
        self.coupling = list(lam)

    def _cut(self, block: Block, place: int) -> Iterator[Lot]:
        """The lots of a block."""
        plan = self._plan
        held = [[plan.entries_of(block, i, name) for i in range(len(block.params))] for name in plan.averages]
        columns = [block.params, block.slopes, *held]
        if self._kind == ROWS:
            yield from row_stacks(block, place, columns, SLICE)
        elif self._kind == PROXES and not self._affine[place]:
            counts = [plan.count_of(block, i) for i in range(len(block.params))] if plan.rule.beta2 is not None else ()
            yield from piles(block, place, columns, counts)
        else:
            columns += [block.centers] if block.centered else []
            psi = None if self._affine[place] else block.entries.psi
            for count, members in plan.by_count(block):
                for lists in bundles([[tensors[i] for i in members] for tensors in columns], PIECE):
                    centers = lists.pop() if block.centered else []
                    yield Bundle(place, lists, psi, centers, counts=[] if count is None else [count])

    # The entries of a lot

    def _load(self, lot: Lot, every: int = 1, in_place: bool = False) -> Loaded:
        """The entries, or one in `every`; `in_place` stores new averages, where these are read from their memory."""
        if id(lot) in self._kept:
            return self._kept[id(lot)]
        rule, weight = self._plan.rule, self._plan.weight
        x, g, *held = [self._gather(lot, tensors, every) for tensors in lot.columns]
        d, D, v = g, None, None
        if rule.beta is not None and (in_place or weight != 1):
            d = (Tensor.lerp_ if in_place else torch.lerp)(held[0], g, weight)
        if rule.beta2 is not None:
            dtype = lot.columns[-1][0].dtype
            v, D = new_metric(held[-1], g, self._weight(lot, rule.beta2), rule.eps, dtype, in_place)
        center = self._gather(lot, lot.centers, every) if isinstance(lot, Bundle) and lot.centers else None
        near = x if center is None else x - center
        if self.coupling[lot.block]:
            d = torch.add(d, near, alpha=self.coupling[lot.block])
        p = d if D is None or (in_place and self._affine[lot.block]) else d / D
        found = Loaded(x, center, near, g, d, p, D, v)
        if isinstance(lot, Pile):
            self._kept[id(lot)] = found
        return found

    def _gather(self, lot: Lot, tensors: Sequence[Tensor], every: int) -> Tensor:
        found = lot.gather(tensors, self._plan.exact)
        return found[: max(1, found.numel() // every)] if lot.sampled and every > 1 else found

    def _weight(self, lot: Lot, beta2: float) -> Tensor | float:
        """The weight of new squares; by entry where some tensors got their first gradient late."""
        weights = [corrected_weight(float(count), beta2) for count in lot.counts]
        if len(set(weights)) == 1:
            return weights[0]
        pairs = zip(lot.columns[-1], weights, strict=True)
        return lot.gather([torch.full_like(old, weight) for old, weight in pairs], self._plan.exact)

    # The sums

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, row by row, and the heights at the points u."""
        return self._table(1, alpha, u)

    def sampled_sums(self, every: int) -> list[list[float]]:
        """The sums of a step, estimated from a sample."""
        return self._table(every)[0]

    def _table(self, every: int, alpha: Floats = (), u: Floats = ()) -> tuple[list[list[float]], Heights]:
        rows = [[0.0] * len(self._blocks) for _ in Table._fields]
        heights = Heights([0.0] * len(u), [0.0] * len(u))
        for lot in self._lots:
            own = self._load(lot, every)
            scale = 1.0 if every == 1 else lot.size / max(1, own.x.numel())
            for row, number in zip(rows, self._sums(lot, own), strict=True):
                row[lot.block] += scale * number
            if u and not self._affine[lot.block]:
                self._add(lot, own, [(alpha[lot.block], v) for v in u], *heights)
        return rows, heights

    def _sums(self, lot: Lot, own: Loaded) -> tuple[float, ...]:
        """The row of a table for one lot."""
        x, _, near, g, d, p, D, _ = own
        d_sq, noise = _dot(d, p), 0.0
        if not self._affine[lot.block]:
            products = d * x
            noise = _dot(products, products)
        g_dot_x = g_sq = 0.0
        if self._plan.averages:
            q = p if d is g else g if D is None else g / D
            g_dot_x, g_sq = _dot(g, x), _dot(q, q)
            if D is not None and _overflows(g, lot.columns[-1][0].dtype):
                d_sq = math.nan
        d_dot_c = 0.0 if own.center is None else _dot(d, own.center)
        x_sq = _dot(near, near) if self.coupling[lot.block] else 0.0
        return d_sq, _dot(d, near), noise, g_dot_x, g_sq, 0.0, 0.0, x_sq, d_dot_c

    # The search

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """Heights at the points u."""
        found = Heights([0.0] * len(u), [0.0] * len(u))
        for lot in self._curves:
            self._add(lot, self._load(lot, every), [(alpha[lot.block], v) for v in u], *found)
        return found

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """Heights where step and prox have the size s times `share`."""
        heights = [0.0] * len(s)
        for lot in self._curves:
            self._add(lot, self._load(lot, every), [(v * share[lot.block], 1.0) for v in s], heights)
        return heights

    def _add(
        self,
        lot: Lot,
        own: Loaded,
        points: Iterable[tuple[float, float]],
        heights: list[float],
        slopes: list[float] | None = None,
    ) -> None:
        """Add h and its slope at points: caps and u."""
        scale = lot.size / max(1, own.x.numel())
        known, step = math.nan, cast(Tensor | float, 0.0)
        for i, (alpha, u) in enumerate(points):
            known, step = alpha, step if alpha == known else own.step(alpha)
            y = self._at(lot, own, alpha, u, step)
            if slopes is not None:
                z = y if lot.fresh else own.moved(alpha, u)
                tangent = lot.tangent(z, y, own.p, step)
                slopes[i] += math.nan if tangent is None else -scale * alpha * _dot(own.d, tangent)
            heights[i] += scale * _dot(own.d, y.sub_(own.x) if lot.fresh else y - own.x)

    def _at(self, lot: Lot, own: Loaded, alpha: float, u: float, step: Tensor | float) -> Tensor:
        """y(u); that of the last point is kept where it takes long."""
        if id(lot) not in self._kept:
            return lot.prox(own.moved(alpha, u), step)
        if id(lot) not in self._last or self._last[id(lot)][0] != (alpha, u):
            with reading_numbers() if self._reads else nullcontext():
                self._last[id(lot)] = (alpha, u), lot.prox(own.moved(alpha, u), step)
        return self._last[id(lot)][1]

    # The write

    def _in_place(self, lot: Lot) -> bool:
        """Whether what is gathered of a lot and of its averages is their memory."""
        x, alone = lot.columns[0][0], len(lot.columns[0]) == 1
        flat = (isinstance(lot, Bundle) and not lot.centers) or (isinstance(lot, RowStack) and lot.order is None)
        if not (self._plain and alone and flat and not self._plan.exact and x.dtype in FULL):
            return False
        # Averages keep the order of memory that the parameter had when they were made, or that of a checkpoint.
        return all([t.is_contiguous() for t in (x, *(held[0] for held in lot.columns[2:]))])

    def write(self, keep: Floats, move: Floats, alpha: Floats, u: float, moves: bool) -> None:
        """x <- keep x + move p + (1 - keep) center, or y(u); stores new averages."""
        for lot in self._lots:
            b, in_place = lot.block, self._in_place(lot)
            own = self._load(lot, in_place=in_place)
            if not in_place:
                new: Any = {"average": own.d, "square": own.v}
                for name, tensors in zip(self._plan.averages, lot.columns[2:], strict=True):
                    lot.scatter(new[name], tensors)
            if not self._affine[b]:
                if moves:
                    lot.scatter(self._at(lot, own, alpha[b], u, own.step(alpha[b])), lot.columns[0])
                continue
            x, D = own.x, own.D
            d = own.g if self.coupling[b] else own.d  # `keep` has the part of the slope that is lam x
            if in_place:
                x.mul_(keep[b])
                x.add_(d, alpha=move[b]) if D is None else x.addcdiv_(d, D, value=move[b])
                continue
            y = torch.add(keep[b] * x, d if D is None else own.p, alpha=move[b])  # a wrapper would add twice
            if own.center is not None:
                y = torch.add(y, own.center, alpha=1 - keep[b])
            lot.scatter(y, lot.columns[0])


class RowPart(TorchPart):
    """Blocks of rows in the identity metric: three sums per row are kept for the search."""

    points = 3

    def sums(self, alpha: Floats, u: Floats) -> tuple[list[list[float]], Heights]:
        """The sums of a step, and the heights at the points u."""
        self._found: list[Tensor] = []
        rows, _ = super().sums(alpha, ())
        self._rows = None
        if self._found:
            sums = RowSums(*torch.cat(self._found, dim=1))
            stacks = [lot for lot in self._lots if isinstance(lot, RowStack)]
            self._rows = RowHeights(sums, stacks, len(self._blocks))
            rows[:2] = ([float(own[k]) for own in self._rows.by_block()] for k in range(2))
        return rows, self.heights(alpha, u)

    def _sums(self, lot: Lot, own: Loaded) -> tuple[float, ...]:
        x, g, d = own.x, own.g, own.d
        squares = [torch.linalg.vector_norm(t, dim=1, dtype=torch.float64).square_() for t in (x, d)]
        self._found.append(torch.stack([squares[0], torch.linalg.vecdot(x, d).double(), squares[1]]))
        sums = (_dot(g, x), _dot(g, g)) if self._plan.averages else (0.0, 0.0)
        return 0.0, 0.0, 0.0, *sums, 0.0, 0.0, 0.0, 0.0

    def heights(self, alpha: Floats, u: Floats, every: int = 1) -> Heights:
        """From the sums of the rows."""
        if self._rows is None:
            return Heights([0.0] * len(u), [0.0] * len(u))
        h, slope = self._rows.with_slopes(alpha, torch.tensor(u, dtype=torch.float64))
        return Heights(h.tolist(), slope.tolist())

    def ray(self, share: Floats, s: Floats, every: int = 1) -> list[float]:
        """From the sums of the rows."""
        if self._rows is None:
            return [0.0] * len(s)
        steps = torch.tensor(s, dtype=torch.float64)
        found: list[float] = self._rows.heights(share, torch.ones_like(steps), steps).tolist()
        return found


def _dot(a: Tensor, b: Tensor) -> float:
    """<a, b>: in doubles, but for pieces of entries."""
    return float(torch.dot(a, b) if a.dim() == 1 and len(a) <= PIECE else torch.sum(a * b, dtype=torch.float64))


def _overflows(g: Tensor, dtype: torch.dtype) -> bool:
    """Whether the square of a gradient leaves the range of the state's type: v would stay infinite."""
    most = torch.finfo(dtype).max
    if not g.numel() or _dot(g, g) <= most:  # usual, and twice as fast
        return False
    largest = float(g.abs().amax())
    return not largest * largest <= most


def make_vectors(plan: Any, kind: str, places: Sequence[int]) -> TorchPart:
    """A part by torch."""
    tensors = [t for i in places for t in (*plan.blocks[i].params, *plan.blocks[i].slopes)]
    odd = not plain(tensors) or any(map(torch._is_functional_tensor, tensors))
    if kind == ROWS and not odd and plan.rule.beta2 is None:
        return RowPart(plan, kind, places)
    entries = kind == ENTRIES and not (odd and not all([plan.affine[i] for i in places]))
    return TorchPart(plan, ENTRIES if entries else PROXES, places)
