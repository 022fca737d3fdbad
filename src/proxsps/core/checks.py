"""Checks of constants; the errors say what was wrong, what was passed, and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

# Names that other libraries have for the same option, and that no spelling check would find.
SYNONYMS = (
    {"lr", "learning_rate", "step_size"},
    {"weight_decay", "wd"},
    {"regularizer", "regularization", "regularisation", "penalty"},
    {"b1", "beta1", "betas"},
    {"b2", "beta2", "betas"},
)


def check_number(name: str, value: Any) -> None:
    """Raise for anything that is not one real number."""
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"{name} must be one number, got shape {shape}.")
    try:
        if isinstance(value, (str, bytes)):  # float() would read them
            raise TypeError
        float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a real number, got {value!r}.") from None


def check_nonnegative(name: str, value: Any) -> None:
    """Raise an error for a number that is negative, infinite or NaN."""
    if type(value) is float and 0 <= value < math.inf:  # checked in every step
        return
    check_number(name, value)
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise an error for a number that is not positive and finite."""
    check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number, got {value!r}.")


def check_fraction(name: str, value: Any) -> None:
    """Raise an error for a number outside [0, 1)."""
    if type(value) is float and 0 <= value < 1:
        return
    check_number(name, value)
    if not 0 <= float(value) < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}.")


def check_finite_bound(value: Any) -> None:
    """Raise an error for a lower bound that is not a finite number."""
    if type(value) is float and -math.inf < value < math.inf:  # checked in every step
        return
    check_number("lower_bound", value)
    if not math.isfinite(value):
        raise ValueError(
            f"lower_bound must be a finite number, got {value!r}. 0 is right for losses that are never negative."
        )


def meant(key: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that a misspelt key stands for, or None."""
    word, known = key.lower().replace("-", "_"), sorted(known)
    for names in SYNONYMS:
        same = [name for name in known if name in names]
        if word in names and same:
            return same[0]
    near = difflib.get_close_matches(word, known, 1, cutoff)
    return near[0] if near else None


def hint(key: str, known: Iterable[str]) -> str:
    """What to write instead of a key that does not exist."""
    known = sorted(known)
    name = meant(key, known)
    return f"Did you mean {name!r}?" if name else f"Known names: {', '.join(known)}."


def check_keys(owner: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise for options of a parameter group that do not exist."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            raise ValueError(f"Unknown key {key!r} in a parameter group of {owner}. {hint(key, known)}")
