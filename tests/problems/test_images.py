"""Files of images as they are published, with invented pixels; and damaged ones."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import struct
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from proxsps.problems import DataError, images, vision
from proxsps.problems.datasets import data_folder
from proxsps.problems.images import _loaded, find_cifar10, find_imagenet32, load_images, read_parquet, synthetic_images

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("pooch")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="moves the cache folder through XDG_CACHE_HOME")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of data, an empty cache, and nothing remembered from other tests."""
    data = tmp_path / "data"
    (data / "cifar10").mkdir(parents=True)
    (data / "imagenet32").mkdir()
    monkeypatch.setenv("PROXSPS_DATA", str(data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches = (_loaded, vision._data)
    for cache in caches:
        cache.cache_clear()
    yield data
    for cache in caches:
        cache.cache_clear()


def drawn(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.RandomState(seed)
    return rng.randint(0, 256, (count, 3, 32, 32), dtype=np.uint8), (np.arange(count) * 3 + seed) % 10


def compressed(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(stream, "png")
    return stream.getvalue()


def write_parquet(file: Path, contents: list[bytes | None], labels: np.ndarray) -> None:
    rows = [{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(contents)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"img": pa.array(rows, kind), "label": labels}), file)


def write_hub(folder: Path, count: int = 40) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Training images in two files, validation images in one."""
    parts = {"train": drawn(count, 0), "test": drawn(20, 1)}
    pixels, labels = parts["train"]
    for i, part in enumerate((slice(0, 15), slice(15, None))):
        write_parquet(folder / f"train-0000{i}-of-00002.parquet", [compressed(p) for p in pixels[part]], labels[part])
    write_parquet(folder / "test-00000-of-00001.parquet", [compressed(p) for p in parts["test"][0]], parts["test"][1])
    return parts


def write_archive(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Five training files of 20 images and one of 20 for validation, the last of which are returned at the end."""
    pixels, labels = drawn(120, 2)
    records = np.concatenate([labels[:, None].astype(np.uint8), pixels.reshape(120, -1)], axis=1)
    with tarfile.open(file, "w:gz") as archive:
        for i, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
            content = records[20 * i : 20 * (i + 1)].tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return pixels, labels


def refusal(name: str = "cifar10") -> str:
    _loaded.cache_clear()
    with pytest.raises(DataError) as caught:
        load_images(name)
    message = str(caught.value)
    assert "\n" not in message
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).glob("proxsps/images/*")), "something was left in the cache"
    return message


# What is read


def test_parquet(folder):
    parts = write_hub(folder / "cifar10")
    for found, (pixels, labels) in zip(load_images("cifar10"), parts.values(), strict=True):
        np.testing.assert_array_equal(found.images, pixels)
        np.testing.assert_array_equal(found.labels, labels)
        assert found.labels.dtype == np.int64


def test_archive(folder, monkeypatch):
    file = folder / "cifar10" / images.CIFAR10_FILE
    pixels, labels = write_archive(file)
    assert "is not the published archive: its md5 is" in refusal()
    monkeypatch.setattr(images, "CIFAR10_MD5", hashlib.md5(file.read_bytes()).hexdigest())
    _loaded.cache_clear()
    train, validation = load_images("cifar10")
    np.testing.assert_array_equal(np.concatenate([train.images, validation.images]), pixels)
    np.testing.assert_array_equal(np.concatenate([train.labels, validation.labels]), labels)


def test_imagenet32(folder):
    pixels, _ = drawn(2000, 3)
    labels = np.random.RandomState(0).permutation(2000) % 1000 + 1
    for i, part in ((1, slice(0, 1200)), (2, slice(1200, 2000))):
        file = folder / "imagenet32" / f"train_data_batch_{i}.npz"
        np.savez(file, data=pixels[part].reshape(-1, 3072), labels=labels[part], mean=np.zeros(3072))
    assert "lacks val_data.npz" in refusal("imagenet32")
    np.savez(folder / "imagenet32" / "val_data.npz", data=pixels[:1000].reshape(-1, 3072), labels=np.arange(1, 1001))
    train, validation = load_images("imagenet32")
    np.testing.assert_array_equal(train.images, pixels)
    np.testing.assert_array_equal(train.labels, labels - 1)
    np.testing.assert_array_equal(validation.labels, np.arange(1000))


def test_synthetic_images_are_the_same_again():
    first, again, other = synthetic_images(50, 0), synthetic_images(50, 0), synthetic_images(50, 1)
    np.testing.assert_array_equal(first.images, again.images)
    assert (first.images != other.images).any()
    assert sorted(np.bincount(first.labels)) == [5] * 10
    train, validation = load_images("synthetic")
    assert train.images.shape == (2000, 3, 32, 32)
    # The nearest mean of the training images tells nearly all classes apart.
    means = np.stack([train.images[train.labels == c].mean(0) for c in range(10)])
    distances = ((validation.images[:, None] - means) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == validation.labels).mean() > 0.9


# The cache


def cached() -> Path:
    (place,) = Path(os.environ["XDG_CACHE_HOME"]).glob("proxsps/images/cifar10-*")
    return place


def test_images_are_decoded_once(folder):
    write_hub(folder / "cifar10")
    load_images("cifar10")
    before = {file.name: file.stat().st_ino for file in cached().iterdir()}
    _loaded.cache_clear()
    train, _ = load_images("cifar10")
    assert {file.name: file.stat().st_ino for file in cached().iterdir()} == before
    pixel = int(train.images[0, 0, 0, 0])
    train.images[0, 0, 0, 0] = 255 - pixel  # in memory only
    assert (cached() / "train.images").read_bytes()[0] == pixel


def test_images_are_those_of_the_folder_that_is_named_now(folder, tmp_path, monkeypatch):
    write_hub(folder / "cifar10")
    (tmp_path / "other" / "cifar10").mkdir(parents=True)
    write_hub(tmp_path / "other" / "cifar10", count=60)
    problem = vision.ImageClassification(depth=8)
    first = problem.data_digest(), len(problem.train_data()[0])
    monkeypatch.setenv("PROXSPS_DATA", str(tmp_path / "other"))
    second = problem.data_digest(), len(problem.train_data()[0])
    assert first[0] != second[0]
    assert (first[1], second[1]) == (40, 60)


@pytest.mark.parametrize("damage", ["counts.json", "train.images", "validation.labels"])
def test_a_damaged_cache_is_made_again(folder, damage):
    parts = write_hub(folder / "cifar10")
    load_images("cifar10")
    file = cached() / damage
    file.write_bytes(file.read_bytes()[:-3])
    assert_made_again(parts)


def assert_made_again(parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    _loaded.cache_clear()
    for found, (pixels, labels) in zip(load_images("cifar10"), parts.values(), strict=True):
        np.testing.assert_array_equal(found.images, pixels)
        np.testing.assert_array_equal(found.labels, labels)
    assert len(list(cached().parent.iterdir())) == 1


@pytest.mark.parametrize("name", ["train.images", "train.labels", "validation.images", "validation.labels"])
@pytest.mark.parametrize("kind", ["zeros", "bit"])
def test_damage_that_keeps_the_size_is_found(folder, name, kind):
    parts = write_hub(folder / "cifar10")
    load_images("cifar10")
    file = cached() / name
    content = bytearray(file.read_bytes())
    if kind == "zeros":
        content = bytearray(len(content))
    else:
        content[len(content) // 2] ^= 4
    file.write_bytes(content)
    assert_made_again(parts)


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"7",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"train": 40, "validation": 20}',
        b'{"train": {"count": -1, "sha256": ""}, "validation": {"count": 20, "sha256": ""}}',
        b'{"train": {"count": 1e300, "sha256": ""}, "validation": {"count": 20, "sha256": ""}}',
        b'{"train": {"count": null, "sha256": ""}, "validation": {"count": 20, "sha256": ""}}',
        b'{"train": {"count": 10, "sha256": ""}, "validation": {"count": 20, "sha256": ""}}',
    ],
)
def test_an_index_with_other_content_is_made_again(folder, index):
    parts = write_hub(folder / "cifar10")
    load_images("cifar10")
    (cached() / "counts.json").write_bytes(index)
    assert_made_again(parts)


