"""The schedule-free form on a device: gradients at y make the model, steps move z, and y follows.

Tensors of all blocks that are treated alike are one vector, so that the number of launches does not depend on how many
blocks there are. Each block gets its part of the vectors as z, slope and direction; at the end they are copied back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks, times
from proxsps.core.schedule_free import Averaging, counted, gradient_point, gradient_weights, next_share
from proxsps.optim.blocks import LINES, Block
from proxsps.optim.device.joined import Estimate, Estimated, Vector
from proxsps.optim.device.numbers import Numbers, store
from proxsps.optim.last_step import Chosen
from proxsps.optim.lists import join
from proxsps.optim.memory import Y, Z, entries, new_state
from proxsps.optim.reduce import Sums
from proxsps.optim.rule import Rule
from proxsps.optim.second_point import bounds_of, move_points
from proxsps.optim.spreading import directions_of


class Point(NamedTuple):
    """A vector of tensors."""

    own: Vector
    z: Tensor
    y: Tensor
    x: Tensor  # the average
    g: Tensor
    old: Tensor  # the average of gradients, or of their squares


class SecondPoints(Estimate):
    """The linear model at y, seen from z: the parameters of blocks become z. <g, x> is <g, z - y> here."""

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, opt: Any) -> None:
        spectral = {j: block for j, block in enumerate(blocks) if block.spectral}
        names = ("k", "total", "longest", *(("squares",) if spectral else ()))
        before = {name: numbers.scalar(opt.param_groups[0][name]) for name in names}
        for block in blocks:
            move_points(block, partial(_point, block, opt.state))
        apart = [j if block.spectral else -1 for j, block in enumerate(blocks)]
        super().__init__(rule, blocks, numbers, opt.state, before, apart)
        self._opt, self._mix, self._bounds = opt, rule.mix or 1.0, list(map(bounds_of, blocks))
        self._points = list(map(self._point, self._vectors))
        if spectral:
            mu, self._after["squares"] = gradient_weights(before["k"], before["squares"])
            rho = torch.sqrt(self._after["squares"])
        made: dict[str, dict[int, Tensor]] = {"params": {}, "slopes": {}, "directions": {}, "metrics": {}}
        for j, block in spectral.items():
            for k, d, p in self._orthogonalized(j, block, mu, rho):
                made["slopes"][k], made["directions"][k] = d, p
        for k, point in enumerate(self._points):
            made["params"][k] = point.z
            if "square" in point.own.keys:
                made["slopes"][k], made["directions"][k], made["metrics"][k] = self._scaled(k, point)
        self._hand_out(made, flat=True)

    def _columns(self, j: int, i: int) -> dict[str, Tensor]:
        return super()._columns(j, i) | {Z: self.blocks[j].params[i], Y: self.blocks[j].ys[i]}

    def _point(self, own: Vector) -> Point:
        z, y, old, g = own.joined(Z, Y, *own.keys, "g")
        x = torch.lerp(z, y, 1 / self._mix)  # `proxsps.core.schedule_free.average` in one operation, before z moves
        return Point(own, z, y, x, g.to(old.dtype), old)

    def _scaled(self, k: int, point: Point) -> tuple[Tensor, Tensor, Tensor]:
        """Slopes, directions in Adam's metric, and D."""
        self._new[k]["square"], D = self._squares(point.own, point.g, point.old)
        p = point.g / D
        rows = self._products(k, point.g, p)
        rows["g_sq"] = rows["p_sq"]
        return point.g, p, D

    def _orthogonalized(self, j: int, block: Block, mu: Tensor, rho: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Slopes and spectral directions of vectors, from the weight `mu` of old gradients.

        `rho` is what averaging takes away from noise.
        """
        points = {k: point for k, point in enumerate(self._points) if j in point.own.spans}
        slopes = {k: torch.lerp(point.g, point.old, mu.to(point.old.dtype)) for k, point in points.items()}
        found = directions_of(block, self._shaped(j, slopes), rho, self._opt, few=True)
        for k, point in points.items():
            self._new[k]["average"], p = slopes[k], join([found[i] for _, i in point.own.members])
            rows = self._products(k, slopes[k], p)
            rows["g_sq"] = counted(rows["p_sq"] / rho.square(), point.z.numel())
            yield k, slopes[k], p

    def _products(self, k: int, d: Tensor, p: Tensor) -> dict[str, Tensor]:
        """All sums over a vector but ||D^-1 g||^2."""
        own, z, y, _, g, _ = self._points[k]
        along_g, along_d = {"g_dot_x": z - y}, {"d_sq": p, "d_dot_x": z}
        if not any(self.kinds[j] == LINES for j in own.spans):
            products = [(g, along_g)]
        else:
            products = [(g, along_g | along_d)] if d is g else [(g, along_g), (d, along_d)]
        return self._sum(own.spans, {"p_sq": p}, products)

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """f + <g, z - y>."""
        return Estimated(f + over_blocks(extras[0]), extras[1])

    def finish(self, step: Chosen, alpha: Tensor, ok: Tensor) -> dict[str, tuple[Array, Array]]:
        """Move y after z has moved, copy the vectors back, and choose the numbers of the average."""
        tau = times(step.u, step.reach)
        before = Averaging(self._before["total"], self._before["longest"])
        share, after = next_share(before, self._before["k"], tau)
        self._after |= after._asdict()  # the distance cap counts the steps
        for k, point in enumerate(self._points):
            y = self._next_point(point, share, ok)
            averages = {key: torch.where(ok, new, point.old) for key, new in self._new[k].items()}
            self._write(point.own, {Z: point.z, Y: y, **averages})
        for i, block in enumerate(self.blocks):
            if block.group["regularizer"] is not None:  # its zeros are those of a multiple of the last step
                last = self.numbers.scalar(block.group["tau"])
                store(block.group, "tau", torch.where(ok & (tau > 0), tau * alpha[i], last))
        return super().finish(step, alpha, ok)

    def _next_point(self, point: Point, share: Tensor, ok: Tensor) -> Tensor:
        """The next y, where gradients are evaluated."""
        own, z, y, x, *_ = point
        new = gradient_point(torch.lerp(x, z, share.to(x.dtype)), z, self._mix)
        for j, span in own.spans.items():
            if (bounds := self._bounds[j]) is not None:
                rate = self.blocks[j].group["lr"]  # with a factor of 0, it does not move onto its constraint
                inside = new[span].clamp(*bounds)
                new[span] = (
                    torch.where((rate > 0).to(ok.device), inside, new[span]) if isinstance(rate, Tensor) else inside
                )
        return torch.where(ok, new, y)


def _point(block: Block, state: Any, i: int, key: str) -> Tensor:
    """A point of a tensor, which is made where it is missing."""
    own = state[block.owner(i)]
    if key not in own:
        own[key] = new_state(block.owner(i), key)
    return entries(own[key], block.gathered)
