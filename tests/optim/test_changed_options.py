"""What users and schedulers change between steps: numbers in groups, dtypes of parameters, graphs that are kept."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.regularizers import L1, GroupLasso

SHAPES = ((13, 5), (67,))
METHODS = {
    "ProxSPS": (ProxSPS, {"weight_decay": 0.1}),
    "momentum": (ProxSPS, {"momentum": 0.9}),
    "no lr": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "adam": (ProxSPSAdam, {}),
    "SPS": (SPS, {}),
    "DecSPS": (DecSPS, {}),
    "ProxSGD": (ProxSGD, {}),
}
EVERY = pytest.mark.parametrize("method", METHODS)
PATHS = pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "plain", "device"])


def made(kit, method, dtype=torch.float32, **more):
    cls, options = METHODS[method]
    params = kit.drawn(*SHAPES, dtype=dtype)
    opt = cls([{"params": [p]} for p in params], **options, **more)
    opt.step(loss=0.9)
    return params, opt


def everything(opt, params):
    numbers = [
        value for group in opt.param_groups for value in group.values() if isinstance(value, (float, torch.Tensor))
    ]
    return copy.deepcopy([[p.detach() for p in params], [opt.state[p] for p in params], numbers])


def same(one, two):
    return str(one) == str(two)


# -- numbers ----------------------------------------------------------------------------------------------------------


@PATHS
@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, None])
def test_a_number_out_of_range_is_an_error_before_anything_changes(method, bad, path, kit):
    params, opt = made(kit, method, **path)
    found = [
        key for key in ("lr", "weight_decay", "momentum", "betas", "eps", "c", "c0", "max_move") if key in opt.defaults
    ]
    for key in found:
        value = (bad, 0.999) if key == "betas" else bad
        if value is None and key == "max_move":
            continue
        for group in opt.param_groups[(key in ("lr", "weight_decay")) :]:  # the others are the same in all groups
            group[key] = value
        before = everything(opt, params)
        with pytest.raises(ValueError, match=rf"{key}.*got .*It is in parameter group \d.*Nothing was changed"):
            opt.step(loss=0.9)
        assert same(everything(opt, params), before)
        for group in opt.param_groups:
            group[key] = opt.defaults[key]
    opt.step(loss=0.9)


@EVERY
def test_a_scheduler_that_sets_such_a_rate(method, kit):
    params, opt = made(kit, method)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1.0 if k < 2 else math.nan)
    opt.step(loss=0.9)
    scheduler.step()
    opt.step(loss=0.9)
    scheduler.step()
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got nan\. It is in parameter group 0"):
        opt.step(loss=0.9)
    assert all(p.isfinite().all() for p in params)


@EVERY
@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_rate_that_a_device_holds_skips_the_step(method, bad, kit):
    """It cannot be read there without waiting."""
    params, opt = made(kit, method, capturable=True)
    opt.param_groups[1]["lr"] = torch.tensor(1.0)
    opt.step(loss=0.9)
    assert opt.last_step.branch_name != "skipped"
    opt.param_groups[1]["lr"].fill_(bad)
    before = everything(opt, params)
    opt.step(loss=0.9)
    assert opt.last_step.branch_name == "skipped"
    assert same(everything(opt, params), before)
    opt.param_groups[1]["lr"].fill_(1.0)
    opt.step(loss=0.9)
    assert opt.last_step.branch_name != "skipped"


def test_betas_of_a_list_are_those_of_a_tuple(kit):
    points = []
    for betas in ([0.8, 0.99], (0.8, 0.99)):
        a, b = kit.drawn((5,), (6,))
        opt = ProxSPSAdam([{"params": [a], "betas": betas}, {"params": [b]}], betas=(0.8, 0.99))
        opt.step(loss=0.9)
        opt.add_param_group({"params": kit.drawn((3,)), "betas": list(betas)})
        opt.step(loss=0.9)
        points.append(kit.flat([a, b]))
    assert torch.equal(*points)
    with pytest.raises(ValueError, match="betas cannot differ between parameter groups"):
        opt.add_param_group({"params": kit.drawn((4,)), "betas": [0.9, 0.99]})


# -- dtypes -----------------------------------------------------------------------------------------------------------


@PATHS
@EVERY
@pytest.mark.parametrize("phi", [None, L1(0.01)], ids=repr)
def test_state_follows_parameters_into_another_dtype(method, phi, path, kit):
    """As if it had been loaded into an optimizer of such parameters, which torch converts as well."""
    cls, options = METHODS[method]
    options = options if phi is None else {**options, "weight_decay": 0.0, "regularizer": phi}
    model = torch.nn.ParameterList(kit.drawn(*SHAPES, dtype=torch.float32))
    opt = cls(model.parameters(), **options, **path)

    def step(opt, params, k):
        for p, q in zip(params, kit.drawn(*SHAPES, seed=k, dtype=torch.float32), strict=True):
            p.grad = 0.3 * p.detach() + 0.1 * q.detach().to(p.dtype)
        opt.step(loss=0.9)

    for k in range(2):
        step(opt, model, k)
    for k, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16, torch.float32)):
        model.to(dtype)
        params = [torch.nn.Parameter(p.detach().clone()) for p in model]
        other = cls(params, **options, **path)
        other.load_state_dict(opt.state_dict())
        step(opt, model, k + 2)
        step(other, params, k + 2)
        assert all(map(torch.equal, model, params))
        for p, q in zip(model, params, strict=True):
            for key, value in other.state[q].items():
                assert value.dtype is opt.state[p][key].dtype
                assert torch.equal(value, opt.state[p][key])


# -- graphs -----------------------------------------------------------------------------------------------------------


@PATHS
@EVERY
@pytest.mark.parametrize("phi", [None, L1(0.01), GroupLasso(0.01)], ids=repr)
def test_backward_through_the_graph_of_before_the_step_raises(method, phi, path, kit):
    """As with torch's optimizers: its values are no longer those of the parameters."""
    cls, options = METHODS[method]
    options = options if phi is None else {**options, "weight_decay": 0.0, "regularizer": phi}
    params = kit.drawn(*SHAPES, dtype=torch.float32)
    opt = cls(params, **options, **path)
    loss = sum(p.square().sum() for p in params)
    loss.backward(retain_graph=True)
    versions = [p._version for p in params]
    opt.step(loss=0.9)
    assert all(p._version > version for p, version in zip(params, versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