def test_other_files_have_another_cache(folder):
    write_hub(folder / "cifar10")
    load_images("cifar10")
    write_parquet(
        folder / "cifar10" / "test-00000-of-00001.parquet", [compressed(drawn(10, 9)[0][0])] * 10, np.arange(10)
    )
    _loaded.cache_clear()
    assert len(load_images("cifar10")[1].labels) == 10


def test_a_cache_that_cannot_be_written_says_so(folder, tmp_path, monkeypatch):
    write_hub(folder / "cifar10")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME to another folder" in refusal()


# What is refused


def test_missing_cifar10_says_what_to_get_and_where_to_put_it(folder, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(images, "CIFAR10_URL", f"http://127.0.0.1:9/{images.CIFAR10_FILE}")
    message = refusal()
    assert "could not be downloaded" in message
    assert f"Save http://127.0.0.1:9/{images.CIFAR10_FILE} as cifar10/{images.CIFAR10_FILE}" in message
    assert "PROXSPS_DATA" in message


def test_missing_imagenet32_says_what_to_get_and_where_to_put_it(folder):
    message = refusal("imagenet32")
    assert "Imagenet32_train_npz.zip" in message
    assert "imagenet32/" in message


def test_half_of_the_files(folder):
    write_hub(folder / "cifar10")
    (folder / "cifar10" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"lacks the test-\*.parquet files"):
        find_cifar10()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda good: good[: len(good) // 2], "row 3: the image is damaged"),
        (lambda good: b"", "row 3: the image is damaged"),
        (lambda good: None, "row 3: the image is damaged"),
        (lambda good: compressed(np.zeros((3, 16, 8), np.uint8)), "expected an image of 32 x 32 pixels, got 8 x 16"),
    ],
    ids=["cut short", "empty", "null", "size"],
)
def test_a_damaged_image(folder, content, reason):
    pixels, labels = drawn(20, 0)
    contents = [compressed(p) for p in pixels]
    write_parquet(folder / "cifar10" / "test-00000-of-00001.parquet", contents, labels)
    contents[3] = content(contents[3])
    write_parquet(folder / "cifar10" / "train-00000-of-00001.parquet", contents, labels)
    message = refusal()
    assert reason in message
    assert "train-00000-of-00001.parquet" in message


