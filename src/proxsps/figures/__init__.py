"""Figures of the experiments: each function takes DataFrames and returns a ``matplotlib.figure.Figure``.

Nothing here trains, reads files or touches pyplot, so a stored run can be drawn again without a display.
``frames`` says which columns the frames need; ``export`` turns a figure into SVG or a file.
"""

from proxsps.figures.export import save, to_svg
from proxsps.figures.illustrations import flow, interpolation, model_compare
from proxsps.figures.paths import lambda_path, per_lambda
from proxsps.figures.stability import stability
from proxsps.figures.step_sizes import step_sizes
from proxsps.figures.theory import floor, rates, robustness, tightness

__all__ = [
    "floor",
    "flow",
    "interpolation",
    "lambda_path",
    "model_compare",
    "per_lambda",
    "rates",
    "robustness",
    "save",
    "stability",
    "step_sizes",
    "tightness",
    "to_svg",
]
