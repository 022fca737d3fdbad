"""The parts of a step on a device together: their sums, the linear model for the rules, and the write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.caps import Matched, l2_matched_height, l2_matched_step, matched_decision
from proxsps.core.dual import Found, fixed_loop
from proxsps.core.rules import Decision, Model
from proxsps.core.step import (
    Affine,
    Line,
    coupled_coefficients,
    coupled_move_sq,
    l2_line,
    prox_coefficients,
    prox_move_sq,
    relax,
    relaxation,
)
from proxsps.optim.blocks import ENTRIES, LINES, PROXES, ROWS, UNITS, Block
from proxsps.optim.device.affine import AffinePart
from proxsps.optim.device.entries import SearchedEntries
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.device.part import Absent, Searched
from proxsps.optim.device.proxes import SearchedProxes
from proxsps.optim.device.rows import SearchedRows
from proxsps.optim.device.search import Search
from proxsps.optim.last_step import Chosen
from proxsps.optim.reduce import Ranks, Sums

ROUNDS = 4  # of the search for the matched step of several blocks with weight decay; two are usual
ORDER = (LINES, PROXES, UNITS, ROWS, ENTRIES)


class L2Step(NamedTuple):
    """A step of the matched cap with weight decay: its size s, and the numbers for its report."""

    gap: Tensor
    d_sq: Tensor
    d_dot_x: Tensor
    share: Tensor
    lam: Tensor
    longest: Tensor
    s: Tensor

    def decision(self) -> Decision:
        """The full report of a step, which takes more operations than the step itself."""
        gap, d_sq, d_dot_x, share, lam, longest, s = self
        found = Matched(s, l2_matched_height(gap, d_sq, d_dot_x, share, lam, s))
        return matched_decision(gap, over_blocks(share * d_sq), found, longest)


class Parts:
    """The parts of a step over some blocks.

    Args:
        blocks: the blocks of the step.
        numbers: its numbers.
        ranks: the ranks that take the step together.
        known: sums of affine blocks that are known.
        coupled: whether the slopes include the squared l2 norm.
        scaled: whether caps are multiplied by a number that is known after the sums.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        numbers: Numbers,
        ranks: Ranks,
        known: Mapping[int, Sequence[list[Tensor]]],
        coupled: bool,
        scaled: bool,
    ) -> None:
        self.blocks, self.numbers, self._coupled = blocks, numbers, coupled
        kinds = [block.kind for block in blocks]
        self._is_affine = [kind == LINES for kind in kinds]
        sharded = any(block.sharded for block, kind in zip(blocks, kinds, strict=True) if kind != LINES)
        members: dict[tuple[str, float, int], list[int]] = defaultdict(list)
        for i, kind in enumerate(kinds):
            # Whole tensors are on every rank, shards on one: sums over the ranks use weights.
            share = blocks[i].share if sharded and kind != LINES else 1.0
            members[kind, share, i if kind == UNITS else 0].append(i)
        self.affine: AffinePart | None = None
        self.searched: list[Searched] = []
        for (kind, share, _), places in sorted(members.items(), key=lambda item: ORDER.index(item[0][0])):
            own = [blocks[i] for i in places]
            if kind == LINES:
                self.affine = AffinePart(numbers, own, places, known, coupled)
            else:
                self.searched.append(_searched(kind, numbers, own, places, scaled))
                self.searched[-1].share = share
        double = any(x.dtype is torch.float64 for block in blocks for x in block.params)
        self._search = Search(self.searched, self.affine is not None, numbers, ranks, sharded, double)

    def set_reach(self, reach: Array | float) -> None:
        """Multiply the caps of all blocks by one number."""
        for part in self.searched:
            part.reach = reach

    def sums(self, points: bool) -> Sums:
        """The sums of all blocks, in their order; ||x||^2 only for `points`."""
        if not self.searched and self.affine is not None:
            return Sums(*self.affine.rows(points))
        columns: list[Array] = [None] * len(self.blocks)
        for part in (*([] if self.affine is None else [self.affine]), *self.searched):
            found = part.sums(points)
            for j, place in enumerate(part.places):
                columns[place] = found[:, j]
        return Sums(*torch.stack(columns, dim=1))

    @property
    def _of_affine(self) -> Tensor:
        """1 for affine blocks, 0 for the others."""
        return self.numbers.vector([float(affine) for affine in self._is_affine])

    def model(self, gap: Tensor, sums: Sums, alpha: Tensor, lam: Tensor) -> Model:
        """The linear model of the step."""
        if not self.searched:
            line = Line(gap, (alpha * sums.d_sq).sum()) if self._coupled else l2_line(gap, *sums[:2], alpha, lam)
            return Model(gap, sums.d_sq, alpha, line)
        if self.affine is None:
            line = Line(gap, self.numbers.scalar(0.0))
        else:
            line = l2_line(gap, sums.d_sq, sums.d_dot_x, self._of_affine * alpha, lam)
        return Model(gap, sums.d_sq, alpha, line, partial(self._find, gap, sums, alpha), self._search.top)

    def _find(self, gap: Tensor, sums: Sums, alpha: Tensor, line: Line) -> Found:
        return self._search.dual(alpha @ sums.d_sq / gap, line)

    def matched(
        self, gap: Tensor, sums: Sums, share: Tensor, lam: Tensor, longest: Tensor
    ) -> tuple[Decision | L2Step, Tensor]:
        """The step of the matched cap, and its size s; its u is s / longest."""
        if not self.searched:
            s = l2_matched_step(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, fixed_loop(ROUNDS))
            return L2Step(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, s), s
        d_sq = over_blocks(share * sums.d_sq)
        lines = sums.d_sq, sums.d_dot_x, self._of_affine * share, lam
        found = self._search.matched(gap, d_sq, longest, lines)
        return matched_decision(gap, d_sq, found, longest), found.s

    def write(
        self, step: Chosen, sums: Sums, alpha: Tensor, lam: Tensor, ok: Tensor, max_move: float | None
    ) -> Array | float:
        """Move all blocks; returns the factor by which `max_move` shortens the move.

        Args:
            step: the step.
            sums: the sums that give the length of the move.
            alpha: caps, or shares that are multiplied by the reach of the step.
            lam: strengths of the squared l2 norm.
            ok: whether the step is taken.
            max_move: limit on the length of the move, or None.
        """
        self.set_reach(step.reach)
        if not (isinstance(step.reach, float) and step.reach == 1):
            alpha = step.reach * alpha
        s: Array | float = 1.0
        if self.affine is not None or max_move is not None:
            update = (coupled_coefficients if self._coupled else prox_coefficients)(step.u, alpha, lam)
        if max_move is not None:
            s = relaxation(self._move_sq(update, step.u, sums), max_move)
            update = relax(update, s)
        if self.affine is not None:
            self.affine.move(update, ok)
        for part in self.searched:
            part.write(step.u, s, ok)
        # Autograd does not notice writes of torch's fused operations: backward through a graph of before would use the
        # new parameters.
        for x in () if torch.compiler.is_compiling() else [x for block in self.blocks for x in block.params]:
            torch.autograd.graph.increment_version(x)
        return s

    def _move_sq(self, update: Affine, u: Array, sums: Sums) -> Array:
        """||x+ - x||^2 over all blocks."""
        if self._coupled:
            return coupled_move_sq(update, sums.d_sq)
        if not self.searched:
            return prox_move_sq(update, *sums)
        affine = self._of_affine
        return self._search.move_sq(u) + prox_move_sq(update, *(affine * part for part in sums))


def _searched(kind: str, numbers: Numbers, blocks: Sequence[Block], places: Sequence[int], scaled: bool) -> Searched:
    """The part of blocks of this kind."""
    if all(block.empty for block in blocks):
        return Absent(numbers, blocks, places)
    if kind == ENTRIES:
        return SearchedEntries(numbers, blocks, places, scaled)
    return (SearchedRows if kind == ROWS else SearchedProxes)(numbers, blocks, places)
