"""Factors on sets of tensors that have a distance cap each."""

from __future__ import annotations

import pytest
import torch

from proxsps import ScheduleFreeSPS


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("factor", [0.1, 1e-3])
def test_a_factor_on_a_set_is_a_factor_on_its_first_steps(factor: float, capturable: bool) -> None:
    """While gradients do not depend on the moves, all moves of a set are multiplied."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((33, 20), (33,))
    grads = [[torch.randn(shape, generator=generator).double() for shape in shapes] for _ in range(8)]
    taus = []
    for own in (1.0, factor):
        params = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        groups = [{"params": params[:1], "factor": own}, {"params": params[1:]}]
        opt = ScheduleFreeSPS(groups, lower_bound=None, capturable=capturable)
        found = []
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            opt.step(loss=1.0)
            found.append(opt.last_step.tau.double().clone())
        taus.append(torch.stack(found))
    torch.testing.assert_close(taus[1][:, 0], factor * taus[0][:, 0], rtol=1e-9, atol=0)
    torch.testing.assert_close(taus[1][:, 1], taus[0][:, 1], rtol=1e-9, atol=0)


def stepped(opt):
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    opt.step(loss=1.0)


@pytest.mark.parametrize("given", ["list", "model", "group"])
def test_a_factor_that_reaches_only_some_tensors_of_a_list_is_noticed(given):
    """Matrices and other tensors of one list are two groups."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    params = list(model.parameters())
    opt = ScheduleFreeSPS({"list": params, "model": model, "group": [{"params": params[:1]}]}[given])
    if given == "group":
        opt.add_param_group({"params": params[1:]})
    stepped(opt)
    opt.param_groups[-1]["lr"] = 0.5
    with pytest.warns(UserWarning, match=r"0\.5 in group.*were made of one list.*Set it in all"):
        stepped(opt)
    stepped(opt)


def test_factors_that_are_meant_are_not_noticed():
    params = list(torch.nn.Linear(5, 4).parameters())
    alone = ScheduleFreeSPS([{"params": params[:1], "factor": 0.5}, {"params": params[1:]}])
    alone.param_groups[0]["lr"] = 0.25
    both = ScheduleFreeSPS(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(both, lambda k: 1 / (1 + k))
    for _ in range(3):
        stepped(alone)
        stepped(both)
        scheduler.step()
    assert [group["lr"] for group in both.param_groups] == [0.25, 0.25]
