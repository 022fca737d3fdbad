"""Steps in closed form are those of the general path on the host, bit by bit."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("numba")

from proxsps.optim import ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS

SHAPES = [(7, 5), (129,), (3, 70), (5,)]
METHODS = {
    "lr": (ProxSPS, {"lr": 0.5, "weight_decay": 0.1}),
    "matched": (ProxSPS, {"lr": 0.5, "weight_decay": 0.1, "cap": "matched"}),
    "distance cap and lr": (ProxSPS, {"lr": 0.5, "distance_cap": True}),
    "no lr": (ProxSPS, {"weight_decay": 0.1}),
    "momentum": (ProxSPS, {"lr": 0.5, "momentum": 0.9}),
    "momentum, no lr": (ProxSPS, {"momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (ProxSPSAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adam, no lr": (ProxSPSAdam, {"weight_decay": 0.1}),
    "Adam, proximal": (ProxSPSAdam, {"lr": 1e-2, "cap": "proximal"}),
    "schedule-free": (ScheduleFreeSPS, {"weight_decay": 0.1}),
    "schedule-free, no decay": (ScheduleFreeSPS, {}),
    "without a bound": (ProxSPSAdam, {"lower_bound": None}),
    "linear": (ProxSGD, {"lr": 1e-2}),
}


def usual(opt, k):
    """Nothing happens."""


def rates(opt, k):
    """A schedule, with groups of different rates."""
    for i, group in enumerate(opt.param_groups):
        group["lr"] *= (0.5, 2.0, 1.0)[(k + i) % 3]


def stop_and_go(opt, k):
    """Rates of 0: first of one group, then of all."""
    for i, group in enumerate(opt.param_groups):
        group.setdefault("initial", group["lr"])
        group["lr"] = 0.0 if (k == 3 and i == 0) or k == 4 else group["initial"]


def trajectory(monkeypatch, method, dtype, event, closed, loss=lambda k: 3.0 / (k + 1), scale=1.0):
    cls, options = METHODS[method]
    if not closed:
        monkeypatch.setattr("proxsps.optim.kernels.closed_form.ClosedForm", lambda *_: None)
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=random, dtype=torch.float64).to(dtype)) for s in SHAPES]
    opt = cls([{"params": params[:2]}, {"params": params[2:]}], **options)
    seen = []
    for k in range(8):
        event(opt, k)
        for p in params:
            p.grad = scale * torch.randn(p.shape, generator=random, dtype=torch.float64).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of skipped steps
            opt.step(loss=loss(k))
        numbers = [v for g in opt.param_groups for v in g.values() if isinstance(v, float)]
        seen += [*[p.detach().clone() for p in params], torch.tensor(numbers, dtype=torch.float64)]
        seen.append(torch.cat([number.double().reshape(-1) for number in opt.last_step]))
    monkeypatch.undo()
    assert (opt._plan.closed_form is not None) == closed
    return seen


@pytest.mark.parametrize("event", [usual, rates, stop_and_go], ids=lambda event: event.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_the_general_path(monkeypatch, method, dtype, event):
    one, other = (trajectory(monkeypatch, method, dtype, event, closed) for closed in (True, False))
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["no lr", "Adam, no lr", "schedule-free", "lr"])
def test_losses_that_may_not_be_used_change_nothing(monkeypatch, method):
    def loss(k):
        return {3: math.nan, 4: -1.0, 5: math.inf}.get(k, 2.0)

    seen = trajectory(monkeypatch, method, torch.float32, usual, True, loss)
    per_step = len(SHAPES) + 2
    at = [seen[k * per_step : k * per_step + len(SHAPES) + 1] for k in range(8)]
    for k in (3, 4, 5):
        assert all(map(torch.equal, at[k], at[2]))
    assert not torch.equal(at[6][0], at[5][0])


@pytest.mark.parametrize("scale", [1e-12, 1e12, 1e25])
@pytest.mark.parametrize("method", ["no lr", "Adam, no lr", "schedule-free"])
def test_squares_beyond_f32_are_taken_in_doubles(monkeypatch, method, scale):
    one, other = (
        trajectory(monkeypatch, method, torch.float32, usual, closed, scale=scale) for closed in (True, False)
    )
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=4e-6, atol=1e-6, equal_nan=True)
