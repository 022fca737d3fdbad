"""Refusals: what was wrong, what was got, what to do. Traced numbers have no value yet and are not looked at."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from proxsps.core.checks import check_finite_bound, check_nonnegative, check_positive
from proxsps.regularizers.checks import check_choice

CHECKS = {"c": check_positive, "c0": check_positive}


def check_constants(**constants: Any) -> None:
    """Refuse constants of a method that are no single number, or out of range."""
    for name, constant in constants.items():
        if jnp.ndim(constant):
            raise ValueError(
                f"{name} must be one number, got shape {jnp.shape(constant)}; for a grid of values, jax.vmap the step."
            )
        if isinstance(constant, jax.core.Tracer):
            continue
        if name == "lower_bound":
            check_finite_bound(constant)
        else:
            CHECKS.get(name, check_nonnegative)(name, constant)


def check_regularizer(phi: Any, weight_decay: Any) -> None:
    """Refuse a regulariser that is none, that competes with weight decay, or that cannot be traced."""
    check_choice(phi, isinstance(weight_decay, jax.core.Tracer) or weight_decay)
    if not phi.traceable:
        raise ValueError(
            f"{phi!r} works on the host and cannot be traced by jax.jit; use a regulariser that can, "
            "or the torch optimizers."
        )


def check_dtype(x: Any) -> None:
    """Refuse a parameter that is not real."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"Got a parameter of dtype {dtype}: give its real and imaginary part as two parameters.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"Got a parameter of dtype {dtype}, which has no gradient: leave it out, by optax.masked.")


def check_update(owner: str, params: Any, value: Any) -> None:
    """Refuse an update without parameters, or with a loss that is missing or more than one number."""
    if params is None:
        raise ValueError(f"{owner} needs the parameters: call update(grads, state, params, value=loss).")
    if value is None:
        raise ValueError(
            f"{owner} needs the loss value: call update(grads, state, params, value=loss), with loss and grads from "
            "jax.value_and_grad. Got none."
        )
    if jnp.size(value) != 1:
        raise ValueError(f"The loss must be one number, got shape {jnp.shape(value)}: reduce it, for instance by mean.")


def check_lower_bound(owner: str, lower_bound: Any, bounded: bool) -> None:
    """Refuse a lower bound of a batch that is not finite, or that the method would ignore."""
    if lower_bound is None:
        return
    if not bounded:
        raise ValueError(f"{owner} has no use for a lower bound; leave it out, or use prox_sps.")
    check_constants(lower_bound=lower_bound)


def is_zero(constant: Any) -> bool:
    """Whether a constant is known to be zero, or not given at all."""
    return constant is None or not (isinstance(constant, jax.core.Tracer) or constant)
