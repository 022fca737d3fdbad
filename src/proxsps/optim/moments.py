"""Averages of gradients as the slopes of a step, and Adam's metric from averages of their squares.

A block in such a step has a record `Moments`: the gradients, the averages before the step and the weights to update
them with. Nothing is computed when the record is made, so that a part of the step may choose:

- `Moments.make` computes the new averages, and with them slopes, directions and metric of the block, as tensors. It
  is for parts that do not update averages themselves (`Assembly` calls it), and all that `Lines`, curves and kernels
  for plain slopes need. The new averages replace the old ones when the step is accepted (`Moments.keep`).
- A part that updates averages while it sums does not call it. It reads the record, returns `Part.extras` itself, and
  writes new averages into the tensors of the record (`averages`, `squares`) in its write pass, where the step is
  accepted. It sets `Moments.written`. `make_lines` is where such a part is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.estimate import Weights, corrected_weight, metric
from proxsps.optim.blocks import LINES, Block, plain
from proxsps.optim.lists import join_all, spread_all
from proxsps.optim.passes import COPIES, LAUNCHES, bucketed, scale_of, widened

if TYPE_CHECKING:
    from proxsps.optim.numbers import Numbers

Store = Callable[[int, str, Tensor], None]  # (place in the block, key of the state, new tensor)

ROWS = 5  # sums of a block that are not sums of slopes: see `Moments.extras`


@dataclass
class Moments:
    """The averages of one block for a step; lists have one entry per tensor, like `Block.params`.

    Complex tensors are real views, and all have at least single precision.
    """

    grads: list[Tensor]  # g
    averages: list[Tensor]  # d before the step
    weights: Weights  # of old d and new g
    squares: list[Tensor] | None = None  # v before the step; None in the identity metric
    square_weights: Sequence[Weights] = ()  # of old v and new g^2: each tensor has its own count
    eps: float = 0.0
    moves: bool = False  # whether the Euclidean length of the move is needed
    sizes: bool = True  # whether ||D^-1 g||^2 is needed
    in_place: bool = True  # whether `averages` and `squares` are the state itself, and not gathered from shards
    slopes: list[Tensor] = field(default_factory=list)  # d after the step
    new_squares: list[Tensor] = field(default_factory=list)
    metrics: list[Tensor] = field(default_factory=list)  # D = sqrt(v) + eps
    made: bool = False
    fresh: bool = False  # whether some averages are not in the optimizer's state yet
    written: bool = False  # whether a part has written new averages into the tensors above

    def make(self, block: Block, numbers: Numbers) -> None:
        """Calculate the new averages, and give the block its slopes, directions and metric."""
        if self.made:
            return
        self.made = True
        grads, (old, new) = list(map(widened, self.grads)), self.weights
        wrapped = not plain(
            grads
        )  # of a class whose operations are not those of torch, and that cannot be added in place
        if wrapped:
            self.slopes = [old * d + new * g for d, g in zip(self.averages, grads, strict=True)]
        elif grads:
            self.slopes = list(torch._foreach_mul(self.averages, old))
            torch._foreach_add_(self.slopes, grads, alpha=new)
        block.slopes = self.slopes
        if self.squares is None:
            return
        if grads:
            olds, news = (list(column) for column in zip(*self.square_weights, strict=True))
            if wrapped:
                parts = zip(olds, self.squares, news, grads, strict=True)
                self.new_squares = [old * v + new * (g * g) for old, v, new, g in parts]
            else:
                self.new_squares = list(torch._foreach_mul(self.squares, olds))
                torch._foreach_addcmul_(self.new_squares, grads, grads, news)
            self.metrics = metrics(self.new_squares, self.eps)
        block.directions = list(torch._foreach_div(self.slopes, self.metrics)) if grads else []
        block.metrics = self.metrics

    def extras(self, numbers: Numbers, block: Block) -> list[Array]:
        """<g, x>, ||D^-1 g||^2, <d, center>, and for `moves` in a metric ||D^-1 d||^2 and <D^-1 d, x>.

        The third completes <d, x>, because sums of blocks with a centre have <d, x - center>.
        """
        columns = [block.params, self.grads]
        if self.squares is not None:
            columns += [self.metrics, block.along if self.moves else self.metrics]
        sums = self._sums(numbers, columns, exact=False)
        if not all(number == 0 or 1e-20 < abs(number) < 1e30 for number in sums):  # beyond the range of f32
            sums = self._sums(numbers, columns, exact=True)
        if self.squares is not None and any(map(overflows, self.grads)):
            sums[0] = numbers.scalar(math.nan)
        return self._centered(numbers, block, sums)

    def _centered(self, numbers: Numbers, block: Block, sums: list[Array]) -> list[Array]:
        if block.centered and block.quadratic:
            pairs = zip(self.slopes, block.centers, strict=True)
            sums[2] = numbers.total([(d * c).sum() for d, c in pairs if c is not None])
        return sums

    def _sums(self, numbers: Numbers, columns: Sequence[Sequence[Tensor]], exact: bool) -> list[Array]:
        found: list[list[Tensor]] = [[] for _ in range(ROWS)]
        for vectors in bucketed(zip(*columns, strict=True), *COPIES):
            x, g, *rest = map(Tensor.double, vectors) if exact else vectors
            found[0].append(torch.dot(g, x))
            q = g / rest[0] if rest else g
            found[1].append(torch.dot(q, q))
            if rest and self.moves:
                found[3].append(torch.dot(rest[1], rest[1]))
                found[4].append(torch.dot(rest[1], x))
        return [numbers.total(parts) for parts in found]

    def keep(self, ok: Array, store: Store) -> None:
        """Store the new averages, unless a part has already written them into the state."""
        if self.written and self.in_place and not self.fresh:
            return
        slopes, squares = (self.averages, self.squares or []) if self.written else (self.slopes, self.new_squares)
        for i, d in enumerate(slopes):
            store(i, "average", d)
        for i, v in enumerate(squares):
            store(i, "square", v)


@dataclass
class Views:
    """Parts of the vectors of a device, in the shapes of the tensors, by their positions in the block."""

    slopes: dict[int, Tensor] = field(default_factory=dict)
    directions: dict[int, Tensor] = field(default_factory=dict)
    metrics: dict[int, Tensor] = field(default_factory=dict)  # empty if no search needs them


@dataclass
class DeviceMoments(Moments):
    """The same on a device, in few launches: tensors are joined into long vectors, and nothing is read back.

    State is written in place if the step is taken, so that a captured step finds it again.
    """

    steps: Sequence[Tensor] = ()  # for each tensor, the number of gradients in v
    counts: Tensor | None = None  # the same in one vector
    beta2: float = 0.0

    def make(self, block: Block, numbers: Numbers) -> None:
        """Calculate the new averages, and give the block its slopes, directions and metric."""
        if self.made:
            return
        self.made = True
        self._members = list(_buckets(block.params, self.grads, LAUNCHES[1]))
        self._new: list[list[Tensor]] = []
        self._found: list[list[Tensor]] = [[] for _ in range(ROWS)]
        self._line: list[list[Tensor]] = [[], []]
        views, size = Views(), len(self.grads)
        weights = None if self.squares is None or not size else self._square_weights(numbers)
        for members in self._members:
            self._make(block, numbers, members, weights, views)
        block.slopes = self.slopes = [views.slopes[i] for i in range(size)]
        if self.squares is not None:
            block.directions = [views.directions[i] for i in range(size)]
            block.metrics = self.metrics = [views.metrics[i] for i in range(size) if i in views.metrics]

    def _square_weights(self, numbers: Numbers) -> Tensor:
        """The weight of g^2 in the new v of each tensor."""
        self.counts = torch.stack(list(self.steps))
        wide = any(v.dtype is torch.float64 for v in self.squares or ())
        new: Tensor = corrected_weight(numbers.column(self.counts) if wide else self.counts, self.beta2)
        return new

    def _make(
        self, block: Block, numbers: Numbers, members: Sequence[int], weights: Tensor | None, views: Views
    ) -> None:
        """The averages of one bucket, its views, and its sums."""
        columns = [block.params, self.grads, self.averages, *([] if self.squares is None else [self.squares])]
        x, g, d, *squares = map(widened, join_all([[ts[i] for i in members] for ts in columns]))
        g = g.to(d.dtype)
        d = torch.lerp(d, g, self.weights.new.to(d.dtype))
        shapes = [self.grads[i].shape for i in members]
        _spread_views(views.slopes, members, shapes, d)
        self._new.append([d])
        if weights is None:
            self._add_up(block, numbers, x, g, d)
            return
        (v,) = squares
        own = weights.to(v.dtype).unbind()
        v = torch.lerp(v, g * g, torch.cat([own[i].expand(self.grads[i].numel()) for i in members]))
        D = metric(v, self.eps)
        if self.eps < least_metric(v.dtype):
            D = D.clamp_min(least_metric(v.dtype))
        # Where the square of a gradient overflows, NaN reaches the sums that are checked; infinity would not.
        D = torch.nan_to_num(D, nan=math.nan, posinf=math.nan)
        e = d / D
        _spread_views(views.directions, members, shapes, e)
        if block.kind != LINES:
            _spread_views(views.metrics, members, shapes, D)
        self._new[-1].append(v)
        self._add_up(block, numbers, x, g, d, (e, g / D))

    def _add_up(
        self, block: Block, numbers: Numbers, x: Tensor, g: Tensor, d: Tensor, over: tuple[Tensor, ...] = ()
    ) -> None:
        """The sums of one bucket; in a metric, D^-1 d and D^-1 g are `over` it."""
        line = block.kind == LINES and not block.centered
        slopes = [g, d] if line else [g]
        lengths = [*slopes, *(over if self.moves else over[1:])]
        norms = torch.stack(torch._foreach_norm(lengths, 2, numbers.dtype))
        scales, squares = scale_of(norms), norms.square()
        # Divided by their norms, so that products stay in the range of f32.
        scaled = [t / scale for t, scale in zip(slopes, scales, strict=False)]
        dots = torch.stack([torch.dot(t, x) for t in scaled]) * scales[: len(scaled)]
        self._found[0].append(dots[0])
        self._found[1].append(squares[-1] if over else squares[0])
        if line:
            self._line[0].append(torch.dot(scaled[1], over[0]) * scales[1] if over else squares[1])
            self._line[1].append(dots[1])
        if self.moves and over:
            self._found[3].append(squares[-2])
            self._found[4].append(torch.dot(over[0], x))

    def line_sums(self) -> list[list[Tensor]]:
        """<d, D^-1 d> and <d, x> of the buckets of a block without a search, from the pass that made the averages."""
        return self._line

    def extras(self, numbers: Numbers, block: Block) -> list[Array]:
        """From the pass that made the averages."""
        sums = [numbers.total(parts) if parts else 0.0 for parts in self._found]
        return self._centered(numbers, block, sums)

    def keep(self, ok: Array, store: Store) -> None:
        """Write the new averages if the step is taken."""
        columns = [self.averages, *([] if self.squares is None else [self.squares])]
        for members, vectors in zip(self._members if self.made else (), self._new if self.made else (), strict=True):
            held = [[column[i] for i in members] for column in columns]
            chosen = [torch.where(ok, new, old) for new, old in zip(vectors, join_all(held), strict=True)]
            if self.in_place:
                spread_all(chosen, held)
                continue
            for key, vector, tensors in zip(("average", "square"), chosen, held, strict=False):
                parts = vector.split([t.numel() for t in tensors])
                for i, part, t in zip(members, parts, tensors, strict=True):
                    store(i, key, part.view(t.shape))


def _buckets(params: Sequence[Tensor], grads: Sequence[Tensor], size: int) -> Iterator[list[int]]:
    """Places of tensors of one dtype that are joined."""
    found: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    room: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for i, (x, g) in enumerate(zip(params, grads, strict=True)):
        key = x.dtype, g.dtype
        if key in found and x.numel() > room[key]:
            yield found.pop(key)
        if key not in found:
            found[key], room[key] = [], size
        found[key].append(i)
        room[key] -= x.numel()
    yield from found.values()


def _spread_views(
    tensors: dict[int, Tensor], members: Sequence[int], shapes: Sequence[torch.Size], vector: Tensor
) -> None:
    """Put views of a vector, in these shapes, at the positions of the members."""
    parts = vector.split([math.prod(shape) for shape in shapes])
    for i, part, shape in zip(members, parts, shapes, strict=True):
        tensors[i] = part.view(shape)


def overflows(g: Tensor) -> bool:
    """Whether the square of an entry is beyond the range of its dtype: v would stay infinite."""
    return g.numel() > 0 and not math.isfinite(widened(g).abs().amax().square().item())


def metrics(squares: list[Tensor], eps: float) -> list[Tensor]:
    """D = sqrt(v) + eps of each tensor; if eps is almost 0, entries without a gradient get a D above 0."""
    found = list(torch._foreach_sqrt(squares))
    if eps:
        torch._foreach_add_(found, eps)
    for D in found:
        if eps < least_metric(D.dtype):
            D.clamp_min_(least_metric(D.dtype))
    return found


def least_metric(dtype: torch.dtype) -> float:
    """A lower bound for D: a smaller eps may be 0 in the precision of the tensors."""
    return math.sqrt(torch.finfo(dtype).tiny)
