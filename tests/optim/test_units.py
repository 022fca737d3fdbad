"""Groups that have slices of several tensors: the kernels take the step that the prox of the joint vector would take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxsps.optim import ProxSGD, ProxSPS
from proxsps.regularizers import L2Ball
from proxsps.regularizers.units import UnitLasso, UnitTensor

SHAPES = [(6, 3, 3, 3), (6,), (5, 6), (6,)]
IDS = np.array([0, 1, 2, 3, -1, 4])


def unit_lasso(lam=0.4):
    columns = UnitTensor(SHAPES[2], 1, IDS)
    return UnitLasso(
        lam, (UnitTensor(SHAPES[0], 0, IDS), UnitTensor(SHAPES[1], 0, IDS), columns, UnitTensor((6,), 0, IDS))
    )


def stepped(phi, gap, fused, kit, method=ProxSPS, dtype=torch.float64, **options):
    params = kit.drawn(*SHAPES, (7, 2), seed=3, dtype=dtype)
    for p in params:
        p.grad += 0.5 * p.detach()
    opt = method(
        [{"params": params[:4], "regularizer": phi}, {"params": params[4:], "weight_decay": 0.1}],
        lr=0.7, fused=fused, **options,
    )  # fmt: skip
    opt.step(loss=gap)
    return params, opt.last_step


@pytest.mark.parametrize("gap", [0.5, 40.0, 1e4])
@pytest.mark.parametrize("phi", [unit_lasso(), L2Ball(2.0, joint=True)], ids=["units", "ball"])
@pytest.mark.parametrize("method", [ProxSPS, ProxSGD])
def test_kernels_take_the_step_of_the_joint_prox(phi, gap, method, kit):
    fast, report = stepped(phi, gap, True, kit, method)
    plain, wanted = stepped(phi, gap, False, kit, method)
    assert report.branch_name == wanted.branch_name
    for x, y in zip(fast, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)  # the search stops at 1e-12 of the gap
    torch.testing.assert_close(report.tau, wanted.tau, rtol=1e-9, atol=0)


def test_all_branches_are_met(kit):
    branches = {stepped(unit_lasso(), gap, True, kit)[1].branch_name for gap in (0.5, 40.0, 1e4)}
    assert branches == {"truncated", "inside", "capped"}


def test_dead_units_are_zero_in_all_their_tensors_and_others_are_not_touched_by_the_penalty(kit):
    (conv, scale, matrix, shift, _), _ = stepped(unit_lasso(lam=3.0), 1e4, True, kit, dtype=torch.float32)
    dead = [i for i in range(6) if scale[i] == 0]
    assert dead
    assert 4 not in dead  # a slice without a unit
    for i in dead:
        assert not conv[i].any()
        assert not matrix[:, i].any()
        assert not shift[i]


@pytest.mark.parametrize("phi", [unit_lasso(), L2Ball(2.0, joint=True)], ids=["units", "ball"])
def test_a_limit_on_the_move_is_kept(phi, kit):
    fast, report = stepped(phi, 40.0, True, kit, max_move=0.3)
    plain, _ = stepped(phi, 40.0, False, kit, max_move=0.3)
    assert report.relaxation < 1
    for x, y in zip(fast, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
