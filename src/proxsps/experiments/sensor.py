"""Matrix completion on a month of air-quality measurements (appendix of the paper)."""

from __future__ import annotations

from proxsps import figures
from proxsps.experiments.base import Claim, Drawing, Experiment, Frames, over_seeds, setting
from proxsps.sweep.spec import RunSpec, grid

LAMBDAS = (5e-5, 1e-4, 5e-4)
LRS = {"prox-sps": (10.0, 5.0), "sps": (10.0, 5.0), "sgd": (5.0, 1.0), "adamw": (1e-3,)}
NAMES = {"prox-sps": "ProxSPS", "sps": "SPS", "sgd": "SGD", "adamw": "AdamW"}


def specs(seeds: int, epochs: int) -> list[RunSpec]:
    """Four methods with constant steps, three strengths."""
    from proxsps.problems import MatrixCompletion  # loads torch, which figures and claims do without

    return grid(MatrixCompletion(), LRS, LAMBDAS, ["constant"], seeds, epochs)


def _errors(frames: Frames) -> dict[float, dict[tuple[str, float], float]]:
    """Validation error for each strength, by method and alpha_0."""
    means = over_seeds(frames["runs"], "val_error").droplevel("schedule")
    return {lam: means.xs(lam, level="weight_decay").to_dict() for lam in LAMBDAS}


def _name(key: tuple[str, float]) -> str:
    return f"{NAMES[key[0]]} with {setting(key[1])}"


def best_for_small_strengths(frames: Frames) -> Claim:
    """The two smaller strengths."""
    errors = _errors(frames)
    winners = {lam: min(errors[lam], key=errors[lam].__getitem__) for lam in LAMBDAS[:2]}
    measured = "; ".join(f"lambda = {lam:g}: {_name(w)}, {errors[lam][w]:.3f}" for lam, w in winners.items())
    return Claim(
        "best-for-small-lambda",
        "ProxSPS achieves the smallest validation error for the two smaller lambda.",
        "validation error (root mean square), median over the last ten epochs, mean over runs",
        "least for ProxSPS at lambda = 5e-5 and 1e-4",
        measured,
        all(w[0] == "prox-sps" for w in winners.values()),
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
        "at most 3 %",
        f"{spread:.1%} ({', '.join(f'{value:.3f}' for value in values)})",
        spread <= 0.03,
    )


def sgd_best_at_large_strength(frames: Frames) -> Claim:
    """The largest strength, all methods."""
    errors = _errors(frames)[LAMBDAS[-1]]
    winner = min(errors, key=errors.__getitem__)
    return Claim(
        "sgd-best-for-large-lambda",
        "For the largest lambda SGD with alpha_0 = 1 is the best method.",
        "method with the least validation error at lambda = 5e-4",
        "SGD with alpha_0 = 1",
        f"{_name(winner)}, {errors[winner]:.3f}",
        winner == ("sgd", 1.0),
    )


def best_overall(frames: Frames) -> Claim:
    """All strengths together."""
    errors = {(key, lam): value for lam, by_key in _errors(frames).items() for key, value in by_key.items()}
    key, lam = min(errors, key=errors.__getitem__)
    return Claim(
        "best-overall",
        "Over all tested lambda ProxSPS obtains the smallest error.",
        "method with the least validation error over all lambda",
        "ProxSPS",
        f"{_name(key)}, lambda = {lam:g}: {errors[key, lam]:.3f}",
        key[0] == "prox-sps",
    )


def smaller_norm(frames: Frames) -> Claim:
    """Norm of the iterates against SPS."""
    norms = over_seeds(frames["runs"], "model_norm").droplevel("schedule")
    ratio = norms["prox-sps"] / norms["sps"]
    return Claim(
        "smaller-norm",
        "ProxSPS produces iterates with smaller norm.",
        "model norm of ProxSPS over that of SPS, same alpha_0 and lambda",
        "below 1 everywhere",
        f"largest {ratio.max():.3f} at {setting(*ratio.idxmax())}",
        bool(ratio.max() < 1),
    )


SENSOR = Experiment(
    "sensor",
    "Matrix completion of air-quality sensors",
    "A rank-24 factorisation with biases fills the gaps in 720 hours of 130 sensors; constant steps, three strengths.",
    (
        Drawing(
            "validation",
            "Validation error over the epochs, rolling median over five epochs, shaded two standard deviations.",
            lambda f: figures.per_lambda(f["runs"], "val_error", deviations=2),
        ),
        Drawing(
            "norm",
            "Norm of the iterates over the epochs, shaded two standard deviations.",
            lambda f: figures.per_lambda(f["runs"], "model_norm", deviations=2),
        ),
        Drawing(
            "lambda-path",
            "Validation error as a function of lambda: median over the last ten epochs, shaded one standard deviation.",
            lambda f: figures.lambda_path(f["runs"], "val_error"),
        ),
    ),
    (best_for_small_strengths, alike_at_large_strength, sgd_best_at_large_strength, best_overall, smaller_norm),
    specs,
    seeds=3,
    epochs=100,
    seconds=220,
)

EXPERIMENTS = (SENSOR,)
