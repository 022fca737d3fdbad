"""Calls of a model: example inputs, outputs as a list of tensors, and copies, so that the model does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class TraceError(ValueError):
    """A model that cannot be called or traced with the example inputs. It was not changed."""


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output: inputs are one tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def all_tensors(value: Any) -> list[Tensor]:
    """All tensors of inputs or of an output, also in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in all_tensors(part)]


def tensors_of(output: Any) -> list[Tensor]:
    """The floating-point tensors among them."""
    return [tensor for tensor in all_tensors(output) if tensor.is_floating_point()]


def mapped(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Inputs with all their tensors changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: mapped(value, change) for key, value in inputs.items()}
    if not isinstance(inputs, (tuple, list)):
        return inputs
    parts = [mapped(part, change) for part in inputs]
    return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)


def duplicate(model: nn.Module) -> nn.Module:
    """A copy of a model, or an error that says why it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:  # a module may hold anything that cannot be copied
        raise TraceError(f"The model cannot be copied by copy.deepcopy: {first_line(error)}.") from error


@torch.no_grad()
def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The output tensors in evaluation mode; the mode is restored."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        found = tensors_of(call(model, inputs))
    except Exception as error:
        raise TraceError(
            f"The model cannot be called with these example inputs: {first_line(error)}. Pass them as the model "
            "takes them: one tensor, a tuple of arguments, or a dictionary of keyword arguments."
        ) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not found:
        raise TraceError("The model returns no floating-point tensor for these example inputs, so it cannot be traced.")
    return found


def in_double(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """A copy of a model and its inputs in double precision; unchanged if the model does not run in it."""
    copied = duplicate(model).eval()
    wide = mapped(inputs, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    try:
        outputs(copied.double(), wide)
    except (TraceError, TypeError):  # dtypes that the model's code sets by itself
        return duplicate(model).eval(), inputs
    return copied, wide


def difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """Largest difference of two lists of outputs, relative to the largest entry; infinity if shapes differ."""
    if [a.shape for a in ones] != [b.shape for b in others]:
        return float("inf")
    worst = 0.0
    for a, b in zip(ones, others, strict=True):
        scale = float(a.double().abs().max()) if a.numel() else 0.0
        apart = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        worst = max(worst, apart / scale if scale > 0 else apart if apart == apart else float("inf"))
    return worst if worst == worst else float("inf")


def constant(found: list[Tensor]) -> bool:
    """Whether all samples have the same output; False if there is only one sample."""
    several = [one for one in found if one.ndim and len(one) > 1]
    return bool(several) and all(bool((one == one[:1]).all()) for one in several)


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
