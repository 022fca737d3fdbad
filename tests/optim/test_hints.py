"""Options that are easily carried over from other optimizers: large weight decay, momentum set by a scheduler."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LinearLR, OneCycleLR

from proxsps import L2, SPS, CoolDown, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.problems import matrix_fac1
from proxsps.sweep.loop import run_single
from proxsps.sweep.spec import RunSpec


def steps(opt, model, count=1):
    for _ in range(count):
        opt.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        opt.step(loss=loss)


def scheduled_steps(opt, model, proceed, count):
    for _ in range(count):
        steps(opt, model)
        proceed()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_weight_decay_that_shrinks_by_percents_is_warned_of_once(model, lr):
    opt = ProxSPS(model.parameters(), lr=lr, weight_decay=0.1)
    with pytest.warns(
        RuntimeWarning, match=r"ProxSPS: lr=1 with weight_decay=0.1 shrinks the weights by 9.1%"
    ) as found:
        steps(opt, model, 3)
    assert len(found) == 1
    assert "multiply it by the lr there and divide it by the lr here" in str(found[0].message)
    assert found[0].filename == __file__
    source = inspect.getsource(steps).splitlines()
    assert "opt.step" in source[found[0].lineno - steps.__code__.co_firstlineno]


def test_weight_decay_behind_a_warm_up_is_warned_of(model):
    opt = ProxSPS(model.parameters(), lr=1.0, weight_decay=0.1)
    scheduler = LinearLR(opt, 1e-3, total_iters=5)
    with pytest.warns(RuntimeWarning, match="with weight_decay=0.1 shrinks the weights by") as found:
        scheduled_steps(opt, model, scheduler.step, 10)
    assert len(found) == 1


def test_euclidean_decay_is_not_called_the_same_step_in_the_metric_of_adam(model):
    opt = ProxSPSAdam(model.parameters(), lr=1.0, weight_decay=0.1, cap="proximal")
    with pytest.warns(RuntimeWarning, match="divide it by the lr here. This warning is shown once") as found:
        steps(opt, model)
    assert "L2" not in str(found[0].message)


# Factors on the step without a learning rate


@pytest.mark.parametrize("cls", [ProxSPSAdam, ProxSPS])
def test_a_scheduler_with_rates_of_its_own_is_warned_of(model, cls):
    opt = cls(model.parameters(), lr=None)
    scheduler = OneCycleLR(opt, max_lr=1e-2, total_steps=200, cycle_momentum=False)
    with pytest.warns(RuntimeWarning, match=r"no group was above 0.05 in the first 100 steps.*use CoolDown") as found:
        scheduled_steps(opt, model, scheduler.step, 150)
    assert len(found) == 1


def test_a_skipped_step_does_not_hide_small_factors(model):
    opt = ProxSPSAdam(model.parameters())
    opt.param_groups[0]["lr"] = 1e-3
    steps(opt, model, 3)
    with pytest.warns(RuntimeWarning, match="The loss is nan"):
        opt.step(loss=float("nan"))
    with pytest.warns(RuntimeWarning, match=r"no group was above 0.05 in the first 100 steps"):
        steps(opt, model, 97)


def _one_group_at_one(opt, model):
    opt.param_groups[0]["lr"] = 1e-3
    return lambda: None


def _cool_down(opt, model):
    return CoolDown(opt, 150).step


def _cycle_to_one(opt, model):
    return OneCycleLR(opt, max_lr=1.0, total_steps=200, cycle_momentum=False).step


@pytest.mark.parametrize("schedule", [_one_group_at_one, _cool_down, _cycle_to_one])
def test_schedules_that_are_fine_are_not_warned_of(model, schedule):
    opt = ProxSPSAdam([{"params": [model.bias]}, {"params": [model.weight]}])
    proceed = schedule(opt, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled_steps(opt, model, proceed, 150)


def test_a_training_that_is_resumed_in_its_last_steps_is_not_warned_of(model):
    opt = ProxSPSAdam(model.parameters())
    steps(opt, model, 3)
    again = ProxSPSAdam(model.parameters())
    again.load_state_dict(opt.state_dict())
    again.param_groups[0]["lr"] = 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(again, model, 110)


def test_groups_may_have_a_factor(model):
    opt = ProxSPSAdam([{"params": [model.bias], "factor": 0.1}, {"params": [model.weight]}])
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "factor": 0.5})
    assert [group["lr"] for group in opt.param_groups] == [0.1, 1.0, 0.5]
    assert "factor" not in opt.param_groups[0]
    steps(opt, model)
    tau = opt.last_step.tau
    torch.testing.assert_close(tau[0], 0.1 * tau[1])
    with pytest.raises(ValueError, match=r'pass "factor" in place of "lr"'):
        ProxSPSAdam([{"params": [model.bias], "lr": 0.1}])
    with pytest.raises(ValueError, match=r"factor=0.1, which is for ProxSPS\(lr=None\)"):
        ProxSPS([{"params": [model.bias], "factor": 0.1}])


def test_an_lr_of_a_later_group_is_a_factor_and_small_ones_are_warned_of(model):
    """Trainers that unfreeze layers divide the lr of the first group."""
    opt, (a, b) = ProxSPSAdam([model.bias]), (nn.Parameter(torch.zeros(2)) for _ in range(2))
    opt.add_param_group({"params": [a], "lr": opt.param_groups[0]["lr"] / 10})
    with pytest.warns(UserWarning, match=r"lr=0.001 was added to ProxSPSAdam\(lr=None\).*is a factor") as found:
        opt.add_param_group({"params": [b], "lr": 1e-3})
    assert found[0].filename == __file__
    assert [group["lr"] for group in opt.param_groups] == [1.0, 0.1, 0.001]


def test_a_copy_of_a_group_is_enough(model):
    groups = [{"params": [model.bias]}, {"params": [model.weight], "weight_decay": 0.05}]
    with pytest.warns(RuntimeWarning, match=r"weight_decay=0.05 shrinks the weights by 4.8%"):
        steps(ProxSPS(groups), model)


SILENT = {
    "converted from AdamW": lambda p: ProxSPS(p, lr=1.0, weight_decay=1e-5),
    "the paper's deep networks": lambda p: ProxSPS(p, lr=1.0, weight_decay=5e-4),
    "the paper's sensors": lambda p: ProxSPS(p, lr=10.0, weight_decay=5e-4),
    "a small lr": lambda p: ProxSPS(p, lr=0.01, weight_decay=0.5),
    "lr 0": lambda p: ProxSPS(p, lr=0.0, weight_decay=10.0),
    "on purpose": lambda p: ProxSPS(p, lr=1.0, regularizer=L2(0.1)),
    "matched: decay follows the step": lambda p: ProxSPS(p, lr=1.0, weight_decay=0.1, cap="matched"),
    "no learning rate": lambda p: ProxSPS(p, lr=None, weight_decay=0.1),
    "Adam's metric": lambda p: ProxSPSAdam(p, weight_decay=0.1),
    "SPS: decay follows the step": lambda p: SPS(p, lr=1.0, weight_decay=0.1),
    "DecSPS": lambda p: DecSPS(p, weight_decay=0.1),
    "ProxSGD": lambda p: ProxSGD(p, lr=1.0, weight_decay=0.1),
}


@pytest.mark.parametrize("make", SILENT.values(), ids=SILENT)
def test_where_nothing_is_said(model, make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(make(model.parameters()), model, 2)


def test_the_paper_s_own_large_products_are_run_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_single(RunSpec(matrix_fac1(), "prox-sps", "sqrt", lr=10.0, weight_decay=0.1, seed=0, epochs=1))
    assert result.diverged_at is None


def test_the_regularizer_that_the_warning_names_takes_the_same_step(model):
    other = copy.deepcopy(model)
    steps(ProxSPS(model.parameters(), weight_decay=0.1), model, 3)
    steps(ProxSPS(other.parameters(), regularizer=L2(0.1)), other, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


SCHEDULERS = {
    "OneCycleLR": lambda opt, **options: OneCycleLR(opt, max_lr=1.0, total_steps=10, **options),
    "CyclicLR": lambda opt, **options: CyclicLR(opt, 0.1, 1.0, step_size_up=2, **options),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_scheduler_that_switches_momentum_on_is_an_error(model, schedule):
    opt = ProxSPS(model.parameters())
    schedule(opt)
    before = model.weight.clone()
    with pytest.raises(ValueError, match=r"made with momentum=0, .* pass cycle_momentum=False to them"):
        steps(opt, model)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: ProxSPS(p), {"cycle_momentum": False}),
        (lambda p: ProxSPS(p, momentum=0.9), {}),
        (lambda p: ProxSPSAdam(p), {}),
    ],
    ids=["without momentum", "with momentum", "ProxSPSAdam"],
)
def test_such_schedulers_work(model, schedule, make, options):
    opt = make(model.parameters())
    scheduler = schedule(opt, **options)
    first = model(torch.ones(4, 3)).square().mean().item()
    for _ in range(5):
        steps(opt, model)
        scheduler.step()
    assert model(torch.ones(4, 3)).square().mean().item() < first
