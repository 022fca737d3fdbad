"""Groups that rest, are empty, lack a gradient or have a number as centre: the same step on every path, or an error."""

from __future__ import annotations

import pytest
import torch

from proxsps.optim import SPS, AdaptiveLR, ProxSGD, ProxSPS, ProxSPSAdam, StronglyConvexLR
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso, L1Ball, L2Ball, NonNegative, Regularizer

PATHS = {"torch": {"fused": False}, "kernels": {}, "device": {"capturable": True}}
EVERY_PATH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


class Halved(Regularizer):
    """The squared l2 norm by its prox alone, which divides by the step size as users may."""

    separable = True

    def value(self, x):
        return (x * x).sum() / 2

    def prox(self, z, alpha):
        return z / alpha / (1 / alpha + 1)


RESTING = [L1(0.5), L2(0.5), ElasticNet(0.3, 0.4), Box(-0.1, 0.2), GroupLasso(1.0), L2Ball(0.5), L1Ball(0.5), Halved()]
CAPS = {
    "proximal": (ProxSPS, {"lr": 1.0}),
    "matched": (ProxSPS, {"lr": 1.0, "cap": "matched"}),
    "limited": (ProxSPS, {"lr": 1.0, "max_move": 0.05}),
    "distance": (ProxSPS, {"lr": 1.0, "distance_cap": True}),
    "momentum": (ProxSPS, {"lr": 1.0, "momentum": 0.9, "cap": "matched"}),
    "adam": (ProxSPSAdam, {"lr": 1.0}),
    "sgd": (ProxSGD, {"lr": 0.1, "max_move": 0.05}),
}


@pytest.mark.parametrize("phi", RESTING, ids=repr)
@pytest.mark.parametrize("caps", CAPS)
def test_a_group_whose_lr_is_a_tensor_of_zero_rests_as_with_the_number_zero(caps, phi, kit):
    """On a device the number is not looked at; the group stays, and the others take the step that they take anyway."""
    cls, options = CAPS[caps]
    if cls is ProxSPSAdam and isinstance(phi, (L1Ball, L2Ball, Halved)):
        phi = NonNegative()  # these have no prox in its metric
    points = []
    for kind in (float, torch.tensor):
        a, b, c = kit.drawn((13, 5), (70,), (3, 4))
        groups = [
            {"params": [a], "lr": kind(0.0), "regularizer": phi},
            {"params": [b], "lr": kind(options["lr"]), "regularizer": L1(0.01)},
            {"params": [c], "lr": kind(options["lr"])},
        ]
        before = a.detach().clone()
        opt = cls(groups, **options, capturable=True)
        for _ in range(2):
            opt.step(loss=torch.tensor(1.0, dtype=torch.float64))
        assert torch.equal(a, before)
        points.append(kit.flat([b, c]))
    assert (points[0] - kit.flat(kit.drawn((13, 5), (70,), (3, 4))[1:])).abs().max() > 1e-4
    torch.testing.assert_close(*points, rtol=1e-9, atol=1e-9)


@EVERY_PATH
@pytest.mark.parametrize("cls", [ProxSPS, SPS, ProxSGD, ProxSPSAdam], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("center", [0.2, torch.tensor(0.2, dtype=torch.float64)], ids=["number", "tensor"])
def test_a_number_as_centre_is_a_tensor_of_it_for_every_parameter(cls, center, path, kit):
    shapes, points = ((3, 4), (5,), ()), []
    for given in (center, [torch.full(shape, 0.2, dtype=torch.float64) for shape in shapes]):
        params = kit.drawn(*shapes)
        cls(params, lr=0.1, regularizer=L2(0.3, given), **path).step(loss=0.5)
        points.append(kit.flat(params))
    torch.testing.assert_close(*points, rtol=0, atol=1e-14)  # sums may be in another order


@EVERY_PATH
@pytest.mark.parametrize("pair", [(L2Ball(1.0), L2Ball(2.0)), (GroupLasso(0.1), L2Ball(2.0))], ids=repr)
def test_groups_with_different_bounds_on_their_rows(pair, path, kit):
    params = kit.drawn((30,), (40,), scale=0.1)
    groups = [{"params": [p], "regularizer": phi} for p, phi in zip(params, pair, strict=True)]
    ProxSPS(groups, **path).step(loss=5.0)
    for p, phi in zip(params, pair, strict=True):
        if isinstance(phi, L2Ball):
            assert p.norm() <= phi.radius * (1 + 1e-12)


@EVERY_PATH
@pytest.mark.parametrize("make", [L2Ball, L1Ball], ids=lambda make: make.__name__)
def test_a_joint_constraint_needs_all_gradients_of_its_group(make, path, kit):
    a, b = kit.drawn((3,), (4,))
    opt = ProxSPS([a, b], regularizer=make(1.0, joint=True), **path)
    opt.step(loss=0.5)
    before = kit.points([a, b])
    b.grad = None
    with pytest.raises(ValueError, match="each must have a gradient, but parameter 1 of the group has none"):
        opt.step(loss=0.5)
    assert all(map(torch.equal, before, [a, b]))


@EVERY_PATH
@pytest.mark.parametrize("phi", [L1(0.1), Box(-1.0, 1.0), GroupLasso(0.1), L2Ball(1.0)], ids=repr)
def test_groups_of_tensors_without_entries(phi, path, kit):
    points = []
    for with_empty in (False, True):
        (x,) = kit.drawn((4,))
        empty = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        empty.grad = torch.empty_like(empty)
        groups = [{"params": [x]}, *([{"params": [empty], "regularizer": phi}] if with_empty else [])]
        ProxSPS(groups, **path).step(loss=0.5)
        points.append(x.detach())
    assert torch.equal(*points)
    ProxSPS([empty], regularizer=phi, **path).step(loss=0.5)


@EVERY_PATH
@pytest.mark.parametrize("phi", [None, L1(1e-3), GroupLasso(1e-3)], ids=repr)
def test_gradients_below_the_range_of_f32_give_finite_steps_without_a_learning_rate(phi, path, kit):
    params = kit.drawn((13, 5), (70,), dtype=torch.float32)
    for p in params:
        p.grad = p.grad * 1e-40
    opt = ProxSPS(params, lr=None, momentum=0.9, regularizer=phi, **path)
    for _ in range(2):
        opt.step(loss=0.5)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("make", [lambda opt: StronglyConvexLR(opt, 0.1), AdaptiveLR], ids=["convex", "adaptive"])
def test_schedulers_of_step_sizes_are_an_error_without_a_learning_rate(make, kit):
    with pytest.raises(ValueError, match=r"sets step sizes, but ProxSPSAdam was constructed with lr=None"):
        make(ProxSPSAdam(kit.drawn((3,))))
    make(ProxSPSAdam(kit.drawn((3,)), lr=0.1))
