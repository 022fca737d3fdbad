"""The parts of a step on a device together: their sums, the linear model with its search, and the write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks, times
from proxsps.core.caps import l2_matched_step, l2_ray_heights, matched_decision
from proxsps.core.dual import Found, fixed_loop
from proxsps.core.rounds import refine_zero
from proxsps.core.rules import Decision, Model
from proxsps.core.step import Affine, Line, coupled_coefficients, l2_line, prox_coefficients
from proxsps.optim.blocks import LINES, ROWS, UNITS, Block, pieces, stored
from proxsps.optim.device.joined import Estimate
from proxsps.optim.device.refine import POINTS, refine_dual
from proxsps.optim.device.searched import Searched, SearchedLots, SearchedRows
from proxsps.optim.last_step import Chosen, L2Step
from proxsps.optim.lists import LAUNCH, join, spread, widened
from proxsps.optim.reduce import Ranks, Sums

ROUNDS = {False: 4, True: 7}  # of the search for the dual variable, in single and in double precision
MATCHED_ROUNDS = {False: 6, True: 8}  # the same for the matched step
L2_ROUNDS = 4  # for the matched step of several blocks with weight decay; two are usual


class Parts:
    """The parts of a step: affine blocks, of which the estimate has the sums, and blocks that are searched.

    Args:
        estimate: the model of the loss, with the blocks of the step.
        ranks: the ranks that take the step together.
        scaled: whether caps are multiplied by a number that is known after the sums.
    """

    def __init__(self, estimate: Estimate, ranks: Ranks, scaled: bool) -> None:
        self._estimate, self._ranks, self._coupled = estimate, ranks, estimate.rule.coupled
        self.blocks, self.numbers = blocks, numbers = estimate.blocks, estimate.numbers
        kinds = estimate.kinds
        self._lines = {i: block for i, block in enumerate(blocks) if kinds[i] == LINES}
        others = {i: block for i, block in enumerate(blocks) if kinds[i] != LINES}
        self.curved = bool(others)  # also if this rank has no entries of blocks that are searched
        self._sharded = any(block.sharded for block in others.values())
        self._double = any(x.dtype is torch.float64 for block in blocks for x in block.params)
        curved = {x.dtype for block in others.values() for x in block.params}
        self._eps = torch.finfo(torch.float64 if curved <= {torch.float64} else torch.float32).eps
        members: dict[tuple[str, float, int], list[int]] = defaultdict(list)
        for i, block in others.items():
            # Whole tensors are on every rank, shards on one: sums over the ranks use weights.
            share = block.share if self._sharded else 1.0
            members[kinds[i], share, i if kinds[i] == UNITS else 0].append(i)
        self._searched: list[Searched] = []
        self._members: list[tuple[list[int], float]] = []  # places of their blocks, and weights over the ranks
        for (kind, share, _), places in members.items():
            own = [blocks[i] for i in places]
            if not all(block.empty for block in own):
                rows = kind == ROWS
                self._searched.append(SearchedRows(numbers, own) if rows else SearchedLots(numbers, own, kind, scaled))
                self._members.append((places, share))

    def sums(self) -> Sums:
        """The sums of all blocks, in their order."""
        parts = zip(self._searched, self._members, strict=True)
        found = {i: pair for part, (places, _) in parts for i, pair in zip(places, part.sums(), strict=True)}
        d_sq, d_dot_x = ({i: pair[row] for i, pair in found.items()} for row in range(2))
        estimate = self._estimate
        x_sq = estimate.row("x_sq") if self._coupled else 0.0
        return Sums(estimate.row("d_sq", d_sq), estimate.row("d_dot_x", d_dot_x), x_sq)

    @property
    def _of_affine(self) -> Tensor:
        """1 for affine blocks, 0 for the others."""
        return self.numbers.vector([float(kind == LINES) for kind in self._estimate.kinds])

    def _total(self, found: Sequence[Tensor], like: Tensor) -> Array:
        """The numbers of all searched parts, each of the shape of `like`, added up over these and over all ranks."""
        if not self._sharded:
            return sum(found[1:], start=found[0])
        shares = [share * own for (_, share), own in zip(self._members, found, strict=True)]
        return self._ranks.sum(sum(shares, start=torch.zeros_like(like)))[0]

    # The search

    def model(self, gap: Tensor, sums: Sums, alpha: Tensor, lam: Tensor | float, reach: Tensor | float = 1.0) -> Model:
        """The linear model of a step with the caps `alpha`, which are those of the blocks times `reach`."""
        if not self.curved:
            line = Line(gap, (alpha * sums.d_sq).sum()) if self._coupled else l2_line(gap, *sums[:2], alpha, lam)
            return Model(gap, sums.d_sq, alpha, line)
        if not self._lines:
            line = Line(gap, torch.zeros_like(gap))
        else:
            line = l2_line(gap, sums.d_sq, sums.d_dot_x, self._of_affine * alpha, lam)

        def heights(line: Line, u: Tensor) -> Array:
            start = line.start - line.fall * u if self._lines else line.start
            return start + self._total([part.heights(u, reach) for part in self._searched], u)

        def dual(line: Line) -> Found:
            points = POINTS if self._sharded else min(part.points for part in self._searched)
            # With many points in the first round, fewer rounds are enough.
            rounds = ROUNDS[self._double] - (points > 4 * POINTS) - (points > 32 * POINTS)
            ratio = alpha @ sums.d_sq / gap  # 1 over the dual variable of a step without a regulariser
            return refine_dual(partial(heights, line), line.start, rounds, points, ratio)

        def top(line: Line) -> Array:
            return heights(line, self.numbers.vector([1.0]))[0]

        return Model(gap, sums.d_sq, alpha, line, dual, top)

    def matched(
        self, gap: Tensor, sums: Sums, share: Tensor, lam: Tensor | float, longest: Tensor
    ) -> tuple[Decision | L2Step, Tensor]:
        """The step of the matched cap, and its size s; its u is s / longest."""
        if not self.curved:
            s = l2_matched_step(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, fixed_loop(L2_ROUNDS))
            return L2Step(gap, sums.d_sq, sums.d_dot_x, share, lam, longest, s), s
        d_sq, lines = over_blocks(share * sums.d_sq), self._of_affine * share

        def heights(s: Tensor) -> Array:
            ones = torch.ones_like(s)
            height = self._total([part.heights(ones, s) for part in self._searched], s)
            if not self._lines:
                return height
            return height + l2_ray_heights(sums.d_sq, sums.d_dot_x, lines, lam, s)[0]

        found = refine_zero(heights, gap, d_sq, longest, MATCHED_ROUNDS[self._double], self._eps)
        return matched_decision(gap, d_sq, found, longest), found.s

    # The write

    def write(self, step: Chosen, alpha: Tensor, lam: Tensor | float, ok: Tensor) -> None:
        """Move all blocks.

        Args:
            step: the step.
            alpha: caps, or shares that are multiplied by the reach of the step.
            lam: strengths of the squared l2 norm.
            ok: whether the step is taken.
        """
        if self._lines:
            coefficients = coupled_coefficients if self._coupled else prox_coefficients
            move_lines(self._lines, coefficients(step.u, times(step.reach, alpha), lam), ok)
        for part in self._searched:
            part.write(step.u, step.reach, ok)
        # Autograd does not notice writes of torch's fused operations: backward through a graph of before would use the
        # new parameters.
        for x in () if torch.compiler.is_compiling() else [x for block in self.blocks for x in block.params]:
            torch.autograd.graph.increment_version(x)


# Blocks whose prox is affine: x <- keep x + move d + pull center


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
    columns: list[Any] = [block.params, block.along, *([block.centers] if block.centered else [])]
    for xs, ds, *centers in pieces(columns, LAUNCH):
        x, d = widened(join(xs)), widened(join(ds))
        y = keep * x + move * d
        for cs in centers:
            y = y + pull * widened(join(cs))
        spread(torch.where(ok, y.to(x.dtype), x).to(xs[0].dtype), xs)


def _move_fused(block: Block, keep: Tensor | None, move: Tensor, skipped: Tensor) -> None:
    """x <- keep x + move d in two calls for all tensors of an aligned f32 block; nothing where `skipped` is 1, not 0.

    `keep` is 1 there; it is None if it is always 1.
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
