"""Parameters without a gradient rest, as in torch's optimizers: they do not move, and their averages do not change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from proxsps.optim import ProxSPS, ProxSPSAdam
from proxsps.regularizers import L1, GroupLasso

SHAPES = ((13, 5), (67,), (3, 4, 2))
VARIANTS = {
    "momentum": (ProxSPS, {"momentum": 0.9, "weight_decay": 0.1}),
    "no lr": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "adam": (ProxSPSAdam, {"weight_decay": 0.1}),
    "adam, lr": (ProxSPSAdam, {"lr": 0.05, "cap": "proximal"}),
}
EVERY = pytest.mark.parametrize("variant", VARIANTS)
PATHS = pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "plain", "device"])
IN_TURN = pytest.mark.parametrize(
    ("variant", "path"), [("momentum", {"fused": False}), ("no lr", {}), ("adam", {}), ("adam", {"capturable": True})]
)


def everything(opt, params):
    return [[p.detach().clone(), *(value.clone() for _, value in sorted(opt.state[p].items()))] for p in params]


@PATHS
@EVERY
@pytest.mark.parametrize(
    ("dtype", "phi"),
    [
        (torch.float32, None),
        (torch.float32, L1(0.01)),
        (torch.float32, GroupLasso(0.01)),
        (torch.bfloat16, None),
        (torch.complex64, None),
    ],
    ids=str,
)
def test_neither_they_nor_their_averages_change_by_a_bit(variant, phi, dtype, path, kit):
    cls, options = VARIANTS[variant]
    params = kit.drawn(*SHAPES, dtype=dtype)
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    if phi is not None:
        options = {key: value for key, value in options.items() if key != "weight_decay"}
        groups[0]["regularizer"] = phi
    opt = cls(groups, **options, **path)
    for k, resting in enumerate([(), (0,), (1, 2), (0, 1), (2,), ()]):
        for p, q in zip(params, kit.drawn(*SHAPES, seed=k + 1, dtype=dtype), strict=True):
            p.grad = 0.3 * p.detach() + 0.1 * q.detach()
        for i in resting:
            params[i].grad = None
        params[0].requires_grad_(k % 2 == 0)  # frozen or not makes no difference
        before = everything(opt, params)
        opt.step(loss=0.9 - 0.05 * k)
        assert opt.last_step.branch_name != "skipped"
        same = [all(map(torch.equal, old, new)) for old, new in zip(before, everything(opt, params), strict=True)]
        assert [i for i in range(3) if same[i]] == list(resting)


@PATHS
@pytest.mark.parametrize("adam", [False, True])
def test_the_model_is_the_average_of_linearisations_with_averages_for_missing_gradients(adam, path):
    """Written out as the sum over all steps so far, each with its own point."""
    rng = np.random.default_rng(0)
    params = [torch.nn.Parameter(torch.as_tensor(rng.standard_normal(n))) for n in (40, 30, 20)]
    cls, own = (ProxSPSAdam, {"betas": (0.8, 0.99)}) if adam else (ProxSPS, {"momentum": 0.8})
    opt, past = cls(params, lr=0.02, lower_bound=None, **own, **path), []
    d = [np.zeros(p.shape) for p in params]
    for k in range(12):
        xs, f = [p.detach().numpy().copy() for p in params], float(rng.uniform(1, 2))
        gs = []
        for p, average in zip(params, d, strict=True):
            g = rng.standard_normal(p.shape) if rng.random() < 0.5 or (k == 0 and p is params[0]) else None
            p.grad = None if g is None else torch.as_tensor(g)
            gs.append(average if g is None else g)
        if all(p.grad is None for p in params):
            continue
        taken = len(past)
        new = 0.2 / (1 - 0.8 ** (taken + 1)) if adam else (0.2 if past else 1.0)
        past = [((1 - new) * w, *rest) for w, *rest in past] + [(new, f, gs, xs)]
        d = [sum(w * own[i] for w, _, own, _ in past) for i in range(3)]
        opt.step(loss=f)
        m = sum(
            w * (fi + sum(float(g @ (x - xi)) for g, x, xi in zip(gi, xs, at, strict=True))) for w, fi, gi, at in past
        )
        assert float(opt.last_step.gap) == pytest.approx(m, rel=1e-10)


@IN_TURN
def test_halves_trained_in_turn_do_not_stall(variant, path):
    """Least squares with a solution of loss 0: one half of the weights rests in every step."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(200, 20, generator=generator)
    y = A @ torch.randn(20, generator=generator)
    cls, options = VARIANTS[variant]
    halves = [torch.nn.Parameter(torch.zeros(10)) for _ in range(2)]
    opt = cls(halves, **{**options, "weight_decay": 0.0}, **path)
    for k in range(400):
        rows = torch.randint(200, (32,), generator=generator)
        loss = (A[rows] @ torch.cat(halves) - y[rows]).square().mean()
        opt.zero_grad()
        loss.backward()
        halves[k // 3 % 2].grad = None
        opt.step(loss=loss)
    assert (A @ torch.cat(halves).detach() - y).square().mean() < 1e-3 * y.square().mean()


@IN_TURN
def test_experts_that_are_drawn_at_random_do_not_stall(variant, path):
    """Six of them, one per step; a head that is never used stays without state."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(6, 50, 8, generator=generator)
    y = (A @ torch.randn(6, 8, 1, generator=generator)).squeeze(-1)
    cls, options = VARIANTS[variant]
    experts, head = [torch.nn.Parameter(torch.zeros(8)) for _ in range(6)], torch.nn.Parameter(torch.ones(70))
    opt = cls([*experts, head], **{**options, "weight_decay": 0.0}, **path)
    for _ in range(600):
        i = int(torch.randint(6, (), generator=generator))
        opt.zero_grad()
        loss = (A[i] @ experts[i] - y[i]).square().mean()
        loss.backward()
        opt.step(loss=loss)
    losses = [float((A[i] @ experts[i] - y[i]).detach().square().mean() / y[i].square().mean()) for i in range(6)]
    assert max(losses) < 1e-2
    assert torch.equal(head.detach(), torch.ones(70))
    assert head not in opt.state


@PATHS
@EVERY
def test_a_run_with_parameters_at_rest_is_resumed_bitwise(variant, path, kit):
    cls, options = VARIANTS[variant]

    def drive(opt, params, steps):
        for k in steps:
            for i, (p, q) in enumerate(zip(params, kit.drawn(*SHAPES, seed=k + 1), strict=True)):
                p.grad = None if i == k % 3 else 0.3 * p.detach() + 0.1 * q.detach()
            opt.step(loss=0.9 - 0.05 * k)

    params = kit.drawn(*SHAPES)
    opt = cls(params, **options, **path)
    drive(opt, params, range(4))
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = cls(others, **options, **path)
    other.load_state_dict(opt.state_dict())
    for own in ((opt, params), (other, others)):
        drive(*own, range(4, 8))
    pairs = zip(everything(opt, params), everything(other, others), strict=True)
    assert all(map(torch.equal, *map(itertools.chain.from_iterable, zip(*pairs, strict=True))))
