"""One run: the loop over epochs and steps that `proxsps train` and the deep experiments share.

Unlike the sweep's single runs, it has what large networks need: images in uint8 that are augmented in batches,
running statistics, evaluation in parts, a device, several processes, and a checkpoint after every epoch.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from proxsps.optim import ProxSGD
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.sweep.result import METRICS, RunResult, alpha_of_epoch, median_zeta
from proxsps.sweep.single import couple, couples, make_optimizer, nonzero_share, penalty, stepping
from proxsps.sweep.spec import RunSpec
from proxsps.training import checkpoint as checkpoints
from proxsps.training.identity import identify
from proxsps.training.loader import Batch, epoch_batches, plain_batches
from proxsps.training.ranks import TrainingRanks

MEASURED = 2_500  # training images on which the loss after an epoch is measured
EVALUATED = 500  # images in a batch of an evaluation
EXTRA = ("val_accuracy", "zeta_low", "zeta_high", "truncated")


class Watch:
    """Called during a run; the default does nothing. Tensors are on the run's device: reading them waits for it."""

    def start(self, epochs: int, steps: int) -> None:
        """Called when a run begins, or continues, after `epochs` epochs of `steps` steps each."""

    def step(self, epoch: int, loss: Tensor, optimizer: Optimizer) -> None:
        """A step of an epoch, which counts from 0, was taken at this loss."""

    def epoch(self, row: dict[str, float]) -> None:
        """An epoch was finished and measured."""


