"""What a step on a device costs: how many kernels it launches, and how much memory it takes meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proxsps import L1, SPS, ElasticNet, GroupLasso, NuclearNorm, ProxSPS, ProxSPSAdam
from proxsps.optim.device.searched import ROOM

# What is counted, and a few launches that another version of torch may add.
LIMITS = {
    "ProxSPS, weight decay": 48,
    "SPS, weight decay": 52,
    "DecSPS, weight decay": 76,
    "ProxSPS, momentum": 73,
    "ProxSPS, matched cap": 45,
    "ProxSPS, momentum, no lr": 101,
    "ProxSPSAdam": 123,
    "ScheduleFreeSPS": 118,
    "ScheduleFreeSPS, weight decay": 150,
    "ScheduleFreeSPS, spectral": 304,
    "ScheduleFreeSPS, spectral, weight decay": 336,
    "ProxSPS, L1": 197,
    "ProxSPS, ElasticNet": 210,
    "ProxSPS, Box": 197,
    "ProxSPS, GroupLasso.filters and weight decay": 200,
}


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import launches

    return launches


def test_a_step_launches_few_kernels(launches):
    steps = launches.contestants("cpu")
    counts = {name: launches.counted(steps[name]).total() for name in LIMITS}
    assert all(counts[name] <= limit for name, limit in LIMITS.items()), counts
    assert min(counts.values()) > 30  # the counter counts


def test_launches_do_not_depend_on_how_many_tensors_there_are(launches, kit):
    def count(tensors):
        options = {"lr": 1.0, "capturable": True}
        groups = [
            {
                "params": kit.drawn(*[(8, 3, 2, 2)] * tensors, dtype=torch.float32),
                "regularizer": GroupLasso.filters(0.1),
            },
            {"params": kit.drawn(*[(5,)] * tensors, dtype=torch.float32), "regularizer": ElasticNet(0.1, 0.1)},
            {"params": kit.drawn(*[(6, 4)] * tensors, dtype=torch.float32), "regularizer": NuclearNorm(0.1)},
            {"params": kit.drawn(*[(7,)] * tensors, dtype=torch.float32), "weight_decay": 0.1},
        ]
        opt = ProxSPS(groups, **options)
        return launches.counted(lambda: opt.step(loss=torch.tensor(1.0))).total()

    assert count(2) == count(20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", [ProxSPS, SPS])
def test_nor_does_weight_decay_in_any_precision(launches, kit, method, dtype):
    def count(tensors):
        opt = method(kit.drawn(*[(5, 3)] * tensors, dtype=dtype), lr=1.0, weight_decay=0.1, capturable=True)
        return launches.counted(lambda: opt.step(loss=torch.tensor(1.0))).total()

    assert count(2) == count(20)


def peak(launches, shapes, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    opt = ProxSPS(params, lr=1.0, capturable=True, **options)
    loss = torch.tensor(0.1 * sum(p.numel() for p in params))
    with launches.PeakMemory([*params, *(p.grad for p in params)]) as memory:
        opt.step(loss=loss)
    assert opt.last_step.branch_name == "inside"
    return memory.peak, sum(p.nbytes for p in params)


SETS = {
    "small": [(3, 5)] * 7,
    "many tensors": [(64, 64, 3, 3)] * 50,
    "large": [(500_000,)] * 20,
    "one large": [(9_000_000,)],
}


@pytest.mark.parametrize("shapes", SETS.values(), ids=SETS)
@pytest.mark.parametrize("phi", [L1(1e-3), ElasticNet(1e-3, 1e-3)], ids=["L1", "ElasticNet"])
def test_a_search_over_entries_takes_two_copies_of_the_parameters_at_most(launches, shapes, phi):
    used, parameters = peak(launches, shapes, regularizer=phi)
    assert used <= max(2 * parameters, ROOM) + 100_000  # a few numbers besides
    if parameters > 1e6:
        assert used > parameters / 2  # the counter counts


def test_half_precision_takes_no_more(launches):
    used, parameters = peak(launches, [(1_000_000,)] * 18, torch.bfloat16, regularizer=L1(1e-3))
    assert parameters > ROOM
    assert used <= 2 * parameters + 100_000


def test_the_kernels_take_at_most_32_megabytes(launches):
    params = launches.draw("cpu", [(9_000_000,)])
    opt = ProxSPS(params, lr=0.1, regularizer=L1(1e-3), fused=True)
    assert launches.extra_memory(opt, params, torch.tensor(0.02 * 9_000_000)) < 32e6


@pytest.mark.parametrize(("options", "limit"), [({"lr": 0.1, "cap": "proximal"}, 270), ({}, 600)])
def test_a_search_in_adams_metric_takes_all_points_of_a_round_at_once(launches, kit, options, limit):
    def count(tensors):
        params = kit.drawn(*[(5, 3)] * tensors, dtype=torch.float32)
        opt = ProxSPSAdam(params, regularizer=L1(0.1), capturable=True, **options)
        opt.step(loss=torch.tensor(1.0))  # which makes the state
        return launches.counted(lambda: opt.step(loss=torch.tensor(1.0))).total()

    assert count(2) == count(20) <= limit
