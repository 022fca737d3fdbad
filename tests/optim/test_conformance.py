"""What every optimizer does: makes progress, computes the same on every path, leaves alone what is not its own."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from proxsps.optim import DecSPS, SqrtLR
from proxsps.regularizers import L1, L2, Box, GroupLasso, L2Ball, NonNegative, Simplex

F64 = torch.float64
SHAPES = [(4, 3), (7,), (2, 3, 2)]
OPTIONS = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.3},
    "l1": {"regularizer": L1(0.2)},
    "rows": {"regularizer": GroupLasso(0.4)},
}
SCHEDULERS = {
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5, 0.7),
    "ExponentialLR": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.97),
    "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + 0.05 * k)),
    "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30),
    "OneCycleLR": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=31, cycle_momentum=False),
    "SqrtLR": SqrtLR,
}


def run(opt, problem, weights, steps=30, scheduler=None):
    """Losses along a run; `weights` are the six entries of the point, as a function of the parameters."""
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        loss = problem.loss(weights())
        loss.backward()
        opt.step(loss=loss)
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


def drive(opt, seed=3, steps=3, losses=(0.7, 0.05, 40.0)):
    """Steps with gradients and losses that do not depend on the point: rounding does not grow from step to step."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for k in range(steps):
        generator = torch.Generator().manual_seed(seed + k)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=F64).to(p.dtype)
        opt.step(loss=losses[k % len(losses)])
    return torch.cat([p.detach().reshape(-1).double() for p in params])


def group_state(opt):
    skipped = ("params", "regularizer", "fused", "capturable", "param_names")
    values = [v for group in opt.param_groups for k, v in group.items() if k not in skipped and v is not None]
    return [float(v) for v in values if not isinstance(v, (str, tuple))]


# -- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, None])
def test_loss_decreases_on_contiguous_parameters(case, kit, fused):
    w = torch.nn.Parameter(torch.zeros(6, dtype=F64))
    losses = run(case.make([w], fused=fused), kit.least_squares(), lambda: w)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("capturable", [False, True])
def test_loss_decreases_on_non_contiguous_parameters(case, kit, capturable):
    w = torch.nn.Parameter(torch.zeros(6, 3, dtype=F64)[:, 1])
    v = torch.nn.Parameter(torch.zeros(3, 2, dtype=F64).t())
    assert not w.is_contiguous()
    assert not v.is_contiguous()
    losses = run(case.make([w, v], capturable=capturable), kit.least_squares(), lambda: w + v.reshape(-1))
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_does_not_depend_on_the_memory_layout(case, kit):
    (x,) = kit.drawn((4, 6))
    strided = torch.nn.Parameter(torch.empty(6, 4, dtype=F64).t().copy_(x.detach()))
    strided.grad = x.grad.clone()
    for p in (x, strided):
        case.make([p], weight_decay=0.2).step(loss=0.4)
    torch.testing.assert_close(strided.detach(), x.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_loss_decreases_with_schedulers(case, kit, scheduler):
    w = torch.nn.Parameter(torch.zeros(6, dtype=F64))
    opt = case.make([w])
    losses = run(opt, kit.least_squares(), lambda: w, scheduler=scheduler(opt))
    # DecSPS never takes a longer step than before, so that a warm-up keeps it short for good.
    assert losses[-1] < (0.9 if isinstance(opt, DecSPS) else 0.7) * losses[0]


def test_loss_decreases_with_a_scheduler_that_watches_the_loss(case, kit):
    w = torch.nn.Parameter(torch.zeros(6, dtype=F64))
    opt = case.make([w])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    losses = run(opt, kit.least_squares(), lambda: w, steps=20)
    for _ in range(3):
        scheduler.step(1.0)
    assert opt.param_groups[0]["lr"] < case.lr
    assert run(opt, kit.least_squares(), lambda: w, steps=20)[-1] < losses[0]


@pytest.mark.parametrize("other", [{"weight_decay": 1e-3}, {"regularizer": L1(1e-3)}], ids=["weight_decay", "L1"])
def test_loss_decreases_with_options_per_group(case, kit, other):
    w, v = (torch.nn.Parameter(torch.zeros(3, dtype=F64)) for _ in range(2))
    opt = case.make([{"params": [w], "lr": case.lr / 2}, {"params": [v], **other}])
    losses = run(opt, kit.least_squares(), lambda: torch.cat([w, v]))
    assert losses[-1] < 0.5 * losses[0]


def test_rosenbrock_makes_progress(case):
    w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=F64))
    opt = case.make([w], lr=1.0 if case.loss else 1e-3)
    values = []
    for _ in range(200):
        opt.zero_grad()
        loss = 100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2
        loss.backward()
        opt.step(loss=loss)
        values.append(loss.item())
    assert values[-1] < 0.25 * values[0]


