"""Momentum, Adam's metric, matched and distance caps: steps against the formulas in NumPy, and minimisers of cvxpy.

The reference shares nothing with the package: averages start from zeros and are corrected, heights of the model are
searched by dense sampling and bisection, and the norm of a group in a metric is bisected too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampled import sample
from scipy.optimize import brentq

from proxsps.jax import prox_sps, prox_sps_adam
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso

SCALE, FORGETTING, START = 0.85, 0.99, 1e-2


@dataclass(frozen=True)
class Group:
    """Options of some tensors: the rate is a cap, or a factor on the step."""

    rate: float = 1.0
    decay: float = 0.0  # decoupled
    l1: float = 0.0
    l2: float = 0.0
    lower: float = -np.inf
    upper: float = np.inf
    rows: float = 0.0  # weight of the norm of each row

    def prox(self, z: np.ndarray, tau: float, metric: np.ndarray) -> np.ndarray:
        """argmin phi + sum_i D_i (y_i - z_i)^2 / (2 tau)."""
        sizes = tau / metric
        y = np.sign(z) * np.maximum(np.abs(z) - sizes * self.l1, 0)
        y = np.clip(y / (1 + sizes * self.l2) / (1 + tau * self.decay), self.lower, self.upper)
        return np.stack([shrunk(*row) for row in zip(y, sizes * self.rows, strict=True)]) if self.rows else y


def shrunk(z: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """The prox of the norm, with one threshold for each entry."""
    if tiny := np.linalg.norm(z / thresholds) <= 1:
        return 0 * z
    r = brentq(lambda r: np.linalg.norm(z / (r + thresholds)) - 1, 1e-300 * tiny, 2 * np.linalg.norm(z), xtol=1e-16)
    return z * r / (r + thresholds)


@dataclass
class Reference:
    """A run in double precision."""

    groups: list[Group]
    beta: float = 0.0
    adam: tuple[float, float] | None = None  # b2 and eps
    matched: bool = False
    distance: bool = False
    rateless: bool = False
    bound: float | None = 0.0
    k: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    branch: str = ""

    def step(self, xs: list[np.ndarray], gs: list[np.ndarray], f: float) -> list[np.ndarray]:
        """One step from x; each group has one tensor."""
        ds, metrics, m = self.model(xs, gs, f)
        rates = np.array([group.rate for group in self.groups])
        shares = rates / rates.max()
        longest, factor = rates.max(), 1.0
        if self.distance:
            farthest = self.farthest(xs, gs, metrics)
            longest, factor = (farthest, rates.max()) if self.rateless else (min(longest, farthest), 1.0)
        self.k += 1
        if self.bound is None:
            self.branch = "capped"
            return self.point(xs, ds, metrics, shares * longest * factor, 1.0)
        if self.matched:
            s = self.first_zero(lambda s: self.height(xs, ds, metrics, m, shares * s, 1.0), longest, m)
            return self.point(xs, ds, metrics, factor * shares * s, 1.0)
        u = self.first_zero(lambda u: self.height(xs, ds, metrics, m, shares * longest, u), 1.0, 1.0)
        return self.point(xs, ds, metrics, factor * shares * longest, u)

    def model(self, xs, gs, f):
        """Slopes, metrics and the value of the model."""
        k, beta, state = self.k, self.beta, self.state
        metrics = [np.ones_like(x) for x in xs]
        if self.adam:
            b2, eps = self.adam
            state["v"] = [b2 * v + (1 - b2) * g**2 for v, g in zip(state.get("v", [0.0] * len(gs)), gs, strict=True)]
            metrics = [np.sqrt(v / (1 - b2 ** (k + 1))) + eps for v in state["v"]]
        new = [f, inner(gs, xs), *gs]
        if self.adam:
            before = state.get("averages", [0.0] * len(new))
            state["averages"] = [beta * old + (1 - beta) * now for old, now in zip(before, new, strict=True)]
            fbar, gamma, *ds = (average / (1 - beta ** (k + 1)) for average in state["averages"])
        else:
            before = state.get("averages", new)
            state["averages"] = [beta * old + (1 - beta) * now for old, now in zip(before, new, strict=True)]
            fbar, gamma, *ds = state["averages"]
        return ds, metrics, fbar - gamma + inner(ds, xs)

    def farthest(self, xs, gs, metrics):
        """The distance cap."""
        samples, state = [sample(x.reshape(-1)) for x in xs], self.state
        if not self.k:
            state["start"] = samples
            state["first"] = START * (1 + self.norm(xs, samples))
            state["g_sq"] = state["reach"] = state["squares"] = 0.0
        moved = self.norm(xs, [a - b for a, b in zip(samples, state["start"], strict=True)])
        rates = np.array([group.rate for group in self.groups])
        factor = rates.max() if self.rateless else 1.0
        state["reach"] = max(state["reach"], factor * state["first"], moved)
        state["squares"] += factor**2
        g_sq = sum(np.sum((w * g / D) ** 2) for w, g, D in zip(rates / rates.max(), gs, metrics, strict=True))
        state["g_sq"] = FORGETTING * state["g_sq"] + (1 - FORGETTING) * g_sq
        total = state["squares"] * state["g_sq"] / (1 - FORGETTING ** (self.k + 1))
        return SCALE * state["reach"] / np.sqrt(total)

    @staticmethod
    def norm(xs, samples):
        """The norm over all entries, estimated from the samples of each tensor."""
        return np.sqrt(sum(x.size / s.size * np.sum(s**2) for x, s in zip(xs, samples, strict=True)))

    def point(self, xs, ds, metrics, taus, u):
        """prox_tau(x - u tau D^-1 d)."""
        parts = zip(self.groups, xs, ds, metrics, taus, strict=True)
        return [group.prox(x - u * tau * d / D, tau, D) if tau else x for group, x, d, D, tau in parts]

    def height(self, xs, ds, metrics, m, taus, u):
        """How high the linear model is above its bound at that point."""
        ys = self.point(xs, ds, metrics, taus, u)
        return m - self.bound + inner(ds, [y - x for x, y in zip(xs, ys, strict=True)])

    def first_zero(self, height, end, gap):
        """The first zero on (0, end], or an end."""
        points = np.unique([*np.linspace(0, end, 80)[1:], *np.geomspace(end * 1e-6, end, 80)])
        heights = [height(point) for point in points]
        start = height(1e-12 * end)
        below = [i for i, h in enumerate(heights) if h < 0]
        if gap <= 0 or start <= 0 or not below:
            self.branch = "truncated" if gap <= 0 or start <= 0 else "capped"
            return 0.0 if gap <= 0 or start <= 0 else end
        self.branch = "inside"
        low = points[below[0] - 1] if below[0] else 1e-12 * end
        return brentq(height, low, points[below[0]], xtol=1e-16 * end, rtol=1e-15)


def inner(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Inner product of two lists."""
    return float(sum(np.sum(x * y) for x, y in zip(a, b, strict=True)))