class Run:
    """A network in training: its optimizer, and what was measured so far."""

    def __init__(self, spec: RunSpec, ranks: TrainingRanks, amp: bool = False) -> None:
        self.spec = identify(spec, ranks, amp)
        self.problem, self.ranks, self.amp = spec.problem, ranks, amp
        self.model = self.problem.network().to(ranks.device, memory_format=torch.channels_last)
        self.wrapped = ranks.wrap(self.model)
        self.optimizer = make_optimizer(spec, self.model)
        self._step_by = stepping(self.optimizer)
        self.zetas = np.full((spec.epochs, self.problem.steps_per_epoch), np.nan, dtype=np.float32)
        self.metrics = np.full((spec.epochs, len(METRICS)), np.nan)
        self.columns = EXTRA if spec.regularizer is None else (*EXTRA, "nonzeros")
        self.extra = np.full((spec.epochs, len(self.columns)), np.nan)
        self.done = 0

    def epoch(self, watch: Watch) -> None:
        """Train for one epoch, and measure."""
        alpha = alpha_of_epoch(self.spec, self.done, self.zetas)
        for group in self.optimizer.param_groups:
            group["lr"] = alpha
        self.wrapped.train()
        # On the device: a step must not wait for a number that is only read later.
        zetas = torch.full(self.zetas.shape[1:], math.nan, device=self.ranks.device)
        for step, batch in enumerate(epoch_batches(self.problem, self.spec.seed, self.done, self.ranks)):
            loss = self.step(batch)
            zeta = self.last_zeta()
            if zeta is not None:
                zetas[step] = zeta
            watch.step(self.done, loss, self.optimizer)
        self.zetas[self.done] = zetas.cpu().numpy()
        self.metrics[self.done], self.extra[self.done] = self.measure(self.zetas[self.done])
        self.done += 1

    def step(self, batch: Batch) -> Tensor:
        """One step; returns the loss of this process's part of the batch. The optimizer averages over processes."""
        images, labels = batch
        losses: list[Tensor] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            with self._precision():
                loss = cross_entropy(self.wrapped(images), labels)
            loss.backward()
            losses.append(loss.detach())
            return couple(self.spec, list(self.model.parameters()), loss) if couples(self.spec) else loss

        self._step_by(closure)
        return losses[0]

    def _precision(self) -> AbstractContextManager[Any]:
        """bfloat16 if it is selected: a network without normalisation starts with losses too large for float16."""
        return torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.amp)

    def last_zeta(self) -> Tensor | None:
        """The adaptive step of the last step, for methods that have one."""
        if not isinstance(self.optimizer, PolyakOptimizer) or isinstance(self.optimizer, ProxSGD):
            return None
        last = self.optimizer.last_step
        return None if last is None else last.zeta[0]

    @torch.no_grad()
    def measure(self, zetas: np.ndarray) -> tuple[list[float], list[float]]:
        """The metrics after an epoch, and those that only images have, in the orders of METRICS and `columns`."""
        images, labels = self.problem.train_data()
        loss, _ = self.evaluate((images[:MEASURED], labels[:MEASURED]))
        _, accuracy = self.evaluate(self.problem.validation_data(self.spec.seed))
        square = sum(float(param.double().square().sum()) for param in self.model.parameters())
        params = [param.detach() for param in self.model.parameters()]
        objective = loss + float(penalty(self.spec, params, square))
        seen = zetas[~np.isnan(zetas)]
        low, high = np.quantile(seen, (0.25, 0.75)) if len(seen) else (math.nan, math.nan)
        truncated = float(np.mean(seen == 0)) if len(seen) else math.nan
        metrics = [objective, loss, 1 - accuracy, math.sqrt(square), float(median_zeta(zetas))]
        sparse = [] if self.spec.regularizer is None else [nonzero_share(params)]
        return metrics, [accuracy, float(low), float(high), truncated, *sparse]

    def evaluate(self, data: Batch) -> tuple[float, float]:
        """Mean loss and accuracy of a data set, with running statistics if there are any."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        for images, labels in plain_batches(data, EVALUATED, self.ranks):
            with self._precision():
                scores = self.model(images)
            total[0] += cross_entropy(scores.float(), labels, reduction="sum")
            total[1] += (scores.argmax(1) == labels).sum()
        loss, correct = self.ranks.sum(total).tolist()
        return loss / len(data[1]), correct / len(data[1])

    def row(self) -> dict[str, float]:
        """What was measured after the last epoch, by name."""
        values = (*self.metrics[self.done - 1], *self.extra[self.done - 1])
        return dict(zip((*METRICS, *self.columns), map(float, values), strict=True))

    def result(self) -> RunResult:
        """What goes into the store; after a divergence, the metrics are NaN."""
        bad = np.flatnonzero(~np.isfinite(self.metrics[: self.done, 0]))
        if len(bad):
            self.metrics[bad[0] :] = self.extra[bad[0] :] = np.nan
        return RunResult(self.spec, self.metrics, self.zetas, dict(zip(self.columns, self.extra.T, strict=True)))

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        arrays = {"metrics": self.metrics, "extra": self.extra, "zetas": self.zetas}
        history = {name: torch.from_numpy(array[: self.done].copy()) for name, array in arrays.items()}
        checkpoints.save(path, self.spec, self.model, self.optimizer, history)

    def resume(self, path: Path) -> None:
        """Continue the run where a checkpoint ends."""
        content = checkpoints.load(path, self.spec, self.ranks.device)
        try:
            history = {name: value.cpu().numpy() for name, value in content["history"].items()}
            self.done = len(history["metrics"])
            self.metrics[: self.done], self.extra[: self.done] = history["metrics"], history["extra"]
            self.zetas[: self.done] = history["zetas"]
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError):  # parts are missing, or others
            raise checkpoints.incomplete(path) from None


def train(
    spec: RunSpec,
    checkpoint: Path | None = None,
    ranks: TrainingRanks | None = None,
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
    ranks, watch = ranks or TrainingRanks(torch.device("cpu")), watch or Watch()
    if checkpoint is not None:
        checkpoints.prepare(checkpoint)
    run = Run(spec, ranks, amp)
    if checkpoint is not None and checkpoint.exists():
        run.resume(checkpoint)
    watch.start(run.done, run.zetas.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a run that diverges is a result, not a warning
        while run.done < spec.epochs:
            run.epoch(watch)
            watch.epoch(run.row())
            if not math.isfinite(run.metrics[run.done - 1, 0]):
                break
            if checkpoint is not None and ranks.first:
                run.save(checkpoint)
    return run.result()
