"""What all trainers need of an optimizer: what its last step did, and its modes if it has any."""

from __future__ import annotations

from typing import Any

from proxsps.optim.last_step import LastStep
from proxsps.optim.optimizer import PolyakOptimizer


def last_step_of(optimizer: Any) -> LastStep | None:
    """The last step of an optimizer of this package, which a trainer may have wrapped; None for others."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer.last_step if isinstance(optimizer, PolyakOptimizer) else None


def step_facts(optimizer: Any) -> dict[str, float | str]:
    """`tau`, the longest step of all groups, and `cap_name`, what set it; nothing before the first step."""
    last = last_step_of(optimizer)
    return {} if last is None else {"tau": float(last.tau.max()), "cap_name": last.cap_name}


def set_mode(optimizers: Any, training: bool) -> None:
    """Switch schedule-free optimizers, of this package or others: the model holds averages while it is not trained."""
    for optimizer in optimizers:
        switch = getattr(optimizer, "train" if training else "eval", None)
        if callable(switch):
            switch()


__all__ = ["last_step_of", "set_mode", "step_facts"]
