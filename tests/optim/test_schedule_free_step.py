"""The step of ScheduleFreeSPS: against plain code, against a general solver, and by every path on the host."""

from __future__ import annotations

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from reference import ScheduleFree
from torch import nn

from proxsps import L1, L2, Box, ElasticNet, GroupLasso, NonNegative, SparseGroupLasso
from proxsps.optim import ScheduleFreeSPS
from proxsps.optim.plan import Plan

F64 = torch.float64
SHAPES = ((13, 7), (7, 13), (5, 3, 3, 3), (67,), (9,))
METRICS = pytest.mark.parametrize("metric", ["adam", "spectral"])


def make(params, metric="adam", **options):
    """Matrices and filters in a set of their own, in this metric, and the vectors in Adam's."""
    matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "metric": metric}, {"params": rest}]
    return ScheduleFreeSPS([group for group in groups if group["params"]], **options)


def drawn_step(kit, params, k, scale=1.0):
    """Gradients that pull to 0, with noise, and a loss."""
    for p, q in zip(params, kit.drawn(*[p.shape for p in params], seed=k + 1, dtype=params[0].dtype), strict=True):
        p.grad = scale * (0.5 * p.detach() + 0.3 * q.detach())
    return scale * 5.0 / (1 + 0.1 * k)


# Against plain code


@METRICS
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("size", [1.0, 1e6], ids=["inside", "capped"])
def test_a_hundred_steps_are_those_of_plain_code(metric, fused, decay, size, kit):
    params = kit.drawn(*SHAPES, dtype=torch.float32)
    opt = make(params, metric, weight_decay=decay, fused=fused)
    sets = [int(p.dim() > 1) for p in params]
    plain = ScheduleFree([p.double() for p in params], sets, [metric == "spectral" and s == 1 for s in sets], lam=decay)
    branches = set()
    for k in range(100):
        loss = size * drawn_step(kit, params, k) / 10
        if k:  # single steps from a shared state: the gap at z is a difference in which roundings of f32 show
            plain.ys, plain.zs = [p.detach().double() for p in params], [opt.state[p]["z"].double() for p in params]
        taus = plain.step([p.grad.double() for p in params], loss)
        opt.step(loss=loss)
        report = opt.last_step
        # The gap is a difference: where it is a small part of the loss, f32 has fewer digits of it.
        digits = max(1e-5, 1e-6 * loss / max(float(report.gap), 1e-6))
        assert report.tau.tolist() == pytest.approx([taus[1], taus[0]], rel=digits, abs=1e-9)
        branches.add(report.branch_name)
        for p, y in zip(params, plain.ys, strict=True):
            torch.testing.assert_close(p.detach().double(), y, rtol=1e-5, atol=1e-6)
    assert branches == {"capped"} if size > 1 else "inside" in branches
    opt.eval()
    for p, x in zip(params, plain.xs, strict=True):
        torch.testing.assert_close(p.detach().double(), x, rtol=1e-5, atol=1e-6)


# Against a general solver

REGULARIZERS = {
    "L1": (L1(0.05), lambda w: 0.05 * cp.norm1(w), []),
    "ElasticNet": (ElasticNet(0.05, 0.2), lambda w: 0.05 * cp.norm1(w) + 0.1 * cp.sum_squares(w), []),
    "GroupLasso": (GroupLasso(0.2, dims=(1,)), lambda w: 0.2 * cp.sum(cp.norm(w, 2, axis=1)), []),
    "Box": (Box(-0.4, 0.3), lambda w: 0, [lambda w: w >= -0.4, lambda w: w <= 0.3]),
    "NonNegative": (NonNegative(), lambda w: 0, [lambda w: w >= 0]),
}