SHAPES = [(5, 13)] * 4
# Regularisers of JAX and of the reference.
KINDS: dict[str, tuple[dict[str, Any], Group]] = {
    "none": ({}, Group()),
    "weight_decay": ({"weight_decay": 0.7}, Group(decay=0.7)),
    "L1": ({"regularizer": L1(0.3)}, Group(l1=0.3)),
    "ElasticNet": ({"regularizer": ElasticNet(0.2, 0.4)}, Group(l1=0.2, l2=0.4)),
    "Box": ({"regularizer": Box(-0.8, 1.1)}, Group(lower=-0.8, upper=1.1)),
    "GroupLasso": ({"regularizer": GroupLasso.rows(0.4)}, Group(rows=0.4)),
    "L2": ({"regularizer": L2(0.7)}, Group(l2=0.7)),
}
MIXED = ["GroupLasso", "weight_decay", "L1", "Box"]
RATES = [0.5, 1.0, 0.3, 0.8]
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (partial(prox_sps, 1.0, momentum=0.9), {"beta": 0.9}),
    "matched": (partial(prox_sps, 1.0, cap="matched"), {"matched": True}),
    "matched momentum": (partial(prox_sps, 1.0, cap="matched", momentum=0.9), {"beta": 0.9, "matched": True}),
    "distance": (partial(prox_sps, 1.0, distance_cap=True), {"distance": True}),
    "no rate": (
        partial(prox_sps, None, momentum=0.9),
        {"beta": 0.9, "matched": True, "distance": True, "rateless": True},
    ),
    "no rate, proximal": (
        partial(prox_sps, None, cap="proximal"),
        {"distance": True, "rateless": True},
    ),
    "no rate, no bound": (
        partial(prox_sps, None, lower_bound=None, momentum=0.5),
        {"beta": 0.5, "distance": True, "rateless": True, "bound": None},
    ),
    "adam": (
        prox_sps_adam,
        {"beta": 0.9, "adam": (0.999, 1e-8), "matched": True, "distance": True, "rateless": True},
    ),
    "adam, rate": (
        partial(prox_sps_adam, 0.5, b1=0.8, b2=0.9, eps=1e-3),
        {"beta": 0.8, "adam": (0.9, 1e-3), "matched": True},
    ),
    "adam, proximal": (partial(prox_sps_adam, 0.5, cap="proximal"), {"beta": 0.9, "adam": (0.999, 1e-8)}),
}
HEIGHTS = (0.02, 20.0, 0.3)  # of the loss, over ||g||: the first step reaches its bound, the second does not


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def drawn(seed: int, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def compare(opt: Any, other: Reference) -> set[str]:
    """Several steps side by side, each from the point of the reference; the branches they took."""
    shapes = SHAPES[: len(other.groups)]
    xs = [np.clip(x, -0.8, 1.1) for x in drawn(0, shapes)]
    state, branches = opt.init([jnp.asarray(x) for x in xs]), set()
    for k, height in enumerate(HEIGHTS):
        gs = drawn(k + 1, shapes)
        value = height * inner(gs, gs) ** 0.5
        updates, state = opt.update([jnp.asarray(g) for g in gs], state, [jnp.asarray(x) for x in xs], value=value)
        expected = other.step(xs, gs, value)
        for x, update, after in zip(xs, updates, expected, strict=True):
            np.testing.assert_allclose(x + np.asarray(update), after, rtol=1e-10, atol=1e-10)
        assert state.last_step.branch_name == other.branch, k
        branches.add(other.branch)
        xs = expected
    return branches


@pytest.mark.parametrize("name", VARIANTS)
def test_groups_with_several_regularizers_and_rates(name):
    make, settings = VARIANTS[name]
    rate = "scale" if settings.get("rateless") else "learning_rate"
    own = {i: {**KINDS[kind][0], rate: RATES[i]} for i, kind in enumerate(MIXED)}
    groups = [replace(KINDS[kind][1], rate=RATES[i]) for i, kind in enumerate(MIXED)]
    compare(make(labels=list(own), groups=own), Reference(groups, **settings))


SINGLE = [("no rate", kind) for kind in KINDS if kind != "L2"] + [("adam", kind) for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), SINGLE)
def test_without_a_rate_and_with_every_kind_of_regularizer(name, kind):
    (make, settings), (options, group) = VARIANTS[name], KINDS[kind]
    assert compare(make(**options), Reference([group], **settings)) >= {"inside", "capped"}


