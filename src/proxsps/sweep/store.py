"""Results of one experiment in two parquet files, complete after every addition.

`runs.parquet`, a row per run and epoch:

| column | meaning |
| --- | --- |
| run | id of the run: the hash of its spec |
| experiment, method, schedule, lr, weight_decay, seed | what was run; lr is alpha_0, weight_decay lambda |
| epoch | 1, 2, ... |
| objective | training loss + lambda/2 ||x||^2 after the epoch |
| train_loss, val_error, model_norm | its parts, the problem's validation error, and ||x|| |
| zeta_median | median over the epoch of the adaptive step zeta_k; NaN for methods without |
| alpha | alpha_k throughout the epoch |
| status | "ok", or "diverged" from the first epoch whose objective is not finite (metrics are then NaN) |

Experiments on images have columns of their own before alpha: the validation accuracy and more on zeta_k.

`steps.parquet`, a row per iteration of the runs with seed 0: run, method, schedule, lr, weight_decay, seed, step,
epoch, zeta, alpha. Files are replaced as a whole, so that a kill leaves the old or the new ones, never a torn one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from proxsps.sweep.result import METRICS, RunResult, alpha_of_epoch

VERSION = b"1"
KEY = b"proxsps.store"


class StoreError(RuntimeError):
    """A store that cannot be read or written; nothing in it was changed."""


class Store:
    """The results of one experiment in `folder`."""

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment
        self.runs = self._read("runs")
        steps = self._read("steps")
        # runs.parquet is written last: steps of a run that it does not know are from a write that was cut short.
        self.steps = steps[steps["run"].isin(self.done)] if len(steps) else steps

    @property
    def done(self) -> set[str]:
        """Ids of the runs that are here."""
        return set(self.runs["run"]) if len(self.runs) else set()

    def add(self, results: Iterable[RunResult]) -> None:
        """Take in finished runs."""
        done = self.done
        fresh = list({result.spec.id: result for result in results if result.spec.id not in done}.values())
        if not fresh:
            return
        steps = _joined(self.steps, [_step_rows(result) for result in fresh if result.spec.seed == 0])
        runs = _joined(self.runs, [_epoch_rows(result, self.experiment) for result in fresh])
        self._write("steps", steps)
        self._write("runs", runs)
        self.steps, self.runs = steps, runs

    def _read(self, name: str) -> pd.DataFrame:
        path = self.folder / f"{name}.parquet"
        try:
            # At once into memory: another process may replace the file while it is read.
            table = pq.read_table(pa.BufferReader(path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return pd.DataFrame()
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"Cannot read {path}: {reason}. Choose another folder with --out.") from None
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0]
            raise StoreError(f"{path} cannot be read ({reason}). Move it away to start again, or restore it.") from None
        version = (table.schema.metadata or {}).get(KEY)
        if version != VERSION:
            found = "no version" if version is None else f"version {version.decode()}"
            raise StoreError(
                f"{path} was written by another version (it has {found}, this is version {VERSION.decode()}). "
                "Choose another folder with --out, or move the file away."
            )
        return table.to_pandas()

    def _write(self, name: str, frame: pd.DataFrame) -> None:
        path = self.folder / f"{name}.parquet"
        table = pa.Table.from_pandas(frame, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: VERSION})
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, partial, compression="zstd")
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise StoreError(
                f"Cannot write {path}: {error.strerror or error}. Choose another folder with --out."
            ) from None


def _joined(old: pd.DataFrame, parts: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([part for part in (old, *parts) if len(part)], ignore_index=True) if parts else old


def _epoch_rows(result: RunResult, experiment: str) -> pd.DataFrame:
    spec, epochs = result.spec, np.arange(1, result.spec.epochs + 1)
    diverged = result.diverged_at or spec.epochs + 1
    return pd.DataFrame(
        {
            "run": spec.id,
            "experiment": experiment,
            **spec.columns(),
            "epoch": epochs,
            **dict(zip(METRICS, result.metrics.T, strict=True)),
            **result.extra,
            "alpha": [alpha_of_epoch(spec, epoch - 1, result.zetas) for epoch in epochs],
            "status": np.where(epochs < diverged, "ok", "diverged"),
        }
    )


def _step_rows(result: RunResult) -> pd.DataFrame:
    spec = result.spec
    epochs, steps = result.zetas.shape
    epoch = np.repeat(np.arange(1, epochs + 1), steps)
    return pd.DataFrame(
        {
            "run": spec.id,
            **spec.columns(),
            "step": np.arange(epochs * steps),
            "epoch": epoch,
            "zeta": result.zetas.ravel(),
            "alpha": np.repeat([alpha_of_epoch(spec, e, result.zetas) for e in range(epochs)], steps),
        }
    )
