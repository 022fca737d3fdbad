"""A plan: everything of a step on the host that depends neither on entries nor on numbers.

Which tensors take part, how they are divided into blocks and parts, where they lie in memory, and the state that they
need. It is made with all checks, and kept as long as it holds. A plan may be dropped at any time: the next one gives
bitwise the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.plain import corrected_weight
from proxsps.optim.blocks import LINES, PLAIN, Block, same_order
from proxsps.optim.memory import blank
from proxsps.optim.travel import ORIGIN, sampled
from proxsps.regularizers._identity import constants

# What steps and schedulers write into groups is read in every step; a plan does not depend on it.
NUMBERS = {"params", "lr", "weight_decay", "k", "memory", "model_value", "model_offset", "reach", "g_sq"}


class Rule(NamedTuple):
    """What sets methods apart: the model of the loss, and how a step is chosen from it."""

    name: str = "truncated"  # or linear, sps_max, dec_sps
    c: float = 1.0  # of the last two
    beta: float | None = None  # weight of the old average of gradients; None without averages
    beta2: float | None = None  # the same of their squares; None in the identity metric
    eps: float = 0.0  # of the metric
    coupled: bool = False  # whether the squared l2 norm is part of the loss
    matched: bool = False  # whether step and prox have the same size
    distance: bool = False  # whether there is a distance cap
    factor: bool = False  # whether learning rates are factors on the step
    max_move: float | None = None


class Table(NamedTuple):
    """The sums of a step, each with one number per block."""

    d_sq: list[float]  # <d, p>
    d_dot_x: list[float]
    noise_sq: list[float]  # sum of (d x)^2 over entries with a prox
    x_sq: list[float]  # with lengths of moves, and in coupled methods
    g_dot_x: list[float]  # with averages, like the next one
    g_sq: list[float]  # ||D^-1 g||^2
    p_sq: list[float]  # with lengths of moves, like the next one
    p_dot_x: list[float]
    moved_sq: list[float]  # ||x - x_0||^2 of the tensors that are compared in the passes


class Heights(NamedTuple):
    """sum <d, y - x> and its derivative at several points; the derivative is NaN where it is not known."""

    h: list[float]
    slope: list[float]


@cache
def load_kernels() -> Any:
    """The function that makes the parts of a plan, or None without numba or without a place for its cache."""
    try:
        from proxsps.optim.kernels.make import make_parts
    except (ImportError, RuntimeError):
        return None
    return make_parts


class Plan:
    """The plan of a step by compiled kernels.

    Args:
        opt: the optimizer.
        blocks: its blocks.
        rule: its rule.
    """

    def __init__(self, opt: Any, blocks: Sequence[Block], rule: Rule) -> None:
        self.blocks, self.rule = blocks, rule
        self.affine = [block.kind == LINES for block in blocks]
        self._state, self._groups, self._key = opt.state, opt.param_groups, _key(opt)
        self.ranks = opt._ranks.size
        self.weight = 1.0  # of new values in averages
        self.correct_weights: Any = None  # sets the weights of squares, in a metric
        self.count: Any = None  # counts one more gradient of each tensor
        self._lam = [None if block.group["regularizer"] is None else block.lam for block in blocks]
        self.fresh: dict[tuple[Tensor, str], Tensor] = {}  # state that is kept if the step is taken
        self.parts: list[tuple[Any, list[int]]] = []
        self.curves: list[tuple[Any, list[int]]] = []  # parts with blocks that are not affine
        self.points, self.entries = 1, 0  # points of a round of their search, and entries that a pass would read
        self._resting = [p for p in _parameters(opt) if p.grad is None and p in opt.state]
        self.apart = [p for p in self._resting if ORIGIN in opt.state[p]]  # parameters that no pass compares with x_0

    @classmethod
    def make(cls, opt: Any, blocks: Sequence[Block], rule: Rule) -> Plan | None:
        """The plan of a step, or None if the kernels do not apply.

        They need dense CPU tensors of one dtype, f32 or f64, in one order of memory, and regularisers that are convex
        functions of entries or of norms of rows, of the family `Scalar`, without centres.
        """
        make_parts = load_kernels()
        if make_parts is None or any([b.sharded or b.gathered or b.afterwards or b.centered for b in blocks]):
            return None
        if rule.coupled and not all([block.quadratic for block in blocks if block.params]):
            return None
        plan = cls(opt, blocks, rule)
        if not make_parts(plan, opt):
            return None
        plan.curves = [(part, places) for part, places in plan.parts if part.curved]
        plan.points = min([part.points for part, _ in plan.curves], default=1)
        plan.entries = sum([part.entries for part, _ in plan.curves])
        plan._freeze(opt)
        return plan

    def held(self, owner: Tensor, key: str) -> Tensor:
        """A state tensor of real numbers; if there is none yet, one that is kept if the step is taken."""
        own = self._state.get(owner, {})
        if key not in own and (owner, key) not in self.fresh:
            self.fresh[owner, key] = torch.zeros((), dtype=torch.float32) if key == "steps" else blank(owner)
        found: Tensor = own[key] if key in own else self.fresh[owner, key]
        return torch.view_as_real(found) if found.is_complex() else found

    def start(self, owner: Tensor, opt: Any) -> Tensor:
        """The sampled entries of the start; at the first step of all, and of a new parameter, as they are now."""
        own = self._state.get(owner, {})
        if ORIGIN in own and opt.param_groups[0]["k"] != 0:
            found: Tensor = own[ORIGIN]
            return found
        if (owner, ORIGIN) not in self.fresh:
            self.fresh[owner, ORIGIN] = sampled(owner, opt._ranks, opt._places).entries.clone()
        return self.fresh[owner, ORIGIN]

    # Whether it still holds

    def _freeze(self, opt: Any) -> None:
        """Note what the plan depends on. Plans for odd tensors are made anew for every step."""
        owners = self.owners
        plain = all([type(p) in PLAIN and not p.is_complex() for p in owners])
        self.kept = plain and all([_lasting(block.phi) for block in self.blocks])
        self._contiguous = all([p.is_contiguous() for p in owners])
        self._shapes, self._strides = [p.shape for p in owners], [p.stride() for p in owners]
        self._dtype = owners[0].dtype if owners else None
        ids = {id(p): i for i, p in enumerate(_parameters(opt))}
        self._places = [ids[id(p)] for p in owners]
        self._x_list = self.at[0].tolist()
        self._note_state()

    def _note_state(self) -> None:
        self._owns = [self._state.get(p, {}) for p in self.owners] if self.names else []
        self._held = [own.get(name) for own in self._owns for name in self.names]
        self._held_at = [0 if t is None else t.data_ptr() for t in self._held]
        self._entries = list(map(id, self._state.values())) if self.names else []

    def holds(self, opt: Any) -> bool:
        """Whether the plan still holds; gradients may be new tensors, whose addresses it takes over."""
        if not self.kept or self.fresh or opt.param_groups is not self._groups or opt.state is not self._state:
            return False
        if self._groups and self._groups[0].get("k") == 0:  # the first step of all decides what state there is
            return False
        try:
            if _key(opt) != self._key or not self._same_state():
                return False
            params = _parameters(opt)
            return self._same_memory([params[i].grad for i in self._places])
        except (RuntimeError, ValueError):  # options that cannot be compared, or tensors that are not plain memory
            return False

    def _same_state(self) -> bool:
        if not self.names:
            return True
        if list(map(id, self._state.values())) != self._entries:
            return False
        held = [own.get(name) for own in self._owns for name in self.names]
        if any([new is not old for new, old in zip(held, self._held, strict=True)]):
            return False
        return [t.data_ptr() for t in held] == self._held_at

    def _same_memory(self, grads: Sequence[Any]) -> bool:
        owners, dtype = self.owners, self._dtype
        if [p.data_ptr() for p in owners] != self._x_list or [p.shape for p in owners] != self._shapes:
            return False
        tensors = [*owners, *grads]
        if any([t.dtype is not dtype for t in tensors]) or any([type(g) is not Tensor for g in grads]):
            return False
        if self._contiguous:
            if not all([t.is_contiguous() for t in tensors]):
                return False
        elif [p.stride() for p in owners] != self._strides or not same_order(owners, grads):
            return False
        if any([t.is_neg() for t in tensors]):
            return False
        at = [g.data_ptr() for g in grads]
        if 0 in at and any([g.numel() and not a for g, a in zip(grads, at, strict=True)]):
            return False
        self.at[1] = at
        return True

    # The passes

    def sums(self, alpha: Sequence[float], ahead: Sequence[float], moving: bool) -> tuple[Table, Heights]:
        """The sums of all blocks, and the heights of the others at the points `ahead`, from the same pass."""
        found = [part.sums([alpha[j] for j in places], ahead, moving) for part, places in self.parts]
        if len(found) == 1:
            return Table(*found[0][0]), found[0][1]
        rows = [[0.0] * len(self.blocks) for _ in Table._fields]
        for (_, places), (sums, _) in zip(self.parts, found, strict=True):
            for row, numbers in zip(rows, sums, strict=True):
                for j, number in zip(places, numbers, strict=True):
                    row[j] = number
        return Table(*rows), _total([heights for _, heights in found])

    def heights(self, alpha: Sequence[float], u: Sequence[float], every: int = 1) -> Heights:
        """sum <d, y(u) - x> over the blocks that are not affine, and its derivative; a sample for `every` above 1."""
        return _total([part.heights([alpha[j] for j in places], u, every) for part, places in self.curves])

    def ray(self, share: Sequence[float], s: Sequence[float], every: int = 1) -> list[float]:
        """sum <d, x+(s) - x> over the blocks that are not affine, where step and prox have the size s times `share`."""
        found = [part.ray([share[j] for j in places], s, every) for part, places in self.curves]
        return found[0] if len(found) == 1 else list(map(sum, zip(*found, strict=True)))

    def move_sq(self, alpha: Sequence[float], u: float) -> float:
        """||y(u) - x||^2 over the blocks that are not affine."""
        return sum([part.move_sq([alpha[j] for j in places], u) for part, places in self.curves])

    def write(
        self, keep: Sequence[float], move: Sequence[float], alpha: Sequence[float], u: float, relax: float
    ) -> None:
        """Move all blocks, and store new averages."""
        for part, places in self.parts:
            part.write(*[[numbers[j] for j in places] for numbers in (keep, move, alpha)], u, relax)
        torch.autograd.graph.increment_version(self.owners)
        if self.fresh:
            for (owner, key), tensor in self.fresh.items():
                self._state[owner][key] = tensor
            self.fresh.clear()
            self._note_state()

    @property
    def lam(self) -> list[float]:
        """The strength of the squared l2 norm of each block."""
        pairs = zip(self.blocks, self._lam, strict=True)
        return [float(block.group["weight_decay"]) if lam is None else lam for block, lam in pairs]

    def distance_sq(self, opt: Any) -> tuple[float, float]:
        """||x - x_0||^2 of the parameters apart, and at the first step ||x_0||^2, both estimated from samples."""
        moved = length = 0.0
        for p in self.apart:
            found = sampled(p, opt._ranks, opt._places)
            move = found.entries.double() - self.start(p, opt).double()
            moved += float(move.square().sum()) * found.size / max(1, len(move))
        if opt.param_groups[0]["k"] == 0:
            for p in self.owners:
                found = sampled(p, opt._ranks, opt._places)
                length += float(found.entries.double().square().sum()) * found.size / max(1, len(found.entries))
        return moved, length

    def prepare(self, k: float, lam: Sequence[float]) -> None:
        """Set the weights of averages for step number k, and how much of x is in the slopes of coupled methods."""
        beta, beta2 = self.rule.beta, self.rule.beta2
        if beta is not None:
            self.weight = 1 - beta * min(k, 1.0) if beta2 is None else corrected_weight(k, beta)
            self.weights[:, 0], self.weights[:, 1] = 1 - self.weight, self.weight
        if beta2 is not None:
            self.correct_weights()
        if self.rule.coupled:
            for part, places in self.parts:
                part.at.coupling[:] = [lam[j] for j in places]

    def sampled_sums(self, every: int) -> Table:
        """The sums of a plan with one part, estimated from a sample."""
        ((part, _),) = self.parts
        return Table(*part.sampled_sums(every))

    def resting_dot(self) -> float:
        """<d, x> over the parameters without a gradient, whose averages rest."""
        total = 0.0
        for p in self._resting:
            own = self._state.get(p, {})
            if "average" in own:
                d, x = (
                    torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (own["average"], p.detach())
                )
                total += float(torch.sum(d.double() * x.double()))
        return total


def _key(opt: Any) -> list[Any]:
    """What a plan depends on besides memory; compared by identity where possible."""
    groups = opt.param_groups
    params = _parameters(opt)
    key = [torch.get_num_threads(), opt._ranks.size, list(map(id, groups)), list(map(id, params))]
    key += [[p.grad is None for p in params]]
    # A group with a step size of exactly 0 does not move, not even onto a constraint.
    key += [[bool(group["lr"] == 0) for group in groups]]
    key += [value for group in groups for name, value in group.items() if name not in NUMBERS]
    return key


def _lasting(value: Any) -> bool:
    """Whether a regulariser, or what it holds, cannot change: numbers and arrays that are read-only."""
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    if isinstance(value, tuple):
        return all(map(_lasting, value))
    if is_dataclass(value):
        return all(map(_lasting, constants(value).values()))
    return value is None or isinstance(value, (int, float, str))


def _parameters(opt: Any) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def _total(found: Sequence[Heights]) -> Heights:
    if len(found) == 1:
        return found[0]
    return Heights(*([sum(column) for column in zip(*rows, strict=True)] for rows in zip(*found, strict=True)))
