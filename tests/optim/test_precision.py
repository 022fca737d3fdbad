"""Every precision and every size of gradient: a step is that of double precision, up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

from proxsps.optim import ProxSPS
from proxsps.regularizers import L1, L2, GroupLasso

PATHS = {"default": {}, "torch": {"fused": False}, "capturable": {"capturable": True}}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(64,), (67,), (3, 43), (1,), (2, 5, 31)]  # whole vector registers, with and without a rest
ENTRIES = 64 + 67 + 129 + 1 + 310
OPTIONS = {
    "none": {},
    "weight decay": {"weight_decay": 0.1},
    "L2": {"regularizer": L2(0.1)},
    "center": {},
    "L1": {"regularizer": L1(0.05)},
    "max_move": {"weight_decay": 0.1, "max_move": 1.0},
}


def in_double(params):
    """The same parameters and gradients, which double precision holds exactly."""
    wide = [torch.nn.Parameter(p.detach().double()) for p in params]
    for p, q in zip(params, wide, strict=True):
        q.grad = p.grad.double()
    return wide


def drawn(kit, dtype, scale=1.0):
    return kit.drawn(*SHAPES, dtype=dtype, scale=scale)


def options_for(name, params):
    if name == "center":
        return {"regularizer": L2(0.1, [torch.full_like(p.detach(), 0.5) for p in params])}
    return OPTIONS[name]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_is_that_of_double_precision(case, kit, dtype, name, path):
    params = drawn(kit, dtype)
    wide = in_double(params)
    before, grads = kit.flat(wide), kit.flat([p.grad for p in wide])
    loss = 40.0  # a step of about 0.07, which moves entries by more than the spacing of half precision
    for group, extra in ((params, PATHS[path]), (wide, PATHS["torch"])):
        case.make(group, **options_for(name, group), **extra).step(loss=loss)
    got, want = kit.flat(params).double(), kit.flat(wide)
    eps, arithmetic = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    size = before.abs() + grads.abs() + want.abs()
    # Sums over all entries are rounded once an entry at most; a search stops at the square root of what it can see.
    limit = ENTRIES * arithmetic * size + torch.finfo(dtype).smallest_normal
    if name == "L1" and dtype is not torch.float64:
        limit = limit + arithmetic**0.5 * grads.abs()
    # The result is rounded once to half precision; if it is shortened, with a factor s, so was the longer move: its
    # point y has s |y| <= |want| + |before|.
    rounded = want.abs() + (want.abs() + before.abs() if name == "max_move" else 0)
    limit = limit + eps / 2 * rounded * (eps > arithmetic)
    assert ((got - want).abs() <= limit).all()
    far = (want - before).abs() > eps * before.abs() + limit
    assert far.sum() > ENTRIES / 2
    assert (got != before)[far].all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(kit, dtype, path):
    # Weight decay and gradient, each below half a spacing of x, move it together.
    eps = torch.finfo(dtype).eps
    x = torch.nn.Parameter(torch.ones(67, dtype=dtype))
    x.grad = torch.full((67,), 0.3 * eps, dtype=dtype)
    opt = ProxSPS([x], lr=1.0, weight_decay=0.3 * eps, **PATHS[path])
    opt.step(loss=1.0)
    assert opt.last_step.branch_name == "capped"
    assert (x == 1 - eps / 2).all()  # the next number below 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_a_network_in_half_precision_learns(case, dtype, path):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y, losses = x[:, :4].sin(), {}
    for kind in (torch.float32, dtype):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)).to(kind)
        opt = case.make(model.parameters(), **PATHS[path])
        for _ in range(30):
            opt.zero_grad()
            loss = mse_loss(model(x.to(kind)).float(), y)
            loss.backward()
            opt.step(loss=loss)
        losses[kind] = loss.item()
    assert losses[dtype] == pytest.approx(losses[torch.float32], rel=0.2)


# -- sizes of gradients -----------------------------------------------------------------------------------------------

SCALES = [1e-30, 1e-23, 1e-20, 1e-10, 1.0, 1e10, 1e18, 1e20, 1e23, 1e30]


def scaled(kit, scale, apart):
    params = drawn(kit, torch.float32, scale)
    if apart:
        with torch.no_grad():
            for p in params:
                p.view(-1)[::2] = 0
                p.grad.view(-1)[1::2] = 0
    return params


# <g, x> = 0 lets the dual variable be tiny, so that lam / u leaves the range of f32.
@pytest.mark.parametrize(
    ("name", "apart"),
    [("none", False), ("weight decay", False), ("weight decay", True), ("max_move", True), ("L1", False), ("L1", True)],
)
@pytest.mark.parametrize("scale", SCALES)
def test_gradients_of_any_size_give_the_same_step_on_every_path(case, kit, scale, name, apart):
    wide = in_double(scaled(kit, scale, apart))
    before, grads = kit.flat(wide), kit.flat([p.grad for p in wide])
    reference = case.make(wide, **OPTIONS[name], **PATHS["torch"])
    reference.step(loss=1.0)
    want, tau = kit.flat(wide), reference.last_step.tau
    assert want.isfinite().all()
    for path, extra in PATHS.items():
        params = scaled(kit, scale, apart)
        opt = case.make(params, **OPTIONS[name], **extra)
        opt.step(loss=1.0)
        eps, tiny = torch.finfo(torch.float32).eps, 1e-19  # tau itself leaves the range of f32 where |g| > 1e19
        searched = name == "L1" and case.cls is ProxSPS
        rel = eps**0.5 if searched else ENTRIES * eps
        if searched and apart and path == "capturable":
            if scale > 1e10:
                continue  # h cannot tell such roots from 0 in f32, and there are only four rounds
            rel = 0.5  # the root lies at the first kink of h; see below for how far the model is from its minimum
        torch.testing.assert_close(opt.last_step.tau.double(), tau, rtol=rel, atol=0)
        got = kit.flat(params).double()
        assert ((got - want).abs() <= rel * (before.abs() + tau * grads.abs()) + tiny).all()


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7, 1e10])
@pytest.mark.parametrize("apart", [False, True])
def test_roots_of_any_size_are_found_in_a_fixed_number_of_rounds(kit, scale, apart):
    # Where parameters are 0, L1 holds them until u reaches l1 / |g|: then h falls from 1 to -1e20 at once.
    l1, loss = 0.05, 1.0
    params = scaled(kit, scale, apart)
    x, g = kit.flat(params).double(), kit.flat([p.grad for p in params]).double()
    opt = ProxSPS(params, lr=1.0, regularizer=L1(l1), capturable=True)
    opt.step(loss=loss)

    def dual(u):  # how far the model at y(u) is from its minimum, at most
        z = x - u * g
        h = loss + g @ (z - z.clamp(-l1, l1) - x)
        return float((1 - u) * h if h > 0 else -u * h)

    u = float(opt.last_step.u)
    slack = 100 * torch.finfo(torch.float32).eps * float((g * x).norm())  # rounding of h
    assert dual(u) <= 2e-3 * loss + slack
    assert 0 <= u < 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1e19, 1e30, 1e37])
def test_products_beyond_single_precision_do_not_stop_a_step(case, kit, size, path):
    # <g, x> and ||x||^2 overflow in f32 although every entry is finite.
    x, y = (torch.nn.Parameter(torch.full((64,), size, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    for p in (x, y):
        p.grad = torch.ones_like(p)
        case.make([p], lr=0.5, weight_decay=0.1, max_move=size, **PATHS[path]).step(loss=1.0)
    torch.testing.assert_close(x.detach().double(), y.detach(), rtol=1e-5, atol=0)
    assert y.detach().isfinite().all()


@pytest.mark.parametrize("order", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
@pytest.mark.parametrize("cap", [{}, {"max_move": 0.5}, {"cap": "matched"}], ids=str)
def test_rows_of_doubles_beside_rows_of_singles_are_not_rounded(kit, order, cap):
    """On a device, tensors of one group are written together, each in its own precision."""
    phi, lr = GroupLasso.rows(0.3), 0.1
    params = [kit.drawn((6, 9), seed=i, dtype=dtype)[0] for i, dtype in enumerate(order)]
    before = kit.points(params)
    opt = ProxSPS(params, lr=lr, regularizer=phi, capturable=True, **cap)
    opt.step(loss=torch.tensor(3.0, dtype=torch.float64))
    last = opt.last_step
    assert last.branch_name == "inside"
    tau, s = last.tau[0], last.relaxation
    for p, x in zip(params, before, strict=True):
        y = phi.prox(x.double() - tau * p.grad, tau if "cap" in cap else lr)
        rtol = 1e-13 if p.dtype is torch.float64 else 1e-6
        torch.testing.assert_close(p.detach().double(), x + s * (y - x), rtol=rtol, atol=rtol)
