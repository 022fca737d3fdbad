"""The schedule-free form on a device: gradients at y make the model, steps move z, and y follows.

The points y and z and their sums are joined vectors, as in `proxsps.optim.device.estimate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.schedule_free import Averaging, average, gradient_point, gradient_weights, next_share
from proxsps.optim.blocks import Block
from proxsps.optim.device.estimate import BlockAverages, Estimate, Estimated
from proxsps.optim.device.numbers import Numbers, scale_of, store
from proxsps.optim.last_step import Chosen
from proxsps.optim.lists import join, join_all, spread, widened
from proxsps.optim.memory import entries, replace
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
        self._rule, self._blocks, self._numbers, self._groups = rule, blocks, numbers, opt.param_groups
        options = opt.param_groups[0]
        self._before = {key: numbers.scalar(options[key]) for key in ("k", "total", "longest", "squares")}
        mu, self._squares = gradient_weights(self._before["k"], self._before["squares"])
        self._state = opt.state
        for block in blocks:
            move_points(block, partial(self._held, block))
        self._own = [
            SpectralPoints(rule, block, numbers, opt, mu, self._squares)
            if block.spectral
            else MetricPoints(rule, block, numbers, opt.state, numbers.scalar(1.0))
            for block in blocks
        ]
        self.known = {i: own.line for i, own in enumerate(self._own)}

    def _held(self, block: Block, i: int, key: str) -> Tensor:
        """A point of a tensor, which is made where it is missing."""
        own = self._state[block.owners[i]]
        if key not in own:
            own[key] = start_point(block.owners[i], key)
        return entries(own[key], block.gathered)

    def extras(self) -> list[Array]:
        """The sums of `MetricPoints`, as rows with one number per block."""
        rows = list(zip(*(own.extras() for own in self._own), strict=True))[: further_rows(self._rule)]
        return [0.0 if i == 2 else self._numbers.vector(row) for i, row in enumerate(rows)]  # there are no centres

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """f + <g, z - y>."""
        moves = sums if self._rule.max_move is None else Sums(extras[3], extras[4], sums.x_sq)
        return Estimated(f + over_blocks(extras[0]), extras[1], moves)

    def follow(self, step: Chosen, alpha: Tensor, ok: Tensor) -> None:
        """Move y after z has moved, and choose the numbers of the average."""
        tau = step.u * step.reach
        numbers = Averaging(self._before["total"], self._before["longest"])
        share, self._after = next_share(numbers, self._before["k"], tau)
        for own in self._own:
            own.follow(share, ok)
        for i, block in enumerate(self._blocks):
            if block.group["regularizer"] is not None:  # its zeros are those of a multiple of the last step
                before = self._numbers.scalar(block.group["tau"])
                store(block.group, "tau", torch.where(ok & (tau > 0), tau * alpha[i], before))

    def changes(self) -> dict[str, tuple[Array, Array]]:
        """The numbers of the average."""
        after = {"k": self._before["k"] + 1, "squares": self._squares, **self._after._asdict()}
        return {key: (after[key], before) for key, before in self._before.items()}

    def commit(self, ok: Tensor) -> None:
        """Write the new averages of gradients if the step was taken."""
        for own in self._own:
            own.keep(ok)
        for block in self._blocks:
            for i, owner in enumerate(block.owners) if block.gathered else ():
                replace(owner, self._state[owner], Z, block.params[i], True)
        counts = [(own.steps, own.counts + ok) for own in self._own if own.counts is not None]
        if counts:
            old, new = [t for steps, _ in counts for t in steps], [t for _, new in counts for t in new.unbind()]
            torch._foreach_copy_(old, new)


class MetricPoints(BlockAverages):
    """The points of a block in Adam's metric."""

    keys = ("square",)

    def _make(self, members: list[int], weights: Tensor | None) -> None:
        """The metric of one vector, its views and sums, and the average x."""
        block = self._block
        columns = [block.params, self._grads, *self._held, block.ys]
        z, g, v, y = map(widened, join_all([[ts[i] for i in members] for ts in columns]))
        g = g.to(v.dtype)
        v, D = self._metric(g, v, members, weights)
        p = g / D
        for column, vector in enumerate((g, p, D)[: 2 if self._affine else 3]):
            self._spread(column, members, vector)
        self._new.append((members, [v]))
        self._points.append((members, average(y, z, self._rule.mix)))
        self._add_up(z, g, z - y, p)

    def _add_up(self, z: Tensor, g: Tensor, apart: Tensor, *over: Tensor) -> None:
        (p,) = over
        norms = torch.stack(torch._foreach_norm([g, p], 2, self._numbers.dtype))
        scale = scale_of(norms[0])  # so that products stay in the range of f32
        scaled = g / scale
        self._sums[0].append(torch.dot(scaled, apart) * scale)
        self._sums[1].append(norms[1].square())
        if self._affine:
            self.line[0].append(torch.dot(scaled, p) * scale)
            self.line[1].append(torch.dot(scaled, z) * scale)
        if self._rule.max_move is not None:
            self._sums[3].append(norms[1].square())
            self._sums[4].append(torch.dot(p, z))

    def follow(self, share: Tensor, ok: Tensor) -> None:
        """y <- the next point of gradients where `ok`."""
        block = self._block
        for members, x in self._points:
            ys = [block.ys[i] for i in members]
            z, y = widened(join([block.params[i] for i in members])), join(ys)
            mean = x + share.to(x.dtype) * (z - x)
            new = gradient_point(mean, z, self._rule.mix)
            if (bounds := bounds_of(block)) is not None:
                new = new.clamp(*bounds)
            rate = block.group["lr"]  # a block whose factor is 0 does not move
            moves = ok & (rate > 0).to(ok.device) if isinstance(rate, Tensor) else ok if rate else ok & False
            spread(torch.where(moves, new.to(y.dtype), y), ys)


