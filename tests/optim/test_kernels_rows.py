"""The compiled passes over rows, against the regularisers' own prox in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from proxsps.optim import ProxSPS
from proxsps.optim.kernels import layout, row_layout, rows
from proxsps.optim.kernels.scalar import Psi
from proxsps.regularizers import GroupLasso, L2Ball

DTYPES = [torch.float32, torch.float64]
INF = math.inf
SHAPES = {
    "rows": ([(129, 257), (1, 70), (70, 1), (7, 3), (40, 2_049)], (1,)),
    "long rows": ([(3, 16_385), (2, 50_001)], (1,)),
    "columns": ([(257, 129), (1, 70), (70, 1), (3, 1_100), (900, 40)], (0,)),
    "filters": ([(16, 3, 3, 3), (5, 16, 3, 3), (3, 70, 17, 17)], (1, 2, 3)),
    "inner columns": ([(5, 16, 3, 3), (2, 300, 5, 2)], (1,)),
    "two leading dims": ([(5, 16, 3, 3), (70, 30, 2)], (0, 1)),
    "last dim": ([(5, 16, 3)], (-1,)),
    "whole tensors": ([(129, 257), (17,), (1,), (40, 10, 3, 3)], None),
    "empty": ([(0, 5), (4, 3), (5, 0), (2, 7)], (1,)),
}


def pairs(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes * 2]
    return draw[: len(shapes)], draw[len(shapes) :]


def constant(count, l1=0.0, l2=0.0, lower=-INF, upper=INF):
    return Psi.of(count, l1, l2, lower, upper)


def norms_sq(t, u, dims):
    """<t, u> of each group of two tensors, in the order of memory of contiguous ones."""
    return (t.double() * u.double()).sum(dim=tuple(range(t.dim())) if dims is None else dims).reshape(-1).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_sums_agree_with_double_precision(name, dtype):
    shapes, dims = SHAPES[name]
    xs, ds = pairs(shapes, dtype)
    at = rows.memory([xs], [ds], [dims])
    got = rows.sums(at)
    want = [
        np.concatenate([norms_sq(a, b, dims) for a, b in zip(*t, strict=True)]) for t in [(xs, xs), (xs, ds), (ds, ds)]
    ]
    sizes = np.concatenate([norms_sq(x.abs(), d.abs(), dims) for x, d in zip(xs, ds, strict=True)])
    assert got.shape == (3, at.groups) == (3, at.layout.rows)
    np.testing.assert_allclose(got[[0, 2]], np.array(want)[[0, 2]], rtol=1e-13)
    assert (np.abs(got[1] - want[1]) <= 1e-13 * sizes).all()


def middle(numbers):
    """A number between the two halves of the numbers, and away from both."""
    ordered = np.sort(numbers[numbers > 0])
    half = len(ordered) // 2
    return (ordered[half - 1] + ordered[half]) / 2


def expected(phi, xs, ds, alpha, u):
    return [phi.prox(x.double() - alpha * u * d.double(), alpha) for x, d in zip(xs, ds, strict=True)]


@pytest.mark.parametrize("use_sums", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_group_lasso_is_that_of_the_regularizer(name, dtype, use_sums):
    shapes, dims = SHAPES[name]
    xs, ds = pairs(shapes, dtype)
    kept = [d.clone() for d in ds]
    alpha, u = 0.8, 0.6
    at = rows.memory([xs], [ds], [dims])
    lengths = at.layout.length
    lam = middle(np.sqrt(rows.norm_sq(at, np.full(at.groups, u * alpha)) / np.maximum(lengths, 1))) / alpha
    phi = GroupLasso(lam, dims, scale_by_size=True)  # about half of the groups become 0
    want = expected(phi, xs, ds, alpha, u)
    psi = constant(at.groups)._replace(l1=lam * np.sqrt(lengths))
    half = [x.clone() for x in xs]
    before = [x.clone() for x in xs]
    known = rows.sums(at) if use_sums else None
    rows.write(rows.memory([half], [ds], [dims]), psi, np.full(at.groups, alpha), u, relax=0.25, known=known)
    rows.write(at, psi, np.full(at.groups, alpha), u, known=known)
    tol = 40 * torch.finfo(dtype).eps
    for x, h, b, y in zip(xs, half, before, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tol, atol=tol)
        assert torch.equal(x == 0, y == 0)
        torch.testing.assert_close(h.double(), b.double() + 0.25 * (y - b), rtol=tol, atol=tol)
    assert all(map(torch.equal, ds, kept))
    assert any((y == 0).any() for y in want)
    assert any((y != 0).any() for y in want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300,), (129, 257), (11, 3, 2)])
@pytest.mark.parametrize("radius", [3.0, 1e4])
def test_l2_ball_is_that_of_the_regularizer(dtype, shape, radius):
    xs, ds = pairs([shape], dtype)
    (want,) = expected(L2Ball(radius), xs, ds, 0.7, 0.5)
    at = rows.memory([xs], [ds], [None])
    plain = xs[0] - dtype_of(0.35, dtype) * ds[0]
    rows.write(at, constant(1, upper=radius), np.array([0.7]), 0.5)
    tol = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(xs[0].double(), want, rtol=tol, atol=tol)
    assert L2Ball(radius).value(xs[0]) == 0
    if radius > 1e3:  # inside, nothing but the gradient step is left
        torch.testing.assert_close(
            xs[0], plain, rtol=2 * torch.finfo(dtype).eps, atol=1e-7 if dtype.itemsize == 4 else 1e-16
        )


def dtype_of(number, dtype):
    return torch.tensor(number, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(0,), (1,), None])
def test_zeros_are_exact_and_have_no_sign(dtype, dims):
    xs, ds = pairs([(70, 67)], dtype)
    at = rows.memory([xs], [ds], [dims])
    rows.write(at, constant(at.groups, l1=1e3), np.full(at.groups, 0.7), 0.5)
    assert (xs[0] == 0).all()
    assert not xs[0].signbit().any()


def test_blocks_have_dims_and_constants_of_their_own():
    xs, ds = pairs([(9, 20), (30, 7), (4, 3, 2, 2)], torch.float64)
    blocks = [[xs[0]], [], [xs[1]], [xs[2]]], [[ds[0]], [], [ds[1]], [ds[2]]], [(1,), (1,), (0,), (1, 2, 3)]
    phis = [GroupLasso.rows(3.0), None, GroupLasso.columns(4.0), GroupLasso.filters(2.0)]
    alphas = np.array([0.3, 1.0, 0.5, 0.9])
    want = [phis[b].prox(x - 0.5 * alphas[b] * d, alphas[b]) for b, x, d in zip([0, 2, 3], xs, ds, strict=True)]
    at = rows.memory(*blocks)
    assert np.bincount(at.layout.block, minlength=4).tolist() == [9, 0, 7, 4]
    assert set(zip(at.layout.block.tolist(), at.layout.length.tolist(), strict=True)) == {(0, 20), (2, 30), (3, 12)}
    psi = constant(at.groups)._replace(l1=np.array([3.0, 0.0, 4.0, 2.0])[at.layout.block])
    rows.write(at, psi, alphas[at.layout.block], 0.5)
    for x, y in zip(xs, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dims", [(1, 2, 3), (1,), (0,), None, (2, 3), (1, 2)])
def test_channels_last(dims):
    (x,), (d,) = pairs([(6, 5, 4, 3)], torch.float64)
    last = [t.clone(memory_format=torch.channels_last) for t in (x, d)]
    assert not last[0].is_contiguous()
    at = rows.memory([[last[0]]], [[last[1]]], [dims])
    if dims == (1, 2):  # memory has the order 0, 2, 3, 1
        assert at is None
        return
    want = GroupLasso(1.5, dims).prox(x - 0.35 * d, 0.7)
    sums = rows.sums(at)
    np.testing.assert_allclose(np.sort(sums[0]), np.sort(norms_sq(x, x, dims)), rtol=1e-12)
    rows.write(at, constant(at.groups, l1=1.5), np.full(at.groups, 0.7), 0.5)
    torch.testing.assert_close(last[0], want, rtol=1e-13, atol=1e-14, check_stride=False)


def test_dims_that_do_not_lie_side_by_side_are_not_taken():
    (x,), (d,) = pairs([(6, 5, 4)], torch.float32)
    assert rows.memory([[x]], [[d]], [(0, 2)]) is None
    (x,), (d,) = pairs([(6, 1, 4)], torch.float32)
    assert rows.memory([[x]], [[d]], [(0, 2)]).groups == 1


def test_tensors_in_different_orders_are_not_taken():
    (x,), (d,) = pairs([(6, 5, 4, 3)], torch.float32)
    assert rows.memory([[x]], [[d.to(memory_format=torch.channels_last)]], [(1, 2, 3)]) is None


@pytest.mark.parametrize(
    ("shape", "dims", "want"),
    [
        ((4, 5), (1,), (4, 5, 1)),
        ((4, 5), (0,), (1, 4, 5)),
        ((4, 5, 6), (1,), (4, 5, 6)),
        ((4, 5, 6), (-2, -1), (4, 30, 1)),
        ((4, 1, 6), (1,), (24, 1, 1)),
        ((4, 5, 6), (0, 2), None),
        ((), None, (1, 1, 1)),
        ((4, 5), None, (1, 20, 1)),
        ((4, 0), (1,), (4, 0, 1)),
        ((4, 0), (0,), (1, 4, 0)),
    ],
)
def test_views_of_contiguous_tensors(shape, dims, want):
    assert row_layout.view(shape, None, dims) == want


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e100)])
@pytest.mark.parametrize("power", [1, -1])
def test_huge_and_tiny_entries(dtype, size, power):
    scale = size**power
    xs, ds = pairs([(30, 40), (3, 20_000)], torch.float64)
    big = [(scale * t).to(dtype) for t in xs], [(scale * t).to(dtype) for t in ds]
    want = expected(GroupLasso.rows(7.0), xs, ds, 0.9, 0.4)
    at = rows.memory([big[0]], [big[1]], [(1,)])
    assert np.isfinite(rows.sums(at)).all()
    rows.write(at, constant(at.groups, l1=7.0 * scale), np.full(at.groups, 0.9), 0.4)
    tol = 1e-5 if dtype is torch.float32 else 1e-12
    for x, y in zip(big[0], want, strict=True):
        torch.testing.assert_close(x.double() / scale, y, rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["x", "d"])
def test_entries_that_are_not_finite_show_in_the_sums(dtype, place):
    for shape in ((30, 40), (2, 40_000)):
        for dims in ((0,), (1,)):
            (x,), (d,) = pairs([shape], dtype)
            (x if place == "x" else d)[1, 11] = math.nan
            got = rows.sums(rows.memory([[x]], [[d]], [dims]))
            assert not np.isfinite(got[1]).all()
            assert not np.isfinite(got[0 if place == "x" else 2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_that_cancels_is_taken_from_the_entries(dtype):
    """x - s d is a millionth of x: the three sums leave few digits of its norm, or a negative square."""
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(50, 40, generator=generator, dtype=torch.float64)
    small = 1e-6 if dtype is torch.float32 else 1e-9
    x = 0.5 * d + small * torch.randn(50, 40, generator=generator, dtype=torch.float64)
    x, d = x.to(dtype), d.to(dtype)
    for dims in ((0,), (1,)):
        point = x.clone()
        at = rows.memory([[point]], [[d]], [dims])
        z = x.double() - 0.5 * d.double()
        norms = GroupLasso(1.0, dims).value(z).item() / at.groups
        want = GroupLasso(norms / 2, dims).prox(z, 1.0)
        rows.write(at, constant(at.groups, l1=norms / 2), np.ones(at.groups), 0.5, known=rows.sums(at))
        tol = 0.1 * small if dtype is torch.float32 else 1e-6 * small
        torch.testing.assert_close(point.double(), want, rtol=0, atol=tol)
        assert (want != 0).any()


# -- groups of several rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_sums", [False, True])
def test_rows_of_several_tensors_form_one_group(use_sums):
    """A unit of a network: its row of weights, its bias and its column of the next layer's weights."""
    xs, ds = pairs([(30, 20), (30, 1), (15, 30)], torch.float64)
    dims, alpha, u, lam = [(1,), (1,), (0,)], 0.7, 0.6, 9.0
    ids = np.tile(np.arange(30), 3)
    at = rows.memory([[x] for x in xs], [[d] for d in ds], dims, ids)
    joint = [torch.cat([ts[0], ts[1], ts[2].T], dim=1) for ts in (xs, ds)]
    want = GroupLasso.rows(lam).prox(joint[0] - u * alpha * joint[1], alpha)
    sums = rows.sums(at)
    assert sums.shape == (3, 30)
    np.testing.assert_allclose(sums[1], norms_sq(*joint, (1,)), rtol=1e-12, atol=1e-12)
    known = sums if use_sums else None
    rows.write(at, constant(30, l1=lam), np.full(30, alpha), u, known=known)
    got = torch.cat([xs[0], xs[1], xs[2].T], dim=1)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-14)
    assert (want == 0).all(1).any()
    assert (want != 0).any(1).any()


