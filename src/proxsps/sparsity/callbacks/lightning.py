"""Sparsity of every epoch in Lightning's logs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from proxsps.sparsity.callbacks import Journal
from proxsps.sparsity.units import Units


class SparsityCallback(Callback):
    """Logs zeros, dead rows and dead units after every epoch, with tau, zeta and the shares of the steps' branches.

    Args:
        units: what `find_units` returned for the module or a part of it of the same names, to count dead units.
        prefix: in front of all names.
    """

    def __init__(self, units: Units | None = None, prefix: str = "sparsity/") -> None:
        self.journal = Journal(units, prefix)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Note the step."""
        if trainer.optimizers:
            self.journal.step(trainer.optimizers[0])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch."""
        pl_module.log_dict(self.journal.epoch(pl_module), sync_dist=False)
