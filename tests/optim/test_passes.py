"""Passes with torch alone: what is joined, what is cut, and that sums do not depend on it."""

from __future__ import annotations

import math

import pytest
import torch

from proxsps import SPS, ProxSPS
from proxsps.optim.blocks import Block
from proxsps.optim.passes import COPIES, DOT, bucketed, pair_sums, pieces, update_masked
from proxsps.regularizers import Zero

SMALL, BUCKET = COPIES
EPS = torch.finfo(torch.float32).eps
BOUND = DOT * EPS / 2  # a product of n entries is off by at most n roundings of its terms
SHAPES = {
    "small": [(7, 3), (5,), (2, 2, 2)],
    "more than a bucket": [(SMALL,)] * (BUCKET // SMALL + 3),
    "between": [(3,), (SMALL + 1,), (4, 2)],
    "longer than a product": [(2,), (DOT + 3,), (3,)],
    "none": [],
}


def drawn(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes * 2]
    return list(zip(draw[: len(shapes)], draw[len(shapes) :], strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_vectors_hold_every_entry_once(name):
    pairs = drawn(SHAPES[name])
    vectors = list(bucketed(pairs, *COPIES))
    for i in range(2):
        entries = torch.cat([pair[i].ravel() for pair in pairs] or [torch.empty(0)])
        assert torch.equal(torch.cat([v[i] for v in vectors] or [torch.empty(0)]).sort()[0], entries.sort()[0])
    assert all(x.shape == d.shape and x.dim() == 1 for x, d in vectors)
    assert all(x.numel() <= DOT for x, _ in vectors)


def test_small_tensors_make_few_vectors():
    assert len(list(bucketed(drawn(SHAPES["small"]), *COPIES))) == 1
    assert [x.numel() for x, _ in bucketed(drawn(SHAPES["more than a bucket"]), *COPIES)] == [BUCKET, 3 * SMALL]
    assert [x.numel() for x, _ in bucketed(drawn(SHAPES["longer than a product"]), *COPIES)] == [DOT, 3, 5]


def test_dtypes_are_not_joined_and_half_precision_is_widened():
    pairs = [*drawn([(3,), (2,)], torch.bfloat16), *drawn([(4,)], torch.float64), *drawn([(5,)])]
    vectors = list(bucketed(pairs, *COPIES))
    assert [x.numel() for x, _ in vectors] == [5, 4, 5]
    assert [x.dtype for x, _ in vectors] == [torch.float32, torch.float64, torch.float32]
    mixed = [(torch.ones(3, dtype=torch.bfloat16), torch.ones(3)), (torch.ones(2), torch.ones(2))]
    assert [(x.dtype, d.dtype) for x, d in bucketed(mixed, *COPIES)] == [(torch.float32, torch.float32)] * 2


def test_pairs_stay_pairs_in_any_memory_order():
    x, d = (t.reshape(4, 3, 5, 2) for t in torch.arange(240.0).split(120))
    last = x.to(memory_format=torch.channels_last)
    ((joined, other),) = bucketed([(last, d)], *COPIES)
    assert torch.equal(joined, x.ravel())
    assert torch.equal(other, d.ravel())


@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_sums_agree_with_double_precision(name, points):
    pairs = drawn(SHAPES[name])
    d_sq, d_dot_x, x_sq = (sum(map(torch.Tensor.item, parts)) for parts in pair_sums(bucketed(pairs, *COPIES), points))
    x, d = (torch.cat([pair[i].ravel() for pair in pairs] or [torch.empty(0)]).double() for i in range(2))
    assert d_sq == pytest.approx((d @ d).item(), rel=BOUND)
    assert d_dot_x == pytest.approx((d @ x).item(), abs=BOUND * (d.abs() @ x.abs()).item())
    assert x_sq == (pytest.approx((x @ x).item(), rel=BOUND) if points else 0)


def test_pieces_are_cut_alike():
    a, b = torch.arange(2 * DOT + 1), torch.arange(2 * DOT + 1) + 1
    cut = list(pieces(a, b))
    assert [len(p) for p, _ in cut] == [DOT, DOT, 1]
    assert all(torch.equal(p + 1, q) for p, q in cut)
    ((whole, _),) = pieces(a[:DOT], b[:DOT])
    assert len(whole) == DOT


@pytest.mark.parametrize("method", [ProxSPS, SPS])
def test_a_step_over_all_kinds_of_tensors_is_that_of_the_kernels(method):
    pytest.importorskip("numba")
    lam, shapes = 0.1, [shape for shapes in SHAPES.values() for shape in shapes]
    points, taus = [], []
    for fused in (True, False):
        params = [torch.nn.Parameter(x.clone()) for x, _ in drawn(shapes)]
        for param, (_, g) in zip(params, drawn(shapes), strict=True):
            param.grad = g.clone()
        optimizer = method(params, lr=1.0, weight_decay=lam, fused=fused)
        optimizer.step(loss=1e5)
        assert optimizer.last_step.branch_name == "inside"
        points.append(torch.cat([param.detach().ravel() for param in params]).double())
        taus.append(optimizer.last_step.tau.item())
    assert taus[0] == pytest.approx(taus[1], rel=4 * BOUND)  # two sums on either side
    largest = max(t.abs().max().item() for pair in drawn(shapes) for t in pair)
    # Another tau moves by another multiple of g and lam x; besides, the update has a few roundings of its own.
    limit = abs(taus[0] - taus[1]) * (1 + lam) * largest + 4 * EPS * largest
    assert (points[0] - points[1]).abs().max() <= limit


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("ok", [True, False])
def test_the_update_of_accelerators_moves_all_tensors_or_none(ok, value):
    # Its two calls run on any device. A gradient that is not finite must not reach parameters that stay.
    pairs = drawn([(67,), (3, 43), (1,)])
    params, grads = ([t.clone() for t in tensors] for tensors in zip(*pairs, strict=True))
    grads[1][0] *= value
    block = Block({}, 1.0, Zero(), params, grads, range(3))
    update_masked(block, torch.tensor(0.9), torch.tensor(-0.2), torch.tensor(ok))
    for x, g, (before, _) in zip(params, grads, pairs, strict=True):
        want = (0.9 * before.double() - 0.2 * g.double()) if ok else before.double()
        torch.testing.assert_close(x.double(), want, rtol=4 * EPS, atol=4 * EPS * ok, equal_nan=True)
