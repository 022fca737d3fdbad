"""Refusals: what was wrong, what was got, what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from proxsps.regularizers import Regularizer


def check_nonnegative(name: str, value: Any) -> None:
    """Refuse a number that is negative, infinite or NaN."""
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")


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
    if not isinstance(value, Tensor) and not math.isfinite(value):
        raise ValueError(
            f"lower_bound must be a finite number, got {value!r}. 0 is right for losses that are never negative."
        )


def check_loss(loss: Any) -> None:
    """Refuse a loss that is not one number."""
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(
            f"The loss must be one number, got shape {tuple(loss.shape)}: reduce it, for instance by loss.mean()."
        )
    if not isinstance(loss, (Tensor, float, int)):
        raise TypeError(f"The loss must be a tensor with one entry or a number, got {type(loss).__name__}.")


def check_keys(owner: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options of a parameter group that do not exist."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(known)}."
            raise ValueError(f"Unknown key {key!r} in a parameter group of {owner}. {hint}")


def check_regularizer(group: dict[str, Any]) -> None:
    """Refuse a regulariser that is none, that competes with weight decay, or that does not fit its tensors."""
    phi = group["regularizer"]
    if phi is None:
        return
    if not isinstance(phi, Regularizer):
        raise ValueError(f"regularizer must be a proxsps.regularizers.Regularizer, got {phi!r}.")
    if group["weight_decay"]:
        raise ValueError(
            f"A parameter group has both weight_decay={group['weight_decay']} and regularizer={phi!r}. Give one: "
            "ElasticNet(l1, l2) joins an l1 and a squared l2 term, L2(lam) is weight_decay=lam."
        )
    if group["capturable"] and not phi.traceable:
        raise ValueError(f"{phi!r} works on the host and cannot be captured; use capturable=False and CPU parameters.")
    for i, param in enumerate(group["params"]):
        if param.is_complex():
            raise ValueError(f"{phi!r} does not take complex parameters; use weight_decay, which does.")
        try:
            phi.at(i).check(tuple(param.shape))
        except ValueError as error:
            raise ValueError(f"{phi!r} does not fit parameter {i} of its group: {error}") from None
