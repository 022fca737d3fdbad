"""Passes over memory: several sums in one loop, and short arrays joined into one long array.

The compiler makes a separate loop for every sum. So a pass that needs several sums computes them in one reduction, and
reads many short arrays as one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from operator import add
from typing import Any

import jax
import jax.numpy as jnp

from proxsps.core.array import Array
from proxsps.core.sampling import block_bits, position, sample_size

SHORT = 1 << 16  # entries up to which arrays are joined; long ones stay where they are, perhaps on several devices
RUN = 1 << 7  # entries of a joined array that are added up one after the other
RUNS = 1 << 6, 1 << 10  # entries of other arrays that are: about this many, and at most this many


def dot(left: Sequence[Array], right: Sequence[Array], dtype: Any) -> Array:
    """Inner product of two lists of arrays."""
    parts = [jnp.sum(a * b, dtype=dtype) for a, b in zip(left, right, strict=True)]
    return jnp.sum(jnp.stack(parts)) if parts else jnp.zeros((), dtype)


def joined(
    xs: Sequence[Array], ds: Sequence[Array], metrics: Sequence[Array] | None = None
) -> list[tuple[Array, Array, Array | None]]:
    """Arrays x, d and D, those that are short as one matrix of each dtype, which is filled up with zeros and D = 1.

    Arrays whose type says that they are sharded stay as they are, because their entries have no single order.
    """
    out, short = [], defaultdict(list)
    for x, d, metric in zip(xs, ds, metrics or [None] * len(xs), strict=True):
        if x.size <= SHORT and not (is_sharded(x) or is_sharded(d)):
            short[x.dtype].append((x, d, metric))
        else:
            out.append((x, d, metric))
    for members in short.values():
        if len(members) > 1:
            *pair, metrics = zip(*members, strict=True)
            x, d = map(_matrix, pair)
            out.append((x, d, None if metrics[0] is None else _matrix(metrics, 1)))
        else:
            out += members
    return out


def _matrix(arrays: Sequence[Array], fill: int = 0) -> Array:
    """All entries in rows of one length."""
    flat = [x.reshape(-1) for x in arrays]
    rest = -sum(x.size for x in flat) % RUN
    return jnp.concatenate([*flat, jnp.full(rest, fill, flat[0].dtype)]).reshape(-1, RUN)


def add_up(terms: Sequence[Array], axes: Sequence[int] | None = None) -> list[Array]:
    """The sum of each of some arrays of one shape over these axes (None: all), in one pass.

    A reduction of several arrays adds up entry after entry, which would round a long sum more and more. So it takes
    runs of entries along the last axes, and the sums of the runs are added up as usual. Axes that are too long for a
    run are not cut, because they may be divided among devices that would have to gather them first; there each sum has
    its own pass.
    """
    shape = terms[0].shape
    axes = range(len(shape)) if axes is None else sorted(axis % len(shape) for axis in axes)
    if axes and shape[axes[-1]] > RUNS[1]:
        return [jnp.sum(term, axis=tuple(axes)) for term in terms]
    inner: list[int] = []
    size = 1
    for axis in reversed(axes):
        if size >= RUNS[0] or (inner and size * shape[axis] > RUNS[1]):
            break
        inner.append(axis)
        size *= shape[axis]
    outer = tuple(axis - sum(i < axis for i in inner) for axis in axes if axis not in inner)
    runs = _reduce(tuple(terms), tuple(inner))
    return [jnp.sum(run, axis=outer) for run in runs] if outer else list(runs)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _reduce(terms: tuple[Array, ...], axes: tuple[int, ...]) -> tuple[Array, ...]:
    zeros = tuple(jnp.zeros((), term.dtype) for term in terms)
    return tuple(jax.lax.reduce(terms, zeros, lambda a, b: tuple(map(add, a, b)), axes))


@_reduce.defjvp
def _reduce_jvp(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    # JAX's own rule is for any function of two entries, and raises where some of the terms are constant.
    ((terms,), (directions,)) = primals, tangents
    return _reduce(terms, axes), tuple(jnp.sum(direction, axis=axes) for direction in directions)


def is_sharded(x: Array) -> bool:
    """Whether the type of an array says that its axes are divided among devices (JAX's explicit sharding)."""
    if not hasattr(jax, "typeof"):  # as in versions without explicit sharding
        return False
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


def gathered(x: Array) -> Array:
    """A few numbers on one axis, whole on every device that held a part of them."""
    if is_sharded(x):
        x = jax.sharding.reshard(x, _whole(x))
    return x.reshape(-1)


def flat_sample(x: Array) -> Array:
    """The sampled entries of an array for the distance cap, as one vector that is whole on every device.

    Entries of long arrays are taken by their indices along all axes: the flat array would be gathered first where its
    last axis is divided among devices.
    """
    if block_bits(x.size) == 0:
        return gathered(x)
    entries = x.at[_sampled_places(x.shape)]
    if is_sharded(x):
        return entries.get(out_sharding=_whole(x))
    return entries.get(mode="promise_in_bounds")


def _sampled_places(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """The indices of the sampled entries by axis; the flat index may be beyond the range of int32."""
    width, n = shape[-1], math.prod(shape)
    bits, block = block_bits(n), jnp.arange(sample_size(n), dtype="uint32")
    column = (block % width << bits) + position(block, bits)  # counted from the row that `width` blocks begin with
    row = (block // width << bits) + column // width
    leading = jnp.unravel_index(row.astype(int), shape[:-1]) if len(shape) > 1 else ()
    return *leading, (column % width).astype(int)


def _whole(x: Array) -> Any:
    """The sharding of a few numbers that all devices of a sharded array have."""
    return jax.sharding.NamedSharding(jax.typeof(x).sharding.mesh, jax.sharding.PartitionSpec())


def spread(values: Sequence[Any], counts: Sequence[int], dtype: Any) -> Any:
    """One number per row, from values and the number of rows of each; a single number if all are equal."""
    first = values[0]
    if all(value is first or (_known(value) and _known(first) and value == first) for value in values):
        return first
    places = [i for i, count in enumerate(counts) for _ in range(count)]
    return jnp.stack([jnp.asarray(value, dtype) for value in values])[jnp.asarray(places, int)]


def _known(value: Any) -> bool:
    return isinstance(value, (int, float))