def bomb(side: int) -> bytes:
    """A PNG file of some bytes that says it has side x side pixels."""
    content = compressed(np.zeros((3, 32, 32), np.uint8))
    header = b"IHDR" + struct.pack(">II", side, side) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


@pytest.mark.parametrize(("side", "found"), [(10_000, "got 10000 x 10000"), (60_000, "got hundreds of millions")])
def test_an_image_with_too_many_pixels_is_not_decoded(folder, side, found):
    pixels, labels = drawn(20, 0)
    contents = [compressed(p) for p in pixels]
    write_parquet(folder / "cifar10" / "test-00000-of-00001.parquet", contents, labels)
    write_parquet(folder / "cifar10" / "train-00000-of-00001.parquet", [bomb(side), *contents[1:]], labels)
    assert f"row 0: expected an image of 32 x 32 pixels, {found}" in refusal()


@pytest.mark.parametrize(
    "write",
    [
        lambda file: file.write_bytes(b"no parquet"),
        lambda file: pq.write_table(pa.table({"image": [1], "label": [0]}), file),
        lambda file: pq.write_table(pa.table({"img": [{"bytes": b""}], "label": [0.5]}), file),
        lambda file: pq.write_table(pa.table({"img": [1], "label": [0]}), file),
    ],
    ids=["text", "columns", "labels", "images"],
)
def test_other_parquet_files(folder, write):
    write_hub(folder / "cifar10")
    write(folder / "cifar10" / "train-00000-of-00002.parquet")
    assert "is not a parquet file with the columns img (bytes, path) and label" in refusal()


@pytest.mark.parametrize(("labels", "found"), [(np.arange(20) % 9, "9 classes"), (np.arange(20) % 10 + 1, "1 to 10")])
def test_a_wrong_number_of_classes(folder, labels, found):
    write_hub(folder / "cifar10")
    contents = [compressed(p) for p in drawn(20, 1)[0]]
    write_parquet(folder / "cifar10" / "test-00000-of-00001.parquet", contents, labels)
    message = refusal()
    assert found in message
    assert "expected 10 (0 to 9)" in message


