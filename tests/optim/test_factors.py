"""Factors on steps without a learning rate: a factor is a factor, and schedules do what they do elsewhere."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from files import through_disk
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as schedulers

from proxsps import L2, CoolDown, ProxSPS, ProxSPSAdam
from proxsps.core.distance import distance_cap, start_travel, update_travel

MAKERS = {
    "identity": lambda params, **own: ProxSPS(params, None, momentum=0.9, **own),
    "plain": lambda params, **own: ProxSPS(params, None, **own),
    "adam": ProxSPSAdam,
}
EVERY = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
PATHS = pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "plain", "device"])


def walk(make, factors, draw, **options):
    """Points of a run whose gradients do not depend on it."""
    p = torch.nn.Parameter(torch.zeros(70, dtype=torch.float64))
    opt, points = make([p], lower_bound=None, **options), []
    for k, factor in enumerate(factors):
        opt.param_groups[0]["lr"] = factor
        p.grad = draw(k)
        opt.step(loss=1.0)
        points.append(p.detach().clone())
    return torch.stack(points)


def drift(k):
    return torch.linspace(-1, 1, 70, dtype=torch.float64)


def noise(k):
    return torch.randn(70, dtype=torch.float64, generator=torch.Generator().manual_seed(k))


@EVERY
@PATHS
@pytest.mark.parametrize("draw", [drift, noise])
@pytest.mark.parametrize("factor", [0.125, 4.0])  # powers of two, with which nothing is rounded
def test_a_constant_factor_multiplies_all_moves(make, path, draw, factor):
    one, other = (walk(make, [f] * 30, draw, **path) for f in (1.0, factor))
    assert one.abs().max() > 0
    assert torch.equal(other, factor * one)


@EVERY
@PATHS
def test_a_schedule_may_begin_at_zero(make, path):
    """As if the run began later; only averages of gradients go on, which do not change in a constant drift."""
    late, one = walk(make, [0.0] * 10 + [1.0] * 20, drift, **path), walk(make, [1.0] * 20, drift, **path)
    assert torch.count_nonzero(late[:10]) == 0
    torch.testing.assert_close(late[10:], one, rtol=1e-9, atol=0)


def test_in_pure_noise_a_schedule_changes_the_time_and_nothing_else():
    """r^2 = K^(c^2), with K the sum of squared factors: steps of noise add their squares to r^2."""

    def distances(factors):
        travel, r_sq, out = start_travel(np.float64(0.0)), 0.0, []
        for f in factors:
            travel = update_travel(travel, np.float64(r_sq), np.float64(1.0), f)
            r_sq += float(f * distance_cap(travel)) ** 2
            out.append((float(travel.weight), r_sq))
        return np.log(out).T

    T = 4000
    one, flat = distances(np.ones(T)), distances(np.full(T, 0.1))
    np.testing.assert_allclose(flat, one + 2 * np.log(0.1), atol=1e-9)
    slope = np.polyfit(*one[:, T // 10 :], 1)[0]
    assert slope == pytest.approx(0.85**2, abs=0.01)
    warm = distances(np.concatenate([np.linspace(0.01, 1, T // 10), np.ones(T)]))
    later = np.interp(warm[0, T // 4 :], *one) - warm[1, T // 4 :]
    assert np.ptp(later[: T // 2]) < 0.02  # the same curve, but for a constant


@PATHS
def test_a_group_at_rest_has_no_part_in_the_distance_cap(path, kit):
    """The same moves as if there was no such group; it starts at 0, because its norm is a part of ||x_0||."""
    a, b = kit.drawn((70,), (34,))
    with torch.no_grad():
        b.zero_()
    alone = copy.deepcopy(a)
    opt, other = ProxSPSAdam([{"params": [a]}, {"params": [b], "factor": 0.0}], **path), ProxSPSAdam([alone], **path)
    for k in range(6):
        a.grad = alone.grad = noise(k)
        b.grad = 100 * noise(k)[:34]
        opt.step(loss=1e9)
        other.step(loss=1e9)
        assert torch.equal(a, alone)
    assert torch.count_nonzero(b) == 0


@PATHS
def test_a_group_at_rest_with_a_centre_is_part_of_the_model(path, kit):
    """The model of the loss, which its centre does not change, because its regulariser has no part in a step."""
    tau = []
    for center in (None, 0.5):
        a, b = kit.drawn((70,), (34,))
        resting = {"params": [b], "regularizer": L2(0.3, center=center), "factor": 0.0}
        opt = ProxSPSAdam([{"params": [a]}, resting], **path)
        for k in range(4):
            a.grad, b.grad = noise(k) + a.detach(), noise(k)[:34]
            opt.step(loss=5.0)
        tau.append(opt.last_step.tau)
    assert tau[0][0] > 0
    torch.testing.assert_close(*tau)


def test_a_tensor_as_factor_is_the_same_step(kit):
    """In the first step all factors are 0: the average of squared gradients then has those of all groups."""
    runs = []
    for tensors in (False, True):
        a, b = kit.drawn((70,), (34,))
        opt = ProxSPSAdam([{"params": [a]}, {"params": [b]}], capturable=True)
        for k in range(4):
            for group, factor in zip(opt.param_groups, (0.5 * (k > 0), 0.1 * (k > 0)), strict=True):
                group["lr"] = torch.tensor(factor) if tensors else factor
            a.grad, b.grad = noise(k), noise(k)[:34]
            opt.step(loss=1e9)
        runs.append([a, b])
    torch.testing.assert_close(*runs, rtol=1e-6, atol=0)  # the factors are f32


# The option of the constructor


@EVERY
def test_a_factor_for_all_groups(make, kit):
    a, b = kit.drawn((70,), (34,))
    opt = make([{"params": [a]}, {"params": [b], "factor": 0.5}], factor=0.1)
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.5]
    assert make([a]).param_groups[0]["lr"] == 1
    scheduler = schedulers.LinearLR(opt, 0.5, total_iters=2)
    assert scheduler.get_last_lr() == [0.05, 0.25]


@pytest.mark.parametrize("cls", [ProxSPS, ProxSPSAdam])
def test_a_factor_beside_a_learning_rate_is_an_error(cls, kit):
    with pytest.raises(ValueError, match=rf"{cls.__name__} got lr=0.1 and factor=0.5.*Pass one of the two"):
        cls(kit.drawn((3,)), lr=0.1, factor=0.5)
    with pytest.raises(ValueError, match="factor must be"):
        cls(kit.drawn((3,)), lr=None, factor=-0.5)


# State


@EVERY
@PATHS
def test_a_checkpoint_from_before_factors_were_counted_goes_on(make, path, kit):
    (p,), (q,) = kit.drawn((70,)), kit.drawn((70,))
    opt = make([p], **path)
    for k in range(4):
        p.grad = noise(k)
        opt.step(loss=1e9)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        del group["first_reach"], group["factors_sq"]
    again = make([q], **path)
    again.load_state_dict(through_disk(saved))
    assert float(again.param_groups[0]["factors_sq"]) == 4
    with torch.no_grad():
        q.copy_(p)
    for k in range(4, 8):
        p.grad = q.grad = noise(k)
        opt.step(loss=1e9)
        again.step(loss=1e9)
        assert torch.equal(p, q)
    assert float(again.param_groups[0]["factors_sq"]) == float(again.param_groups[0]["k"]) == 8


# Training


def trained(make, schedule=None, factor=1.0, steps=400):
    """The loss of a small network after some epochs, over its loss at the start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1024, 8, generator=generator)
    y = 3 * torch.sin(3.0 * x[:, :1] * x[:, 1:2]) + 4 * (x[:, 2:3] - 0.5) ** 2 + x[:, 3:4] - 2.5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    opt = make(model.parameters(), factor=factor)
    scheduler, start = schedule and schedule(opt), mse_loss(model(x), y).item()
    for _ in range(steps):
        batch = torch.randint(1024, (32,), generator=generator)
        opt.zero_grad()
        loss = mse_loss(model(x[batch]), y[batch])
        loss.backward()
        opt.step(loss=loss)
        if scheduler:
            scheduler.step()
    return mse_loss(model(x), y).item() / start