def test_parabola_makes_progress(case):
    w = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=F64))
    opt = case.make([w])
    start = None
    for _ in range(100):
        opt.zero_grad()
        loss = w[0] ** 2 + 5 * w[1] ** 2
        loss.backward()
        opt.step(loss=loss)
        start = loss.item() if start is None else start
    assert loss.item() < 0.05 * start


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["host", "capturable"])
def test_interpolation_contracts_at_the_rate_of_the_theory(polyak_case, kit, options):
    # f is mu-strongly convex, L-smooth, min f = 0 and <g, x - x*> = 2f. With the uncapped step f/||g||^2,
    # dist^2 falls by 4 f^2/||g||^2 - f^2/||g||^2 = 3 f^2/||g||^2 >= 3f/(2L) >= 3 mu/(4L) dist^2.
    problem = kit.least_squares()
    mu, L = problem.curvature()
    w = torch.nn.Parameter(torch.zeros(6, dtype=F64))
    opt = polyak_case.make([w], lr=1 / (2 * mu), **options)
    for _ in range(60):
        before = (w.detach() - problem.solution).square().sum()
        run(opt, problem, lambda: w, steps=1)
        after = (w.detach() - problem.solution).square().sum()
        assert after <= (1 - 3 * mu / (4 * L)) * before * (1 + 1e-12)


def test_interpolation_converges_on_samples_with_a_constant_step(polyak_case, kit):
    problem = kit.least_squares(rows=12)
    w = torch.nn.Parameter(torch.zeros(6, dtype=F64))
    opt = polyak_case.make([w], lr=10.0)
    distances = []
    for epoch in range(60):
        for i in torch.randperm(12, generator=torch.Generator().manual_seed(epoch)):
            opt.zero_grad()
            loss = problem.loss(w, i[None])
            loss.backward()
            opt.step(loss=loss)
        distances.append((w.detach() - problem.solution).norm().item())
    # Linear: every further 20 epochs gain at least two digits.
    assert distances[39] < 1e-2 * distances[19]
    assert distances[59] < 1e-2 * distances[39]


# -- one step, on every path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("path", [{"fused": True}, {"capturable": True}, {}], ids=["kernels", "capturable", "default"])
def test_every_path_takes_the_same_steps(case, kit, options, path):
    pytest.importorskip("numba")
    plain = case.make(kit.drawn(*SHAPES), fused=False, **options)
    other = case.make(kit.drawn(*SHAPES), **path, **options)
    # The search stops at a duality gap of 1e-12 of the loss gap; closed forms differ by reordered sums only.
    tolerance = 1e-6 if "regularizer" in options else 1e-12
    torch.testing.assert_close(drive(other), drive(plain), rtol=tolerance, atol=tolerance)
    assert group_state(other) == pytest.approx(group_state(plain), rel=tolerance)