class SpectralPoints(MetricPoints):
    """The points of a block with spectral directions."""

    keys = ("average",)

    def __init__(self, rule: Rule, block: Block, numbers: Numbers, opt: Any, mu: Tensor, squares: Tensor) -> None:
        self._mu, self._rho, self._opt = mu, torch.sqrt(squares), opt
        self._vectors: list[tuple[list[int], Tensor, Tensor, Tensor, Tensor]] = []
        super().__init__(rule, block, numbers, opt.state, mu)

    def _make(self, members: list[int], weights: Tensor | None) -> None:
        """The new averages of one vector."""
        block = self._block
        columns = [block.params, self._grads, *self._held, block.ys]
        z, g, d, y = map(widened, join_all([[ts[i] for i in members] for ts in columns]))
        g = g.to(d.dtype)
        d = torch.lerp(g, d, self._mu.to(d.dtype))
        self._spread(0, members, d)
        self._new.append((members, [d]))
        self._points.append((members, average(y, z, self._rule.mix)))
        self._vectors.append((members, z, g, d, z - y))

    def _complete(self) -> None:
        """The directions of all tensors, and the sums."""
        slopes = [self._views[0][i] for i in range(len(self._grads))]
        self._views[1] = dict(enumerate(directions_of(self._block, slopes, self._rho, self._opt, few=True)))
        for members, z, g, d, apart in self._vectors:
            self._add_up_slopes(z, g, d, apart, join([self._views[1][i] for i in members]))

    def _add_up_slopes(self, z: Tensor, g: Tensor, d: Tensor, apart: Tensor, p: Tensor) -> None:
        norms = torch.stack(torch._foreach_norm([g, d], 2, self._numbers.dtype))
        scales = scale_of(norms)
        self._sums[0].append(torch.dot(g / scales[0], apart) * scales[0])
        self._sums[1].append(self._numbers.scalar(float(d.numel())))
        scaled = d / scales[1]
        self.line[0].append(torch.dot(scaled, p) * scales[1])
        self.line[1].append(torch.dot(scaled, z) * scales[1])
        if self._rule.max_move is not None:
            self._sums[3].append(torch.dot(p, p))
            self._sums[4].append(torch.dot(p, z))
