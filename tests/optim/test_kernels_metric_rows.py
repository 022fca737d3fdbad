"""Norms of rows in Adam's metric by the kernels, against the prox of the regulariser on whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from proxsps import L1, GroupLasso, ProxSPSAdam

SHAPES = [(67, 5), (3, 131), (7, 4, 3, 3), (1, 9), (2, 9_001)]
OPTIONS = {
    "no lr": {},
    "lr": {"lr": 0.05},
    "searched": {"lr": 3.0, "cap": "proximal"},
    "matched": {"lr": 3.0},
    "shortened": {"lr": 0.5, "max_move": 0.3},
}


def uses_kernel(opt):
    """Whether the last step had a part of this kind."""
    return any(type(member.part).__name__ == "MetricRowPart" for member in opt._plan.parts)


def groups(dtype, lam, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrices = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES if len(shape) == 2
    ]
    filters = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES if len(shape) == 4
    ]
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
        assert uses_kernel(one)
        assert not uses_kernel(two)
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
        whole = phi == GroupLasso(0.1) and param is matrix  # a small tensor that is one group is one row
        assert uses_kernel(opt) == whole


def test_a_square_that_overflows_is_a_skipped_step():
    p = nn.Parameter(torch.randn(70, 3))
    opt = ProxSPSAdam([p], regularizer=GroupLasso.rows(0.1))
    p.grad = torch.full_like(p, 1e30)
    with pytest.warns(RuntimeWarning, match="not finite"):
        opt.step(loss=1.0)
