"""The paper's theory compared with runs: every bound, the floor of SPS_max, and the robustness of three models."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial

import pandas as pd

from proxsps import figures
from proxsps.experiments.base import Claim, Drawing, Experiment, Frames
from proxsps.experiments.catalogue import CATALOGUE
from proxsps.experiments.theory import caps, rates, schedule_free, steps
from proxsps.experiments.theory.checks import SEEDS, Check, claim, evaluate, summary
from proxsps.experiments.theory.floor import SEEDS as FLOOR_SEEDS
from proxsps.experiments.theory.floor import floor_grows_with_sigma, floor_tables, through_the_floor
from proxsps.experiments.theory.robustness import SEEDS as ROBUSTNESS_SEEDS
from proxsps.experiments.theory.robustness import bounded_models_are_robust, robustness_tables

CHECKS = {
    check.name: check
    for module in (steps, rates, caps, schedule_free)
    for check in vars(module).values()
    if isinstance(check, Check)
}


def find_check(name: str, others: Iterable[str] = ()) -> Check:
    """The check of this name, or an error with the name that was probably meant."""
    if name in CHECKS:
        return CHECKS[name]
    known = [*CHECKS, *others]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known names: {', '.join(known)}."
    raise ValueError(f"Unknown check {name!r}. {hint}")


def bound_tables(seeds: int = SEEDS) -> Frames:
    """Rows of all checks."""
    return {"checks": pd.concat([evaluate(check, seeds) for check in CHECKS.values()], ignore_index=True)}


def _claim(name: str, frames: Frames) -> Claim:
    return claim(CHECKS[name], frames["checks"])


BOUNDS = Experiment(
    "theory-bounds",
    "Bounds of the paper, compared with runs",
    "Every inequality of the paper that can be evaluated: rates with their theorem's steps over many seeds, one-step "
    "inequalities in exact expectation over all samples. A quotient near 1 means that the bound is tight.",
    (
        Drawing(
            "rates",
            "Measured quantity (line: mean over runs, band: 99 % confidence) and its bound (dashed).",
            lambda f: figures.rates(f["checks"]),
        ),
        Drawing(
            "tightness",
            "Largest quotient of measured value and bound, by check and problem.",
            lambda f: figures.tightness(summary(f["checks"])),
        ),
    ),
    tuple(partial(_claim, name) for name in CHECKS),
    tables=bound_tables,
    seeds=SEEDS,
    **CATALOGUE["theory-bounds"].numbers,
)

FLOOR = Experiment(
    "theory-floor",
    "The floor of SPS_max, and how to go below it",
    "Ridge regression whose loss is 0 somewhere. SPS_max on the regularised loss stops at a floor that grows with the "
    "interpolation constant sigma^2; decreasing steps go below it.",
    (
        Drawing(
            "floor",
            "Left: mean objective gap; right: the gap that is left, against sigma^2.",
            lambda f: figures.floor(f["curves"], f["floors"]),
        ),
    ),
    (through_the_floor, floor_grows_with_sigma),
    tables=floor_tables,
    seeds=FLOOR_SEEDS,
    **CATALOGUE["theory-floor"].numbers,
)

ROBUSTNESS = Experiment(
    "theory-robustness",
    "Robustness of the linear, truncated and full model",
    "Proximal SGD, ProxSPS and stochastic proximal point with steps alpha_0/sqrt(k+1), alpha_0 over six decades, for "
    "the squared and the logistic loss.",
    (
        Drawing(
            "robustness",
            "Objective gap at the end over that at the start: median over runs, and the range of 80 % of them.",
            lambda f: figures.robustness(f["robustness"]),
        ),
    ),
    (bounded_models_are_robust,),
    tables=robustness_tables,
    seeds=ROBUSTNESS_SEEDS,
    **CATALOGUE["theory-robustness"].numbers,
)

EXPERIMENTS = (BOUNDS, FLOOR, ROBUSTNESS)

__all__ = [
    "BOUNDS",
    "CHECKS",
    "EXPERIMENTS",
    "FLOOR",
    "ROBUSTNESS",
    "Check",
    "claim",
    "evaluate",
    "find_check",
    "summary",
]