class Recorded:
    """The numbers of one step, from the state before and after it."""

    def __init__(self, opt, x):
        own = opt.state[x]
        self.z, self.y = own["z"].numpy().copy(), x.detach().numpy().copy()
        self.v, self.k = own["square"].numpy().copy(), int(own["steps"])

    def metric(self, g):
        k, b = self.k, 0.999
        total = self.v * (1 - b**k)  # the state holds corrected averages
        return np.sqrt((b * total + (1 - b) * g * g) / (1 - b ** (k + 1))) + 1e-8

    def solved(self, name, g, tau):
        """The minimiser of the linear model, the regulariser and the distance, and the value there."""
        _, value, sides = REGULARIZERS[name]
        w, D = cp.Variable(self.z.shape), self.metric(g)
        objective = cp.sum(cp.multiply(g, w - self.z)) + value(w)
        objective += cp.sum(cp.multiply(D / (2 * tau), cp.square(w - self.z)))
        problem = cp.Problem(cp.Minimize(objective), [side(w) for side in sides])
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        return w.value, problem.value


def model_value(name, rec, g, tau, w):
    phi = float(REGULARIZERS[name][0].value(torch.as_tensor(w)))
    return float((g * (w - rec.z)).sum() + phi + (rec.metric(g) / (2 * tau) * (w - rec.z) ** 2).sum())


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate:UserWarning")  # only 1e-8 is asked for
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize(("branch", "loss"), [("inside", 0.3), ("capped", 50.0)])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_z_minimises_the_model_and_stops_at_its_first_zero(name, branch, loss, fused, kit):
    (x,) = kit.drawn((6, 4))
    with torch.no_grad():
        x.mul_(0.3)
    opt = ScheduleFreeSPS([x], regularizer=REGULARIZERS[name][0], lower_bound=0.0, fused=fused)
    for k in range(4):
        drawn_step(kit, [x], k)
        opt.step(loss=50.0)
    drawn_step(kit, [x], 9)
    g, rec = x.grad.numpy().copy(), Recorded(opt, x)
    gap = loss + float((g * (rec.z - rec.y)).sum())
    opt.step(loss=loss)
    report, z = opt.last_step, opt.state[x]["z"].numpy()
    assert report.branch_name == branch
    assert float(report.gap) == pytest.approx(gap, rel=1e-12)
    tau = float(report.tau[0])
    best, value = rec.solved(name, g, tau)
    own = model_value(name, rec, g, tau, z)
    assert own <= value + 1e-8 * (1 + abs(value))
    np.testing.assert_allclose(z, best, atol=1e-5)
    if branch == "inside":
        # A search on doubles stops where the model is within 1e-8 of its bound.
        assert abs(gap + float((g * (z - rec.z)).sum())) < 1e-7 * gap
        for part in (0.1, 0.5, 0.9, 0.99):
            assert gap + float((g * (rec.solved(name, g, part * tau)[0] - rec.z)).sum()) > 0
    else:
        assert gap + float((g * (z - rec.z)).sum()) > 0
        assert report.cap_name == "distance"


@METRICS
def test_below_the_bound_z_stays_and_the_average_goes_on(metric, kit):
    params = kit.drawn(*SHAPES)
    opt = make(params, metric)
    for k in range(3):
        opt.step(loss=drawn_step(kit, params, k))
    zs, ys = [opt.state[p]["z"].clone() for p in params], kit.points(params)
    for p, z in zip(params, zs, strict=True):
        p.grad = p.detach() - z  # <g, z - y> < 0
    opt.step(loss=1e-9)
    assert opt.last_step.branch_name == "truncated"
    for p, z, y in zip(params, zs, ys, strict=True):
        assert torch.equal(opt.state[p]["z"], z)
        assert not torch.equal(p, y)
        ratio = ((p.detach() - z) / (y - z)).reshape(-1)
        assert 0 < float(ratio.min()) <= float(ratio.max()) < 1
        assert float(ratio.max() - ratio.min()) < 1e-6


# Every path

OPTIONS = {
    "none": {},
    "decay": {"weight_decay": 0.2},
    "L1": {"regularizer": L1(0.02)},
    "ElasticNet": {"regularizer": ElasticNet(0.02, 0.1)},
    "GroupLasso": {"regularizer": GroupLasso(0.02)},
    "SparseGroupLasso": {"regularizer": SparseGroupLasso(0.01, 0.02)},
    "Box": {"regularizer": Box(-0.5, 0.6)},
    "max_move": {"weight_decay": 0.2, "max_move": 0.05},
    "L1, max_move": {"regularizer": L1(0.02), "max_move": 0.05},
    "lr": {"lr": 0.004},
    "no bound": {"lower_bound": None},
    "factor": {"factor": 0.3},
}


