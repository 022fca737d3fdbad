"""Tables as parquet files with a digest of their content, so that damage is found even if the size is the same.

Pages have checksums, which other readers check as well; the digest covers the rest: schema, lengths, encodings. It is
kept in the file's metadata, in a field of fixed length that counts as zeros when the digest is computed.

One command writes to a folder of tables at a time: it holds the folder's lock.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from proxsps._files import PARTIAL, replace_file
from proxsps.sweep.files import MAKE_ROOM, StoreError
from proxsps.sweep.pool import first_line

VERSION = b"2"
READABLE = (b"1", VERSION)  # the first version had no digest
KEY = b"proxsps.store"
DIGEST_KEY = b"proxsps.digest"
MARK = b"sha256:"
BLANK = b"0" * 64
PATIENCE = 60.0  # seconds to wait for another command that is writing
PLACE = re.compile(MARK + rb"([0-9a-f]{64})")


def read_table(path: Path) -> pd.DataFrame:
    """The table in a file; an empty one if there is no file."""
    try:
        content = path.read_bytes()  # at once: another process may replace the file while it is read
    except (FileNotFoundError, NotADirectoryError):
        return pd.DataFrame()
    except OSError as error:
        raise StoreError(f"Cannot read {path}: {error.strerror or error}. Choose another folder with --out.") from None
    marks = [match.start(1) for match in PLACE.finditer(content)]
    if marks and _digest(content, marks[-1]) != content[marks[-1] : marks[-1] + len(BLANK)]:
        raise _damaged(path, "its digest does not fit its content")
    try:
        table = pq.read_table(pa.BufferReader(content), page_checksum_verification=True)
        version = (table.schema.metadata or {}).get(KEY)
        frame = table.to_pandas()
    except Exception as error:  # of many kinds: the reader fails in many ways on damaged bytes
        raise _damaged(path, first_line(error)) from None
    if version not in READABLE:
        found = "no version" if version is None else f"version {version.decode(errors='replace')}"
        raise StoreError(
            f"{path} was written by another version (it has {found}, this is version {VERSION.decode()}). "
            "Choose another folder with --out, or move the file away."
        )
    if version == VERSION and not marks:
        raise _damaged(path, "its digest is missing")
    return frame


def write_table(path: Path, frame: pd.DataFrame) -> None:
    """Replace a file by a table, with a digest."""
    table = pa.Table.from_pandas(frame, preserve_index=False)
    facts = {**(table.schema.metadata or {}), KEY: VERSION, DIGEST_KEY: MARK + BLANK}
    buffer = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(facts), buffer, compression="zstd", write_page_checksum=True)
    content = buffer.getvalue().to_pybytes()
    place = content.rindex(MARK + BLANK) + len(MARK)
    content = content[:place] + _digest(content, place) + content[place + len(BLANK) :]
    try:
        replace_file(path, content)
    except OSError as error:
        raise StoreError(f"Cannot write {path}: {error.strerror or error}. {MAKE_ROOM}") from None


def _digest(content: bytes, place: int) -> bytes:
    """The digest of all bytes, with zeros in place of the digest itself."""
    parts = hashlib.sha256(content[:place])
    parts.update(BLANK)
    parts.update(content[place + len(BLANK) :])
    return parts.hexdigest().encode()


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(f"{path} is damaged ({reason}). Restore it, or move it away to start again.")


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
