"""What all regularisers share: the working precision of a formula, indicator values, and checks of constants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from numbers import Real
from typing import Any, Concatenate, ParamSpec, TypeVar

from proxsps.core.array import Array, array_namespace

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., None])

_numbers_are_read: ContextVar[bool] = ContextVar("numbers_are_read", default=False)


def working_dtype(x: Array) -> Any:
    """The dtype for computations: that of x, or float32 if x has only 16 bits."""
    xp = array_namespace(x)
    if not _is_real(x.dtype):
        raise TypeError(f"Regularisers are functions of real floating-point arrays, got dtype {x.dtype}.")
    return x.dtype if xp.finfo(x.dtype).bits >= 32 else xp.float32


def wide(x: Array) -> Array:
    """The array in its working dtype."""
    return array_namespace(x).astype(x, working_dtype(x), copy=False)


def widened(formula: Callable[Concatenate[Array, P], Array]) -> Callable[Concatenate[Array, P], Array]:
    """Let a formula compute in the working dtype of its first argument and return that argument's own dtype.

    Positional arguments are arrays or numbers: each is cast to the working dtype, so that a double-precision step
    size does not promote a single-precision tensor. Keyword arguments pass as they are.
    """

    @wraps(formula)
    def call(z: Array, /, *args: P.args, **kwargs: P.kwargs) -> Array:
        xp = array_namespace(z)
        dtype = working_dtype(z)
        # Python numbers do not promote arrays in any library; NumPy scalars do.
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
    """Each entry clipped to the bounds, which are two numbers or two arrays of the dtype of x."""
    # Not xp.clip: its wrappers index by masks, or test the bounds for NaN, and then cannot be traced. The method of the
    # same name is NumPy's, torch's and JAX's own.
    return x.clip(lower, upper)


def sign(x: Array) -> Array:
    """-1, 0 or 1 for each entry."""
    # Not xp.sign: its wrapper for torch finds NaN by index, which is a host sync and cannot be traced.
    xp = array_namespace(x)
    return xp.astype(x > 0, x.dtype) - xp.astype(x < 0, x.dtype)


def indicator(inside: Array, x: Array) -> Array:
    """0 if the 0-d boolean holds, else infinity, in the working dtype of x."""
    xp = array_namespace(x)
    zero = xp.zeros_like(xp.astype(inside, working_dtype(x)))
    return xp.where(inside, zero, xp.full_like(zero, math.inf))


def tolerance(x: Array) -> float:
    """Relative slack that rounding needs: a few eps for one entry, and sqrt(size) eps for a sum of them."""
    return float(array_namespace(x).finfo(x.dtype).eps) * (8 + math.sqrt(math.prod(x.shape)))


@contextmanager
def reading_numbers() -> Iterator[None]:
    """Let iterations end when they have converged: for arrays on the host, where reading a number costs nothing."""
    token = _numbers_are_read.set(True)
    try:
        yield
    finally:
        _numbers_are_read.reset(token)


def numbers_are_read() -> bool:
    """Whether this is such a place."""
    return _numbers_are_read.get()


def repeat(count: int, body: Callable[[Array], Array], start: Array) -> Array:
    """The body applied a number of times to positive numbers, or until only rounding changes them, if that is read."""
    # A loop for JAX's compiler, which needs seconds for the same operations one after the other.
    if _unseen(start):
        return sys.modules["jax"].lax.fori_loop(0, count, lambda _, x: body(x), start)
    rounding = 4 * float(array_namespace(start).finfo(start.dtype).eps)
    for _ in range(count):
        before, start = start, body(start)
        if numbers_are_read() and bool((abs(start - before) <= rounding * start).all()):
            break
    return start


def compiled(loops: F, **options: Any) -> F | None:
    """A function of loops and scalars, compiled by numba and kept on disk if there is a place; None without numba."""
    try:
        import numba
    except ImportError:
        return None
    result: F
    try:
        result = numba.njit(cache=True, nogil=True, **options)(loops)
    except RuntimeError:  # no directory where compiled code may be kept
        result = numba.njit(nogil=True, **options)(loops)
    return result


def shape_of(constant: Any) -> tuple[int, ...]:
    """The shape of an array, () for a number."""
    # Numbers first: torch.compile does not know attributes of traced numbers.
    return () if isinstance(constant, Real) else tuple(getattr(constant, "shape", ()))


def with_checked_steps(cls: type) -> None:
    """Let the proxes that a class defines check their arguments, and results if the class is not of this package.

    With an array for alpha instead of one number, a formula for a norm of several entries broadcasts to something that
    is not a prox. A result of another shape would be broadcast into the weights.
    """
    foreign = cls.__module__.partition(".")[0] != __name__.partition(".")[0]
    for name, (place, check) in _STEPS.items():
        if name in vars(cls):
            method = _checked(vars(cls)[name], place, check)
            setattr(cls, name, _with_checked_result(method, name) if foreign and name != "prox_jvp" else method)


def _checked(method: Callable[..., Any], place: int, check: Callable[[Any, Array, Any], None]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, z: Array, *args: Any, **kwargs: Any) -> Any:
        alpha = args[place] if len(args) > place else kwargs.get("alpha")
        check(self, z, alpha)
        if isinstance(alpha, (int, float)) and alpha < 0:
            raise ValueError(f"{type(self).__name__}: alpha must be a number > 0, got {alpha!r}.")
        if is_array(z) and not _is_real(z.dtype):
            raise TypeError(
                f"{type(self).__name__}: z must be a real floating-point array, got dtype {z.dtype}; convert it first."
            )
        return method(self, z, *args, **kwargs)

    return call


def _with_checked_result(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, z: Array, *args: Any, **kwargs: Any) -> Any:
        found = method(self, z, *args, **kwargs)
        check_like(self, name, found, z)
        return found

    return call


def check_like(owner: object, method: str, found: Any, z: Array) -> None:
    """Raise an error for a result that is not an array of the shape and dtype of z."""
    if is_array(z) and not (is_array(found) and tuple(found.shape) == tuple(z.shape) and found.dtype == z.dtype):
        raise ValueError(
            f"{type(owner).__name__}.{method} must return {described(z)}, like its argument, got {described(found)}."
        )


def is_array(found: Any) -> bool:
    """Whether this is an array of any library."""
    return hasattr(found, "shape") and hasattr(found, "dtype")


def described(found: Any) -> str:
    """An array by its shape and dtype, anything else by its text."""
    return f"an array of shape {tuple(found.shape)} and dtype {found.dtype}" if is_array(found) else repr(found)


def _is_real(dtype: Any) -> bool:
    floating = getattr(dtype, "is_floating_point", None)  # of torch; other libraries have the kinds of NumPy
    return bool(dtype.kind not in "biuc" if floating is None else floating)


def _check_number(owner: Any, z: Array, alpha: Any) -> None:
    if shape_of(alpha):
        instead = (
            "for one step size per entry call prox_diagonal(z, alpha)"
            if owner.has_diagonal_prox
            else "this regulariser has no exact prox with one step size per entry"
        )
        raise ValueError(f"{type(owner).__name__}: alpha must be one number, got shape {shape_of(alpha)}; {instead}.")


def _check_number_or_entries(owner: Any, z: Array, alpha: Any) -> None:
    (_check_entries if owner.separable else _check_number)(owner, z, alpha)


def _check_entries(owner: Any, z: Array, alpha: Any) -> None:
    ours, shape = shape_of(alpha), tuple(z.shape)
    fits = len(ours) <= len(shape) and all(n in (1, m) for n, m in zip(reversed(ours), reversed(shape), strict=False))
    if not fits:
        raise ValueError(
            f"{type(owner).__name__}: alpha of shape {ours} does not broadcast to z of shape {shape}; "
            "give one step size per entry, or one number."
        )


_STEPS = {"prox": (0, _check_number), "prox_jvp": (2, _check_number_or_entries), "prox_diagonal": (0, _check_entries)}


def check_weight(owner: object, **weights: float) -> None:
    """Raise an error for a weight that is negative, infinite or not a number."""
    for name, weight in weights.items():
        _check_is_number(owner, name, weight)
        if shape_of(weight) or not (_unseen(weight) or (math.isfinite(weight) and weight >= 0)):
            raise ValueError(
                f"{type(owner).__name__}: {name} must be a finite number >= 0, got {weight!r}; "
                f"use {name}=0 for no penalty."
            )


def check_radius(owner: object, radius: float) -> None:
    """Raise an error for a radius that is not positive and finite."""
    _check_is_number(owner, "radius", radius)
    if shape_of(radius) or not (_unseen(radius) or (math.isfinite(radius) and radius > 0)):
        raise ValueError(
            f"{type(owner).__name__}: radius must be a finite number > 0, got {radius!r}; give the size of the set."
        )


def check_center(owner: object, center: Any) -> None:
    """Raise an error for a centre that is not a number, an array or a sequence of them."""
    for one in center if isinstance(center, (list, tuple)) else [center]:
        fine = math.isfinite(one) if isinstance(one, Real) else one is None or hasattr(one, "shape")
        if not fine:
            raise ValueError(
                f"{type(owner).__name__}: center must be a finite number, an array of the tensor's shape, or a list "
                f"with one of them for each tensor of the group, got {one!r}."
            )


def check_bounds(owner: object, lower: float, upper: float) -> None:
    """Raise an error for bounds that are not numbers, or that no number lies between."""
    for name, bound in (("lower", lower), ("upper", upper)):
        _check_is_number(owner, name, bound)
        if shape_of(bound):
            raise ValueError(
                f"{type(owner).__name__}: {name} must be one number, got an array of shape {shape_of(bound)}; "
                "put tensors with other bounds into other parameter groups."
            )
    ordered = _unseen(lower) or _unseen(upper) or lower <= upper
    finite = (_unseen(lower) or lower < math.inf) and (_unseen(upper) or upper > -math.inf)
    if not (ordered and finite):
        raise ValueError(
            f"{type(owner).__name__}: lower must be <= upper, and a finite number must lie between them, got "
            f"lower={lower!r}, upper={upper!r}; give the smaller bound first, and -inf or inf where a side is open."
        )


def _check_is_number(owner: object, name: str, constant: Any) -> None:
    if not (isinstance(constant, Real) or hasattr(constant, "shape")):
        raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {constant!r}.")


def _unseen(constant: object) -> bool:
    """Whether a constant is traced by JAX, and has no value yet."""
    jax = sys.modules.get("jax")  # not loaded unless it is used
    return jax is not None and isinstance(constant, jax.core.Tracer)
