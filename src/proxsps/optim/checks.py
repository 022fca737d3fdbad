"""Checks of options and losses; the errors say what was wrong, what was passed, and what to do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from proxsps.core.checks import (
    check_finite_bound,
    check_fraction,
    check_nonnegative,
    check_number,
    check_positive,
    hint,
    meant,
)
from proxsps.optim.rule import Rule
from proxsps.regularizers.base import DIAGONAL
from proxsps.regularizers.checks import check_choice, check_fit, check_subgradient

# Options of the loss or of the whole step, which must be the same in all groups.
SHARED = (
    *("lower_bound", "c", "c0", "momentum", "betas", "eps", "cap", "distance_cap", "lr_is_factor"),
    *("max_move", "fused", "capturable"),
)
# Options that distinguish the methods of this package.
METHOD = ("lower_bound", "c", "c0", "betas", "eps", "metric")
# Options of torch's optimizers that would change the step.
ABSENT = ("maximize", "differentiable", "momentum", "nesterov", "betas", "amsgrad")
# What torch and its schedulers write into the groups of any optimizer.
COMMON = ("params", "param_names", "initial_lr", "differentiable")
_INSTEAD = {"maximize": " Minimise the negated loss, and pass its lower_bound, or None if it has none."}
MISSPELT = 0.85  # similarity from which an unknown key is a misspelt option, not the user's own key


def check_limit(name: str, value: Any) -> None:
    """Raise an error for a limit that is neither None nor a positive number."""
    if value is None:
        return
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, or None for no limit, got {value!r}.")


def check_betas(name: str, betas: Any) -> None:
    """Raise an error for weights of Adam's averages other than two numbers in [0, 1)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{name} must be two numbers, got {betas!r}.")
    for i, beta in enumerate(betas):
        check_fraction(f"{name}[{i}]", beta)


# How numbers of groups besides `lr` are checked, when they are passed and when they have changed.
NUMBERS: dict[str, Callable[[str, Any], None]] = {
    **dict.fromkeys(("weight_decay", "eps"), check_nonnegative),
    **dict.fromkeys(("c", "c0"), check_positive),
    "momentum": check_fraction,
    "betas": check_betas,
    "max_move": check_limit,
}


def check_unflattened(params: Iterable[Tensor]) -> None:
    """Raise for parameters whose shape FSDP1 hides."""
    if any([hasattr(param, "_fsdp_flattened") or hasattr(param, "_is_flat_param") for param in params]):
        raise ValueError(
            "The parameters are those of FullyShardedDataParallel, which flattens them and hides the parts of a rank. "
            "Use torch.distributed.fsdp.fully_shard, and construct the optimizer after it."
        )


def check_bound(value: Any) -> None:
    """Raise an error for a lower bound that is neither None nor a finite number; the entry of a tensor is not read."""
    if value is not None and not isinstance(value, Tensor):
        check_finite_bound(value)
    elif isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"lower_bound must be one number, got shape {tuple(value.shape)}.")


def check_lr(owner: str, group: Mapping[str, Any], begun: bool) -> None:
    """Raise an error for a cap on the step that is not one finite number >= 0.

    Between steps, a tensor is only read if that does not wait for a device.
    """
    lr = group["lr"]
    if lr is None and not begun:
        raise ValueError(
            f"{owner} needs a learning rate, got lr=None: it has no distance cap, which sets the step without one. "
            "ProxSPS and ProxSPSAdam have one."
        )
    if not isinstance(lr, Tensor) or (has_value(lr) and (not begun or (lr.is_cpu and not group["capturable"]))):
        check_nonnegative("lr", lr)
    elif not begun and not has_value(lr) and any(map(has_value, group["params"])):
        raise ValueError(f"lr has a shape, but no value, got {lr!r}: create it on a real device.")


