"""A plan: everything of a step on the host that depends neither on entries nor on numbers.

Which tensors take part, how they are divided into blocks and parts, where they lie in memory, and the state that they
need. It is made with all checks, and kept as long as it holds. A plan may be dropped at any time: the next one gives
bitwise the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.optim.blocks import ENTRIES, LINES, PLAIN, PROXES, ROWS, UNITS, Block, same_order
from proxsps.optim.memory import blank
from proxsps.optim.moments import least_metric
from proxsps.regularizers.structure import Entries, Rows, Scalar

# What steps and schedulers write into groups is read in every step; a plan does not depend on it.
NUMBERS = {"params", "lr", "weight_decay", "lower_bound", "k", "memory", "model_value", "model_offset", "reach", "g_sq"}
ENTRYWISE, METRIC_ROWS = "entrywise", "metric rows"


@cache
def load_kernels() -> ModuleType | None:
    """The passes by compiled kernels, or None without numba or without a place for its cache."""
    try:
        from proxsps.optim.kernels import executor
    except (ImportError, RuntimeError):
        return None
    return executor


class Table(NamedTuple):
    """The sums of a step, each with one number per block."""

    d_sq: list[float]  # <d, p>
    d_dot_x: list[float]
    noise_sq: list[float]  # sum of (d x)^2 over entries with a prox
    x_sq: list[float]  # this and the next but two only if lengths of moves are needed
    g_dot_x: list[float]  # this and the next with averages
    g_sq: list[float]  # ||D^-1 g||^2
    p_sq: list[float]
    p_dot_x: list[float]
    moved_sq: list[float]  # ||x - x_0||^2


class Plan:
    """The plan of a step by compiled kernels; see `make_plan`."""

    def __init__(self, opt: Any, blocks: Sequence[Block], like: np.ndarray, names: Sequence[str]) -> None:
        self.blocks, self.like = blocks, like
        self.affine = [block.kind == LINES for block in blocks]
        self.parts: list[tuple[Any, list[int]]] = []
        self.fresh: list[tuple[Tensor, str, Tensor]] = []  # state that is kept if the step is taken
        self.names = names  # of the state tensors that the kernels read
        self._groups, self._state, self._ranks = opt.param_groups, opt.state, opt._ranks.size
        self._threads, self._options, self._zeros = torch.get_num_threads(), _options(opt), _resting(opt)
        self._all = [p for group in opt.param_groups for p in group["params"]]
        self._ids, self._missing = list(map(id, self._all)), [p.grad is None for p in self._all]
        self._owners: list[Tensor] = []  # in the order of the parts
        self.x_at = self.g_at = np.empty(0, np.int64)
        self.weights, self.counts_at = np.empty((0, 4)), np.empty(0, np.int64)
        self.kept = False

    # Whether it still holds

    def freeze(self) -> None:
        """Note what the plan depends on; odd tensors are looked at anew in every step."""
        owners = self._owners
        plain = all([type(p) in PLAIN and not p.is_complex() for p in owners])
        arrays = any([isinstance(c, np.ndarray) for block in self.blocks for c in _constants(block)])
        self.kept = plain and not arrays and not torch._C._functorch.maybe_current_level()
        self._strided = not all([p.is_contiguous() for p in owners])
        self._shapes, self._dtype = [p.shape for p in owners], owners[0].dtype if owners else None
        self._strides = [p.stride() for p in owners] if self._strided else []
        self._places = [self._ids.index(id(p)) for p in owners]
        self._x_list = self.x_at.tolist()
        self._note_state()

    def _note_state(self) -> None:
        owns = [self._state.get(p, {}) for p in self._owners] if self.names else []
        self._owns = owns
        self._held = [own.get(name) for own in owns for name in self.names]
        self._held_at = [t.data_ptr() for t in self._held if t is not None]
        self._state_ids = list(map(id, self._state.values())) if self.names else []

    def holds(self, opt: Any) -> bool:
        """Whether the plan still holds; gradients may be new tensors, whose addresses it takes over."""
        groups = opt.param_groups
        if groups is not self._groups or opt.state is not self._state or not self.kept or self.fresh:
            return False
        params = [p for group in groups for p in group["params"]]
        if list(map(id, params)) != self._ids or torch.get_num_threads() != self._threads:
            return False
        grads = [p.grad for p in params]
        if [g is None for g in grads] != self._missing or opt._ranks.size != self._ranks:
            return False
        try:
            same = _options(opt) == self._options
        except (RuntimeError, ValueError):  # options that are arrays, and cannot be compared
            return False
        if not same or _resting(opt) != self._zeros or not self._same_state():
            return False
        return self._same_memory([grads[i] for i in self._places])

    def _same_state(self) -> bool:
        if not self.names:
            return True
        if list(map(id, self._state.values())) != self._state_ids:
            return False
        held = [own.get(name) for own in self._owns for name in self.names]
        if any([new is not old for new, old in zip(held, self._held, strict=True)]):
            return False
        return [t.data_ptr() for t in held] == self._held_at

    def _same_memory(self, grads: Sequence[Any]) -> bool:
        owners, dtype = self._owners, self._dtype
        if [p.data_ptr() for p in owners] != self._x_list or [p.shape for p in owners] != self._shapes:
            return False
        tensors = [*owners, *grads]
        if any([t.dtype is not dtype for t in tensors]) or any([type(g) is not Tensor for g in grads]):
            return False
        try:
            if self._strided:
                if [p.stride() for p in owners] != self._strides or not same_order(owners, grads):
                    return False
            elif not all([t.is_contiguous() for t in tensors]):
                return False
            if any([t.is_neg() for t in tensors]):
                return False
            at = [g.data_ptr() for g in grads]
        except RuntimeError:  # sparse gradients, and those inside transforms
            return False
        if 0 in at and any([g.numel() and not a for g, a in zip(grads, at, strict=True)]):
            return False
        self.g_at[:] = at
        return True

    # The passes

    def sums(self, alpha: Sequence[float], ahead: Sequence[float], moving: bool) -> tuple[Table, Heights]:
        """The sums of all blocks, and the heights of the others at the points `ahead`, from the same pass."""
        rows = [[0.0] * len(self.blocks) for _ in Table._fields]
        known = Heights([0.0] * len(ahead), [0.0] * len(ahead))
        for part, places in self.parts:
            found, heights = part.sums([alpha[j] for j in places], ahead, moving)
            for row, numbers in zip(rows, found, strict=True):
                for j, number in zip(places, numbers, strict=True):
                    row[j] = number
            known = known.plus(heights)
        return Table(*rows), known

    def heights(self, alpha: Sequence[float], u: Sequence[float], every: int = 1) -> Heights:
        """sum <d, y(u) - x> over the blocks that are not affine, and its derivative."""
        known = Heights([0.0] * len(u), [0.0] * len(u))
        for part, places in self.curves:
            known = known.plus(part.heights([alpha[j] for j in places], u, every))
        return known

    def ray(self, share: Sequence[float], s: Sequence[float], every: int = 1) -> list[float]:
        """sum <d, x+(s) - x> over the blocks that are not affine, where step and prox have the size s times `share`."""
        found = [part.ray([share[j] for j in places], s, every) for part, places in self.curves]
        return list(map(sum, zip(*found, strict=True)))

    def move_sq(self, alpha: Sequence[float], u: float) -> float:
        """||y(u) - x||^2 over the blocks that are not affine."""
        return sum([part.move_sq([alpha[j] for j in places], u) for part, places in self.curves])

    def write(
        self, keep: Sequence[float], move: Sequence[float], alpha: Sequence[float], u: float, relax: float
    ) -> None:
        """Move all blocks, and store new averages."""
        for part, places in self.parts:
            own = ([numbers[j] for j in places] for numbers in (keep, move, alpha))
            part.write(*own, u, relax)
        torch.autograd.graph.increment_version(self._owners)
        if self.fresh:
            for owner, key, tensor in self.fresh:
                self._state[owner][key] = tensor
            self.fresh.clear()
            self._note_state()


def _options(opt: Any) -> list[Any]:
    """The options of all groups that a plan depends on."""
    return [value for group in opt.param_groups for key, value in group.items() if key not in NUMBERS]


def _resting(opt: Any) -> list[bool]:
    """Which groups have a step size of exactly 0: they do not move, not even onto a constraint."""
    return [bool(group["lr"] == 0) for group in opt.param_groups]


def make_plan(opt: Any, blocks: Sequence[Block], averages: Sequence[str], eps: float, coupled: bool) -> Plan | None:
    """The plan of a step over these blocks, or None if the kernels do not apply.

    They need dense CPU tensors of one dtype, f32 or f64, in one order of memory, and regularisers of the family
    `Scalar`, without centres.

    Args:
        opt: the optimizer.
        blocks: its blocks.
        averages: the state tensors of averages: none, "average", or also "square".
        eps: epsilon of the metric.
        coupled: whether the slope contains the squared l2 norm.
    """
    kernels = load_kernels()
    members = _members(blocks, coupled)
    if kernels is None or members is None:
        return None
    plan = Plan(opt, blocks)
    order = [i for _, places in members for i in places]
    xs, gs, owners = ([t for i in order for t in getattr(blocks[i], key)] for key in ("params", "slopes", "owners"))
    ...
