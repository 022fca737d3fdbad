"""The floor: the level that SPS_max with a constant bound on its step does not get below, but decreasing steps do.

The problem is ridge regression with a loss that is 0 somewhere. SPS_max gets the regularised losses f_i + lam/2 ||.||^2
with the lower bound 0, as the paper's baseline does: sigma^2 is then psi*, which is positive as soon as lam is.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from proxsps import theory
from proxsps.core import schedules
from proxsps.experiments.base import Frames
from proxsps.experiments.sentences import states
from proxsps.experiments.theory.rates import regularised_losses
from proxsps.experiments.theory.runs import DecSPS, Schedule, Step, checkpoints, prox_sps, run, sps_max
from proxsps.problems.composite import Composite, ridge
from proxsps.problems.losses import Floats

LAM, STEPS, SEEDS = 0.1, 5_000, 30
LAMBDAS = np.geomspace(1e-3, 1, 7)
GAMMA_B = 1.0


def _methods(problem: Composite) -> dict[tuple[str, str], tuple[Step, Schedule]]:
    """(method, steps): its step and schedule. All begin with steps of the same length."""
    lam = problem.constants.lam
    constant = partial(schedules.constant, alpha=GAMMA_B)
    decreasing = partial(schedules.strongly_convex, lam=lam, k_0=max(1.0, 1 / (lam * GAMMA_B)))
    return {
        ("sps", "constant"): (sps_max(problem), constant),
        ("prox-sps", "constant"): (prox_sps(problem), constant),
        ("dec-sps", "decreasing"): (DecSPS(problem), constant),
        ("prox-sps", "decreasing"): (prox_sps(problem), decreasing),
    }


def _mean_gaps(problem: Composite, step: Step, schedule: Schedule, K: np.ndarray, seeds: int) -> Floats:
    """Mean of psi(x^k) - psi* over the points x^1 ... x^K, which is what the proofs bound: (len(K), runs)."""
    points = run(problem, step, schedule, int(K[-1]), seeds).points[1:]
    gaps = problem.objective(points) - problem.optimum
    found: Floats = np.cumsum(gaps, axis=0)[K - 1] / K[:, None]
    return found


def floor_tables(seeds: int = SEEDS) -> Frames:
    """Curves at one lambda, and what is left after all steps over lambdas, with sigma^2."""
    problem, K = ridge(LAM, noise=0.0), checkpoints(STEPS, 25)
    curves = [
        pd.DataFrame({"method": method, "steps": steps, "K": K, "gap": gaps.mean(1), "std": gaps.std(1)})
        for (method, steps), pair in _methods(problem).items()
        for gaps in [_mean_gaps(problem, *pair, K, seeds)]
    ]
    rows = []
    for lam in LAMBDAS:
        problem = ridge(lam, noise=0.0)
        c = problem.constants
        sigma_sq = theory.interpolation_constant(regularised_losses(problem), problem.lower_bound)
        limit = theory.sps_max_floor(L_max=c.L_max + c.lam, gamma_b=GAMMA_B, sigma_sq=sigma_sq)
        for key in (("sps", "constant"), ("prox-sps", "decreasing")):
            gaps = _last_gaps(problem, *_methods(problem)[key], seeds)
            rows.append((*key, lam, sigma_sq, limit, gaps.mean(), gaps.std()))
    columns = ["method", "steps", "lam", "sigma_sq", "limit", "gap", "std"]
    return {"curves": pd.concat(curves, ignore_index=True), "floors": pd.DataFrame(rows, columns=columns)}


def _last_gaps(problem: Composite, step: Step, schedule: Schedule, seeds: int) -> Floats:
    """Mean of psi(x^k) - psi* over the last fifth of half as many steps, for each run."""
    points = run(problem, step, schedule, STEPS // 2, seeds).points[-STEPS // 10 :]
    found: Floats = (problem.objective(points) - problem.optimum).mean(0)
    return found


@states(
    f"mean gap over {STEPS} steps; SPS_max: also over its value after a tenth of the steps",
    "ProxSPS below a tenth of SPS_max, which keeps more than a half",
)
def through_the_floor(frames: Frames) -> tuple[str, bool]:
    """SPS_max converges to a neighbourhood only; ProxSPS with decreasing steps converges to the solution."""
    curves = frames["curves"].set_index(["method", "steps", "K"])["gap"].sort_index()
    ends = {key: curves.loc[key].iloc[-1] for key in (("sps", "constant"), ("prox-sps", "decreasing"))}
    before = curves.loc["sps", "constant"]
    stalled = before.iloc[-1] / before[before.index <= before.index[-1] / 10].iloc[-1]
    low, high = ends["prox-sps", "decreasing"], ends["sps", "constant"]
    return f"ProxSPS {low:.2g}, SPS_max {high:.2g}, which keeps {stalled:.2f}", low < high / 10 and stalled > 0.5


@states(
    "gap that SPS_max keeps, over lambda, against sigma^2 and the bound 2 gamma_b sigma^2 / alpha",
    "grows with sigma^2, and stays below the bound",
)
def floor_grows_with_sigma(frames: Frames) -> tuple[str, bool]:
    """The size of the neighbourhood is determined by the interpolation constant sigma^2."""
    floors = frames["floors"]
    sps = floors[floors["method"] == "sps"].sort_values("sigma_sq")
    rising, below = bool((np.diff(sps["gap"]) > 0).all()), bool((sps["gap"] <= sps["limit"]).all())
    return (
        f"from {sps['gap'].iloc[0]:.2g} at sigma^2 = {sps['sigma_sq'].iloc[0]:.2g} to {sps['gap'].iloc[-1]:.2g} at "
        f"{sps['sigma_sq'].iloc[-1]:.2g}",
        rising and below,
    )
