"""A model whose train() and eval() switch optimizers too: what users of schedule-free optimizers forget to call."""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

from torch import nn


class Switch:
    """The `train` of a model that switches optimizers, as long as these exist; an attribute of the model.

    A copy of the model has no optimizer, and its copy of this object only calls the model's own method, unless the
    optimizer is copied together with it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._opts: list[weakref.ref[Any]] = []

    def __call__(self, mode: bool = True) -> Any:
        """Switch the model, and the optimizers."""
        model: Any = self._model()
        found = type(model).train(model, mode)
        for opt in [ref() for ref in self._opts]:
            if opt is not None:
                opt.train(mode)
        return found

    def add(self, opt: Any) -> None:
        """Switch one more optimizer."""
        self._opts = [ref for ref in self._opts if ref() not in (None, opt)] + [weakref.ref(opt)]
        vars(opt).setdefault("_followed", weakref.WeakSet()).add(self._model())

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        model: Any = self._model()
        copied = Switch(deepcopy(model, memo))
        for ref in self._opts:
            if id(ref()) in memo:
                copied.add(memo[id(ref())])
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Switch, (self._model(),)


def follow(opt: Any, model: nn.Module) -> None:
    """Let `model.train()` and `model.eval()` switch an optimizer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"follow() needs the model, an nn.Module, got {type(model).__name__}.")
    known = vars(model).get("train")
    switch = known if isinstance(known, Switch) else Switch(model)
    switch.add(opt)
    model.train = switch  # type: ignore[method-assign]


def follow_copies(opt: Any, copied: Any, memo: dict[int, Any]) -> None:
    """Let the copies of models switch the copy of an optimizer, in a deepcopy of both that began with the models."""
    for model in vars(opt).get("_followed", ()):
        switch = memo.get(id(vars(model).get("train")))
        if isinstance(switch, Switch):
            switch.add(copied)
