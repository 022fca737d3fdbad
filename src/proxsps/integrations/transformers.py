"""Transformers' `Trainer` for optimizers that need the loss.

For each micro-batch, the Trainer calls backward on its share of the batch's loss: divided by the number of tokens in
all micro-batches if the model takes that number, otherwise by the number of micro-batches. In both cases the batch's
loss is the sum of what `training_step` returns, for all models, with label smoothing and for an incomplete last batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from proxsps._install import extra
from proxsps.integrations.optimizers import set_mode, step_facts
from proxsps.integrations.requirements import framework
from proxsps.optim.consistency import check_loss
from proxsps.optim.lists import widened
from proxsps.optim.optimizer import PolyakOptimizer

if TYPE_CHECKING:
    import transformers

    Mixed = transformers.Trainer  # what the mixin is mixed with
else:
    transformers, Mixed = framework("transformers", __name__, extra("transformers")), object


class WatchesLoss(Mixed):
    """A mixin, to be put first: `class MyTrainer(WatchesLoss, SFTTrainer)`.

    The Trainer evaluates schedule-free optimizers at their averaged weights; this class also saves these weights, and
    leaves them in the model after training.

    Where the Trainer logs the learning rate, it also logs `tau` and `cap_name` of the last step.

    Attributes:
        check_first_step: set it to True to check once that the loss belongs to the gradients. This evaluates the first
            batch about twenty times. Models with dropout have to be configured without it, and there must be no
            accumulation and no gradient scaler.
    """

    check_first_step = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in the Trainer; the optimizer gets the loss."""
        opt = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        if not isinstance(opt, PolyakOptimizer) or not opt.needs_loss:
            return super().training_step(*args, **kwargs)
        if self.args.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm={self.args.max_grad_norm} clips gradients, which makes a Polyak step too long: "
                "pass max_grad_norm=0 to TrainingArguments."
            )
        if all(p.grad is None for group in opt.param_groups for p in group["params"]):
            opt.zero_grad()  # also clears the losses of a step that a gradient scaler skipped
        share = super().training_step(*args, **kwargs)
        if self.check_first_step:
            self._check_once(opt, share, *args, **kwargs)
        opt.watch(widened(share) * self.current_gradient_accumulation_steps)  # the step uses their mean
        return share

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer; the model then has the weights that were evaluated and saved."""
        found = super().train(*args, **kwargs)
        set_mode([self.optimizer], training=False)
        return found

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As in the Trainer; the next training step switches back."""
        set_mode([self.optimizer], training=False)
        super().save_model(*args, **kwargs)

    def _load_best_model(self) -> None:
        set_mode([self.optimizer], training=False)  # the weights that are loaded are averages
        super()._load_best_model()

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As in the Trainer; with the effective rate, and what set it."""
        if "learning_rate" in logs:
            logs |= step_facts(self.optimizer)
        super().log(logs, *args, **kwargs)

    def _check_once(
        self, opt: PolyakOptimizer, share: Tensor, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> None:
        if self.current_gradient_accumulation_steps > 1 or self.accelerator.scaler is not None:
            raise ValueError(
                "check_first_step evaluates one batch and reads its gradients: leave out gradient_accumulation_steps "
                "and fp16 for it."
            )
        self.check_first_step = False
        inputs = self._prepare_inputs(inputs)

        def closure() -> Tensor:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            return loss if isinstance(loss, Tensor) else loss[0]

        check_loss(opt, closure, share, model=model, dtype=torch.bfloat16 if self.args.bf16 else None)


class Trainer(WatchesLoss, transformers.Trainer):
    """`transformers.Trainer`, which passes the loss to the optimizer."""