# Minimisers of a conic solver


@pytest.mark.parametrize("kind", ["weight_decay", "L1", "ElasticNet", "Box", "GroupLasso"])
@pytest.mark.parametrize("name", ["momentum", "matched momentum", "adam", "adam, proximal"])
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # which is looked at below
def test_the_step_minimises_its_model(name, kind):
    """The second step, of a model whose averages have two terms."""
    (make, settings), (options, group) = VARIANTS[name], KINDS[kind]
    reference, opt, (x,) = Reference([group], **settings), make(**options), drawn(0, SHAPES[:1])
    x = np.clip(x, -0.8, 1.1)
    state = opt.init(jnp.asarray(x))
    for k, value in enumerate((0.4, 0.6)):
        (g,) = drawn(k + 1, SHAPES[:1])
        (d,), (metric,), m = reference.model([x], [g], value)
        reference.k += 1
        updates, state = opt.update(jnp.asarray(g), state, jnp.asarray(x), value=value)
        before, x = x, x + np.asarray(updates)
    last = state.last_step
    alpha = float(last.tau[0]) if settings.get("matched") else 0.5 if "adam" in settings else 1.0
    y = cp.Variable(x.shape)

    def objective(y):
        linear = m + cp.sum(cp.multiply(d, y - before))
        near = cp.sum(cp.multiply(metric, cp.square(y - before))) / (2 * alpha)
        return cp.maximum(linear, 0.0) + penalty(group, y, metric) + near

    inside = [] if np.isinf(group.lower) else [y >= group.lower, y <= group.upper]
    cp.Problem(cp.Minimize(objective(y)), inside).solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10)
    best, ours = float(objective(y.value).value), float(objective(x).value)
    assert best - 1e-6 < ours < best + 1e-8
    assert last.branch_name != "skipped"
    if not np.isinf(group.lower):
        assert group.lower <= x.min() <= x.max() <= group.upper


def penalty(group: Group, y: Any, metric: np.ndarray) -> Any:
    decay = group.decay * cp.sum(cp.multiply(metric, cp.square(y))) / 2  # decoupled: in the metric
    own = group.l1 * cp.norm1(cp.vec(y, order="F")) + group.l2 * cp.sum_squares(y) / 2
    return decay + own + group.rows * cp.sum(cp.norm(y, axis=1))
