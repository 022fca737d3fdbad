"""Many training runs of an experiment: one after the other on a GPU, side by side on the cores of a CPU."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from proxsps.sweep.engines import Advance, start_worker
from proxsps.sweep.result import RunResult
from proxsps.sweep.spec import RunSpec
from proxsps.training.identity import identify
from proxsps.training.loop import Watch, train
from proxsps.training.ranks import Ranks

PATIENCE = 0.5  # seconds between looks at what the processes have done


class Training:
    """Runs specs through `train`, with a checkpoint each in `folder` until a run is finished and taken in.

    Small networks gain little from a second thread: on a CPU as many processes as cores take runs, a thread each.
    """

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.folder = folder
        self.workers = workers or os.cpu_count() or 1

    def identified(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The runs that this engine makes of specs: their ids depend on the data, which is read, and on the device."""
        ranks = Ranks(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return [identify(spec, ranks) for spec in specs]

    def run(self, specs: Sequence[RunSpec], done: Collection[str], advance: Advance) -> Iterator[list[RunResult]]:
        """Results as they are finished. A run that was cut off goes on from its last epoch."""
        missing = [spec for spec in self.identified(specs) if spec.id not in done]
        for problem in {spec.problem for spec in missing}:
            problem.train_data()  # decoded once, and an error is raised here rather than in a process
        results = self._on_gpu(missing, advance) if torch.cuda.is_available() else self._in_processes(missing, advance)
        for result in results:
            yield [result]
            self._file(result.spec).unlink(missing_ok=True)  # the consumer has kept it by now

    def _file(self, spec: RunSpec) -> Path:
        return self.folder / "checkpoints" / f"{spec.id}.pt"

    def _on_gpu(self, missing: Sequence[RunSpec], advance: Advance) -> Iterator[RunResult]:
        ranks = Ranks(torch.device("cuda"))
        return (train(spec, self._file(spec), ranks, watch=_Count(advance)) for spec in missing)

    def _in_processes(self, missing: Sequence[RunSpec], advance: Advance) -> Iterator[RunResult]:
        context = multiprocessing.get_context("spawn")  # a fork after torch has started threads may hang
        news = context.SimpleQueue()
        tasks = [(spec, self._file(spec)) for spec in missing]
        # Leaving the block, by an error or an interrupt too, ends the workers at once.
        with context.Pool(min(self.workers, len(missing) or 1), _start_worker, (news,)) as pool:
            results, pending = pool.imap_unordered(_train, tasks), len(tasks)
            while pending:
                with suppress(multiprocessing.TimeoutError):
                    result = results.next(PATIENCE)
                    pending -= 1
                    yield result
                while not news.empty():
                    advance(news.get())


class _Count(Watch):
    """Passes on how many epochs were finished, those of a checkpoint included."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def start(self, epochs: int, steps: int) -> None:
        self.advance(epochs)

    def epoch(self, row: dict[str, float]) -> None:
        self.advance(1)


_news: Any = None  # of a worker: where it tells of finished epochs


def _start_worker(news: Any) -> None:
    global _news
    _news = news
    start_worker()


def _train(task: tuple[RunSpec, Path]) -> RunResult:
    spec, file = task
    return train(spec, file, watch=_Count(_news.put))
