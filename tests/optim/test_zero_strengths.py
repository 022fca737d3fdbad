"""Regularisers of strength 0 and bounds at infinity: the step is that of no regulariser, on every path."""

from __future__ import annotations

import math

import pytest
import torch

from proxsps import L1, Box, ElasticNet, GroupLasso, ProxSPS, ProxSPSAdam

PATHS = {"torch": {"fused": False}, "kernels": {"fused": None}, "device": {"capturable": True}}
NOTHING = [L1(0.0), ElasticNet(0.0, 0.0), Box(-math.inf, math.inf), GroupLasso(0.0)]
METHODS = {
    "plain": (ProxSPS, {"lr": 0.1}),
    "searched": (ProxSPS, {"lr": 100.0}),
    "momentum": (ProxSPS, {"lr": 0.1, "momentum": 0.9}),
    "matched": (ProxSPS, {"lr": 100.0, "cap": "matched"}),
    "Adam": (ProxSPSAdam, {"lr": 0.1}),
    "Adam, proximal": (ProxSPSAdam, {"lr": 0.1, "cap": "proximal"}),
}


def test_a_step_by_hand():
    """x = 2, g = 4, lr = 0.1."""
    for count in (1, 2):
        params = [torch.nn.Parameter(torch.full((5,), 2.0)) for _ in range(count)]
        opt = ProxSPS(params, lr=0.1, regularizer=L1(0.0), fused=False)
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        opt.step(loss=loss)
        for p in params:
            torch.testing.assert_close(p.detach(), torch.full((5,), 1.6))


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("phi", NOTHING, ids=repr)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-13, 1.0, 1e10])
def test_the_step_is_that_of_no_regulariser(method, phi, path, scale, kit):
    cls, options = METHODS[method]
    points = []
    for own in (phi, None):
        params = kit.drawn((5, 7), (70,), dtype=torch.float32, scale=scale)
        opt = cls(params, regularizer=own, **options, **path)
        for k in range(2):
            opt.step(loss=0.7 + k)
        points.append(kit.flat(params))
    torch.testing.assert_close(*points, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_group_of_zero_strength_needs_no_search(path, kit):
    opt = ProxSPS(kit.drawn((5, 7)), lr=100.0, regularizer=ElasticNet(0.0, 0.3), **path)
    opt.step(loss=0.7)
    assert float(opt.last_step.evaluations) == 0
    assert opt.last_step.branch_name == "inside"
    same = ProxSPS(kit.drawn((5, 7)), lr=100.0, weight_decay=0.3, **path)
    same.step(loss=0.7)
    assert torch.equal(*(o.param_groups[0]["params"][0].detach() for o in (opt, same)))
