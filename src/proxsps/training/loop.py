"""Runs of networks on images, one (`proxsps train`) or many (the deep experiments).

To the loop of all runs they add images in uint8 that are augmented in batches, running statistics, evaluation in parts,
a device, several processes, and a checkpoint after every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from proxsps.optim import renew_statistics
from proxsps.problems.vision import ImageClassification
from proxsps.sweep.engines import Processes, Results
from proxsps.sweep.loop import RENEWED, Run, Watch, is_schedule_free
from proxsps.sweep.pool import Advance
from proxsps.sweep.spec import METRICS, RunResult, RunSpec, describe, digest, median_zeta
from proxsps.training import checkpoint as checkpoints
from proxsps.training.checkpoint import checkpoint_file
from proxsps.training.ranks import ALONE, Batch, TrainingRanks, epoch_batches, placed, plain_batches

PRECISIONS = {False: "float32", True: "bfloat16"}  # by `amp`
MEASURED = 2_500  # training images on which the loss after an epoch is measured


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(RunSpec):
    """A run together with its precision, device and data, which change its numbers, so also its id."""

    problem: ImageClassification
    precision: str
    device: str  # its type, without an index
    statistics: int  # parts of a batch that have their own, in batch normalisation; 1 without
    data: str  # digest of the images

    @cached_property
    def id(self) -> str:
        """Sixteen digits: a hash of all of the above and of the spec."""
        return digest([super().id, self.conditions()])

    def conditions(self) -> dict[str, Any]:
        """What a run has in addition to its spec."""
        found = {name: getattr(self, name) for name in ("precision", "device", "statistics", "data")}
        if self.problem.batch_norm and self.definition.optimizer.endswith(":ScheduleFreeSPS"):
            found["renewed"] = RENEWED  # statistics after each epoch
        return found

    def facts(self) -> dict[str, Any]:
        """What must be equal in a checkpoint and a run; the number of epochs may differ."""
        problem = {f"problem {key}": value for key, value in describe(self.problem).items()}
        return {**self.columns(), **self._own_facts(), **problem, **self.conditions()}


def identify(spec: RunSpec, ranks: TrainingRanks, amp: bool = False) -> TrainingSpec:
    """The run of `train` for a spec on this device, by these processes; its data is read."""
    if not isinstance(spec.problem, ImageClassification):
        raise ValueError(f"Only image classification is trained here, got the problem {spec.problem.name!r}.")
    return TrainingSpec(
        problem=spec.problem,
        **spec.options(),
        precision=PRECISIONS[amp],
        device=ranks.device.type,
        statistics=ranks.size if spec.problem.batch_norm else 1,
        data=spec.problem.data_digest(),
    )


class ImageRun(Run):
    """A network on images, on a device, in one or several processes."""

    spec: TrainingSpec
    problem: ImageClassification
    extra: ClassVar[tuple[str, ...]] = ("val_accuracy", "zeta_low", "zeta_high", "truncated")

    def __init__(self, spec: RunSpec, ranks: TrainingRanks, amp: bool = False, checkpoint: Path | None = None) -> None:
        identified = identify(spec, ranks, amp)
        self.ranks, self.amp, self.device, self.checkpoint = ranks, amp, ranks.device, checkpoint
        super().__init__(identified, placed(identified.problem.network(), ranks.device))
        self.wrapped = ranks.wrap(self.model)
        if checkpoint is not None and checkpoints.prepare(checkpoint):
            self.resume(checkpoint)

    def batches(self) -> Iterator[Batch]:
        """This process's part of the batches of the next epoch."""
        return epoch_batches(self.problem, self.spec.seed, self.done, self.ranks)

    def loss(self, batch: Batch) -> Tensor:
        """The loss of this process's part of the batch. The optimizer averages over processes."""
        images, labels = batch
        with self._precision():
            return cross_entropy(self.wrapped(images), labels)

    def _precision(self) -> AbstractContextManager[Any]:
        """bfloat16 if it is selected: a network without normalisation starts with losses too large for float16."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp)

    def measure(self, zetas: np.ndarray) -> list[float]:
        """Metrics, accuracy, and more about the adaptive steps."""
        if self.problem.batch_norm and is_schedule_free(self.optimizer):
            self._renew_statistics()
        images, labels = self.problem.train_data()
        loss, _ = self.evaluate((images[:MEASURED], labels[:MEASURED]))
        _, accuracy = self.evaluate(self.problem.validation_data(self.spec.seed))
        square = sum(float(param.double().square().sum()) for param in self.params)
        objective = loss + float(self.penalty(square))
        seen = zetas[~np.isnan(zetas)]
        steps = [*np.quantile(seen, (0.25, 0.75)), np.mean(seen == 0)] if len(seen) else [math.nan] * 3
        return [objective, loss, 1 - accuracy, math.sqrt(square), float(median_zeta(zetas)), accuracy, *steps]

    def _renew_statistics(self) -> None:
        """Running statistics at the average: those of the steps belong to other weights. Equal in all processes."""
        with self._precision():
            renew_statistics(self.model, islice(self.batches(), RENEWED))
        for name, value in self.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value.copy_(self.ranks.sum(value) / self.ranks.size)

    @torch.no_grad()
    def evaluate(self, data: Batch) -> tuple[float, float]:
        """Mean loss and accuracy of a data set, with running statistics if there are any."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in plain_batches(data, self.ranks):
            with self._precision():
                scores = self.model(images)
            total[0] += cross_entropy(scores.float(), labels, reduction="sum")
            total[1] += (scores.argmax(1) == labels).sum()
        loss, correct = self.ranks.sum(total).tolist()
        return loss / len(data[1]), correct / len(data[1])

    def save(self) -> None:
        """Write the checkpoint, with the weights that were measured; a run that has diverged keeps its last one."""
        if self.checkpoint is None or self.diverged or not self.ranks.first:
            return
        metrics, extra = np.split(self.rows, [len(METRICS)], axis=1)
        arrays = {"metrics": metrics, "extra": extra, "zetas": self.zetas}
        history = {name: torch.from_numpy(array[: self.done].copy()) for name, array in arrays.items()}
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "history": history}
        checkpoints.save(self.checkpoint, self.spec, state)

    def resume(self, path: Path) -> None:
        """Continue the run where a checkpoint ends."""
        content = checkpoints.load(path, self.spec, self.device)
        with checkpoints.complete(path):
            history = {name: value.cpu().numpy() for name, value in content["history"].items()}
            self.done = len(history["metrics"])
            self.rows[: self.done] = np.hstack([history["metrics"], history["extra"]])
            self.zetas[: self.done] = history["zetas"]
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])


def train(
    spec: RunSpec,
    checkpoint: Path | None = None,
    ranks: TrainingRanks = ALONE,
    amp: bool = False,
    watch: Watch | None = None,
) -> RunResult:
    """Run one spec of an `ImageClassification` problem.

    Args:
        spec: what to run. The spec of the result also says how it was run, and has its own id.
        checkpoint: file that is written after every epoch, and that the run continues from if it exists.
        ranks: device and processes, as `ranks.joined` returns them; by default this process on the CPU.
        amp: bfloat16 in the network's forward and backward passes; weights and steps stay in float32.
        watch: called during the run.
    """
    return ImageRun(spec, ranks, amp, checkpoint).finish(watch)


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
