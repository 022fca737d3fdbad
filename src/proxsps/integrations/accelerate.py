"""Accelerate's `Accelerator`, which passes the loss to optimizers that need it.

The loss that belongs to the gradients is the sum of all losses since the gradients were zero. Accelerate divides
the loss of each micro-batch by `gradient_accumulation_steps` first, so that the sum is the mean over a
full set of them. With a smaller last set, the sum is smaller, and so are the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from proxsps.integrations.optimizers import step_facts
from proxsps.integrations.requirements import framework
from proxsps.optim.consistency import check_loss
from proxsps.optim.lists import widened
from proxsps.optim.optimizer import PolyakOptimizer

if TYPE_CHECKING:
    import accelerate
else:
    accelerate = framework("accelerate", __name__, "pip install accelerate")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # it has no types
    """`accelerate.Accelerator`, which passes the loss to the optimizers; clipping with them raises an error.

    `log` adds `tau` and `cap_name` of the last step to the logged values.
    """

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As in Accelerate; the optimizers get the loss."""
        opts = self._polyak_optimizers()
        engine = str(self.distributed_type.value)
        if opts and engine in ("DEEPSPEED", "MEGATRON_LM"):
            raise ValueError(
                f"{engine} steps by itself, without the loss: use DistributedDataParallel or FSDP2 with "
                f"{type(opts[0]).__name__}."
            )
        for opt in opts:
            if all(p.grad is None for group in opt.param_groups for p in group["params"]):
                opt._watched.clear()  # their gradients are gone
            earlier = sum(value for value, _ in opt._watched)
            opt._watched.clear()
            opt.watch(widened(loss.detach()) / self.gradient_accumulation_steps + earlier)
        super().backward(loss, **kwargs)

    def check_loss(self, closure: Callable[[], Tensor], model: nn.Module | None = None) -> None:
        """Check that the loss belongs to the gradients; once, between `backward` and the step.

        Args:
            closure: evaluates the loss of the whole batch again, as in `proxsps.check_loss`.
            model: its buffers are restored.
        """
        self.unscale_gradients()
        for opt in self._polyak_optimizers():
            check_loss(opt, closure, model=model, dtype=DTYPES.get(self.mixed_precision))

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, but an error with optimizers that need the loss."""
        if opts := self._polyak_optimizers():
            _refuse_clipping("clip_grad_norm_", opts[0])
        return super().clip_grad_norm_(*args, **kwargs)

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate, but an error with optimizers that need the loss."""
        if opts := self._polyak_optimizers():
            _refuse_clipping("clip_grad_value_", opts[0])
        return super().clip_grad_value_(*args, **kwargs)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As in Accelerate; with the effective rate of the first optimizer, and what set it."""
        facts = step_facts(self._optimizers[0]) if self._optimizers else {}
        super().log({**facts, **values}, *args, **kwargs)

    def _polyak_optimizers(self) -> list[PolyakOptimizer]:
        """The prepared optimizers that need the loss."""
        found = [getattr(opt, "optimizer", opt) for opt in self._optimizers]
        return [opt for opt in found if isinstance(opt, PolyakOptimizer) and opt.needs_loss]


def _refuse_clipping(name: str, opt: PolyakOptimizer) -> NoReturn:
    raise ValueError(
        f"accelerator.{name} clips gradients, which makes the Polyak step of {type(opt).__name__} too long: leave it "
        "out, and limit the move with max_move= of the optimizer."
    )
