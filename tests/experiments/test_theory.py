"""The paper's bounds hold on runs, and a wrong constant is seen where a bound is tight enough."""

import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq, minimize

from proxsps import theory
from proxsps.core import schedules
from proxsps.core.models import truncated_model
from proxsps.core.schedule_free import Averaging, next_share, noise_growth
from proxsps.experiments.theory import (
    BOUNDS,
    CHECKS,
    caps,
    claim,
    evaluate,
    find_check,
    floor,
    rates,
    robustness,
    runs,
    schedule_free,
    steps,
    summary,
)
from proxsps.problems import losses
from proxsps.problems.composite import PROBLEMS, Composite, ridge, robust_regression
from proxsps.theory import moreau

SEEDS = 60
CONSTANT = partial(schedules.constant, alpha=0.7)


@pytest.fixture(scope="module", autouse=True)
def runs_made_once() -> Iterator[None]:
    """Checks spend most of their time on runs, which several of them share, whatever the constants of a bound are."""
    made: dict[bytes, runs.Path] = {}

    def run(problem: Composite, step: Any, schedule: Any, steps: int, seeds: int) -> runs.Path:
        data = problem.A, problem.b, problem.start, problem.lower_bound, problem.loss, problem.phi
        method = step.args[1] if isinstance(step, partial) else getattr(step, "__qualname__", type(step))
        key = pickle.dumps((data, method, [schedule(k) for k in range(steps)], seeds))
        if key not in made:
            made[key] = runs.run(problem, step, schedule, steps, seeds)
        return made[key]

    free_run, free = schedule_free.free_run, {}

    def run_freely(problem: Composite, *args: Any, **options: Any) -> schedule_free.FreePath:
        parts = schedule_free.matched_step, schedule_free.next_share, schedule_free.gradient_point  # tests replace them
        data = problem.A, problem.b, problem.start, problem.lower_bound, problem.loss, problem.phi
        key = parts, pickle.dumps((data, args, options))
        if key not in free:
            free[key] = free_run(problem, *args, **options)
        return free[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (caps, rates, steps):
            patch.setattr(module, "run", run)
        patch.setattr(schedule_free, "free_run", run_freely)
        yield


# The batched runs


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_step_minimises_its_model(name):
    """All branches: steps so short that u = 1, and so long that the model is truncated."""
    problem = PROBLEMS[name]()
    step, x = runs.prox_sps(problem), steps.visited(problem, 0.5)[1:8:3]
    i = np.arange(len(x)) % problem.size
    shares = []
    for alpha in (0.01, 1.0, 30.0):
        new, u = step(x, i, np.full(len(x), alpha))
        shares.append(u)
        values, gradients = problem.sample(x, i)
        for j, point in enumerate(x):

            def objective(y, j=j, point=point, alpha=alpha, values=values, gradients=gradients):
                y = problem.phi.prox(y, 1e-300) if name in ("box-least-squares", "phase-retrieval") else y
                model = truncated_model(values[j], gradients[j], problem.lower_bound, point, y)
                return float(model) + float(problem.penalty(y)) + (y - point) @ (y - point) / (2 * alpha)

            assert objective(new[j]) <= minimize(objective, point, method="Nelder-Mead").fun + 1e-9
    assert (shares[0] == 1).any()
    assert (shares[2] < 1).any()


def test_runs_do_not_depend_on_their_company():
    problem = ridge()
    many = runs.run(problem, runs.prox_sps(problem), CONSTANT, 30, seeds=5)
    few = runs.run(problem, runs.prox_sps(problem), CONSTANT, 30, seeds=2)
    np.testing.assert_array_equal(many.points[:, :2], few.points)
    assert many.points.shape == (31, 5, 4)
    assert not np.allclose(many.points[-1, 0], many.points[-1, 1])
    scaled = runs.run(problem, runs.prox_sps(problem), CONSTANT, 30, seeds=2, scales=np.array([1.0, 0.1]))
    np.testing.assert_array_equal(scaled.points[:, :2], few.points)
    shorter = runs.run(problem, runs.prox_sps(problem), partial(schedules.constant, alpha=0.07), 30, seeds=2)
    np.testing.assert_allclose(scaled.points[:, 2:], shorter.points, rtol=1e-12)


def test_methods_by_hand():
    """One step of each other method, written out."""
    problem, alpha = ridge(), 0.7
    x, i = np.random.default_rng(0).normal(size=(3, 4)), np.array([4, 0, 7])
    a, b, lam = problem.A[i], problem.b[i], 0.2
    residual = (a * x).sum(1) - b
    g = residual[:, None] * a
    np.testing.assert_allclose(runs.prox_sgd(problem)(x, i, np.full(3, alpha))[0], (x - alpha * g) / (1 + alpha * lam))
    d, value = g + lam * x, residual**2 / 2 + lam / 2 * (x**2).sum(1)
    polyak = value / (d**2).sum(1)
    gamma = np.minimum(alpha, polyak)
    np.testing.assert_allclose(runs.sps_max(problem)(x, i, np.full(3, alpha))[0], x - gamma[:, None] * d)
    dec = runs.DecSPS(problem)
    first, _ = dec(x, i, np.full(3, alpha))
    np.testing.assert_allclose(first, x - gamma[:, None] * d)
    residual = (a * first).sum(1) - b
    d = residual[:, None] * a + lam * first
    polyak = (residual**2 / 2 + lam / 2 * (first**2).sum(1)) / (d**2).sum(1)
    second = first - (np.minimum(polyak, gamma) / np.sqrt(2))[:, None] * d
    np.testing.assert_allclose(dec(first, i, np.full(3, alpha))[0], second)


@pytest.mark.parametrize("name", PROBLEMS)
def test_matched_steps_end_at_their_cap_or_where_the_model_meets_its_bound(name):
    problem = PROBLEMS[name]()
    x = steps.visited(problem, 0.5)[1:20]
    values, gradients = problem.losses(x), problem.gradients(x)
    seen = set()
    for cap in (0.01, 1e3):
        y, tau = caps.all_matched_steps(problem, x, x, cap)
        linear = values + np.einsum("kin,kin->ki", gradients, y - x[:, None]) - problem.lower_bound
        assert (linear >= -1e-13).all()  # sums of numbers up to about 10 are rounded
        inside = (tau < cap) & (values > problem.lower_bound)
        np.testing.assert_allclose(linear[inside], 0, atol=1e-9)
        for k, i in np.ndindex(tau.shape):
            expected = problem.phi.prox(x[k] - tau[k, i] * gradients[k, i], max(tau[k, i], 1e-300))
            np.testing.assert_allclose(y[k, i], expected, atol=1e-14)
        seen |= set(inside.ravel().tolist())
    assert seen == {True, False}


@pytest.mark.parametrize("method", [runs.prox_sps, caps.matched])
@pytest.mark.parametrize("make", [ridge, robust_regression])
def test_iterates_do_not_leave_their_ball(make, method):
    """Whatever the steps are: the region on which the constants are computed."""
    problem = make()
    rng = np.random.default_rng(0)
    path = runs.run(problem, method(problem), lambda k: 10 ** rng.uniform(-3, 3), 500, seeds=20)
    largest = np.linalg.norm(path.points, axis=-1).max()
    assert problem.constants.radius / 5 < largest <= problem.constants.radius


def test_averages_at_checkpoints():
    points = np.random.default_rng(0).normal(size=(20, 3, 2))
    weights, at = np.arange(1.0, 21), np.array([1, 7, 20])
    for k, mean in zip(at, runs.averages(points, weights, at), strict=True):
        np.testing.assert_allclose(mean, np.average(points[:k], axis=0, weights=weights[:k]))
    assert runs.checkpoints(1000)[[0, -1]].tolist() == [1, 1000]


def test_drawn_points_are_uniform():
    path = runs.Path(np.tile(np.arange(6.0)[:, None, None], (1, 6000, 1)), np.ones(5), 0.0)
    counts = np.bincount(rates.drawn(path)[:, 0].astype(int), minlength=6)
    assert counts[5] == 0  # x^K is not among x^0 ... x^{K-1}
    assert np.abs(counts[:5] - 1200).max() < 5 * np.sqrt(1200)


# Every bound holds


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return BOUNDS.tables(SEEDS)["checks"]


@pytest.mark.parametrize("name", CHECKS)
def test_bound_holds(rows, name):
    own = rows[rows["check"] == name]
    assert own["holds"].all()
    assert np.isfinite(own[["measured", "bound", "ratio"]]).all(axis=None)
    verdict = claim(CHECKS[name], rows)
    assert verdict.holds
    assert f"{own['ratio'].max():.3g}" in verdict.measured


def test_the_experiment_has_all_of_these_claims(rows):
    claims = BOUNDS.judge({"checks": rows})
    assert len(claims) == len(CHECKS)
    assert all(claim.holds for claim in claims)


def test_summary_takes_the_closest_row_and_every_verdict(rows):
    table = summary(rows)
    assert len(table) == len(rows.groupby(["check", "problem"]))
    broken = rows.assign(holds=rows["holds"] & (rows.index != 0))
    assert not summary(broken)["holds"].iloc[0]
    assert not claim(CHECKS[rows["check"].iloc[0]], broken).holds
    for row in table.itertuples():
        own = rows[(rows["check"] == row.check) & (rows["problem"] == row.problem)]
        assert row.ratio == own["ratio"].max()


def test_rates_go_down_with_more_steps(rows):
    """Not only below their bounds: the measured quantities converge."""
    for name in ("smooth-a", "smooth-b", "bounded-strongly-convex", "bounded-weakly-convex", "dec-sps"):
        for _, own in rows[rows["check"] == name].groupby("problem"):
            assert own["measured"].iloc[-1] < own["measured"].iloc[0]


# A wrong constant is seen


ROOT = 0.5**0.5  # G enters squared
# check, function whose constants are changed, factors, whether it is seen
MUTATIONS = [
    ("smooth-a", "smooth_strongly_convex", {"beta": 0.5}, True),
    ("smooth-a", "smooth_strongly_convex", {"D_sq": 0.5}, True),
    ("smooth-b", "smooth_convex", {"beta": 0.5}, True),
    ("smooth-b", "smooth_convex", {"D_sq": 0.5}, True),
    ("smooth-c", "smooth_constant_step", {"beta": 0.5}, True),
    ("smooth-c", "smooth_constant_step", {"D_sq": 0.5}, True),
    ("smooth-c", "smooth_constant_step", {"lam": 2.0}, True),
    ("smooth-c", "smooth_constant_step", {"mu": 2.0}, False),
    ("envelope-sum", "envelope_sum", {"Delta": 0.5}, True),
    ("envelope-sum", "envelope_sum", {"beta": 0.5}, False),
    ("envelope-sqrt", "envelope_sqrt", {"Delta": 0.5, "beta": 0.5}, False),
    ("envelope-horizon", "envelope_horizon", {"Delta": 0.5}, True),
    ("envelope-horizon", "envelope_horizon", {"beta": 0.5}, False),
    ("bounded-strongly-convex", "bounded_strongly_convex", {"G": ROOT, "D_sq": 0.5}, False),
    ("bounded-weakly-convex", "bounded_weakly_convex", {"G": ROOT, "Delta": 0.5}, False),
    ("sps-max", "sps_max_neighbourhood", {"sigma_sq": 0.5, "D_sq": 0.5}, False),
    ("dec-sps", "dec_sps_rate", {"sigma_sq": 0.5, "radius_sq": 0.5}, False),
    ("convex-recursion", "convex_recursion", {"beta": 0.5}, True),
    ("convex-recursion", "convex_recursion", {"lam": 2.0}, True),
    ("bounded-recursion", "bounded_recursion", {"G": ROOT}, True),
    ("bounded-recursion", "bounded_recursion", {"lam": 2.0}, True),
    ("bounded-envelope-recursion", "bounded_envelope_recursion", {"G": ROOT, "rho": 0.5}, False),
    ("envelope-recursion", "envelope_recursion", {"beta": 0.5}, True),
    ("envelope-recursion", "envelope_recursion", {"rho": 0.5}, False),
    ("envelope-recursion", "envelope_recursion", {"lam": 2.0}, True),
    ("matched-inequality", "matched_inequality", {"lam": 2.0}, True),
    ("matched-inequality", "matched_inequality", {"tau": 0.5}, True),
    ("matched-recursion", "matched_recursion", {"L": 0.5}, True),
    ("matched-recursion", "matched_recursion", {"lam": 2.0}, True),
    ("matched-recursion", "matched_recursion", {"target_gap": 0.5}, True),
    ("matched-recursion", "matched_recursion", {"penalty": 0.5}, True),
    ("matched-neighbourhood", "matched_neighbourhood", {"sigma_sq": 0.5}, False),
    ("matched-neighbourhood", "matched_neighbourhood", {"sigma_sq": 0.5, "D_sq": 0.5, "penalty": 0.5}, True),
    ("free-inequality", "matched_inequality", {"lam": 2.0}, True),
    ("free-inequality", "matched_inequality", {"tau": 0.5}, True),
    ("free-average", "average_inequality", {"weight": 2.0}, True),
    ("free-average", "average_inequality", {"total": 2.0}, True),
    ("free-neighbourhood", "schedule_free_neighbourhood", {"G": 0.5}, False),
    ("distance-bound", "raised_bound", {"radius": 0.5}, True),
    ("distance-bound", "raised_bound", {"radius": 2.0}, True),
]


def mutate(monkeypatch, function: str, factors: dict[str, float]) -> None:
    original = getattr(theory, function)

    def mutant(*args, **constants):
        return original(*args, **constants | {name: factor * constants[name] for name, factor in factors.items()})

    monkeypatch.setattr(theory, function, mutant)


@pytest.mark.parametrize(("name", "function", "factors", "seen"), MUTATIONS, ids=lambda value: str(value))
def test_a_constant_wrong_by_two_is_seen_where_the_bound_is_tight_enough(monkeypatch, name, function, factors, seen):
    mutate(monkeypatch, function, factors)
    found = evaluate(CHECKS[name], 400 if name in ("smooth-a", "envelope-horizon") else 150)
    assert found["holds"].all() != seen


def test_a_wrong_strong_convexity_breaks_the_basic_inequality(monkeypatch):
    monkeypatch.setattr(steps, "PROBLEMS", {"ridge": ridge})
    assert evaluate(CHECKS["basic-inequality"])["holds"].all()
    mutate(monkeypatch, "basic_inequality", {"lam": 2.0})
    assert not evaluate(CHECKS["basic-inequality"])["holds"].all()


@pytest.mark.parametrize("loss", [losses.Cauchy, losses.Phase])
def test_half_the_weak_convexity_breaks_the_model_inequality(monkeypatch, loss):
    problems = {name: make for name, make in PROBLEMS.items() if isinstance(make().loss, loss)}
    monkeypatch.setattr(steps, "PROBLEMS", problems)
    monkeypatch.setattr(loss, "weak", loss.weak / 2)
    assert not evaluate(CHECKS["model"])["holds"].all()


def test_half_the_slopes_break_their_inequality(monkeypatch):
    slopes = Composite.slopes.fget
    monkeypatch.setattr(Composite, "slopes", property(lambda problem: slopes(problem) / 2))
    assert not evaluate(CHECKS["model-slope"])["holds"].all()


def test_half_the_upper_constant_of_the_gradient_mapping_is_seen_and_twice_the_lower_is_not(monkeypatch):
    monkeypatch.setattr(moreau, "MAPPING_UPPER", moreau.MAPPING_UPPER / 2)
    monkeypatch.setattr(moreau, "MAPPING_LOWER", moreau.MAPPING_LOWER * 2)
    assert not evaluate(CHECKS["mapping-upper"])["holds"].all()
    assert evaluate(CHECKS["mapping-lower"])["holds"].all()


def test_broken_schedule_free_steps_are_seen(monkeypatch):
    """A model at y instead of z, an average with other weights, a y beyond x, and a wrong V."""
    monkeypatch.setattr(schedule_free, "CONVEX", (ridge,))
    assert evaluate(CHECKS["free-average"])["holds"].all()
    with monkeypatch.context() as patch:
        patch.setattr(schedule_free, "gradient_point", lambda x, z, b: z + (x - z) * (1 + b))
        assert not evaluate(CHECKS["free-average"])["holds"].all()
    with monkeypatch.context() as patch:
        patch.setattr(schedule_free, "next_share", lambda *args: (0.9 * next_share(*args)[0], next_share(*args)[1]))
        assert not evaluate(CHECKS["free-average"])["holds"].all()
        assert not evaluate(CHECKS["free-noise"])["holds"].any()
    with monkeypatch.context() as patch:
        patch.setattr(schedule_free, "PROBLEMS", {"ridge": ridge})
        assert evaluate(CHECKS["free-inequality"])["holds"].all()
        step = caps.matched_step

        def too_long(z, gap, *others):
            return step(z, 1.5 * np.abs(gap), *others)

        patch.setattr(caps, "matched_step", too_long)
        assert not evaluate(CHECKS["free-inequality"])["holds"].all()
    monkeypatch.setattr(schedule_free, "noise_growth", lambda r: noise_growth(r + 0.1))
    assert not evaluate(CHECKS["free-noise"])["holds"].any()


def test_noise_grows_like_a_random_walk_at_the_edge_and_faster_beyond_it():
    """Steps c rbar / sqrt(k + 1) in new directions: the squared distance grows like K^e with e = c^2 V_e."""

    def exponent(c: float, power: float, length: int = 3000) -> float:
        one = np.ones(1)
        z, x, numbers, reach, seen = np.zeros(length), np.zeros(length), Averaging(0 * one, 0 * one), 1.0, []
        for k in range(length):
            z[k] = c * reach / np.sqrt(k + 1)
            share, numbers = next_share(numbers, k * one, one, power)
            x += share * (z - x)
            reach = max(reach, np.sqrt(x @ x))
            seen.append(reach**2)
        return float(np.log(seen[-1] / seen[length // 10]) / np.log(10))

    def off(e: float, c: float, r: float) -> float:
        return e - c**2 * (1 - 2 * e / (e + r + 1) + e / (e + 2 * r + 2))

    for power in (0.0, 1.0, 4.0):
        for part in (0.8, 1.0, 1.3):
            c = part * noise_growth(power) ** -0.5
            expected = brentq(off, 0.1, 9, args=(c, power))
            assert (expected > 1.01) == (part > 1)
            assert exponent(c, power) == pytest.approx(expected, abs=0.02)


def test_bounds_refuse_problems_without_their_assumptions():
    c = robust_regression().constants
    with pytest.raises(theory.AssumptionError, match="Smoothness of f"):
        theory.smooth_convex(10, alpha=0.1, L=c.L, beta=c.beta, D_sq=1.0)


# The floor and the robustness


def test_floor(monkeypatch):
    monkeypatch.setattr(floor, "STEPS", 2000)
    monkeypatch.setattr(floor, "LAMBDAS", np.array([0.01, 0.3]))
    frames = floor.floor_tables(seeds=4)
    assert floor.through_the_floor(frames).holds
    assert floor.floor_grows_with_sigma(frames).holds
    curves = frames["curves"]
    assert set(zip(curves["method"], curves["steps"], strict=True)) == {
        ("sps", "constant"),
        ("prox-sps", "constant"),
        ("dec-sps", "decreasing"),
        ("prox-sps", "decreasing"),
    }
    stuck = curves.assign(gap=curves["gap"].where(curves["method"] != "prox-sps", 1.0))
    assert not floor.through_the_floor({"curves": stuck}).holds
    high = frames["floors"].assign(gap=99.0)
    assert not floor.floor_grows_with_sigma({"floors": high}).holds


def test_robustness():
    frames = robustness.robustness_tables(seeds=3)
    assert robustness.bounded_models_are_robust(frames).holds
    table = frames["robustness"]
    assert np.isinf(table[(table["loss"] == "squared loss") & (table["method"] == "prox-sgd")]["gap"]).any()
    assert np.isfinite(table[table["method"] != "prox-sgd"]["high"]).all()
    assert table["alpha"].max() / table["alpha"].min() == pytest.approx(1e6)
    worse = table.assign(gap=table["gap"].where(table["method"] != "prox-point", 20.0))
    assert not robustness.bounded_models_are_robust({"robustness": worse}).holds


def test_unknown_checks_get_a_hint():
    assert find_check("smooth-a") is CHECKS["smooth-a"]
    with pytest.raises(ValueError, match="Did you mean 'smooth-b'"):
        find_check("smoth-b")
    with pytest.raises(ValueError, match="Did you mean 'floor'"):
        find_check("flor", ["floor"])
    with pytest.raises(ValueError, match="Known names: model"):
        find_check("zzz")


def test_experiment_judges_every_check(rows):
    assert [found.name for found in BOUNDS.judge({"checks": rows})] == list(CHECKS)