@pytest.mark.parametrize("path", [{"fused": True}, {"capturable": True}], ids=["kernels", "capturable"])
def test_every_path_takes_the_same_steps_over_mixed_groups(case, kit, path):
    def groups():
        a, b, c = kit.drawn(*SHAPES)
        return [
            {"params": [a], "weight_decay": 0.5},
            {"params": [b], "lr": 0.3},
            {"params": [c], "regularizer": L1(0.1)},
        ]

    plain, other = case.make(groups(), fused=False), case.make(groups(), **path)
    torch.testing.assert_close(drive(other), drive(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", [{"fused": False}, {"capturable": True}], ids=["torch", "capturable"])
def test_squared_l2_with_a_center_is_the_same_step_about_another_origin(case, kit, path):
    (x,) = kit.drawn((5,))
    center = torch.linspace(-1, 1, 5, dtype=F64)
    moved = torch.nn.Parameter(x.detach() - center)
    moved.grad = x.grad.clone()
    case.make([x], regularizer=L2(0.7, center), **path).step(loss=0.6)
    case.make([moved], weight_decay=0.7, **path).step(loss=0.6)
    torch.testing.assert_close(x.detach() - center, moved.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_tensor_lr_is_float_lr(case, kit, options, path):
    number = case.make(kit.drawn(*SHAPES), lr=0.25, **options, **path)
    tensor = case.make(kit.drawn(*SHAPES), lr=torch.tensor(0.25), **options, **path)
    assert torch.equal(drive(tensor), drive(number))


def test_tensor_lr_may_be_changed_in_place(case, kit):
    lr = torch.tensor(8.0)
    changed, new = case.make(kit.drawn(*SHAPES), lr=lr), case.make(kit.drawn(*SHAPES), lr=0.125)
    lr.fill_(0.125)
    assert torch.equal(drive(changed), drive(new))


def test_splitting_one_group_into_two_equal_ones_changes_nothing(case, kit):
    options = {"lr": 0.3, "weight_decay": 0.4}
    one = case.make(kit.drawn(*SHAPES), **options)
    a, b, c = kit.drawn(*SHAPES)
    two = case.make([{"params": [a]}, {"params": [b, c]}], **options)
    # Only the order of a few sums differs.
    torch.testing.assert_close(drive(two), drive(one), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_takes_the_step_of_double_precision(case, kit, dtype, path):
    low = kit.drawn(*SHAPES, dtype=dtype)
    high = [torch.nn.Parameter(p.detach().double()) for p in low]
    for p, q in zip(low, high, strict=True):
        q.grad = p.grad.double()
    case.make(low, lr=0.25, weight_decay=0.5, **path).step(loss=0.5)
    case.make(high, lr=0.25, weight_decay=0.5, fused=False).step(loss=0.5)
    eps = torch.finfo(dtype).eps
    for p, q in zip(low, high, strict=True):
        assert p.dtype is dtype
        # u comes from f32 sums; x, g and their combination are rounded to the dtype a few times.
        bound = 4 * eps * (q.detach().abs() + 0.25 * q.grad.abs()) + 1e-6
        assert ((p.detach().double() - q.detach()).abs() <= bound).all()


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_parameters_of_two_dtypes_share_one_step(case, kit, path):
    double = kit.drawn((3,), (4,))
    mixed = [double[0], kit.copied(double[1])]
    mixed[1] = torch.nn.Parameter(mixed[1].detach().float())
    mixed[1].grad = double[1].grad.float()
    mixed[0] = kit.copied(double[0])
    case.make(mixed, lr=0.25, **path).step(loss=0.5)
    case.make(double, lr=0.25).step(loss=0.5)
    torch.testing.assert_close(kit.flat(p.double() for p in mixed), kit.flat(double), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_complex_parameters_step_as_their_real_views(case, kit, path):
    (z,) = kit.drawn((5,), dtype=torch.complex128)
    real = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
    real.grad = torch.view_as_real(z.grad).clone()
    for p in (z, real):
        case.make([p], weight_decay=0.3, **path).step(loss=0.8)
    assert torch.equal(torch.view_as_real(z.detach()), real.detach())


# -- gradients that say nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_parameters_without_gradients_stay(case, kit, path):
    a, b = kit.drawn((3,), (4,))
    alone = kit.copied(b)
    a.grad = None
    before = a.detach().clone()
    case.make([a, b], weight_decay=0.2, **path).step(loss=0.5)
    case.make([alone], weight_decay=0.2, **path).step(loss=0.5)
    assert torch.equal(a.detach(), before)
    assert torch.equal(b.detach(), alone.detach())


def test_a_group_without_gradients_stays(case, kit):
    a, b = kit.drawn((3,), (4,))
    alone = kit.copied(b)
    a.grad = None
    before = a.detach().clone()
    case.make([{"params": [a], "regularizer": L1(0.1)}, {"params": [b]}]).step(loss=0.5)
    case.make([alone]).step(loss=0.5)
    assert torch.equal(a.detach(), before)
    torch.testing.assert_close(b.detach(), alone.detach(), rtol=1e-14, atol=0)


def test_nothing_happens_without_any_gradient(case, kit):
    (a,) = kit.drawn((3,))
    a.grad = None
    before = a.detach().clone()
    opt = case.make([a])
    with pytest.warns(RuntimeWarning, match=r"No parameter has a gradient\. Call loss\.backward\(\)") as said:
        opt.step(loss=0.5)
    assert said[0].filename == __file__
    opt.step(loss=0.5)  # said once
    assert torch.equal(a.detach(), before)
    assert opt.last_step is None


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_zero_gradients_leave_an_unregularised_point(case, kit, path):
    params = kit.drawn(*SHAPES, scale=0.0)
    before = kit.points(params)
    case.make(params, **path).step(loss=0.5)
    assert all(map(torch.equal, kit.points(params), before))


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_zero_gradients_give_the_prox_alone(prox_case, kit, path):
    params = kit.drawn((4,), (5,), scale=0.0)
    (a, b) = kit.points(params)
    groups = [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:], "regularizer": L1(0.3)}]
    prox_case.make(groups, lr=2.0, **path).step(loss=0.5)
    torch.testing.assert_close(params[0].detach(), a / 2, rtol=1e-15, atol=0)
    torch.testing.assert_close(params[1].detach(), b.sign() * (b.abs() - 0.6).clamp(min=0), rtol=1e-15, atol=1e-16)


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
@pytest.mark.parametrize("phi", [Box(-0.1, 0.1), Simplex(1.0), L2Ball(0.5), NonNegative(), L1(3.0), None], ids=repr)
def test_lr_zero_leaves_parameters_as_they_are(prox_case, kit, phi, path):
    params = kit.drawn(*SHAPES)
    before = kit.points(params)
    prox_case.make(params, lr=0.0, regularizer=phi, **path).step(loss=0.5)
    assert all(map(torch.equal, kit.points(params), before))


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_lr_zero_with_weight_decay_leaves_parameters_as_they_are(case, kit, lr, path):
    params = kit.drawn(*SHAPES)
    before = kit.points(params)
    case.make(params, lr=lr, weight_decay=0.5, **path).step(loss=0.5)
    assert all(map(torch.equal, kit.points(params), before))


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_a_group_at_lr_zero_stays_while_another_moves(prox_case, kit, path):
    a, b = kit.drawn((3,), (4,))
    before = a.detach().clone(), b.detach().clone()
    groups = [{"params": [a], "lr": 0.0, "regularizer": Box(-0.1, 0.1)}, {"params": [b]}]
    prox_case.make(groups, **path).step(loss=0.5)
    assert torch.equal(a.detach(), before[0])
    assert not torch.equal(b.detach(), before[1])


@pytest.mark.parametrize("quiet", ["lr", "grad"])
def test_a_step_that_could_not_move_does_not_stop_later_ones(case, kit, quiet):
    params = kit.drawn(*SHAPES)
    opt = case.make(params)
    saved = kit.points([p.grad for p in params])
    if quiet == "lr":
        opt.param_groups[0]["lr"] = 0.0
    else:
        for p in params:
            p.grad.zero_()
    opt.step(loss=0.5)
    opt.param_groups[0]["lr"] = case.lr
    for p, g in zip(params, saved, strict=True):
        p.grad = g
    before = kit.points(params)
    opt.step(loss=0.5)
    assert not any(map(torch.equal, kit.points(params), before))


# -- numbers at the edge ----------------------------------------------------------------------------------------------

PATHS = [{"fused": False}, {"fused": None}, {"capturable": True}]
PATH_NAMES = ["torch", "default", "capturable"]


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tiny_gradients_do_not_overflow(case, kit, options, path):
    params = kit.drawn(*SHAPES, dtype=torch.float32, scale=1e-30)
    before = kit.flat(params).double()
    case.make(params, lr=0.5, **options, **path).step(loss=0.5)
    still = case.make(kit.drawn(*SHAPES, dtype=torch.float32, scale=0.0), lr=0.5, fused=False, **options)
    if not case.coupled:
        still.step(loss=0.5)  # 1e-30 is nothing against a point of order 1, the step is the prox alone
        expected = kit.flat(still.param_groups[0]["params"]).double()
        torch.testing.assert_close(kit.flat(params).double(), expected, rtol=1e-6, atol=1e-7)
    assert kit.flat(params).isfinite().all()
    assert (kit.flat(params).double() - before).abs().max() < 10


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_huge_gradients_take_the_step_of_double_precision(bounded_case, kit, options, path):
    # ||g||^2 = 1e51 overflows f32; the step gap/||g||^2 * g is about 1e-26, and only the regulariser moves the point.
    low = kit.drawn(*SHAPES, dtype=torch.float32, scale=1e25)
    high = [torch.nn.Parameter(p.detach().double()) for p in low]
    for p, q in zip(low, high, strict=True):
        q.grad = p.grad.double()
    opt = bounded_case.make(low, lr=0.5, **options, **path)
    opt.step(loss=0.5)
    bounded_case.make(high, lr=0.5, fused=False, **options).step(loss=0.5)
    torch.testing.assert_close(kit.flat(low).double(), kit.flat(high), rtol=1e-5, atol=1e-5)
    assert opt.last_step.branch_name != "skipped"


def test_an_infinite_cap_is_refused_or_right(bounded_case, kit):
    (x,) = kit.drawn((4,))
    before = x.detach().clone()
    try:
        opt = bounded_case.make([x], lr=math.inf)
    except ValueError as error:
        assert "lr" in str(error)  # noqa: PT017
        return
    opt.step(loss=0.5)
    torch.testing.assert_close(x.detach(), before - 0.5 / x.grad.square().sum() * x.grad, rtol=1e-13, atol=1e-13)


BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_loss_that_is_not_finite_is_said_once_and_changes_nothing(case, kit, bad, fused):
    params = kit.drawn(*SHAPES)
    opt, before = case.make(params, fused=fused), kit.points(params)
    with pytest.warns(RuntimeWarning, match=r"loss is -?(nan|inf).*untouched") as said:
        opt.step(loss=bad)
    assert said[0].filename == __file__
    opt.step(loss=torch.tensor(bad))
    assert all(map(torch.equal, kit.points(params), before))
    assert opt.last_step.branch_name == "skipped"
    opt.step(loss=0.5)
    assert not any(map(torch.equal, kit.points(params), before))


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gradient_that_is_not_finite_is_said_once_and_changes_nothing(case, kit, bad, fused, options):
    params = kit.drawn(*SHAPES)
    opt, before = case.make(params, fused=fused, **options), kit.points(params)
    params[1].grad[2] = bad
    with pytest.warns(RuntimeWarning, match=r"gradient or a parameter is not finite.*untouched"):
        opt.step(loss=0.5)
    opt.step(loss=0.5)
    assert all(map(torch.equal, kit.points(params), before))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("where", ["loss", "grad"])
def test_capturable_steps_mask_what_is_not_finite(case, kit, bad, where, options):
    params = kit.drawn(*SHAPES)
    opt, before = case.make(params, capturable=True, **options), kit.points(params)
    if where == "grad":
        params[1].grad[2] = bad
    opt.step(loss=torch.tensor(bad if where == "loss" else 0.5, dtype=F64))
    assert all(map(torch.equal, kit.points(params), before))
    assert opt.last_step.branch_name == "skipped"
    params[1].grad[2] = 1.0
    opt.step(loss=torch.tensor(0.5, dtype=F64))
    assert not any(map(torch.equal, kit.points(params), before))


def test_a_loss_below_the_bound_is_said_once_and_changes_nothing(bounded_case, kit):
    params = kit.drawn(*SHAPES)
    opt, before = bounded_case.make(params, lower_bound=2.0), kit.points(params)
    with pytest.warns(RuntimeWarning, match=r"loss.* 1\.5 .*lower_bound=2.*untouched"):
        opt.step(loss=1.5)
    opt.step(loss=1.5)
    assert all(map(torch.equal, kit.points(params), before))
    opt.step(loss=1.5, lower_bound=1.0)
    assert not any(map(torch.equal, kit.points(params), before))


def test_a_capturable_step_below_the_bound_changes_nothing(bounded_case, kit):
    params = kit.drawn(*SHAPES)
    opt, before = bounded_case.make(params, lower_bound=2.0, capturable=True), kit.points(params)
    opt.step(loss=torch.tensor(1.5))
    assert all(map(torch.equal, kit.points(params), before))
    assert opt.last_step.branch_name == "skipped"


def test_the_bound_of_a_batch_replaces_that_of_the_optimizer(bounded_case, kit):
    one, two = kit.drawn(*SHAPES), kit.drawn(*SHAPES)
    bounded_case.make(one, lower_bound=0.2).step(loss=0.9)
    bounded_case.make(two, lower_bound=7.0).step(loss=0.9, lower_bound=torch.tensor(0.2, dtype=F64))
    assert torch.equal(kit.flat(one), kit.flat(two))


# -- what belongs to others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_loss_and_gradients_are_never_changed(case, kit, options, path, dtype):
    params = kit.drawn(*SHAPES, dtype=dtype)
    loss = sum((p * p.detach()).sum() for p in params).square()
    grads = [p.grad for p in params]
    kept, versions = kit.points([loss, *grads]), [t._version for t in (loss, *grads)]
    addresses = [p.data_ptr() for p in params]
    case.make(params, **options, **path).step(loss=loss)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(map(torch.equal, (loss, *grads), kept))
    assert [t._version for t in (loss, *grads)] == versions
    assert [p.data_ptr() for p in params] == addresses
    assert loss.requires_grad


def test_repr_names_the_optimizer_and_its_options(case, kit):
    text = repr(case.make(kit.drawn((3,)), regularizer=L1(0.25)))
    assert text.startswith(case.cls.__name__)
    assert "L1(lam=0.25)" in text
    assert f"lr: {case.lr}" in text


def test_step_hooks_run_around_the_step(case, kit):
    (x,) = kit.drawn((3,))
    opt, seen = case.make([x]), []
    opt.register_step_pre_hook(lambda *_: seen.append(x.detach().clone()))
    opt.register_step_post_hook(lambda *_: seen.append(x.detach().clone()))
    before = x.detach().clone()
    opt.step(loss=0.5)
    assert torch.equal(seen[0], before)
    assert torch.equal(seen[1], x.detach())
    assert not torch.equal(*seen)


def test_a_group_added_later_takes_part(case, kit):
    options = {"weight_decay": 0.1}
    a, b = kit.drawn((3,), (4,))
    later = case.make([a], **options)
    later.add_param_group({"params": [b], "lr": 0.3})
    c, d = kit.drawn((3,), (4,))
    together = case.make([{"params": [c]}, {"params": [d], "lr": 0.3}], **options)
    assert torch.equal(drive(later), drive(together))


def test_a_group_added_between_steps_moves(case, kit):
    a, b = kit.drawn((3,), (4,))
    opt = case.make([a])
    drive(opt, steps=2)
    before = b.detach().clone()
    opt.add_param_group({"params": [b]})
    drive(opt, steps=1)
    assert not torch.equal(b.detach(), before)
    assert opt.last_step.tau.shape == (2,)


def test_a_refused_group_is_not_added(case, kit):
    a, b = kit.drawn((3,), (4,))
    opt = case.make([a])
    with pytest.raises(ValueError, match="lr must be"):
        opt.add_param_group({"params": [b], "lr": -1.0})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [b]})


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"]
)
def test_copies_go_on_as_the_original(case, kit, duplicate):
    opt = case.make(kit.drawn(*SHAPES), regularizer=L1(0.1))
    drive(opt)
    twin = duplicate(opt)
    assert twin.param_groups[0]["regularizer"] == L1(0.1)
    assert torch.equal(drive(twin, seed=9), drive(opt, seed=9))


