"""From loss value and gradients to the value m and the slopes d of the linear model of a step on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from proxsps.core.array import Array, over_blocks
from proxsps.core.estimate import (
    Averages,
    averaged_value,
    corrected_weights,
    coupled_value,
    momentum_weights,
    update_averages,
)
from proxsps.optim.blocks import LINES, Block, couple
from proxsps.optim.device.joined import Columns, Estimate, Estimated, Vector
from proxsps.optim.device.numbers import Numbers
from proxsps.optim.last_step import Chosen
from proxsps.optim.lists import LAUNCH, bundles, join, join_all, widened
from proxsps.optim.memory import State, entries
from proxsps.optim.reduce import Sums
from proxsps.optim.rule import MODEL, Rule

KEYS = (*MODEL, "k")  # in the groups


class Given(Estimate):
    """The loss and its gradient as they are; for coupled methods with the regulariser in both.

    Tensors are joined only for the sums of affine blocks, a few at a time.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers) -> None:
        penalties = map(couple, blocks) if rule.coupled else ()
        self._penalties = [0.0 if value is None else value for value in penalties]
        super().__init__(rule, blocks, numbers, {}, {}, None)
        for j, block in enumerate(blocks):
            centers = [self._centers[j]] if self._centers[j] else []
            columns = (block.slopes, block.params, *centers) if self.kinds[j] == LINES else ()
            for lists in bundles(columns, LAUNCH):
                self._measure(j, lists, block.lam if rule.coupled else 0.0)

    def _measure(self, j: int, lists: Sequence[Sequence[Tensor]], lam: float) -> None:
        """Sums over gradients, points and centres of a block; the slopes have `lam` times the points."""
        g, x, *center = map(widened, join_all(lists))
        x = x - center[0] if center else x
        d = torch.add(g, x, alpha=lam) if lam else g
        squares = {"d_sq": d, **({"x_sq": x} if self.rule.coupled else {})}
        self._sum({j: slice(0, x.numel())}, squares, [(d, {"d_dot_x": x})])

    def extras(self) -> list[Array]:
        """The values of regularisers on this rank, one number per block."""
        return [self.numbers.vector(self._penalties)] if self.rule.coupled else []

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The loss, with the regulariser if they are coupled."""
        m = coupled_value(f + extras[0].sum(), sums.x_sq, lam) if self.rule.coupled else f
        return Estimated(m, sums.d_sq)


class Averaged(Estimate):
    """The average of all linear models so far, with the gradient's second moments as a metric if the rule has one.

    State of a parameter: `average` is d, and in the metric `square` is v and `steps` the number of gradients so far.
    The numbers fbar, gamma and k are in the groups.
    """

    def __init__(self, rule: Rule, blocks: Sequence[Block], numbers: Numbers, state: State) -> None:
        before = {key: numbers.scalar(blocks[0].group[key]) for key in KEYS}
        # Adam's averages start from zeros, with a correction; without a metric, they start from the first value.
        form = momentum_weights if rule.beta2 is None else corrected_weights
        self._weights = form(before["k"], rule.beta)
        super().__init__(rule, blocks, numbers, state, before, range(len(blocks)))
        made: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for k, own in enumerate(self._vectors):
            for name, vector in self._average(k, own).items():
                made[name][k] = vector
        self._hand_out(made)

    def _average(self, k: int, own: Vector) -> Columns:
        """Make new averages of a vector of a block, and sums; returns what the block gets."""
        lines = self.kinds[own.members[0][0]] == LINES
        x, g, old, *square = own.joined("x", "g", *own.keys)
        g = g.to(old.dtype)
        d = self._new[k]["average"] = torch.lerp(old, g, self._weights.new.to(old.dtype))
        made, near = {"slopes": d}, own.from_center(x)
        squares, along_d = {"g_sq": g}, {"d_dot_x": near}
        products = [(g, {"g_dot_x": x}), *([(d, along_d)] if lines else [])]
        if near is not x:
            along_d["d_dot_c"] = own.joined("c")[0]
        if square:
            self._new[k]["square"], D = self._squares(own, g, square[0])
            made["directions"] = along_d["d_sq"] = d / D
            squares["g_sq"] = g / D
            if not lines:
                made["metrics"] = D
        elif lines:
            squares["d_sq"] = d
        self._sum(own.spans, squares, products)
        return made

    def extras(self) -> list[Array]:
        """Those of all averages, with <d, x> of tensors that rest in both products."""
        rows = super().extras()
        if any(block.resting for block in self.blocks):
            at_rest = self.numbers.vector(list(map(self._at_rest, self.blocks)))
            rows[0], rows[2] = rows[0] + at_rest, rows[2] + at_rest
        return rows

    def _at_rest(self, block: Block) -> Tensor | float:
        """<d, x> over the tensors of a block that rest; 0 if there are none."""
        owners = [block.group["params"][i] for i in block.resting]
        owners = [owner for owner in owners if "average" in self._state.get(owner, {})]
        averages = [entries(self._state[owner]["average"], block.gathered) for owner in owners]
        points = [widened(entries(x.detach().resolve_conj(), block.gathered)) for x in owners]
        found = bundles((averages, points), LAUNCH)
        return self.numbers.total([torch.dot(join(ds), join(xs)) for ds, xs in found])

    def estimated(self, f: Array, extras: Sequence[Array], sums: Sums, lam: Array) -> Estimated:
        """The average of the linear models at the current point."""
        d_dot_x = over_blocks(sums.d_dot_x)
        if not isinstance(extras[2], float):
            d_dot_x = d_dot_x + over_blocks(extras[2])
        before = Averages(*self._before.values())
        after = update_averages(before, f, over_blocks(extras[0]), self._weights)
        self._after = dict(zip(KEYS, after, strict=True))
        return Estimated(averaged_value(f, after, d_dot_x), extras[1])

    def finish(self, step: Chosen, alpha: Tensor, ok: Tensor) -> dict[str, tuple[Array, Array]]:
        """Write the new averages, and count one more gradient for each parameter."""
        for own, new in zip(self._vectors, self._new, strict=True):
            old = dict(zip(new, own.joined(*new), strict=True))
            self._write(own, {key: torch.where(ok, new[key], old[key]) for key in new})
        return super().finish(step, alpha, ok)
