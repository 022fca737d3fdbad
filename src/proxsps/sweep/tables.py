"""Tables as parquet files with a digest of their content, so that damage is found even if the size is the same.

Pages have checksums, which other readers check as well; the digest covers the rest: schema, lengths, encodings. It is
kept in the file's metadata, in a field of fixed length that counts as zeros when the digest is computed.

One command writes to a folder of tables at a time: it holds the folder's lock.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from proxsps._files import PARTIAL, replace_file
from proxsps.sweep.files import MAKE_ROOM, StoreError
from proxsps.sweep.pool import first_line
from proxsps.sweep.spec import METRICS, SETTING, RunSpec

VERSION = b"2"
READABLE = (b"1", VERSION)  # the first version had no digest
KEY = b"proxsps.store"
DIGEST_KEY = b"proxsps.digest"
MARK = b"sha256:"
BLANK = b"0" * 64
PATIENCE = 60.0  # seconds to wait for another command that is writing
PLACE = re.compile(MARK + rb"([0-9a-f]{64})")

OF_TRIALS = ["task", "method", "lr", "seed", "ending"]  # what distinguishes them
DEFAULT = "L2"  # the regulariser of runs that name none
TEXTS = {"run", "trial", "experiment", "method", "schedule", "status", "task", "ending", "title", "metric"}
WHOLE = {"seed", "epoch", "step", "steps"}
RUNS = ["run", "experiment", *SETTING, "epoch", *METRICS, "alpha", "status"]
STEPS = ["run", *SETTING, "step", "epoch", "zeta", "alpha"]
TRIALS = ["trial", "experiment", *OF_TRIALS, "title", "metric", "steps", "value", "status"]


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
    return hashlib.sha256(content[:place] + BLANK + content[place + len(BLANK) :]).hexdigest().encode()


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


# Checks: the form of tables, and whether they hold a whole sweep. Each error is one line.


def check_runs(runs: pd.DataFrame, path: Path, experiment: str) -> None:
    """Check columns, types, that there is one experiment, and that each run has all epochs once and in order."""
    _check_columns(runs, RUNS, path, experiment)
    _check_rows(runs, "epoch", 1, path)
    ok = runs["status"] == "ok"
    if not (ok | (runs["status"] == "diverged")).all() or (ok & ~np.isfinite(runs["objective"])).any():
        raise _unusable(path, "a status is unknown, or does not fit the objective")


def check_steps(steps: pd.DataFrame, runs: pd.DataFrame, path: Path) -> None:
    """Check columns and types, and that runs with seed 0 have all steps once and in order."""
    if len(steps):
        _check_columns(steps, STEPS, path)
        _check_rows(steps, "step", 0, path)
    epochs = runs[runs["seed"] == 0].groupby("run")["epoch"].max()
    found = steps.groupby("run")["epoch"].max() if len(steps) else pd.Series(dtype="int64")
    if lacking := int((found.reindex(epochs.index) != epochs).sum()):
        raise _unusable(path, f"it lacks steps of {lacking} of the {len(epochs)} runs with seed 0")


def check_trials(trials: pd.DataFrame, path: Path, experiment: str) -> None:
    """Check columns, types, that there is one experiment, and that each trial is there once."""
    _check_columns(trials, TRIALS, path, experiment)
    if trials["trial"].duplicated().any():
        raise _unusable(path, "a trial is there twice")


def check_against(runs: pd.DataFrame, specs: Sequence[RunSpec], folder: Path) -> None:
    """Check that runs stored under the id of a spec have its constants and its number of epochs."""
    known = {spec.id: spec for spec in specs}
    here = runs[runs["run"].isin(known)]
    for row in here.groupby("run", sort=False).last().reset_index().to_dict("records"):
        spec, fault = known[row["run"]], ""
        if row["epoch"] != spec.epochs:
            fault = f"{row['epoch']} of the {spec.epochs} epochs of run {spec.id}: rows were lost"
        elif any(row[name] != value for name, value in spec.columns().items()):
            fault = f"run {spec.id} with wrong constants"
        if fault:
            raise StoreError(f"{folder} holds {fault}. Restore runs.parquet, or move the folder away to start again.")


def check_settings(
    settings: pd.DataFrame, wanted: set[tuple[Any, ...]], folder: Path, command: str
) -> list[tuple[Any, ...]]:
    """The settings of all runs, one row each; an error if there is one twice, or if a wanted one is missing."""
    if twice := int(settings.duplicated().sum()):
        raise other_runs(folder, f"more than one run of {twice} settings, of other data or of another version", command)
    # NaN, which is not equal to itself, becomes None.
    found = [tuple(None if v != v else v for v in row) for row in settings.itertuples(index=False, name=None)]
    if missing := len(wanted - set(found)):
        raise StoreError(f"{missing} of {len(wanted)} runs are missing in {folder}: run `{command}`.")
    return found


def _check_columns(table: pd.DataFrame, wanted: Sequence[str], path: Path, experiment: str | None = None) -> None:
    if lacking := [name for name in wanted if name not in table.columns]:
        raise _unusable(path, f"it has no column {', '.join(lacking)}")
    for name in wanted:
        kinds = "OUT" if name in TEXTS else "iu" if name in WHOLE else "f"
        kind = "T" if isinstance(table[name].dtype, pd.StringDtype) else table[name].dtype.kind
        if kind not in kinds:
            raise _unusable(path, f"the column {name} has the wrong type, {table[name].dtype}")
    if table[[name for name in wanted if name in TEXTS]].isna().any(axis=None):
        raise _unusable(path, "constants of runs are missing")
    if experiment is not None and (foreign := set(table["experiment"]) - {experiment}):
        raise StoreError(
            f"{path} holds rows of another experiment ({', '.join(sorted(foreign))}), not only of {experiment}. "
            "Move them away, or choose another folder with --out."
        )


def _check_rows(table: pd.DataFrame, counter: str, first: int, path: Path) -> None:
    """Check that the rows of a run have the same constants, and count from `first` on without a gap, in order."""
    if table[SETTING].isna().any(axis=None):
        raise _unusable(path, "constants of runs are missing")
    if not np.array_equal(table[counter], table.groupby("run", sort=False).cumcount() + first):
        raise _unusable(path, f"a run has a {counter} twice, out of order or not at all")
    if len(table[["run", *SETTING]].drop_duplicates()) != table["run"].nunique():
        raise _unusable(path, "rows of one run have different constants")


def _unusable(path: Path, reason: str) -> StoreError:
    return StoreError(f"{path} cannot be used: {reason}. Restore it, or move the folder away to start again.")


def other_runs(folder: Path, which: str, command: str) -> StoreError:
    """The error for a store that does not hold exactly the runs of a sweep."""
    return StoreError(
        f"{folder} holds {which}. Move the folder away and run `{command}`, or choose another with --out."
    )
