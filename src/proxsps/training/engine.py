"""Many training runs of an experiment: one after the other on a GPU, side by side on the cores of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from proxsps.sweep.engines import Advance, Processes, Results
from proxsps.sweep.result import RunResult
from proxsps.sweep.spec import RunSpec
from proxsps.training.checkpoint import checkpoint_file
from proxsps.training.identity import TrainingSpec, identify
from proxsps.training.loop import ImageRun
from proxsps.training.ranks import TrainingRanks


class Training(Processes):
    """Runs specs through `train`, with one checkpoint per run in `folder` until the run is finished and stored.

    Small networks gain little from a second thread: on a CPU there is one process per core, with one thread each.
    """

    def __init__(self, folder: Path, workers: int | None = None) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(workers if self.device.type == "cpu" else 0, partial(_train, folder, self.device))
        self.folder = folder

    def identified(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The runs of this engine for some specs: their ids depend on the data, which is read, and on the device."""
        return [identify(spec, TrainingRanks(self.device)) for spec in specs]

    def run(self, specs: Sequence[RunSpec], done: Collection[str], advance: Advance) -> Results:
        """Results as they are finished. An interrupted run continues from its last epoch."""
        missing = [spec for spec in self.identified(specs) if spec.id not in done]
        for problem in {spec.problem for spec in missing}:
            problem.train_data()  # decoded once, and an error is raised here rather than in a process
        with closing(super().run(missing, (), advance)) as results:
            for (result,) in results:
                yield [result]
                checkpoint_file(self.folder, result.spec).unlink(missing_ok=True)  # the consumer has kept it by now


def _train(folder: Path, device: torch.device, spec: TrainingSpec, advance: Callable[[int], None]) -> RunResult:
    return ImageRun(spec, TrainingRanks(device), checkpoint=checkpoint_file(folder, spec)).finish(advance=advance)
