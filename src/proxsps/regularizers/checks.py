"""Checks of a regulariser before a front end uses it; the errors say what to do."""

from __future__ import annotations

from typing import Any

from proxsps.regularizers.base import Regularizer


def check_choice(phi: Any, weight_decay: Any) -> None:
    """Raise an error for anything that is not a regulariser, or that is given together with weight decay."""
    if not isinstance(phi, Regularizer):
        raise ValueError(f"regularizer must be a proxsps.regularizers.Regularizer, got {phi!r}.")
    if weight_decay:
        raise ValueError(
            f"A parameter group has both weight_decay={weight_decay} and regularizer={phi!r}. Pass one: "
            "ElasticNet(l1, l2) joins an l1 and a squared l2 term, L2(lam) is weight_decay=lam."
        )


def check_fit(phi: Regularizer, index: int, shape: tuple[int, ...], name: str | None = None) -> None:
    """Raise an error for a regulariser that does not fit the index-th tensor of its group."""
    try:
        phi.at(index).check(shape)
    except ValueError as error:
        which = f"parameter {name}" if name else f"parameter {index} of its group"
        raise ValueError(f"{phi!r} does not fit {which}: {error}") from None


def check_subgradient(phi: Regularizer, owner: str, instead: str) -> None:
    """Raise an error for a regulariser without subgradient in a method that adds it to the loss."""
    if type(phi).subgradient is Regularizer.subgradient:
        raise ValueError(
            f"{owner} puts the regulariser into the loss and needs its subgradient, which {phi!r} "
            f"does not have. Use {instead}, which need only its prox."
        )
