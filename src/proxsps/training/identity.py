"""The identity of a training run besides its spec: precision, device and data change its numbers, so also its id."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from proxsps.problems.vision import ImageClassification
from proxsps.sweep.loop import RENEWED
from proxsps.sweep.spec import RunSpec, describe, digest
from proxsps.training.ranks import TrainingRanks

PRECISIONS = {False: "float32", True: "bfloat16"}  # by `amp`


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(RunSpec):
    """A run together with its precision, device and data."""

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
