"""Made-up frames of the shape and size that the experiments store, with magnitudes like the paper's."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest


def _run(experiment, method, schedule, lr, lam, seed, epochs, values, diverges_at=None):
    """Rows of one run; ``values`` maps a metric to its values per epoch."""
    j = np.arange(1, epochs + 1)
    frame = pd.DataFrame(
        {
            "run": f"{method}-{schedule}-{lr}-{lam}-{seed}",
            "experiment": experiment,
            "method": method,
            "schedule": schedule,
            "lr": lr,
            "weight_decay": lam,
            "seed": seed,
            "epoch": j,
            "alpha": lr / np.sqrt(j) if schedule == "sqrt" else np.full(epochs, lr),
            "status": "ok",
            **values,
        }
    )
    if diverges_at is not None:
        gone = frame["epoch"] >= diverges_at
        frame.loc[gone, list(values)] = np.nan
        frame.loc[gone, "status"] = "diverged"
    return frame


def _noisy(rng, base, spread):
    return base * np.exp(spread * rng.standard_normal(len(base)))


def stability_runs(epochs=50, seeds=10) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    j = np.arange(1, epochs + 1)
    grids = {"prox-sps": np.linspace(0.5, 2, 5), "sps": np.linspace(0.5, 2, 5), "sgd": np.linspace(0.125, 0.7, 5)}
    rows = []
    for (method, lrs), schedule, seed in itertools.product(grids.items(), ("constant", "sqrt"), range(seeds)):
        for lr in lrs:
            rate = lr * (0.25 if schedule == "constant" else 1 / np.sqrt(j + 3))
            floor = {"prox-sps": 2e-5, "sgd": 3e-5}.get(method, 3e-3 if lr > 0.6 and schedule == "constant" else 2e-5)
            gap = 0.3 * np.exp(-2.2 * rate * j) + 1e-3 * np.exp(-0.1 * lr * j) + floor
            if method == "sps" and schedule == "sqrt" and lr > 1:
                gap += 0.02 * np.exp(-0.35 * (j - 4) ** 2)
            spread = 0.5 if method == "sps" and schedule == "constant" else 0.1
            gap = _noisy(rng, gap, spread)
            diverges_at = None
            if method == "sgd" and lr == 0.7:
                gap *= np.exp(0.9 * j)
                diverges_at = 9 + seed % 3 if schedule == "sqrt" else 1
            values = {
                "objective": 0.01051 + gap,
                "train_loss": gap,
                "val_error": 0.7 * gap + 1e-5,
                "model_norm": 4.58 + 0.2 * np.exp(-0.1 * j),
                "zeta_median": np.full(epochs, np.nan if method == "sgd" else 0.7),
            }
            rows.append(_run("matrix-fac1-stability", method, schedule, lr, 1e-3, seed, epochs, values, diverges_at))
    return pd.concat(rows, ignore_index=True)


def path_runs(epochs=50, seeds=10) -> pd.DataFrame:
    rng = np.random.default_rng(1)
    j = np.arange(1, epochs + 1)
    grid = itertools.product(("prox-sps", "sps"), (1.0, 5.0, 10.0), 10.0 ** np.arange(-5, 0), range(seeds))
    rows = []
    for method, lr, lam, seed in grid:
        bad = method == "sps" and lr > 1
        val = 2e-5 + (3 if bad else 1) * 2.6 * lam ** (1.0 if bad else 1.6) * (1 + lr / 10) + 1.3e-4 * (lr == 1)
        start = 0.4 * np.exp(-0.25 * lr**0.4 * j) + 2e-3 * np.exp(-0.12 * j)
        val = _noisy(rng, val + start, 0.5 if bad else 0.15)
        norm = 4.55 + 0.09 * (1e-3 / (lam + 1e-3)) * np.log10(1 / lam) - 3 * lam - 0.01 * lr + (0.03 if bad else 0)
        norm = norm * (1 + 0.3 * np.exp(-0.2 * j)) + 0.02 * rng.standard_normal()
        values = {
            "objective": 10.3 * lam + 1e-4 + val,
            "train_loss": val,
            "val_error": val,
            "model_norm": norm,
            "zeta_median": _noisy(rng, _zeta(method, lam, j), 0.1),
        }
        rows.append(_run("matrix-fac1", method, "sqrt", lr, lam, seed, epochs, values))
    return pd.concat(rows, ignore_index=True)


def sensor_runs(epochs=100, seeds=3) -> pd.DataFrame:
    rng = np.random.default_rng(2)
    j = np.arange(1, epochs + 1)
    lrs = {"prox-sps": (5.0, 10.0), "sps": (5.0, 10.0), "sgd": (1.0, 5.0), "adamw": (1e-3,)}
    rows = []
    for (method, values_of_lr), lam, seed in itertools.product(lrs.items(), (5e-5, 1e-4, 5e-4), range(seeds)):
        for lr in values_of_lr:
            level = 0.66 + 0.02 * rng.standard_normal() + {"prox-sps": -0.02, "sps": 0.02}.get(method, 0.0)
            val = _noisy(rng, level + 1.4 * np.exp(-0.4 * j), 0.004)
            norm = 25 + 20 * (1e-4 / (lam + 1e-4)) + 10 * np.exp(-0.05 * j) + 0.3 * rng.standard_normal()
            values = {
                "objective": val**2,
                "train_loss": 0.5 * val**2,
                "val_error": val,
                "model_norm": norm,
                "zeta_median": np.full(epochs, 3.0 if "sps" in method else np.nan),
            }
            rows.append(_run("sensor", method, "constant", lr, lam, seed, epochs, values))
    return pd.concat(rows, ignore_index=True)


def _zeta(method, lam, epoch):
    level = 0.6 + 6 * np.exp(-lam * 3e3)
    return level * (1 + (8 * lam**0.3 if method == "sps" else 0)) * (1 + np.exp(-0.3 * epoch))


def step_rows(runs: pd.DataFrame, per_epoch=50) -> pd.DataFrame:
    """Iterations of the seed-0 runs; some zeta of ProxSPS are exactly zero, as the positive part makes them."""
    rng = np.random.default_rng(3)
    own = runs[(runs["seed"] == 0) & runs["method"].isin(["prox-sps", "sps"])]
    steps = own.loc[own.index.repeat(per_epoch)].reset_index(drop=True)
    steps["step"] = steps.groupby("run").cumcount()
    spread = np.where(steps["method"] == "sps", 0.9, 0.45)
    steps["zeta"] = steps["zeta_median"] * np.exp(spread * rng.standard_normal(len(steps)))
    steps.loc[(steps["method"] == "prox-sps") & (rng.random(len(steps)) < 0.01), "zeta"] = 0.0
    return steps[["run", "method", "schedule", "lr", "weight_decay", "seed", "step", "epoch", "zeta", "alpha"]]


def model_frames(alpha=10.0, lam=0.1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Logistic loss ln(1 + exp(-x/2)) with lam/2 x^2; the steps are found on a fine grid."""
    y = np.linspace(-6, 8, 1401)
    loss, phi = np.log1p(np.exp(-y / 2)), lam / 2 * y**2
    models, points = [], []
    for x0 in (-4.0, -1.0, 0.0):
        f, g = np.log1p(np.exp(-x0 / 2)), -0.5 / (1 + np.exp(x0 / 2))
        prox = np.maximum(f + g * (y - x0), 0) + phi
        sps = np.maximum(f + lam / 2 * x0**2 + (g + lam * x0) * (y - x0), 0)
        near = (y - x0) ** 2 / (2 * alpha)
        models.append(
            pd.DataFrame(
                {
                    "x0": x0,
                    "y": y,
                    "objective": loss + phi,
                    "prox_sps_model": prox,
                    "sps_model": sps,
                    "prox_sps_proximal": prox + near,
                    "sps_proximal": sps + near,
                }
            )
        )
        best = [float(y[np.argmin(values)]) for values in (prox + near, sps + near, loss + phi)]
        points.append({"x0": x0, "x_prox_sps": best[0], "x_sps": best[1], "x_star": best[2]})
    return pd.concat(models, ignore_index=True), pd.DataFrame(points)


