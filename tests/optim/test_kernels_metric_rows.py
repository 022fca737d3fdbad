"""Norms of rows in Adam's metric by the kernels, against the prox of the regulariser on whole tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from proxsps import L1, GroupLasso, ProxSPSAdam
from proxsps.optim.kernels import layout
from proxsps.optim.kernels.metric_rows import MetricRowPart

SHAPES = [(67, 5), (3, 131), (7, 4, 3, 3), (1, 9), (2, 9_001)]
OPTIONS = {
    "no lr": {},
    "lr": {"lr": 0.05},
    "searched": {"lr": 3.0, "cap": "proximal"},
    "matched": {"lr": 3.0},
    "shortened": {"lr": 0.5, "max_move": 0.3},
}


def by_kernels(opt):
    """Whether the last step had rows in the metric by kernels."""
    return any(isinstance(member.part, MetricRowPart) for member in opt._plan.parts)


def groups(dtype, lam, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    matrices, filters = ([p for p in params if p.dim() == dim] for dim in (2, 4))
    bias = nn.Parameter(torch.randn(11, generator=generator, dtype=dtype))
    return [
        {"params": matrices, "regularizer": GroupLasso.rows(lam)},
        {"params": filters, "regularizer": GroupLasso.filters(lam, scale_by_size=True)},
        {"params": [bias], "weight_decay": 0.1},
    ]


def parameters(opt):
    return [p for group in opt.param_groups for p in group["params"]]


def train(opt, losses, seed=1):
    """Steps with gradients that are drawn; at the loss 40 one tensor has none, and rests."""
    generator = torch.Generator().manual_seed(seed)
    params = parameters(opt)
    for loss in losses:
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) + 0.3 * p.detach()
        if loss == 40:
            params[1].grad = None
        opt.step(loss=loss)
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("lam", [0.01, 0.4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_are_those_of_the_prox(dtype, options, lam):
    one, two = (ProxSPSAdam(groups(dtype, lam), **options, fused=fused) for fused in (None, False))
    for seed, loss in enumerate((3.0, 40.0, 5.0)):  # each from the same state
        train(one, [loss], seed)
        train(two, [loss], seed)
        assert by_kernels(one)
        assert not by_kernels(two)
        # Both searches end at a duality gap of 1e-7 (f32) or 1e-12 of the loss: points differ by about its square root.
        loose, tight = (3e-4, 1e-5) if dtype is torch.float32 else (1e-6, 1e-11)
        tolerance = loose if one.last_step.branch_name == "inside" else tight
        for a, b in zip(parameters(one), parameters(two), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            for key, value in two.state[b].items():
                torch.testing.assert_close(one.state[a][key], value)
            a.data.copy_(b.detach())
        assert one.last_step.branch_name == two.last_step.branch_name
        torch.testing.assert_close(one.last_step.tau, two.last_step.tau, rtol=10 * tolerance, atol=0)
        one.load_state_dict(two.state_dict())
        for group in one.param_groups:
            group["fused"] = None


def test_rows_are_exactly_zero_or_not_at_all():
    opt = ProxSPSAdam(groups(torch.float32, 2.0), lr=0.2)
    found = train(opt, 6 * [1e6])
    zeros = [(x.flatten(1) == 0).sum(1) for x in found[:4]]
    for x, count in zip(found, zeros, strict=False):
        assert set(count.tolist()) <= {0, x[0].numel()}
    assert 0 < sum(int((count > 0).sum()) for count in zeros) < sum(len(count) for count in zeros)


def test_a_skipped_step_leaves_everything_as_it_was():
    opt = ProxSPSAdam(groups(torch.float32, 0.1))
    before = train(opt, [3.0, 40.0])
    state = {id(p): {k: v.clone() for k, v in own.items()} for p, own in opt.state.items()}
    params = parameters(opt)
    params[0].grad[3, 2] = torch.nan
    with pytest.warns(RuntimeWarning, match="not finite"):
        opt.step(loss=3.0)
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))
    for p, own in opt.state.items():
        assert all(torch.equal(value, state[id(p)][key]) for key, value in own.items())


@pytest.mark.parametrize("phi", [GroupLasso.columns(0.1), GroupLasso(0.1), L1(0.1)], ids=repr)
def test_other_layouts_and_regularisers_take_other_parts(phi):
    matrix, long = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(2, 20_000))
    for param in (matrix, long):
        param.grad = torch.randn_like(param)
        opt = ProxSPSAdam([param], regularizer=phi)
        opt.step(loss=1.0)
        assert by_kernels(opt) == (
            phi == GroupLasso(0.1) and param is matrix
        )  # a small tensor that is one group is a row


def planned(dtype, seed=1):
    """An optimizer, its plan ready for a second step, and x, g, new d, new v and r of its tensors in doubles."""
    opt = ProxSPSAdam(groups(dtype, 0.4), lr=0.05)
    train(opt, [3.0])
    generator, params, wanted = torch.Generator().manual_seed(seed), parameters(opt), []
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    plan = opt._plan
    assert plan.holds(opt)
    plan.prepare(1.0, plan.lam)
    old, new, old_v, new_v = plan.parts[0].part.at.weights[0, :4]
    for p in params:
        x, g, own = p.detach().double(), p.grad.double(), opt.state[p]
        d, v = old * own["average"].double() + new * g, old_v * own["square"].double() + new_v * g**2
        wanted.append((x, g, d, v, 1 / (v.sqrt() + 1e-8)))
    return opt, plan, wanted


def everything(opt):
    return [t.clone() for p in parameters(opt) for t in (p.detach(), p.grad, *opt.state[p].values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_passes_that_read_agree_with_doubles_and_leave_everything_as_it_was(dtype):
    opt, plan, wanted = planned(dtype)
    before, eps, alpha, points = everything(opt), torch.finfo(dtype).eps, [0.3, 0.7, 0.9], [0.05, 0.4, 1.0]
    table, heights = plan.sums(alpha, points)
    assert plan.heights(alpha, points).h == pytest.approx(heights.h, rel=1e3 * eps)  # Newton's method begins elsewhere
    assert np.isnan(heights.slope).all()
    rays = plan.ray(alpha, [0.2, 1.0])
    assert all(map(torch.equal, everything(opt), before))
    for b, own in enumerate((wanted[:4], wanted[4:5])):  # matrices, filters
        for row, term in (
            ("d_sq", lambda x, g, d, r: d * r * d), ("d_dot_x", lambda x, g, d, r: d * x),
            ("noise_sq", lambda x, g, d, r: (d * x) ** 2), ("g_dot_x", lambda x, g, d, r: g * x),
            ("g_sq", lambda x, g, d, r: (r * g) ** 2),
        ):  # fmt: skip
            terms = torch.cat([term(x, g, d, r).flatten() for x, g, d, _, r in own])
            assert abs(getattr(table, row)[b] - terms.sum()) <= 600 * eps * terms.abs().sum(), row

    def new_points(scale, u):
        for phi, alpha_b, own in zip(
            [g["regularizer"] for g in opt.param_groups], alpha, (wanted[:4], wanted[4:5]), strict=False
        ):
            for x, _, d, _, r in own:
                yield x, d, phi.prox_diagonal(x - u * scale * alpha_b * r * d, scale * alpha_b * r)

    def height(scale, u):
        return sum((d * (y - x)).sum().item() for x, d, y in new_points(scale, u))

    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    np.testing.assert_allclose(heights.h, [height(1.0, u) for u in points], rtol=tolerance)
    np.testing.assert_allclose(rays, [height(s, 1.0) for s in (0.2, 1.0)], rtol=tolerance)


def test_neither_threads_nor_the_way_of_a_pass_change_a_bit(monkeypatch):
    monkeypatch.setattr(layout, "ALONE", layout.CHUNK)  # threads take part from few entries on
    threads, results = torch.get_num_threads(), []
    try:
        for count, backwards in ((1, False), (2, True), (3, False)):
            torch.set_num_threads(count)
            opt, plan, _ = planned(torch.float32)
            part = plan.parts[0].part
            part._turns = itertools.repeat(backwards)
            table, heights = plan.sums([0.3] * 3, [0.4, 1.0])
            plan.write([0.9] * 3, [-0.1] * 3, [0.3] * 3, 0.4, 1.0)
            results.append((list(table), heights.h, everything(opt)))
    finally:
        torch.set_num_threads(threads)
    for table, heights, state in results[1:]:
        assert (table, heights) == results[0][:2]
        assert all(map(torch.equal, state, results[0][2]))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("phi", [GroupLasso.rows(0.1), GroupLasso.columns(0.1), L1(0.1), None], ids=repr)
def test_a_square_that_overflows_is_a_skipped_step(phi, fused):
    """Also where sums are taken in doubles: state in f32 would be infinite for ever."""
    p = nn.Parameter(torch.randn(70, 3))
    opt = ProxSPSAdam([p], regularizer=phi, fused=fused)
    for bad in (slice(None), 5):  # all entries, or some of them
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        p.grad[bad] = 1e30
        opt._warned.clear()
        with pytest.warns(RuntimeWarning, match="not finite"):
            opt.step(loss=1.0)
        assert torch.equal(p.detach(), before)
        assert not opt.state
    p.grad = torch.ones_like(p)
    opt.step(loss=1.0)
    assert not torch.equal(p.detach(), before)
    assert opt.state[p]["square"].isfinite().all()