def warm_up_and_cosine(opt):
    parts = [schedulers.LinearLR(opt, 0.01, total_iters=20), schedulers.CosineAnnealingLR(opt, 380)]
    return schedulers.SequentialLR(opt, parts, [20])


SCHEDULES = {
    "CoolDown": lambda opt: CoolDown(opt, 400),
    "cosine": lambda opt: schedulers.CosineAnnealingLR(opt, 400),
    "warm-up and cosine": warm_up_and_cosine,
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, 1.0, total_steps=401, cycle_momentum=False),
}


@pytest.mark.parametrize("make", [MAKERS["identity"], MAKERS["adam"]], ids=["identity", "adam"])
def test_training_with_schedules_and_factors(make):
    constant = trained(make)
    found = {name: trained(make, schedule) for name, schedule in SCHEDULES.items()}
    found |= {f"factor {f}": trained(make, factor=f) for f in (0.3, 0.1)}
    assert constant < 0.25
    assert all(value < 2.5 * constant for value in found.values()), (constant, found)


# PyTorch's own test that an optimizer goes in the right direction, with the schedulers of its SGD

RIGHT = {
    "none": [],
    "StepLR, LinearLR": [lambda o: schedulers.StepLR(o, 10, 0.9), lambda o: schedulers.LinearLR(o, 0.4, total_iters=4)],
    "StepLR, plateau": [lambda o: schedulers.StepLR(o, 10, 0.9), schedulers.ReduceLROnPlateau],
    "PolynomialLR": [lambda o: schedulers.PolynomialLR(o, total_iters=4, power=0.9)],
}


@pytest.mark.parametrize("makers", RIGHT.values(), ids=RIGHT)
@EVERY
def test_steps_go_in_the_right_direction_with_schedulers(make, makers):
    for seed in range(5):
        assert directed(make, makers, seed, 20) < 1


@EVERY
def test_without_a_bound_a_run_may_swing_and_settles(make):
    """Momentum carries it past the minimum of a quadratic without noise: nothing else limits the distance cap there."""
    for seed in range(5):
        assert directed(lambda p: make(p, lower_bound=None), [], seed, 200) < 0.05


def directed(make, makers, seed, steps):
    """The loss after some steps, over that at the start."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((10, 5), (10,), (5,)))
    params = [torch.nn.Parameter(weight), torch.nn.Parameter(bias)]
    opt = make(params)
    scheduled = [maker(opt) for maker in makers]

    def closure():
        opt.zero_grad()
        loss = (params[0].mv(x) + params[1]).pow(2).sum()
        loss.backward()
        return loss

    start = closure().item()
    for _ in range(steps):
        loss = opt.step(closure).item()
        for scheduler in scheduled:
            scheduler.step(*[loss] * isinstance(scheduler, schedulers.ReduceLROnPlateau))
    return closure().item() / start
