"""Matrix completion on a month of air-quality measurements (appendix of the paper)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from proxsps import figures
from proxsps.experiments.base import Claim, Drawing, Experiment, Frames, over_seeds, setting
from proxsps.methods import METHODS
from proxsps.sweep.spec import RunSpec, grid

LAMBDAS = (5e-5, 1e-4, 5e-4)
LRS = {"prox-sps": (10.0, 5.0), "sps": (10.0, 5.0), "sgd": (5.0, 1.0), "adamw": (1e-3,)}
MEAN = 1.0  # the error of predicting the mean, as measurements are standardised


def specs(seeds: int, epochs: int, data: str = "real", convention: str = "published") -> list[RunSpec]:
    """Four methods with constant steps, three strengths."""
    from proxsps.problems import MatrixCompletion  # loads torch, which figures and claims do without

    return grid(MatrixCompletion(data=data, convention=convention), LRS, LAMBDAS, ["constant"], seeds, epochs)


def _errors(frames: Frames) -> dict[float, dict[tuple[str, float], float]]:
    """Validation error for each strength, by method and alpha_0."""
    means = over_seeds(frames["runs"], "val_error").droplevel("schedule")
    return {lam: means.xs(lam, level="weight_decay").to_dict() for lam in LAMBDAS}


def _best(errors: dict[tuple[str, float], float]) -> tuple[str, float] | None:
    """The setting with the least error; none if another method has the same, or if none beats the mean (error 1)."""
    best = min(errors, key=errors.__getitem__)
    tied = any(value <= errors[best] for key, value in errors.items() if key[0] != best[0])
    return best if errors[best] < MEAN and not tied else None


def _name(key: tuple[str, float] | None) -> str:
    return "none" if key is None else f"{METHODS[key[0]].label} with {setting(key[1])}"


def best_for_small_strengths(frames: Frames) -> Claim:
    """The two smaller strengths."""
    errors = _errors(frames)
    winners = {lam: _best(errors[lam]) for lam in LAMBDAS[:2]}
    measured = "; ".join(f"lambda = {lam:g}: {_name(w)}, {min(errors[lam].values()):.3f}" for lam, w in winners.items())
    return Claim(
        "best-for-small-lambda",
        "ProxSPS achieves the smallest validation error for the two smaller lambda.",
        "validation error (root mean square), median over the last ten epochs, mean over runs",
        "least for ProxSPS at lambda = 5e-5 and 1e-4, and below 1 (that of the mean)",
        measured,
        all(w is not None and w[0] == "prox-sps" for w in winners.values()),
    )


def alike_at_large_strength(frames: Frames) -> Claim:
    """The largest strength with alpha_0 = 5."""
    errors = _errors(frames)[LAMBDAS[-1]]
    values = [errors[method, 5.0] for method in ("prox-sps", "sps", "sgd")]
    spread = max(values) / min(values) - 1
    return Claim(
        "alike-for-large-lambda",
        "For the largest lambda ProxSPS, SPS and SGD are almost identical for alpha_0 = 5.",
        "largest over least validation error of the three at lambda = 5e-4, alpha_0 = 5, minus 1",
        "at most 3 %, and all below 1 (that of the mean)",
        f"{spread:.1%} ({', '.join(f'{value:.3f}' for value in values)})",
        spread <= 0.03 and max(values) < MEAN,
    )


def sgd_best_at_large_strength(frames: Frames) -> Claim:
    """The largest strength, all methods."""
    errors = _errors(frames)[LAMBDAS[-1]]
    winner = _best(errors)
    return Claim(
        "sgd-best-for-large-lambda",
        "For the largest lambda SGD with alpha_0 = 1 is the best method.",
        "method with the least validation error at lambda = 5e-4",
        "SGD with alpha_0 = 1",
        f"{_name(winner)}, {min(errors.values()):.3f}",
        winner == ("sgd", 1.0),
    )


def best_overall(frames: Frames) -> Claim:
    """All strengths together."""
    errors = _errors(frames)
    settings = {key for by_key in errors.values() for key in by_key}
    key = _best({key: min(by_key[key] for by_key in errors.values()) for key in settings})
    lam = min(LAMBDAS, key=lambda lam: min(errors[lam].values()))
    return Claim(
        "best-overall",
        "Over all tested lambda ProxSPS obtains the smallest error.",
        "method with the least validation error over all lambda",
        "ProxSPS",
        f"{_name(key)}, lambda = {lam:g}: {min(errors[lam].values()):.3f}",
        key is not None and key[0] == "prox-sps",
    )


def smaller_norm(frames: Frames) -> Claim:
    """Norm of the iterates against SPS."""
    norms = over_seeds(frames["runs"], "model_norm").droplevel("schedule")
    ratio = (norms["prox-sps"] / norms["sps"]).fillna(float("inf"))  # both diverged
    return Claim(
        "smaller-norm",
        "ProxSPS produces iterates with smaller norm.",
        "model norm of ProxSPS over that of SPS, same alpha_0 and lambda",
        "below 1 everywhere",
        f"largest {ratio.max():.3f} at {setting(*ratio.idxmax())}",
        bool(ratio.max() < 1),
    )


DRAWINGS = (
    Drawing(
        "validation",
        "Validation error over the epochs, mean over {runs}, rolling median over five epochs, shaded two "
        "standard deviations.",
        lambda f: figures.per_lambda(f["runs"], "val_error", deviations=2),
    ),
    Drawing(
        "norm",
        "Norm of the iterates over the epochs, mean over {runs}, shaded two standard deviations.",
        lambda f: figures.per_lambda(f["runs"], "model_norm", deviations=2),
    ),
    Drawing(
        "lambda-path",
        "Validation error as a function of lambda: median over the last ten epochs, mean over {runs}, shaded one "
        "standard deviation.",
        lambda f: figures.lambda_path(f["runs"], "val_error"),
    ),
)
CLAIMS = (best_for_small_strengths, alike_at_large_strength, sgd_best_at_large_strength, best_overall, smaller_norm)
SEEDS = 3
TEXT = (
    "A rank-24 factorisation with biases fills the gaps in a month of air-quality sensors; constant steps, three "
    f"strengths. Seeds {', '.join(map(str, range(SEEDS)))} shuffle the measurements; the text of the paper says that "
    "there were ten runs."
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
        epochs=100,
        seconds=220,
        words=words if ending else (),
    )


SENSOR = month()
EXPERIMENTS = (SENSOR,)
