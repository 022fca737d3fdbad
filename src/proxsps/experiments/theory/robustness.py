"""The linear, the truncated and the full model of the loss, each over six decades of alpha_0."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from proxsps.core import schedules
from proxsps.experiments.base import Frames
from proxsps.experiments.sentences import states
from proxsps.experiments.theory.runs import full_model, prox_sgd, prox_sps, run
from proxsps.problems.composite import easy_classification, easy_regression

ALPHAS = np.geomspace(1e-3, 1e3, 25)
STEPS, SEEDS = 400, 20
MODELS = {"prox-sgd": prox_sgd, "prox-sps": prox_sps, "prox-point": full_model}  # linear, truncated, full


def robustness_tables(seeds: int = SEEDS) -> Frames:
    """psi(x^K) - psi* after K steps alpha_0 / sqrt(k + 1), over psi(x^0) - psi*; infinity where a run overflows."""
    rows = []
    for problem in (easy_regression(), easy_classification()):
        start = float(problem.objective(problem.start)) - problem.optimum
        for method, make in MODELS.items():
            with np.errstate(over="ignore", invalid="ignore"):
                path = run(problem, make(problem), partial(schedules.sqrt_decay, alpha=1.0), STEPS, seeds, ALPHAS)
                gaps = (problem.objective(path.points[-1]) - problem.optimum) / start
            gaps = np.where(np.isfinite(gaps), gaps, np.inf).reshape(len(ALPHAS), seeds)
            low, middle, high = np.quantile(gaps, [0.1, 0.5, 0.9], axis=1, method="nearest")
            columns = {"loss": problem.name, "method": method, "alpha": ALPHAS, "steps": STEPS}
            rows.append(pd.DataFrame(columns | {"gap": middle, "low": low, "high": high}))
    return {"robustness": pd.concat(rows, ignore_index=True)}


@states(
    f"largest median gap after {STEPS} steps, over the gap at the start, for alpha_0 from 1 to 1000",
    "for the truncated and the full model at most a tenth of that for the linear one",
)
def bounded_models_are_robust(frames: Frames) -> tuple[str, bool]:
    """Methods whose model respects a lower bound of the loss are far less sensitive to the step size than SGD."""
    table = frames["robustness"].query("alpha >= 1")
    worst = table.groupby(["loss", "method"])["gap"].max().unstack()
    text = "; ".join(
        f"{loss}: linear {row['prox-sgd']:.2g}, truncated {row['prox-sps']:.2g}, full {row['prox-point']:.2g}"
        for loss, row in worst.iterrows()
    )
    return text, (worst[["prox-sps", "prox-point"]].max(axis=1) <= worst["prox-sgd"] / 10).all()
