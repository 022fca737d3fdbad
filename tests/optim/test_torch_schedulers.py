"""The subjects of PyTorch's tests of schedulers: each scheduler of torch drives our optimizers as it drives its own."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from files import through_disk
from torch.optim import lr_scheduler as schedulers

BASES = (0.5, 0.05)

MAKERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda k: 0.9**k, lambda k: 1 / (1 + k)]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, 3, gamma=0.1),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 9], gamma=0.1),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=4),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.25, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8, power=0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=6, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=1e-4),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.5, step_size_up=3, mode="triangular2", cycle_momentum=False),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [0.5, 0.05], total_steps=20, cycle_momentum=False),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1, min_lr=[0.01, 0.001]),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=[0.1, 0.2], anneal_epochs=4),
}
with_schedulers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
METRICS = (1.0, 0.9, 0.95, 0.96, 0.97, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


class Model:
    """f(a, b) = (a - 1)^2 + b^2, its two parameters in groups with caps of their own."""

    def __init__(self, as_tensor=False):
        self.a, self.b = (torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(2))
        lrs = [torch.tensor(base, dtype=torch.float64) if as_tensor else base for base in BASES]
        self.groups = [{"params": [self.a], "lr": lrs[0]}, {"params": [self.b], "lr": lrs[1]}]

    def step(self, opt):
        opt.zero_grad()
        loss = (self.a - 1).square().sum() + self.b.square().sum()
        loss.backward()
        opt.step(lambda: loss)
        return loss.item()


def advance(scheduler, k):
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(METRICS[k % len(METRICS)])
    else:
        scheduler.step()


def follow(model, opt, scheduler, steps, start=0):
    """The caps that each step is taken with."""
    seen = []
    for k in range(start, start + steps):
        seen.append([float(group["lr"]) for group in opt.param_groups])
        model.step(opt)
        advance(scheduler, k)
    return seen


@with_schedulers
def test_the_caps_are_those_that_sgd_would_have(case, make):
    ours, theirs = Model(), Model()
    opt, sgd = case.make(ours.groups), torch.optim.SGD(theirs.groups, lr=0.1)
    seen, expected = follow(ours, opt, make(opt), 12), follow(theirs, sgd, make(sgd), 12)
    assert seen == expected
    assert len({tuple(lrs) for lrs in seen}) > 1


@with_schedulers
def test_a_scheduled_cap_bounds_the_step(case, make):
    model = Model()
    opt = case.make(model.groups)
    scheduler = make(opt)
    for k in range(12):
        caps = torch.tensor([float(group["lr"]) for group in opt.param_groups], dtype=torch.float64)
        model.step(opt)
        if case.lr is None:  # then they are factors
            caps = caps * opt.last_step.distance_cap
        assert (opt.last_step.tau <= caps * (1 + 1e-12)).all()
        advance(scheduler, k)
    assert scheduler.get_last_lr() == [group["lr"] for group in opt.param_groups]


@with_schedulers
def test_the_loss_decreases_under_a_scheduler(case, make):
    model = Model()
    opt = case.make(model.groups)
    scheduler = make(opt)
    losses = []
    for k in range(12):
        losses.append(model.step(opt))
        advance(scheduler, k)
    assert losses[-1] < losses[0]


@with_schedulers
def test_tensor_caps_take_the_same_steps(case, make):
    plain, tensors = Model(), Model(as_tensor=True)
    one, two = case.make(plain.groups), case.make(tensors.groups)
    kept = [group["lr"] for group in two.param_groups]
    seen, also = follow(plain, one, make(one), 8), follow(tensors, two, make(two), 8)
    torch.testing.assert_close(torch.tensor(also), torch.tensor(seen))
    torch.testing.assert_close(tensors.a, plain.a)
    # Schedulers write into the tensors, as captured steps need it.
    assert all(group["lr"] is lr for group, lr in zip(two.param_groups, kept, strict=True))


@with_schedulers
@pytest.mark.parametrize("through", ["memory", "disk"])
def test_a_run_goes_on_from_saved_dictionaries(case, make, through):
    model = Model()
    opt = case.make(model.groups)
    scheduler = make(opt)
    follow(model, opt, scheduler, 5)
    saved = {"optimizer": opt.state_dict(), "scheduler": scheduler.state_dict(), "a": model.a.data, "b": model.b.data}
    saved = copy.deepcopy(saved)
    if through == "disk":
        saved = through_disk(saved, weights_only=False)  # schedulers of torch save more than plain data
    resumed = Model()
    resumed.a.data, resumed.b.data = saved["a"].clone(), saved["b"].clone()
    twin = case.make(resumed.groups)
    twin_scheduler = make(twin)
    twin_scheduler.load_state_dict(saved["scheduler"])
    twin.load_state_dict(saved["optimizer"])
    assert follow(resumed, twin, twin_scheduler, 7, start=5) == follow(model, opt, scheduler, 7, start=5)
    assert torch.equal(resumed.a, model.a)
    assert torch.equal(resumed.b, model.b)


def test_a_scheduler_and_its_optimizer_are_pickled_together(case):
    model = Model()
    opt = case.make(model.groups)
    scheduler = schedulers.ExponentialLR(opt, 0.9)
    follow(model, opt, scheduler, 3)
    twin, twin_scheduler = pickle.loads(pickle.dumps((opt, scheduler)))
    assert twin_scheduler.optimizer is twin
    for o, s in ((opt, scheduler), (twin, twin_scheduler)):
        s.step()
        assert o.param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**4)


def test_a_scheduler_that_steps_first_is_warned_of(case):
    model = Model()
    opt = case.make(model.groups)
    scheduler = schedulers.StepLR(opt, 3)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step\(\)"):
        scheduler.step()


def test_the_right_order_is_not_warned_of_after_a_copy(case):
    model = Model()
    opt = copy.deepcopy(case.make(model.groups))
    scheduler = schedulers.StepLR(opt, 3)
    for p in (p for group in opt.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    opt.step(loss=1.0)
    scheduler.step()


def test_a_run_that_goes_on_needs_its_first_caps(case):
    ours, theirs = Model(), Model()
    opt, sgd = case.make(ours.groups), torch.optim.SGD(theirs.groups, lr=0.1)
    with pytest.raises(KeyError, match="initial_lr"):
        schedulers.StepLR(opt, 3, last_epoch=4)
    for o in (opt, sgd):
        for group, base in zip(o.param_groups, BASES, strict=True):
            group["initial_lr"] = base
    seen = [follow(m, o, schedulers.CosineAnnealingLR(o, 6, last_epoch=4), 4) for m, o in ((ours, opt), (theirs, sgd))]
    assert seen[0] == seen[1]


def test_the_first_cap_may_be_part_of_a_group(case):
    model = Model()
    for group, base in zip(model.groups, BASES, strict=True):
        group["initial_lr"] = base
    opt = case.make(model.groups)
    schedulers.StepLR(opt, 3, last_epoch=1)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=10),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.5),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_schedulers_of_a_momentum_say_that_there_is_none(case, make):
    """Torch says so where an optimizer has no such option, and the step where it was made without momentum."""
    model = Model()
    opt = case.make(model.groups)
    with pytest.raises(ValueError, match="momentum"):
        follow(model, opt, make(opt), 1)


def test_a_plateau_scheduler_takes_groups_that_come_later(case):
    model, later = Model(), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = case.make(model.groups)
    scheduler = schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=0, mode="min")
    opt.add_param_group({"params": [later], "lr": 0.25})
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert [group["lr"] for group in opt.param_groups] == [0.25, 0.025, 0.125]


def test_two_schedulers_at_once_multiply(case):
    model = Model()
    opt = case.make(model.groups)
    both = [schedulers.ExponentialLR(opt, 0.9), schedulers.MultiStepLR(opt, [2], gamma=0.1)]
    for _ in range(4):
        model.step(opt)
        for scheduler in both:
            scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.5 * 0.9**4 * 0.1)


def test_an_optimizer_is_free_again_when_its_scheduler_is_gone(case):
    model = Model()
    opt = case.make(model.groups)
    follow(model, opt, schedulers.CosineAnnealingLR(opt, 10), 3)
    opt.param_groups[0]["lr"] = 0.125
    assert math.isfinite(model.step(opt))
    assert opt.param_groups[0]["lr"] == 0.125
