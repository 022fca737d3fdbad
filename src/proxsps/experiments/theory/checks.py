"""What a check is: an inequality, the function that measures both of its sides, and the verdict on its rows.

The docstring of such a function is what the inequality says and, in a second paragraph, what it needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.experiments.base import Claim
from proxsps.problems.losses import Floats

SEEDS = 400
ROUNDING, SMALL = 1e-9, 1e-12  # relative and absolute: some one-step inequalities are equations

Sided = Iterator[tuple[str, theory.Sides]]  # many evaluations of an inequality, by problem


@dataclass(frozen=True)
class Check:
    """An inequality: `measure(seeds)` gives its rows."""

    name: str
    place: str  # in the paper, or in the docs for those of the steps without a learning rate
    says: str  # quantity <= bound
    needs: str  # of the problem and of alpha_k
    measure: Callable[[int], Iterator[pd.DataFrame]]
    symbol: str = ""  # of the measured quantity, for an axis
    exact: bool = False  # by enumeration of all samples; the number of seeds does not matter


def rate(
    name: str, place: str, symbol: str, exact: bool = False
) -> Callable[[Callable[[int], Iterator[pd.DataFrame]]], Check]:
    """Make a check of a function from a number of seeds to rows, a table for each problem."""

    def decorate(measure: Callable[[int], Iterator[pd.DataFrame]]) -> Check:
        return Check(name, place, *_statement(measure), measure, symbol, exact)

    return decorate


def exact(name: str, place: str) -> Callable[[Callable[[], Sided]], Check]:
    """Make a check of a function that evaluates an inequality; the worst row of each problem is kept."""

    def decorate(measure: Callable[[], Sided]) -> Check:
        return Check(name, place, *_statement(measure), lambda seeds: _worst(measure()), exact=True)

    return decorate


def _statement(measure: Callable[..., object]) -> tuple[str, str]:
    says, needs, *_ = [*(inspect.getdoc(measure) or "").split("\n\n"), ""]  # nothing under python -OO
    return " ".join(says.split()).removesuffix("."), " ".join(needs.split()).removeprefix("Needs ").removesuffix(".")


def _worst(sides: Sided) -> Iterator[pd.DataFrame]:
    """For each problem the row with the largest quotient left / right; K is how many there are."""
    found: dict[str, list[Floats]] = {}
    for problem, (left, right) in sides:
        found.setdefault(problem, []).append(np.stack(np.broadcast_arrays(left, right)).reshape(2, -1))
    for problem, parts in found.items():
        left, right = np.concatenate(parts, axis=1)
        quotient = left / np.maximum(right, 1e-300)
        # If both sides are rounding errors, a quotient means nothing.
        at = np.argmax(np.where(np.maximum(np.abs(left), np.abs(right)) > 1e-6, quotient, 0.0))
        yield row(problem, left.size, float(left[at]), float(right[at]))


def row(problem: str, K: int, measured: float, bound: float) -> pd.DataFrame:
    """A row without a confidence interval."""
    columns = {"problem": problem, "K": K, "measured": measured, "half": 0.0, "bound": bound, "truncated": np.nan}
    return pd.DataFrame([columns])


def evaluate(check: Check, seeds: int = SEEDS) -> pd.DataFrame:
    """The rows of a check with quotient and verdict.

    A bound is about an expectation: it fails if the lower end of the 99 % confidence interval is above it.
    """
    rows = (
        pd.concat(check.measure(seeds))
        .assign(check=check.name, place=check.place, symbol=check.symbol, exact=check.exact)
        .reset_index(drop=True)
    )
    rows["ratio"] = rows["measured"] / rows["bound"]
    rows["holds"] = rows["measured"] - rows["half"].fillna(0.0) <= rows["bound"] * (1 + ROUNDING) + SMALL
    return rows


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each check and problem: where the measured value comes closest to its bound."""
    groups = rows.groupby(["check", "problem"], sort=False)
    closest = rows.loc[groups["ratio"].idxmax()].set_index(["check", "problem"])
    return closest.assign(holds=groups["holds"].all()).reset_index()


def claim(check: Check, rows: pd.DataFrame) -> Claim:
    """The verdict on a check, from the rows of all."""
    own = rows[rows["check"] == check.name]
    closest = own.loc[own["ratio"].idxmax()]
    way = "every sample enumerated" if check.exact else "mean over runs, 99 % confidence"
    return Claim(
        check.name,
        f"{check.place}: {check.says}",
        f"left side over right side, at its largest; {way}",
        "at most 1" if check.exact else "lower confidence limit at most 1, for every K",
        f"{closest['ratio']:.3g} ({closest['problem']})",
        bool(own["holds"].all()),
    )
