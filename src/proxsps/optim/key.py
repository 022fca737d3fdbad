"""What a plan depends on, and whether it is still the same: seen in every step, in about ten microseconds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxsps.optim.blocks import FULL, same_order
from proxsps.optim.distance import KEYS
from proxsps.optim.lists import PLAIN
from proxsps.optim.second_point import AVERAGING
from proxsps.regularizers._identity import constants

# What steps and schedulers write into groups is read in every step; a plan does not depend on it.
NUMBERS = {"params", "lr", "weight_decay", "k", "memory", "model_value", "model_offset", *KEYS, *AVERAGING}

_address, _contiguous, _negated = Tensor.data_ptr, Tensor.is_contiguous, Tensor.is_neg
_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


class Key:
    """Groups, options, parameters and state of an optimizer, as they were when a plan was made.

    Args:
        opt: the optimizer.
        owners: the parameters of the plan, in its order.
        names: of the state tensors of each parameter.
    """

    def __init__(self, opt: Any, owners: list[Tensor], names: Sequence[Sequence[str]]) -> None:
        self._state, self._groups, params = opt.state, opt.param_groups, parameters(opt)
        names_of = [[name for name in group if name not in NUMBERS] for group in self._groups]
        self._options_of = [operator.itemgetter(*own) for own in names_of]
        self._options, self._missing = self._options_now(opt, params), [p.grad is None for p in params]
        self._owners, self._pairs = owners, [(i, name) for i, own in enumerate(names) for name in own]
        self._is_contiguous = all(map(_contiguous, owners))
        self._shapes, self._strides = list(map(_shape, owners)), [p.stride() for p in owners]
        self._dtypes, self._at = set(map(_dtype, owners)), list(map(_address, owners))
        places = {id(p): i for i, p in enumerate(params)}
        self._places = [places[id(p)] for p in owners]
        self.note_state()

    def _options_now(self, opt: Any, params: list[Tensor]) -> list[Any]:
        """What a plan depends on besides memory; compared by identity where possible."""
        groups = opt.param_groups
        found = [torch.get_num_threads(), opt._ranks.size, list(map(id, params)), list(map(id, groups))]
        found += map(len, groups)
        # A group with a step size of exactly 0 does not move, not even onto a constraint.
        found += [bool(group["lr"] == 0) for group in groups]
        found += [options(group) for options, group in zip(self._options_of, groups, strict=True)]
        return found

    def note_state(self) -> None:
        """Note the state tensors, which the first step makes."""
        owns = [self._state.get(p, {}) for p in self._owners] if self._pairs else []
        self._places_of = [(owns[i], name) for i, name in self._pairs]
        self._held = [own.get(name) for own, name in self._places_of]
        self._held_at = [0 if t is None else t.data_ptr() for t in self._held]
        self._entries = list(map(id, self._state.values())) if self._pairs else []

    def gradients_at(self, opt: Any) -> list[int] | None:
        """The addresses of the gradients; None if anything else has changed."""
        if opt.param_groups is not self._groups or opt.state is not self._state:
            return None
        if self._groups and self._groups[0].get("k") == 0:  # the first step of all decides what state there is
            return None
        try:
            params = parameters(opt)
            grads = [p.grad for p in params]
            if [g is None for g in grads] != self._missing or self._options_now(opt, params) != self._options:
                return None
            return self._same_memory([grads[i] for i in self._places]) if self._same_state() else None
        except (KeyError, RuntimeError, ValueError):  # options that cannot be compared, or tensors that are not memory
            return None

    def _same_state(self) -> bool:
        if not self._pairs:
            return True
        held = [own.get(name) for own, name in self._places_of]
        return (
            list(map(id, self._state.values())) == self._entries
            and all(map(operator.is_, held, self._held))
            and list(map(_address, held)) == self._held_at
        )

    def _same_memory(self, grads: list[Any]) -> list[int] | None:
        """The addresses of gradients that are dense, like parameters that are where they were."""
        owners, tensors = self._owners, self._owners + grads
        # Whole lists at a time: with hundreds of tensors, loops of Python would take as long as the arithmetic.
        if list(map(_address, owners)) != self._at or list(map(_shape, owners)) != self._shapes:
            return None
        if set(map(_dtype, tensors)) != self._dtypes or set(map(type, grads)) - {Tensor} or any(map(_negated, tensors)):
            return None
        if self._is_contiguous:
            if not all(map(_contiguous, tensors)):
                return None
        elif [p.stride() for p in owners] != self._strides or not same_order(owners, grads):
            return None
        at = list(map(_address, grads))
        unstored = 0 in at and any([g.numel() and not a for g, a in zip(grads, at, strict=True)])
        return None if unstored else at


def key_of(opt: Any, owners: list[Tensor], names: Sequence[Sequence[str]]) -> Key | None:
    """The key of a plan, or None for odd tensors, whose plan is made anew for every step."""
    plain = all([type(p) in PLAIN and p.dtype in FULL for p in owners])
    return Key(opt, owners, names) if plain else None


def lasting(value: Any) -> bool:
    """Whether a regulariser, or what it holds, cannot change: numbers and arrays that are read-only."""
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    if isinstance(value, tuple):
        return all(map(lasting, value))
    if is_dataclass(value):
        return all(map(lasting, constants(value).values()))
    return value is None or isinstance(value, (int, float, str))


def parameters(opt: Any) -> list[Tensor]:
    """All parameters of an optimizer."""
    return [p for group in opt.param_groups for p in group["params"]]
