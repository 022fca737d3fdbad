"""Micro-batches: gradients and losses averaged over several updates, then one step with both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from proxsps.core.array import Array
from proxsps.jax.checks import check_update


class MultiStepsState(NamedTuple):
    """State of `multi_steps`: the state of optax.MultiSteps, and the means so far of what it does not average."""

    steps: optax.MultiStepsState
    value: Array
    lower_bound: Array


def multi_steps(
    opt: optax.GradientTransformation, every_k: int | Callable[[Array], Array]
) -> optax.GradientTransformationExtraArgs:
    """`optax.MultiSteps` for steps that depend on the loss: k micro-batches of one size equal one batch.

    optax averages the gradients but passes on only the loss of the last micro-batch; loss and gradient then do not
    belong together. Here `value`, and `lower_bound` if it is passed, are averaged as well.

    Args:
        opt: a transformation that takes `value`.
        every_k: the number of micro-batches, or a schedule for it.
    """
    inner = optax.MultiSteps(opt, every_k)
    # Its conditional over closures would be compiled in every call outside of jit.
    compiled = jax.jit(inner.update, inline=True)

    def init(params: Any) -> MultiStepsState:
        # Each has its own buffer, so that the state can be donated to a jitted step.
        value, bound = (jnp.zeros((), jnp.result_type(float)) for _ in range(2))
        return MultiStepsState(inner.init(params), value, bound)

    def update(
        updates: Any,
        state: MultiStepsState,
        params: Any = None,
        *,
        value: Any = None,
        lower_bound: Any = None,
        **extra: Any,
    ) -> tuple[Any, MultiStepsState]:
        check_update("multi_steps", params, value)
        weight = 1 / (state.steps.mini_step + 1)  # 1 at the first micro-batch, which drops the batch before

        def mean(before: Array, now: Any) -> Array:
            now = jnp.asarray(now, before.dtype).reshape(())
            return jnp.where(state.steps.mini_step == 0, now, before + weight.astype(before.dtype) * (now - before))

        value = mean(state.value, value)
        bound = state.lower_bound
        step = inner.update if extra else compiled  # further arguments need not be arrays
        if lower_bound is not None:
            extra["lower_bound"] = bound = mean(bound, lower_bound)
        updates, steps = step(updates, state.steps, params, value=value, **extra)
        return updates, MultiStepsState(steps, value, bound)

    return optax.GradientTransformationExtraArgs(init, update)
