"""Errors say what was wrong, what was passed, and what to do. Traced numbers have no value yet and are not checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from proxsps.core.checks import check_finite_bound, check_fraction, check_nonnegative, check_positive, hint
from proxsps.regularizers.base import DIAGONAL
from proxsps.regularizers.checks import check_choice

P = ParamSpec("P")
T = TypeVar("T")

CAPS = ("proximal", "matched")


def with_known_arguments(make: Callable[P, T]) -> Callable[P, T]:
    """Let a function raise an error with a suggestion for arguments that it does not have, such as torch's names."""
    known = inspect.signature(make).parameters

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for key in kwargs:
            if key not in known:
                raise TypeError(f"{make.__name__} has no argument {key!r}. {hint(key, known)}")
        return make(*args, **kwargs)

    return call


CHECKS = {
    "c": check_positive,
    "c0": check_positive,
    "momentum": check_fraction,
    "b1": check_fraction,
    "b2": check_fraction,
    "max_move": check_positive,
}


def check_constants(**constants: Any) -> None:
    """Raise an error for constants of a method that are not single numbers, or out of range."""
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
    """Raise an error for something that is not a regulariser, one beside weight decay, or one that cannot be traced."""
    check_choice(phi, isinstance(weight_decay, jax.core.Tracer) or weight_decay)
    if not phi.traceable:
        raise ValueError(
            f"{phi!r} works on the host and cannot be traced by jax.jit; use a regulariser that can, "
            "or the torch optimizers."
        )


def check_diagonal(owner: str, phi: Any) -> None:
    """Raise an error for a regulariser without an exact prox in a diagonal metric."""
    if not phi.has_diagonal_prox:
        raise ValueError(
            f"{owner} needs an exact prox with one step size per entry, which {phi!r} does not have. {DIAGONAL} have "
            "one; for this regulariser use prox_sps."
        )


def check_caps(owner: str, learning_rate: Any, cap: Any, distance_cap: Any) -> None:
    """Raise an error for a cap that does not exist, and a step without any limit."""
    if cap is not None and cap not in CAPS:
        raise ValueError(f"cap must be 'proximal' or 'matched', got {cap!r}.")
    if distance_cap not in (None, True, False):
        raise ValueError(f"distance_cap must be True or False, or None for the default, got {distance_cap!r}.")
    if learning_rate is None and distance_cap is False:
        raise ValueError(
            f"{owner} without a learning rate needs the distance cap: leave distance_cap out, or pass a learning_rate."
        )


def check_rates(owner: str, learning_rate: Any, options: Mapping[Hashable, Any]) -> None:
    """Raise an error if only some labels have a learning rate, or if a factor is passed beside one."""
    for label, own in options.items():
        if (own.learning_rate is None) != (learning_rate is None):
            raise ValueError(
                f"Label {label!r} has learning_rate={own.learning_rate!r}, but {owner} has {learning_rate!r}: either "
                "all labels have a learning rate, or none of them; without one, each label may have its own `scale`."
            )
        if own.learning_rate is not None and own.scale is not None:
            raise ValueError(
                f"{owner} got both learning_rate={own.learning_rate!r} and scale={own.scale!r}. Pass one: `scale` is a "
                "factor on the step if there is no learning rate."
            )


def check_needs_rate(owner: str, options: Mapping[Hashable, Any]) -> None:
    """Raise an error for learning_rate=None in a method that has no other limit on its steps."""
    if any(own.learning_rate is None for own in options.values()):
        raise ValueError(
            f"{owner} has no distance cap and needs a learning_rate, got None. prox_sps and prox_sps_adam need none."
        )


def check_dtype(x: Any) -> None:
    """Raise an error for a parameter that is not real."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"Got a parameter of dtype {dtype}: pass its real and imaginary part as two parameters.")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"Got a parameter of dtype {dtype}, which has no gradient: leave it out with "
            "optax.partition({'train': opt, 'frozen': optax.set_to_zero()}, labels)."
        )


def check_gradient(d: Any, x: Any) -> None:
    """Raise an error for a gradient of another shape than its parameter."""
    if jnp.shape(d) != jnp.shape(x):
        raise ValueError(
            f"Got a gradient of shape {jnp.shape(d)} for a parameter of shape {jnp.shape(x)}: pass the gradients of "
            "the parameters that are passed to update."
        )


def check_state(owner: str, state: Any, needed: Iterable[str]) -> None:
    """Raise an error for a state without the fields of memory that a method needs."""
    memory = getattr(state, "memory", None)
    missing = [
        name for name in needed if isinstance(getattr(memory, name, ()), tuple) and not getattr(memory, name, ())
    ]
    if memory is None or missing:
        lacks = f" without {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"{owner} got a state of another transformation, a {type(state).__name__}{lacks}. Pass the state that its "
            "own init or update returned."
        )


def check_sample(held: int, expected: int) -> None:
    """Raise an error for a start whose entries are not those that are sampled of the parameters."""
    if held != expected:
        raise ValueError(
            f"The state has {held} sampled entries of the parameters at the start, and {expected} are sampled of the "
            "parameters that were passed: they are other parameters, or the state is from an earlier version, which "
            "sampled others. To continue such a run, replace the field memory.start of its state by that of "
            "init(params), and keep everything else."
        )


def check_update(owner: str, params: Any, value: Any) -> None:
    """Raise an error for an update without parameters, or with a loss that is missing or more than one number."""
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
    """Raise an error for a lower bound of a batch that is not finite, or that the method would ignore."""
    if lower_bound is None:
        return
    if not bounded:
        raise ValueError(f"{owner} does not use a lower bound; leave it out, or use prox_sps with one.")
    check_constants(lower_bound=lower_bound)


def is_zero(constant: Any) -> bool:
    """Whether a constant is known to be zero, or not given at all."""
    return constant is None or not (isinstance(constant, jax.core.Tracer) or constant)
