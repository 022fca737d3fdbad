"""Decoded images on disk: decoded once, then mapped into memory, and compared with their digest every time.

A folder of the cache is named after the sha256 of the files that it was decoded from. It is written beside its place
and renamed when it is complete, so that a kill leaves nothing half done. Files whose digest is wrong are decoded again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from proxsps.problems.datasets import DataError, one_line

SIZE = 32  # pixels of a side
PARTS = ("train", "validation")
CACHE_FORMAT = "2"
INDEX = "counts.json"

Chunk = tuple[np.ndarray, np.ndarray]  # images (n, 3, 32, 32) in uint8 and labels (n,)


@dataclass(frozen=True)
class ImageSet:
    """Images (N, 3, 32, 32) in uint8 and labels (N,) in int64; the images may be mapped from a file."""

    images: np.ndarray
    labels: np.ndarray

    @cached_property
    def digest(self) -> str:
        """The sha256 of pixels and labels: equal for equal images, wherever they were read from."""
        total = hashlib.sha256(np.ascontiguousarray(self.images).reshape(-1).data)
        total.update(np.ascontiguousarray(self.labels, "<i8").data)
        return total.hexdigest()


def cached(name: str, files: Sequence[Path], read: Callable[[str], Iterator[Chunk]]) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of a data set, decoded by `read` if no earlier run has done so.

    Args:
        name: the name of the data set.
        files: the files that `read` reads.
        read: the images of a part, "train" or "validation", chunk by chunk.
    """
    folder = _cache_folder() / f"{name}-{_fingerprint(files)}"
    found = _mapped(folder)
    if found is None:
        try:
            _fill(folder, read)
        except OSError as error:
            raise DataError(
                f"The decoded images cannot be kept in {folder} ({error.strerror or one_line(error)}). "
                "Make room there, or set XDG_CACHE_HOME to another folder."
            ) from None
        found = _mapped(folder)
    if found is None:
        raise DataError(
            f"The decoded images in {folder} are damaged, though they have just been written. Check that disk, or set "
            "XDG_CACHE_HOME to a folder on another one."
        )
    return found


def _cache_folder() -> Path:
    import pooch

    return Path(pooch.os_cache("proxsps")) / "images"


def _fingerprint(files: Sequence[Path]) -> str:
    total = hashlib.sha256(CACHE_FORMAT.encode())
    for file in files:
        try:
            with file.open("rb") as stream:
                total.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror}). Get it again.") from None
    return total.hexdigest()[:16]


def _fill(folder: Path, read: Callable[[str], Iterator[Chunk]]) -> None:
    """Decode all images into a folder beside, then give it its name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (beside / INDEX).write_text(json.dumps({part: _write_part(beside, part, read(part)) for part in PARTS}))
        if _mapped(folder) is None:  # else another process was faster
            shutil.rmtree(folder, ignore_errors=True)  # damaged
            with suppress(OSError):  # if it is in use, or another process was faster, that folder is read next
                beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_part(folder: Path, part: str, chunks: Iterator[Chunk]) -> dict[str, int | str]:
    """Write images and labels; their number and digest."""
    labels, total = [], hashlib.sha256()
    with (folder / f"{part}.images").open("wb") as stream:
        for images, chunk in chunks:
            content = np.ascontiguousarray(images).reshape(-1)
            stream.write(content.data)
            total.update(content.data)
            labels.append(chunk)
    joined = np.concatenate(labels).astype("<i8")
    joined.tofile(folder / f"{part}.labels")
    total.update(joined.data)
    return {"count": len(joined), "sha256": total.hexdigest()}


def _mapped(folder: Path) -> tuple[ImageSet, ImageSet] | None:
    """What is in a folder of the cache; None if it is not there, or is damaged."""
    try:
        index = json.loads((folder / INDEX).read_text())
        train, validation = (_map_part(folder, part, index[part]) for part in PARTS)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # of an index with other content
        return None
    return train, validation


def _map_part(folder: Path, part: str, entry: dict[str, int | str]) -> ImageSet:
    # Copy on write: torch needs arrays that can be written to, and the file must not change.
    images = np.memmap(folder / f"{part}.images", np.uint8, "c", shape=(int(entry["count"]), 3, SIZE, SIZE))
    found = ImageSet(images, np.fromfile(folder / f"{part}.labels", "<i8").astype(np.int64))
    if len(found.labels) != len(images) or found.digest != entry["sha256"]:
        raise ValueError
    return found
