"""Files of images, CIFAR-10 and ImageNet32: where they are, and what is in them.

| set | what is read | place in the folder PROXSPS_DATA |
| --- | --- | --- |
| cifar10 | the official binary archive, by its md5 | `cifar10/cifar-10-binary.tar.gz`; else it is downloaded |
| cifar10 | parquet as public hubs publish it: `img` {bytes, path}, `label` | `cifar10/**/{train,test}-*.parquet` |
| imagenet32 | the published batches in NumPy's npz format | `imagenet32/**/{train_data_batch_*,val_data}.npz` |
| synthetic | nothing: drawn from a fixed seed | |

The decoded pixels go to a cache (`image_cache`).
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from proxsps.problems.datasets import DataError, data_folder, download, find_file, one_line
from proxsps.problems.image_cache import SIZE, Chunk, ImageSet, cached
from proxsps.problems.names import CLASSES

CIFAR10_FILE = "cifar-10-binary.tar.gz"
CIFAR10_URL = f"https://www.cs.toronto.edu/~kriz/{CIFAR10_FILE}"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
IMAGENET32_URL = "https://image-net.org/download-images"
PUBLISHED = {"cifar10": 50_000, "imagenet32": 1_281_167, "synthetic": 2_000}  # training images


@dataclass(frozen=True)
class Source:
    """The files of a data set, and how a file is read."""

    name: str
    train: tuple[Path, ...]
    validation: tuple[Path, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file once."""
        return tuple(dict.fromkeys((*self.train, *self.validation)))


def load_images(name: str) -> tuple[ImageSet, ImageSet]:
    """Training and validation images of "cifar10", "imagenet32" or "synthetic"."""
    return _loaded(name, data_folder())


