"""Matrix completion on a month of air-quality measurements (appendix of the paper)."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from proxsps.experiments.base import Experiment, Frames, last_medians, setting
from proxsps.experiments.catalogue import CATALOGUE
from proxsps.experiments.sentences import SURE, Found, label, lower_bound, lower_bounds, mostly, states
from proxsps.experiments.standard import AT_END, over_epochs, over_lambda
from proxsps.sweep.spec import RunSpec, grid

LAMBDAS = (5e-5, 1e-4, 5e-4)
LRS = {"prox-sps": (10.0, 5.0), "sps": (10.0, 5.0), "sgd": (5.0, 1.0), "adamw": (1e-3,)}
MEAN = 1.0  # the error of predicting the mean, as measurements are standardised


def specs(seeds: int, epochs: int, data: str = "real", convention: str = "published") -> list[RunSpec]:
    """Four methods with constant steps, three strengths."""
    from proxsps.problems import MatrixCompletion  # loads torch, which figures and claims do without

    return grid(MatrixCompletion(data=data, convention=convention), LRS, LAMBDAS, ["constant"], seeds, epochs)


ALL = tuple(LRS)
Key = tuple[str, float]  # method and alpha_0


def _errors(frames: Frames) -> pd.DataFrame:
    """Validation errors at the end: a row for each lambda, method and alpha_0, a column for each seed."""
    values = last_medians(frames["runs"], "val_error").droplevel("schedule").unstack("seed")
    return values.reorder_levels(["weight_decay", "method", "lr"])


def _best(errors: pd.DataFrame) -> tuple[Key, float]:
    """The method and alpha_0 with the smallest mean error, and a 95 % lower bound of its lead over other methods."""
    means = errors.mean(axis=1)
    best = means.idxmin()
    others = errors[errors.index.get_level_values("method") != best[-2]]
    lead = others.sub(errors.loc[best], axis=1).apply(lower_bound, axis=1).min()
    return best[-2:], float(lead) if means[best] < MEAN else -math.inf


def _name(key: Key) -> str:
    return f"{label(key[0])} with {setting(key[1])}"


def _told(errors: pd.DataFrame) -> str:
    """The best method, and the best one of the others."""
    means = errors.mean(axis=1)
    best, lead = _best(errors)
    others = means[means.index.get_level_values("method") != best[0]]
    second = others.idxmin()[-2:]
    sure = "" if lead > 0 else ", not less with 95 % confidence" if means.min() < MEAN else ", no better than the mean"
    return f"{_name(best)}, {means.min():.3f} ({_name(second)}, {others.min():.3f}){sure}"


@states(
    "validation error (root mean square), median over the last ten epochs, mean over runs",
    f"smallest for ProxSPS at lambda = 5e-5 and 1e-4, below every other method's, {SURE}, and below 1 "
    "(that of the mean). In part: at one of them",
    needs=ALL,
    finite="val_error",
)
def best_for_small_lambda(frames: Frames) -> Found:
    """ProxSPS achieves the smallest validation error for the two smaller lambda."""
    errors = _errors(frames)
    winners = [_best(errors.loc[[lam]]) for lam in LAMBDAS[:2]]
    measured = "; ".join(f"lambda = {lam:g}: {_told(errors.loc[[lam]])}" for lam in LAMBDAS[:2])
    won = [key[0] == "prox-sps" and lead > 0 for key, lead in winners]
    part = [f"at lambda = {lam:g}" for lam, first in zip(LAMBDAS, won, strict=False) if first]
    return Found(measured, all(won), "".join(part))


@states(
    "largest over smallest validation error of the three at lambda = 5e-4, alpha_0 = 5, minus 1",
    "at most 3 %, and all below 1 (that of the mean)",
    needs=ALL[:3],
    finite="val_error",
)
def alike_for_large_lambda(frames: Frames) -> tuple[str, bool]:
    """For the largest lambda ProxSPS, SPS and SGD are almost identical for alpha_0 = 5."""
    means = _errors(frames).mean(axis=1).loc[LAMBDAS[-1]]
    values = [means[method, 5.0] for method in ALL[:3]]
    apart = max(values) / min(values) - 1
    return f"{apart:.1%} ({', '.join(f'{value:.3f}' for value in values)})", apart <= 0.03 and max(values) < MEAN


@states(
    "method with the smallest validation error at lambda = 5e-4",
    f"SGD with alpha_0 = 1, below every other method, {SURE}",
    needs=ALL,
    finite="val_error",
)
def sgd_best_for_large_lambda(frames: Frames) -> tuple[str, bool]:
    """For the largest lambda SGD with alpha_0 = 1 is the best method."""
    errors = _errors(frames).loc[[LAMBDAS[-1]]]
    key, lead = _best(errors)
    return _told(errors), key == ("sgd", 1.0) and lead > 0


@states(
    "method with the smallest validation error over all lambda",
    f"ProxSPS, below every other method at each lambda, {SURE}",
    needs=ALL,
    finite="val_error",
)
def best_overall(frames: Frames) -> tuple[str, bool]:
    """Over all tested lambda ProxSPS obtains the smallest error."""
    errors = _errors(frames)
    key, lead = _best(errors)
    return f"lambda = {errors.mean(axis=1).idxmin()[0]:g}: {_told(errors)}", key[0] == "prox-sps" and lead > 0


@states(
    "model norm of ProxSPS over that of SPS, same alpha_0 and lambda",
    f"below 1 everywhere, {SURE}. In part: in three of four settings, and on average everywhere",
    needs=ALL[:2],
    finite="model_norm",
)
def smaller_norm(frames: Frames) -> Found:
    """ProxSPS produces iterates with smaller norm."""
    norms = last_medians(frames["runs"], "model_norm").droplevel("schedule")
    ratio = norms["prox-sps"] / norms["sps"]
    mean, bound = ratio.groupby(["lr", "weight_decay"]).mean(), lower_bounds(-np.log(ratio))
    return Found(
        f"largest {mean.max():.3f} at {setting(*mean.idxmax())}, 95 % upper bound {np.exp(-bound.min()):.3f}",
        bound.min() > 0,
        mostly(bound > 0) if mean.max() < 1 else "",
    )


DRAWINGS = (
    over_epochs(
        "validation",
        "val_error",
        "Validation error over the epochs, mean over {runs}, rolling median over five epochs, shaded two standard "
        "deviations.",
        deviations=2,
    ),
    over_epochs(
        "norm",
        "model_norm",
        "Norm of the iterates over the epochs, mean over {runs}, shaded two standard deviations.",
        deviations=2,
    ),
    over_lambda("lambda-path", "val_error", f"Validation error {AT_END}"),
)
CLAIMS = (best_for_small_lambda, alike_for_large_lambda, sgd_best_for_large_lambda, best_overall, smaller_norm)
SEEDS = 3
TEXT = (
    "A rank-24 factorisation with biases fills the gaps in a month of air-quality sensors; constant steps, three "
    "strengths. Seeds shuffle the measurements; three are the default, and the text of the paper says that there were "
    "ten runs."
)


OTHER_MONTH = (
    "The paper's sentences are about its own month. On this file a verdict says whether they are true here as well; it "
    "says nothing about the reproduction."
)


def month(file: str = "", convention: str = "published") -> Experiment:
    """The experiment on the published month (130 sensors, 720 hours), or on a file of another one.

    Args:
        file: a CSV file of the same format: its path, or its name in the folder of data.
        convention: of the validation error, see `MatrixCompletion`.
    """
    ending = "-" + re.sub(r"[^\w.-]", "_", Path(file).stem) if file else ""
    words = ("sensor", *(("--sensors", file) if file else ()))
    if convention != "published":
        ending, words = f"{ending}-{convention}", (*words, "--convention", convention)
    return Experiment(
        f"sensor{ending}",
        "Matrix completion of air-quality sensors" + (f" ({Path(file).name})" if file else ""),
        TEXT + (" The validation error is that of the whole set." if convention == "text" else ""),
        DRAWINGS,
        CLAIMS,
        partial(specs, data=file or "real", convention=convention),
        seeds=SEEDS,
        words=words if ending else (),
        caution=OTHER_MONTH if file else "",
        **CATALOGUE["sensor"].numbers,
    )


SENSOR = month()
EXPERIMENTS = (SENSOR,)
