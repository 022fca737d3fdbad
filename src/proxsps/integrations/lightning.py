"""A callback that passes Lightning's loss to optimizers that need it.

The loss that belongs to the gradients is the sum of all losses since the gradients were zero. Lightning divides
the loss of each micro-batch by `accumulate_grad_batches` first, so that the sum is the mean over a
full set of them. With a smaller last set, the sum is smaller, and so are the gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps._install import extra
from proxsps.integrations.optimizers import last_step_of, set_mode
from proxsps.integrations.requirements import framework
from proxsps.optim.consistency import check_loss
from proxsps.optim.lists import widened
from proxsps.optim.optimizer import PolyakOptimizer

if TYPE_CHECKING:
    import lightning.pytorch
    from lightning.pytorch import LightningModule, Trainer
else:
    lightning = framework("lightning", __name__, extra("lightning"))


class WatchLoss(lightning.pytorch.Callback):
    """Passes the loss of every step to the optimizer: `Trainer(callbacks=[WatchLoss()])`.

    It also logs the last step of the first optimizer: `tau`, the effective rate, and `cap`, what set it, as a number
    because Lightning logs only numbers: -1 skipped, 0 polyak, 1 lr, 2 distance.

    Schedule-free optimizers, of this package or others, are switched: validation, checkpoints and the trained module
    have the averaged weights, training has the others.

    It raises an error if the Trainer clips gradients, or if the module optimizes by itself and has to pass the loss.
    Optimizers that do not need the loss are not changed.

    Args:
        check: whether to check once, in the first step, that the loss belongs to the gradients. This calls
            `training_step` about twenty times for the same batch, so it is not for modules with dropout or with metrics
            that count calls, nor for accumulation.
    """

    def __init__(self, check: bool = False) -> None:
        self._check = check
        self._sum: Tensor | None = None
        self._batch: tuple[Any, int] | None = None
        self._saving: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if the loss would not belong to the gradients."""
        # Before each checkpoint: Lightning takes the state of the module first, and that of the optimizers after it.
        self._saving = pl_module.register_state_dict_pre_hook(lambda *_: set_mode(trainer.optimizers, training=False))
        if not any(map(_needs_loss, trainer.optimizers)):
            return
        if trainer.gradient_clip_val:
            raise ValueError(
                f"gradient_clip_val={trainer.gradient_clip_val} clips gradients, which makes a Polyak step too long: "
                "leave it out of the Trainer, and limit the move with max_move= of the optimizer."
            )
        if _overrides(pl_module, "configure_gradient_clipping"):
            raise ValueError(
                f"{type(pl_module).__name__}.configure_gradient_clipping may clip gradients, which makes a Polyak step "
                "too long: remove it, and limit the move with max_move= of the optimizer."
            )
        if not pl_module.automatic_optimization:
            raise ValueError(
                "WatchLoss is for automatic optimization. With automatic_optimization=False the module itself "
                "takes the step: call opt.step(loss=loss) there, and leave out the callback."
            )
        if self._check and trainer.accumulate_grad_batches > 1:
            raise ValueError("WatchLoss(check=True) evaluates one batch: leave out accumulate_grad_batches for it.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Switch optimizers to training, and keep the batch for the check."""
        set_mode(trainer.optimizers, training=True)
        if self._check:
            self._batch = batch, batch_idx

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the averages."""
        set_mode(trainer.optimizers, training=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the averages in the module."""
        set_mode(trainer.optimizers, training=False)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        if self._saving is not None:
            self._saving.remove()
            self._saving = None

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Clear the losses together with the gradients."""
        self._sum = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add the loss of a backward pass, without the scale of mixed precision."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        share = widened(loss.detach())
        share = share if scaler is None else share / scaler.get_scale()
        self._sum = share if self._sum is None else self._sum + share

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Pass the sum to the optimizer; gradients are unscaled here."""
        if not _needs_loss(optimizer) or self._sum is None:
            return
        if optimizer._watched:
            raise ValueError(
                "The loss is passed twice: leave out either the callback WatchLoss, or watch(loss) in training_step."
            )
        if self._check:
            self._check_once(trainer, pl_module, optimizer)
        optimizer.watch(self._sum)
        self._sum = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log the step; Lightning passes on what is due by `log_every_n_steps`."""
        last = last_step_of(trainer.optimizers[0]) if trainer.optimizers else None
        if last is not None:
            pl_module.log_dict({"tau": last.tau.max(), "cap": last.cap.to(last.tau.dtype)})

    def _check_once(self, trainer: Trainer, pl_module: LightningModule, optimizer: PolyakOptimizer) -> None:
        self._check = False
        batch, self._batch = self._batch, None

        def closure() -> Tensor:
            with trainer.precision_plugin.train_step_context():
                output: Any = pl_module.training_step(*(batch or ()))
            loss: Tensor = output if isinstance(output, Tensor) else output["loss"]
            return loss

        check_loss(optimizer, closure, self._sum, model=pl_module, dtype=_autocast(trainer))


def _needs_loss(optimizer: Optimizer) -> TypeGuard[PolyakOptimizer]:
    return isinstance(optimizer, PolyakOptimizer) and optimizer.needs_loss


def _overrides(module: LightningModule, name: str) -> bool:
    return getattr(type(module), name) is not getattr(lightning.pytorch.LightningModule, name)


def _autocast(trainer: Trainer) -> Any:
    """The precision of autocast, None without."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(trainer.precision)
