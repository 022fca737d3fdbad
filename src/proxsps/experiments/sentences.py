"""How a sentence of the paper is checked: its words and its rule come first, the numbers second.

A check can fail in three ways, and says in which: the numbers contradict the rule, a run that the sentence is about has
diverged, or the numbers are not there. Runs of one seed share their data and its order, so methods are compared seed
by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps

import numpy as np
import pandas as pd

from proxsps.experiments.base import Claim, Frames, cannot_be_checked
from proxsps.methods import METHODS

Check = Callable[[Frames], tuple[str, bool]]  # what was measured, and whether the rule holds
SURE = "95 % sure over the seeds"  # in rules; with one seed the values are compared as they are, and that is said
# Student's t, one-sided 95 %, for 1, 2, ... degrees of freedom. Most rules need several such comparisons at once, so
# that they hold by chance far more rarely than in one of twenty cases.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


class DivergedError(ValueError):
    """A run that a sentence is about has diverged."""


def states(
    name: str,
    gist: str,
    quantity: str,
    rule: str,
    needs: Iterable[str] = (),
    finite: str = "",
    unless: Iterable[str] = (),
) -> Callable[[Check], Callable[[Frames], Claim]]:
    """Make a claim of a function that measures.

    Args:
        name: of the claim.
        gist: the sentence of the paper, in short.
        quantity: what is measured.
        rule: when the claim holds.
        needs: the methods that it compares; without runs of each it cannot be checked.
        finite: a metric; the claim does not hold if a run of these methods has diverged.
        unless: methods that may diverge, because the sentence says that they are unstable.
    """
    compared, stable = tuple(needs), tuple(method for method in needs if method not in set(unless))

    def decorate(check: Check) -> Callable[[Frames], Claim]:
        @wraps(check)
        def claim(frames: Frames) -> Claim:
            try:
                require_methods(frames["runs"], compared)
                if finite:
                    require_finite(frames["runs"], finite, stable)
                measured, holds = check(frames)
                if SURE in rule and frames["runs"]["seed"].nunique() == 1:
                    measured += "; one seed, so that nothing is sure"
            except DivergedError as error:
                measured, holds = str(error), False
            except (LookupError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
                measured, holds = cannot_be_checked(error), False
            return Claim(name, gist, quantity, rule, measured, bool(holds))

        return claim

    return decorate


def label(method: str) -> str:
    """How a method is called in texts."""
    return METHODS[method].label if method in METHODS else method


def labelled(values: pd.Series, form: str = ".3g") -> str:
    """Values by method, as a text."""
    return ", ".join(f"{label(str(method))} {value:{form}}" for method, value in values.items())


def require_methods(rows: pd.DataFrame, methods: Iterable[str]) -> None:
    """Raise an error if one of the methods has no rows."""
    missing = [label(method) for method in methods if method not in set(rows["method"])]
    if missing:
        raise ValueError(f"there are no runs of {', '.join(missing)}")


def require_finite(runs: pd.DataFrame, metric: str, methods: Iterable[str]) -> None:
    """Raise an error that names the methods whose runs have no finite value of a metric in some epoch."""
    lost = ~np.isfinite(runs[metric].astype(float))
    found = []
    for method in methods:
        own = runs["method"] == method
        count = runs.loc[own & lost, "run"].nunique()
        if count:
            found.append(f"{label(method)} diverged in {count} of {runs.loc[own, 'run'].nunique()} runs")
    if found:
        raise DivergedError("; ".join(found))


def least(differences: pd.Series) -> float:
    """Lower 95 % confidence limit of the mean of differences, one for each seed; the value itself for one seed."""
    values = differences.to_numpy(dtype=float)
    if len(values) == 1:
        return float(values[0])
    error = values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - T95[min(len(values) - 1, len(T95)) - 1] * error)


def least_of(differences: pd.Series) -> pd.Series:
    """`least` for each setting; the last level of the index is the seed."""
    settings = list(differences.index.names[:-1])
    return differences.groupby(settings).apply(least)


def first_within(values: pd.Series, level: float) -> float:
    """First epoch from which on values by epoch stay within a level; infinity if there is none."""
    outside = values.index[~(values <= level)]
    if not len(outside):
        return float(values.index[0])
    later = values.index[values.index > outside[-1]]
    return float(later[0]) if len(later) else math.inf


def epochs(values: Iterable[float]) -> str:
    """Numbers of epochs, as a text."""
    return ", ".join("never" if value == math.inf else f"epoch {value:.3g}" for value in values)
