"""Sets of blocks that share a distance cap: all blocks of an optimizer, or those whose groups name the same set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from proxsps.optim.blocks import Block


class Sets(NamedTuple):
    """Blocks that share a distance cap."""

    members: list[list[int]]  # places of blocks
    groups: list[list[dict[str, Any]]]
    of: dict[int, int]  # the set of each parameter, by its id
    of_block: list[int]  # the set of each block


def by_set(blocks: Sequence[Block]) -> Sets:
    """The blocks by the set of their group; all are one set if groups name none."""
    names: dict[Any, int] = {}
    members: list[list[int]] = []
    groups: list[dict[int, dict[str, Any]]] = []
    of_block = []
    for j, block in enumerate(blocks):
        place = names.setdefault(block.group.get("set"), len(names))
        if place == len(members):
            members.append([])
            groups.append({})
        members[place].append(j)
        of_block.append(place)
        groups[place][id(block.group)] = block.group
    of = {id(p): i for i, own in enumerate(groups) for group in own.values() for p in group["params"]}
    return Sets(members, [list(own.values()) for own in groups], of, of_block)
