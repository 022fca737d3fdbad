"""The losses that gradients belong to: passed to `step`, returned by a closure, or watched before `backward`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps.core.checks import check_positive
from proxsps.optim.hints import WarnsOnce
from proxsps.optim.lists import widened
from proxsps.optim.memory import local_entries

_TWO_LOSSES = "{}.step() got both a closure and a loss, or two losses: pass one of them."


class WatchesLosses(WarnsOnce, Optimizer):
    """The part of an optimizer that finds the loss of a step."""

    needs_loss = True

    def _forget_losses(self) -> None:
        """Nothing was watched yet."""
        self._watched: list[tuple[Tensor | float, float]] = []
        self._waiting = False  # whether a loss was watched that backward has not reached
        # The first gradient as the last watched backward left it; None while one runs, and after one that failed.
        self._left: tuple[int, int] | None = None

    def watch(self, loss: Tensor | float, weight: float = 1.0) -> Tensor | float:
        """Store the value of a loss for the next plain `step()`, and return the loss.

        The value of a loss that requires grad counts from the moment `backward` runs through it, so that the order of
        `watch` and `zero_grad` does not matter; any other counts at once. Over several micro-batches the step uses the
        mean of the watched losses, weighted by `weight` (for instance the number of samples): watch each loss before it
        is divided by the number of micro-batches.
        """
        value = _loss_value(loss)
        check_positive("weight", weight)
        if isinstance(value, Tensor):
            value = widened(value)  # sums overflow in f16, and round in bf16
        if isinstance(loss, Tensor) and loss.requires_grad:
            self._waiting = True
            loss.register_hook(lambda _: self._record(value, weight))
        else:
            self._watched.append((value, weight))
        return loss

    def _record(self, value: Tensor | float, weight: float) -> None:
        """Store a loss when `backward` reaches it, before any gradient is accumulated."""
        if self._watched and self._cleared():
            self._watched.clear()  # as by model.zero_grad() after a skipped step
        self._watched.append((value, weight))
        self._waiting = False
        self._left = None
        if not torch.compiler.is_compiling():  # compiled autograd traces hooks, but not the callbacks that they queue
            # Wrappers of a model queue callbacks too, which write gradients: the second level runs after all of them.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(lambda: setattr(self, "_left", self._first_gradient())))

    def _cleared(self) -> bool:
        """Whether the gradients of the last watched backward are gone: dropped, or all zero now.

        Clearing gradients drops or overwrites all of them. So if identity and version counter of the first gradient are
        the same, nothing was cleared, and plain accumulation does not wait for a device. Values are compared with zero
        only if the gradient was written to: a micro-batch whose gradient happens to be zero has not been cleared.
        """
        if torch.compiler.is_compiling():
            return next(self._gradients(), None) is None
        return self._first_gradient() != self._left and not any(map(_nonzero, self._gradients()))

    def _first_gradient(self) -> tuple[int, int]:
        """Its identity and version; "none" counts too: fully_shard keeps gradients elsewhere until they are reduced."""
        first = next(self._gradients(), None)
        return (0, 0) if first is None else (id(first), first._version)

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the watched losses that belong to them."""
        self._watched.clear()
        super().zero_grad(set_to_none)

    def _watched_mean(self) -> tuple[Tensor | float | None, float]:
        """The mean of the watched losses, None if there are none, and its weight."""
        if not self._watched:
            return None, 1.0
        total = sum(weight for _, weight in self._watched)
        mean = sum(weight * value for value, weight in self._watched) / total
        self._watched.clear()
        return mean, total

    def _loss(
        self, closure: Callable[[], Any] | Tensor | float | None, loss: Tensor | float | None
    ) -> tuple[Any, float, Any]:
        """The loss to step with, None for no step; its weight among the ranks; and what `step` returns."""
        if closure is None and loss is not None and not self._watched:
            return _loss_value(loss), 1.0, loss
        name = type(self).__name__
        trainer = _lightning_trainer(closure)
        if closure is not None and loss is not None and trainer is None:
            raise ValueError(_TWO_LOSSES.format(name))
        if closure is not None and not callable(closure):  # step(loss)
            closure, loss = None, closure
        returned = loss
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
            if loss is not None:  # step(loss=...) of a Lightning module that optimizes by itself
                if returned is not None:
                    raise ValueError(_TWO_LOSSES.format(name))
                returned = loss
        # Watched losses cover all micro-batches, a closure's loss only the last one.
        watched, weight = self._watched_mean()
        if trainer is not None and self.needs_loss:
            self._check_trainer(trainer, watched is not None)
        if watched is not None and loss is not None:
            raise ValueError(
                f"{name}.step() got a loss, and another was watched: use watch() or step(loss=...), not both."
            )
        value = returned if watched is None else watched
        if value is not None:
            return _loss_value(value), weight, returned
        if not self.needs_loss:
            return 0.0, weight, returned
        if all(float(group["lr"]) == 0 for group in self.param_groups):
            return None, weight, returned  # how torch.distributed.checkpoint initialises an optimizer
        if self._waiting:
            raise ValueError(
                f"{name}.step() has no loss: one was watched, but backward() has not run through it since. Call "
                "loss = opt.watch(loss) before loss.backward(), or opt.step(loss=loss) after it."
            )
        raise ValueError(
            f"{name}.step() needs the loss value: call opt.step(loss=loss) after loss.backward(), opt.step(closure), "
            "or loss = opt.watch(loss) before loss.backward(). Got none of them."
        )

    def _check_trainer(self, trainer: Any, watched: bool) -> None:
        """Warn if Lightning's options make the loss and the gradients of a step differ."""
        batches, clip = getattr(trainer, "accumulate_grad_batches", 1), getattr(trainer, "gradient_clip_val", None)
        if batches > 1 and not watched:
            self._warn_once(
                "accumulation",
                f"Lightning accumulates the gradients of {batches} batches, but passes only the loss of the last one, "
                f"divided by {batches}. Steps are too short: add proxsps.integrations.lightning.WatchLoss() to the "
                "callbacks of the Trainer",
                "",
            )
        if clip:
            self._warn_once(
                "clipping",
                f"gradient_clip_val={clip} of Lightning's Trainer clips gradients, which makes a Polyak step too long: "
                "leave it out, and limit the move with max_move= of the optimizer",
                "",
            )


