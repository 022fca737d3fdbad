"""The step of every method as one compiled function.

JAX caches compiled code by the functions it was made from, so conditionals and loops over closures that each call
builds again are compiled in each call. So `update` outside of `jax.jit` passes everything to the one function here: it
is compiled once for each method, regulariser and shapes. Inside of `jax.jit` it becomes part of the program around it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from proxsps.core.array import Array
from proxsps.core.caps import matched_decision, shares
from proxsps.core.estimate import coupled_slope, coupled_value
from proxsps.core.outcome import Report, Solution, report
from proxsps.core.step import relaxation
from proxsps.jax.groups import Gathered, TreeBlock
from proxsps.jax.measured import make_part
from proxsps.jax.model import linear_model
from proxsps.jax.moments import Estimate, Kind, kept, take_in
from proxsps.jax.parts import like
from proxsps.jax.passes import dot
from proxsps.jax.second_point import next_points, take_in_points
from proxsps.regularizers import L2, Regularizer, Zero
from proxsps.regularizers._identity import constants, identity
from proxsps.regularizers.base import subgradient_all, value_all


class JaxMethod(NamedTuple):
    """What distinguishes one method from another."""

    name: str
    rule: Callable[..., Any]  # one of `core.rules`
    bounded: bool = True  # whether there is a lower bound, so that the loss is needed
    coupled: bool = False  # whether the regulariser is part of the loss
    remembers: bool = False  # whether its rule has a memory of earlier steps
    moments: Kind = Kind()  # what else is kept
    matched: bool = False  # whether the regulariser has the step size of the step
    numbers: tuple[tuple[str, float], ...] = ()  # constants that are known when code is compiled


class Frame:
    """A regulariser without its arrays: what compiled code is made for, and kept by."""

    def __init__(self, phi: Regularizer) -> None:
        self.phi = phi
        self._key = identity(phi)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def filled(self, arrays: dict[str, Any]) -> Regularizer:
        """The regulariser with arrays, which may be traced."""
        return _replaced(self.phi, arrays)


def framed(phi: Regularizer) -> tuple[Frame, dict[str, Any]]:
    """A regulariser in two parts: its frame, and the arrays that are arguments of compiled code, by name.

    These are JAX arrays, which your own code can use when traced, and centres. NumPy arrays in your own regulariser
    stay in the frame, by content.
    """
    kinds = (jax.Array, np.ndarray) if isinstance(phi, L2) else jax.Array
    arrays = {
        name: value
        for name, value in constants(phi).items()
        if (leaves := jax.tree.leaves(value)) and all(isinstance(leaf, kinds) for leaf in leaves)
    }
    return Frame(_replaced(phi, dict.fromkeys(arrays)) if arrays else phi), arrays


def _replaced(phi: Regularizer, values: dict[str, Any]) -> Regularizer:
    """A copy with other values, which are not checked again."""
    out = copy.copy(phi) if values else phi
    for name, value in values.items():
        object.__setattr__(out, name, value)
    return out


class Layout(NamedTuple):
    """What compiled code is made for beside dtypes and shapes."""

    blocks: tuple[tuple[Any, ...], ...]  # of each block what `_split` returns first
    rest: tuple[int, ...]  # places of the parameters without a gradient, if they matter
    owners: tuple[int, ...]  # the block of every parameter


def _split(block: TreeBlock) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What compiled code is made for, and its arguments."""
    frame, arrays = framed(block.phi)
    fixed = (frame, tuple(block.indices), tuple(block.places), block.decoupled, tuple(block.matrices))
    return fixed, (arrays, block.alpha, block.xs, block.ds)


def _joined(fixed: tuple[Any, ...], own: tuple[Any, ...]) -> TreeBlock:
    """The inverse of `_split`."""
    (frame, indices, places, decoupled, matrices), (arrays, alpha, xs, ds) = fixed, own
    return TreeBlock(frame.filled(arrays), alpha, xs, ds, indices, places, decoupled, matrices=matrices)


def solve(
    method: JaxMethod, gathered: Gathered, value: Array, bound: Array, memory: Any, constants: Mapping[str, Any]
) -> tuple[list[list[Array]], Report, Any]:
    """One step: the moves of each block's tensors, the report, and the method's memory after it.

    Args:
        method: the method.
        gathered: the parameters, by blocks.
        value: the loss, without regulariser.
        bound: its lower bound C.
        memory: state of the method from earlier steps.
        constants: the method's constants that are not among its numbers, for instance `c` of `sps`.
    """
    fixed, own = zip(*map(_split, gathered.blocks), strict=True)
    rest = gathered.rest if method.moments.any else []
    layout = Layout(fixed, tuple(place for place, _ in rest), tuple(gathered.owners))
    solved: tuple[list[list[Array]], Report, Any] = _solve(
        method, layout, own, [x for _, x in rest], value, bound, memory, dict(constants)
    )
    return solved


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _solve(
    method: JaxMethod,
    layout: Layout,
    own: Sequence[tuple[Any, ...]],
    resting: Sequence[Array],
    value: Array,
    bound: Array,
    memory: Any,
    constants: dict[str, Any],
) -> tuple[list[list[Array]], Report, Any]:
    blocks: Sequence[TreeBlock] = list(map(_joined, layout.blocks, own))
    if method.coupled:
        value, blocks = _couple(value, blocks)
    if not method.moments.any:
        plain = _step(method, Estimate(blocks, value), bound, memory, constants)
        return plain.moved, plain.last, plain.memory
    numbers, rest = {**dict(method.numbers), **constants}, list(zip(layout.rest, resting, strict=True))
    if method.moments.second:
        estimate = take_in_points(method.moments, numbers, memory, blocks, layout.owners, rest, value)
    else:
        estimate = take_in(method.moments, numbers, memory, blocks, rest, value)
    if method.bounded:  # the loss itself is never below its bound, though the average of linear models may be
        estimate = estimate._replace(sound=estimate.sound & (value >= bound))
    step = _step(method, estimate, bound, (), {}, numbers.get("max_move"))
    moved, after, ok = step.moved, estimate.after, step.last.branch >= 0
    if method.moments.second:
        moved, after = next_points(method.moments, numbers, memory, blocks, estimate, step.moved, step.sizes)
        moved = [[jnp.where(ok, move, 0) for move in moves] for moves in moved]
    return moved, step.last, kept(ok, after, memory)