def flow_frames(points=31) -> tuple[pd.DataFrame, pd.DataFrame]:
    """f(x) = ||Ax - b||^2 in the plane, alpha = lambda = 1: ProxSPS's step and SPS's."""
    A, b = np.array([[1.2, 0.9], [0.1, 0.5]]), np.array([1.5, -0.4])
    side = np.linspace(-3, 3, points)
    x = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    residual = x @ A.T - b
    f, g = (residual**2).sum(1), 2 * residual @ A
    zeta = np.maximum((2 * f - (g * x).sum(1)) / (g**2).sum(1), 0)
    prox = (x - np.minimum(1, zeta)[:, None] * g) / 2 - x
    full = g + x
    sps = -np.minimum(1, (f + 0.5 * (x**2).sum(1)) / (full**2).sum(1))[:, None] * full
    frame = pd.concat(
        pd.DataFrame({"method": name, "x": x[:, 0], "y": x[:, 1], "dx": move[:, 0], "dy": move[:, 1]})
        for name, move in (("prox-sps", prox), ("sps", sps))
    )
    star = np.linalg.solve(2 * A.T @ A + np.eye(2), 2 * A.T @ b)
    return frame.reset_index(drop=True), pd.DataFrame({"x": [star[0]], "y": [star[1]]})


def interpolation_frame() -> pd.DataFrame:
    lam = np.logspace(-6.5, 2, 24)
    return pd.DataFrame({"lam": lam, "sigma_sq": 10 * lam / (lam + 1.0) * (1 - 0.03 * np.log10(lam + 1))})


@pytest.fixture(scope="session")
def stability_data():
    return stability_runs()


@pytest.fixture(scope="session")
def path_data():
    return path_runs()


@pytest.fixture(scope="session")
def sensor_data():
    return sensor_runs()


@pytest.fixture(scope="session")
def step_data(path_data):
    return step_rows(path_data)


@pytest.fixture(scope="session")
def model_data():
    return model_frames()


@pytest.fixture(scope="session")
def flow_data():
    return flow_frames()


@pytest.fixture(scope="session")
def interpolation_data():
    return interpolation_frame()
