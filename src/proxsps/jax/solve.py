"""The step of every method as one compiled function.

JAX keeps compiled code by the functions it was made of, and conditionals or loops over closures that each call builds
anew are compiled in each call. So `update` outside of `jax.jit` passes everything to the one function here: it is
compiled once for each method, regulariser and shapes. Inside of `jax.jit` it becomes part of the program around it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from proxsps.core.array import Array
from proxsps.core.estimate import coupled_slope, coupled_value
from proxsps.core.outcome import Report, Solution, report
from proxsps.core.rules import Decision, Memory, Model
from proxsps.jax.groups import Block
from proxsps.jax.model import linear_model
from proxsps.jax.parts import make_part
from proxsps.jax.passes import dot
from proxsps.regularizers import L2, Regularizer, Zero
from proxsps.regularizers._identity import constants, identity
from proxsps.regularizers.base import subgradient_all, value_all


class Method(NamedTuple):
    """What tells one method from another."""

    name: str
    rule: Callable[..., Any]  # one of `core.rules`
    bounded: bool = True  # whether there is a lower bound, and so a need of the loss
    coupled: bool = False  # whether the regulariser is part of the loss
    remembers: bool = False  # whether there is a memory

    def decide(self, model: Model, memory: Memory | tuple[()], ok: Array, constant: Any) -> tuple[Decision, Any]:
        """The step, and the memory after it.

        Args:
            model: the linear model.
            memory: what the method remembers of steps before.
            ok: whether the step may be taken.
            constant: the method's constant, for instance `c` of `sps`; None for none.
        """
        constants = () if constant is None else (constant,)
        if self.remembers:
            return self.rule(model, memory, ok, *constants)
        return self.rule(model, *constants), memory


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

    They are those of JAX, which one's own code can use as traced ones, and centres. Arrays of NumPy in a regulariser of
    one's own stay in the frame, by content.
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


def solve(
    method: Method, blocks: Sequence[Block], value: Array, bound: Array, memory: Any, constant: Any
) -> tuple[list[list[Array]], Report, Any]:
    """One step: the moves of each block's tensors, the report, and the method's memory after it.

    Args:
        method: the method.
        blocks: the blocks of parameters.
        value: the loss, without regulariser.
        bound: its lower bound C.
        memory: what the method remembers of steps before.
        constant: the method's constant, for instance `c` of `sps`.
    """
    frames, arrays = zip(*(framed(block.phi) for block in blocks), strict=True)
    indices = tuple(tuple(block.indices) for block in blocks)
    alphas, xs, ds = zip(*((block.alpha, block.xs, block.ds) for block in blocks), strict=True)
    return _solve(method, frames, indices, arrays, alphas, xs, ds, value, bound, memory, constant)


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _solve(
    method: Method,
    frames: tuple[Frame, ...],
    indices: tuple[tuple[int, ...], ...],
    arrays: Sequence[dict[str, Any]],
    alphas: Sequence[Array],
    xs: Sequence[list[Array]],
    ds: Sequence[list[Array]],
    value: Array,
    bound: Array,
    memory: Any,
    constant: Any,
) -> tuple[list[list[Array]], Report, Any]:
    phis = [frame.filled(own) for frame, own in zip(frames, arrays, strict=True)]
    blocks: Sequence[Block] = [Block(*parts) for parts in zip(phis, alphas, xs, ds, indices, strict=True)]
    if method.coupled:
        value, blocks = _couple(value, blocks)
    scaled = linear_model([make_part(block, value.dtype) for block in blocks], value - bound)
    ok = scaled.ok(method.bounded)
    decision, memory = method.decide(scaled.model(ok), memory, ok, constant)
    moved = [[jnp.where(ok, move, 0) for move in part.moves(decision.u)] for part in scaled.parts]
    gap, height = scaled.gap * scaled.scale, decision.height * scaled.scale
    solution = Solution(ok, gap, decision.root, decision.u, height, decision.evaluations)
    return moved, settled(report(scaled.alpha, solution), gap.dtype), memory


def _couple(value: Array, blocks: Sequence[Block]) -> tuple[Array, list[Block]]:
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
            ds = [coupled_slope(d, x, _as_dtype(block.lam, x)) for d, x in pairs]
        else:
            value = value + value_all(block.phi, block.xs, block.indices)
            subgradients = subgradient_all(block.phi, block.xs, block.indices)
            ds = [d + s for d, s in zip(block.ds, subgradients, strict=True)]
        out.append(block._replace(phi=Zero(), ds=ds))
    return coupled_value(value, squares, lams), out


def _as_dtype(number: Any, x: Array) -> Array:
    return jnp.asarray(number, x.dtype)


def settled(last: Report, dtype: Any) -> Report:
    """A report in the dtypes that it has in every state."""
    whole = {"branch", "evaluations", "cap"}
    return Report(*(jnp.asarray(x, jnp.int32 if field in whole else dtype) for field, x in last._asdict().items()))
