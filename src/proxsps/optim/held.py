"""What a plan depends on, and whether it is still the same; and the state tensors that it reads and writes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxsps.core.plain_step import Numbers
from proxsps.optim.blocks import Block, same_order
from proxsps.optim.distance import by_set, sampled
from proxsps.optim.memory import ORIGIN, entries, new_state
from proxsps.optim.rule import KEPT, MODEL, TRAVEL, Rule, Solved, Table
from proxsps.optim.second_point import measured
from proxsps.regularizers._identity import constants

# The numbers of averages in the groups, in the order of the last five of a `Step`.
AVERAGED = (*MODEL, "total", "longest", "squares")
# What steps and schedulers write into groups is read in every step; a plan does not depend on it.
NUMBERS = {"params", "lr", "weight_decay", *KEPT}

_address, _contiguous, _negated = Tensor.data_ptr, Tensor.is_contiguous, Tensor.is_neg
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Key:
    """Groups, options, parameters and their state tensors, as the first step of a plan has left them."""

    def __init__(self, opt: Any, owners: list[Tensor]) -> None:
        names_of = [[name for name in group if name not in NUMBERS] for group in opt.param_groups]
        self._options_of = [operator.itemgetter(*own) for own in names_of]
        self._owners, self._dtypes, params = owners, {p.dtype for p in owners}, parameters(opt)
        self._is_contiguous = all(map(_contiguous, owners))
        place = {id(p): i for i, p in enumerate(params)}
        self._places = [place[id(p)] for p in owners]
        owns = [opt.state.get(p, {}) for p in owners]
        self._held = [(own, name) for own in owns for name in own if isinstance(own[name], Tensor)]
        self._seen = self._now(opt, params, [p.grad for p in params])
        # Kept alive: another object could get the same id.
        self._alive = opt.param_groups, [*opt.param_groups], opt.state, [own[name] for own, name in self._held]

    def gradients_at(self, opt: Any) -> list[int] | None:
        """The addresses of the gradients; None if they are not dense, or if anything else has changed."""
        if opt.param_groups[0].get("k") == 0:  # the first step of all decides what state there is
            return None
        try:
            params = parameters(opt)
            grads = [p.grad for p in params]
            if self._now(opt, params, grads) != self._seen:
                return None
            return self._addresses([grads[i] for i in self._places])
        except (KeyError, RuntimeError, ValueError):  # options that cannot be compared, or tensors that are not memory
            return None

    def _now(self, opt: Any, params: list[Tensor], grads: list[Tensor | None]) -> list[Any]:
        """What a plan depends on, by identity where possible.

        Whole lists at a time: with hundreds of tensors, loops of Python would take as long as the arithmetic.
        """
        groups, owners = opt.param_groups, self._owners
        found: list[Any] = [id(groups), id(opt.state), torch.get_num_threads(), opt._ranks.size]
        found += [*map(id, groups), *map(len, groups)]
        # A group with a step size of exactly 0 does not move, not even onto a constraint.
        found += [bool(group["lr"] == 0) for group in groups]
        found += [options(group) for options, group in zip(self._options_of, groups, strict=True)]
        found += [list(map(id, params)), [g is None for g in grads]]
        found += [list(map(_address, owners)), list(map(_shape, owners))]
        if self._held:
            held = [own[name] for own, name in self._held]
            found += [list(map(id, opt.state.values())), list(map(id, held)), list(map(_address, held))]
        return found

    def _addresses(self, grads: list[Any]) -> list[int] | None:
        tensors, at = self._owners + grads, list(map(_address, grads))
        if set(map(_dtype, tensors)) != self._dtypes or set(map(type, grads)) - {Tensor} or any(map(_negated, tensors)):
            return None
        if not (all(map(_contiguous, tensors)) if self._is_contiguous else same_order(self._owners, grads)):
            return None
        unstored = 0 in at and any([g.numel() and not a for g, a in zip(grads, at, strict=True)])
        return None if unstored else at


def lasting(value: Any) -> bool:
    """Whether a regulariser, or what it holds, cannot change: numbers and arrays that are read-only."""
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    if isinstance(value, tuple):
        return all(map(lasting, value))
    if is_dataclass(value):
        return all(map(lasting, constants(value).values()))
    return value is None or isinstance(value, (int, float, str))


def parameters(opt: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in opt.param_groups for p in group["params"]]


class Member(NamedTuple):
    """A part of a plan."""

    part: Any
    places: list[int]  # of its blocks
    share: float  # one over the number of ranks that hold the same entries
    owners: list[Tensor]
    compiled: bool


class HeldState:
    """What a plan reads and writes of an optimizer's state."""

    def __init__(self, opt: Any, blocks: Sequence[Block], rule: Rule) -> None:
        self.rule, self.blocks, self._opt_state = rule, blocks, opt.state
        self.sets = by_set(blocks)
        self.apart: list[Tensor] = []  # parameters that no pass compares with their start
        self.fresh: dict[tuple[Tensor, str], Tensor] = {}  # kept if the step is taken
        self._whole: dict[tuple[Tensor, str], Tensor] = {}  # gathered from shards
        self.parts: list[Member] = []
        self.owners: list[Tensor] = []  # the parameters, in the order of the parts
        self.kept = False  # whether the plan is worth keeping
        self._key: Key | None = None

    def note(self, opt: Any) -> None:
        """Note what the plan depends on, once it has all state."""
        if self.kept and self._key is None and not self.fresh:
            self._key = Key(opt, self.owners)

    def holds(self, opt: Any) -> bool:
        """Whether the plan still holds for the next step; gradients may be new tensors."""
        at = None if self._key is None else self._key.gradients_at(opt)
        if at is None:
            return False
        first = 0
        for member in self.parts:
            member.part.bind(at[first : first + len(member.owners)])
            first += len(member.owners)
            for j in () if self.rule.mix is None or member.part.mixes else member.places:
                self.blocks[j].slopes = [p.grad for p in self.blocks[j].owners if p.grad is not None]
        return True

    def held(self, owner: Tensor, key: str) -> Tensor:
        """A state tensor; if there is none yet, one that is kept if the step is taken."""
        own = self._opt_state.get(owner, {})
        if key in own:
            found: Tensor = own[key]
            return found
        if (owner, key) not in self.fresh:
            self.fresh[owner, key] = new_state(owner, key)
        return self.fresh[owner, key]

    def entries_of(self, block: Block, i: int, key: str) -> Tensor:
        """A state tensor of the i-th tensor of a block, in the form of `block.params`."""
        owner = block.owner(i)
        if not block.gathered:
            return entries(self.held(owner, key), False)
        if (owner, key) not in self._whole:
            self._whole[owner, key] = entries(self.held(owner, key), True)
        return self._whole[owner, key]

    def count_of(self, block: Block, i: int) -> Tensor | None:
        """The number of gradients of a tensor so far; None in the identity metric."""
        return None if self.rule.beta2 is None else self.held(block.owner(i), "steps")

    def by_count(self, block: Block) -> list[tuple[Tensor | None, list[int]]]:
        """The tensors of a block with the same number of gradients so far."""
        if self.rule.beta2 is None:
            return [(None, list(range(len(block.params))))]
        found: dict[float, list[int]] = {}
        for i in range(len(block.params)):
            found.setdefault(float(self.held(block.owner(i), "steps")), []).append(i)
        return [(self.held(block.owner(members[0]), "steps"), members) for members in found.values()]

    def start(self, owner: Tensor, opt: Any) -> Tensor:
        """The sampled entries of the start; at the first step of all, and of a new parameter, as they are now."""
        own = self._opt_state.get(owner, {})
        if ORIGIN in own and opt.param_groups[0]["k"] != 0:
            found: Tensor = own[ORIGIN]
            return found
        if (owner, ORIGIN) not in self.fresh:
            (own_sample,) = sampled([owner], opt._ranks, opt._places)
            self.fresh[owner, ORIGIN] = own_sample.keep()
        return self.fresh[owner, ORIGIN]

    def distance_sq(self, opt: Any, table: Table) -> tuple[list[float], list[float]]:
        """||x - x_0||^2, and at the first step of a set ||x_0||^2, of the entries on this rank, estimated from samples.

        One number of each kind per set of blocks that share a distance cap.
        """
        blocks, sets = self.blocks, self.sets.members
        moved = [sum([blocks[j].share * table.moved_sq[j] for j in own]) for own in sets]
        length = [0.0] * len(sets)
        for found in measured(self.apart, opt, self.rule.mix) if self.apart else ():
            move = found.entries.double() - found.read(self.start(found.owner, opt)).double()
            moved[self.sets.of[id(found.owner)]] += found.factor * float(move.square().sum())
        begun = [bool(groups[0]["first_reach"] > 0) for groups in self.sets.groups]
        for found in () if all(begun) else sampled(self.owners, opt._ranks, opt._places):
            own = self.sets.of[id(found.owner)]
            if not begun[own]:
                length[own] += found.factor * float(found.entries.double().square().sum())
        return moved, length

    def resting_dots(self) -> list[float]:
        """<d, x> over the parameters of each block that have no gradient, whose averages rest."""
        found = [0.0] * len(self.blocks)
        for j, block in enumerate(self.blocks) if self.rule.beta is not None else ():
            resting = [block.group["params"][i] for i in block.resting]
            for p in [p for p in resting if "average" in self._opt_state.get(p, {})]:
                d, x = (entries(t, block.gathered) for t in (self._opt_state[p]["average"], p.detach().resolve_conj()))
                found[j] += float(torch.sum(d.double() * x.double()))
        return found

    # Numbers in the groups

    def sets_before(self) -> list[list[float]]:
        """What each set of blocks has travelled, as in `plain.distances`."""
        return [[float(groups[0][key]) for key in TRAVEL] for groups in self.sets.groups]

    def numbers(self, options: dict[str, Any], k: float, new: float) -> Numbers:
        """The numbers of averages before step number k; `new` is the weight of this model."""
        if self.rule.beta is None and self.rule.mix is None:
            return Numbers(k)
        return Numbers(k, new, *[float(options.get(key, 0.0)) for key in AVERAGED])

    def keep_numbers(self, groups: Sequence[dict[str, Any]], solved: Solved) -> None:
        """Write the numbers of a step into the groups: those of all, those of each set, and those of each block."""
        step, k = solved.step, solved.k + 1
        if self.rule.beta is not None or self.rule.mix is not None:
            after = {key: number for key, number in zip(AVERAGED, step[-5:], strict=True) if key in groups[0]}
            for group in groups:
                group.update(after, k=k)
        for members, numbers in zip(self.sets.groups, solved.after, strict=True) if self.rule.distance else ():
            for group in members:
                group.update(zip(TRAVEL, numbers, strict=False), k=k)
        tau = step.u * step.reach
        for block, part in zip(self.blocks, solved.share, strict=True) if self.rule.mix is not None and tau > 0 else ():
            block.group["tau"] = tau * part
        for block, memory in zip(self.blocks, solved.memory, strict=False):
            block.group |= {"memory": memory, "k": k}
