"""What a step keeps from earlier steps: averages of the model, Adam's metric, and the distance from the start.

The formulas are those of `proxsps.core.estimate` and `proxsps.core.distance`. Here they are applied to all tensors of a
step, and the sums over them are added up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.caps import shares
from proxsps.core.distance import Travel, advance_travel, distance_cap, moving_weights, start_reach
from proxsps.core.estimate import (
    Averages,
    Weights,
    averaged,
    averaged_value,
    corrected_weights,
    momentum_weights,
    start_averages,
    update_averages,
)
from proxsps.core.sampling import sampled_square
from proxsps.core.schedule_free import counted
from proxsps.jax.checks import check_sample
from proxsps.jax.groups import TreeBlock, is_parameter, parameters
from proxsps.jax.passes import SHORT, dot, flat_sample
from proxsps.regularizers._support import wide

T = TypeVar("T")


class Held(NamedTuple):
    """What is kept of a block."""

    set: int  # which distance cap it has
    spectral: bool = False  # whether its directions are orthogonalised
    cleans: bool = False  # whether its regulariser has zeros


class Kind(NamedTuple):
    """What a method keeps."""

    averages: bool = False  # momentum
    metric: bool = False  # Adam's
    distance: bool = False  # the distance cap
    factors: bool = False  # whether there is no learning rate, and caps are factors on the step
    second: tuple[Held, ...] = ()  # what the schedule-free form keeps of each block

    @property
    def any(self) -> bool:
        """Whether there is anything to keep."""
        return self.averages or self.metric or self.distance

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of `Moments` that hold it, without trees, which may be empty."""
        if self.second:
            return "steps", "start", "travel", "averaging", "tau"
        return ("averages",) * self.averages + ("steps",) * self.metric + ("start", "travel") * self.distance


class Moments(NamedTuple):
    """What `prox_sps` and `prox_sps_adam` keep; fields that a variant does not need are empty.

    Trees have the structure of the parameters, and entries in at least f32.
    """

    average: Any = ()  # d, the average gradient, a tree
    averages: Averages | tuple[()] = ()  # the numbers of the averaged model
    square: Any = ()  # v, the average square of the gradient, a tree
    steps: Array | tuple[()] = ()  # the number of gradients of each parameter so far, for the weights of v
    start: Array | tuple[()] = ()  # a sample of each parameter at the start, in one vector, ordered by size
    travel: Travel | tuple[()] = ()  # the numbers of the distance cap


def start_moments(kind: Kind, params: Any, dtype: Any) -> Moments:
    """The state before the first step, for a run that starts from these parameters."""
    zeros = jax.tree.map(lambda x: jnp.zeros_like(wide(jnp.asarray(x))) if is_parameter(x) else None, params)
    xs, zero = [wide(jnp.asarray(x)) for x in parameters(params)], jnp.zeros((), dtype)
    out = Moments()
    if kind.averages:
        out = out._replace(average=zeros, averages=start_averages(zero))
    if kind.metric:
        out = out._replace(square=zeros, steps=jnp.zeros(len(xs), dtype))
    if kind.distance:
        start, travel = begin_travel(xs, dtype)
        out = out._replace(start=start, travel=travel)
    return separate(out)


def begin_travel(xs: Sequence[Array], dtype: Any) -> tuple[Array, Travel]:
    """A sample of the tensors at the start, and the numbers of their distance cap."""
    samples, zero = _samples(xs), jnp.zeros((), dtype)
    x_sq = sum((sampled_square(part, n).astype(dtype) for part, n in samples), zero)
    start = jnp.concatenate([jnp.zeros(0, dtype), *(part.astype(dtype) for part, _ in samples)])
    return start, Travel(zero, zero, zero, start_reach(root(x_sq)), zero)


def separate(state: T) -> T:
    """State in which every array has its own buffer, so that it can be donated to a jitted step."""
    return cast(T, jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state))


