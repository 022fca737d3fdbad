"""One step by kernels, by torch and on tensors, where memory, factors and limits are unusual: the same on each path."""

from __future__ import annotations

import pytest
import torch

from proxsps.optim import ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.regularizers import L1, Box, NonNegative

PATHS = {"kernels": {}, "torch": {"fused": False}, "device": {"capturable": True}}
EACH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def stepped(params, opt, first, last, loss=5.0):
    for k in range(first, last):
        for i, p in enumerate(params):
            p.grad = torch.empty_like(p).copy_(drawn(*p.shape, seed=10 * k + i + 1))
        opt.step(loss=loss)


# Memory


@EACH
@pytest.mark.parametrize("make", [ProxSPSAdam, lambda ps, **own: ProxSPS(ps, momentum=0.9, **own)])
def test_averages_in_another_order_of_memory_are_still_updated(make, path):
    """As after a checkpoint of a channels-last model is loaded into a contiguous one."""
    found = []
    for moved in (False, True):
        p = torch.nn.Parameter(drawn(4, 2, 3, 3))
        p.data = p.data.to(memory_format=torch.channels_last) if moved else p.data
        opt = make([p], **path)
        stepped([p], opt, 0, 2)
        p.data = p.data.contiguous()
        stepped([p], opt, 2, 5)
        found.append((p.detach(), opt.state[p]["average"]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@EACH
@pytest.mark.parametrize("loss", [5.0, 0.0])
def test_channels_last_with_one_channel(path, loss):
    """Contiguous too, but with other strides than torch gives to a view."""
    p = torch.nn.Parameter(drawn(8, 1, 3, 1).to(memory_format=torch.channels_last))
    twin = torch.nn.Parameter(p.detach().reshape(-1).clone())
    for param in (p, twin):
        opt = ScheduleFreeSPS(
            [{"params": [param], "set": "all", "regularizer": Box(-0.1, 0.1)}], lower_bound=0.0, **path
        )
        for k in range(3):
            param.grad = drawn(24, seed=k).view_as(param)
            opt.step(loss=loss)
    torch.testing.assert_close(p.detach().reshape(-1), twin.detach(), rtol=1e-9, atol=1e-12)


# Factors


@EACH
def test_with_rates_of_zero_the_average_of_squared_gradients_goes_on(path):
    """Steps after a schedule that begins at 0 would otherwise be several times too long."""
    p = torch.nn.Parameter(drawn(70))
    opt = ProxSPS([p], lr=0.0, distance_cap=True, **path)
    p.grad = drawn(70, seed=1)
    opt.step(loss=5.0)
    assert float(opt.param_groups[0]["g_sq"]) == pytest.approx(float(p.grad @ p.grad), rel=1e-6)


@EACH
def test_the_average_of_a_set_with_the_factor_zero_goes_on(path):
    """Else its first steps are ten times too long once it moves."""
    params = [torch.nn.Parameter(drawn(70, 2)), torch.nn.Parameter(drawn(70))]
    opt = ScheduleFreeSPS([{"params": params[:1]}, {"params": params[1:], "factor": 0.0}], **path)
    stepped(params, opt, 0, 3)
    assert float(opt.param_groups[1]["g_sq"]) == pytest.approx(70, rel=0.5)  # Adam's directions are about 1


@EACH
def test_a_point_goes_on_towards_its_average_when_its_factor_becomes_zero(path):
    found = []
    for own in ({"fused": False}, path):
        params = [torch.nn.Parameter(drawn(70, 2)), torch.nn.Parameter(drawn(70))]
        opt = ScheduleFreeSPS([{"params": [p]} for p in params], **own)
        stepped(params, opt, 0, 3)
        opt.param_groups[1]["lr"] = 0.0
        before = params[1].detach().clone()
        stepped(params, opt, 3, 5)
        found.append([p.detach() for p in params])
    assert not torch.equal(params[1], before)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@EACH
@pytest.mark.parametrize("tensor", [False, True])
def test_with_the_factor_zero_nothing_moves_onto_a_constraint(path, tensor):
    params = [torch.nn.Parameter(drawn(70, 2)), torch.nn.Parameter(drawn(70, 3))]
    groups = [{"params": params[:1], "factor": 0.0, "regularizer": NonNegative()}, {"params": params[1:]}]
    opt, start = ScheduleFreeSPS(groups, **path), params[0].detach().clone()
    if tensor:
        opt.param_groups[0]["lr"] = torch.tensor(0.0)
    stepped(params, opt, 0, 3)
    assert torch.equal(params[0], start)
    opt.eval()
    assert torch.equal(params[0], start)


# Limits


@EACH
def test_a_move_that_is_shortened_a_lot_keeps_its_digits(path):
    p = torch.nn.Parameter(drawn(70, dtype=torch.float32))
    start, g = p.detach().double(), drawn(70, seed=1, dtype=torch.float32)
    opt = ProxSPS([p], lr=1e8, lower_bound=None, regularizer=L1(1e-6), max_move=0.01, **path)
    p.grad = g
    opt.step(loss=1.0)
    z = start - 1e8 * g.double()
    move = z.sign() * (z.abs() - 100).clamp(min=0) - start
    want = (start + 0.01 * move / move.norm()).float()
    torch.testing.assert_close(p.detach(), want, rtol=0, atol=1e-6)
