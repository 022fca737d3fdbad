"""Refusals of constants: what was wrong, what was got, what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


def check_nonnegative(name: str, value: Any) -> None:
    """Refuse a number that is negative, infinite or NaN."""
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Refuse a number that is not positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")


def check_finite_bound(value: Any) -> None:
    """Refuse a lower bound that is not a finite number."""
    if not math.isfinite(value):
        raise ValueError(
            f"lower_bound must be a finite number, got {value!r}. 0 is right for losses that are never negative."
        )


def check_keys(owner: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options of a parameter group that do not exist."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known are {', '.join(known)}."
            raise ValueError(f"Unknown key {key!r} in a parameter group of {owner}. {hint}")
