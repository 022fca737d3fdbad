"""Gradients over the whole range of f32, without a learning rate or with a huge one: steps are finite, and right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxsps import L1, Box, ElasticNet, GroupLasso, NuclearNorm, ProxSPS, ProxSPSAdam

PATHS = {"kernels": {}, "torch": {"fused": False}, "device": {"capturable": True}}
METHODS = {
    "ProxSPS": (ProxSPS, {"lr": None}),
    "momentum": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "Adam": (ProxSPSAdam, {}),
}
REGULARIZERS = {
    "none": lambda lam: {},
    "weight decay": lambda lam: {"weight_decay": lam},
    "L1": lambda lam: {"regularizer": L1(lam)},
    "ElasticNet": lambda lam: {"regularizer": ElasticNet(lam, lam)},
    "GroupLasso": lambda lam: {"regularizer": GroupLasso(lam)},
    "Box": lambda lam: {"regularizer": Box(-3.0, 3.0)},
}
SIZES = [1e-43, 1e-40, 1e-35, 1e-20, 1.0, 1e10, 1e30]


def stepped(method, options, size, scale, dtype=torch.float32, loss=1e3):
    """Two steps from parameters of some scale; the values of f32 in any dtype, before and after."""
    rng, cls = np.random.default_rng(0), METHODS[method][0]
    w = torch.nn.Parameter(torch.as_tensor(scale * rng.standard_normal(67)).float().to(dtype))
    x, opt = w.detach().double().clone(), cls([w], **{**METHODS[method][1], **options})
    for _ in range(2):
        w.grad = torch.as_tensor(size * rng.standard_normal(67)).float().to(dtype)
        opt.step(loss=loss)
    return x, w.detach().double(), opt.last_step


@pytest.mark.filterwarnings("ignore:.*is not finite:RuntimeWarning")  # squares beyond f32 in Adam's metric are said
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_parameters_stay_finite(method, path):
    for name, make in REGULARIZERS.items():
        for size in SIZES:
            for lam, scale in ((size, 1e10), (1e6, 1.0)):
                _, y, last = stepped(method, {**make(lam), **path}, size, scale)
                assert torch.isfinite(y).all(), (name, size, lam, scale, last)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_doubles(method, path):
    """With the values of f32; smaller gradients have no digits left, and squares of larger ones leave its range."""
    for name, make in REGULARIZERS.items():
        for size in [size for size in SIZES if 1e-37 < size < 1e19]:
            options = make(0.1 * size)
            x, y, last = stepped(method, {**options, **path}, size, 1.0, loss=1e6 * size)
            _, exact, _ = stepped(method, {**options, "fused": False}, size, 1.0, torch.float64, loss=1e6 * size)
            assert last.cap_name == "distance"
            error = torch.linalg.vector_norm(y - exact) / torch.linalg.vector_norm(exact - x)
            assert error < 1e-4, (name, size)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("lr", [1e10, 1e20, 1e30])
def test_a_huge_cap_does_not_make_the_matched_step_longer(lr, path):
    rng = np.random.default_rng(0)
    for phi in (L1(0.1), GroupLasso(0.1)):
        w = torch.nn.Parameter(torch.as_tensor(rng.standard_normal(67)))
        w.grad = torch.as_tensor(rng.standard_normal(67))
        x = w.detach().clone()
        opt = ProxSPS([w], lr=lr, cap="matched", regularizer=phi, **path)
        opt.step(loss=1.0)
        assert abs(1.0 + float(torch.dot(w.grad, w.detach() - x))) < 1e-9


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_skipped_where_the_prox_fails_for_nan(loss):
    """A device does not read the loss, and searches for a step all the same."""
    w = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    w.grad = torch.ones(3, 4)
    opt = ProxSPS([w], lr=1.0, cap="matched", regularizer=NuclearNorm(0.1), capturable=True)
    opt.step(loss=torch.tensor(loss))
    assert opt.last_step.branch_name == "skipped"
    torch.testing.assert_close(w.detach(), torch.arange(12.0).reshape(3, 4), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"regularizer": L1(0.1)}], ids=str)
@pytest.mark.parametrize("cls", [ProxSPS, ProxSPSAdam])
def test_a_move_that_is_not_finite_is_not_taken(cls, options):
    w = torch.nn.Parameter(torch.ones(67))
    w.grad = torch.full((67,), 1e10)
    opt = cls([w], lr=1e38, lower_bound=None, **options)
    with pytest.warns(RuntimeWarning, match="leaves the range of the parameters' precision"):
        opt.step(loss=1.0)
    assert torch.equal(w.detach(), torch.ones(67))
    assert opt.last_step.branch_name == "skipped"
    assert not opt.state
