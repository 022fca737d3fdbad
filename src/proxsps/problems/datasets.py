"""Files of data: the air-quality sensors, and the LIBSVM text format. Files are checked before they are read."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from proxsps._install import extra
from proxsps.problems.errors import DataError as DataError  # part of this module's interface

SENSOR_FILE = "Ventana_Eli_mes1.csv"
SENSOR_URL = f"https://raw.githubusercontent.com/andresgiraldo3312/DMF/main/DatosEliminados/{SENSOR_FILE}"
SENSOR_SHA256 = "39ecb05e3472c791dc7d6ffc97e47f62edc6106fdccdb0d4a3be184383985d0d"
SENSOR_SHAPE = (130, 720)
SENSOR_COUNT = 56158

DENSE_LIMIT = 200_000_000  # entries of a LIBSVM file as a dense array: 1.6 GB


def data_folder() -> Path | None:
    """The folder that the environment variable PROXSPS_DATA names, if it is set."""
    folder = os.environ.get("PROXSPS_DATA")
    return Path(folder).expanduser() if folder else None


def load_sensors(path: str | os.PathLike[str] | None = None) -> np.ndarray:
    """Hourly measurements of the air-quality sensors, (130, 720) in float64; 0 where there is none.

    The file is `path` if given; else `sensor/Ventana_Eli_mes1.csv` or `Ventana_Eli_mes1.csv` in the folder that the
    environment variable PROXSPS_DATA names; else it is downloaded, once, from the address in the paper (Rivera-Munoz et
    al., 2022). Its checksum has to be that of the published file.
    """
    file = Path(path) if path is not None else find_sensors() or _download_sensors()
    content = _read(file)
    table = parse_sensors(content, str(file))
    digest = hashlib.sha256(content).hexdigest()
    if digest != SENSOR_SHA256:
        raise DataError(
            f"{file} is not the published sensor file: its sha256 is {digest}, expected {SENSOR_SHA256}. "
            f"Replace it by {SENSOR_URL}, or use data='synthetic'."
        )
    return table


def read_month(name: str) -> bytes:
    """The content of a file with another month of sensors: a path, or a name in the folder PROXSPS_DATA."""
    file = Path(name).expanduser()
    if not file.is_file():
        file = find_file("sensor", name) or file
    return _read(file)


def find_sensors() -> Path | None:
    """The sensor file in the folder PROXSPS_DATA, if it is there."""
    return find_file("sensor", SENSOR_FILE)


def find_file(part: str, name: str) -> Path | None:
    """A file in the folder PROXSPS_DATA or in its folder `part`, if it is there."""
    folder = data_folder()
    if folder is None:
        return None
    if not folder.is_dir():
        raise DataError(
            f"PROXSPS_DATA names {folder}, which is not a folder. Create it and put {name} there, or unset it."
        )
    places = (folder / part / name, folder / name)
    return next((place for place in places if place.is_file()), None)


def parse_sensors(content: bytes, source: str, published: bool = True) -> np.ndarray:
    """The table in a sensor file: a header of hours, then a row for each sensor: its label, then its measurements.

    Published are 130 sensors over 720 hours; with `published=False` there may be others, but at least two of each.
    """
    sensors, hours = SENSOR_SHAPE
    hint = (
        f"Expected {sensors} sensors x {hours} hours with {SENSOR_COUNT} nonzero measurements: get the file from "
        f"{SENSOR_URL}, or use data='synthetic'."
    )
    if not published:
        hours = content.partition(b"\n")[0].count(b",")
        hint = (
            "Expected a header with the hours, then a line for each sensor: its label, and a number for each hour, 0 "
            "for none."
        )
    rows = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(content.decode("utf-8"), newline="")), 1):
            if len(row) != hours + 1:
                raise DataError(f"{source}, line {number}: got {len(row)} columns instead of {hours + 1}. {hint}")
            if number > 1:
                where = f"{source}, line {number}"
                rows.append([_number(entry, where, "a measurement") for entry in row[1:]])
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{source} is not a CSV file. {hint}") from None
    if len(rows) != sensors if published else min(len(rows), hours) < 2:
        raise DataError(f"{source} holds a table of shape {len(rows)} x {hours if rows else 0}. {hint}")
    table = np.array(rows)
    if not published:
        return table
    count = np.count_nonzero(table)
    if count != SENSOR_COUNT:
        raise DataError(f"{source} holds {count} nonzero measurements. {hint}")
    return table


def synthetic_sensors(seed: int) -> np.ndarray:
    """A stand-in for the sensors: same shape, number of gaps, mean and spread; rank 5, with a daily cycle and noise."""
    rng = np.random.RandomState(seed)
    sensors, hours = SENSOR_SHAPE
    cycle = np.sin(2 * np.pi * (np.arange(hours) / 24 + rng.rand()))
    weather = np.cumsum(rng.randn(4, hours), axis=1)
    weather = (weather - weather.mean(1, keepdims=True)) / weather.std(1, keepdims=True)
    factors = np.vstack([cycle, weather])
    signal = rng.randn(sensors, 1) + (0.5 + rng.randn(sensors, len(factors))) @ factors
    signal += rng.randn(sensors, hours)
    # Mean, spread and smallest value of the real measurements.
    table: np.ndarray = np.maximum(23.8 + 11.0 * signal / signal.std(), 5.0)
    table.flat[rng.permutation(table.size)[SENSOR_COUNT:]] = 0.0
    return table


def load_libsvm(path: str | os.PathLike[str], features: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, n) and labels (N,) of a file in LIBSVM's text format: lines `label index:value index:value ...`.

    Indices start at 1 and increase along a line; missing entries are 0, `#` starts a comment. A relative path is
    searched in the working folder, then in the folder PROXSPS_DATA.

    Args:
        path: the file.
        features: n, if the file may not contain the last features; by default the largest index in the file.
    """
    file = Path(path).expanduser()
    folder = data_folder()
    if folder is not None and not file.exists() and (folder / file).exists():
        file = folder / file
    labels: list[float] = []
    cells: list[tuple[int, int, float]] = []
    for number, line in enumerate(_text(file), 1):
        words = line.partition("#")[0].split()
        if words:
            where = f"{file}, line {number}"
            cells.extend((len(labels), index, value) for index, value in _cells(words[1:], where))
            labels.append(_number(words[0], where, "a label"))
    if not cells:
        raise DataError(f"{file} holds no samples in LIBSVM's format, 'label index:value ...'.")
    width = max(index for _, index, _ in cells)
    if features is not None and width > features:
        raise DataError(f"{file} has a feature with index {width}, but the limit is {features} features.")
    shape = (len(labels), features or width)
    if math.prod(shape) > DENSE_LIMIT:
        raise DataError(
            f"{file} has {shape[0]} x {shape[1]} entries, more than {DENSE_LIMIT}: too large to hold densely."
        )
    table = np.zeros(shape)
    rows, columns, values = zip(*cells, strict=True)
    table[np.array(rows), np.array(columns) - 1] = values
    return table, np.array(labels)


