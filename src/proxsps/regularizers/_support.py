"""What all regularisers share: the working precision of a formula, indicator values, and checks of constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from numbers import Real
from typing import Any, Concatenate, ParamSpec

from proxsps.core.array import Array, array_namespace

P = ParamSpec("P")


def working_dtype(x: Array) -> Any:
    """Dtype to calculate in: that of x, or float32 where x has only 16 bits."""
    xp = array_namespace(x)
    return x.dtype if xp.finfo(x.dtype).bits >= 32 else xp.float32


def wide(x: Array) -> Array:
    """The array in its working dtype."""
    return array_namespace(x).astype(x, working_dtype(x), copy=False)


def widened(formula: Callable[Concatenate[Array, P], Array]) -> Callable[Concatenate[Array, P], Array]:
    """Let a formula calculate in the working dtype of its first argument and return that argument's own dtype.

    Positional arguments are arrays or numbers: each is brought to the working dtype, so that a double-precision step
    size does not promote a single-precision tensor. Keyword arguments pass as they are.
    """

    @wraps(formula)
    def call(z: Array, /, *args: P.args, **kwargs: P.kwargs) -> Array:
        xp = array_namespace(z)
        dtype = working_dtype(z)
        # Python numbers are weak in every library's promotion; NumPy scalars are not.
        cast: Any = [float(a) if isinstance(a, Real) else xp.astype(a, dtype, copy=False) for a in args]
        return xp.astype(formula(xp.astype(z, dtype, copy=False), *cast, **kwargs), z.dtype, copy=False)

    return call


def guarded(condition: Array, denominator: Array) -> Array:
    """The denominator where the condition holds, else one: a division that is safe before its result is masked."""
    xp = array_namespace(denominator)
    return xp.where(condition, denominator, xp.ones_like(denominator))


def where_or_zero(condition: Array, x: Array) -> Array:
    """The entries of x where the condition holds, exact zeros elsewhere."""
    xp = array_namespace(x)
    return xp.where(condition, x, xp.zeros_like(x))


def clip(x: Array, lower: Array | float, upper: Array | float) -> Array:
    """Each entry brought between the bounds, which are two numbers or two arrays of the dtype of x."""
    # Not xp.clip: its wrappers index by masks, or test the bounds for NaN, and then cannot be traced. The method of the
    # same name is NumPy's, torch's and JAX's own.
    return x.clip(lower, upper)


def sign(x: Array) -> Array:
    """-1, 0 or 1 for each entry."""
    # Not xp.sign: its wrapper for torch looks for NaN by index, which is a host sync and cannot be traced.
    xp = array_namespace(x)
    return xp.astype(x > 0, x.dtype) - xp.astype(x < 0, x.dtype)


def indicator(inside: Array, x: Array) -> Array:
    """0 where the 0-d boolean holds, infinity where not, in the working dtype of x."""
    xp = array_namespace(x)
    zero = xp.zeros_like(xp.astype(inside, working_dtype(x)))
    return xp.where(inside, zero, xp.full_like(zero, math.inf))


def tolerance(x: Array) -> float:
    """Relative slack that rounding needs: a few eps for one entry, and sqrt(size) eps for a sum of them."""
    return float(array_namespace(x).finfo(x.dtype).eps) * (8 + math.sqrt(math.prod(x.shape)))


def check_weight(owner: object, **weights: float) -> None:
    """Refuse a weight that is negative, infinite or not a number."""
    for name, weight in weights.items():
        if not (_unseen(weight) or (math.isfinite(weight) and weight >= 0)):
            raise ValueError(
                f"{type(owner).__name__}: {name} must be a finite number >= 0, got {weight!r}; "
                f"use {name}=0 for no penalty."
            )


def check_radius(owner: object, radius: float) -> None:
    """Refuse a radius that is not positive and finite."""
    if not (_unseen(radius) or (math.isfinite(radius) and radius > 0)):
        raise ValueError(
            f"{type(owner).__name__}: radius must be a finite number > 0, got {radius!r}; give the size of the set."
        )


def _unseen(constant: object) -> bool:
    """Whether a constant may be traced, as arrays of JAX are, and then has no value to look at."""
    return not isinstance(constant, (int, float)) and type(constant).__module__.startswith("jax")
