"""Without a learning rate, a run does not depend on which entries of its parameters move and which stand still."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from files import through_disk
from sampled import norm_sq, places

from proxsps import L1, Box, ProxSPS, ProxSPSAdam
from proxsps.optim.distance import Rows, Sample, entries_at, sampled, unsampled
from proxsps.optim.reduce import Ranks

METHODS = {"Adam": (ProxSPSAdam, {}), "momentum": (ProxSPS, {"lr": None, "momentum": 0.9})}
PATHS = {"kernels": {}, "torch alone": {"fused": False}, "device": {"capturable": True}}
METHOD = pytest.mark.parametrize("method", METHODS)
PATH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def regression(method, still, features=10, steps=150, seed=0, **options):
    """The mean squared error of linear regression over that at the start; `still` features are always 0."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(100, features, generator=generator)
    inputs[:, still] = 0
    outputs = inputs @ (9 * torch.randn(features, generator=generator))
    x = torch.nn.Parameter(torch.zeros(features))
    cls, own = METHODS[method]
    opt = cls([x], **own, **options)
    for _ in range(steps):
        batch = torch.randint(0, 100, (32,), generator=generator)
        rest = inputs[batch] @ x.detach() - outputs[batch]
        x.grad = inputs[batch].T @ rest / 16
        opt.step(loss=rest.square().mean())
    return float((inputs @ x.detach() - outputs).square().mean() / outputs.square().mean())


@PATH
@METHOD
def test_a_run_does_not_stall_because_of_a_feature_that_is_always_zero(method, path):
    assert regression(method, [0], **path) < 0.01
    if path == {}:
        assert all(regression(method, [0], seed=seed) < 0.01 for seed in (1, 2, 3))
        assert regression(method, [0, 17], features=34, steps=400) < 0.01


@PATH
@METHOD
@pytest.mark.parametrize("shape", [(34, 160), (70, 65), (4097, 1), (63, 65)], ids=str)
def test_every_path_measures_the_sampled_entries(method, path, shape):
    """Columns 0, 17, 34, ... and rows 0, 3, 6, ... stand still."""
    cls, own = METHODS[method]
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator))
    start, opt = x.detach().clone(), cls([x], **own, **path)
    for _ in range(4):
        before = x.detach().clone()
        x.grad = 1 + torch.rand(shape, generator=generator)
        x.grad[:, ::17] *= shape[1] == 1
        x.grad[::3] = 0
        opt.step(loss=torch.tensor(1e6))
    distance = norm_sq((before - start).double().numpy()) ** 0.5
    assert float(opt.param_groups[0]["reach"]) == pytest.approx(distance, rel=1e-5)
    assert distance == pytest.approx(float((before - start).norm()), rel=0.1)  # 280 entries scatter by 4 %


@METHOD
@pytest.mark.parametrize("shape", [(6, 5), (80, 60)], ids=str)
def test_a_complex_parameter_steps_like_its_real_pair(method, shape, kit):
    """Small ones like two tensors, all like one that has real and imaginary parts next to each other."""
    cls, own = METHODS[method]
    (z,) = kit.drawn(shape, dtype=torch.complex128)
    pair = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
    halves = [torch.nn.Parameter(part.clone()) for part in (z.detach().real, z.detach().imag)]
    opts = [cls([z], **own), cls([pair], **own), cls(halves, **own)]
    for k in range(4):
        (g,) = kit.drawn(shape, seed=k + 1, dtype=torch.complex128)
        z.grad, pair.grad = g.detach(), torch.view_as_real(g.detach()).clone()
        halves[0].grad, halves[1].grad = g.detach().real.clone(), g.detach().imag.clone()
        for opt in opts:
            opt.step(loss=50.0)
    torch.testing.assert_close(torch.view_as_real(z.detach()), pair.detach(), rtol=1e-12, atol=1e-12)
    if z.numel() <= 2048:
        joined = torch.complex(*(half.detach() for half in halves))
        torch.testing.assert_close(z.detach(), joined, rtol=1e-12, atol=1e-12)


# Shards and checkpoints