class Harm:
    """An object whose unpickling leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_pickles_are_refused_unread(folder, tmp_path):
    trace = tmp_path / "trace"
    for name in ("train_data_batch_1", "val_data"):
        (folder / "imagenet32" / name).write_bytes(pickle.dumps(Harm(trace)))
    assert "is a pickle, which may run any code" in refusal("imagenet32")
    for name in ("train_data_batch_1", "val_data"):
        objects = np.empty(3, object)
        objects[:] = Harm(trace)
        np.savez(folder / "imagenet32" / f"{name}.npz", data=objects, labels=np.arange(3))
    assert "is not a batch of ImageNet32" in refusal("imagenet32")
    assert not trace.exists()
    pickle.loads((folder / "imagenet32" / "val_data").read_bytes())
    assert trace.exists(), "the trap works"


@pytest.mark.parametrize(
    "arrays",
    [
        {"data": np.zeros((4, 3072)), "labels": np.ones(4, int)},
        {"data": np.zeros((4, 3000), np.uint8), "labels": np.ones(4, int)},
        {"data": np.zeros((4, 3072), np.uint8)},
    ],
    ids=["dtype", "shape", "labels"],
)
def test_other_npz_files(folder, arrays):
    for name in ("train_data_batch_1", "val_data"):
        np.savez(folder / "imagenet32" / f"{name}.npz", **arrays)
    assert find_imagenet32() is not None
    assert "is not a batch of ImageNet32" in refusal("imagenet32")
    (folder / "imagenet32" / "train_data_batch_1.npz").write_bytes(b"no zip")
    assert "is not a batch of ImageNet32" in refusal("imagenet32")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_npz_files(tmp_path, save):
    """Flipped bits and missing ends: an error in one line, or what was written (a flip in a date, for instance)."""
    rng = np.random.RandomState(0)
    data, labels = rng.randint(0, 256, (5, 3072), dtype=np.uint8), rng.randint(1, 1001, 5)
    file = tmp_path / "batch.npz"
    save(file, data=data, labels=labels)
    good = file.read_bytes()
    damaged = [good[:cut] for cut in range(0, len(good), len(good) // 40)]
    places = [*rng.randint(0, len(good), 150), *range(len(good) - 150, len(good)), *range(60)]
    damaged += [good[:i] + bytes([good[i] ^ (1 << rng.randint(8))]) + good[i + 1 :] for i in places]
    refusals = []
    for content in damaged:
        file.write_bytes(content)
        try:
            found = images.read_npz(file)
        except DataError as error:
            refusals.append(str(error))
        else:
            np.testing.assert_array_equal(found[0].reshape(5, 3072), data)
            np.testing.assert_array_equal(found[1], labels - 1)
    assert len(refusals) > len(damaged) // 2
    assert not any("\n" in refusal for refusal in refusals)


def test_the_conversion_of_the_documentation(folder):
    page = (Path(__file__).parents[2] / "docs" / "deep-networks.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def convert" in block]
    namespace: dict[str, object] = {"Path": Path}
    exec(source, namespace)
    pixels, _ = drawn(1000, 5)
    batch = {"data": pixels.reshape(-1, 3072), "labels": list(range(1, 1001)), "mean": pixels[0]}
    for name in ("train_data_batch_1", "val_data"):
        (folder / "imagenet32" / name).write_bytes(pickle.dumps(batch))
    namespace["convert"](folder / "imagenet32")
    for found in load_images("imagenet32"):
        np.testing.assert_array_equal(found.images, pixels)
        np.testing.assert_array_equal(found.labels, np.arange(1000))


# Real data, where it is there


REAL = sorted(data_folder().glob("cifar10/test-*.parquet")) if data_folder() else []


@pytest.mark.skipif(not REAL, reason="PROXSPS_DATA has no CIFAR-10 in parquet")
def test_real_validation_images():
    pixels, labels = read_parquet(REAL[0])
    assert pixels.shape == (10_000, 3, 32, 32)
    assert np.bincount(labels).tolist() == [1000] * 10
    # Known means of the channels of CIFAR-10; those of the validation images, through JPEG, are within two grey values.
    assert np.abs(pixels.mean((0, 2, 3)) - [125.3, 123.0, 113.9]).max() < 2
