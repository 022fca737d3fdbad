"""Averages of gradients on a device: tensors are joined into long vectors, so that a step takes few launches.

New averages are made before the step and written only where it is taken. State is written in place, so that a captured
step finds it again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from proxsps.core.estimate import corrected_weight, metric
from proxsps.optim.blocks import LINES, Block
from proxsps.optim.device.numbers import Numbers, scale_of
from proxsps.optim.lists import LAUNCH, join_all, spread_all, widened
from proxsps.optim.memory import State, entries, least_metric, replace, start_averages
from proxsps.optim.rule import Rule


class Vector(NamedTuple):
    """Tensors of one dtype as one vector."""

    members: list[int]  # their places among the tensors of all blocks
    spans: dict[int, slice]  # the part of each block, by its place in the step

    def products(self, slope: Tensor, scale: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        """Products of a slope with vectors, block by block; divided by its norm, it stays in the range of f32."""
        scaled = slope / scale
        found = [torch.dot(scaled[span], t[span]) for t in others for span in self.spans.values()]
        both = torch.stack(found) if len(found) > 1 else found[0][None]
        return list((both * scale[None]).reshape(len(others), -1))


class Joined:
    """The tensors of some blocks as vectors, with new averages of their gradients, and sums over them.

    Args:
        rule: the rule of the method.
        blocks: the blocks, by their places in the step; they get their slopes, directions and metrics.
        numbers: the numbers of the step.
        state: the optimizer's state.
    """

    keys: tuple[str, ...]  # of the averages in the state

    def __init__(self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, state: State) -> None:
        self._rule, self._blocks, self._numbers, self._state = rule, blocks, numbers, state
        # By block: <d, p>, <d, x>, <g, x>, ||D^-1 g||^2, ||p||^2, <p, x>; each a list of numbers to be added up. The
        # first two are for affine blocks, the last two for lengths of moves in a metric.
        self.sums: dict[int, list[list[Tensor]]] = {j: [[] for _ in range(6)] for j in blocks}
        self._owners = [(j, owner) for j, block in blocks.items() for owner in block.owners]
        for _, owner in self._owners:
            start_averages(state[owner], owner, self.keys)
        self._held = {key: [entries(state[p][key], blocks[j].gathered) for j, p in self._owners] for key in self.keys}
        self._params, self._grads = (
            [t for block in blocks.values() for t in getattr(block, name)] for name in ("params", "slopes")
        )
        if "square" in self.keys and self._owners:  # a tensor that gets its first gradient late has its own count
            self._counts = torch.stack([state[owner]["steps"] for _, owner in self._owners])
            wide = any(state[owner]["square"].dtype is torch.float64 for _, owner in self._owners)
            self._weights = corrected_weight(self._counts.double() if wide else self._counts, rule.beta2)
        self._vectors = [Vector(members, self._spans(members)) for members in self._together()]

    def _together(self) -> Iterator[list[int]]:
        """Places of tensors of one dtype that are joined."""
        found: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        room: dict[tuple[torch.dtype, torch.dtype], int] = {}
        for i, (x, g) in enumerate(zip(self._params, self._grads, strict=True)):
            key = x.dtype, g.dtype
            if key in found and x.numel() > room[key]:
                yield found.pop(key)
            if key not in found:
                found[key], room[key] = [], LAUNCH
            found[key].append(i)
            room[key] -= x.numel()
        yield from found.values()

    def _spans(self, members: Sequence[int]) -> dict[int, slice]:
        spans: dict[int, slice] = {}
        first = 0
        for i in members:
            j, last = self._owners[i][0], first + self._grads[i].numel()
            spans[j] = slice(spans[j].start if j in spans else first, last)
            first = last
        return spans

    def _join(self, own: Vector, *columns: Sequence[Tensor]) -> list[Tensor]:
        """Columns of tensors as vectors, in at least f32."""
        return list(map(widened, join_all([[column[i] for i in own.members] for column in columns])))

    def _squares(self, own: Vector, g: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """The new average of squares, and the metric D."""
        weights = self._weights.to(old.dtype).unbind()
        new = torch.cat([weights[i].expand(self._grads[i].numel()) for i in own.members])
        v, eps, least = torch.lerp(old, g * g, new), self._rule.eps, least_metric(old.dtype)
        D: Tensor = metric(v, eps)
        D = D.clamp_min(least) if eps < least else D
        # Where the square of a gradient overflows, NaN reaches the sums that are checked; infinity would not.
        return v, torch.nan_to_num(D, nan=math.nan, posinf=math.nan)

    def _norms(self, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Norms as numbers to divide by, and their squares."""
        norms = torch.stack(torch._foreach_norm(vectors, 2, self._numbers.dtype))
        return scale_of(norms), norms.square()

    def _add(self, own: Vector, rows: Mapping[int, Iterable[Tensor]]) -> None:
        """Keep sums, one number per block of a vector."""
        for row, found in rows.items():
            for j, number in zip(own.spans, found, strict=True):
                self.sums[j][row].append(number)

    def _shaped(self, j: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of the tensors of a block, in their shapes and in their order."""
        found = {}
        for own, vector in zip(self._vectors, vectors, strict=False):
            parts = vector.split([self._grads[i].numel() for i in own.members])
            for i, part in zip(own.members, parts, strict=True):
                if self._owners[i][0] == j:
                    found[i] = part.view(self._grads[i].shape)
        return [found[i] for i in sorted(found)]

    def commit(self, ok: Tensor) -> None:
        """Write what is new if the step was taken."""
        raise NotImplementedError

    def _write(self, own: Vector, columns: Mapping[str, Sequence[Tensor]], new: Sequence[Tensor]) -> None:
        """Write vectors into columns of tensors; those of whole tensors are cut into shards again."""
        spread_all(new, [[column[i] for i in own.members] for column in columns.values()])
        for i in own.members:
            j, owner = self._owners[i]
            for key, column in columns.items() if self._blocks[j].gathered else ():
                if key in self._state[owner]:
                    replace(owner, self._state[owner], key, column[i], True)

    def _count(self, ok: Tensor) -> None:
        """Count one more square of all tensors if the step was taken."""
        if "square" in self.keys and self._owners:  # to add one tensor to all counts, torch would read it
            steps = [self._state[owner]["steps"] for _, owner in self._owners]
            torch._foreach_copy_(steps, (self._counts + ok).unbind())


class BlockAverages(Joined):
    """The new averages of one block, which become its slopes; in Adam's metric, with directions and the metric itself.

    Args: those of `Joined`, and the weight of new gradients in averages.
    """

    def __init__(self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, state: State, weight: Tensor) -> None:
        self.keys = ("average",) if rule.beta2 is None else ("average", "square")
        super().__init__(rule, blocks, numbers, state)
        ((j, block),) = blocks.items()
        self._lines = block.kind == LINES and not block.centered
        self._directions: list[Tensor] = []
        self._metrics: list[Tensor] = []
        self._new = [self._averaged(own, weight) for own in self._vectors]
        block.slopes = self._shaped(j, [new[0] for new in self._new])
        if rule.beta2 is not None:
            block.directions, block.metrics = self._shaped(j, self._directions), self._shaped(j, self._metrics)

    def _averaged(self, own: Vector, weight: Tensor) -> list[Tensor]:
        """The new averages of a vector."""
        x, g, old, *square = self._join(own, self._params, self._grads, *self._held.values())
        g = g.to(old.dtype)
        d = torch.lerp(old, g, weight.to(old.dtype))
        slopes, new, p = [g, d] if self._lines else [g], [d], d
        lengths, moves = slopes, False
        if square:
            v, D = self._squares(own, g, square[0])
            p, moves = d / D, self._rule.max_move is not None
            new.append(v)
            self._directions.append(p)
            self._metrics += [] if self._lines else [D]
            lengths = [*slopes, p, g / D] if moves else [*slopes, g / D]
        scales, squares = self._norms(*lengths)
        self._add(own, {2: own.products(g, scales[0], [x])[0], 3: squares[-1:] if square else squares[:1]})
        if self._lines:
            products = own.products(d, scales[1], [x, p] if square else [x])
            self._add(own, {0: products[1] if square else squares[1:], 1: products[0]})
        if moves:
            self._add(own, {4: squares[-2:-1], 5: torch.dot(p, x)[None]})
        return new

    def commit(self, ok: Tensor) -> None:
        """Write the new averages if the step was taken."""
        for own, new in zip(self._vectors, self._new, strict=True):
            old = join_all([[column[i] for i in own.members] for column in self._held.values()])
            self._write(own, self._held, [torch.where(ok, *pair) for pair in zip(new, old, strict=True)])
        self._count(ok)
