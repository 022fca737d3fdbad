"""A table of the experiments that can be read without loading torch; the experiments themselves load it."""

from __future__ import annotations

import difflib
from collections import UserDict
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proxsps.experiments.base import Experiment

CORES, GPU, HOURS = "two cores", "a GPU, estimated", "two cores, hours"
HOUR = 3600.0  # on a GPU: 1.5 GFLOP to train a ResNet110 on an image, half of it for a ResNet56, at 5 TFLOP/s


@dataclass(frozen=True)
class Entry:
    """An experiment in one line, and the module that defines it. Numbers are those of the published grid."""

    name: str
    home: str
    shows: str
    runs: int = 0
    epochs: int = 0
    seconds: float = 0.0
    hardware: str = CORES

    @property
    def numbers(self) -> dict[str, Any]:
        """The fields that an `Experiment` has too."""
        return {"epochs": self.epochs, "seconds": self.seconds, "hardware": self.hardware}


ENTRIES = (
    Entry("matrix-fac1", "matrix_fac", "ProxSPS and SPS over lambda, alpha_0", 300, 50, 7),
    Entry("matrix-fac1-stability", "matrix_fac", "ProxSPS, SPS and SGD over alpha_0", 320, 50, 7),
    Entry("matrix-fac2", "matrix_fac", "the same with noise, rank 10", 300, 50, 7),
    Entry("matrix-fac2-stability", "matrix_fac", "the same with noise, rank 10", 320, 50, 7),
    Entry("sensor", "sensor", "gaps in air-quality measurements", 63, 100, 220),
    Entry("conditioning", "illustrations", "condition numbers of matrix-fac"),
    Entry("interpolation", "illustrations", "sigma^2 of ridge regression"),
    Entry("model-compare", "illustrations", "Figure 1a: both models of a loss"),
    Entry("flow", "illustrations", "Figure 1b: flow of both methods"),
    Entry("theory-bounds", "theory", "the paper's bounds and runs", seconds=20),
    Entry("theory-floor", "theory", "the floor of SPS_max, and below it", seconds=6),
    Entry("theory-robustness", "theory", "three models over decades of steps", seconds=3),
    Entry("cifar10-resnet56", "deep", "ResNet56 on CIFAR-10", 27, 100, 6 * HOUR, GPU),
    Entry("cifar10-resnet110", "deep", "ResNet110 on CIFAR-10", 27, 100, 12 * HOUR, GPU),
    Entry("imagenet32-resnet110", "deep", "ResNet110 on ImageNet32", 12, 50, 65 * HOUR, GPU),
    Entry("cifar10-resnet110-epoch", "deep", "ResNet110 at full size, one epoch", 2, 1, 480),
    Entry("cifar10-resnet56-twin", "deep", "ResNet56, small enough for a CPU", 9, 12, 1570),
    Entry("cifar10-resnet110-twin", "deep", "ResNet110, small enough for a CPU", 3, 14, 1420),
    Entry("cifar10-resnet56-adaptive", "deep", "a cap that follows the adaptive step", 2, 24, 1470),
    Entry("cifar10-resnet56-long", "deep", "23,400 steps on small images", 4, 60, 1720),
    Entry("no-lr", "no_lr", "lr over six decades, and lr not set", 1530, 0, 1400),
    Entry("no-lr-long", "no_lr", "the same with four times the steps", 1530, 0, 5600, HOURS),
    Entry("no-lr-transformer", "no_lr", "10,000 steps of a transformer", 20, 0, 570),
)
CATALOGUE = {entry.name: entry for entry in ENTRIES}


class Experiments(UserDict[str, "Experiment"]):
    """Experiments by name: those of the catalogue, each loaded when it is first used, and those that were added."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, Experiment | None] = dict.fromkeys(CATALOGUE)  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Experiment:
        if self.data[name] is None:
            for experiment in import_module(f"proxsps.experiments.{CATALOGUE[name].home}").EXPERIMENTS:
                if self.data.get(experiment.name) is None:
                    self.data[experiment.name] = experiment
        if (found := self.data[name]) is None:
            raise KeyError(name)
        return found

    def find(self, name: str) -> Experiment:
        """The experiment of this name, or an error as in `check`."""
        self.check(name)
        return self[name]

    def check(self, name: str) -> None:
        """Raise an error if there is no experiment of this name, with the name that was probably meant."""
        if name in self:
            return
        near = difflib.get_close_matches(name, self, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(self)}."
        raise ValueError(f"Unknown experiment {name!r}. {hint}")


EXPERIMENTS = Experiments()
