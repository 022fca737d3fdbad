"""Files of tensors and plain data with a digest, so that damage is found before anything is read.

`torch.save` writes a zip archive; its comment holds the sha256 of all bytes before it. `torch.load` and other readers
of zip archives ignore the comment. The digest finds accidents, not malice: so nothing is unpickled either.
"""

from __future__ import annotations

import hashlib
import io
import struct
from pathlib import Path
from typing import Any

import torch

from proxsps._files import replace_file

MARK = b"proxsps sha256 "
LENGTH = len(MARK) + 2 * hashlib.sha256().digest_size


class SealError(ValueError):
    """A file that was not read; the text says what is wrong with it, as the end of a sentence about the file."""


def write(path: Path, content: Any) -> None:
    """Replace a file, or make one, with tensors and plain data. Raises OSError on failure, and leaves the old file."""
    replace_file(path, sealed(content))


def sealed(content: Any) -> bytes:
    """What `write` puts into a file."""
    stream = io.BytesIO()  # not a file: torch reports a full disk in its own words, as a RuntimeError
    torch.save(content, stream)
    body = stream.getvalue()[:-2] + struct.pack("<H", LENGTH)  # an archive ends with the length of its comment
    return body + _seal(body)


def read(path: Path, device: torch.device | str = "cpu") -> Any:
    """The content of a file. Raises OSError if it cannot be read, and SealError if it should not be used."""
    return unsealed(path.read_bytes(), device)


def unsealed(data: bytes, device: torch.device | str = "cpu") -> Any:
    """The content of the bytes that `sealed` returned."""
    if MARK not in data[-LENGTH:]:
        raise SealError("has no digest: it is another kind of file, is damaged, or was written by another version")
    if _seal(data[:-LENGTH]) != data[-LENGTH:]:
        raise SealError("is damaged: its content does not have the digest it was written with")
    try:
        return torch.load(io.BytesIO(data), map_location=device, weights_only=True)
    except Exception:  # of many kinds, and their texts advise to unpickle the file
        raise SealError("holds more than tensors and plain data, so it was not read") from None


def _seal(body: bytes) -> bytes:
    return MARK + hashlib.sha256(body).hexdigest().encode()
