"""Schedulers against their formulas, and the adaptive one against medians taken by hand."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
import torch
from files import through_disk

from proxsps.optim import AdaptiveLR, CoolDown, HorizonLR, ProxSPS, SqrtLR, StronglyConvexLR

F64 = torch.float64

FORMULAS = {
    "SqrtLR": (SqrtLR, lambda k, base: base / math.sqrt(k + 1)),
    "HorizonLR": (lambda opt: HorizonLR(opt, 50), lambda k, base: base / math.sqrt(50)),
    "CoolDown": (lambda opt: CoolDown(opt, 10), lambda k, base: base * (1.0 if k < 7 else max(0, 10 - k) / 3.5)),
    "StronglyConvexLR": (lambda opt: StronglyConvexLR(opt, 0.2), lambda k, base: 1 / (0.2 * (k + 1))),
    "StronglyConvexLR-offset": (lambda opt: StronglyConvexLR(opt, 0.2, k_0=7.5), lambda k, base: 1 / (0.2 * (k + 7.5))),
    "StronglyConvexLR-bounded": (
        lambda opt: StronglyConvexLR(opt, 0.2, bounded=True),
        lambda k, base: 2 / (0.2 * (k + 1)),
    ),
}


def two_groups(lr=(3.0, 0.5)):
    a, b = (torch.nn.Parameter(torch.ones(3, dtype=F64)) for _ in range(2))
    opt = ProxSPS([{"params": [a], "lr": lr[0]}, {"params": [b], "lr": lr[1]}])
    for p in (a, b):
        p.grad = torch.ones(3, dtype=F64)
    return opt


def lrs(opt):
    return [float(group["lr"]) for group in opt.param_groups]


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_group_that_is_added_later_follows_with_its_own_base(name, tensor):
    """torch's own schedulers end in an error of zip; state dictionaries keep the new base."""
    make, formula = FORMULAS[name]
    opt = two_groups()
    scheduler = make(opt)
    late = torch.nn.Parameter(torch.ones(2, dtype=F64))
    for k in range(12):
        opt.step(loss=0.5)
        if k == 3:
            opt.add_param_group({"params": [late], "lr": torch.tensor(2.0, dtype=F64) if tensor else 2.0})
        if k == 6:
            saved = scheduler.state_dict()
            scheduler = make(opt)
            scheduler.load_state_dict(saved)
        scheduler.step()
        bases = [3.0, 0.5, 2.0][: len(opt.param_groups)]
        assert lrs(opt) == pytest.approx([formula(k + 1, base) for base in bases], rel=1e-15)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", FORMULAS)
def test_values_follow_the_formula_in_every_group(name, tensor):
    make, formula = FORMULAS[name]
    opt = two_groups([torch.tensor(lr, dtype=F64) for lr in (3.0, 0.5)] if tensor else (3.0, 0.5))
    scheduler = make(opt)
    for k in range(12):
        assert lrs(opt) == pytest.approx([formula(k, 3.0), formula(k, 0.5)], rel=1e-15)
        assert [float(lr) for lr in scheduler.get_last_lr()] == lrs(opt)
        opt.step(loss=0.5)
        scheduler.step()


@pytest.mark.parametrize("name", FORMULAS)
def test_a_resumed_schedule_goes_on_where_it_was(name):
    make, formula = FORMULAS[name]
    opt = two_groups()
    scheduler = make(opt)
    for _ in range(4):
        opt.step(loss=0.5)
        scheduler.step()
    states = through_disk(opt.state_dict()), through_disk(scheduler.state_dict())
    resumed = two_groups()
    second = make(resumed)
    resumed.load_state_dict(states[0])
    second.load_state_dict(states[1])
    for k in range(4, 8):
        assert lrs(resumed) == lrs(opt) == pytest.approx([formula(k, 3.0), formula(k, 0.5)], rel=1e-15)
        for o, s in ((opt, scheduler), (resumed, second)):
            o.step(loss=0.5)
            s.step()


def test_the_step_uses_the_scheduled_cap():
    opt = two_groups()
    scheduler = SqrtLR(opt)
    for k in range(3):
        opt.step(loss=1e9)
        assert opt.last_step.branch_name == "capped"
        assert opt.last_step.tau.tolist() == pytest.approx([3 / math.sqrt(k + 1), 0.5 / math.sqrt(k + 1)], rel=1e-15)
        scheduler.step()


# -- the adaptive schedule --------------------------------------------------------------------------------------------

# One group with ||g||^2 = 4 and no regulariser: zeta = loss / 4.


def one_group(lr=10.0, **options):
    x = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    x.grad = torch.ones(4, dtype=F64)
    return ProxSPS([x], lr=lr, **options)


def epoch(opt, losses):
    for loss in losses:
        opt.step(loss=loss)


@pytest.mark.parametrize("capturable", [False, True])
def test_the_next_cap_is_the_median_step_of_the_last_epoch_only(capturable):
    opt = one_group(capturable=capturable)
    scheduler = AdaptiveLR(opt)
    assert lrs(opt) == [10.0]
    for losses in ([4.0, 8.0, 0.4], [2.0, 1.0, 3.0, 0.5], [12.0, 16.0, 8.0]):
        epoch(opt, losses)
        scheduler.step()
        # The median of an epoch has no memory of the one before; an even count takes the mean of the middle two.
        assert lrs(opt) == pytest.approx([statistics.median(losses) / 4], rel=1e-15)


