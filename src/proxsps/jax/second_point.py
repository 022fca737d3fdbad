"""The schedule-free form: what a step keeps of its two points, its model, and the points after it.

Parameters are y, the points of gradients. The formulas are those of `proxsps.core.schedule_free`; here they are applied
to all tensors of a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.caps import shares
from proxsps.core.distance import Travel, distance_cap
from proxsps.core.estimate import Weights, averaged
from proxsps.core.schedule_free import (
    CLEANING,
    SCALE,
    Averaging,
    average,
    gradient_point,
    gradient_weights,
    next_share,
    orthogonalized,
    zeros_of_average,
)
from proxsps.jax.groups import TreeBlock, is_parameter, parameters
from proxsps.jax.measured import prox_at
from proxsps.jax.moments import Estimate, Held, Kind, advanced, begin_travel, separate, with_metric
from proxsps.jax.parts import like
from proxsps.jax.passes import dot
from proxsps.regularizers._support import wide
from proxsps.regularizers.structure import group_dims

HUGE, DOWN = 1e15, 2.0**-64  # entries of f32 whose squares may overflow, and what they are multiplied by
COARSE = float(jnp.finfo(jnp.bfloat16).eps)


class Matrix(NamedTuple):
    """How a tensor is read as matrices: reshaped to three axes, one of which counts them."""

    shape: tuple[int, int, int]
    axis: int = 0

    def read(self, x: Array) -> Array:
        """The matrices, along the first axis."""
        return jnp.moveaxis(x.reshape(self.shape), self.axis, 0)

    def written(self, matrices: Array, shape: tuple[int, ...]) -> Array:
        """The tensor of these matrices."""
        return jnp.moveaxis(matrices, 0, self.axis).reshape(shape)


class ScheduleFreeMoments(NamedTuple):
    """What `schedule_free_sps` keeps; trees have the structure of the parameters, and entries in at least f32.

    A parameter has z and one moment, so arrays in the trees that it does not need have no entries.
    """

    z: Any  # the point that steps move
    y: Any  # that of gradients, for parameters of half precision
    average: Any  # d, the average gradient of a matrix with a spectral direction
    square: Any  # v, the average square of the gradient of every other parameter
    zeros: Any  # where the average is 0 when it is evaluated, for parameters with a regulariser
    steps: Array  # the number of gradients of each parameter so far, for the weights of v
    start: Array  # a sample of each parameter at the start, in one vector, set by set
    travel: Travel  # the numbers of the distance cap of each set
    averaging: Averaging  # the numbers of the average x
    rho_sq: Array  # what averaging leaves of the variance of noise in d
    tau: Array  # the last step above 0 of each block
    mix: Array  # b, the part of x in y


def start_points(
    kind: Kind, owners: Sequence[int], params: Any, numbers: Mapping[str, Any], dtype: Any
) -> ScheduleFreeMoments:
    """The state before the first step, for a run that starts from these parameters."""
    held = iter([kind.second[owner] for owner in owners])
    roles = jax.tree.map(lambda x: next(held) if is_parameter(x) else None, params)

    def tree(keeps: Any, make: Any) -> Any:
        def leaf(x: Any, own: Any) -> Any:
            if own is None:
                return None
            x = jnp.asarray(x)
            return make(wide(x) if keeps(x, own) else jnp.zeros(0, wide(x).dtype))

        return jax.tree.map(leaf, params, roles, is_leaf=lambda x: isinstance(x, Held))

    zero, sets = jnp.zeros((), dtype), 1 + max(own.set for own in kind.second)
    xs = [wide(jnp.asarray(x)) for x in parameters(params)]
    begun = [begin_travel(_members(xs, owners, kind, i), dtype) for i in range(sets)]
    return separate(
        ScheduleFreeMoments(
            z=tree(lambda x, own: True, lambda x: x),
            y=tree(lambda x, own: x.dtype != wide(x).dtype, lambda x: x),
            average=tree(lambda x, own: own.spectral, jnp.zeros_like),
            square=tree(lambda x, own: not own.spectral, jnp.zeros_like),
            zeros=tree(lambda x, own: own.cleans, lambda x: x == 0),
            steps=jnp.zeros(len(xs), dtype),
            start=jnp.concatenate([start for start, _ in begun]),
            travel=jax.tree.map(lambda *own: jnp.stack(own), *(travel for _, travel in begun)),
            averaging=Averaging(zero, zero),
            rho_sq=zero,
            tau=jnp.zeros(len(kind.second), dtype),
            mix=jnp.asarray(numbers["b1"], dtype),
        )
    )


def _members(xs: Sequence[Array], owners: Sequence[int], kind: Kind, place: int) -> list[Array]:
    """The tensors of a set."""
    return [x for x, owner in zip(xs, owners, strict=True) if kind.second[owner].set == place]


def take_in_points(
    kind: Kind,
    numbers: Mapping[str, Any],
    before: ScheduleFreeMoments,
    blocks: Sequence[TreeBlock],
    owners: Sequence[int],
    rest: Sequence[tuple[int, Array]],
    value: Array,
) -> Estimate:
    """The model at z from a loss and its gradients at y; `owners` are the blocks of all parameters."""
    made, f = [], value
    for block in blocks:
        ys, zs = _points(before, block)
        value = value + dot(block.ds, [z - y for y, z in zip(ys, zs, strict=True)], value.dtype)
        made.append(block._replace(xs=zs))
    adam = [i for i, own in enumerate(kind.second) if not own.spectral]
    found, after = with_metric(numbers, before, [made[i] for i in adam])
    for i, block in zip(adam, found, strict=True):
        made[i] = block
    made, after = _with_directions(kind, after, made)
    xs = _averages(before, blocks, rest)
    tensors = [_members(xs, owners, kind, i) for i in range(len(before.travel.reach))]
    after = after._replace(travel=advanced(kind, before.travel, before.start, made, tensors, after.rho_sq))
    caps = distance_cap(after.travel, SCALE)
    rates = jnp.stack([block.alpha for block in blocks])
    longest, limited = jnp.max(caps), caps if kind.factors else jnp.minimum(caps, jnp.max(rates))
    _, parts = shares(limited)
    sound = jnp.isfinite(jnp.stack([f, value, after.rho_sq, *(jnp.sum(part) for part in after.travel)]))
    of_blocks = parts[jnp.asarray([own.set for own in kind.second])]
    return Estimate(made, value, longest, jnp.all(sound), after, of_blocks)


def _points(before: ScheduleFreeMoments, block: TreeBlock) -> tuple[list[Array], list[Array]]:
    """y and z of a block, whose tensors are parameters."""
    pairs = zip(block.places, block.xs, strict=True)
    return [kept_point(before.y[i], x) for i, x in pairs], [before.z[i] for i in block.places]


def kept_point(y: Array, shown: Any) -> Array:
    """y of a parameter: the one kept for half precision, but for entries that the user has changed since.

    Parameters are sums of rounded updates, so that a difference within the rounding of bf16 is no change.
    """
    shown = wide(jnp.asarray(shown))
    return jnp.where(jnp.abs(shown - y) <= COARSE * (jnp.abs(shown) + jnp.abs(y)), y, shown) if y.size else shown


def _averages(
    before: ScheduleFreeMoments, blocks: Sequence[TreeBlock], rest: Sequence[tuple[int, Array]]
) -> list[Array]:
    """x of all parameters, in their order."""
    shown = dict(rest) | {i: y for block in blocks for i, y in zip(block.places, block.xs, strict=True)}
    ys = {i: kept_point(before.y[i], shown[i]) for i in sorted(shown)}
    return [average(y, before.z[i], like(before.mix, y)) for i, y in ys.items()]


def _with_directions(
    kind: Kind, before: ScheduleFreeMoments, blocks: Sequence[TreeBlock]
) -> tuple[list[TreeBlock], ScheduleFreeMoments]:
    """Blocks with spectral directions, and moments with the new average gradients."""
    mu, rho_sq = gradient_weights(before.travel.taken[0], before.rho_sq)
    slopes, out = list(before.average), []
    for own, block in zip(kind.second, blocks, strict=True):
        if own.spectral:
            for g, place in zip(block.ds, block.places, strict=True):
                slopes[place] = averaged(slopes[place], g, Weights(like(mu, g), like(1 - mu, g)))
            ds = [slopes[place] for place in block.places]
            block = block._replace(ds=ds, along=_directions(ds, block.matrices, jnp.sqrt(rho_sq)))
        out.append(block)
    return out, before._replace(average=slopes, rho_sq=rho_sq)


def _directions(ds: Sequence[Array], matrices: Sequence[Matrix], rho: Array) -> list[Array]:
    """p of each tensor; matrices of one shape are orthogonalised together."""
    stacks: dict[Any, list[int]] = defaultdict(list)
    read = [matrix.read(d) for d, matrix in zip(ds, matrices, strict=True)]
    for i, own in enumerate(read):
        stacks[own.shape[1:], own.dtype].append(i)
    out = list(ds)
    for (sides, _), members in stacks.items():
        stack = jnp.concatenate([read[i] for i in members]) if len(members) > 1 else read[members[0]]
        scale = jnp.where(jnp.max(jnp.abs(stack), axis=(-2, -1), keepdims=True) > HUGE, DOWN, 1.0).astype(stack.dtype)
        p, first = orthogonalized(stack * scale) * like(rho * math.sqrt(max(sides)), stack), 0
        for i in members:
            out[i] = matrices[i].written(p[first : first + len(read[i])], ds[i].shape)
            first += len(read[i])
    return out


def next_points(
    kind: Kind,
    numbers: Mapping[str, Any],
    before: ScheduleFreeMoments,
    blocks: Sequence[TreeBlock],
    estimate: Estimate,
    moved: Sequence[Sequence[Array]],
    sizes: tuple[Array, Array],
) -> tuple[list[list[Array]], ScheduleFreeMoments]:
    """The moves of y, tensor by tensor, and the moments after the step.

    Args as in `take_in`, then the model of the step, the moves of z, and the sizes of the step and of each block.
    """
    after: ScheduleFreeMoments = estimate.after
    share, averaging = next_share(before.averaging, before.travel.taken[0], sizes[0])
    tau = jnp.where(sizes[1] > 0, sizes[1], before.tau)
    mix = jnp.asarray(numbers["b1"], before.mix.dtype)
    new_z, new_y, zeros, out = list(before.z), list(before.y), list(before.zeros), []
    for j, (own, block, model) in enumerate(zip(kind.second, blocks, estimate.blocks, strict=True)):
        ys, zs = _points(before, block)
        points, moves = [], []
        for i, shown, y, z, move in zip(block.places, block.xs, ys, zs, moved[j], strict=True):
            x, new_z[i] = average(y, z, like(before.mix, y)), z + move
            points.append(x + like(share, y) * (new_z[i] - x))
            y = gradient_point(points[-1], new_z[i], like(mix, y))
            moves.append(y - shown)
            new_y[i] = y if before.y[i].size else before.y[i]
        out.append(moves)
        if own.cleans:
            forms = [None] * len(points) if block.phi.joint else block.structures
            ends = prox_at(model, points, CLEANING * tau[j])
            for i, x, end, form in zip(block.places, points, ends, forms, strict=True):
                zeros[i] = zeros_of_average(x, new_z[i], end, group_dims(form, x.ndim))
    return out, after._replace(z=new_z, y=new_y, zeros=zeros, averaging=averaging, tau=tau, mix=mix)
