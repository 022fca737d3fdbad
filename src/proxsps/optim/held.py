"""The state tensors of a step on the host; new ones are kept only if the step is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.blocks import Block
from proxsps.optim.distance import ORIGIN, sampled
from proxsps.optim.memory import blank, entries
from proxsps.optim.rule import Rule, Table
from proxsps.optim.second_point import Y, Z, measured, start_point
from proxsps.optim.sets import by_set


class HeldState:
    """What a plan reads and writes of an optimizer's state.

    Args:
        opt: the optimizer.
        blocks: its blocks.
        rule: its rule.
    """

    def __init__(self, opt: Any, blocks: Sequence[Block], rule: Rule) -> None:
        self.rule, self.blocks, self._opt_state = rule, blocks, opt.state
        self.sets = by_set(blocks)
        self.owners: list[Tensor] = []  # the parameters, in the order of the plan's parts
        self.apart: list[Tensor] = []  # those that no pass compares with their start
        self.fresh: dict[tuple[Tensor, str], Tensor] = {}  # kept if the step is taken
        self._whole: dict[tuple[Tensor, str], Tensor] = {}  # gathered from shards

    def held(self, owner: Tensor, key: str) -> Tensor:
        """A state tensor; if there is none yet, one that is kept if the step is taken."""
        own = self._opt_state.get(owner, {})
        if key in own:
            found: Tensor = own[key]
            return found
        if (owner, key) not in self.fresh:
            self.fresh[owner, key] = self._new_state(owner, key)
        return self.fresh[owner, key]

    @staticmethod
    def _new_state(owner: Tensor, key: str) -> Tensor:
        if key == "steps":
            return torch.zeros((), dtype=torch.float32)
        return start_point(owner, key) if key in (Y, Z) else blank(owner)

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

    def distance_sq(self, opt: Any, table: Table) -> list[tuple[float, float]]:
        """||x - x_0||^2, and at the first step of a set ||x_0||^2, of the entries on this rank, estimated from samples.

        One pair per set of blocks that share a distance cap.
        """
        blocks, sets = self.blocks, self.sets.members
        moved = [sum([blocks[j].share * table.moved_sq[j] for j in own]) for own in sets]
        length = [0.0] * len(sets)
        for found in measured(self.apart, opt, self.rule.mix) if self.apart else ():
            move = found.entries.double() - found.read(self.start(found.owner, opt)).double()
            moved[self.sets.of[id(found.owner)]] += found.factor * float(move.square().sum())
        begun = [bool(groups[0]["first_reach"] > 0) for groups in self.sets.groups]
        if not all(begun):
            for found in sampled(self.owners, opt._ranks, opt._places):
                own = self.sets.of[id(found.owner)]
                if not begun[own]:
                    length[own] += found.factor * float(found.entries.double().square().sum())
        return list(zip(moved, length, strict=True))

    def resting_dots(self) -> list[float]:
        """<d, x> over the parameters of each block that have no gradient, whose averages rest."""
        return [
            self._resting_dot(block) if self.rule.beta is not None and block.resting else 0.0 for block in self.blocks
        ]

    def _resting_dot(self, block: Block) -> float:
        total = 0.0
        for p in (block.group["params"][i] for i in block.resting):
            own = self._opt_state.get(p, {})
            if "average" in own:
                d, x = (entries(t, block.gathered) for t in (own["average"], p.detach().resolve_conj()))
                total += float(torch.sum(d.double() * x.double()))
        return total

    def keep_numbers(
        self,
        groups: Sequence[dict[str, Any]],
        after: dict[str, float],
        of_sets: Sequence[dict[str, float]],
        tau: float,
        share: Sequence[float],
    ) -> None:
        """Write the numbers of a step into the groups: those of all, those of each set, and steps of their blocks."""
        for group in groups if after else ():
            group.update(after)
        for members, own in zip(self.sets.groups, of_sets, strict=False):
            for group in members:
                group.update(own)
        if self.rule.mix is not None and tau > 0:
            for block, part in zip(self.blocks, share, strict=True):
                block.group["tau"] = tau * part
