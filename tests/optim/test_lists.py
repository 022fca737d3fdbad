"""Lists of tensors as vectors: what is joined, what is cut, and that steps do not depend on it."""

from __future__ import annotations

import math

import pytest
import torch

from proxsps import SPS, ProxSPS
from proxsps.core.step import Affine
from proxsps.optim.blocks import Block
from proxsps.optim.device.parts import move_lines
from proxsps.optim.lists import bundles, join, spread
from proxsps.regularizers import Zero

SIZE = 1000
EPS = torch.finfo(torch.float32).eps
SHAPES = {
    "small": [(7, 3), (5,), (2, 2, 2)],
    "more than a bundle": [(SIZE // 4,)] * 7,
    "empty between": [(3,), (0, 4), (4, 2)],
    "long": [(2,), (2 * SIZE + 3,), (3,)],
    "none": [],
}


def drawn(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes * 2]
    return draw[: len(shapes)], draw[len(shapes) :]


@pytest.mark.parametrize("name", SHAPES)
def test_bundles_hold_every_entry_once_and_pairs_stay_pairs(name):
    xs, _ = drawn(SHAPES[name])
    found = [(join(a), join(b)) for a, b in bundles((xs, [x + 1 for x in xs]), SIZE)]
    assert torch.equal(join([a for a, _ in found] or [torch.empty(0)]), join(xs or [torch.empty(0)]))
    assert all(torch.equal(a + 1, b) and a.numel() <= SIZE for a, b in found)


def test_small_tensors_make_few_bundles_and_long_ones_are_cut():
    def sizes(name):
        return [sum(x.numel() for x in xs) for (xs,) in bundles(drawn(SHAPES[name])[:1], SIZE)]

    assert sizes("small") == [34]
    assert sizes("more than a bundle") == [SIZE, 3 * SIZE // 4]
    assert sizes("long") == [2, SIZE, SIZE, 3, 3]


def test_dtypes_are_not_joined():
    lists = [drawn([(3,), (2,)], torch.bfloat16)[0], drawn([(4,)], torch.float64)[0], drawn([(5,)])[0]]
    found = list(bundles(([x for xs in lists for x in xs],), SIZE))
    assert [(len(xs), xs[0].dtype) for (xs,) in found] == [(2, torch.bfloat16), (1, torch.float64), (1, torch.float32)]


def test_parts_of_long_tensors_in_any_memory_order_are_written():
    x = torch.zeros(4, 6, 20, 10).to(memory_format=torch.channels_last)
    for (xs,) in bundles(([x],), 100):
        spread(join(xs) + 1, xs)
    assert (x == 1).all()


@pytest.mark.parametrize("method", [ProxSPS, SPS])
def test_a_step_over_all_kinds_of_tensors_is_the_same_on_every_path(method):
    lam, shapes = 0.1, [*[(4096,)] * 11, (3,), (1 << 20, 1), (1 << 18,), (7, 3)]
    bound = (1 << 20) * EPS / 2  # a product of n entries is off by at most n roundings of its terms
    points, taus = [], []
    for path in ({"fused": None}, {"fused": False}, {"capturable": True}):
        xs, gs = drawn(shapes)
        params = [torch.nn.Parameter(x) for x in xs]
        for param, g in zip(params, gs, strict=True):
            param.grad = g
        optimizer = method(params, lr=1.0, weight_decay=lam, **path)
        optimizer.step(loss=1e5)
        assert optimizer.last_step.branch_name == "inside"
        points.append(torch.cat([param.detach().ravel() for param in params]).double())
        taus.append(optimizer.last_step.tau.item())
    largest = max(t.abs().max().item() for ts in drawn(shapes) for t in ts)
    for tau, y in zip(taus[1:], points[1:], strict=True):
        assert tau == pytest.approx(taus[0], rel=4 * bound)  # two sums on either side
        # Another tau moves by another multiple of g and lam x; besides, the update has a few roundings of its own.
        assert (points[0] - y).abs().max() <= abs(taus[0] - tau) * (1 + lam) * largest + 4 * EPS * largest


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("ok", [True, False])
def test_the_update_of_accelerators_moves_all_tensors_or_none(ok, value):
    # Its two calls run on any device. A gradient that is not finite must not reach parameters that stay.
    before, grads = drawn([(67,), (3, 43), (1,)])
    params = [x.clone() for x in before]
    grads[1][0] *= value
    block = Block({}, 1.0, Zero(), params, grads, range(3))
    move_lines({0: block}, Affine(torch.tensor([0.9]), torch.tensor([-0.2]), torch.zeros(1)), torch.tensor(ok))
    for x, g, old in zip(params, grads, before, strict=True):
        want = (0.9 * old.double() - 0.2 * g.double()) if ok else old.double()
        torch.testing.assert_close(x.double(), want, rtol=4 * EPS, atol=4 * EPS * ok, equal_nan=True)
