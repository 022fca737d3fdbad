"""The schedule-free form on a device: gradients at y make the model, steps move z, and y follows.

Tensors of all blocks that are treated alike are one vector, so that the number of launches does not depend on how many
blocks there are. Each block gets its part of the vectors as z, slope and direction; at the end they are copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks, times
from proxsps.core.schedule_free import Averaging, counted, gradient_point, gradient_weights, next_share
from proxsps.optim.blocks import LINES, Block
from proxsps.optim.device.estimate import Estimate, Estimated, SquareWeights, metric_of, vectors_of
from proxsps.optim.device.numbers import Numbers, scale_of, store
from proxsps.optim.last_step import Chosen
from proxsps.optim.lists import join, join_all, spread_all, widened
from proxsps.optim.memory import entries, replace, start_averages
from proxsps.optim.reduce import Sums, further_rows
from proxsps.optim.rule import Rule
from proxsps.optim.second_point import Z, bounds_of, move_points, start_point
from proxsps.optim.spreading import directions_of


class SecondPoints(Estimate):
    """The linear model at y, seen from z.

    Args:
        rule: the rule of the method.
        blocks: the blocks of the step, whose parameters become z.
        numbers: the numbers of the step.
        opt: the optimizer.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, opt: Any) -> None:
        self._rule, self._blocks, self._numbers, self._state = rule, blocks, numbers, opt.state
        options = opt.param_groups[0]
        self._before = {key: numbers.scalar(options[key]) for key in ("k", "total", "longest")}
        self._after: dict[str, Tensor] = {}
        for block in blocks:
            move_points(block, partial(self._held, block))
        flat = {i: block for i, block in enumerate(blocks) if not block.spectral}
        self._own: list[Points] = [MetricPoints(rule, flat, numbers, opt)] if flat else []
        if len(flat) < len(blocks):
            self._before["squares"] = numbers.scalar(options["squares"])
            mu, squares = gradient_weights(self._before["k"], self._before["squares"])
            self._after["squares"], spectral = squares, partial(SpectralPoints, mu=mu, rho=torch.sqrt(squares))
            self._own += [spectral(rule, {i: block}, numbers, opt) for i, block in enumerate(blocks) if block.spectral]
        self.known = {i: sums[:2] for own in self._own for i, sums in own.sums.items()}

    def _held(self, block: Block, i: int, key: str) -> Tensor:
        """A point of a tensor, which is made where it is missing."""
        own = self._state[block.owners[i]]
        if key not in own:
            own[key] = start_point(block.owners[i], key)
        return entries(own[key], block.gathered)

    def extras(self) -> list[Array]:
        """<g, z - y>, ||D^-1 g||^2, 0, and for lengths of moves ||p||^2 and <p, z>; rows with one number per block."""
        found = {i: sums for own in self._own for i, sums in own.sums.items()}
        total = self._numbers.total
        rows = [
            [total(found[i][row]) for i in range(len(self._blocks))] for row in range(2, 1 + further_rows(self._rule))
        ]
        extras: list[Array] = [self._numbers.vector(row) for row in rows]
        return [*extras[:2], 0.0, *extras[2:]]  # there are no centres

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """f + <g, z - y>."""
        moves = sums if self._rule.max_move is None else Sums(extras[3], extras[4], sums.x_sq)
        return Estimated(f + over_blocks(extras[0]), extras[1], moves)

    def follow(self, step: Chosen, alpha: Tensor, ok: Tensor) -> None:
        """Move y after z has moved, and choose the numbers of the average."""
        tau = times(step.u, step.reach)
        before = Averaging(self._before["total"], self._before["longest"])
        share, after = next_share(before, self._before["k"], tau)
        self._after |= after._asdict()  # the distance cap counts the steps
        for own in self._own:
            own.follow(share, ok)
        for i, block in enumerate(self._blocks):
            if block.group["regularizer"] is not None:  # its zeros are those of a multiple of the last step
                last = self._numbers.scalar(block.group["tau"])
                store(block.group, "tau", torch.where(ok & (tau > 0), tau * alpha[i], last))

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the average."""
        return {key: (after, self._before[key]) for key, after in self._after.items()}

    def commit(self, ok: Tensor) -> None:
        """Write z, y and the new averages of gradients, as they were if the step was not taken."""
        for own in self._own:
            own.commit(ok)


class Vector(NamedTuple):
    """Tensors of one dtype as one vector."""

    members: list[int]  # their places among the tensors of all blocks
    spans: dict[int, slice]  # the part of each block, by its place in the step
    z: Tensor
    y: Tensor
    x: Tensor  # the average
    g: Tensor
    new: Tensor  # the new average of gradients, or of their squares
    old: Tensor

    def dots(self, slope: Tensor, norm: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        """Products of a slope with vectors, block by block; divided by its norm, it stays in the range of f32."""
        scale = scale_of(norm)
        scaled = slope / scale
        found = torch.stack([torch.dot(scaled[own], t[own]) for t in others for own in self.spans.values()])
        return list((found * scale[None]).reshape(len(others), -1))


class Points:
    """The points of some blocks, with new averages of gradients, and sums over them.

    Args:
        rule: the rule of the method.
        blocks: the blocks, by their places in the step; they get their parts of z, slopes, directions and metrics.
        numbers: the numbers of the step.
        opt: the optimizer.
    """

    key = ""  # of the average in the state

    def __init__(self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, opt: Any) -> None:
        self._rule, self._blocks, self._numbers, self._opt, self._mix = rule, blocks, numbers, opt, rule.mix or 1.0
        # By block: <d, p>, <d, z>, <g, z - y>, ||D^-1 g||^2, ||p||^2, <p, z>; each a list of numbers to be added up.
        self.sums: dict[int, list[list[Tensor]]] = {i: [[] for _ in range(6)] for i in blocks}
        self._owners = [(j, i, owner) for j, block in blocks.items() for i, owner in enumerate(block.owners)]
        for _, _, owner in self._owners:
            start_averages(opt.state[owner], owner, [self.key])
        self._held = [entries(opt.state[owner][self.key], blocks[j].gathered) for j, _, owner in self._owners]
        self._zs, self._ys, self._grads = (
            [t for block in blocks.values() for t in getattr(block, name)] for name in ("params", "ys", "slopes")
        )
        self._bounds = {j: bounds_of(block) for j, block in blocks.items()}
        self._next: list[Tensor] = []  # y after the step, vector by vector
        self._vectors = [self._vector(members) for members in vectors_of(self._zs, self._grads)]
        slopes, directions, metrics = self._made()
        for j, block in blocks.items():
            parts = self._flat if block.kind == LINES else self._shaped
            block.slopes, block.directions, block.metrics = parts(j, slopes), parts(j, directions), parts(j, metrics)
            block.params = parts(j, [own.z for own in self._vectors])

    def _vector(self, members: list[int]) -> Vector:
        columns = [self._zs, self._ys, self._held, self._grads]
        z, y, old, g = map(widened, join_all([[column[i] for i in members] for column in columns]))
        spans: dict[int, slice] = {}
        first = 0
        for i in members:
            j, last = self._owners[i][0], first + self._grads[i].numel()
            spans[j] = slice(spans[j].start if j in spans else first, last)
            first = last
        g = g.to(old.dtype)
        x = torch.lerp(z, y, 1 / self._mix)  # `proxsps.core.schedule_free.average` in one operation, before z moves
        return Vector(members, spans, z, y, x, g, self._averaged(g, old, members), old)

    def _averaged(self, g: Tensor, old: Tensor, members: list[int]) -> Tensor:
        """The new average of a vector."""
        raise NotImplementedError

    def _made(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Slopes, directions and metrics, vector by vector, after the sums over them."""
        raise NotImplementedError

    def _add(self, own: Vector, rows: Mapping[int, Iterable[Tensor]]) -> None:
        """Keep sums, one number per block of a vector."""
        for row, found in rows.items():
            for j, number in zip(own.spans, found, strict=True):
                self.sums[j][row].append(number)

    def _flat(self, j: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of a block."""
        return [t[own.spans[j]] for own, t in zip(self._vectors, vectors, strict=False) if j in own.spans]

    def _shaped(self, j: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of the tensors of a block, in their shapes and in their order."""
        found = {}
        for own, vector in zip(self._vectors, vectors, strict=False):
            parts = vector.split([self._grads[i].numel() for i in own.members])
            for i, part in zip(own.members, parts, strict=True):
                if self._owners[i][0] == j:
                    found[i] = part.view(self._grads[i].shape)
        return [found[i] for i in sorted(found)]

    def follow(self, share: Tensor, ok: Tensor) -> None:
        """The next points of gradients."""
        for own in self._vectors:
            new = gradient_point(torch.lerp(own.x, own.z, share.to(own.x.dtype)), own.z, self._mix)
            for j, span in own.spans.items():
                if (bounds := self._bounds[j]) is not None:
                    new[span].clamp_(*bounds)
                rate = self._blocks[j].group["lr"]  # a block whose factor is 0 does not move
                if isinstance(rate, Tensor):
                    new[span] = torch.where((rate > 0).to(ok.device), new[span], own.y[span])
                elif not rate:
                    new[span] = own.y[span]
            self._next.append(torch.where(ok, new, own.y))

    def commit(self, ok: Tensor) -> None:
        """Copy the vectors back; averages as they were if the step was not taken."""
        for own, y in zip(self._vectors, self._next, strict=True):
            columns = [[column[i] for i in own.members] for column in (self._zs, self._ys, self._held)]
            spread_all([own.z, y, torch.where(ok, own.new, own.old)], columns)
        for i, (j, _, owner) in enumerate(self._owners):
            for key, new in ((Z, self._zs[i]), (self.key, self._held[i])) if self._blocks[j].gathered else ():
                replace(owner, self._opt.state[owner], key, new, True)


class MetricPoints(Points):
    """The points of blocks in Adam's metric."""

    key = "square"

    def __init__(self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, opt: Any) -> None:
        self._weights = SquareWeights(rule, [owner for block in blocks.values() for owner in block.owners], opt.state)
        super().__init__(rule, blocks, numbers, opt)

    def _averaged(self, g: Tensor, old: Tensor, members: list[int]) -> Tensor:
        return torch.lerp(old, g * g, self._weights.spread([self._grads[i] for i in members], members, old.dtype))

    def _made(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        lines = any(block.kind == LINES for block in self._blocks.values())
        metrics = [metric_of(own.new, self._rule.eps) for own in self._vectors]
        directions = [own.g / D for own, D in zip(self._vectors, metrics, strict=True)]
        for own, p in zip(self._vectors, directions, strict=True):
            lengths = [own.g, *(p[span] for span in own.spans.values())]
            norms = torch.stack(torch._foreach_norm(lengths, 2, self._numbers.dtype))
            squares, apart = norms[1:].square(), own.z - own.y
            rows = dict(
                zip((2, 0, 1), own.dots(own.g, norms[0], [apart, p, own.z] if lines else [apart]), strict=False)
            )
            self._add(own, {**rows, 3: squares})
            if self._rule.max_move is not None:
                self._add(own, {4: squares, 5: [torch.dot(p[span], own.z[span]) for span in own.spans.values()]})
        return [own.g for own in self._vectors], directions, metrics

    def commit(self, ok: Tensor) -> None:
        """Copy the vectors back, and count one more gradient."""
        super().commit(ok)
        self._weights.count(ok)


class SpectralPoints(Points):
    """The points of a block with spectral directions."""

    key = "average"

    def __init__(
        self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, opt: Any, mu: Tensor, rho: Tensor
    ) -> None:
        self._mu, self._rho = mu, rho
        super().__init__(rule, blocks, numbers, opt)

    def _averaged(self, g: Tensor, old: Tensor, members: list[int]) -> Tensor:
        return torch.lerp(g, old, self._mu.to(old.dtype))

    def _made(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        slopes, directions = [own.new for own in self._vectors], []
        ((j, block),) = self._blocks.items()
        found = directions_of(block, self._shaped(j, slopes), self._rho, self._opt, few=True)
        for own in self._vectors:
            p = join([found[i] for i in own.members])
            directions.append(p)
            norms = torch.stack(torch._foreach_norm([own.g, own.new, p], 2, self._numbers.dtype))
            products = own.dots(own.new, norms[1], [p, own.z])
            self._add(own, {0: products[0], 1: products[1], 2: own.dots(own.g, norms[0], [own.z - own.y])[0]})
            self.sums[j][3].append(counted((norms[2] / self._rho).square(), p.numel()))
            if self._rule.max_move is not None:
                self._add(own, {4: [norms[2].square()], 5: [torch.dot(p, own.z)]})
        return slopes, directions, []
