"""Digests of models, data and functions by their content: equal digests mean equal results, in any process.

Arrays count by their type, shape and bytes, functions by their bytecode, defaults, closure and the globals that they
use, objects by their class and state. Objects of Python, torch or another installed package count by their names.
Bytecode is that of the running Python: another minor version gives other digests.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
NAMED = ("torch", "numpy", "proxsps")
INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def fingerprint(*parts: Any) -> str:
    """Sixteen digits for the content of all parts."""
    return _Walk().digest(parts).hex()[:16]


class _Walk:
    """Digests of objects, each computed once; an object inside itself counts as a mark."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}
        self.alive: list[Any] = []  # so that no id is used twice

    def digest(self, value: Any) -> bytes:
        if isinstance(value, PLAIN):
            return _hash(type(value).__name__, repr(value))
        if id(value) not in self.known:
            self.alive.append(value)
            self.known[id(value)] = _hash("itself")
            self.known[id(value)] = self._compute(value)
        return self.known[id(value)]

    def all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _hash(kind, *(self.digest(value) for value in values))

    def _compute(self, value: Any) -> bytes:
        match value:
            case Tensor():
                return _tensor(value)
            case np.ndarray() if value.dtype != object:
                return _hash("array", str(value.dtype), repr(value.shape), np.ascontiguousarray(value).tobytes())
            case list() | tuple() | np.ndarray():
                return self.all(type(value).__name__, value)
            case set() | frozenset():
                return _hash("set", *sorted(self.digest(item) for item in value))
            case dict():
                return self.all("dict", (part for item in value.items() for part in item))
            case types.ModuleType():
                return _hash("module", value.__name__)
            case types.CodeType():
                return self._code(value)
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return self.all("method", (value.__func__, value.__self__))
            case functools.partial():
                return self.all("partial", (value.func, value.args, value.keywords))
            case type():
                return self._class(value)
            case torch.dtype() | torch.device():
                return _hash(str(value))
            case nn.Module():
                return self.all("module", (type(value), _module_state(value)))
        return self._object(value)

    def _code(self, code: types.CodeType) -> bytes:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount)
        steps = (code.co_code, code.co_exceptiontable, code.co_flags, code.co_consts)
        return self.all("code", (names, steps))

    def _function(self, function: Any) -> bytes:
        if getattr(function, "hooked", False):  # torch wraps `step` of a class when its first optimizer is made
            return self.digest(function.__wrapped__)
        closure = [_content(cell) for cell in function.__closure__ or ()]
        if _is_installed(function, function.__code__.co_filename):
            return _hash(_name(function), self.digest(closure))  # a decorator's closure holds what it decorates
        used = {name: function.__globals__.get(name) for name in sorted(_global_names(function.__code__))}
        used = {name: value for name, value in used.items() if name in function.__globals__}
        return self.all("function", (function.__code__, function.__defaults__, function.__kwdefaults__, closure, used))

    def _class(self, kind: type) -> bytes:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if kind.__module__ == "builtins" or _is_installed(kind, file):
            return _name(kind)
        skipped = ("__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__annotations__")
        content = {key: item for key, item in vars(kind).items() if key not in skipped}
        return self.all("class", (kind.__bases__, content))

    def _object(self, value: Any) -> bytes:
        """By the class and what pickle would keep; by the class alone for locks, files and the like."""
        if isinstance(value, functools.cached_property) or hasattr(value, "__wrapped__"):  # caches, static methods
            return self.all("wrapped", (type(value), getattr(value, "__wrapped__", None) or value.func))
        if isinstance(value, property):
            return self.all("property", (value.fget, value.fset))
        if hasattr(value, "__self__") and isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            return _name(value) if owner is None or isinstance(owner, types.ModuleType) else self.digest(owner)
        try:
            parts = value.__reduce_ex__(4)
        except Exception:
            return _name(value if hasattr(value, "__qualname__") else type(value))
        if isinstance(parts, str):
            return _hash("global", parts)
        return self.all("object", (type(value), *(list(p) if hasattr(p, "__next__") else p for p in parts)))


def _hash(*parts: str | bytes | memoryview) -> bytes:
    """Of texts and bytes with their lengths, so that no two lists give the same stream."""
    state = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        state.update(len(content).to_bytes(8, "little"))
        state.update(content)
    return state.digest()


def _tensor(value: Tensor) -> bytes:
    plain = value.detach().resolve_conj().resolve_neg()
    plain = (plain if plain.layout == torch.strided else plain.to_dense()).cpu().contiguous()
    facts = (str(plain.dtype), repr(tuple(plain.shape)))
    return _hash("tensor", *facts, plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")


def _module_state(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module; hooks without their keys, which count up over all modules of a process."""
    return {
        key: list(item.values()) if "hooks" in key and isinstance(item, dict) else item
        for key, item in vars(module).items()
    }


def _global_names(code: types.CodeType) -> set[str]:
    """Names that a function and functions inside it may look up; some are attributes, which do no harm."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return {name for name in code.co_names if not hasattr(builtins, name)}.union(*map(_global_names, inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_installed(thing: Any, file: str) -> bool:
    return is_installed(getattr(thing, "__module__", None) or "", file)


def is_installed(module: str, file: str) -> bool:
    """Whether a module comes with Python, torch, this package or another installed one, rather than being your own."""
    home = module.partition(".")[0]
    return home in NAMED or home in sys.stdlib_module_names or file.startswith(INSTALLED)


def _name(thing: Any) -> bytes:
    return _hash("name", str(getattr(thing, "__module__", "")), thing.__qualname__)
