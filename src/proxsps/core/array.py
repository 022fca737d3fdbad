"""Which array library some numbers belong to."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import array_api_compat

# An array of any library of the array API standard (NumPy, torch, JAX, ...). The libraries share no static type.
Array = Any


_KNOWN: dict[type, ModuleType] = {}


def array_namespace(*arrays: Array) -> ModuleType:
    """Array-API namespace of the arguments, with Python numbers ignored."""
    # It depends on types alone, and finding out takes longer than most operations on a few numbers.
    for array in arrays:
        if type(array) in _KNOWN:
            return _KNOWN[type(array)]
    found = array_api_compat.array_namespace(*arrays)
    _KNOWN.update((type(array), found) for array in arrays if hasattr(array, "dtype"))
    return found


def inner(a: Array, b: Array) -> Array:
    """Euclidean inner product of two arrays of one shape, as a 0-d array."""
    xp = array_namespace(a, b)
    return xp.sum(a * b)
