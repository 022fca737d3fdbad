"""Files that are replaced as a whole: after a kill or a power cut the old or the new content is there, never a mix."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"  # ending of a file that is being written


class StoreError(RuntimeError):
    """A store that cannot be read, written or used; nothing in it was changed."""


def replace_file(path: Path, content: bytes) -> None:
    """Write a temporary file, then rename it; both are on the disk before this returns. Raises OSError on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk, except on Windows and file systems that cannot sync a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
