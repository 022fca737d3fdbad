"""Which array library some numbers belong to."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import array_api_compat

# An array of any library of the array API standard (NumPy, torch, JAX, ...). The libraries share no static type.
Array = Any


_KNOWN: dict[type, ModuleType] = {}


def array_namespace(*arrays: Array) -> ModuleType:
    """Array-API namespace of the arguments, with Python numbers ignored."""
    # Cached by type: the lookup takes longer than most operations on a few numbers.
    for array in arrays:
        if type(array) in _KNOWN:
            return _KNOWN[type(array)]
    found = array_api_compat.array_namespace(*arrays)
    _KNOWN.update((type(array), found) for array in arrays if hasattr(array, "dtype"))
    return found


def over_blocks(numbers: Array) -> Array:
    """The sum over the last axis; if that has one entry, the entry itself, without an operation."""
    return numbers[..., 0] if numbers.shape[-1] == 1 else array_namespace(numbers).sum(numbers, axis=-1)


def reciprocal(number: Array | float) -> Array | float:
    """1 / number in one operation; torch's `/` takes two."""
    return 1 / number if isinstance(number, (int, float)) else array_namespace(number).reciprocal(number)


def times(factor: Array | float, number: Array) -> Array:
    """A product; no operation if the factor is exactly 1, as it usually is."""
    return number if isinstance(factor, float) and factor == 1 else factor * number


def chosen(ok: Array, new: Sequence[Array], old: Sequence[Array]) -> Array:
    """New numbers where a step was taken, old ones where it was skipped; all are stacked on a first axis."""
    xp = array_namespace(*old)
    return xp.where(ok, xp.stack(list(new)), xp.stack(list(old)))


def inner(a: Array, b: Array) -> Array:
    """Euclidean inner product of two arrays of one shape, as a 0-d array."""
    xp = array_namespace(a, b)
    return xp.sum(a * b)
