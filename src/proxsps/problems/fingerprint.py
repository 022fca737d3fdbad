"""Digests of models, data and functions by their content: equal digests mean equal results, in any process.

Arrays count by their type, shape and bytes, functions by their bytecode, defaults, closure and the globals that they
use, objects by their class and state. Of your own modules, those attributes count that a function names, wherever it
imports the module; all other uses of a module count by its whole file. Objects of Python, torch or another installed
package count by their names. Bytecode is that of the running Python: another minor version gives other digests.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
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


def own_code(name: str) -> Any:
    """What "module:name" stands for if this is your own code; None if it is that of an installed package."""
    home, _, attribute = name.partition(":")
    module = _own_module(home, None)
    return None if module is None else getattr(module, attribute)


class _Walk:
    """Digests of objects, each computed once; an object inside itself counts as a mark."""

    def __init__(self) -> None:
        self.known: dict[int | tuple[str, frozenset[str]], bytes] = {}
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
                return _hash("module", value.__name__, *_source(value))
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
        code, known = function.__code__, function.__globals__
        closure = [_content(cell) for cell in function.__closure__ or ()]
        if _is_installed(function, code.co_filename):
            return _hash(_name(function), self.digest(closure))  # a decorator's closure holds what it decorates
        names = frozenset(_names(code))
        imported = [self._seen(module, names) for module in _imported(code, known.get("__package__"))]
        closure = [self._seen(value, names) for value in closure]
        used = {name: self._seen(known[name], names) for name in sorted(names) if name in known}
        parts = (code, function.__defaults__, function.__kwdefaults__, closure, used)
        return self.all("function", (*parts, imported) if imported else parts)

    def _seen(self, value: Any, names: frozenset[str]) -> Any:
        """What a function with these names sees of a value: of your own modules, the attributes that it names."""
        if not isinstance(value, types.ModuleType) or not _is_own(value):
            return value
        key = value.__name__, names
        if key not in self.known:
            self.known[key] = _hash("itself")
            found = {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}
            seen = {name: self._seen(part, names) for name, part in found.items()}
            self.known[key] = self.all("own module", (value.__name__, seen))
        return self.known[key]

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
    """A hash of texts and bytes with their lengths, so that no two lists give the same stream."""
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


def _names(code: types.CodeType) -> set[str]:
    """Names that a function and functions inside it may look up, as globals or as attributes.

    Names that every module has, such as `__name__`, say where a function is written, which does not count.
    """
    own = {name for name in code.co_names if not (name.startswith("__") and hasattr(builtins, name))}
    return own.union(*map(_names, _inner(code)))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (const for const in code.co_consts if isinstance(const, types.CodeType))


def _imported(code: types.CodeType, package: str | None) -> list[types.ModuleType]:
    """Your own modules that a function, or one inside it, imports when it is called."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    # Before an import come two constants: the number of dots, and what is taken from the module.
    names = ["." * steps[place - 2].argval + s.argval for place, s in enumerate(steps) if s.opname == "IMPORT_NAME"]
    found = [module for name in names if (module := _own_module(name, package)) is not None]
    return found + [module for inner in _inner(code) for module in _imported(inner, package)]


def _own_module(name: str, package: str | None) -> types.ModuleType | None:
    """Your own module of this name; None if it is not yours or not there. Installed modules are not imported."""
    try:
        name = resolve_name(name, package)
        home = None if name in sys.modules else find_spec(name.partition(".")[0])
        if home is not None and is_installed(name, home.origin or ""):
            return None
        module = import_module(name)
    except (ImportError, ValueError):
        return None
    return module if _is_own(module) else None


def _is_own(module: types.ModuleType) -> bool:
    return not is_installed(module.__name__, getattr(module, "__file__", None) or "")


def _source(module: types.ModuleType) -> list[bytes]:
    """The file of your own module."""
    file = getattr(module, "__file__", None)
    return [Path(file).read_bytes()] if file and _is_own(module) and Path(file).is_file() else []


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
