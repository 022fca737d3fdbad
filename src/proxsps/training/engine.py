"""Many training runs of an experiment: one after the other on a GPU, side by side on the cores of a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from proxsps.sweep.engines import Advance, Results, run_name
from proxsps.sweep.loop import Watch
from proxsps.sweep.pool import Tell, run_tasks
from proxsps.sweep.result import RunResult
from proxsps.sweep.spec import RunSpec
from proxsps.training.identity import identify
from proxsps.training.loop import train
from proxsps.training.ranks import TrainingRanks


class Training:
    """Runs specs through `train`, with one checkpoint per run in `folder` until the run is finished and stored.

    Small networks gain little from a second thread: on a CPU there is one process per core, with one thread each.
    """

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.folder = folder
        self.workers = workers or os.cpu_count() or 1

    def identified(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The runs of this engine for some specs: their ids depend on the data, which is read, and on the device."""
        ranks = TrainingRanks(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return [identify(spec, ranks) for spec in specs]

    def run(self, specs: Sequence[RunSpec], done: Collection[str], advance: Advance) -> Results:
        """Results as they are finished. An interrupted run continues from its last epoch."""
        missing = [spec for spec in self.identified(specs) if spec.id not in done]
        for problem in {spec.problem for spec in missing}:
            problem.train_data()  # decoded once, and an error is raised here rather than in a process
        results = self._on_gpu(missing, advance) if torch.cuda.is_available() else self._in_processes(missing, advance)
        with closing(results):  # closing ends the processes
            for result in results:
                yield [result]
                self._file(result.spec).unlink(missing_ok=True)  # the consumer has kept it by now

    def _file(self, spec: RunSpec) -> Path:
        return self.folder / "checkpoints" / f"{spec.id}.pt"

    def _on_gpu(self, missing: Sequence[RunSpec], advance: Advance) -> Generator[RunResult, None, None]:
        ranks = TrainingRanks(torch.device("cuda"))
        return (train(spec, self._file(spec), ranks, watch=_Count(advance)) for spec in missing)

    def _in_processes(self, missing: Sequence[RunSpec], advance: Advance) -> Generator[RunResult, None, None]:
        tasks = [((spec, self._file(spec)), run_name(spec)) for spec in missing]
        return run_tasks(_train, tasks, self.workers, advance)


class _Count(Watch):
    """Reports the number of finished epochs, including those of a checkpoint."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def start(self, epochs: int, steps: int) -> None:
        self.advance(epochs)

    def epoch(self, row: dict[str, float]) -> None:
        self.advance(1)


def _train(task: tuple[RunSpec, Path], tell: Tell) -> RunResult:
    torch.set_num_threads(1)
    spec, file = task
    return train(spec, file, watch=_Count(tell))
