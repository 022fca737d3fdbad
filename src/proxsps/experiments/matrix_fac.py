"""Regularised matrix factorisation: the paper's main experiment and its stability grid, for both data sets."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from proxsps import figures
from proxsps.experiments.base import Drawing, Experiment
from proxsps.experiments.matrix_claims import PATH_CLAIMS, STABILITY_CLAIMS
from proxsps.sweep.spec import RunSpec, grid

if TYPE_CHECKING:
    from proxsps.problems import MatrixFactorization

LAMBDAS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
ALPHAS = (10.0, 5.0, 1.0)
STABILITY = {"prox-sps": np.linspace(2, 0.5, 5), "sps": np.linspace(2, 0.5, 5), "sgd": np.linspace(0.7, 0.125, 5)}


def problem(number: int) -> MatrixFactorization:
    """The data set of this number."""
    from proxsps import problems  # loads torch, which figures and claims do without

    return {1: problems.matrix_fac1, 2: problems.matrix_fac2}[number]()


def path_specs(number: int, seeds: int, epochs: int) -> list[RunSpec]:
    """Five strengths, three caps, ProxSPS and SPS, `sqrt` schedule."""
    return grid(problem(number), {"prox-sps": ALPHAS, "sps": ALPHAS}, LAMBDAS, ["sqrt"], seeds, epochs)


def stability_specs(number: int, seeds: int, epochs: int) -> list[RunSpec]:
    """lambda = 1e-3, both schedules, five caps for each of three methods."""
    lrs = {method: [float(value) for value in values] for method, values in STABILITY.items()}
    return grid(problem(number), lrs, [1e-3], ["constant", "sqrt"], seeds, epochs)


PATH_DRAWINGS = (
    Drawing(
        "objective",
        "Objective over the epochs for each strength lambda.",
        lambda f: figures.per_lambda(f["runs"], "objective"),
    ),
    Drawing(
        "validation",
        "Validation error over the epochs, as a rolling median over five epochs.",
        lambda f: figures.per_lambda(f["runs"], "val_error"),
    ),
    Drawing("norm", "Norm of the iterates over the epochs.", lambda f: figures.per_lambda(f["runs"], "model_norm")),
    Drawing(
        "lambda-path-validation",
        "Validation error as a function of lambda: median over the last ten epochs, shaded one standard deviation.",
        lambda f: figures.lambda_path(f["runs"], "val_error"),
    ),
    Drawing(
        "lambda-path-norm",
        "Norm of the iterates as a function of lambda: median over the last ten epochs, shaded one standard deviation.",
        lambda f: figures.lambda_path(f["runs"], "model_norm"),
    ),
    Drawing(
        "step-sizes",
        "Adaptive step sizes zeta_k of one run (dots), their medians over each epoch (lines), and the caps alpha_k.",
        lambda f: figures.step_sizes(f["steps"], f["runs"]),
    ),
)
STABILITY_DRAWINGS = (
    Drawing(
        "objective",
        "Objective above the best one found, for constant (left) and sqrt (right) steps and several alpha_0.",
        lambda f: figures.stability(f["runs"], "objective"),
    ),
    Drawing(
        "validation",
        "Validation error, for constant (left) and sqrt (right) steps and several alpha_0.",
        lambda f: figures.stability(f["runs"], "val_error"),
    ),
)


def _pair(number: int, text: str) -> tuple[Experiment, Experiment]:
    name = f"matrix-fac{number}"
    path = Experiment(
        name,
        f"Matrix factorisation {number}",
        f"{text} ProxSPS and SPS for five strengths lambda and three caps alpha_0, sqrt schedule.",
        PATH_DRAWINGS,
        PATH_CLAIMS,
        partial(path_specs, number),
        seeds=10,
        epochs=50,
        seconds=7,
    )
    stability = Experiment(
        f"{name}-stability",
        f"Matrix factorisation {number}: stability",
        f"{text} lambda = 1e-3; ProxSPS, SPS and SGD for five alpha_0 each, constant and sqrt schedules.",
        STABILITY_DRAWINGS,
        STABILITY_CLAIMS,
        partial(stability_specs, number),
        seeds=10,
        epochs=50,
        seconds=7,
    )
    return path, stability


EXPERIMENTS = (
    *_pair(1, "Two linear layers of rank 4 learn a 10 x 6 matrix with condition number above 1e5."),
    # The paper calls these results qualitatively very similar, so that the same sentences are put to the test.
    *_pair(2, "Rank 10, and targets disturbed by 5 % noise."),
)
