"""Data, model, loss and, where it is known, the optimum. A problem does not depend on a solver.

The paper's experiments are `matrix_fac1()`, `matrix_fac2()`, `MatrixCompletion()` (air-quality sensors),
`RidgeRegression()` (interpolation constant), `PlanarSquares()` (flow) and `ScalarLogistic()` (models of the loss).
`ImageClassification()` (residual networks) is for the deep experiments. `LogisticRegression` takes synthetic data or a
LIBSVM file, `from_module` your own model. `composite` has small problems for which every constant of the paper's
theorems is known.
Names are loaded when they are first used, so finding data sets does not load torch.
"""

from typing import TYPE_CHECKING

from proxsps._lazy import attach as _attach

if TYPE_CHECKING:
    from proxsps.problems.base import ModuleProblem, Problem, from_module
    from proxsps.problems.completion import MatrixCompletion
    from proxsps.problems.composite import Composite, Constants
    from proxsps.problems.datasets import DataError
    from proxsps.problems.linear import LogisticRegression, RidgeRegression, ridge_interpolation_constant
    from proxsps.problems.matrix import MatrixFactorization, matrix_fac1, matrix_fac2
    from proxsps.problems.small import PlanarSquares, ScalarLogistic
    from proxsps.problems.vision import ImageClassification, image_problem

__all__ = [
    "Composite",
    "Constants",
    "DataError",
    "ImageClassification",
    "LogisticRegression",
    "MatrixCompletion",
    "MatrixFactorization",
    "ModuleProblem",
    "PlanarSquares",
    "Problem",
    "RidgeRegression",
    "ScalarLogistic",
    "from_module",
    "image_problem",
    "matrix_fac1",
    "matrix_fac2",
    "ridge_interpolation_constant",
]

__getattr__, __dir__ = _attach(
    __name__,
    {
        **dict.fromkeys(("ModuleProblem", "Problem", "from_module"), "base"),
        "MatrixCompletion": "completion",
        **dict.fromkeys(("Composite", "Constants"), "composite"),
        "DataError": "datasets",
        **dict.fromkeys(("LogisticRegression", "RidgeRegression", "ridge_interpolation_constant"), "linear"),
        **dict.fromkeys(("MatrixFactorization", "matrix_fac1", "matrix_fac2"), "matrix"),
        **dict.fromkeys(("PlanarSquares", "ScalarLogistic"), "small"),
        **dict.fromkeys(("ImageClassification", "image_problem"), "vision"),
    },
)