def test_the_adaptive_cap_never_exceeds_the_base_lr():
    opt = one_group(lr=0.75)
    scheduler = AdaptiveLR(opt)
    epoch(opt, [400.0, 800.0])
    scheduler.step()
    assert lrs(opt) == [0.75]
    epoch(opt, [0.4])
    scheduler.step()
    epoch(opt, [400.0])
    scheduler.step()
    assert lrs(opt) == [0.75]  # it may grow again


def test_the_factor_multiplies_the_median():
    opt = one_group()
    scheduler = AdaptiveLR(opt, factor=3.0)
    epoch(opt, [4.0, 8.0, 0.4])
    scheduler.step()
    assert lrs(opt) == pytest.approx([3.0], rel=1e-15)


def test_an_epoch_without_steps_keeps_the_cap():
    opt = one_group()
    scheduler = AdaptiveLR(opt)
    epoch(opt, [4.0])
    scheduler.step()
    scheduler.step()
    assert lrs(opt) == [1.0]


def test_a_model_truncated_throughout_keeps_the_cap():
    opt = one_group()
    scheduler = AdaptiveLR(opt, factor=2.0)
    epoch(opt, [0.0, 0.0, 0.0])
    scheduler.step()
    assert lrs(opt) == [10.0]


@pytest.mark.parametrize("capturable", [False, True])
def test_skipped_steps_do_not_count(capturable):
    opt = one_group(capturable=capturable)
    scheduler = AdaptiveLR(opt)
    epoch(opt, [4.0])
    if capturable:
        epoch(opt, [math.nan] * 5)
    else:
        with pytest.warns(RuntimeWarning, match="loss is nan"):
            epoch(opt, [math.nan] * 5)
    scheduler.step()
    assert lrs(opt) == [1.0]


def test_steps_without_gradients_do_not_count():
    opt = one_group()
    scheduler = AdaptiveLR(opt)
    epoch(opt, [4.0, 8.0, 8.0])  # median 2
    opt.step(loss=1.2)
    grad, opt.param_groups[0]["params"][0].grad = opt.param_groups[0]["params"][0].grad, None
    with pytest.warns(RuntimeWarning, match="No parameter has a gradient"):
        epoch(opt, [100.0] * 9)  # nothing to step with: the report of the step before must not be taken again
    opt.param_groups[0]["params"][0].grad = grad
    scheduler.step()
    assert lrs(opt) == pytest.approx([statistics.median([1.0, 2.0, 2.0, 0.3])], rel=1e-15)


def test_every_group_has_its_own_median():
    opt = two_groups((3.0, 0.5))
    scheduler = AdaptiveLR(opt)
    # ||g_j||^2 = 3: u = loss / (3 * 3 + 3 * 0.5), zeta_j = lr_j u.
    epoch(opt, [1.05, 2.1, 4.2])
    scheduler.step()
    assert lrs(opt) == pytest.approx([3.0 * 0.2, 0.5 * 0.2], rel=1e-14)


def test_a_group_added_during_an_epoch_joins_in():
    opt = one_group()
    scheduler = AdaptiveLR(opt)
    epoch(opt, [4.0])
    x = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    x.grad = torch.ones(4, dtype=F64)
    opt.add_param_group({"params": [x]})
    epoch(opt, [4.0])
    try:
        scheduler.step()
    except ValueError as error:
        assert "group" in str(error)  # noqa: PT017
    else:
        assert all(0 < lr <= 10.0 for lr in lrs(opt))


@pytest.mark.parametrize("carry", [copy.deepcopy, through_disk], ids=["memory", "disk"])
def test_an_unfinished_epoch_is_part_of_the_state(carry):
    losses = [4.0 / 3, 8.1, 0.7]
    opt = one_group()
    scheduler = AdaptiveLR(opt)
    epoch(opt, losses[:2])
    states = carry(opt.state_dict()), carry(scheduler.state_dict())
    resumed = one_group()
    second = AdaptiveLR(resumed)
    resumed.load_state_dict(states[0])
    second.load_state_dict(states[1])
    for o, s in ((opt, scheduler), (resumed, second)):
        epoch(o, losses[2:])
        s.step()
    assert lrs(resumed) == lrs(opt) == [losses[0] / 4]


def test_observations_do_not_outlive_their_epoch():
    opt = one_group()
    scheduler = AdaptiveLR(opt)
    sizes = []
    for _ in range(4):
        epoch(opt, [4.0] * 5)
        scheduler.step()
        sizes.append(len(str(scheduler.state_dict())))
    assert len(set(sizes[1:])) == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_horizon_has_at_least_one_step():
    with pytest.raises(ValueError, match="total_steps must be at least 1, got 0"):
        HorizonLR(one_group(), 0)


@pytest.mark.parametrize("lam", [0.0, -1.0, math.nan])
def test_strong_convexity_is_positive(lam):
    with pytest.raises(ValueError, match=f"lam must be positive.*got {lam}"):
        StronglyConvexLR(one_group(), lam)


@pytest.mark.parametrize("k_0", [0.5, -1.0, math.nan])
def test_the_offset_keeps_the_first_value_finite(k_0):
    with pytest.raises(ValueError, match=f"k_0 must be at least 1, got {k_0}"):
        StronglyConvexLR(one_group(), 0.1, k_0=k_0)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan])
def test_the_factor_is_positive(factor):
    with pytest.raises(ValueError, match=f"factor must be positive, got {factor}"):
        AdaptiveLR(one_group(), factor=factor)


def test_the_adaptive_schedule_needs_an_optimizer_that_reports_its_step():
    with pytest.raises(TypeError, match=r"last_step.*SGD"):
        AdaptiveLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
