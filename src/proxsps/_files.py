"""Files that are replaced as a whole: after a kill or a power cut the old or the new content is there, never a mix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"  # ending of a file that is being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file to write to, which replaces `path` afterwards; the old file stays if writing fails.

    Folders are made. The new content and its name are on the disk when the block is left. Raises OSError on failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())  # before the rename: a power cut must not leave a new name on an empty file
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file, or make one, with this content."""
    with replacing(path) as partial:
        partial.write_bytes(content)


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk, except on Windows and file systems that cannot sync a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
