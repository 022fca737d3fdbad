"""Kernels that are cached on disk until a source changes that they are made of.

numba notices a change of the file of a kernel. But functions and constants of other files are compiled into it, so all
files that kernels are made of are part of the stamp here. Where the cache is, and everything else, is up to numba.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

# Files of other packages that kernels are made of.
FURTHER = tuple([("proxsps.core", name) for name in ("plain.py", "plain_step.py", "sampling.py")])


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator for a kernel that Python calls: compiled with these options of numba, cached, and without the GIL."""

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = numba.njit(nogil=True, **options)(function)
        kernel._cache = KernelCache(function)  # as with cache=True, which takes numba's own class
        return kernel

    return decorate


def inlined(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator for a function that kernels call: it becomes part of each of them.

    numba optimises a function alone, and once more inside of a kernel, under the same name. In the process that
    compiles them, calls run the first version; the cache on disk has the second one only. Their sums may be rounded
    differently, and a process that loads the kernel would not take bitwise the same step.
    """
    return numba.njit(forceinline=True, **options)  # type: ignore[no-any-return]


class KernelCache(FunctionCache):
    """numba's cache of a function, with the digest of all sources in its stamp."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp(), digest()
        self._cache_file = KernelFile(self._cache_path, self._impl.filename_base, stamp)


class KernelFile(IndexDataCacheFile):
    """numba's files of a function."""

    def save(self, key: Any, data: Any) -> None:
        """Store compiled code; code of other sources is removed first.

        The index is written before the code. A process that is killed in between must not leave old code that the new
        index refers to.
        """
        if not self._load_index():
            for old in Path(self._cache_path).glob(f"{self._index_name.removesuffix('.nbi')}.*.nbc"):
                with contextlib.suppress(OSError):  # another process was faster
                    old.unlink()
        super().save(key, data)


@cache
def digest() -> str:
    """A hash of all files that kernels are made of."""
    own = [file for file in files(__package__).iterdir() if file.name.endswith(".py")]
    sources = [*sorted(own, key=lambda file: file.name), *(files(package) / name for package, name in FURTHER)]
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in sources)).hexdigest()
