"""Figures of the experiments: each function takes DataFrames and returns a ``matplotlib.figure.Figure``.

Nothing here trains, reads files or touches pyplot, so a stored run can be drawn again without a display.
``frames`` says which columns the frames need; ``export`` turns a figure into SVG or a file.
"""

from proxsps.figures.export import save, to_svg
from proxsps.figures.illustrations import flow, interpolation, model_compare
from proxsps.figures.paths import lambda_path, per_lambda
from proxsps.figures.stability import stability
from proxsps.figures.step_sizes import step_sizes

__all__ = [
    "flow",
    "interpolation",
    "lambda_path",
    "model_compare",
    "per_lambda",
    "save",
    "stability",
    "step_sizes",
    "to_svg",
]
