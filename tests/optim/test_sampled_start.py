"""Searches over many entries start from a sample of them: the answer is the same, and few passes find it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxsps.optim import ProxSPS, ProxSPSAdam, ScheduleFreeSPS, host
from proxsps.optim.plan import load_kernels
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso, NonNegative

ALPHA = 0.3
REGULARIZERS = [L1(0.2), ElasticNet(0.2, 0.5), NonNegative(), Box(-0.7, 0.9)]
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="the compiled kernels are not installed")


@pytest.fixture(autouse=True)
def worth(monkeypatch):
    """Samples from few entries on."""
    monkeypatch.setattr(host, "WORTH", 10_000)


def drawn(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in ((211, 307), (30_011,), (97, 53), (13,)):
        x, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        params.append(torch.nn.Parameter(x.to(dtype)))
        params[-1].grad = (noise + 0.5 * x).to(dtype)
    return params


def height(groups, u):
    """sum <d, y(u) - x> in doubles."""
    total = 0.0
    for group in groups:
        phi = group.get("regularizer") or L2(group["weight_decay"])
        for p in group["params"]:
            x, d = p.detach().double(), p.grad.double()
            total += float(torch.sum(d * (phi.prox(x - u * ALPHA * d, ALPHA) - x)))
    return total


def groups_of(phi, params):
    return [
        {"params": params[:2], "regularizer": phi},
        {"params": params[2:3], "regularizer": GroupLasso.rows(0.3)},
        {"params": params[3:], "weight_decay": 0.1},
    ]


@pytest.mark.parametrize("part", [0.02, 0.4, 0.97])
@pytest.mark.parametrize("phi", REGULARIZERS, ids=str)
@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_answer_has_the_duality_gap_that_was_asked_for(phi, part, fused, dtype):
    params = drawn(1, dtype)
    groups = groups_of(phi, params)
    gap = -(height(groups, 0.0) + part * (height(groups, 1.0) - height(groups, 0.0)))
    start = [{**group, "params": [torch.nn.Parameter(p.detach().clone()) for p in group["params"]]} for group in groups]
    for group, copy in zip(groups, start, strict=True):
        for p, q in zip(group["params"], copy["params"], strict=True):
            q.grad = p.grad
    opt = ProxSPS(groups, lr=ALPHA, fused=fused)
    opt.step(loss=gap)
    u = float(opt.last_step.u)
    assert opt.last_step.branch_name == "inside"
    # Sums of f32 are rounded; 97,000 entries of size 1 leave an error of a few eps times the root of their number.
    h, slack = gap + height(start, u), 1e-12 * gap if dtype is torch.float64 else (1e-7 + 4 * 1.2e-7) * gap
    assert max((1 - u) * h, -u * h) <= 2 * slack


@pytest.fixture
def passes(monkeypatch):
    """One entry in how many each pass over entries reads."""
    from proxsps.optim.kernels.entrywise import EntryPart

    seen, inner = [], EntryPart._pass

    def spied(self, alphas, u, every=1, *args, **options):
        seen.append(every)
        return inner(self, alphas, u, every, *args, **options)

    monkeypatch.setattr(EntryPart, "_pass", spied)
    return seen


@needs_kernels
@pytest.mark.parametrize("phi", REGULARIZERS, ids=str)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("enough", "coarser"), [(host.ENOUGH, False), (1_000, True)])
def test_one_to_three_passes_over_all_entries_are_enough(phi, alone, enough, coarser, monkeypatch, passes):
    monkeypatch.setattr(host, "ENOUGH", enough)
    params = drawn(2)
    groups = [{"params": params, "regularizer": phi}] if alone else groups_of(phi, params)
    ProxSPS(groups, lr=ALPHA).step(loss=-(height(groups, 0.0) + height(groups, 1.0)) / 2)
    samples = [every for every in passes if every > 1]
    assert len(samples) == 2
    assert (min(samples) > host.SAMPLE) == coarser
    # Entries are few here, so that their kinks count for more than in a network.
    assert passes.count(1) <= (3 if alone else 5)


@needs_kernels
@pytest.mark.parametrize("phi", REGULARIZERS, ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_a_capped_step_takes_one_pass_and_one_for_the_sums(phi, alone, passes):
    params = drawn(3)
    groups = [{"params": params, "regularizer": phi}] if alone else groups_of(phi, params)
    opt = ProxSPS(groups, lr=ALPHA)
    opt.step(loss=-1.5 * height(groups, 1.0))
    assert opt.last_step.branch_name == "capped"
    assert passes.count(1) == (1 if alone else 2)  # the sums of a part alone have the heights as well


AVERAGED = {  # and how many passes three steps may take before they write
    "momentum": (ProxSPS, {"lr": 0.1, "momentum": 0.9}, 8),
    "Adam, proximal": (ProxSPSAdam, {"lr": 0.1, "cap": "proximal"}, 8),
    "Adam, matched": (ProxSPSAdam, {"lr": 0.1}, 11),  # its longest step is known only after the sums
}


@needs_kernels
@pytest.mark.parametrize("name", AVERAGED)
def test_a_search_over_averages_takes_few_passes(passes, name):
    """The pass that makes the sums is the first round of the search: a sample tells where to look."""
    method, own, most = AVERAGED[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.randn(1 << 20, generator=generator))
    opt = method([x], regularizer=L1(0.1), **own)
    for _ in range(3):
        x.grad = torch.randn(1 << 20, generator=generator) + 0.5 * x.detach()
        opt.step(loss=4e4)
        assert opt.last_step.branch_name == "inside"
    assert passes.count(1) <= most


@needs_kernels
@pytest.mark.parametrize("kind", [ProxSPS, ProxSPSAdam, ScheduleFreeSPS])
def test_a_model_that_stays_far_above_its_bound_takes_no_pass_for_its_heights(passes, kind):
    """The sums show it where an l1 norm is weak, and the write tells the height; else a pass does."""
    heights = {}
    for fused, strength in ((True, 1e-3), (False, 1e-3), (True, 1e6)):
        generator = torch.Generator().manual_seed(0)
        x = torch.nn.Parameter(torch.randn(5_003, generator=generator))
        rest = torch.nn.Parameter(torch.randn(67, generator=generator))
        options = {} if kind is ScheduleFreeSPS else {"lr": None}
        groups = [{"params": [x], "regularizer": L1(strength)}, {"params": [rest], "weight_decay": 1e-3}]
        opt = kind(groups, fused=fused, lower_bound=0.0, **options)
        for _ in range(4):
            x.grad, rest.grad = torch.randn(5_003, generator=generator), torch.randn(67, generator=generator)
            opt.step(loss=1e4)
        assert opt.last_step.branch_name == "capped"
        heights[fused, strength] = opt.last_step.gap - opt.last_step.model_gap
        if fused:
            assert len(passes) == (4 if strength < 1 else 8)
        passes.clear()
    assert heights[True, 1e-3] > 0
    torch.testing.assert_close(heights[True, 1e-3], heights[False, 1e-3], rtol=1e-4, atol=0)


def test_the_number_of_threads_does_not_change_the_step():
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            params = drawn(4)
            groups = groups_of(L1(0.2), params)
            gap = -(height(groups, 0.0) + height(groups, 1.0)) / 2
            opt = ProxSPS(groups, lr=ALPHA)
            opt.step(loss=gap)
            results.append(np.concatenate([p.detach().numpy().ravel() for p in params]))
        finally:
            torch.set_num_threads(before)
    if load_kernels() is not None:  # torch's own sums may depend on the number of threads
        assert (results[0] == results[1]).all()
