"""Experiments without training: the two models of a loss, the flow of both methods, and the interpolation constant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proxsps import figures, runs
from proxsps.core.models import prox_sps_model, proximal_objective, sps_model
from proxsps.core.rules import sps_max
from proxsps.experiments.base import Drawing, Experiment, Frames
from proxsps.experiments.sentences import states
from proxsps.problems import PlanarSquares, RidgeRegression, ScalarLogistic
from proxsps.problems.losses import Floats
from proxsps.regularizers import L2, Zero

# Figure 1a
ALPHA, LAM, STARTS = 10.0, 0.1, (-4.0, -1.0, 0.0)


def model_tables() -> Frames:
    """Both models of ln(1 + exp(-x/2)) + 0.05 x^2 around three points, and the steps they lead to."""
    problem, phi = ScalarLogistic(dtype="float64"), L2(LAM)
    ys = np.linspace(-6, 6, 241)
    models, points = [], []
    for x0 in STARTS:
        x = np.array([x0])
        value, slope = _scalar_value_and_slope(problem, x0)
        d = np.array([slope])
        (coupled,), (coupled_slope,) = runs.coupled(np.array([value]), d[None], x[None], LAM)
        prox_model = [float(prox_sps_model(value, d, 0.0, x, np.array([y]), phi.value)) for y in ys]
        plain_model = [float(sps_model(coupled, coupled_slope, 0.0, x, np.array([y]))) for y in ys]
        frame = pd.DataFrame({"x0": x0, "y": ys, "prox_sps_model": prox_model, "sps_model": plain_model})
        frame["objective"] = [_scalar_value_and_slope(problem, y)[0] + phi.value(np.array([y])) for y in ys]
        for name in ("prox_sps", "sps"):
            pairs = zip(frame[f"{name}_model"], ys, strict=True)
            frame[f"{name}_proximal"] = [float(proximal_objective(m, x, np.array([y]), ALPHA)) for m, y in pairs]
        models.append(frame)
        prox_step, plain_step = _steps(x[None], np.array([value]), d[None], ALPHA, LAM)
        points.append((x0, prox_step[0, 0], plain_step[0, 0], problem.minimiser(LAM)))
    columns = ["x0", "x_prox_sps", "x_sps", "x_star"]
    return {
        "models": pd.concat(models, ignore_index=True),
        "points": pd.DataFrame(points, columns=columns),
        "cost": cost_table(),
    }


def _scalar_value_and_slope(problem: ScalarLogistic, x: float) -> tuple[float, float]:
    point = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    value = problem.loss({"x": point}, *problem.train_data())
    (slope,) = torch.autograd.grad(value, point)
    return value.item(), slope.item()


def _steps(x: Floats, value: Floats, g: Floats, alpha: float, lam: float) -> tuple[Floats, Floats]:
    """New points of ProxSPS and of SPS for many points at once, shape (points, dimension), with C = 0."""
    caps = np.full(len(x), alpha)
    regularised, d = runs.coupled(value, g, x, lam)
    plain = runs.step(x, regularised, d, caps, Zero(), sps_max)
    return runs.step(x, value, g, caps, L2(lam)).points, plain.points


class _Traffic(TorchDispatchMode):
    """Entries of vectors that operations read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and run it."""
        result = func(*args, **kwargs or {})
        sizes = [item.numel() for item in (*args, result) if isinstance(item, torch.Tensor)]
        self.rows.append((func.overloadpacket.__name__, sum(size for size in sizes if size > 1)))
        return result


def _prox_sps(x: torch.Tensor, g: torch.Tensor, f: float, alpha: float, lam: float) -> torch.Tensor:
    """Algorithm 3 of the paper with C = 0, one operation after the other."""
    if not g.any():
        return x / (1 + alpha * lam)
    zeta = max(0.0, ((1 + alpha * lam) * f - alpha * lam * float(g @ x)) / float(g @ g))
    return (x - min(alpha, zeta) * g) / (1 + alpha * lam)


def _regularized_sps(x: torch.Tensor, g: torch.Tensor, f: float, alpha: float, lam: float) -> torch.Tensor:
    """Algorithm 1 with C = 0, on the loss with lam/2 ||x||^2 added to it."""
    d, value = g + lam * x, f + lam / 2 * float(x @ x)
    return x - min(alpha, value / float(d @ d)) * d if d.any() else x


def cost_table(size: int = 1000) -> pd.DataFrame:
    """Operations on vectors in both updates, by the formulas of the paper, and entries read and written in each."""
    x, g = torch.linspace(-1, 1, size), torch.linspace(1, 2, size)
    updates = {
        "prox-sps": lambda: _prox_sps(x, g, 1.0, 1.0, 0.1),
        "sps": lambda: _regularized_sps(x, g, 1.0, 1.0, 0.1),
    }
    frames = []
    for method, update in updates.items():
        with _Traffic() as traffic:
            update()  # type: ignore[no-untyped-call]
        rows = pd.DataFrame(traffic.rows, columns=["operation", "entries"]).query("entries > 0")
        frames.append(rows.assign(method=method, entries=rows["entries"] / size))
    return pd.concat(frames, ignore_index=True)


@states(
    "entries of vectors that one update reads or writes, for each parameter, by the formulas of the paper",
    "each at most 1.5 times the other",
)
def same_cost(frames: Frames) -> tuple[str, bool]:
    """ProxSPS computes <g, x> where SPS computes ||x||^2; other than that, the costs are roughly identical."""
    cost = frames["cost"].groupby("method")["entries"].agg(["sum", "count"])
    ours, theirs = cost.loc["prox-sps"], cost.loc["sps"]
    return (
        f"ProxSPS {ours['sum']:.0f} in {ours['count']:.0f} operations, SPS {theirs['sum']:.0f} in "
        f"{theirs['count']:.0f}",
        2 / 3 <= ours["sum"] / theirs["sum"] <= 1.5,
    )


@states(
    "mean distance of the model from the objective on [-6, 6], over three starting points",
    "for ProxSPS at most half of that for SPS",
)
def better_model(frames: Frames) -> tuple[str, bool]:
    """The ProxSPS model approximates the objective much better, as it keeps the quadratic regulariser."""
    models = frames["models"]
    miss = {m: (models[f"{m}_model"] - models["objective"]).abs().mean() for m in ("prox_sps", "sps")}
    return f"ProxSPS {miss['prox_sps']:.3g}, SPS {miss['sps']:.3g}", miss["prox_sps"] <= miss["sps"] / 2


MODEL_COMPARE = Experiment(
    "model-compare",
    "Models of the regularised logistic loss",
    "Figure 1a: both models of ln(1 + exp(-x/2)) + 0.05 x^2, the objective of the step (alpha = 10) and its result.",
    (
        Drawing(
            "models",
            "Models of SPS and ProxSPS and the objective of their step, from three starting points.",
            lambda f: figures.model_compare(f["models"], f["points"]),
        ),
    ),
    (better_model, same_cost),
    tables=model_tables,
)


# Figure 1b
ALPHAS = (0.01, 0.1, 1.0, 10.0)  # of steps whose directions are compared


def _displacements(problem: PlanarSquares, x: Floats, alpha: float = 1.0) -> dict[str, Floats]:
    """x^{k+1} - x^k of both methods at many points of the plane, lambda = 1."""
    A, b = (array[0].numpy() for array in problem.train_data())
    residual = x @ A.T - b
    prox_step, plain_step = _steps(x, (residual**2).sum(1), 2 * residual @ A, alpha, 1.0)
    return {"prox-sps": prox_step - x, "sps": plain_step - x}


def flow_tables() -> Frames:
    """The vector fields on a square grid, the minimiser, and the straightness of the paths to it from the border."""
    problem = PlanarSquares(dtype="float64")
    axis = np.linspace(-3, 3, 41)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    fields = [
        pd.DataFrame({"method": method, "x": grid[:, 0], "y": grid[:, 1], "dx": step[:, 0], "dy": step[:, 1]})
        for method, step in _displacements(problem, grid).items()
    ]
    best = problem.minimiser(1.0).numpy()
    border = np.concatenate([grid[np.isclose(np.abs(grid[:, i]), 3)] for i in (0, 1)])
    ways = {method: straightness(problem, method, border, best) for method in ("prox-sps", "sps")}
    return {
        "field": pd.concat(fields, ignore_index=True),
        "minimum": pd.DataFrame([best], columns=["x", "y"]),
        "ways": pd.DataFrame({"method": method, "straightness": values} for method, values in ways.items()).explode(
            "straightness", ignore_index=True
        ),
        "directions": _directions(problem, border),
    }


def _directions(problem: PlanarSquares, x: Floats) -> pd.DataFrame:
    """Angle between the step with alpha and that with the smallest one, in degrees: the largest over some points."""
    rows = []
    for alpha in ALPHAS:
        for method, step in _displacements(problem, x, alpha).items():
            first = _displacements(problem, x, ALPHAS[0])[method]
            cross = step[:, 0] * first[:, 1] - step[:, 1] * first[:, 0]
            angle = np.degrees(np.arctan2(np.abs(cross), (step * first).sum(1)))
            rows.append((method, alpha, angle.max()))
    return pd.DataFrame(rows, columns=["method", "alpha", "angle"])


def straightness(problem: PlanarSquares, method: str, starts: Floats, goal: Floats) -> Floats:
    """Distance from start to end divided by the length of the streamline, 1 if it is straight; one entry per start."""
    x, length = starts.copy(), np.zeros(len(starts))
    for _ in range(4000):  # steps of 1/200 of the way left, at most 0.02: short against the bend of any streamline
        v = _displacements(problem, x)[method]
        norm = np.linalg.norm(v, axis=1)
        left = np.linalg.norm(x - goal, axis=1)
        step = np.where(left > 0.05, np.minimum(0.02, left / 5), 0.0)
        x = x + (step / np.maximum(norm, 1e-300))[:, None] * v
        length += step
        if not step.any():
            break
    found: Floats = np.linalg.norm(x - starts, axis=1) / length
    return found


@states(
    "distance over length of the streamlines from the border to the minimiser, median",
    "larger for ProxSPS than for SPS",
)
def more_direct(frames: Frames) -> tuple[str, bool]:
    """The vector field of ProxSPS takes a more direct route to the minimum."""
    medians = frames["ways"].astype({"straightness": float}).groupby("method")["straightness"].median()
    return f"ProxSPS {medians['prox-sps']:.3f}, SPS {medians['sps']:.3f}", medians["prox-sps"] > medians["sps"]


@states(
    f"largest angle between steps with alpha = {ALPHAS[0]:g} and with others up to {ALPHAS[-1]:g}, from the border",
    "below 1e-6 degrees for SPS, above 1 degree for ProxSPS",
)
def direction_of_sps(frames: Frames) -> tuple[str, bool]:
    """The update direction of ProxSPS depends on alpha_k, that of SPS does not."""
    turn = frames["directions"].groupby("method")["angle"].max()
    return f"ProxSPS {turn['prox-sps']:.3g}, SPS {turn['sps']:.2g} degrees", turn["sps"] < 1e-6 and turn["prox-sps"] > 1


FLOW = Experiment(
    "flow",
    "Flow of the deterministic methods",
    "Figure 1b: streamlines of x^{k+1} - x^k for ||Ax - b||^2 + ||x||^2 / 2 in the plane, alpha = lambda = 1.",
    (
        Drawing(
            "streamlines",
            "Streamlines of ProxSPS and SPS; the circle marks the minimiser.",
            lambda f: figures.flow(f["field"], f["minimum"]),
        ),
    ),
    (more_direct, direction_of_sps),
    tables=flow_tables,
)


# Interpolation constant


def interpolation_tables() -> Frames:
    """sigma^2 of the regularised ridge problem over nine decades of lambda."""
    lam = np.logspace(-7, 2, 46)
    return {"interpolation": pd.DataFrame({"lam": lam, "sigma_sq": RidgeRegression().interpolation_constant(lam)})}


@states(
    "sigma^2 at the largest lambda over that at lambda = 1e-4; its steps up to lambda = 1; and what is left of its "
    "largest value at the end",
    "ratio above 100, every step upwards, at least a half",
)
def sigma_grows(frames: Frames) -> tuple[str, bool]:
    """sigma^2 grows significantly if lambda becomes large, even if the loss can be interpolated."""
    table = frames["interpolation"].set_index("lam")["sigma_sq"]
    first, peak, last = table[table.index >= 0.99e-4].iloc[0], table.max(), table.iloc[-1]
    steps = np.diff(table[table.index <= 1])
    return (
        f"{last / first:.3g}; {int((steps > 0).sum())} of {len(steps)} steps upwards; largest {peak:.3g} at lambda = "
        f"{table.idxmax():.3g}, {last / peak:.0%} of it at {table.index[-1]:g}",
        last > 100 * first and (steps > 0).all() and last >= peak / 2,
    )


INTERPOLATION = Experiment(
    "interpolation",
    "Interpolation constant of ridge regression",
    "sigma^2, which limits what SPS with a lower bound of 0 reaches on the regularised loss, as a function of lambda.",
    (
        Drawing(
            "interpolation",
            "Interpolation constant sigma^2 of a ridge problem that interpolates without regularisation.",
            lambda f: figures.interpolation(f["interpolation"]),
        ),
    ),
    (sigma_grows,),
    tables=interpolation_tables,
)

# The data of matrix factorisation


def condition_tables() -> Frames:
    """Condition numbers of A = D B, for twenty draws of B, with D on a logarithmic and on a linear scale."""
    rows = []
    for draw in range(20):
        B = np.random.default_rng(draw).random((10, 6))
        for upsilon in (1e-5, 1e-10):
            scales = {"logarithmic": np.geomspace(1, upsilon, 10), "linear": np.linspace(1, upsilon, 10)}
            rows += [(draw, scale, upsilon, np.linalg.cond(d[:, None] * B)) for scale, d in scales.items()]
    return {"conditions": pd.DataFrame(rows, columns=["draw", "scale", "upsilon", "condition"])}


@states(
    "condition number of the 10 x 6 matrix D B over twenty draws of B, for upsilon = 1e-5 and 1e-10",
    "linear scale: at most 100 for every draw; logarithmic scale: median above 1000",
)
def linear_scale(frames: Frames) -> tuple[str, bool]:
    """Diagonal entries on a linear scale do not result in large condition numbers even if upsilon is very small."""
    table = frames["conditions"].groupby(["scale", "upsilon"])["condition"].agg(["median", "max"])
    linear, log = table.loc["linear"], table.loc["logarithmic"]
    return (
        f"linear: median {linear['median'].max():.3g}, at most {linear['max'].max():.3g}; logarithmic: median "
        f"{log.loc[1e-5, 'median']:,.0f} for upsilon = 1e-5",
        linear["max"].max() <= 100 and log["median"].min() > 1000,
    )


CONDITIONING = Experiment(
    "conditioning",
    "Condition numbers of matrix factorisation",
    "The matrix A = D B of the appendix, with a diagonal D on a logarithmic scale (the paper) and on a linear one.",
    (),
    (linear_scale,),
    tables=condition_tables,
)

EXPERIMENTS = (CONDITIONING, INTERPOLATION, MODEL_COMPARE, FLOW)
