"""Which regularisers are the same: equality, hash and text that cover everything an object holds, arrays by content.

Regularisers are static arguments of jax.jit, keys of caches, and text in checkpoints. Dataclasses compare arrays entry
by entry, cannot hash them, and print only a part of them, so two different objects could look the same.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import cached_property
from numbers import Number
from typing import Any

import array_api_compat
import numpy as np

from proxsps.core.array import Array, array_namespace

SHOWN = 3  # arrays of a list that a text names one by one
_digests: dict[int, str] = {}  # of arrays that cannot change, by id


def constants(owner: object) -> dict[str, Any]:
    """Everything that an object holds, by name, without values of `functools.cached_property`."""
    names = [field.name for field in fields(owner)] if is_dataclass(owner) else []
    kept = sorted(set(getattr(owner, "__dict__", ())) - set(names))
    names += [name for name in kept if not isinstance(getattr(type(owner), name, None), cached_property)]
    return {name: getattr(owner, name) for name in names}


def identity(value: Any) -> Hashable:
    """A key that two values share only if they give the same results.

    Arrays count by dtype, shape, device and content; arrays that cannot be read (traced ones, for instance) and other
    objects without a hash are equal only to themselves.
    """
    if isinstance(value, Number):
        return value
    if array_api_compat.is_array_api_obj(value):
        content = digest(value)
        if content is None:
            return (id(value),)
        place = type(value).__module__.partition(".")[0], array_api_compat.device(value)
        return (*place, _dtype(value), tuple(value.shape), content)
    if isinstance(value, (list, tuple)):
        return tuple(map(identity, value))
    if isinstance(value, dict):
        return tuple((key, identity(item)) for key, item in value.items())
    if holds_constants(value):
        return (type(value), *((name, identity(part)) for name, part in constants(value).items()))
    return value if isinstance(value, Hashable) else (id(value),)


def describe(value: Any) -> str:
    """The text of a value: as usual, but arrays by dtype, shape and the first digits of a digest of their content."""
    if isinstance(value, Number):
        return repr(value)
    if array_api_compat.is_array_api_obj(value):
        content = digest(value)
        return f"<{_dtype(value)} {tuple(value.shape)}{'' if content is None else ' ' + content[:12]}>"
    if isinstance(value, (list, tuple)) and any(map(array_api_compat.is_array_api_obj, value)):
        texts = ", ".join(map(describe, value))
        return f"[{texts}]" if len(value) <= SHOWN else f"<{len(value)} arrays {_hash(texts.encode())[:12]}>"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Identified) or not holds_constants(value):
        return repr(value)
    return describe_all(value)


def describe_all(owner: object) -> str:
    """The text of an object with everything that it holds, in the form of dataclasses."""
    parts = ", ".join(f"{name}={describe(part)}" for name, part in constants(owner).items())
    return f"{type(owner).__qualname__}({parts})"


def holds_constants(value: object) -> bool:
    """Whether a value is a regulariser, or a dataclass inside one, and counts by what it holds."""
    return isinstance(value, Identified) or (is_dataclass(value) and not isinstance(value, type))


class Identified:
    """Equality, hash and text by `identity`, in every subclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # @dataclass, which comes after this, adds its own methods only where the class has none.
        for name in ("__eq__", "__hash__", "__repr__"):
            if getattr(cls, name) is getattr(Identified, name):
                setattr(cls, name, getattr(Identified, name))

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self is other or identity(self) == identity(other)

    def __hash__(self) -> int:
        return hash(identity(self))

    def __repr__(self) -> str:
        return describe_all(self)


def digest(array: Array) -> str | None:
    """A digest of the entries of an array; None if they cannot be read."""
    if not array_api_compat.is_jax_array(array):
        return _digest(array)
    # Arrays of JAX do not change, and one on a device costs a transfer.
    key = id(array)
    if key not in _digests and (content := _digest(array)) is not None:
        _digests[key] = content
        weakref.finalize(array, _digests.pop, key, None).atexit = False
    return _digests.get(key)


def _digest(array: Array) -> str | None:
    # A tensor that wraps others, as one distributed over ranks does, would have to gather them.
    if hasattr(array, "__tensor_flatten__"):
        return None
    try:
        if array_api_compat.is_torch_array(array):
            flat = array.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().cpu()
            host = flat.view(array_namespace(array).uint8).numpy()  # NumPy has no bfloat16
        else:
            host = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
    except (TypeError, ValueError, RuntimeError):  # traced, fake, on no device, deleted
        return None
    return _hash(host)


def _hash(data: Any) -> str:
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()


def _dtype(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")
