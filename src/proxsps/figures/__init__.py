"""Figures of the experiments: each function takes DataFrames and returns a ``matplotlib.figure.Figure``.

Nothing here trains, reads files or touches pyplot, so a stored run can be drawn again without a display.
``frames`` says which columns the frames need; ``export`` turns a figure into SVG or a file. matplotlib is loaded when
the first figure is drawn.
"""

from typing import TYPE_CHECKING

from proxsps._install import require as _require
from proxsps._lazy import attach as _attach

if TYPE_CHECKING:
    from proxsps.figures.export import picture, save, to_svg
    from proxsps.figures.first_page import overview
    from proxsps.figures.illustrations import flow, interpolation, model_compare
    from proxsps.figures.paths import lambda_path, per_lambda
    from proxsps.figures.schedules import stability
    from proxsps.figures.steps import step_sizes
    from proxsps.figures.theory import floor, rates, robustness, tightness
    from proxsps.figures.trials import over_lr

_require("proxsps.figures", "experiments", "matplotlib", "pandas")

__all__ = [
    "floor",
    "flow",
    "interpolation",
    "lambda_path",
    "model_compare",
    "over_lr",
    "overview",
    "per_lambda",
    "picture",
    "rates",
    "robustness",
    "save",
    "stability",
    "step_sizes",
    "tightness",
    "to_svg",
]

__getattr__, __dir__ = _attach(
    __name__,
    {
        **dict.fromkeys(("picture", "save", "to_svg"), "export"),
        **dict.fromkeys(("flow", "interpolation", "model_compare"), "illustrations"),
        **dict.fromkeys(("lambda_path", "per_lambda"), "paths"),
        **dict.fromkeys(("floor", "rates", "robustness", "tightness"), "theory"),
        "over_lr": "trials",
        "overview": "first_page",
        "stability": "schedules",
        "step_sizes": "steps",
    },
)