@pytest.mark.parametrize("capturable", [False, True])
def test_nothing_grows_with_the_number_of_steps(case, kit, capturable):
    opt = case.make(kit.drawn(*SHAPES), capturable=capturable)
    drive(opt, steps=5)
    attributes, size = set(vars(opt)), len(pickle.dumps(opt.state_dict()))
    drive(opt, steps=50)
    assert not opt.state
    assert len(pickle.dumps(opt.state_dict())) == size
    assert set(vars(opt)) == attributes


# -- the report -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("last", [L1(0.1), None], ids=["search", "closed"])
def test_last_step_has_an_entry_a_group(case, kit, capturable, last):
    a, b = kit.drawn((3,), (4,))
    opt = case.make(
        [{"params": [a], "lr": 0.3}, {"params": [b], "lr": 0.6, "regularizer": last}], capturable=capturable
    )
    assert opt.last_step is None
    opt.step(loss=torch.tensor([0.4], dtype=F64))
    report = opt.last_step
    shapes = {name: tuple(getattr(report, name).shape) for name in report._fields}
    of_groups = {name: shape for name, shape in shapes.items() if shape}
    assert of_groups == {"tau": (2,), "zeta": (2,)}
    whole = {"u", "gap", "model_gap", "branch", "evaluations", "relaxation", "cap", "distance_cap"}
    assert set(shapes) - set(of_groups) == whole
    assert 0 <= report.u <= 1
    torch.testing.assert_close(report.tau.double(), report.u.double() * torch.tensor([0.3, 0.6], dtype=F64))
    assert report.branch_name in {"truncated", "inside", "capped"}


