"""Sparsity of every epoch in the logs of Transformers' Trainer."""

from __future__ import annotations

from typing import Any

from proxsps._install import require
from proxsps.sparsity.callbacks import Journal
from proxsps.sparsity.units import Units

require("proxsps.sparsity.callbacks.transformers", "transformers", "transformers")

from transformers import Trainer, TrainerCallback  # noqa: E402


class SparsityCallback(TrainerCallback):
    """Logs zeros, dead rows and dead units after every epoch, with tau, zeta and the shares of the steps' branches.

    Add it by `trainer.add_callback(SparsityCallback(trainer))`.

    Args:
        trainer: the trainer whose logs it writes to.
        units: the result of `find_units` for the model, to count dead units.
        prefix: added in front of all names.
    """

    def __init__(self, trainer: Trainer, units: Units | None = None, prefix: str = "sparsity/") -> None:
        self.trainer, self.journal = trainer, Journal(units, prefix)

    def on_step_end(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Record the step."""
        self.journal.step(optimizer)

    def on_epoch_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Log the epoch."""
        self.trainer.log(self.journal.epoch(model))