class Estimate(NamedTuple):
    """The model of a step, and the moments after the step if it is taken."""

    blocks: Sequence[TreeBlock]  # with its slopes and its metric
    value: Array  # m
    farthest: Array | None = None  # the distance cap
    sound: Array | None = None  # whether loss, gradients and all new numbers may be used; None if not checked
    after: Any = Moments()  # with lists for trees
    parts: Array | None = None  # of this cap for each block, if blocks have distance caps of their own


def take_in(
    kind: Kind,
    numbers: Mapping[str, Any],
    before: Moments,
    blocks: Sequence[TreeBlock],
    rest: Sequence[tuple[int, Array]],
    value: Array,
) -> Estimate:
    """The model from a loss and its gradients.

    A parameter without a gradient rests: neither it nor its averages change.

    Args:
        kind: what is kept.
        numbers: the constants of the averages: b1, and b2 and eps of a metric.
        before: the moments before the step, with lists for trees.
        blocks: parameters with their gradients.
        rest: parameters without a gradient, each with its position among all.
        value: the loss.
    """
    made, after, checked = list(blocks), before, [value]
    farthest = None
    if kind.metric:
        made, after = with_metric(numbers, after, made)
    if kind.distance:
        xs = dict(rest) | {place: x for block in made for x, place in zip(block.xs, block.places, strict=True)}
        tensors = [wide(jnp.asarray(xs[place])) for place in sorted(xs)]
        one = Travel(*(part[None] for part in cast(Travel, before.travel)))
        travel = Travel(*(part[0] for part in advanced(kind, one, cast(Array, before.start), made, [tensors])))
        farthest, after = distance_cap(travel), after._replace(travel=travel)
        checked += [*travel]
    if kind.averages:
        made, value, after = _with_averages(kind, numbers, after, made, rest, value)
        checked += [value, *after.averages]
    return Estimate(made, value, farthest, jnp.all(jnp.isfinite(jnp.stack(checked))), after)


def kept(ok: Array, after: T, before: T) -> T:
    """The moments after the step: the new ones if it was taken, else the old ones."""
    chosen: T = jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, before)
    return chosen


def with_metric(numbers: Mapping[str, Any], before: Any, blocks: Sequence[TreeBlock]) -> tuple[list[TreeBlock], Any]:
    """Blocks in Adam's metric, and moments with the new squares."""
    weights = corrected_weights(before.steps, numbers["b2"])
    squares, steps, out = list(before.square), cast(Array, before.steps), []
    present = {place for block in blocks for place in block.places}
    for block in blocks:
        for g, place in zip(block.ds, block.places, strict=True):
            squares[place] = averaged(squares[place], g * g, _like(Weights(*(w[place] for w in weights)), g))
        out.append(block._replace(metric=[_usable(root(squares[place]) + numbers["eps"]) for place in block.places]))
    # Added all at once: one update after the other would be one loop each for the compiler.
    taken = jnp.asarray([float(place in present) for place in range(len(squares))], steps.dtype)
    return out, before._replace(square=squares, steps=steps + taken)


def _usable(D: Array) -> Array:
    """The metric, with a lower bound in case that eps is 0 in this precision, and NaN where a square was too large.

    NaN reaches the sums of the model, so that the step is skipped; infinity would not, and v would stay infinite.
    """
    return jnp.where(jnp.isfinite(D), jnp.maximum(D, math.sqrt(jnp.finfo(D.dtype).smallest_normal)), jnp.nan)


def advanced(
    kind: Kind,
    travel: Travel,
    start: Array,
    blocks: Sequence[TreeBlock],
    sets: Sequence[Sequence[Array]],
    rho_sq: Array | float = 1.0,
) -> Travel:
    """The numbers of distance caps, one per set of tensors, updated with the current point; rho of spectral blocks."""
    dtype = travel.reach.dtype
    held = kind.second or [Held(0)] * len(blocks)
    factor, share = shares(jnp.stack([block.alpha for block in blocks]))
    g_sq = [jnp.zeros((), dtype)] * len(sets)
    weights, own_factor = moving_weights(share), jnp.ones((), dtype)
    divisor = own_factor
    if kind.factors:  # the factor of a set is the largest one of its blocks; the average of a set that rests goes on
        places = jnp.asarray([own.set for own in held])
        largest = jnp.zeros(len(sets), dtype).at[places].max(share.astype(dtype))
        resting, own_factor = largest <= 0, factor.astype(dtype) * largest
        weights, divisor = (share + resting[places]) ** 2, largest**2 + resting
    for own, block, weight in zip(held, blocks, weights, strict=True):
        ps = block.directions(block.ds)
        q = dot(ps, ps, dtype)
        q = counted(q / rho_sq, sum(p.size for p in ps)) if own.spectral else q
        g_sq[own.set] = g_sq[own.set] + weight * q.astype(dtype)
    moved = root(jnp.stack(distances_sq(start, sets)))
    return advance_travel(travel, moved, jnp.stack(g_sq) / divisor, own_factor)