def test_a_group_without_constants_takes_the_plain_step():
    xs, ds = pairs([(30, 20)], torch.float64)
    ids = np.arange(30) // 10
    at = rows.memory([xs], [ds], [(1,)], ids)
    plain = xs[0] - 0.3 * ds[0]
    l1 = np.array([1e9, 0.0, 1e9])
    rows.write(at, constant(3)._replace(l1=l1), np.full(3, 0.6), 0.5)
    torch.testing.assert_close(xs[0][10:20], plain[10:20], rtol=1e-15, atol=1e-16)
    assert (xs[0][:10] == 0).all()
    assert (xs[0][20:] == 0).all()


def test_ids_must_name_every_row():
    xs, ds = pairs([(30, 20)], torch.float64)
    with pytest.raises(ValueError, match="one entry per row: got 29 for 30 rows"):
        rows.memory([xs], [ds], [(1,)], np.arange(29))


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("joined", [False, True])
def test_the_number_of_threads_does_not_change_a_bit(monkeypatch, dtype, joined):
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)
    before, results = torch.get_num_threads(), []
    shapes, dims = [(300, 301), (2, 50_001), (400, 300)], [(1,), (1,), (0,)]
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            xs, ds = pairs(shapes, dtype)
            ids = np.arange(602) % 57 if joined else None
            at = rows.memory([[x] for x in xs], [[d] for d in ds], dims, ids)
            assert at.layout.chunks.threads == count
            sums = rows.sums(at)
            rows.write(at, constant(at.groups, l1=9.0), np.full(at.groups, 0.7), 0.5)
            results.append((sums, xs))
    finally:
        torch.set_num_threads(before)
    for sums, xs in results[1:]:
        assert np.array_equal(sums, results[0][0])
        assert all(map(torch.equal, xs, results[0][1]))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dims", [(1,), (0,), None])
def test_a_step_takes_tensors_without_entries(dims, fused):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 0), (4, 5))]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = ProxSPS(params, lr=0.1, regularizer=GroupLasso(0.1, dims), fused=fused)
    opt.step(loss=1.0)
    assert (params[1] < 1).all()
