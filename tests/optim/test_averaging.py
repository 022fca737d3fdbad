"""The polynomial average inside torch's AveragedModel, and cool-down errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from proxsps.optim import CoolDown, ProxSPS, ProxSPSAdam, polynomial_avg_fn, polynomial_multi_avg_fn

KINDS = {
    "avg_fn": lambda **options: {"avg_fn": polynomial_avg_fn(**options)},
    "multi_avg_fn": lambda **options: {"multi_avg_fn": polynomial_multi_avg_fn(**options)},
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)).to(dtype)


def moved(model, scale=0.3):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_averaged_model_follows_the_formula(kind, dtype):
    model = network() if dtype.is_complex else network(dtype)
    if dtype.is_complex:
        model = torch.nn.Linear(13, 7, dtype=dtype)
    averaged = AveragedModel(model, **KINDS[kind]())
    averaged.update_parameters(model)
    wanted = [
        p.detach().clone().to(torch.complex128 if dtype.is_complex else torch.float64) for p in model.parameters()
    ]
    for k in range(20):
        moved(model)
        averaged.update_parameters(model)
        wanted = [
            x + 9 / (k + 10) * (p.detach().to(x.dtype) - x) for x, p in zip(wanted, model.parameters(), strict=True)
        ]
    tolerance = {torch.float64: 1e-14, torch.bfloat16: 0.05}.get(dtype, 1e-5)
    for x, p in zip(wanted, averaged.parameters(), strict=True):
        torch.testing.assert_close(p.detach().to(x.dtype), x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_and_counters_are_averaged_too(kind):
    model = network()
    averaged = AveragedModel(model, use_buffers=True, **KINDS[kind]())
    for _ in range(5):
        model(torch.randn(4, 13, dtype=torch.float64))
        averaged.update_parameters(model)
    mean = averaged.module[1].running_mean
    assert mean.isfinite().all()
    assert 0 < averaged.module[1].num_batches_tracked <= 5


@pytest.mark.parametrize("kind", KINDS)
def test_power_zero_is_the_plain_mean(kind):
    model = network()
    averaged, plain = AveragedModel(model, **KINDS[kind](power=0)), AveragedModel(model)
    for _ in range(6):
        moved(model)
        averaged.update_parameters(model)
        plain.update_parameters(model)
    for a, b in zip(averaged.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_an_average_that_was_saved_goes_on_where_it_was():
    model = network()
    first = AveragedModel(model, multi_avg_fn=polynomial_multi_avg_fn())
    for _ in range(4):
        moved(model)
        first.update_parameters(model)
    second = AveragedModel(copy.deepcopy(model), multi_avg_fn=polynomial_multi_avg_fn())
    second.load_state_dict(first.state_dict())
    moved(model)
    first.update_parameters(model)
    second.update_parameters(model)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [polynomial_avg_fn, polynomial_multi_avg_fn])
@pytest.mark.parametrize("power", [-1, float("nan"), float("inf")])
def test_a_power_that_makes_no_sense_is_an_error(make, power):
    with pytest.raises(ValueError, match="power must be a finite number >= 0"):
        make(power)


def test_cool_down_checks_its_numbers():
    opt = ProxSPS([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="total_steps must be at least 1"):
        CoolDown(opt, 0)
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\]"):
        CoolDown(opt, 10, fraction=25)


@pytest.mark.parametrize(
    "make", [lambda p, **own: ProxSPS(p, None, 1e-2, momentum=0.9, **own), ProxSPSAdam], ids=["ProxSPS", "Adam"]
)
def test_a_cool_down_scales_the_step_of_an_optimizer_without_a_learning_rate(make):
    """From the same state, the step with factor f is f times that with factor 1 but for its own square in the cap."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 13), torch.randn(64, 7)
    model = torch.nn.Linear(13, 7)
    opt = make(model.parameters(), lower_bound=None)
    scheduler = CoolDown(opt, 12, fraction=0.5)
    assert scheduler.get_last_lr() == [1.0]
    squares = 0.0
    for k in range(14):
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        full, full_opt = copy.deepcopy((model, opt))
        for copied, param in zip(full.parameters(), model.parameters(), strict=True):
            copied.grad = param.grad.clone()
        full_opt.param_groups[0]["lr"] = 1.0
        full_opt.step(loss=loss.detach())
        before = [p.detach().clone() for p in model.parameters()]
        opt.step(loss=loss)
        factor = opt.param_groups[0]["lr"]
        longer = ((squares + 1) / (squares + factor**2)) ** 0.5
        torch.testing.assert_close(opt.last_step.tau, factor * longer * full_opt.last_step.tau)
        squares += factor**2
        assert factor == pytest.approx(min(1, max(0, 12 - k) / 7))
        if k >= 12:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        scheduler.step()
