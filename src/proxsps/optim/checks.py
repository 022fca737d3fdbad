"""Refusals: what was wrong, what was got, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from proxsps.core.checks import check_finite_bound, check_keys, check_nonnegative, check_positive
from proxsps.regularizers.checks import check_choice, check_fit


def check_limit(value: Any) -> None:
    """Refuse a limit on the length of the move that is neither None nor a positive number."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"max_move must be a positive number, or None for no limit, got {value!r}.")


def check_unflattened(params: Iterable[Tensor]) -> None:
    """Refuse parameters whose shape FSDP1 hides."""
    if any([hasattr(param, "_fsdp_flattened") or hasattr(param, "_is_flat_param") for param in params]):
        raise ValueError(
            "The parameters are those of FullyShardedDataParallel, which flattens them and hides which part is here. "
            "Use torch.distributed.fsdp.fully_shard, and construct the optimizer after it."
        )


def check_bound(value: Any) -> None:
    """Refuse a lower bound that is not a finite number; a tensor is not looked at."""
    if not isinstance(value, Tensor):
        check_finite_bound(value)


def check_loss(loss: Any) -> None:
    """Refuse a loss that is not one number."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(
            f"The loss must be one number, got shape {tuple(loss.shape)}: reduce it, for instance by loss.mean()."
        )
    if not isinstance(loss, (Tensor, float, int)):
        raise TypeError(f"The loss must be a tensor with one entry or a number, got {type(loss).__name__}.")


def check_regularizer(group: dict[str, Any]) -> None:
    """Refuse a regulariser that is none, that competes with weight decay, or that does not fit its tensors."""
    phi = group["regularizer"]
    if phi is None:
        return
    check_choice(phi, group["weight_decay"])
    if group["capturable"] and not phi.traceable:
        raise ValueError(f"{phi!r} works on the host and cannot be captured; use capturable=False and CPU parameters.")
    for i, param in enumerate(group["params"]):
        if param.is_complex():
            raise ValueError(f"{phi!r} does not take complex parameters; use weight_decay, which does.")
        check_fit(phi, i, tuple(param.shape))


__all__ = [
    "check_bound",
    "check_keys",
    "check_limit",
    "check_loss",
    "check_nonnegative",
    "check_positive",
    "check_regularizer",
    "check_unflattened",
]