@lru_cache(maxsize=4)
def _loaded(name: str, folder: Path | None) -> tuple[ImageSet, ImageSet]:
    """The images of a data set; cached by folder."""
    if name == "synthetic":
        return synthetic_images(PUBLISHED[name], 0), synthetic_images(PUBLISHED[name] // 4, 1)
    source = find_imagenet32() if name == "imagenet32" else find_cifar10()
    if source is None and name == "imagenet32":
        raise DataError(
            f"ImageNet32 is not there: download Imagenet32_train_npz.zip and Imagenet32_val_npz.zip from "
            f"{IMAGENET32_URL} (free, after a registration), unpack both into imagenet32/ in a folder, and set "
            "PROXSPS_DATA to that folder."
        )
    source = source or _downloaded_cifar10()
    return cached(source.name, source.files, partial(read_chunks, source))


# Where files are


def find_cifar10() -> Source | None:
    """CIFAR-10 in the folder PROXSPS_DATA, if it is there: the archive, or parquet files."""
    archive = find_file("cifar10", CIFAR10_FILE)
    if archive is not None:
        return Source("cifar10", (archive,), (archive,))
    train, test = (_listed("cifar10", f"{part}-*.parquet") for part in ("train", "test"))
    if bool(train) != bool(test):
        lacking = "test" if train else "train"
        raise DataError(f"{(train or test)[0].parent} lacks the {lacking}-*.parquet files of CIFAR-10. Put them there.")
    return Source("cifar10", train, test) if train else None


def _downloaded_cifar10() -> Source:
    by_hand = (
        f"Save {CIFAR10_URL} as cifar10/{CIFAR10_FILE} in a folder and set PROXSPS_DATA to that folder, "
        "or use data='synthetic'."
    )
    archive = download("cifar10", CIFAR10_URL, f"md5:{CIFAR10_MD5}", by_hand)
    return Source("cifar10", (archive,), (archive,))


def find_imagenet32() -> Source | None:
    """ImageNet32 in the folder PROXSPS_DATA, if it is there. Pickled batches raise an error: they can run code."""
    train, test = (_listed("imagenet32", f"{part}.npz") for part in ("train_data_batch_*", "val_data"))
    if train and test:
        return Source("imagenet32", train, test)
    pickles = [file for part in ("train_data_batch_*", "val_data") for file in _listed("imagenet32", part)]
    if pickles and not {file.suffix for file in pickles} - {""}:
        raise DataError(
            f"{pickles[0]} is a pickle, which may run any code when it is read. Get the npz variant of ImageNet32 from "
            f"{IMAGENET32_URL}, or convert your files as the documentation of deep networks shows."
        )
    if train or test:
        lacking = "val_data.npz" if train else "train_data_batch_*.npz"
        raise DataError(f"{(train or test)[0].parent} lacks {lacking} of ImageNet32. Put it there.")
    return None


def _listed(part: str, pattern: str) -> tuple[Path, ...]:
    folder = data_folder()
    return tuple(sorted((folder / part).rglob(pattern))) if folder else ()


# What is in them


def read_chunks(source: Source, part: str) -> Iterator[Chunk]:
    """The images of a part, "train" or "validation", file by file; at the end, their labels have been checked."""
    labels = []
    for file in source.train if part == "train" else source.validation:
        try:
            for images, chunk in _read_file(file, part):
                labels.append(chunk)
                yield images, chunk
        except OSError as error:
            raise DataError(f"{file} cannot be read ({error.strerror or one_line(error)}). Get it again.") from None
    check_labels(source.name, part, np.concatenate(labels))


def _read_file(file: Path, part: str) -> Iterator[Chunk]:
    if file.suffix == ".parquet":
        yield read_parquet(file)
    elif file.suffix == ".npz":
        yield read_npz(file)
    else:
        yield from read_archive(file, part)


def read_archive(file: Path, part: str) -> Iterator[Chunk]:
    """Images of CIFAR-10's binary archive: records of a label and 3072 bytes, red, green, blue."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "md5").hexdigest()
    if digest != CIFAR10_MD5:
        raise DataError(
            f"{file} is not the published archive: its md5 is {digest}, expected {CIFAR10_MD5}. "
            f"Replace it by {CIFAR10_URL}."
        )
    names = [f"data_batch_{i}" for i in range(1, 6)] if part == "train" else ["test_batch"]
    with tarfile.open(file, "r:gz") as archive:
        for name in names:
            member = archive.extractfile(f"cifar-10-batches-bin/{name}.bin")
            if member is None:
                raise DataError(f"{file} has no file {name}.bin. Delete it, so that it is downloaded again.")
            records = np.frombuffer(member.read(), np.uint8).reshape(-1, 1 + 3 * SIZE**2)
            yield records[:, 1:].reshape(-1, 3, SIZE, SIZE), records[:, 0].astype(np.int64)


def read_parquet(file: Path) -> Chunk:
    """Images of a parquet file with the columns `img`, a structure of bytes and path, and `label`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(pa.BufferReader(file.read_bytes())).read(["img.bytes", "label"])
        images, labels = table["img"].combine_chunks().field("bytes"), table["label"].to_numpy()
        if labels.dtype.kind not in "iu":
            raise KeyError("labels that are not integers")
    except (pa.ArrowException, KeyError) as error:
        raise DataError(
            f"{file} is not a parquet file with the columns img (bytes, path) and label ({one_line(error)}). "
            "Get it again."
        ) from None
    pixels = np.empty((len(images), 3, SIZE, SIZE), np.uint8)
    for row, content in enumerate(images):
        pixels[row] = _decode(content.as_py(), f"{file}, row {row}")
    return pixels, labels.astype(np.int64)


def _decode(content: bytes | None, where: str) -> np.ndarray:
    """The pixels of a compressed image, (3, 32, 32)."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the size that is checked below
            image = Image.open(io.BytesIO(content or b""))  # reads the size, no pixels
        with image:
            size = image.size
            pixels = np.asarray(image.convert("RGB")) if size == (SIZE, SIZE) else None
    except Image.DecompressionBombError:
        raise DataError(f"{where}: expected an image of {SIZE} x {SIZE} pixels, got hundreds of millions.") from None
    except Exception as error:  # of many kinds: each of Pillow's readers fails in its own ways
        reason = "cut short" if "truncated" in str(error) else "not an image that Pillow can read"
        raise DataError(f"{where}: the image is damaged ({reason}). Get the file again.") from None
    if pixels is None:
        raise DataError(f"{where}: expected an image of {SIZE} x {SIZE} pixels, got {size[0]} x {size[1]}.")
    return pixels.transpose(2, 0, 1)


def read_npz(file: Path) -> Chunk:
    """Images of a batch of ImageNet32: `data` (n, 3072) in uint8 and `labels` from 1 to 1000. Nothing is unpickled."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            data, labels = arrays["data"], arrays["labels"]
        if data.dtype != np.uint8 or labels.dtype.kind not in "iu":
            raise ValueError(f"data is {data.dtype} and labels {labels.dtype}")
        return data.reshape(len(labels), 3, SIZE, SIZE), labels.astype(np.int64) - 1
    except Exception as error:  # of many kinds: from the archive, its compression, the headers of its arrays
        raise DataError(
            f"{file} is not a batch of ImageNet32: expected data, (n, 3072) in uint8, and labels, (n,) from 1 to 1000 "
            f"({one_line(error) or type(error).__name__}). Get it again."
        ) from None


def check_labels(name: str, part: str, labels: np.ndarray) -> None:
    """Raise an error for labels that are not 0, 1, ... up to the number of classes, each of them present."""
    classes, found = CLASSES[name], np.unique(labels)
    if len(found) != classes or found[0] != 0 or found[-1] != classes - 1:
        span = f"{found[0]} to {found[-1]}" if len(found) else "none"
        raise DataError(
            f"The {part} images of {name} have {len(found)} classes (labels {span}); expected {classes} (0 to "
            f"{classes - 1}). Check that these are the files of {name}."
        )


def synthetic_images(count: int, seed: int) -> ImageSet:
    """Ten classes that are easy to distinguish: one coarse pattern each, shifted in brightness, with noise."""
    coarse = np.random.RandomState(0).randint(40, 216, (10, 3, 4, 4))
    patterns = coarse.repeat(SIZE // 4, 2).repeat(SIZE // 4, 3)
    rng = np.random.RandomState(1 + seed)
    labels = rng.permutation(count) % 10
    noise = rng.normal(0, 25, (count, 3, SIZE, SIZE)) + rng.normal(0, 20, (count, 1, 1, 1))
    return ImageSet(np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels)
