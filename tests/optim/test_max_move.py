"""A limit on the length of the move: kept exactly, on every path; and why clipping the gradient is none."""

from __future__ import annotations

import math

import cvxpy as cp
import pytest
import torch

from proxsps.optim import SPS, DecSPS, ProxSPS
from proxsps.regularizers import L1, L2, Box, GroupLasso, L2Ball

F64 = torch.float64
SHAPES = [(4, 3), (7,), (2, 3, 2)]
OPTIONS = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.3},
    "center": {"regularizer": L2(0.3, [torch.full(shape, 0.5, dtype=F64) for shape in SHAPES])},
    "L1": {"regularizer": L1(0.2)},
    "GroupLasso": {"regularizer": GroupLasso(0.4)},
}
PATHS = {"torch": {"fused": False}, "default": {}, "capturable": {"capturable": True}}


def stepped(case, kit, options, dtype=F64, **more):
    """The move of a step with a loss of 3, and its report."""
    params = kit.drawn(*SHAPES, dtype=dtype)
    before = kit.flat(params)
    opt = case.make(params, **options, **more)
    opt.step(loss=3.0)
    return kit.flat(params) - before, opt.last_step, kit.flat(p.grad for p in params)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_longer_move_is_shortened_to_the_limit(case, kit, options, path):
    free, report, g = stepped(case, kit, options, **path)
    move, limited, _ = stepped(case, kit, options, max_move=0.05, **path)
    assert free.norm() > 0.06
    assert move.norm() == pytest.approx(0.05, rel=1e-12)
    s = 0.05 / float(free.norm())
    torch.testing.assert_close(move, s * free, rtol=0, atol=1e-14)
    assert float(limited.relaxation) == pytest.approx(s, rel=1e-12)
    assert float(report.relaxation) == 1.0
    torch.testing.assert_close(limited.tau, s * report.tau, rtol=1e-12, atol=0)
    assert float(limited.u) == pytest.approx(float(report.u), rel=1e-12)
    if not case.coupled:
        assert float(limited.model_gap) == pytest.approx(3.0 + float(g @ move), rel=1e-12)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_shorter_move_stays_bitwise_as_it_is(case, kit, options, path):
    free, report, _ = stepped(case, kit, options, **path)
    move, limited, _ = stepped(case, kit, options, max_move=1.01 * float(free.norm()), **path)
    assert torch.equal(move, free)
    assert torch.equal(limited.tau, report.tau)
    assert torch.equal(limited.model_gap, report.model_gap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3}, {"regularizer": L1(0.2)}], ids=["plain", "decay", "L1"])
def test_the_limit_holds_in_lower_precision_up_to_its_rounding(case, kit, options, dtype):
    move, report, _ = stepped(case, kit, options, dtype=dtype, max_move=0.05)
    assert float(report.relaxation) < 1
    # Each of the 31 parameters, of size one, is rounded when it is written.
    assert float(move.double().norm()) == pytest.approx(0.05, abs=31**0.5 * 2 * torch.finfo(dtype).eps)


def test_groups_share_one_limit(case, kit):
    a, b, c = kit.drawn(*SHAPES)
    before = kit.flat([a, b, c])
    groups = [
        {"params": [a], "lr": 0.5, "weight_decay": 0.2},
        {"params": [b]},
        {"params": [c], "regularizer": L1(0.1)},
    ]
    opt = case.make(groups, max_move=0.05)
    opt.step(loss=3.0)
    assert (kit.flat([a, b, c]) - before).norm() == pytest.approx(0.05, rel=1e-12)


@pytest.mark.parametrize("loss", [0.2, 3.0, 300.0])
def test_without_a_regularizer_the_step_minimises_the_model_inside_the_ball(kit, loss):
    (x,) = kit.drawn((6,))
    y, d, start = cp.Variable(6), x.grad.numpy(), x.detach().numpy().copy()
    model = cp.maximum(loss + d @ (y - start), 0) + cp.sum_squares(y - start) / (2 * 0.4)
    problem = cp.Problem(cp.Minimize(model), [cp.norm(y - start) <= 0.2])
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    opt = ProxSPS([x], lr=0.4, max_move=0.2)
    opt.step(loss=loss)
    assert (float(opt.last_step.relaxation) < 1) == (loss > 1)
    y.value = x.detach().numpy()
    assert float(model.value) == pytest.approx(problem.value, rel=1e-8)
    assert float(cp.norm(y - start).value) <= 0.2 * (1 + 1e-14)


