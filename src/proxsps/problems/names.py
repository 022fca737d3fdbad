"""Names of image problems, such as "cifar10-resnet110". Reading them loads nothing large."""

from __future__ import annotations

import difflib
import re

CLASSES = {"cifar10": 10, "imagenet32": 1000, "synthetic": 10}
DEPTHS = (20, 32, 44, 56, 110)
NAME = re.compile(rf"({'|'.join(CLASSES)})-resnet([0-9]{{1,9}})")


def split_name(name: str) -> tuple[str, int]:
    """The data set and the depth that a name stands for, or an error that suggests the nearest name."""
    match = NAME.fullmatch(name)
    if match is None:
        known = [f"{data}-resnet{depth}" for data in CLASSES for depth in DEPTHS]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Names are like {known[-1 - len(DEPTHS)]!r}."
        raise ValueError(f"Unknown problem {name!r}: a data set ({', '.join(CLASSES)}) and a depth. {hint}")
    check_depth(int(match[2]))
    return match[1], int(match[2])


def check_depth(depth: int) -> None:
    """Raise an error for a depth that no residual network of this kind has."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6n + 2 for some n >= 1, for instance 20, 56 or 110; got {depth!r}.")
