"""Options that are allowed but rarely intended: copied from another optimizer, or set by a scheduler."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxsps.optim.checks import is_fake

INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (sys.modules["proxsps"], torch))

SHRINKAGE = 0.02  # share of the weights that weight decay may remove in one step without a hint
SMALL_FACTOR = 0.05  # on the steps without a learning rate: smaller ones are usually meant as learning rates
SKORCH = 0.01  # its own lr, where the user gave none
FIRST_STEPS = 100  # in which all factors have to be small for a hint


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, with the line of the user's code that called this package, directly or through torch."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(text, category, stacklevel=level)


def shrinkage_hint(groups: Iterable[dict[str, Any]], decay_is_l2: bool) -> str | None:
    """Advice if `lr` times `weight_decay` removes more than a few percent of a group's weights in every step.

    A group with `regularizer=L2(lam)` gets no advice; it takes the same step if `decay_is_l2`. Tensors are read only on
    the host.
    """
    for group in groups:
        lr, lam = group["lr"], group["weight_decay"]
        if isinstance(lr, Tensor) and (group["capturable"] or lr.device.type != "cpu" or is_fake(lr)):
            continue
        product = float(lr) * float(lam)
        share = product / (1 + product)
        if share > SHRINKAGE:
            text = (
                f"lr={float(lr):g} with weight_decay={float(lam):g} shrinks the weights by {share:.1%} in every step. "
                "If weight_decay comes from AdamW, multiply it by the lr there and divide it by the lr here"
            )
            wanted = (
                f". If you want this, pass regularizer=L2({float(lam):g}) instead: the same step, without this warning"
            )
            return text + wanted if decay_is_l2 else text
    return None


def skorch_hint(lr: Any) -> str | None:
    """Advice if skorch has passed its own lr: the caller is a method of its net, which has no `optimizer__lr`."""
    if "skorch" not in sys.modules or type(lr) is not float or lr != SKORCH:
        return None
    caller = sys._getframe()
    while caller.f_back is not None and caller.f_globals["__name__"].startswith("proxsps."):
        caller = caller.f_back
    net = caller.f_locals.get("self")
    if not any(kind.__module__.startswith("skorch.") for kind in type(net).__mro__) or hasattr(net, "optimizer__lr"):
        return None
    return (
        f"lr={lr:g} is skorch's default, and would be the upper limit of every step. Pass lr=None to the net for steps "
        f"without a learning rate, or a larger number. If you want this limit, pass optimizer__lr={lr:g}"
    )


def factor_hint(groups: Sequence[dict[str, Any]]) -> str:
    """Advice for a training without a learning rate whose first steps all had small factors."""
    largest = max(group["lr"] for group in groups)
    return (
        f"the lr of no group was above {SMALL_FACTOR:g} in the first {FIRST_STEPS} steps; it is at most {largest:.3g}. "
        "Without a learning rate, lr is a factor on the step that starts at 1, so these steps were probably too short. "
        "Schedulers that set rates of their own (OneCycleLR, CyclicLR, SWALR) and long warm-ups do this: use CoolDown, "
        "no scheduler, or max_lr=1"
    )


def are_small(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether the factors of all groups are so small that they are probably meant as learning rates."""
    return all([not isinstance(group["lr"], Tensor) and group["lr"] < SMALL_FACTOR for group in groups])


def sibling_hint(groups: Sequence[dict[str, Any]], siblings: Iterable[range]) -> str | None:
    """Advice if the `lr` of one group was set, but not that of another one made of the same list or model."""
    for places in siblings:
        rates = [groups[i]["lr"] for i in places]
        if any([type(lr) is float and type(rates[0]) is float and lr != rates[0] for lr in rates]):
            listed = ", ".join(f"{lr:g} in group {i}" for i, lr in zip(places, rates, strict=True))
            return (
                f"lr is {listed}, and these groups were made of one list of parameters, or of one model: matrices and "
                'other tensors have groups of their own. Set it in all: for group in opt.param_groups: group["lr"] = '
                '... If the steps are to differ, pass groups with "set" and "factor" of your own'
            )
    return None


def check_momentum(name: str, group: dict[str, Any], averages: Iterable[str]) -> None:
    """Raise ValueError if momentum was switched on after the optimizer was made without it."""
    if group.get("momentum") and not all(key in group for key in averages):
        raise ValueError(
            f"{name} was made with momentum=0, but a group now has momentum={group['momentum']:g}. OneCycleLR and "
            f"CyclicLR change it: pass cycle_momentum=False to them, or make {name} with momentum."
        )
