"""Which array library do these numbers belong to? The one thing the core has to ask."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import array_api_compat

# An array of any library of the array API standard (NumPy, torch, JAX, ...). The libraries share no static type.
Array = Any


def array_namespace(*arrays: Array) -> ModuleType:
    """Array-API namespace of the arguments, with Python numbers ignored."""
    return array_api_compat.array_namespace(*arrays)


def inner(a: Array, b: Array) -> Array:
    """Euclidean inner product of two arrays of one shape, as a 0-d array."""
    xp = array_namespace(a, b)
    return xp.sum(a * b)
