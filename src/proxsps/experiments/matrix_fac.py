"""Regularised matrix factorisation: the paper's main experiment and its stability grid, for both data sets."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from proxsps import figures
from proxsps.experiments.base import Drawing, Experiment
from proxsps.experiments.catalogue import CATALOGUE
from proxsps.experiments.matrix_claims import PATH_CLAIMS
from proxsps.experiments.robustness_claims import ROBUSTNESS_CLAIMS
from proxsps.experiments.sentences import POLYAK, similar
from proxsps.experiments.stability_claims import ALL, CONVERGENCE_CLAIMS
from proxsps.experiments.standard import AT_END, over_epochs, over_lambda, step_sizes
from proxsps.sweep.spec import RunSpec, grid

if TYPE_CHECKING:
    from proxsps.problems import MatrixFactorization

LAMBDAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ALPHAS = (10.0, 5.0, 1.0)
STABILITY_CLAIMS = (*CONVERGENCE_CLAIMS, *ROBUSTNESS_CLAIMS)
STABILITY = {"prox-sps": np.linspace(2, 0.5, 5), "sps": np.linspace(2, 0.5, 5), "sgd": np.linspace(0.7, 0.125, 5)}
SMALL = (0.4125, 0.125)  # of SGD's alpha_0, for SPS as well: not in the figure, but the paper speaks of them


def problem(number: int, convention: str = "published") -> MatrixFactorization:
    """The data set of this number."""
    from proxsps import problems  # loads torch, which figures and claims do without

    return {1: problems.matrix_fac1, 2: problems.matrix_fac2}[number](convention=convention)


def path_specs(number: int, seeds: int, epochs: int, convention: str = "published") -> list[RunSpec]:
    """Five strengths, three caps, ProxSPS and SPS, `sqrt` schedule."""
    return grid(problem(number, convention), {"prox-sps": ALPHAS, "sps": ALPHAS}, LAMBDAS, ["sqrt"], seeds, epochs)


def stability_specs(number: int, seeds: int, epochs: int, convention: str = "published") -> list[RunSpec]:
    """lambda = 1e-3, both schedules, five caps for each of three methods; SPS with two more, constant schedule."""
    lrs = {method: [float(value) for value in values] for method, values in STABILITY.items()}
    data = problem(number, convention)
    published = grid(data, lrs, [1e-3], ["constant", "sqrt"], seeds, epochs)
    return published + grid(data, {"sps": SMALL}, [1e-3], ["constant"], seeds, epochs)


def published_caps(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the stability grid that the published figure shows."""
    return runs[(runs["method"] != "sps") | ~runs["lr"].isin(SMALL)]


LINEAR = "over the epochs, mean over {runs}, on a linear axis as in the published figure."
PATH_DRAWINGS = (
    over_epochs("objective", "objective", "Objective over the epochs for each strength lambda, mean over {runs}."),
    over_epochs(
        "validation",
        "val_error",
        "Validation error over the epochs, mean over {runs}, as a rolling median over five epochs.",
    ),
    over_epochs("objective-linear", "objective", f"Objective {LINEAR}", scale="linear"),
    over_epochs("validation-linear", "val_error", f"Validation error {LINEAR}", scale="linear"),
    over_epochs("norm", "model_norm", "Norm of the iterates over the epochs, mean over {runs}."),
    over_lambda("lambda-path-validation", "val_error", f"Validation error {AT_END}"),
    over_lambda("lambda-path-norm", "model_norm", f"Norm of the iterates {AT_END}"),
    step_sizes(
        "step-sizes",
        "Adaptive step sizes zeta_k of one run (dots), their medians over each epoch (lines), and the caps alpha_k.",
    ),
)
STABILITY_DRAWINGS = (
    Drawing(
        "objective",
        "Objective above the best one found, mean over {runs}, for constant (left) and sqrt (right) steps and several "
        "alpha_0.",
        lambda f: figures.stability(published_caps(f["runs"]), "objective"),
    ),
    Drawing(
        "validation",
        "Validation error, mean over {runs}, for constant (left) and sqrt (right) steps and several alpha_0.",
        lambda f: figures.stability(published_caps(f["runs"]), "val_error"),
    ),
)


TEXTS = {
    1: "Two linear layers of rank 4 learn a 10 x 6 matrix with condition number 7,600.",
    2: "Rank 10, and targets disturbed by 5 % noise.",
}
# Of the second data set the paper says one thing: that its results are qualitatively very similar.
CLAIMS = {
    1: (PATH_CLAIMS, STABILITY_CLAIMS),
    2: ((similar(PATH_CLAIMS, POLYAK),), (similar(STABILITY_CLAIMS, ALL),)),
}
AS_TEXT = (
    " As the text of the paper has it, not its figures: squared errors are summed over the outputs, and D runs from 1 "
    "instead of 10."
)


def pair(number: int, convention: str = "published") -> tuple[Experiment, Experiment]:
    """Both experiments with a data set, as the published figures were made or as the paper's text says."""
    ending, added, note = ("", "", "") if convention == "published" else ("-text", " (text)", AS_TEXT)

    def made(name: str, title: str, text: str, drawings: tuple[Drawing, ...], claims: Any, specs: Any) -> Experiment:
        return Experiment(
            f"{name}{ending}",
            f"Matrix factorisation {number}{title}{added}",
            f"{TEXTS[number]} {text}{note}",
            drawings,
            claims,
            partial(specs, number, convention=convention),
            seeds=10,
            words=(name, "--convention", convention) if ending else (),
            **CATALOGUE[name].numbers,
        )

    name, (path_claims, stability_claims) = f"matrix-fac{number}", CLAIMS[number]
    text = "ProxSPS and SPS for five strengths lambda and three caps alpha_0, sqrt schedule."
    path = made(name, "", text, PATH_DRAWINGS, path_claims, path_specs)
    text = (
        "lambda = 1e-3; ProxSPS, SPS and SGD for five alpha_0 each, constant and sqrt schedules; and SPS for two of "
        "SGD's alpha_0."
    )
    return path, made(f"{name}-stability", ": stability", text, STABILITY_DRAWINGS, stability_claims, stability_specs)


EXPERIMENTS = (*pair(1), *pair(2))