def has_value(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers; tensors of the meta device and of FakeTensorMode only have a shape."""
    return not (tensor.is_meta or is_fake(tensor))


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor was made under FakeTensorMode."""
    return type(tensor).__name__ == "FakeTensor" and not torch.compiler.is_compiling()


def computable(params: list[Tensor], value: Tensor | float, needs_loss: bool) -> bool:
    """Whether a step has values to work on; on the meta device, where there are only shapes, it has nothing to do."""
    without = [param.is_meta for param in params]
    if not any(without):
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError("The loss is on the meta device and has no value, although the parameters have one.")
        return True
    if needs_loss and not (isinstance(value, Tensor) and value.is_meta):
        raise ValueError(
            "Parameters are on the meta device and have no values, although the loss has one: create the model on a "
            "real device, or call model.to_empty(device=...) and fill its weights, before you make the optimizer."
        )
    return not all(without)


def check_constructor(cls: type, options: Iterable[str]) -> None:
    """Raise for keywords that a constructor does not have."""
    parameters = inspect.signature(inspect.getattr_static(cls, "__init__")).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in options:
        if key not in parameters:
            known = [name for name in parameters if name != "self"]
            advice = hint(key, known)
            if key in ABSENT:
                advice = f"It is an option of torch's optimizers that would change the step.{_INSTEAD.get(key, '')}"
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {key!r}. {advice}")


def check_group_keys(owner: str, group: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise an error for a misspelt option, or one without effect here; other unknown keys are the user's."""
    for key in group:
        if key in known or key in COMMON[:3]:
            continue
        if key in METHOD or (key in ABSENT and group[key]):
            raise ValueError(f"A parameter group has {key}={group[key]!r}, an option that {owner} does not have.")
        name = meant(key, known, MISSPELT) if isinstance(key, str) else None
        if name:
            raise ValueError(f"Unknown key {key!r} in a parameter group of {owner}. Did you mean {name!r}?")


def check_agreement(owner: str, groups: list[dict[str, Any]], start: int = 1) -> None:
    """Raise if a group, from index `start` on, has another value for an option of the whole step."""
    first = groups[0]
    shared = [key for key in SHARED if key in first]
    for i, group in enumerate(groups[start:], start):
        for key in shared:
            if _differ(first[key], group.get(key, first[key])):
                raise ValueError(
                    f"{key} cannot differ between parameter groups, because it belongs to the whole step: it is "
                    f"{first[key]!r} in group 0 and {group[key]!r} in group {i}. Pass it to {owner}() itself, or write "
                    "the same value into all groups."
                )


def _differ(one: Any, other: Any) -> bool:
    if one is other:
        return False
    if any(isinstance(value, Tensor) and not value.is_cpu for value in (one, other)):
        return False  # reading them would wait for the device
    if isinstance(one, list) or isinstance(other, list):  # betas from a file
        return isinstance(one, Iterable) and isinstance(other, Iterable) and tuple(one) != tuple(other)
    return bool(one != other)


# Options to which state and numbers belong; the last three are those of schedule-free groups.
VARIANT = ("lr_is_factor", "momentum", "cap", "distance_cap", "metric", "set", "packed")


def check_saved(owner: str, defaults: Mapping[str, Any], own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise an error for a group of a checkpoint of another optimizer, or of one with other options."""
    if "regularizer" in saved:  # one of this package
        strange = [key for key in METHOD if key in saved and key not in defaults]
        missing = [key for key in METHOD if key in defaults and key not in saved]
    else:
        strange, missing = [key for key in saved if key not in own and key not in COMMON], []
    if strange or missing:
        found = f"has {', '.join(map(str, strange))}" if strange else f"lacks {', '.join(missing)}"
        raise ValueError(
            f"The state_dict is not one of {owner}: a parameter group {found}. Load it into an optimizer of the class "
            "that saved it. Nothing was changed."
        )
    for key in VARIANT:
        mine, theirs = own.get(key), saved.get(key, own.get(key))
        # Another momentum only changes an option; no momentum is another method.
        if (bool(mine) != bool(theirs)) if key == "momentum" else mine != theirs:
            texts = [f"{key}={theirs!r}", repr(mine)]
            if key == "lr_is_factor":
                texts = ["lr=None" if is_factor else "an lr" for is_factor in (theirs, mine)]
            raise ValueError(
                f"The state_dict was saved by {owner} with {texts[0]}, and this one has {texts[1]}: make it with the "
                "options of the saved one. Nothing was changed."
            )


def check_regularizer(owner: str, rule: Rule, group: dict[str, Any]) -> None:
    """Raise for something that is no regulariser, one beside weight decay, or one that method or tensors do not fit."""
    phi = group["regularizer"]
    if phi is None:
        return
    check_choice(phi, group["weight_decay"])
    if group["capturable"] and not phi.traceable:
        raise ValueError(f"{phi!r} works on the host and cannot be captured; use capturable=False and CPU parameters.")
    names = group.get("param_names")
    for i, param in enumerate(group["params"]):
        name = repr(names[i]) if names else None
        if param.is_complex():
            raise ValueError(
                f"{phi!r} does not take complex parameters{f', got {name}' if name else ''}; use weight_decay, "
                "which does."
            )
        check_fit(phi, i, tuple(param.shape), name)
    if rule.coupled:
        check_subgradient(phi, owner, "ProxSPS or ProxSGD")
    if rule.beta2 is not None and not phi.has_diagonal_prox:
        raise ValueError(
            f"{owner} steps in a diagonal metric, in which {type(phi).__name__} has no exact prox. {DIAGONAL} have "
            "one; ProxSPS takes this regulariser."
        )