def _cells(words: list[str], where: str) -> Iterator[tuple[int, float]]:
    last = 0
    for word in words:
        index, colon, value = word.partition(":")
        if not colon or not index.isascii() or not index.isdigit():
            raise DataError(f"{where}: expected index:value, got {word!r}.")
        if int(index) <= last:
            raise DataError(f"{where}: indices start at 1 and increase, got {word!r} after index {last}.")
        last = int(index)
        yield last, _number(value, where, "a value")


def _number(word: str, where: str, what: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: expected a finite number as {what}, got {word!r}.")
    return number


def _text(file: Path) -> list[str]:
    try:
        return _read(file).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{file} is not text; unpack it first if it is compressed.") from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}). Pass the path of an existing file.") from None


def _download_sensors() -> Path:
    """The sensor file in pooch's cache, downloaded if it is not there yet."""
    by_hand = (
        f"Save {SENSOR_URL} as sensor/{SENSOR_FILE} in a folder and set PROXSPS_DATA to that folder, "
        "or use data='synthetic'."
    )
    return download("sensor", SENSOR_URL, f"sha256:{SENSOR_SHA256}", by_hand)


def download(part: str, url: str, known_hash: str, by_hand: str) -> Path:
    """A file in the folder `part` of pooch's cache, downloaded if it is not there yet; its checksum has to be right."""
    try:
        import pooch
    except ImportError:
        raise DataError(
            f"Downloading the {part} data needs pooch: {extra('experiments')}. Without it: {by_hand}"
        ) from None
    try:
        path = pooch.retrieve(
            url,
            known_hash=known_hash,
            fname=url.rpartition("/")[2],
            path=pooch.os_cache("proxsps") / part,
            downloader=pooch.HTTPDownloader(timeout=30),
        )
    except (OSError, ValueError) as error:  # no network, refused, not writable; or another checksum
        raise DataError(f"The {part} data could not be downloaded: {one_line(error)}. {by_hand}") from None
    return Path(path)


def one_line(error: Exception) -> str:
    """The message of an error, on one line of limited length."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else f"{text[:297]}..."
