"""Caps that are far too large, so that u is tiny: the step ends where the model reaches its bound, on every path."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from scipy.optimize import brentq

from proxsps import L1, Box, L1Ball, L2Ball, LInfBall, NonNegative, ProxSPS, Simplex

PATHS = {"torch": {"fused": False}, "kernels": {}, "device": {"capturable": True}}
EVERY_PATH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
REGULARIZERS = [NonNegative(), Box(-0.5, 0.5), LInfBall(1.0), L2Ball(5.0), L1Ball(60.0), L1(1e-12)]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-8}


def draw(phi, dtype, seed=0):
    """A feasible point, its gradient and its loss."""
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(300, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    w = torch.nn.Parameter(phi.prox(x, 1.0))
    loss = 0.01 * ((w - target) ** 4).sum()
    loss.backward()
    return w, loss.detach()


def height(phi, x, d, gap, alpha, tau):
    """The linear model above its bound after a step tau, in f64."""
    x, d = x.double(), d.double()
    return float(gap) + float((d * (phi.prox(x - tau * d, alpha) - x)).sum())


@EVERY_PATH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("phi", REGULARIZERS, ids=repr)
def test_the_model_reaches_its_bound(phi, dtype, path):
    for lr in (1e3, 1e6, 1e8):
        w, loss = draw(phi, dtype)
        x = w.detach().clone()
        along = partial(height, phi, x, w.grad, loss, lr)
        root = brentq(along, 0, 1e3, xtol=1e-14)
        opt = ProxSPS([w], lr=lr, regularizer=phi, **path)
        opt.step(loss=loss)
        last = opt.last_step
        assert last.branch_name == "inside"
        assert float(last.tau[0]) == pytest.approx(root, rel=TOLERANCE[dtype])
        h = along(float(last.tau[0]))
        assert abs(h) <= TOLERANCE[dtype] * float(loss)
        assert float(last.model_gap) == pytest.approx(h, abs=3e-6 * float(loss))


@EVERY_PATH
def test_the_reported_height_is_that_of_the_new_point(path):
    """Also where a fixed number of rounds has not come to an end."""
    for seed in range(5):
        w, loss = draw(Box(-0.5, 0.5), torch.float64, seed)
        x = w.detach().clone()
        opt = ProxSPS([w], lr=1e11, regularizer=Box(-0.5, 0.5), **path)
        opt.step(loss=loss)
        h = float(loss) + float((w.grad * (w.detach() - x)).sum())
        assert float(opt.last_step.model_gap) == pytest.approx(h, abs=1e-12)


@EVERY_PATH
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("phi", [Box(-0.1, 0.1), L2Ball(0.5), L1Ball(1.0), Simplex(1.0)], ids=repr)
@pytest.mark.parametrize("loss", [1.0, 300.0])
def test_a_matched_step_from_outside_a_constraint_restores_it_and_does_no_more(phi, loss, dtype, path):
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(20, generator=generator, dtype=torch.float64) for _ in range(2))
    w = torch.nn.Parameter((3 * x).to(dtype))
    w.grad = (x + 0.1 * noise).to(dtype)
    x = w.detach().clone()
    inside = float(torch.dot(w.grad, phi.prox(x, 1.0) - x))
    opt = ProxSPS([w], lr=1.0, cap="matched", regularizer=phi, **path)
    opt.step(loss=min(loss, -0.5 * inside))  # at once below its bound
    assert float(opt.last_step.u) < 1e-10
    torch.testing.assert_close(w.detach(), phi.prox(x, 1.0))
    assert float(opt.last_step.model_gap) == pytest.approx(min(loss, -0.5 * inside) + inside, rel=1e-5)