@pytest.mark.parametrize("path", PATHS, ids=PATH_NAMES)
@pytest.mark.parametrize(("loss", "branch", "u"), [(0.0, "truncated", 0.0), (1.0, "inside", 0.5), (8.0, "capped", 1.0)])
def test_last_step_names_the_branch(bounded_case, loss, branch, u, path):
    # ||g||^2 = 4 and lr = 1/2: the step loss/4 is capped from loss = 2 on.
    x = torch.nn.Parameter(torch.ones(4, dtype=F64))
    x.grad = torch.ones(4, dtype=F64)
    opt = bounded_case.make([x], lr=0.5, **path)
    opt.step(loss=loss)
    report = opt.last_step
    assert report.branch_name == branch
    assert (float(report.u), float(report.tau[0]), float(report.zeta[0])) == (u, u / 2, loss / 4)
    assert float(report.gap) == loss
    assert float(report.model_gap) == loss - 4 * u / 2


def test_last_step_of_a_skipped_step_says_so(case, kit):
    opt = case.make(kit.drawn(*SHAPES))
    with pytest.warns(RuntimeWarning):
        opt.step(loss=math.nan)
    report = opt.last_step
    assert report.branch_name == "skipped"
    assert report.tau.tolist() == [0.0]
    assert report.zeta.isnan().all()
    assert report.u.isnan()
