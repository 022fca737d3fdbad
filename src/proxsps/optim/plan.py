"""A plan: everything of a step on the host that depends neither on entries nor on numbers.

Which tensors take part, how they are divided into blocks and parts, where they lie in memory, and the state that they
need. It is made with all checks, and kept as long as it holds. A plan may be dropped at any time: the next one gives
bitwise the same step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxsps.core.plain import corrected_weight, gradient_squares, gradient_weight
from proxsps.core.plain import relaxation as plain_relaxation
from proxsps.core.plain_step import Method
from proxsps.optim.blocks import ENTRIES, FULL, LINES, PROXES, ROWS, SPECTRAL, UNITS, Block, couple
from proxsps.optim.held import HeldState, Member, lasting, parameters
from proxsps.optim.limit import Start
from proxsps.optim.lists import PLAIN
from proxsps.optim.memory import ORIGIN, replace
from proxsps.optim.rule import Heights, Rule, Table
from proxsps.optim.second_point import averages, dots, move_points, next_points

# Sums of squares in f32 beyond these have lost digits, or overflowed: such a step is taken in doubles.
LEAST, MOST = 1e-20, 1e30
G_DOT_X = Table._fields.index("g_dot_x")
FUSED = (
    "fused=True needs numba and dense f32 or f64 CPU tensors of one dtype, contiguous or channels-last, with "
    "regularisers that have kernels and no centres. fused=None falls back to torch otherwise."
)


@cache
def load_kernels() -> Any:
    """The function that makes parts of compiled kernels, or None without numba or without a place for its cache."""
    try:
        from proxsps.optim.kernels.make import make_part
    except (ImportError, RuntimeError):
        return None
    return make_part


class Plan(HeldState):
    """The plan of a step on the host; an `exact` one computes in doubles, because squares leave the range of f32."""

    def __init__(self, opt: Any, blocks: Sequence[Block], rule: Rule, exact: bool = False) -> None:
        super().__init__(opt, blocks, rule)
        self.exact = exact
        for block in blocks:
            block.alpha = float(block.alpha)
        penalties = [couple(block) if rule.coupled else None for block in blocks]
        self.penalties = [0.0 if value is None else float(value) for value in penalties]
        self.penalty = sum(self.penalties)
        kinds = [SPECTRAL if block.spectral else block.kind for block in blocks]
        self.affine = [kind in (LINES, SPECTRAL) for kind in kinds]
        self.ranks, self._all_ranks = opt._ranks.size, opt._ranks
        self.active = self.ranks  # how many of them stepped; others may have run out of batches
        self.averages = rule.averages()
        self.weight = 1.0  # of new values in averages
        if rule.mix is not None:
            for block in blocks:
                move_points(block, partial(self.entries_of, block))
        self._lam = [None if block.group["regularizer"] is None else block.lam for block in blocks]
        self._full = [i for i, block in enumerate(blocks) if not block.empty]
        self._sharded = any([b.sharded and not affine for b, affine in zip(blocks, self.affine, strict=True)])
        self.parts = [self._member(opt, kind, places) for kind, places in self._by_kind(kinds)]
        self.curves = [member for member in self.parts if member.part.curved]
        self.l1 = self._l1()
        self.points = min([member.part.points for member in self.curves], default=1)
        self.entries = 0 if self._sharded else sum([member.part.entries for member in self.curves])
        dtypes = {x.dtype for block in blocks for x in block.params}
        self.wide = exact or dtypes <= {torch.float64}
        curved = {x.dtype for b, affine in zip(blocks, self.affine, strict=True) if not affine for x in b.params}
        beyond = 1e300 if dtypes <= {torch.float64} else 1e38  # a move below it is well inside the range of numbers
        self.method = Method(
            rule.beta is not None, rule.mix is not None, rule.coupled, rule.beta2 is not None, rule.matched,
            rule.distance, rule.factor, float(rule.scale), beyond,
        )  # fmt: skip
        self.eps = torch.finfo(torch.float64 if curved <= {torch.float64} else torch.float32).eps
        if rule.distance:
            self.apart += [p for p in parameters(opt) if p.grad is None and ORIGIN in opt.state.get(p, ())]
        self.owners = [p for member in self.parts for p in member.owners]
        compiled = all([member.compiled for member in self.parts])
        # Plans by torch, those of subgradients and those for odd tensors are made anew for every step.
        self.kept = compiled and all([value is None for value in penalties])
        self.kept = self.kept and all([type(p) in PLAIN and p.dtype in FULL for p in self.owners])
        self.kept = self.kept and all([lasting(block.phi) for block in blocks])
        self.closed_form: Any = None
        full = len(self._full) == len(blocks) and not any([block.resting or block.spectral for block in blocks])
        alone = len(self.parts) == self.ranks == 1 and compiled and full and not self.apart and all(self.affine)
        if alone and rule.name == "truncated" and rule.max_move is None:
            from proxsps.optim.kernels.closed_form import ClosedForm  # needs numba

            self.closed_form = ClosedForm(self, *((-1.0, math.inf) if self.wide else (LEAST, MOST)))

    def _l1(self) -> list[float]:
        """The strength of the l1 norm in each block, where blocks have that or weight decay, by kernels; else none."""
        found = [0.0] * len(self.blocks)
        for member in self.curves:
            if not member.compiled or member.part.l1 is None:
                return []
            for j, strength in zip(member.places, member.part.l1, strict=True):
                found[j] = strength
        return found if self.curves else []

    def _by_kind(self, kinds: Sequence[str]) -> list[tuple[str, list[int]]]:
        """The places of the blocks of each part, by kind; those of entries come last."""
        found: dict[tuple[str, float, int], list[int]] = {}
        for i, (kind, block) in enumerate(zip(kinds, self.blocks, strict=True)):
            kind = ENTRIES if kind == LINES else kind
            found.setdefault((kind, block.share, i if kind == UNITS else 0), []).append(i)
        order = (PROXES, UNITS, ROWS, SPECTRAL, ENTRIES)
        return [(key[0], places) for key, places in sorted(found.items(), key=lambda item: order.index(item[0][0]))]

    def _member(self, opt: Any, kind: str, places: list[int]) -> Member:
        """The part of these blocks: by kernels where they apply, else by torch."""
        blocks, fused = [self.blocks[i] for i in places], opt.param_groups[0]["fused"]
        owners = [p for block in blocks for p in block.owners]
        make_part = None if fused is False or self.exact else load_kernels()
        part = None if make_part is None else make_part(self, opt, kind, places)
        compiled = part is not None
        if part is None:
            if fused and not self.exact and owners and kind != SPECTRAL:
                raise RuntimeError(FUSED)
            from proxsps.optim.vectors.host import make_vectors  # usually not needed
            from proxsps.optim.vectors.spectral import SpectralPart

            part = SpectralPart(self, opt, places) if kind == SPECTRAL else make_vectors(self, kind, places)
            self.apart += owners if self.rule.distance else []
        return Member(part, places, blocks[0].share, owners, compiled)

    # The passes

    def prepare(self, k: float, lam: Sequence[float]) -> None:
        """Set the weights of averages for step number k, and how much of x is in the slopes of coupled methods."""
        rule = self.rule
        if rule.beta is not None:
            self.weight = 1 - rule.beta * min(k, 1.0) if rule.beta2 is None else corrected_weight(k, rule.beta)
        if rule.mix is not None:
            mu = gradient_weight(k)
            self.momentum = mu, gradient_squares(k, float(self.blocks[0].group["squares"]))
        for member in self.parts:
            if member.compiled and self.averages:
                member.part.set_weights(k, rule)
            if rule.coupled:
                member.part.set_coupling([lam[j] for j in member.places])

    def sums(self, alpha: Sequence[float], ahead: Sequence[float]) -> tuple[Table, Heights]:
        """The sums of all blocks, and the heights of the others at the points `ahead`, from the same pass."""
        found = [member.part.sums([alpha[j] for j in member.places], ahead) for member in self.parts]
        for member, (sums, _) in zip(self.parts, found, strict=True) if self.rule.mix is not None else ():
            if not member.part.mixes:
                own = [self.blocks[j] for j in member.places]
                sums[G_DOT_X] = [dots(block.slopes, block.params, block.ys, self.exact) for block in own]
        if len(found) == 1:
            return Table(*found[0][0]), found[0][1]
        rows = [[0.0] * len(self.blocks) for _ in Table._fields]
        for member, (sums, _) in zip(self.parts, found, strict=True):
            for row, numbers in zip(rows, sums, strict=False):
                for j, number in zip(member.places, numbers, strict=True):
                    row[j] = number
        curved = [own for member, (_, own) in zip(self.parts, found, strict=True) if member.part.curved]
        return Table(*rows), self._added(curved if ahead else [])

    def heights(self, alpha: Sequence[float], u: Sequence[float], every: int = 1) -> Heights:
        """sum <d, y(u) - x> over the blocks that are not affine, and its derivative; a sample for `every` above 1."""
        return self._added([member.part.heights([alpha[j] for j in member.places], u, every) for member in self.curves])

    def ray(self, share: Sequence[float], s: Sequence[float], every: int = 1) -> list[float]:
        """sum <d, x+(s) - x> over the blocks that are not affine, where step and prox have the size s times `share`."""
        return self._total([member.part.ray([share[j] for j in member.places], s, every) for member in self.curves])

    def _added(self, found: Sequence[Heights]) -> Heights:
        """The heights of parts, and their slopes, added up."""
        total = self._total([[*h, *slope] for h, slope in found]) if found else []
        points = len(total) // 2
        return Heights(total[:points], total[points:])

    def _total(self, found: Sequence[list[float]]) -> list[float]:
        """The numbers of all parts that are not affine added up, over all ranks if some are sharded."""
        if not self._sharded:
            return found[0] if len(found) == 1 else list(map(sum, zip(*found, strict=True)))
        own = sum([member.share * np.array(one) for member, one in zip(self.curves, found, strict=True)])
        (total,) = self._all_ranks.sum(np.asarray(own))
        numbers: list[float] = np.asarray(total).tolist()
        return numbers

    def write(
        self,
        keep: Sequence[float],
        move: Sequence[float],
        alpha: Sequence[float],
        u: float,
        moves: bool,
        share: float = 1.0,
    ) -> float:
        """Move all blocks, and store new averages; `share` is that of the new point in the schedule-free form.

        Returns the factor by which a limit shortened the move.
        """
        start = None if self.rule.max_move is None else Start(self.blocks)
        apart: list[tuple[Block, list[Tensor]]] = []  # whose next y the part does not write; it follows from these x
        for member in self.parts:
            if self.rule.mix is not None and member.part.mixes:
                member.part.set_share(share)
            if self.rule.mix is not None and (start is not None or not member.part.mixes):
                blocks = [self.blocks[j] for j in member.places]
                apart += [(block, averages(block, self.rule.mix, member.part.mixes)) for block in blocks]
            member.part.write(*[[numbers[j] for j in member.places] for numbers in (keep, move, alpha)], u, moves)
            if self.rule.beta2 is not None and not self.blocks[member.places[0]].spectral:
                self._count(member)
        relaxation = 1.0 if start is None else self.relaxation(start)
        if start is not None and relaxation < 1:
            start.shorten(relaxation)
        for block, xs in apart:
            next_points(block, xs, self.rule.mix or 0.0, share)
        self._finish()
        return relaxation

    def relaxation(self, start: Start | None) -> float:
        """The factor on a move that is longer than `max_move`.

        Args:
            start: of the move. None if no step is taken, of which ranks that wait in `Join` do not know.
        """
        squares: Sequence[Any] = () if start is None else start.moves_sq(torch.float64)
        total = sum([block.share * float(own) for block, own in zip(self.blocks, squares, strict=False)])
        if self.ranks > 1:
            total = self.ranks / self.active * float(self._all_ranks.sum(np.array(total))[0])
        return plain_relaxation(total, self.rule.max_move or math.inf)

    def _finish(self) -> None:
        """Write what follows from new parameters and averages: shards of whole tensors, and new state."""
        for block in self.blocks:
            for finish in block.afterwards:
                finish()
        # Autograd does not notice writes of the kernels: backward through an older graph would use the new parameters.
        torch.autograd.graph.increment_version([p for member in self.parts if member.compiled for p in member.owners])
        if self.fresh:
            for (owner, key), tensor in self.fresh.items():
                self._opt_state[owner][key] = tensor
            self.fresh.clear()
        for (owner, key), tensor in self._whole.items():
            replace(owner, self._opt_state[owner], key, tensor, True)

    def _count(self, member: Member) -> None:
        """Count one more gradient of each tensor."""
        if member.compiled:
            member.part.count()
        elif member.owners:
            torch._foreach_add_([self.held(p, "steps") for p in member.owners], 1.0)

    def ordinary(self, table: Table) -> bool:
        """Whether the sums of squares are well inside the range of the entries' type."""
        if self.wide:
            return True
        return math.isfinite(sum(map(sum, table))) and all([LEAST < table.d_sq[i] < MOST for i in self._full])

    @property
    def rates(self) -> list[float]:
        """The learning rate of each block, or the factor on its step."""
        return [float(block.group["lr"]) for block in self.blocks]

    @property
    def lam(self) -> list[float]:
        """The strength of the squared l2 norm of each block."""
        pairs = zip(self.blocks, self._lam, strict=True)
        return [float(block.group["weight_decay"]) if lam is None else lam for block, lam in pairs]