class Stepped(NamedTuple):
    """A step that was solved."""

    moved: list[list[Array]]  # x+ - x, tensor by tensor
    last: Report
    memory: Any
    sizes: tuple[Array, Array]  # the step size that shares refer to, and that of each block


def _step(
    method: JaxMethod,
    estimate: Estimate,
    bound: Array,
    memory: Any,
    constants: Mapping[str, Any],
    max_move: Array | float | None = None,
) -> Stepped:
    """The step that a model leads to."""
    caps = _caps(method, estimate)
    blocks = [block._replace(alpha=cap) for block, cap in zip(estimate.blocks, caps.alpha, strict=True)]
    gap = estimate.value - bound
    scaled = linear_model([make_part(block, gap.dtype) for block in blocks], gap)
    ok = scaled.ok(method.bounded and not (method.moments.averages or method.moments.second))
    ok = ok if estimate.sound is None else ok & estimate.sound
    if not method.matched:
        model = scaled.model(ok)
        if method.remembers:
            decision, memory = method.rule(model, memory, ok, **constants)
        else:
            decision = method.rule(model, **constants)
        ends, alpha, u = scaled.parts, scaled.alpha, decision.u
    else:
        found = scaled.matched(caps.longest, ok)
        decision = matched_decision(scaled.gap, jnp.sum(scaled.alpha * scaled.d_sq), found, caps.longest)
        ends, alpha, u = scaled.scaled_caps(found.s), caps.longest * scaled.alpha, jnp.ones_like(found.s)
    if caps.factor is not None:
        ends, alpha = [part.capped(caps.factor * part.block.alpha) for part in ends], caps.factor * alpha
    moved = [[jnp.where(ok, move, 0) for move in part.moves(u)] for part in ends]
    gap, height = scaled.gap * scaled.scale, decision.height * scaled.scale
    limits: dict[str, Any] = {}
    if estimate.farthest is not None:
        limits = {"distance": estimate.farthest, "longest": caps.longest}
    if max_move is not None:
        s = relaxation(sum(dot(own, own, gap.dtype) for own in moved), max_move)
        moved, limits = [[s.astype(move.dtype) * move for move in own] for own in moved], {**limits, "relaxation": s}
    solution = Solution(ok, gap, decision.root, decision.u, height, decision.evaluations, **limits)
    size = jnp.where(ok, decision.u, 0.0)
    reach = size if caps.longest is None else size * caps.longest * (1.0 if caps.factor is None else caps.factor)
    return Stepped(moved, settled(report(alpha, solution), gap.dtype), memory, (reach, size * alpha))


class Caps(NamedTuple):
    """How long a step may be."""

    alpha: Sequence[Array]  # one cap per block; for the matched cap its share of the longest step
    longest: Array | None = None  # the step that shares refer to; None if each block has its own cap
    factor: Array | None = None  # factor on the step that was found


def _caps(method: JaxMethod, estimate: Estimate) -> Caps:
    rates = [block.alpha for block in estimate.blocks]
    if not (method.matched or method.moments.distance):
        return Caps(rates)
    longest, share = shares(jnp.stack(rates))
    factor = None
    if method.moments.factors:
        longest, factor = estimate.farthest, longest
    elif method.moments.distance:
        longest = jnp.minimum(longest, cast(Array, estimate.farthest))
    share = share if estimate.parts is None else share * estimate.parts
    if method.matched:
        return Caps(list(share), longest, factor)
    return Caps(list(longest * share), longest, factor)


def _couple(value: Array, blocks: Sequence[TreeBlock]) -> tuple[Array, list[TreeBlock]]:
    """Loss and regulariser together: the value of both, and blocks with the slopes of both."""
    out = []
    lams, squares = jnp.zeros(len(blocks), value.dtype), jnp.zeros(len(blocks), value.dtype)
    for j, block in enumerate(blocks):
        if not block.xs or isinstance(block.phi, Zero):
            out.append(block)
            continue
        if block.quadratic:
            offsets = block.offsets
            lams, squares = lams.at[j].set(block.lam), squares.at[j].set(dot(offsets, offsets, value.dtype))
            pairs = zip(block.ds, offsets, strict=True)
            ds = [coupled_slope(d, x, like(block.lam, x)) for d, x in pairs]
        else:
            value = value + value_all(block.phi, block.xs, block.indices)
            subgradients = subgradient_all(block.phi, block.xs, block.indices)
            ds = [d + s for d, s in zip(block.ds, subgradients, strict=True)]
        out.append(block._replace(phi=Zero(), ds=ds))
    return coupled_value(value, squares, lams), out


def settled(last: Report, dtype: Any) -> Report:
    """A report in the dtypes that it has in every state."""
    whole = {"branch", "evaluations", "cap"}
    return Report(*(jnp.asarray(x, jnp.int32 if field in whole else dtype) for field, x in last._asdict().items()))
