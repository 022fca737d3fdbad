"""A sweep in one call, and ways to run a list of specs: batched in this process, one by one, or in a pool of processes.

An engine yields results as they are finished, and skips the runs in `done`. The runs of a batch are chosen from the
whole list, not from what is missing: so an interrupted sweep gives bitwise the results of an uninterrupted one.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pandas as pd
import torch

from proxsps.regularizers import Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Scalar
from proxsps.sweep.batched import EVERY, SavedBatch, is_large, run_batched
from proxsps.sweep.loop import run_single
from proxsps.sweep.pool import Advance, first_line, run_tasks
from proxsps.sweep.pool import EngineError as EngineError  # part of this module's interface
from proxsps.sweep.spec import RunResult, RunSpec
from proxsps.sweep.store import Store, TableStore

# Lists of `RunResult`, or of rows of trials, as they are finished; closing it ends its processes.
Results = Generator[list[Any], None, None]

BATCH = 300  # runs; larger batches are hardly faster
LONG = 5_000  # steps of a large batch from which a separate process saves time
MEMORY = 512 * 2**20  # bytes of parameters and data that the runs of a batch may hold


class Engine(Protocol):
    """Runs specs."""

    def run(self, specs: Sequence[RunSpec], done: Collection[str], advance: Advance) -> Results:
        """Results of the specs whose id is not in `done`, as they are finished."""


@dataclass(frozen=True)
class Batched:
    """Hundreds of runs as one tensor program. Runs that cannot be batched are run one by one, after the others.

    These are runs of your own methods without a rule, and of regularisers that need the shapes of parameters.

    Args:
        size: largest number of runs in a batch.
        folder: where the state of a running batch is saved, so that a kill costs only the time since the last save;
            without a folder it is not saved.
        every: seconds between two saves.
        processes: whether large batches that take long run side by side, each in a process with one thread. This
            process imports the main module again, so a script needs `if __name__ == "__main__"`.
    """

    size: int = BATCH
    folder: Path | None = None
    every: float = EVERY
    processes: bool = False

    def saving(self, folder: Path) -> Batched:
        """The same engine, which saves the state of running batches beside the store in `folder`."""
        return replace(self, folder=folder / "batches")

    def run(self, specs: Sequence[RunSpec], done: Collection[str], advance: Advance) -> Results:
        """One batch after the other, except those that run in processes."""
        batches, cores = list(self.batches(specs)), torch.get_num_threads()
        # Chosen from the whole list, not from what is missing: rounding depends on the number of threads.
        long = [batch for batch in batches if _is_long(batch)]
        if self.processes and cores > 1 and len(long) > 1:
            yield from self._run(long, cores, done, advance)
            batches = [batch for batch in batches if not _is_long(batch)]
        yield from self._run(batches, 0, done, advance)

    def _run(self, batches: Sequence[list[RunSpec]], workers: int, done: Collection[str], advance: Advance) -> Results:
        missing = [batch for batch in batches if any(spec.id not in done for spec in batch)]
        tasks = [((batch, self._saved(batch)), f"a batch of {len(batch)} runs") for batch in missing]
        with closing(run_tasks(run_batch, tasks, workers, advance)) as finished:
            for results in finished:
                yield [result for result in results if result.spec.id not in done]
        for saved in filter(None, map(self._saved, batches)):
            saved.remove()  # the consumer has kept the results by now

    def _saved(self, batch: Sequence[RunSpec]) -> SavedBatch | None:
        return SavedBatch(self.folder, batch, self.every) if self.folder and is_batched(batch[0]) else None

    def batches(self, specs: Sequence[RunSpec]) -> Iterator[list[RunSpec]]:
        """Runs that share problem and epochs, in order, as many at a time as memory allows."""
        together = [spec for spec in specs if is_batched(spec)]
        for _, group in itertools.groupby(together, key=lambda spec: (spec.problem, spec.epochs)):
            same = list(group)
            size = max(1, min(self.size, MEMORY // _footprint(same[0])))
            count = math.ceil(len(same) / size)
            if count == 1 and is_large(same):
                count = min(2, len(same))  # two halves fit the cache better, and two cores run one half each
            size = math.ceil(len(same) / count)  # batches of equal size rather than a small rest
            yield from (same[i : i + size] for i in range(0, len(same), size))
        yield from ([spec] for spec in specs if not is_batched(spec))


def is_batched(spec: RunSpec) -> bool:
    """Whether a run can share a tensor program with others."""
    if spec.method != "adamw" and not spec.definition.rule:
        return False
    return spec.regularizer is None or (spec.lr > 0 and is_uniform(spec.phi))


def is_uniform(phi: Regularizer) -> bool:
    """Whether a regulariser treats every entry in the same way, in any tensor: not so if it needs their shapes."""
    structure = phi.structure((1,))
    if phi.joint or not isinstance(structure, Entries | Quadratic):
        return False
    if isinstance(structure, Quadratic):
        return structure.center is None and isinstance(structure.lam, int | float)
    return isinstance(structure.psi, Scalar) and all(isinstance(value, int | float) for value in structure.psi)


def run_batch(task: tuple[Sequence[RunSpec], SavedBatch | None], advance: Advance) -> list[RunResult]:
    """Run a batch, which is one tensor program or one run; its state is saved if there is a place for it."""
    batch, saved = task
    return run_batched(batch, advance, saved) if is_batched(batch[0]) else [run_single(batch[0], advance)]


def _footprint(spec: RunSpec) -> int:
    """Bytes that one run holds: parameters, gradients and moments, and its validation data."""
    params = sum(x.nbytes for x in spec.problem.start().values())
    return 8 * params + sum(array.nbytes for array in spec.problem.validation_data(spec.seed)) + 1


class Processes:
    """Single runs in a pool of processes with one thread each.

    Args:
        workers: the number of processes; default: one for each core.
        work: what to do with a spec, or a trial: a function of it and of a function that counts finished epochs.
    """

    def __init__(self, workers: int | None = None, work: Callable[[Any, Advance], Any] = run_single) -> None:
        self.workers, self.work = os.cpu_count() or 1 if workers is None else workers, work

    def run(self, specs: Sequence[Any], done: Collection[str], advance: Advance) -> Results:
        """Runs in the order in which they finish; an interrupt keeps finished runs."""
        missing = [spec for spec in specs if spec.id not in done]
        if self.workers:
            check_sendable([spec for spec in missing if isinstance(spec, RunSpec)])
        tasks = [(spec, spec.describe()) for spec in missing]
        # Leaving the block, by an error or an interrupt too, ends the processes at once.
        with closing(run_tasks(self.work, tasks, self.workers, advance)) as results:
            for result in results:
                yield [result]


class Single(Processes):
    """One run after the other in this process, through the optimizers."""

    def __init__(self) -> None:
        super().__init__(workers=0)


def _is_long(batch: Sequence[RunSpec]) -> bool:
    first = batch[0]
    own = first.problem.fingerprint(first.seed) is not None  # may have parts that cannot be sent to a process
    own = own or any(spec.own is not None or spec.regularizer is not None for spec in batch) or not is_batched(first)
    return not own and is_large(batch) and first.epochs * first.problem.steps_per_epoch >= LONG


def check_sendable(specs: Sequence[RunSpec]) -> None:
    """Raise an error that names what cannot be sent to a process: functions inside functions, for instance."""
    parts: dict[int, tuple[str, object]] = {}
    for spec in specs:
        parts[id(spec.problem)] = f"problem {spec.problem.name!r}", spec.problem
        parts[id(spec.own)] = f"method {spec.method!r}", spec.own
        parts[id(spec.regularizer)] = f"regularizer of the runs of {spec.method!r}", spec.regularizer
    for name, part in parts.values():
        try:
            pickle.dumps(part)
        except Exception as error:  # of many kinds: each object has its own reasons
            raise EngineError(
                f"The {name} cannot be sent to a process ({first_line(error)}). Define its functions and classes "
                "at the top of a module instead of inside a function or as a lambda, or use the engine batched or "
                "single."
            ) from None


ENGINES: dict[str, type[Engine]] = {"batched": Batched, "single": Single, "processes": Processes}


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
