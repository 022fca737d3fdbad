"""The batched engine and the optimizers take the same steps: from shared states, over short runs, in distribution."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from proxsps.methods import METHODS as TABLE
from proxsps.optim import ScheduleFreeSPS
from proxsps.problems import from_module, matrix_fac1
from proxsps.sweep.batched import run_batched
from proxsps.sweep.loop import run_single
from proxsps.sweep.spec import METHODS, METRICS, SCHEDULES, RunResult, RunSpec, alpha_of_epoch, batches

ADAPTIVE = ("prox-sps", "sps", "dec-sps")  # methods with a zeta
F64 = 1e-12  # nine steps multiply rounding errors of 1e-16 by a few hundred at most
FREE = [m for m in METHODS if TABLE[m].rateless]  # which are not batched
BATCHED = [m for m in METHODS if m not in FREE]
PAIRS = [(m, s) for m in BATCHED for s in SCHEDULES if s != "adaptive" or TABLE[m].followed]
FOLLOWS = 1e-5  # the adaptive schedule reads zetas in float32, and nine steps amplify what that costs
F32 = 2.5e-7  # zetas are kept in float32: two units in the last place


def agree(one: RunResult, other: RunResult, rtol: float = F64) -> None:
    assert one.spec == other.spec
    np.testing.assert_allclose(one.metrics, other.metrics, rtol=rtol, atol=0)
    np.testing.assert_allclose(one.zetas, other.zetas, rtol=max(rtol, F32), atol=0)


# Whole runs in float64


@pytest.mark.parametrize(("method", "schedule"), PAIRS)
def test_runs_are_equal_to_rounding(kit: Any, method: str, schedule: str) -> None:
    specs = [
        kit.spec(method=method, schedule=schedule, weight_decay=lam, seed=seed, epochs=3)
        for lam, seed in itertools.product((0.0, 1e-2), (0, 1))
    ]
    for spec, result in zip(specs, run_batched(specs), strict=True):
        assert np.isfinite(result.metrics[:, :4]).all()
        assert np.isfinite(result.zetas).all() == (method in ADAPTIVE)
        agree(result, run_single(spec), FOLLOWS if schedule == "adaptive" else F64)


def test_all_methods_in_one_batch(kit: Any) -> None:
    """Runs share a program, not a state: the memories of DecSPS and AdamW belong to their rows."""
    problem = kit.tiny()
    specs = [
        kit.spec(problem, method=method, schedule=schedule, seed=seed)
        for seed, (method, schedule) in itertools.product((1, 0), reversed(PAIRS))
    ]
    for result in run_batched(specs):
        agree(result, run_single(result.spec), FOLLOWS if result.spec.schedule == "adaptive" else F64)


@pytest.mark.parametrize("method", BATCHED)
def test_a_module_runs_in_both_engines(kit: Any, method: str) -> None:
    problem = kit.network()
    specs = [kit.spec(problem, method=method, lr=kit.rates[method] / 10, seed=seed) for seed in (0, 1)]
    for result in run_batched(specs):
        assert result.metrics[-1, 0] < result.metrics[0, 0]
        agree(result, run_single(result.spec))


@pytest.mark.parametrize("engine", ["batched", "single"])
def test_an_incomplete_last_batch(kit: Any, engine: str) -> None:
    """`drop_last=False`: 32 samples in batches of 12 make three steps, of 12, 12 and 8 samples."""
    problem = kit.network("incomplete", batch_size=12, drop_last=False)
    spec = kit.spec(problem, method="sgd", schedule="constant", epochs=1, weight_decay=0.0)
    result = run_batched([spec])[0] if engine == "batched" else run_single(spec)
    assert result.zetas.shape == (1, 3)
    assert np.isfinite(result.metrics[0, :4]).all()


@pytest.mark.parametrize("method", BATCHED)
def test_a_loss_below_its_bound(kit: Any, method: str) -> None:
    """A bound that some batches undercut: methods that hold the loss against it leave those steps out."""
    problem = kit.network("bound", lower_bound=0.32)
    spec = kit.spec(problem, method=method, schedule="constant", lr=kit.rates[method] / 10, epochs=3)
    single = run_single(spec)
    agree(run_batched([spec])[0], single)


def test_the_bound_of_the_test_above_is_undercut_at_times(kit: Any) -> None:
    single = run_single(kit.spec(kit.network("bound", lower_bound=0.32), lr=0.2, schedule="constant", epochs=3))
    skipped = np.isnan(single.zetas)  # what the optimizer reports of a step that it left out
    assert skipped.any()
    assert not skipped.all()


def test_a_method_without_a_bound_ignores_it(kit: Any) -> None:
    spec, free = (kit.spec(kit.network(f"bound {bound}", lower_bound=bound), method="prox-sgd") for bound in (1e3, 0.0))
    expected = run_single(free).metrics
    for result in (run_single(spec), run_batched([spec])[0]):
        np.testing.assert_allclose(result.metrics, expected, rtol=F64)


# Single steps from shared states


def scaled(seed: int, scale: float) -> Any:
    """Two linear layers at a random point, and one batch."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 5, bias=False)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(scale * torch.randn(param.shape, generator=generator, dtype=param.dtype))
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    y = 0.1 * torch.randn(16, 5, generator=generator, dtype=torch.float64)
    return from_module(f"state {seed} {scale}", model, nn.functional.mse_loss, (x, y), (x, y), batch_size=16)


