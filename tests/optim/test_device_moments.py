"""Averaged models without a look at any number: the same steps and the same state as on the host."""

from __future__ import annotations

import pytest
import torch

from proxsps.optim import ProxSPS, ProxSPSAdam
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso

SHAPES = ((13, 5), (67,), (3, 4, 2), ())
VARIANTS = {
    "momentum": (ProxSPS, {"lr": 0.5, "momentum": 0.9}),
    "matched": (ProxSPS, {"lr": 50.0, "cap": "matched"}),
    "matched momentum": (ProxSPS, {"lr": 50.0, "cap": "matched", "momentum": 0.9, "distance_cap": True}),
    "no lr": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "no lr, proximal": (ProxSPS, {"lr": None, "cap": "proximal"}),
    "no bound": (ProxSPS, {"lr": None, "lower_bound": None, "momentum": 0.5}),
    "adam": (ProxSPSAdam, {}),
    "adam, lr": (ProxSPSAdam, {"lr": 0.05, "cap": "proximal", "max_move": 0.3}),
    "adam, no eps": (ProxSPSAdam, {"lr": 1.0, "eps": 0.0}),
}
PENALTIES = {
    "none": {},
    "decay": {"weight_decay": 0.3},
    "L2": {"regularizer": L2(0.3)},
    "L1": {"regularizer": L1(0.05)},
    "ElasticNet": {"regularizer": ElasticNet(0.05, 0.1)},
    "Box": {"regularizer": Box(-1.0, 1.2)},
    "GroupLasso": {"regularizer": GroupLasso(0.1)},
}


def make(kit, variant, penalty, dtype=torch.float64, groups=1, **more):
    cls, options = VARIANTS[variant]
    params = kit.drawn(*SHAPES, dtype=dtype)
    for p in params if penalty == "Box" else ():
        p.data.clamp_(-1.0, 1.2)
    if groups == 1:
        return params, cls(params, **options, **PENALTIES[penalty], **more)
    parts = [{"params": params[:2], **PENALTIES[penalty]}, {"params": params[2:], "weight_decay": 0.2}]
    opt = cls(parts, **options, **more)
    opt.param_groups[1]["lr"] = 0.5 * opt.param_groups[1]["lr"]
    return params, opt


def steps(kit, params, opt, count=5, missing=True):
    """Steps along a fixed sequence of gradients; some parameters have none in some steps."""
    for k in range(count):
        for p, q in zip(params, kit.drawn(*SHAPES, seed=k + 1, dtype=params[0].dtype), strict=True):
            p.grad = 0.3 * p.detach() + 0.1 * q.detach()
        if missing and k == 2:
            params[1].grad = None
        if missing and k == 3:
            params[0].requires_grad_(False).grad = None
        opt.step(loss=torch.tensor(0.7 - 0.1 * k))
        params[0].requires_grad_(True)


def states(opt):
    return {
        (i, key): value
        for i, p in enumerate(p for group in opt.param_groups for p in group["params"])
        for key, value in opt.state[p].items()
    }


# Every variant with every penalty, and each of them with one group and with two.
PAIRS = [(v, p, 1 + (i + j) % 2) for i, v in enumerate(VARIANTS) for j, p in enumerate(PENALTIES)]


@pytest.mark.parametrize(("variant", "penalty", "groups"), PAIRS)
def test_host_and_device_take_the_same_steps(variant, penalty, groups, kit):
    runs = []
    for capturable in (False, True):
        params, opt = make(kit, variant, penalty, groups=groups, capturable=capturable)
        steps(kit, params, opt)
        runs.append((params, opt))
    for p, q in zip(runs[0][0], runs[1][0], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-8)
    one, two = (states(opt) for _, opt in runs)
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-7, atol=1e-8, check_dtype=True)
    for key in ("model_value", "model_offset", "k", "reach", "g_sq"):
        if key in runs[0][1].param_groups[0]:
            got = [float(opt.param_groups[-1][key]) for _, opt in runs]
            assert got[0] == pytest.approx(got[1], rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("variant", ["matched", "no lr", "adam"])
def test_a_point_outside_of_its_constraint_is_brought_back(variant, capturable, kit):
    """The linear model may then jump below its bound at once, so that it has no zero along the ray."""
    for sign in (1.0, -1.0):
        cls, options = VARIANTS[variant]
        (p,) = kit.drawn((70,))
        p.grad = sign * p.detach().sign()
        opt = cls([p], regularizer=Box(-0.1, 0.1), capturable=capturable, **options)
        opt.step(loss=torch.tensor(0.5))
        assert p.abs().max() <= 0.1
