"""Sensor files in the published layout, with invented measurements."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from proxsps.problems import completion, linear
from proxsps.problems.datasets import synthetic_sensors


def write_sensors(file: Path, table: np.ndarray) -> Path:
    hours = [f"2018-01-{1 + hour // 24:02d} {hour % 24:02d}:00:00" for hour in range(table.shape[1])]
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["", *hours])
        writer.writerows([str(7 * row), *map(repr, values.tolist())] for row, values in enumerate(table))
    return file


@pytest.fixture
def sensor_file(tmp_path: Path) -> Callable[[np.ndarray | None], Path]:
    """Write a table, by default one of the right shape, to a file and return its path."""

    def write(table: np.ndarray | None = None) -> Path:
        return write_sensors(tmp_path / "sensors.csv", synthetic_sensors(3) if table is None else table)

    return write


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Data read during the test is forgotten, before and after."""
    caches = (completion._split, completion._start, completion._month_digest, linear._read_labelled)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