@pytest.mark.parametrize("method", BATCHED)
def test_one_step_from_random_points(kit: Any, method: str) -> None:
    """Small weights take the cap, large ones make the model of ProxSPS negative at once."""
    branches = set()
    for seed, scale, lam in itertools.product(range(2), (0.05, 0.7, 3.0), (0.2, 0.5)):
        spec = kit.spec(scaled(seed, scale), method=method, lr=1.0, weight_decay=lam, epochs=1)
        if method == "adamw":
            spec = dataclasses.replace(spec, weight_decay=1e-3)
        single = run_single(spec)
        agree(run_batched([spec])[0], single, rtol=1e-13)  # one step: a few dozen roundings of 1e-16
        zeta = float(single.zetas[0, 0])
        branches.add("truncated" if zeta == 0 else "capped" if zeta >= 1 else "inside")
    expected = {"prox-sps": {"truncated", "inside", "capped"}, "sps": {"inside", "capped"}}
    assert branches >= expected.get(method, set())


# Whole runs in float32


@pytest.mark.parametrize("method", BATCHED)
def test_runs_are_equal_in_distribution(kit: Any, method: str) -> None:
    """Ten seeds, ten epochs: after a hundred steps rounding has grown, and medians are compared with the spread."""
    specs = [
        kit.spec(matrix_fac1(N=200), method=method, schedule="sqrt", weight_decay=1e-3, seed=seed, epochs=10)
        for seed in range(10)
    ]
    batched = np.stack([result.metrics[-3:] for result in run_batched(specs)])
    single = np.stack([run_single(spec).metrics[-3:] for spec in specs])
    for index, metric in enumerate(METRICS):
        a, b = (np.median(runs[:, :, index], axis=1) for runs in (batched, single))
        if metric == "zeta_median" and method not in ADAPTIVE:
            assert np.isnan([*a, *b]).all()
            continue
        if metric == "zeta_median":  # step sizes vary by factors, so that their logarithms are nearer to normal
            a, b = np.log(a), np.log(b)
        # A median of ten normal draws has a standard error of 0.37 standard deviations, the difference of two 0.53:
        # three of them. Ratios of standard deviations of ten stay within a factor 3 but once in a thousand times.
        assert abs(np.median(a) - np.median(b)) <= 1.6 * max(a.std(), b.std()), metric
        assert 1 / 3 <= a.std() / b.std() <= 3, metric


# Against torch


