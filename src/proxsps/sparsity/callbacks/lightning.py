"""Sparsity of every epoch in Lightning's logs."""

from __future__ import annotations

from typing import Any

from proxsps._install import require
from proxsps.sparsity.callbacks import Journal
from proxsps.sparsity.units import Units

require("proxsps.sparsity.callbacks.lightning", "lightning", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402


class SparsityCallback(Callback):
    """Logs zeros, dead rows and dead units after every epoch, with tau, zeta and the shares of the steps' branches.

    Args:
        units: the result of `find_units` for the module, or for a part with the same names, to count dead units.
        prefix: added in front of all names.
    """

    def __init__(self, units: Units | None = None, prefix: str = "sparsity/") -> None:
        self.journal = Journal(units, prefix)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Record the step."""
        if trainer.optimizers:
            self.journal.step(trainer.optimizers[0])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch."""
        pl_module.log_dict(self.journal.epoch(pl_module), sync_dist=False)
