"""The schedule-free form on a device: gradients at y make the model, steps move z, and y follows.

Tensors of all blocks that are treated alike are one vector, so that the number of launches does not depend on how many
blocks there are. Each block gets its part of the vectors as z, slope and direction; at the end they are copied back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks, times
from proxsps.core.schedule_free import Averaging, counted, gradient_point, gradient_weights, next_share
from proxsps.optim.blocks import LINES, Block
from proxsps.optim.device.estimate import Estimated, Remembered
from proxsps.optim.device.joined import Joined, Vector
from proxsps.optim.device.numbers import Numbers, store
from proxsps.optim.last_step import Chosen
from proxsps.optim.lists import join
from proxsps.optim.memory import entries
from proxsps.optim.reduce import Sums
from proxsps.optim.rule import Rule
from proxsps.optim.second_point import Y, Z, bounds_of, move_points, start_point
from proxsps.optim.spreading import directions_of


class SecondPoints(Remembered):
    """The linear model at y, seen from z: the parameters of blocks become z."""

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, opt: Any) -> None:
        options, spectral = opt.param_groups[0], [i for i, block in enumerate(blocks) if block.spectral]
        before = {key: numbers.scalar(options[key]) for key in ("k", "total", "longest")}
        for block in blocks:
            move_points(block, partial(_point, block, opt.state))
        flat = {i: block for i, block in enumerate(blocks) if not block.spectral}
        own: list[Points] = [MetricPoints(rule, flat, numbers, opt)] if flat else []
        if spectral:
            before["squares"] = numbers.scalar(options["squares"])
            mu, squares = gradient_weights(before["k"], before["squares"])
            rho = torch.sqrt(squares)
            own += [SpectralPoints(rule, {i: blocks[i]}, numbers, opt, mu, rho) for i in spectral]
        super().__init__(rule, blocks, numbers, before, own)
        if spectral:
            self._after["squares"] = squares

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """f + <g, z - y>."""
        return Estimated(f + over_blocks(extras[0]), extras[1], self._moves(extras, sums))

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


def _point(block: Block, state: Any, i: int, key: str) -> Tensor:
    """A point of a tensor, which is made where it is missing."""
    own = state[block.owner(i)]
    if key not in own:
        own[key] = start_point(block.owner(i), key)
    return entries(own[key], block.gathered)


class Point(NamedTuple):
    """A vector of tensors."""

    own: Vector
    z: Tensor
    y: Tensor
    x: Tensor  # the average
    g: Tensor
    old: Tensor  # the average of gradients, or of their squares


class Points(Joined):
    """The points of some blocks, with new averages of gradients, and sums over them; <g, x> is <g, z - y> here.

    Args: those of `Joined`, but the optimizer. Blocks also get their parts of z.
    """

    def __init__(self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, opt: Any) -> None:
        super().__init__(rule, blocks, numbers, opt.state)
        self._opt, self._mix = opt, rule.mix or 1.0
        self._ys = [y for block in blocks.values() for y in block.ys]
        self._bounds = {j: bounds_of(block) for j, block in blocks.items()}
        self._next: list[Tensor] = []  # y after the step, vector by vector
        self._new: list[Tensor] = []  # averages after the step
        self._points = list(map(self._point, self._vectors))
        vectors = *self._made(), [point.z for point in self._points]
        for j, block in blocks.items():
            parts = partial(self._flat if block.kind == LINES else self._shaped, j)
            block.slopes, block.directions, block.metrics, block.params = map(parts, vectors)

    def _point(self, own: Vector) -> Point:
        (held,) = self._held.values()
        z, y, old, g = self._join(own, self._params, self._ys, held, self._grads)
        x = torch.lerp(z, y, 1 / self._mix)  # `proxsps.core.schedule_free.average` in one operation, before z moves
        return Point(own, z, y, x, g.to(old.dtype), old)

    def _made(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Slopes, directions and metrics, vector by vector; adds the new averages, and sums."""
        raise NotImplementedError

    def _flat(self, j: int, vectors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of a block."""
        return [t[own.spans[j]] for own, t in zip(self._vectors, vectors, strict=False) if j in own.spans]

    def follow(self, share: Tensor, ok: Tensor) -> None:
        """The next points of gradients."""
        for own, z, y, x, *_ in self._points:
            new = gradient_point(torch.lerp(x, z, share.to(x.dtype)), z, self._mix)
            for j, span in own.spans.items():
                if (bounds := self._bounds[j]) is not None:
                    new[span].clamp_(*bounds)
                rate = self._blocks[j].group["lr"]  # a block whose factor is 0 does not move
                if isinstance(rate, Tensor):
                    new[span] = torch.where((rate > 0).to(ok.device), new[span], y[span])
                elif not rate:
                    new[span] = y[span]
            self._next.append(torch.where(ok, new, y))

    def commit(self, ok: Tensor) -> None:
        """Copy the vectors back; averages as they were if the step was not taken."""
        columns = {Z: self._params, Y: self._ys, **self._held}
        for point, y, new in zip(self._points, self._next, self._new, strict=True):
            self._write(point.own, columns, [point.z, y, torch.where(ok, new, point.old)])
        self._count(ok)


class MetricPoints(Points):
    """The points of blocks in Adam's metric."""

    keys = ("square",)

    def _made(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        lines = any(block.kind == LINES for block in self._blocks.values())
        directions, metrics = [], []
        for own, z, y, _, g, old in self._points:
            v, D = self._squares(own, g, old)
            p, apart, spans = g / D, z - y, own.spans.values()
            self._new.append(v)
            directions.append(p)
            metrics.append(D)
            scales, squares = self._norms(g, *(p[span] for span in spans))
            products = own.products(g, scales[0], [apart, p, z] if lines else [apart])
            self._add(own, {3: squares[1:], **dict(zip((2, 0, 1), products, strict=False))})
            if self._rule.max_move is not None:
                self._add(own, {4: squares[1:], 5: [torch.dot(p[span], z[span]) for span in spans]})
        return [point.g for point in self._points], directions, metrics


class SpectralPoints(Points):
    """The points of a block with spectral directions.

    Args: those of `Points`, the weight of old gradients in their average, and what averaging takes away from noise.
    """

    keys = ("average",)

    def __init__(
        self, rule: Rule, blocks: Mapping[int, Block], numbers: Numbers, opt: Any, mu: Tensor, rho: Tensor
    ) -> None:
        self._mu, self._rho = mu, rho
        super().__init__(rule, blocks, numbers, opt)

    def _made(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        self._new = [torch.lerp(point.g, point.old, self._mu.to(point.old.dtype)) for point in self._points]
        ((j, block),) = self._blocks.items()
        found, directions = directions_of(block, self._shaped(j, self._new), self._rho, self._opt, few=True), []
        for (own, z, y, _, g, _), d in zip(self._points, self._new, strict=True):
            p = join([found[i] for i in own.members])
            directions.append(p)
            scales, squares = self._norms(g, d, p)
            self._add(own, dict(enumerate(own.products(d, scales[1], [p, z]))))
            filled = counted(squares[2:] / self._rho.square(), p.numel())
            self._add(own, {2: own.products(g, scales[0], [z - y])[0], 3: filled})
            if self._rule.max_move is not None:
                self._add(own, {4: squares[2:], 5: torch.dot(p, z)[None]})
        return self._new, directions, []
