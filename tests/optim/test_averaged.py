"""Steps with averages of gradients: the same by the kernels, by torch and on a device."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch

from proxsps.core.sampling import sample_size
from proxsps.optim import ProxSPS, ProxSPSAdam
from proxsps.optim.vectors import host
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso

SHAPES = [(1,), (63,), (8, 8), (65,), (129, 131), (3, 0)]
VARIANTS = {
    "momentum": (ProxSPS, {"lr": 0.7, "momentum": 0.9}),
    "momentum, matched": (ProxSPS, {"lr": 0.7, "momentum": 0.9, "cap": "matched"}),
    "momentum, no lr": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "momentum, short moves": (ProxSPS, {"lr": 0.7, "momentum": 0.9, "max_move": 0.01}),
    "no lr": (ProxSPS, {"lr": None}),
    "Adam": (ProxSPSAdam, {"lr": 0.01}),
    "Adam, proximal": (ProxSPSAdam, {"lr": 0.01, "cap": "proximal"}),
    "Adam, no lr": (ProxSPSAdam, {}),
    "Adam, short moves": (ProxSPSAdam, {"max_move": 0.01}),
    "Adam without eps": (ProxSPSAdam, {"lr": 0.01, "eps": 0.0}),
    "momentum, L1": (ProxSPS, {"lr": 0.01, "momentum": 0.9, "regularizer": L1(0.3)}),
    "momentum, L1, no lr": (ProxSPS, {"lr": None, "momentum": 0.9, "regularizer": L1(0.3)}),
    "momentum, Box, short moves": (ProxSPS, {"lr": 0.1, "momentum": 0.9, "regularizer": Box(-1, 2), "max_move": 1.0}),
    "momentum, rows": (ProxSPS, {"lr": 0.01, "momentum": 0.9, "regularizer": GroupLasso(0.4, (-1,))}),
    "momentum, columns, no lr": (ProxSPS, {"lr": None, "momentum": 0.9, "regularizer": GroupLasso(0.4, (0,))}),
    "Adam, L1, proximal": (ProxSPSAdam, {"lr": 0.01, "cap": "proximal", "regularizer": L1(0.3)}),
    "Adam, L1, no lr": (ProxSPSAdam, {"regularizer": L1(0.3)}),
    "Adam, ElasticNet": (ProxSPSAdam, {"lr": 0.01, "regularizer": ElasticNet(0.2, 0.4), "max_move": 1.0}),
    "Adam, Euclidean L2": (ProxSPSAdam, {"lr": 0.01, "eps": 0.0, "regularizer": L2(0.4)}),
}
PATHS = {"kernels": {"fused": True}, "torch alone": {"fused": False}, "device": {"capturable": True}}


@pytest.fixture(params=PATHS)
def path(request):
    """How a step is taken, as options."""
    if request.param == "kernels":
        pytest.importorskip("numba")
    return PATHS[request.param]


def problem(variant, path, dtype=torch.float64, seed=0, **options):
    """An optimizer with two groups, and a function that takes a step of least squares."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    method, own = VARIANTS[variant]
    own = dict(own)
    phi = own.pop("regularizer", None)
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "regularizer": phi}]
    opt = method(groups, **path, **own, **options)

    def step(scale=1.0, without=()):
        opt.zero_grad()
        wanted = [torch.randn(p.shape, generator=generator, dtype=dtype) for p in params]
        own = [p for i, p in enumerate(params) if i not in without]
        loss = scale * sum(
            (p - w).square().sum() for p, w in zip(params, wanted, strict=True) if any(p is q for q in own)
        )
        loss.backward()
        for i in without:
            params[i].grad = None
        opt.step(loss=loss)
        return loss

    return opt, params, step


def everything(opt, params):
    """Copies of all parameters and state tensors, and the numbers of the groups."""
    state = [t.clone() for p in params for _, t in sorted(opt.state[p].items())]
    values = [value for group in opt.param_groups for value in group.values()]
    numbers = [float(value) for value in values if isinstance(value, (float, torch.Tensor))]
    return [p.detach().clone() for p in params] + state, numbers