@pytest.mark.parametrize("schedule", ["constant", "sqrt"])
@pytest.mark.parametrize("engine", ["batched", "single"])
def test_adamw_is_torchs_with_the_decay_over_the_rate(kit: Any, engine: str, schedule: str) -> None:
    lr, lam = 0.02, 1e-2
    spec = kit.spec(method="adamw", schedule=schedule, lr=lr, weight_decay=lam, seed=2, epochs=3)
    other = dataclasses.replace(spec, lr=0.05, seed=1)
    result = run_batched([other, spec])[1] if engine == "batched" else run_single(spec)
    params = {name: value.requires_grad_() for name, value in spec.problem.start().items()}
    optimizer = torch.optim.AdamW(params.values(), lr, weight_decay=lam / lr)
    for epoch, metrics in enumerate(result.metrics):
        optimizer.param_groups[0]["lr"] = lr if schedule == "constant" else lr / (epoch + 1) ** 0.5
        for index in batches(spec.problem, spec.seed, epoch):
            optimizer.zero_grad()
            spec.problem.loss(params, *(array[index] for array in spec.problem.train_data())).backward()
            optimizer.step()
        with torch.no_grad():
            train = float(spec.problem.loss(params, *spec.problem.train_data()))
            error = float(spec.problem.validation_error(params, *spec.problem.validation_data(spec.seed)))
            square = float(sum(param.square().sum() for param in params.values()))
        expected = [train + lam / 2 * square, train, error, square**0.5]
        np.testing.assert_allclose(metrics[:4], expected, rtol=F64)
        assert np.isnan(metrics[4])


def test_sgd_is_torchs_with_the_decay_in_the_gradient(kit: Any) -> None:
    spec = kit.spec(method="sgd", schedule="constant", weight_decay=1e-2, epochs=1)
    params = {name: value.requires_grad_() for name, value in spec.problem.start().items()}
    optimizer = torch.optim.SGD(params.values(), spec.lr, weight_decay=1e-2)
    for index in batches(spec.problem, spec.seed, 0):
        optimizer.zero_grad()
        spec.problem.loss(params, *(array[index] for array in spec.problem.train_data())).backward()
        optimizer.step()
    norm = float(sum(param.detach().square().sum() for param in params.values())) ** 0.5
    np.testing.assert_allclose(run_batched([spec])[0].metrics[0, 3], norm, rtol=F64)


# What engines share


def test_batches_are_a_permutation_without_the_rest(kit: Any) -> None:
    problem = kit.tiny(N=70)
    index = np.stack(batches(problem, seed=1, epoch=0))
    assert index.shape == (3, 20)
    assert len(set(index.ravel())) == 60
    assert index.max() < 70
    assert np.array_equal(index, batches(problem, 1, 0))
    for other in (batches(problem, 2, 0), batches(problem, 1, 1)):
        assert not np.array_equal(index, other)


def test_schedules(kit: Any) -> None:
    assert [alpha_of_epoch(kit.spec(lr=3.0, schedule="constant"), k) for k in (0, 8)] == [3.0, 3.0]
    assert [alpha_of_epoch(kit.spec(lr=3.0, schedule="sqrt"), k) for k in (0, 8)] == [3.0, 1.0]


def test_the_adaptive_schedule_follows_the_epoch_before(kit: Any) -> None:
    spec = kit.spec(lr=3.0, schedule="adaptive", epochs=5)
    zetas = np.array([[1.0, 2.0, 0.5], [np.nan, 9.0, 8.0], [0.0, 0.0, 1.0], [np.nan] * 3, [2.0, 2.0, 2.0]])
    # the median; at most alpha_0; as it was where the median is 0, and where no step was taken
    assert [alpha_of_epoch(spec, k, zetas) for k in range(6)] == [3.0, 1.0, 3.0, 3.0, 3.0, 2.0]
    zetas[1] = [0.25, 0.5, np.nan]
    assert [alpha_of_epoch(spec, k, zetas) for k in range(6)] == [3.0, 1.0, 0.375, 0.375, 0.375, 2.0]


def test_metrics_are_those_of_the_definition(kit: Any) -> None:
    """After a step of length zero they can be computed from the start."""
    spec = kit.spec(method="sgd", lr=0.0, weight_decay=0.5, seed=3, epochs=1)
    params, problem = spec.problem.start(), spec.problem
    train = float(problem.loss(params, *problem.train_data()))
    error = float(problem.validation_error(params, *problem.validation_data(3)))
    square = float(sum(value.square().sum() for value in params.values()))
    for result in (run_single(spec), run_batched([spec])[0]):
        np.testing.assert_allclose(result.metrics[0, :4], [train + square / 4, train, error, square**0.5], rtol=1e-14)


