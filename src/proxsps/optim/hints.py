"""Options that are allowed but rarely intended: copied from another optimizer, or set by a scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from proxsps.optim.checks import is_fake

SHRINKAGE = 0.02  # share of the weights that weight decay may remove in one step without a hint


def shrinkage_hint(groups: Iterable[dict[str, Any]]) -> str | None:
    """Advice if `lr` times `weight_decay` removes more than a few percent of a group's weights in every step.

    A group with `regularizer=L2(lam)`, which takes the same step, gets no advice. Tensors are read only on the host.
    """
    for group in groups:
        lr, lam = group["lr"], group["weight_decay"]
        if isinstance(lr, Tensor) and (group["capturable"] or lr.device.type != "cpu" or is_fake(lr)):
            continue
        product = float(lr) * float(lam)
        share = product / (1 + product)
        if share > SHRINKAGE:
            return (
                f"lr={float(lr):g} with weight_decay={float(lam):g} shrinks the weights by {share:.1%} in every step. "
                "If weight_decay comes from AdamW, multiply it by the lr there and divide it by the lr here. "
                f"If you want this, pass regularizer=L2({float(lam):g}) instead: the same step, without this warning"
            )
    return None


def check_momentum(name: str, group: dict[str, Any], averages: Iterable[str]) -> None:
    """Raise ValueError if something has switched momentum on after the optimizer was made without it."""
    if group.get("momentum") and not all(key in group for key in averages):
        raise ValueError(
            f"{name} was made with momentum=0, but a group now has momentum={group['momentum']:g}. OneCycleLR and "
            f"CyclicLR change it: pass cycle_momentum=False to them, or make {name} with momentum."
        )
