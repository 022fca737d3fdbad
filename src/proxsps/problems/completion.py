"""Matrix completion: fill the gaps in a month of air-quality measurements (appendix on matrix completion).

    W_ij ~ <u_i, v_j> + a_i + b_j    for sensor i and hour j.

The published procedure: measurements in row-major order, shuffled once, the first 80 % for training, standardised by
mean and standard deviation of the training part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from proxsps.problems.base import BASE_SEED, DTYPES, Problem, check_batch_size, check_choice, check_sizes, seeded
from proxsps.problems.datasets import (
    SENSOR_SHAPE,
    DataError,
    load_sensors,
    parse_sensors,
    read_month,
    synthetic_sensors,
)
from proxsps.problems.matrix import as_tensor, linear_weight

DENSE = 4096  # measurements above which the whole matrix is faster than its entries one by one


@dataclass(frozen=True)
class MatrixCompletion(Problem):
    """Predict held-out measurements of 130 sensors over 720 hours; loss: mean squared error.

    `data` is "real" (see `datasets.load_sensors` for its place), "synthetic", a stand-in of the same shape
    and number of measurements, or a CSV file of another month in the same format: its path, or its name in the folder
    PROXSPS_DATA. This file may have other numbers of sensors and hours; its content is part of the ids
    of its runs. An incomplete last batch is dropped, as the published loader did in every
    experiment: 350 steps make an epoch.

    `convention` chooses the validation error: "published" (default, used for the reference figures) is the mean
    of the root mean squared errors of the validation set's batches, "text" the root mean squared error of the whole
    set, which is larger by about half a percent.

    Parameters: U (130, r) and V (720, r), one row per sensor or hour, which is the transpose of the paper's U and V and
    faster to look up; bias_U (130,), bias_V (720,). Data: sensor (n,), hour (n,), value (n,).
    """

    name: ClassVar[str] = "matrix-completion"

    r: int = 24
    batch_size: int = 128
    data: str = "real"
    convention: str = "published"
    data_seed: int = BASE_SEED
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes(r=self.r)
        check_batch_size(self.batch_size)
        if self.data not in ("real", "synthetic") and not self.data.endswith(".csv"):
            raise ValueError(f"data must be 'real', 'synthetic' or the name of a .csv file, got {self.data!r}.")
        check_choice("convention", self.convention, ("published", "text"))
        check_choice("dtype", self.dtype, tuple(DTYPES))

    def fingerprint(self, seed: int) -> str | None:
        """A digest of a file of another month; None for the data of this package, which the name identifies."""
        return _month_digest(self.data) if self.data.endswith(".csv") else super().fingerprint(seed)

    def start(self) -> dict[str, Tensor]:
        """Torch's default initialisation of linear layers for U and V, standard normal biases."""
        return {name: value.clone() for name, value in _start(self).items()}

    def train_data(self) -> tuple[Tensor, Tensor, Tensor]:
        """Sensor, hour and standardised value of the training measurements."""
        return _split(self)[0]

    def validation_data(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """The measurements that were held out, the same for every seed."""
        return _split(self)[1]

    def predict(self, params: dict[str, Tensor], sensor: Tensor, hour: Tensor) -> Tensor:
        """Estimated standardised measurements, (n,)."""
        U, V, a, b = params["U"], params["V"], params["bias_U"], params["bias_V"]
        if sensor.shape[-1] > DENSE:
            return (U @ V.T + a[:, None] + b)[sensor, hour]
        return (embedding(sensor, U) * embedding(hour, V)).sum(-1) + a[sensor] + b[hour]

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Mean squared error."""
        sensor, hour, value = batch
        return (self.predict(params, sensor, hour) - value).square().mean()

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """Root mean squared error; see the class for `convention`."""
        sensor, hour, value = data
        squares = (self.predict(params, sensor, hour) - value).square()
        if self.convention == "text":
            return squares.mean().sqrt()
        size, count = self.batch_size, len(squares)
        complete, rest = squares[: count - count % size], squares[count - count % size :]
        total = size * complete.reshape(-1, size).mean(1).sqrt().sum()
        if len(rest):
            total = total + len(rest) * rest.mean().sqrt()
        return total / count


@lru_cache(maxsize=8)
def _start(problem: MatrixCompletion) -> dict[str, Tensor]:
    sensors, hours = _table(problem).shape if problem.data.endswith(".csv") else SENSOR_SHAPE
    with seeded(problem.data_seed):
        start = {
            "U": linear_weight(sensors, problem.r).T.contiguous(),
            "V": linear_weight(hours, problem.r).T.contiguous(),
            "bias_U": torch.randn(sensors, device="cpu", dtype=torch.float32),
            "bias_V": torch.randn(hours, device="cpu", dtype=torch.float32),
        }
    return {name: value.to(DTYPES[problem.dtype]) for name, value in start.items()}


@lru_cache(maxsize=8)
def _split(problem: MatrixCompletion) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    return split_measurements(_table(problem), problem.data_seed, DTYPES[problem.dtype])


def _table(problem: MatrixCompletion) -> np.ndarray:
    match problem.data:
        case "real":
            return load_sensors()
        case "synthetic":
            return synthetic_sensors(problem.data_seed)
    table = parse_sensors(read_month(problem.data), problem.data, published=False)
    known = np.count_nonzero(table)
    if int(0.8 * known) < problem.batch_size or np.ptp(table[table != 0]) == 0:
        raise DataError(
            f"{problem.data} holds {known} measurements, four fifths of which have to fill a batch of "
            f"{problem.batch_size} and differ. Pass the file of a whole month."
        )
    return table


@lru_cache(maxsize=8)
def _month_digest(name: str) -> str:
    return hashlib.sha256(read_month(name)).hexdigest()


def split_measurements(
    table: np.ndarray, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Training and validation measurements, each as (row, column, standardised value), from a table with 0 for none."""
    rows, columns = np.nonzero(table)
    order = np.random.RandomState(seed).permutation(len(rows))
    rows, columns = rows[order], columns[order]
    values = table[rows, columns]
    count = int(0.8 * len(values))
    values = (values - values[:count].mean()) / values[:count].std()

    def part(chosen: slice) -> tuple[Tensor, Tensor, Tensor]:
        index = [as_tensor(array[chosen], torch.int64) for array in (rows, columns)]
        return index[0], index[1], as_tensor(values[chosen], dtype)

    return part(slice(None, count)), part(slice(count, None))