def test_a_batch_needs_one_problem_and_one_number_of_epochs(kit: Any) -> None:
    for pair in ([kit.spec(), kit.spec(epochs=3)], [kit.spec(), kit.spec(kit.tiny(N=80))]):
        with pytest.raises(ValueError, match="share"):
            run_batched(pair)


def test_progress_counts_epochs_of_runs(kit: Any) -> None:
    heard: dict[str, list[int]] = {"batched": [], "single": [], "diverged": []}
    run_batched([kit.spec(seed=seed, epochs=3) for seed in range(4)], heard["batched"].append)
    run_single(kit.spec(epochs=3), heard["single"].append)
    run_single(kit.spec(method="sgd", lr=1e9, epochs=30), heard["diverged"].append)
    assert heard["batched"] == [4, 4, 4]
    assert heard["single"] == [1, 1, 1]
    assert sum(heard["diverged"]) == 30


# Divergence


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_run_that_diverges_leaves_its_neighbours_alone(kit: Any, position: int) -> None:
    healthy = [kit.spec(method=method, epochs=4) for method in ("prox-sps", "sgd", "dec-sps")]
    healthy[position] = kit.spec(method="sgd", seed=1, epochs=4)
    mixed = list(healthy)
    mixed[position] = dataclasses.replace(healthy[position], lr=1e6)
    expected, got = run_batched(healthy), run_batched(mixed)
    for i in {0, 1, 2} - {position}:
        assert got[i].diverged_at is None
        assert np.array_equal(got[i].metrics, expected[i].metrics, equal_nan=True)
        assert np.array_equal(got[i].zetas, expected[i].zetas, equal_nan=True)
    assert got[position].diverged_at is not None


@pytest.mark.parametrize("lr", [0.9, 3.0, 1e6])
def test_both_engines_see_the_same_epoch_of_divergence(kit: Any, lr: float) -> None:
    spec = kit.spec(method="sgd", schedule="constant", lr=lr, epochs=40)
    batched, single = run_batched([spec, kit.spec(epochs=40)])[0], run_single(spec)
    epoch = batched.diverged_at
    assert epoch is not None
    assert single.diverged_at == epoch
    assert np.isfinite(batched.metrics[: epoch - 1, :4]).all()
    assert np.isnan(batched.metrics[epoch - 1 :]).all()
    assert np.isnan(single.metrics[epoch - 1 :]).all()


def test_a_healthy_run_has_no_epoch_of_divergence(kit: Any) -> None:
    assert run_single(kit.spec()).diverged_at is None
    assert RunResult(kit.spec(), np.array([[1.0] * 5, [np.inf] * 5]), np.ones((2, 3))).diverged_at == 2


def test_specs_are_kept_in_order(kit: Any) -> None:
    specs: list[RunSpec] = [kit.spec(seed=seed, epochs=1) for seed in (5, 1, 3)]
    assert [result.spec for result in run_batched(specs)] == specs


def test_methods_without_a_learning_rate_are_not_batched(kit: Any) -> None:
    """A batch has no rule for them, and would step by the cap alone."""
    for method in FREE:
        first = kit.spec(epochs=2)
        if TABLE[method].groups:
            with pytest.raises(ValueError, match=f"{method} is for networks.*{first.problem.name} has no layers"):
                dataclasses.replace(first, method=method, lr=1.0)
            continue
        specs = [first, dataclasses.replace(first, method=method, lr=1.0)]
        with pytest.raises(ValueError, match=f"Runs of {method} cannot be batched: use the engine single or processes"):
            run_batched(specs)
        assert run_single(specs[1]).diverged_at is None


def test_spectral_steps_of_your_own_network() -> None:
    """The sweep's parameters are in the groups of the network's layers, and step as the optimizer does by itself."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(32, 5), torch.randn(32, 1)
    problem = from_module("own", network, nn.functional.mse_loss, (x, y), (x, y), batch_size=len(x))
    spec = RunSpec(problem, "schedule-free-sps-spectral", "constant", 1.0, 0.0, 0, 3)
    optimizer = ScheduleFreeSPS(network, metric="spectral")
    for _ in range(spec.epochs):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x), y)
        loss.backward()
        optimizer.step(loss=loss)
    network.eval()
    expected = nn.functional.mse_loss(network(x), y).item()
    assert run_single(spec).metrics[-1, 0] == pytest.approx(expected, rel=1e-5)