def _nonzero(grad: Tensor) -> bool:
    """Whether some entry on this rank is not zero; sparse gradients, which raise an error later, count as nonzero."""
    local = local_entries(grad)
    return local.layout is not torch.strided or bool(local.any())


def _loss_value(loss: Any) -> Tensor | float:
    """A loss as a step uses it, a tensor without its graph or a number; an error if it is not one real number."""
    if isinstance(loss, (Tensor, np.ndarray)):
        if math.prod(loss.shape) != 1:
            raise ValueError(
                f"The loss must be one number, got shape {tuple(loss.shape)}: reduce it, for instance by loss.mean()."
            )
        if loss.dtype.is_complex if isinstance(loss, Tensor) else loss.dtype.kind not in "fiub":
            raise TypeError(f"The loss must be a real number, got dtype {loss.dtype}.")
        return loss.detach() if isinstance(loss, Tensor) else float(loss.item())
    if not isinstance(loss, (float, numbers.Real)):
        raise TypeError(f"The loss must be a tensor with one entry or a number, got {type(loss).__name__}.")
    return float(loss)


def _lightning_trainer(closure: Any) -> Any:
    """Lightning's trainer, if it made this closure; else None.

    The closure is then a partial function of Lightning's, whose first argument is the module. So nothing is imported.
    """
    maker = getattr(getattr(closure, "func", None), "__module__", None) or ""
    if not maker.startswith(("lightning.", "pytorch_lightning.")) or not closure.args:
        return None
    return getattr(closure.args[0], "trainer", None)