@pytest.mark.parametrize(
    "shape", [(97, 64), (97, 65), (300, 17), (5000,), (5, 3, 1000), (2100, 2), (40, 30), (1, 9999)]
)
def test_shards_of_rows_sample_and_store_what_the_whole_does(shape):
    x, ranks = torch.arange(1.0, math.prod(shape) + 1).view(shape), Ranks(False, False)
    whole = sampled([x], ranks, {})[0]
    assert np.array_equal(whole.entries - 1, places(x.numel()))
    matrix = unsampled(x, ranks).matrix(whole.entries)
    assert matrix.shape[0] == shape[0]
    assert torch.equal(unsampled(x, ranks).vector(matrix), whole.entries)
    length, rows = math.prod(shape[1:]), shape[0]
    for cuts in ((), (1,), (rows // 2, rows // 2), range(1, rows, 3)):
        found = []
        for first, end in itertools.pairwise([0, *cuts, rows]):
            own = Sample(x[first:end].reshape(-1), x.numel(), 1.0, Rows(first, end - first, length, rows), x)
            own = own._replace(entries=entries_at(own.entries, (own.size,), first * length, {}))
            assert torch.equal(own.vector(matrix[first:end]), own.entries)
            found.append(own.matrix(own.entries))
        assert torch.equal(torch.cat(found), matrix)


@PATH
@METHOD
def test_a_checkpoint_with_another_sample_measures_anew_and_keeps_the_largest_distance(method, path, kit):
    """Earlier versions stored every 17th entry, as a matrix under the key `start`."""
    cls, own = METHODS[method]
    params = kit.drawn((70, 64), (9,), dtype=torch.float32)
    opt = cls(params, **own, **path)

    def step(opt, params, k):
        for p, g in zip(params, kit.drawn((70, 64), (9,), seed=k + 1, dtype=torch.float32), strict=True):
            p.grad = g.detach()
        opt.step(loss=torch.tensor(1e4))

    for k in range(3):
        step(opt, params, k)
    saved = opt.state_dict()
    for state, width in zip(saved["state"].values(), (4, 1), strict=True):
        origin = state.pop("origin")
        state["start"] = origin.new_zeros(len(origin), width)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = cls(twins, **own, **path)
    other.load_state_dict(through_disk(saved))
    step(opt, params, 3)
    step(other, twins, 3)
    assert all("start" not in other.state[p] for p in twins)
    reach, kept = (float(found.param_groups[0]["reach"]) for found in (opt, other))
    assert kept == float(saved["param_groups"][0]["reach"]) <= reach
    for p, q in zip(params, twins, strict=True):
        where = p.detach().reshape(-1)[places(p.numel())]
        assert not torch.equal(opt.state[p]["origin"], where)
        assert other.state[q]["origin"].shape == where.shape
    assert float(other.param_groups[0]["k"]) == 4


# A distance that rests


def few_entries(regularizer=None, method="momentum", steps=120, entries=(1, 2, 3), **options):
    """Least squares in a few of 5,000 entries, and the optimizer's warnings."""
    cls, own = METHODS[method]
    x = torch.nn.Parameter(torch.zeros(5000))
    opt = cls([x], **own, **{"regularizer": regularizer, **options})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            rest = x.detach()[list(entries)] - 5
            x.grad = torch.zeros(5000)
            x.grad[list(entries)] = rest
            opt.step(loss=rest.square().sum() / 2 + 1)
    return opt, [one for one in found if "measured distance" in str(one.message)]


UNSEEN = [i for i in range(40) if i not in places(5000)]


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"lower_bound": None}, {"regularizer": L1(1e-3)}])
@METHOD
def test_a_run_whose_measured_entries_stand_still_is_said_once(method, options):
    opt, (found,) = few_entries(method=method, entries=UNSEEN[:5], steps=250, **options)
    text = str(found.message)
    assert text.startswith(type(opt).__name__ + ": In 100 steps that were limited by the distance from the start")
    assert "pass a number as lr" in text
    assert found.filename == __file__


def test_healthy_runs_are_not_warned_of():
    seen = places(5000)[:5].tolist()
    assert not few_entries(entries=seen)[1]
    assert not few_entries(entries=[*UNSEEN, *seen], method="Adam")[1]
    assert not few_entries(L1(1e4), entries=UNSEEN)[1]  # which keeps all at 0, the solution
    assert not few_entries(Box(0.0, 0.0), entries=UNSEEN)[1]
    assert not few_entries(entries=UNSEEN, max_move=1e-9)[1]
    assert not few_entries(entries=UNSEEN, capturable=True)[1]  # nothing is read back


@METHOD
def test_a_run_that_starts_at_its_solution_is_not_warned_of(method, kit):
    """The largest distance stays at its first estimate; a run that is continued from an earlier version is similar."""
    cls, own = METHODS[method]
    (x,) = kit.drawn((70, 64), dtype=torch.float32)
    center, opt, generator = x.detach().clone(), cls([x], **own), torch.Generator().manual_seed(0)
    for _ in range(300):
        x.grad = (x.detach() - center) + 0.1 * torch.randn(x.shape, generator=generator)
        opt.step(loss=torch.tensor(1e4))
    assert opt.last_step.cap_name == "distance"
    other = cls([x], **own)
    state = opt.state_dict()
    for held in state["state"].values():
        held["start"] = held.pop("origin")
    other.load_state_dict(state)
    for _ in range(110):
        x.grad = torch.zeros_like(x)
        x.grad.view(-1)[UNSEEN] = 1
        other.step(loss=torch.tensor(1e4))
