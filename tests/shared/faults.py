"""Faults that tests make happen: a disk that is full, and a file that would run code if it were unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Writing more than this to a file fails, as it does on a full disk."""
    resource = pytest.importorskip("resource", reason="limits the size of files, as a full disk does")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Harm:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def flipped(content: bytes, bit: int) -> bytes:
    """The content with one bit changed."""
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
