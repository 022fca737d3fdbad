"""Gradient scalers and autocast: the loss is the unscaled one, and skipped steps stay skipped."""

from __future__ import annotations

import math

import pytest
import torch
from torch.amp import GradScaler
from torch.nn.functional import mse_loss

from proxsps.optim import ProxSPS

SCALE = 2.0**14  # a power of two: scaling up and down again is exact


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to(dtype)


def batch(k):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(12, 5, generator=generator)
    return x, x[:, :2].sin()


def points(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def pair(case, **options):
    """Two optimizers on two copies of a model."""
    models = network(), network()
    return [(model, case.make(model.parameters(), **options)) for model in models]


@pytest.mark.parametrize("watched", [True, False])
def test_a_scaled_step_is_the_plain_step(case, watched):
    (scaled, one), (plain, two) = pair(case, weight_decay=1e-3)
    scaler = GradScaler("cpu", init_scale=SCALE)
    for k in range(3):
        x, y = batch(k)
        loss = mse_loss(scaled(x), y)
        if watched:
            one.watch(loss)
        scaler.scale(loss).backward()
        scaler.step(one) if watched else scaler.step(one, loss=loss)
        scaler.update()
        one.zero_grad()
        loss = mse_loss(plain(x), y)
        loss.backward()
        two.step(loss=loss)
        two.zero_grad()
        assert torch.equal(points(scaled), points(plain))


def test_a_skipped_step_changes_nothing_and_its_loss_is_forgotten(case):
    (scaled, one), (plain, two) = pair(case)
    scaler = GradScaler("cpu", init_scale=SCALE)
    for k in range(3):
        x, y = batch(k)
        before = points(scaled)
        one.zero_grad()
        loss = one.watch(mse_loss(scaled(x), y) * (math.inf if k == 1 else 1.0))
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.update()
        assert torch.equal(points(scaled), before) == (k == 1)
        if k != 1:
            two.zero_grad()
            two.watch(mse_loss(plain(x), y)).backward()
            two.step()
    assert scaler.get_scale() == SCALE / 2
    assert torch.equal(points(scaled), points(plain))


def test_micro_batches_under_a_scaler_are_one_batch(case):
    (parts, one), (whole, two) = pair(case)
    scaler = GradScaler("cpu", init_scale=SCALE)
    x, y = batch(0)
    for xs, ys in zip(x.split([1, 4, 7]), y.split([1, 4, 7]), strict=True):
        loss = one.watch(mse_loss(parts(xs), ys), weight=len(xs))
        scaler.scale(loss * len(xs) / len(x)).backward()
    scaler.step(one)
    loss = mse_loss(whole(x), y)
    loss.backward()
    two.step(loss=loss)
    torch.testing.assert_close(points(parts), points(whole), rtol=0, atol=1e-6)


def test_a_closure_and_a_scaler_are_refused_by_torch(case):
    _, (model, opt) = pair(case)
    scaler = GradScaler("cpu")
    scaler.scale(mse_loss(model(batch(0)[0]), batch(0)[1])).backward()
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        scaler.step(opt, closure=lambda: 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_makes_progress_with_full_precision_parameters(case, dtype):
    model = network()
    opt = case.make(model.parameters())
    scaler = GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16)
    losses = []
    for _ in range(40):
        opt.zero_grad()
        x, y = batch(0)
        with torch.autocast("cpu", dtype=dtype):
            loss = opt.watch(mse_loss(model(x).float(), y))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
        # That of an averaged model is above the average of the models so far, not above this loss alone.
        assert case.averaged or float(opt.last_step.gap) == loss.item()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert losses[-1] < 0.5 * losses[0]


def test_half_precision_parameters_and_gradients_are_stepped_in_single(case, kit):
    halves = kit.drawn((4, 3), (7,), dtype=torch.float16)
    singles = [torch.nn.Parameter(p.detach().float()) for p in halves]
    for p, q in zip(halves, singles, strict=True):
        q.grad = p.grad.float()
    for params in (halves, singles):
        case.make(params, weight_decay=0.1).step(loss=torch.tensor(0.7, dtype=torch.float16))
    # 2^-11 is the rounding of entries of size one to half precision.
    torch.testing.assert_close(kit.flat(halves).float(), kit.flat(singles), rtol=2**-10, atol=2**-11)


def test_a_watched_scaled_loss_makes_the_step_too_long(kit):
    # The mistake that the documentation warns of: the loss times the scale, the gradient not.
    steps = []
    for scale in (1.0, SCALE):
        (x,) = kit.drawn((6,))
        opt = ProxSPS([x], lr=1e9)
        opt.step(loss=0.5 * scale)
        steps.append(float(opt.last_step.tau[0]))
    assert steps[1] == pytest.approx(SCALE * steps[0])
