"""The matched cap with regularisers that are much stronger or much weaker than the gradient, on host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from proxsps import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    NuclearNorm,
    ProxSPS,
    ProxSPSAdam,
    SparseGroupLasso,
)

PATHS = {"host": {}, "device": {"capturable": True}}
STRENGTHS = 10.0 ** np.arange(-2, 11, 3)  # relative to an entry of the gradient
PARTS = (0.3, 0.97)  # of the deepest fall of the linear model: where it is steep, and where it is nearly flat
PENALTIES = {
    "L1": L1,
    "ElasticNet": lambda lam: ElasticNet(lam, lam),
    "GroupLasso": GroupLasso.rows,
    "SparseGroupLasso": lambda lam: SparseGroupLasso(lam, lam),
    "Box": lambda lam: Box(-1 / lam, 1 / lam),
    "LInfBall": lambda lam: LInfBall(1 / lam),
    "NonNegative": lambda lam: NonNegative(),
}
IDENTITY = {"NuclearNorm": NuclearNorm, "L1Ball": lambda lam: L1Ball(1 / lam), "L2Ball": lambda lam: L2Ball(1 / lam)}
CASES = [(ProxSPS, name) for name in PENALTIES | IDENTITY] + [(ProxSPSAdam, name) for name in [*PENALTIES, "L2"]]
# Rounding of the entries; half precision is calculated in f32. And how far a step may end before the model is at C.
ROUNDING = {torch.bfloat16: 2.0**-23, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
SHORT = {torch.bfloat16: 1e-4, torch.float32: 1e-4, torch.float64: 1e-9}
STOP = {torch.bfloat16: 1e-7, torch.float32: 1e-7, torch.float64: 1e-12}  # where searches stop, relative to the gap
LONGEST = 1e8


def draw(shape, dtype, phi, seed=0):
    """A point that violates no constraint, and a slope that mostly agrees with the pull of the regulariser."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    d = (x + rng.standard_normal(shape)) / 2
    x = phi.prox(x, 1.0) if isinstance(phi, (Box, L1Ball, L2Ball, LInfBall, NonNegative)) else x
    w = torch.nn.Parameter(torch.as_tensor(x).to(dtype))
    w.grad = torch.as_tensor(d).to(dtype)
    return w


def along(blocks):
    """s -> the new points and how far the linear model falls, in f64; blocks are (parameter, regulariser, lr, Adam)."""
    known = [(w.detach().double().numpy(), w.grad.double().numpy(), *rest) for w, *rest in blocks]

    def points(s):
        for x, d, phi, share, adam in known:
            D = np.abs(d) + 1e-8 if adam else np.ones_like(d)
            z, t = x - s * share * d / D, s * share / D
            yield x, d, phi.prox_diagonal(z, t) if adam else phi.prox(z, s * share)

    return points, lambda s: sum(np.sum(d * (x - y)) for x, d, y in points(s))


def check(method, blocks, dtype):
    """Steps on every path, against the zero of the model by bisection."""
    points, fall = along(blocks)
    grid = LONGEST * 10.0 ** np.linspace(-22, 0, 45)
    falls = np.array([fall(s) for s in grid])
    for part in PARTS:
        gap = float(np.float32(part * falls[grid <= 1].max()))
        after = np.searchsorted(falls >= gap, True)
        assert (falls[after:] > gap).all()  # there is one zero only
        exact = np.exp(brentq(lambda t, gap=gap: fall(np.exp(t)) - gap, *np.log(grid[after - 1 : after + 1])))
        products = sum(np.sum((d * x) ** 2 + (d * y) ** 2) for x, d, y in points(exact)) ** 0.5
        rounding = 10 * ROUNDING[dtype] * products + 2 * STOP[dtype] * gap
        for path, own in PATHS.items():
            groups = [{"params": [kept(w)], "lr": LONGEST * share, "regularizer": phi} for w, phi, share, _ in blocks]
            opt = method(groups, lr=LONGEST, cap="matched", **own)
            opt.step(loss=gap)
            s, last = float(opt.last_step.tau.max()), opt.last_step
            height = gap - fall(s)
            assert last.branch_name == "inside", path
            assert -rounding <= height <= rounding + SHORT[dtype] * gap, (path, s / exact - 1, height / gap)
            assert float(last.model_gap) == pytest.approx(height, abs=2 * rounding)
            for group, (x, _, y) in zip(opt.param_groups, points(s), strict=True):
                error = np.linalg.norm(group["params"][0].detach().double().numpy() - y)
                written = max(ROUNDING[dtype], torch.finfo(dtype).eps)
                assert error <= 10 * written * np.linalg.norm([x, y])


def kept(w):
    copy = torch.nn.Parameter(w.detach().clone())
    copy.grad = w.grad.clone()
    return copy


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("method", "name"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_device_and_host_end_where_the_model_reaches_its_bound(method, name, dtype):
    make = {**PENALTIES, **IDENTITY, "L2": L2}[name]
    for strength in STRENGTHS[:: 3 if dtype is torch.bfloat16 else 1]:
        phi = make(strength)
        w = draw((201,) if name == "L1Ball" else (29, 7), dtype, phi)
        check(method, [(w, phi, 1.0, method is ProxSPSAdam)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", [ProxSPS, ProxSPSAdam])
def test_so_do_steps_of_several_groups(method, dtype):
    for strength in STRENGTHS:
        phis = [L1(strength), GroupLasso.rows(3 * strength), ElasticNet(strength / 7, strength)]
        shapes, shares = [(1000,), (13, 5), (67,)], (0.3, 1.0, 0.05)
        ws = [draw(shape, dtype, phi, i) for i, (shape, phi) in enumerate(zip(shapes, phis, strict=True))]
        check(method, list(zip(ws, phis, shares, [method is ProxSPSAdam] * 3, strict=True)), dtype)
