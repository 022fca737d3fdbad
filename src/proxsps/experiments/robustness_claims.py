"""What the paper says about the choice of alpha_0 in matrix factorisation, checked by numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from proxsps.experiments.base import Frames, over_seeds, setting
from proxsps.experiments.sentences import Found, label, states
from proxsps.experiments.stability_claims import ALL, UNSTABLE, excess

LEVELS = (0.01, 0.02, 0.05)  # above the minimum: what counts as good should not depend on the level
WORKS = 0.1


def _counts(runs: pd.DataFrame, schedule: str, others: tuple[str, ...]) -> Found:
    """Whether ProxSPS has more good alpha_0 than others at every level, and how many there are."""
    ends = excess(runs, schedule)
    methods = ("prox-sps", *others)
    grids = {method: ends[method][ends[method].index >= (UNSTABLE if method == "sps" else 0)] for method in methods}

    def told(counts: dict[str, int]) -> str:
        return ", ".join(f"{label(method)} {count}" for method, count in counts.items())

    def within(level: float) -> dict[str, int]:
        return {method: int((grid <= level).sum()) for method, grid in grids.items()}

    found = {level: within(level) for level in LEVELS}
    more = {level: max(counts[m] for m in others) < counts["prox-sps"] > 1 for level, counts in found.items()}
    works = (grids["sgd"] <= WORKS).any()  # else nothing is known about its sensitivity
    gap = min(grid[grid > 0].min() for grid in grids.values())
    return Found(
        "; ".join(f"within {level:.0%}: {told(counts)}" for level, counts in found.items())
        + f" (of {', '.join(str(len(grid)) for grid in grids.values())})",
        all(more.values()) and works,
        f"within {' and '.join(f'{level:.0%}' for level, won in more.items() if won)}"
        if works and sum(more.values()) > 1
        else "",
        f"within ten times the smallest gap: {told(within(10 * gap))}",
    )


COUNT = "number of a method's alpha_0 whose objective ends within 1, 2 and 5 % of the minimum of all mean curves"


@states(
    f"{COUNT}, constant schedule",
    f"at each level at least two for ProxSPS, and more than for SPS and for SGD, which is within {WORKS:.0%} "
    "somewhere. In part: at two levels",
    needs=ALL,
    finite="objective",
    unless=("sps", "sgd"),
    gist="ProxSPS admits a larger range of initial step sizes that converge fast, and so is more robust than SGD and "
    "SPS to the tuning of alpha_0 (constant steps).",
)
def more_robust(frames: Frames) -> Found:
    """Good step sizes, constant steps."""
    return _counts(frames["runs"], "constant", ("sps", "sgd"))


@states(
    f"{COUNT}, sqrt schedule",
    f"at each level at least two for ProxSPS, and more than for SGD, which is within {WORKS:.0%} somewhere. In part: "
    "at two levels",
    needs=("prox-sps", "sgd"),
    finite="objective",
    unless=("sgd",),
)
def less_sensitive(frames: Frames) -> Found:
    """ProxSPS is less sensitive to the choice of alpha_0 than SGD (sqrt schedule)."""
    return _counts(frames["runs"], "sqrt", ("sgd",))


@states(
    "validation error after the last epochs, both schedules",
    "constant: largest of ProxSPS below the minimum of SPS with alpha_0 > 0.5; SPS there: less with sqrt steps; sqrt: "
    "largest over smallest is less for ProxSPS than for SGD where it converges",
    needs=ALL,
    finite="val_error",
    unless=("sgd",),
    gist="The same can be observed for the validation error: ProxSPS is good for all alpha_0, SPS with constant steps "
    "is not, sqrt steps stabilise it, and ProxSPS is less sensitive than SGD.",
)
def validation_alike(frames: Frames) -> tuple[str, bool]:
    """The same on validation data."""
    errors = over_seeds(frames["runs"], "val_error").droplevel("weight_decay")
    constant, sqrt = (errors.xs(schedule, level="schedule") for schedule in ("constant", "sqrt"))
    ours, theirs = constant["prox-sps"], constant["sps"]
    theirs = theirs[theirs.index > UNSTABLE]
    calmer = (theirs / sqrt["sps"][theirs.index]).min()
    finite = sqrt[np.isfinite(sqrt)]
    spread = {method: finite[method].max() / finite[method].min() for method in ("prox-sps", "sgd")}
    return (
        f"constant: ProxSPS largest {ours.max():.2e} at {setting(ours.idxmax())}, SPS minimum {theirs.min():.2e} at "
        f"{setting(theirs.idxmin())}, at least {calmer:.3g} times that with sqrt steps; sqrt: {spread['prox-sps']:.3g} "
        f"for ProxSPS, {spread['sgd']:.3g} for SGD",
        ours.max() < theirs.min() and calmer > 1 and spread["prox-sps"] < spread["sgd"],
    )


ROBUSTNESS_CLAIMS = (more_robust, less_sensitive, validation_alike)
