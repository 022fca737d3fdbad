"""How a sentence of the paper is checked: its words and its rule come first, the numbers second.

A check can fail in three ways, and says in which: the numbers contradict the rule, a run that the sentence is about has
diverged, or the numbers are not there. Runs of one seed share their data and its order, so methods are compared seed
by seed.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from proxsps.experiments.base import FAILS, IN_PART, Claim, Frames, cannot_be_checked, setting
from proxsps.methods import METHODS


class Found(NamedTuple):
    """What a check found."""

    measured: str
    holds: bool
    part: str = ""  # if it does not hold as a whole: the part that does, and why not all of it
    strict: str = ""  # what a stricter rule would have found


Check = Callable[..., Found | tuple[str, bool]]  # of frames and, by name, of numbers that its texts may name
POLYAK = ("prox-sps", "sps")  # the two methods that most sentences compare
SURE = "with 95 % confidence over the seeds"  # in rules; with one seed the values are compared as they are
NO_BOUNDS = "; one curve per setting, so there are no confidence bounds"
BOUND = r"(, | \()95 % (lower|upper) bound [^\s,;:)]+( at alpha_0 = \S+ lambda = [^\s,;:)]+)?\)?"
# Student's t, one-sided 95 %, for 1, 2, ... degrees of freedom. Most rules need several such comparisons at once, so
# that they hold by chance far more rarely than in one of twenty cases.
T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


class DivergedError(ValueError):
    """A run that a sentence is about has diverged."""


def states(
    quantity: str,
    rule: str,
    needs: Iterable[str] = (),
    finite: str = "",
    unless: Iterable[str] = (),
    name: str = "",
    gist: str = "",
) -> Callable[[Check], Callable[..., Claim]]:
    """Make a claim of a function that measures; its docstring is the sentence of the paper, in short.

    If the function has options, texts may name them in braces.

    Args:
        quantity: what is measured.
        rule: when the claim holds.
        needs: the methods that it compares; without runs of each it cannot be checked.
        finite: a metric; the claim does not hold if a run of these methods has diverged.
        unless: methods that may diverge, because the sentence says that they are unstable.
        name: of the claim, if it is not that of the function.
        gist: the sentence, if it is too long for a docstring.
    """
    compared, stable = tuple(needs), tuple(method for method in needs if method not in set(unless))

    def decorate(check: Check) -> Callable[..., Claim]:
        known = {option.name: option.default for option in inspect.signature(check).parameters.values()}
        title, sentence = name or check.__name__.replace("_", "-"), gist or check.__doc__ or ""

        @wraps(check)
        def claim(frames: Frames, **options: Any) -> Claim:
            def measure() -> Found | tuple[str, bool]:
                if compared:
                    require_methods(frames["runs"], compared)
                if finite:
                    require_finite(frames["runs"], finite, stable)
                return check(frames, **options)

            (measured, holds, part, strict), checked = _attempt(measure)
            if checked and SURE in rule and frames["runs"]["seed"].nunique() == 1:
                measured = re.sub(BOUND, "", measured) + NO_BOUNDS
            told = [text.format(**known | options) if len(known) > 1 else text for text in (sentence, quantity, rule)]
            part = "" if holds else part
            return Claim(title, told[0], told[1], told[2], measured, bool(holds), part, strict, checked)

        return claim

    return decorate


def _attempt(measure: Callable[[], Found | tuple[str, bool]]) -> tuple[Found, bool]:
    """What was found, and whether it could be checked."""
    try:
        return Found(*measure()), True
    except DivergedError as error:
        return Found(str(error), False), True
    except (LookupError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        return Found(cannot_be_checked(error), False), False


def similar(sentences: Sequence[Callable[[Frames], Claim]], needs: Iterable[str]) -> Callable[[Frames], Claim]:
    """What the paper says of the second data set: what it says of the first one is true here as well."""

    @states(
        "verdicts of the sentences on matrix-fac1, on these results",
        "all hold at least in part. In part: three of four",
        name="qualitatively-similar",
        needs=needs,
    )
    def check(frames: Frames) -> Found:
        """The results on matrix-fac2 are qualitatively very similar to those on matrix-fac1."""
        judged = [sentence(frames) for sentence in sentences]
        kept = [claim for claim in judged if claim.verdict != FAILS]
        lost = "; ".join(f"{claim.name}: {claim.measured}" for claim in judged if claim.verdict == FAILS)
        partly = "; ".join(f"{claim.name}: {claim.part}" for claim in judged if claim.verdict == IN_PART)
        text = f"{sum(claim.holds for claim in judged)} of {len(judged)} hold" + (
            f", in part {partly}" if partly else ""
        )
        some = f"{len(kept)} of {len(judged)} sentences; not {lost}" if 4 * len(kept) >= 3 * len(judged) else ""
        return Found(text, not lost, some)

    return check


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


def lower_bound(differences: pd.Series) -> float:
    """Lower 95 % confidence bound of the mean of differences, one per seed; the value itself for one seed."""
    values = differences.to_numpy(dtype=float)
    if len(values) == 1:
        return float(values[0])
    error = values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean() - T95[min(len(values) - 1, len(T95)) - 1] * error)


def lower_bounds(differences: pd.Series) -> pd.Series:
    """`lower_bound` for each setting; the last level of the index is the seed."""
    settings = list(differences.index.names[:-1])
    return differences.groupby(settings).apply(lower_bound)


def mostly(good: pd.Series, share: float = 0.75) -> str:
    """The part of a sentence about all settings that holds, if it holds in at least this share of them; else nothing.

    `good` says for each alpha_0 and lambda, or each alpha_0, whether it holds there.
    """
    if not share * len(good) <= good.sum() < len(good):
        return ""
    places = "; ".join(setting(*np.atleast_1d(key)) for key in good.index[~good])
    return f"in {int(good.sum())} of {len(good)} settings, not at {places}"


def mean_curves(runs: pd.DataFrame, metric: str = "objective") -> pd.DataFrame:
    """Means over runs, as the published figures show them; infinity where a run has diverged.

    A row for each method, schedule, alpha_0 and lambda, a column for each epoch.
    """
    finite = runs.assign(value=runs[metric].fillna(math.inf))
    return finite.groupby(["method", "schedule", "lr", "weight_decay", "epoch"])["value"].mean().unstack()


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