def distances_sq(origin: Array, sets: Sequence[Sequence[Array]]) -> list[Array]:
    """The squared distance of each set of tensors from its start; samples of all of them are in one vector."""
    samples = [_samples(xs) for xs in sets]
    check_sample(origin.size, sum(part.size for own in samples for part, _ in own))
    found, offset = [], 0
    for own in samples:
        moved_sq = jnp.zeros((), origin.dtype)
        for part, n in own:
            start = origin[offset : offset + part.size].astype(part.dtype)
            moved_sq = moved_sq + sampled_square(part, n, start).astype(origin.dtype)
            offset += part.size
        found.append(moved_sq)
    return found


@jax.custom_jvp
def root(square: Array) -> Array:
    """The square root of a sum of squares.

    Its derivative at 0 is 0 here: that of the squares is 0, and JAX would multiply it by infinity, where a run has not
    left its start and where an entry never had a gradient.
    """
    return jnp.sqrt(square)


@root.defjvp
def _root_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    found = root(*primals)
    return found, jnp.where(found == 0, 0.0, tangents[0] / (2 * jnp.where(found == 0, 1.0, found)))


def _samples(xs: Sequence[Array]) -> list[tuple[Array, int]]:
    """The sampled entries of all tensors, each part with the number of entries that it stands for.

    Short tensors of one size are one part, as if they were one tensor: a sum for each of hundreds would cost more.
    """
    parts: dict[Any, list[Array]] = defaultdict(list)
    for i, x in enumerate(xs):
        parts[(x.size, x.dtype) if x.size <= SHORT else i].append(x)
    joined = [(members, [flat_sample(x) for x in members]) for members in parts.values()]
    return [(jnp.concatenate(own) if len(own) > 1 else own[0], sum(x.size for x in xs)) for xs, own in joined]


def _with_averages(
    kind: Kind,
    numbers: Mapping[str, Any],
    before: Moments,
    blocks: Sequence[TreeBlock],
    rest: Sequence[tuple[int, Array]],
    value: Array,
) -> tuple[list[TreeBlock], Array, Moments]:
    """Blocks with averaged slopes, the value of the averaged model, and moments with the new averages."""
    weigh = corrected_weights if kind.metric else momentum_weights
    numbers_before = cast(Averages, before.averages)
    weights = weigh(numbers_before.taken, numbers["b1"])
    slopes, out = list(before.average), []
    g_dot_x, d_dot_x = jnp.zeros_like(value), jnp.zeros_like(value)
    for block in blocks:
        for g, place in zip(block.ds, block.places, strict=True):
            slopes[place] = averaged(slopes[place], g, _like(weights, g))
        ds = [slopes[place] for place in block.places]
        g_dot_x = g_dot_x + dot(block.ds, block.xs, value.dtype)
        d_dot_x = d_dot_x + dot(ds, block.xs, value.dtype)
        out.append(block._replace(ds=ds))
    at_rest = dot([slopes[place] for place, _ in rest], [wide(jnp.asarray(x)) for _, x in rest], value.dtype)
    g_dot_x, d_dot_x = g_dot_x + at_rest, d_dot_x + at_rest
    averages = update_averages(numbers_before, value, g_dot_x, weights)
    return out, averaged_value(value, averages, d_dot_x), before._replace(average=slopes, averages=averages)


def _like(weights: Weights, x: Array) -> Weights:
    return Weights(*(w.astype(x.dtype) for w in weights))
