"""A whole sweep in one call: run what is missing in a store, and return the tables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from proxsps.sweep.engines import Advance, Batched, Engine
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store, TableStore


class Tables(NamedTuple):
    """The results of a sweep, with the columns that `proxsps.sweep.store` documents."""

    runs: pd.DataFrame  # one row for each run and epoch
    steps: pd.DataFrame  # one row for each iteration of the runs with seed 0


def run_sweep(
    specs: Sequence[RunSpec],
    folder: str | Path,
    engine: Engine | None = None,
    advance: Advance = lambda epochs: None,
) -> Tables:
    """Run what is missing of a sweep, and return the results of all its runs.

    Args:
        specs: the runs, as returned by `grid`.
        folder: folder of the store. Runs in it are not run again, and an interrupted sweep continues where it stopped.
            Its last part is the name of the sweep.
        engine: how to run; default: `Batched`.
        advance: called with the number of epochs that were finished.
    """
    place = Path(folder)
    store = Store(place, place.resolve().name)
    chosen = Batched() if engine is None else engine
    fill(store, specs, chosen.saving(place) if isinstance(chosen, Batched) else chosen, advance)
    ids = {spec.id for spec in specs}
    return Tables(*(table[table["run"].isin(ids)].reset_index(drop=True) for table in (store.runs, store.steps)))


def fill(store: TableStore, specs: Sequence[Any], engine: Engine, advance: Advance) -> None:
    """Run what a store lacks, and store each part as soon as it is finished."""
    store.lacking(specs)  # raises an error if a stored run does not fit its spec
    with closing(engine.run(specs, store.done, advance)) as finished:  # processes end with the sweep
        for results in finished:
            store.add(results)