@pytest.mark.parametrize("phi", [L1(0.3), L2(0.7), GroupLasso(0.5), Box(-0.5, 0.5), L2Ball(1.0)], ids=repr)
def test_a_shortened_step_keeps_its_share_of_the_decrease_and_stays_feasible(kit, phi):
    # What a step minimises is 1/alpha-strongly convex: on the way from x to its minimiser it lies below the chord.
    (x,) = kit.drawn((6,))
    with torch.no_grad():
        x.copy_(phi.prox(x, 1.0))  # feasible
    start, d, alpha, loss = x.detach().clone(), x.grad, 0.4, 3.0

    def objective(y):
        model = max(loss + float(d @ (y - start)), 0.0)
        return model + float(phi.value(y)) + float((y - start).square().sum()) / (2 * alpha)

    whole = torch.nn.Parameter(start.clone())
    whole.grad = d.clone()
    ProxSPS([whole], lr=alpha, regularizer=phi).step(loss=loss)
    opt = ProxSPS([x], lr=alpha, regularizer=phi, max_move=0.1)
    opt.step(loss=loss)
    s = float(opt.last_step.relaxation)
    assert 0 < s < 1
    chord = (1 - s) * objective(start) + s * objective(whole.detach())
    bend = s * (1 - s) * float((whole.detach() - start).square().sum()) / (2 * alpha)
    assert math.isfinite(chord)
    assert objective(x.detach()) <= chord - bend + 1e-12


def test_what_was_zero_stays_zero(kit):
    (x,) = kit.drawn((6,))
    with torch.no_grad():
        x[:3] = 0.0
    x.grad[:3] *= 1e-3  # too small to move them away from zero
    ProxSPS([x], lr=0.5, regularizer=L1(0.3), max_move=0.05).step(loss=3.0)
    assert x[:3].tolist() == [0.0, 0.0, 0.0]
    assert (x[3:] != 0).all()


def test_the_memory_of_dec_sps_does_not_feel_the_limit(kit):
    memories = []
    for limit in (None, 0.05):
        opt = DecSPS(kit.drawn(*SHAPES), max_move=limit)
        opt.step(loss=3.0)
        memories.append(opt.param_groups[0]["memory"])
    assert memories[0] == memories[1]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_that_is_none_is_refused(case, kit, value):
    with pytest.raises(ValueError, match=f"max_move must be a positive number, or None for no limit, got {value}"):
        case.make(kit.drawn((3,)), max_move=value)


def test_a_limit_of_one_group_is_refused(case, kit):
    with pytest.raises(ValueError, match="max_move cannot differ between parameter groups"):
        case.make([{"params": kit.drawn((3,)), "max_move": 0.1}, {"params": kit.drawn((4,))}])


def test_a_limit_is_part_of_the_checkpoint(case, kit):
    state = case.make(kit.drawn((3,)), max_move=0.25).state_dict()
    other = case.make(kit.drawn((3,)))
    other.load_state_dict(state)
    assert other.param_groups[0]["max_move"] == 0.25


# -- clipping the gradient instead ------------------------------------------------------------------------------------


def descend(clip, **options):
    """The loss before and after a Polyak step on f = ||x||^2 / 2 from ||x|| = 50."""
    x = torch.nn.Parameter(torch.tensor([30.0, 40.0], dtype=F64))
    opt = SPS([x], lr=1e6, **options)
    loss = x.square().sum() / 2
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_([x], 1.0)
    opt.step(loss=loss)
    return loss.item(), (x.detach().square().sum() / 2).item()


def test_clipping_the_gradient_breaks_the_step_and_limiting_the_move_does_not():
    assert descend(clip=False) == pytest.approx((1250, 312.5))  # the Polyak step halves x
    # g/||g|| with the same loss: the step f/||g||^2 g becomes f = 1250 long, and x goes from 50 to -1200.
    assert descend(clip=True) == pytest.approx((1250, 720_000), rel=1e-5)
    assert descend(clip=False, max_move=1.0) == pytest.approx((1250, 49**2 / 2))