def run(kit, options, steps=12, dtype=torch.float32, metric="adam", scale=1.0, shapes=SHAPES):
    params = kit.drawn(*shapes, dtype=dtype)
    opt = make(params, metric, **{"lower_bound": 0.0, **options})  # so that regularisers need searches
    taus = []
    for k in range(steps):
        opt.step(loss=drawn_step(kit, params, k, scale))
        taus.append(opt.last_step.tau)
    return params, opt, torch.stack(taus)


CASES = [(name, "adam") for name in OPTIONS] + [(n, "spectral") for n in OPTIONS if "regularizer" not in OPTIONS[n]]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize(("name", "metric"), CASES)
def test_kernels_and_torch_alone_agree_and_plans_may_be_dropped(name, metric, dtype, kit, monkeypatch):
    params, opt, taus = run(kit, OPTIONS[name], dtype=dtype, metric=metric)
    alone, _, others = run(kit, {**OPTIONS[name], "fused": False}, dtype=dtype, metric=metric)
    # A search stops at about the square root of the precision in tau; twelve steps add that up.
    tolerance = 1e-3 if dtype is torch.float32 else 1e-6
    torch.testing.assert_close(taus, others, rtol=tolerance, atol=0)
    torch.testing.assert_close(kit.flat(params), kit.flat(alone), rtol=tolerance, atol=tolerance)
    monkeypatch.setattr(Plan, "holds", lambda self, opt: False)
    dropped, again, same = run(kit, OPTIONS[name], dtype=dtype, metric=metric)
    assert torch.equal(taus, same)
    assert torch.equal(kit.flat(params), kit.flat(dropped))
    for p, q in zip(params, dropped, strict=True):
        assert kit.same(opt.state[p], again.state[q])


@pytest.mark.parametrize("options", [{}, {"regularizer": L1(0.01)}], ids=str)
def test_threads_do_not_change_a_bit(options, kit):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            params, opt, taus = run(kit, options, steps=3, shapes=((300, 401), (70_001,)))
            found.append((kit.flat(params), taus, kit.flat(opt.state[p]["z"] for p in params)))
    finally:
        torch.set_num_threads(before)
    assert kit.same(*found)


@METRICS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"regularizer": L1(0.02)}], ids=str)
def test_half_precision_rounds_the_steps_of_f32(dtype, metric, options, kit):
    if metric == "spectral" and "regularizer" in options:
        options = {}
    shapes = ((13, 7), (64, 3), (1025,), (67,))
    params = kit.drawn(*shapes, dtype=dtype)
    twins = [nn.Parameter(p.detach().float()) for p in params]
    opt, other = make(params, metric, **options), make(twins, metric, fused=False, **options)
    for k in range(20):
        loss = drawn_step(kit, params, k)
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.float()
        opt.step(loss=loss)
        other.step(loss=loss)
        assert opt.last_step.tau.tolist() == pytest.approx(other.last_step.tau.tolist(), rel=1e-5)
    for mode in ("train", "eval", "train"):
        getattr(opt, mode)()
        getattr(other, mode)()
        for p, q in zip(params, twins, strict=True):
            off = (p.detach().double() - q.detach().double()).abs()
            assert (off <= torch.finfo(dtype).eps * q.detach().abs() + 1e-5).all()
            assert p.dtype is dtype
    assert any(not torch.equal(p, q) for p, q in zip(params, kit.drawn(*shapes, dtype=dtype), strict=True))


@METRICS
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
def test_steps_do_not_depend_on_the_unit_of_the_loss(metric, fused, kit):
    """Over twelve decades in f64; eps of the metric, and of the iteration, are 1e-8 and 1e-7."""
    reference, _, taus = run(kit, {"fused": fused}, dtype=F64, metric=metric, scale=1.0)
    for scale in (1e-2, 1e4, 1e7, 1e10):
        params, _, others = run(kit, {"fused": fused}, dtype=F64, metric=metric, scale=scale)
        torch.testing.assert_close(others, taus, rtol=1e-4, atol=0)
        torch.testing.assert_close(kit.flat(params), kit.flat(reference), rtol=1e-4, atol=1e-5)


