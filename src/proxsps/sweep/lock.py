"""The lock of a folder of results: one command writes to it at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from proxsps._files import PARTIAL
from proxsps.sweep.files import StoreError

PATIENCE = 60.0  # seconds to wait for another command that is writing


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this command alone. It is created if it is missing, and files that a kill left are removed."""
    lock = FileLock(folder / ".lock", timeout=PATIENCE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise StoreError(
            f"Another command has been writing to {folder} for {PATIENCE:.0f} seconds. What is in the store "
            "is kept; run the same command again when the other one is done."
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"Cannot write to {folder}: {reason}. Choose another folder with --out.") from None
    try:
        for left in folder.glob(f"*.parquet.*{PARTIAL}"):  # of a command that was killed
            with suppress(OSError):
                left.unlink()
        yield
    finally:
        lock.release()
