"""Options that are easily carried over from other optimizers: large weight decay, momentum set by a scheduler."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from proxsps import L2, SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.problems import matrix_fac1
from proxsps.sweep.single import run_single
from proxsps.sweep.spec import RunSpec


def steps(opt, model, count=1):
    for _ in range(count):
        opt.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        opt.step(loss=loss)


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