@METRICS
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("size", [1e-43, 1e-40, 1e-30, 1e-12, 1e12, 1e18])
def test_tiny_and_huge_gradients_give_finite_steps(metric, fused, size, kit):
    for options in ({}, {"weight_decay": size}, {"weight_decay": 1e6}, {"lower_bound": None}):
        params, opt, taus = run(kit, {"fused": fused, **options}, steps=3, metric=metric, scale=size)
        assert taus.isfinite().all()
        opt.eval()
        assert kit.flat(params).isfinite().all()
        opt.train()
        assert kit.flat(params).isfinite().all()


@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("strength", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_strengths_over_twelve_decades(fused, strength, kit):
    """Steps of f32 are those of f64 with the same values, by torch."""
    for make_phi in (L1, GroupLasso, lambda lam: ElasticNet(lam, lam)):
        options = {"regularizer": make_phi(strength)}
        twins = [nn.Parameter(p.detach().double()) for p in kit.drawn(*SHAPES, dtype=torch.float32)]
        params = [nn.Parameter(p.detach().float()) for p in twins]
        opts = make(params, fused=fused, **options), make(twins, fused=False, **options)
        for k in range(3):
            loss = drawn_step(kit, params, k)
            for p, q in zip(params, twins, strict=True):
                q.grad = p.grad.double()
            for opt in opts:
                opt.step(loss=loss)
            assert opts[0].last_step.tau.tolist() == pytest.approx(opts[1].last_step.tau.tolist(), rel=2e-3)
        torch.testing.assert_close(kit.flat(params).double(), kit.flat(twins), rtol=1e-3, atol=1e-4)


# Steps that are skipped

BAD = {"loss": (math.nan, None), "infinite loss": (math.inf, None), "below": (-1.0, None), "gradient": (1.0, math.nan)}
BAD["infinite gradient"] = (1.0, math.inf)


@METRICS
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", [0, 3], ids=["matrix", "vector"])
def test_a_skipped_step_leaves_everything_bitwise_as_it_was(kind, place, metric, fused, kit):
    loss, entry = BAD[kind]
    for first in (0, 3):
        params = kit.drawn(*SHAPES, dtype=torch.float32)
        opt, twins = make(params, metric, fused=fused), kit.drawn(*SHAPES, dtype=torch.float32)
        other = make(twins, metric, fused=fused)
        for k in range(first):
            for ps, o in ((params, opt), (twins, other)):
                o.step(loss=drawn_step(kit, ps, k))
        drawn_step(kit, params, 40)
        if entry is not None:
            params[place].grad.view(-1)[5] = entry
        before = opt.state_dict(), kit.points(params)
        with pytest.warns(RuntimeWarning, match="left untouched"):
            opt.step(loss=loss)
        assert opt.last_step.branch_name == "skipped"
        assert kit.same(before, (opt.state_dict(), kit.points(params)))
        for k in range(first, first + 3):
            for ps, o in ((params, opt), (twins, other)):
                o.step(loss=drawn_step(kit, ps, k))
        assert torch.equal(kit.flat(params), kit.flat(twins))


def test_the_lower_bound_without_and_with_a_regularizer(kit):
    params = kit.drawn((4, 3), (4,))
    groups = [{"params": params[:1], "regularizer": L1(0.1)}, {"params": params[1:]}]
    for given, options, want in [
        (params, {}, 0.0),
        (params, {"weight_decay": 0.1}, 0.0),
        (params, {"regularizer": L2(0.1)}, 0.0),
        (params, {"regularizer": Box(-1, 1)}, None),
        (iter(groups), {}, None),
        (groups, {"lower_bound": 0.5}, 0.5),
        (params, {"lower_bound": None}, None),
    ]:
        opt = ScheduleFreeSPS(given, **options)
        assert {group["lower_bound"] for group in opt.param_groups} == {want}
    with pytest.raises((TypeError, ValueError), match="lower_bound"):
        ScheduleFreeSPS(params, lower_bound="none")