def assert_close(got, want, rtol):
    for a, b in zip(got[0], want[0], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(got[1], want[1], rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_paths_take_the_same_steps(path, variant, dtype):
    def run(path):
        opt, params, step = problem(variant, path, dtype)
        for k in range(4):
            step(without=(1, 4) if k == 2 else ())  # which then rest
        return everything(opt, params)

    searched = "regularizer" in VARIANTS[variant][1]
    # A search of a device ends after a fixed number of rounds, at about the square root of what it can see.
    exact = 1e-6 if searched and "capturable" in path else 1e-10
    assert_close(run(path), run(PATHS["torch alone"]), exact if dtype is torch.float64 else 1e-4)


@pytest.mark.parametrize("variant", ["momentum", "momentum, no lr", "Adam", "Adam, no lr"])
def test_a_step_does_not_depend_on_what_is_joined_and_cut(monkeypatch, variant):
    def run():
        opt, params, step = problem(variant, PATHS["torch alone"], torch.float32)
        for _ in range(3):
            step()
        return everything(opt, params)

    whole = run()
    monkeypatch.setattr(host, "PIECE", 1000)
    assert_close(run(), whole, 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_that_is_skipped_leaves_everything_as_it_was(path, variant):
    opt, params, step = problem(variant, path, torch.float32)
    for bad in ("loss", "gradient"):
        step()
        before = everything(opt, params)
        loss = step_with(opt, params, bad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            opt.step(loss=loss)
        after = everything(opt, params)
        assert all(map(torch.equal, after[0], before[0]))
        assert after[1] == before[1]


def step_with(opt, params, bad):
    """Gradients, one entry of which is not finite, or a loss that is not."""
    for p in params:
        p.grad = torch.ones_like(p)
    if bad == "gradient":
        params[4].grad[100, 17] = float("inf")
    return 1.0 if bad == "gradient" else float("nan")


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_left_alone(path, variant):
    opt, params, step = problem(variant, path)
    step()
    grads = [p.grad.clone() for p in params]
    opt.step(loss=1.0)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))


@pytest.mark.parametrize("variant", ["momentum", "momentum, no lr", "Adam", "Adam, no lr"])
def test_a_resumed_run_goes_on_bitwise(path, variant):
    opt, params, step = problem(variant, path, torch.float32)
    for _ in range(3):
        step()
    saved = copy.deepcopy(opt.state_dict())  # tensors of the state change in place, as in torch's own optimizers
    other, copies, _ = problem(variant, path, torch.float32)
    other.load_state_dict(saved)
    for p, q in zip(params, copies, strict=True):
        q.data.copy_(p.data)
        q.grad = p.grad.clone()
    opt.step(loss=2.0)
    other.step(loss=2.0)
    first, second = everything(opt, params), everything(other, copies)
    assert all(map(torch.equal, first[0], second[0]))
    assert first[1] == second[1]


@pytest.mark.parametrize(
    ("variant", "scale"),
    [("momentum, matched", 1e-25), ("momentum, matched", 1e25), ("Adam", 1e-16), ("Adam", 1e16)],
)
def test_squares_beyond_single_precision_are_taken_in_double(path, variant, scale):
    opt, params, _ = problem(variant, path, torch.float32)
    wide, doubles, _ = problem(variant, path, torch.float64)
    for p, q in zip(params, doubles, strict=True):
        q.data.copy_(p.data)
        p.grad = torch.full_like(p, scale)
        q.grad = torch.full_like(q, scale)
    for factor in (1, 1000):
        opt.step(loss=factor * scale)
        wide.step(loss=factor * scale)
        assert (opt.last_step.tau > 0).all()
        torch.testing.assert_close(opt.last_step.tau, wide.last_step.tau, rtol=1e-3, atol=0)
    for p, q in zip(params, doubles, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beside", [None, L1(0.1)], ids=["alone", "beside a search"])
def test_a_gradient_whose_square_overflows_skips_the_step(path, beside):
    """Its v would be infinite for ever, and the entry would never move again. So the step is skipped, as in JAX."""
    params = [torch.nn.Parameter(torch.ones(70)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "regularizer": beside}]
    opt = ProxSPSAdam(groups, **path)
    for largest in (1.0, 1.0, 3e19, 1e18):  # times the weight of the third step, 1/3, the square is finite again
        for p in params:
            p.grad = torch.ones_like(p)
        params[1].grad[-1] = largest
        before = everything(opt, params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            opt.step(loss=1.0)
        after = everything(opt, params)
        taken = largest < 1e19
        assert (opt.last_step.branch_name != "skipped") == taken
        assert taken or all(map(torch.equal, after[0], before[0]))
        assert all(t.isfinite().all() for t in after[0])


def test_a_slope_that_nearly_cancels_is_taken_in_double(path):
    """By products of d and g alone, ||d'||^2 would be a difference of numbers that f32 cannot tell apart."""
    taus = []
    for dtype in (torch.float32, torch.float64):
        opt, params, _ = problem("momentum", path, dtype)
        generator = torch.Generator().manual_seed(5)
        for factor, noise in ((1.0, 0.0), (-9.0, 1e-2)):  # d' = .9 d + .1 g
            for p in params:
                g = torch.randn(p.shape, generator=generator.manual_seed(p.numel()))
                p.grad = (factor * g + noise * torch.randn(p.shape, generator=generator)).to(dtype)
                p.data.zero_()
            opt.step(loss=1e-3)
        taus.append(opt.last_step.tau)
    torch.testing.assert_close(*taus, rtol=1e-3, atol=0)


def test_an_eps_that_single_precision_does_not_have_leaves_entries_without_gradient_alone(path):
    x = torch.nn.Parameter(torch.ones(70))
    opt = ProxSPSAdam([x], lr=0.1, eps=1e-50, **path)
    for _ in range(2):
        x.grad = torch.ones(70)
        x.grad[::2] = 0
        opt.step(loss=1.0)
    assert (x[::2] == 1).all()
    assert (x[1::2] < 1).all()


def test_a_step_of_length_zero_takes_the_gradient_into_the_averages(path):
    opt, params, step = problem("Adam, no lr", path)
    for p in params:
        p.grad = torch.zeros_like(p)
    opt.step(loss=1.0)  # there never was a gradient, so that the distance cap is 0
    assert (opt.last_step.tau == 0).all()
    assert all(opt.state[p]["average"].eq(0).all() for p in params)
    step()
    assert all(p.numel() == 0 or opt.state[p]["average"].ne(0).any() for p in params)


OUTSIDE = {
    "half": lambda: [torch.nn.Parameter(torch.ones(67, dtype=torch.bfloat16))],
    "strided": lambda: [torch.nn.Parameter(torch.ones(67, 2)[:, 1])],
    "two dtypes": lambda: [torch.nn.Parameter(torch.ones(67)), torch.nn.Parameter(torch.ones(67).double())],
    "center": lambda: [{"params": [torch.nn.Parameter(torch.ones(67))], "regularizer": L2(0.1, torch.zeros(67))}],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_tensors_have_averages_too(name):
    opt = ProxSPS(OUTSIDE[name](), momentum=0.9)
    for _ in range(2):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.01)
        opt.step(loss=0.1)
    assert all((p != 1).all() for group in opt.param_groups for p in group["params"])


@pytest.mark.parametrize("variant", ["momentum", "Adam, no lr"])
def test_complex_and_channels_last_parameters_take_the_same_steps(path, variant):
    def run(path):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(33, 5, generator=generator, dtype=torch.complex128)
        y = torch.randn(4, 5, 6, 7, generator=generator, dtype=torch.float64)
        params = [torch.nn.Parameter(x), torch.nn.Parameter(y.to(memory_format=torch.channels_last))]
        method, own = VARIANTS[variant]
        opt = method(params, **path, **own)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype).to(
                    memory_format=torch.preserve_format
                )
                p.grad = torch.empty_like(p).copy_(p.grad)
            opt.step(loss=3.0)
        return everything(opt, params)

    assert_close(run(path), run(PATHS["device"]), 1e-10)


def test_other_blocks_beside_lines_are_stepped_on_too(path):
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(70, generator=generator)) for _ in range(2)]
    groups = [{"params": params[:1], "regularizer": L1(0.1)}, {"params": params[1:], "weight_decay": 0.1}]
    opt = ProxSPS(groups, lr=None, momentum=0.9, **path)
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for p in params:
            p.grad = torch.randn(70, generator=generator)
        opt.step(loss=5.0)
    assert not any(map(torch.equal, before, params))


@pytest.mark.parametrize(("variant", "floats"), [("momentum", 1), ("Adam", 2), ("no lr", 0), ("Adam, no lr", 2)])
def test_how_much_state_there_is(path, variant, floats):
    opt, params, step = problem(variant, path)
    for _ in range(2):
        step()
    entries = sum(p.numel() for p in params)
    held = sum(t.numel() for p in params for t in opt.state[p].values() if t.dim())
    sampled = sum(sample_size(p.numel()) for p in params) if "no lr" in variant else 0
    assert held == floats * entries + sampled
    assert sample_size(entries) <= entries / 16


def test_a_limit_on_the_move_is_its_length_in_adams_metric():
    """With decay, which moves along x too."""
    generator = torch.Generator().manual_seed(2)
    p = torch.nn.Parameter(torch.randn(67, 2, generator=generator, dtype=torch.float64)[:, 1])
    opt = ProxSPSAdam([p], lr=0.5, weight_decay=0.7, max_move=0.1)
    for _ in range(2):
        before = p.detach().clone()
        p.grad = torch.randn(67, generator=generator, dtype=torch.float64)
        opt.step(loss=1e3)
        assert float(opt.last_step.relaxation) < 1
        assert float((p.detach() - before).norm()) == pytest.approx(0.1, rel=1e-9)
