"""The compiled passes over rows in the identity metric, against the regularisers' own prox in doubles."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from proxsps.optim import ProxSPS
from proxsps.optim.kernels import layout, make
from proxsps.optim.kernels.parts import NOWHERE, Memory
from proxsps.optim.kernels.row_layout import RowGroups, row_layout, view
from proxsps.optim.kernels.rows import RowPart
from proxsps.optim.kernels.sampling import NO_START
from proxsps.regularizers import GroupLasso, L2Ball
from proxsps.regularizers.structure import Scalar, Units

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
OLD = 0.9  # weight of an average before the step

of_both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
of_all_shapes = pytest.mark.parametrize("name", SHAPES)
of_both_slopes = pytest.mark.parametrize("averaged", [False, True], ids=["gradient", "average"])


def drawn(shapes, dtype, seed=0, lists=3):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes * lists]
    return [draw[i : i + len(shapes)] for i in range(0, len(draw), len(shapes))]


class Case(RowPart):
    """The rows of blocks; each of them, or of the groups with these ids, is a block of its own.

    With gradients, the slopes are averages of earlier ones.
    """

    def __init__(self, params, slopes, dims, ids=None, grads=None, **constants):
        lists = [list(itertools.chain(*blocks)) for blocks in (params, slopes, *([] if grads is None else [grads]))]
        like, (x_at, d_at, *g_at) = layout.addresses(*lists)
        found = row_layout(params, dims)
        owner = found.owner if ids is None else ids[found.owner]
        self.count = len(found.block) if ids is None else int(ids.max()) + 1
        weights = np.tile([OLD, 1 - OLD, 0.0, 0.0, 0.0, 0.0], (len(x_at), 1))
        blocks = np.zeros(max(self.count, len(x_at)))
        slopes = (*g_at, d_at) if g_at else (d_at, None)
        at = Memory(like, x_at, *slopes, None, None, NOWHERE, *NO_START, blocks, weights, 0.0, 0.0)
        psi = np.array([np.broadcast_to(np.float64(c), self.count) for c in Scalar(**constants)])
        groups = RowGroups(found, owner, ids is not None, psi, np.arange(self.count))
        super().__init__(at, groups, np.arange(len(x_at)))

    def alpha(self, alpha):
        return [float(a) for a in np.broadcast_to(alpha, self.count)]

    def known(self):
        """||x||^2, <x, d> and ||d||^2 of each group."""
        self.sums(self.alpha(1.0), ())
        return self._known

    def step(self, alpha, u, moves=True):
        self.write([], [], self.alpha(alpha), u, moves)


def dots(t, u, dims):
    """<t, u> of each group of two tensors, in the order of memory of contiguous ones."""
    return (t.double() * u.double()).sum(dim=tuple(range(t.dim())) if dims is None else dims).reshape(-1).numpy()


def case(name, dtype, averaged):
    """Tensors x, d and g, their rows, and the new slopes in doubles."""
    shapes, dims = SHAPES[name]
    xs, ds, gs = drawn(shapes, dtype)
    at = Case([xs], [ds], [dims], grads=[gs] if averaged else None)
    new = [(OLD * d.double() + (1 - OLD) * g.double()) if averaged else d.double() for d, g in zip(ds, gs, strict=True)]
    return xs, ds, gs, at, new


@of_both_dtypes
@of_both_slopes
@of_all_shapes
def test_sums_agree_with_doubles_and_leave_everything_as_it_was(name, averaged, dtype):
    xs, ds, gs, at, new = case(name, dtype, averaged)
    dims, eps = SHAPES[name][1], torch.finfo(dtype).eps
    before = [t.clone() for t in (*xs, *ds, *gs)]
    d_sq, d_dot_x, _, *further, _ = at.sums(at.alpha(1.0), ())[0]
    got = at._known
    at._reduce(np.ones(at.count))
    assert all(map(torch.equal, (*xs, *ds, *gs), before))
    assert got.shape == (3, at.count) == (3, len(at._layout.block))
    assert np.array_equal([d_dot_x[: at.count], d_sq[: at.count]], got[1:])
    rounding = max(4 * eps * averaged, 1e-13)  # of new averages; sums are doubles
    for row, (one, other) in zip(got, ((xs, xs), (xs, new), (new, new)), strict=True):
        want, size = (
            np.concatenate([dots(a, b, dims) for a, b in pairs])
            for pairs in (zip(one, other, strict=True), zip(map(abs, one), map(abs, other), strict=True))
        )
        assert (np.abs(row - want) <= rounding * (size + 3 * np.sqrt(size)) + 1e-300).all()
    if averaged:
        want = [[(g.double() * t.double()).sum().item() for g, t in zip(gs, ts, strict=True)] for ts in (xs, gs)]
        np.testing.assert_allclose([row[: len(xs)] for row in further], want, rtol=1e-11, atol=1e-11)


@of_both_dtypes
@of_both_slopes
@pytest.mark.parametrize("use_sums", [False, True])
@of_all_shapes
def test_group_lasso_is_that_of_the_regularizer(name, use_sums, averaged, dtype):
    xs, ds, gs, at, new = case(name, dtype, averaged)
    dims, alpha, u = SHAPES[name][1], 0.8, 0.6
    lengths = np.repeat([n for _, n, _ in (view(x.shape, None, dims) for x in xs)], at._layout.counts)
    partial, _ = at._reduce(np.full(at.count, u * alpha))
    sizes = np.sqrt(np.bincount(at._groups.at, partial[0], at.count) / np.maximum(lengths, 1))
    ordered = np.sort(sizes[sizes > 0])
    lam = (ordered[len(ordered) // 2 - 1] + ordered[len(ordered) // 2]) / 2 / alpha  # half of the groups become 0
    phi, before = GroupLasso(lam, dims, scale_by_size=True), [x.clone() for x in xs]
    want = [phi.prox(x.double() - alpha * u * d, alpha) for x, d in zip(xs, new, strict=True)]
    still, averages = [x.clone() for x in xs], [d.clone() for d in ds]
    strength, grads = lam * np.sqrt(lengths), [gs] if averaged else None
    at = Case([xs], [ds], [dims], grads=grads, l1=strength)
    height, slope = at.sums(at.alpha(alpha), [u, u + 1e-6])[1]
    np.testing.assert_allclose(
        height[0],
        sum((d * (y - x.double())).sum().item() for x, d, y in zip(xs, new, want, strict=True)),
        rtol=1e-11 if not averaged else 1e-4 if dtype is torch.float32 else 1e-10,
    )
    np.testing.assert_allclose((height[1] - height[0]) / 1e-6, slope[0], rtol=1e-4)
    other = Case([still], [averages], [dims], grads=grads, l1=strength)
    if use_sums:
        other.known()
    else:
        at._known = None
    other.step(alpha, u, moves=False)
    at.step(alpha, u)
    tol = 40 * torch.finfo(dtype).eps
    assert all(map(torch.equal, still, before))
    assert all(map(torch.equal, averages, ds))
    for x, y, d, n in zip(xs, want, ds, new, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tol, atol=tol)
        assert torch.equal(x == 0, y == 0)
        assert not x[x == 0].signbit().any()
        torch.testing.assert_close(d.double(), n, rtol=tol, atol=tol)  # stored, if it is an average
    assert 0 < sum(int((y == 0).sum()) for y in want) < sum(y.numel() for y in want)


@of_both_dtypes
@pytest.mark.parametrize("shape", [(300,), (129, 257), (11, 3, 2)])
@pytest.mark.parametrize("radius", [3.0, 1e4])
def test_l2_ball_is_that_of_the_regularizer(dtype, shape, radius):
    (x,), (d,), _ = drawn([shape], dtype)
    want = L2Ball(radius).prox(x.double() - 0.35 * d.double(), 0.7)
    at = Case([[x]], [[d]], [None], upper=radius)
    inside = at.sums([0.7], [0.5])[1]
    np.testing.assert_allclose(inside.h[0], (d.double() * (want - x.double())).sum().item(), rtol=1e-10)
    at._known = None
    at.step(0.7, 0.5)
    tol = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(x.double(), want, rtol=tol, atol=tol)
    assert L2Ball(radius).value(x) == 0


def test_blocks_have_their_own_dims_and_constants():
    xs, ds, _ = drawn([(9, 20), (30, 7), (4, 3, 2, 2)], torch.float64)
    blocks = [[xs[0]], [], [xs[1]], [xs[2]]], [[ds[0]], [], [ds[1]], [ds[2]]], [(1,), (1,), (0,), (1, 2, 3)]
    phis = [GroupLasso.rows(3.0), None, GroupLasso.columns(4.0), GroupLasso.filters(2.0)]
    alphas = np.array([0.3, 1.0, 0.5, 0.9])
    want = [phis[b].prox(x - 0.5 * alphas[b] * d, alphas[b]) for b, x, d in zip([0, 2, 3], xs, ds, strict=True)]
    of_rows = row_layout(blocks[0], blocks[2]).block
    assert np.bincount(of_rows, minlength=4).tolist() == [9, 0, 7, 4]
    Case(*blocks, l1=np.array([3.0, 0, 4.0, 2.0])[of_rows]).step(alphas[of_rows], 0.5)
    for x, y in zip(xs, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-14)


# -- orders of memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(1, 2, 3), (1,), (0,), None, (2, 3), (1, 2)])
def test_channels_last(dims):
    (x,), (d,), _ = drawn([(6, 5, 4, 3)], torch.float64)
    last = [t.clone(memory_format=torch.channels_last) for t in (x, d)]
    if dims == (1, 2):  # memory has the order 0, 2, 3, 1
        assert row_layout([[last[0]]], [dims]) is None
        return
    at = Case([[last[0]]], [[last[1]]], [dims], l1=1.5)
    want = GroupLasso(1.5, dims).prox(x - 0.35 * d, 0.7)
    np.testing.assert_allclose(np.sort(at.known()[0]), np.sort(dots(x, x, dims)), rtol=1e-12)
    at._known = None
    at.step(0.7, 0.5)
    torch.testing.assert_close(last[0], want, rtol=1e-13, atol=1e-14, check_stride=False)


@pytest.mark.parametrize(
    ("shape", "dims", "want"),
    [
        ((4, 5), (1,), (4, 5, 1)),
        ((4, 5), (0,), (1, 4, 5)),
        ((4, 5, 6), (1,), (4, 5, 6)),
        ((4, 5, 6), (-2, -1), (4, 30, 1)),
        ((4, 1, 6), (1,), (24, 1, 1)),
        ((4, 5, 6), (0, 2), None),
        ((4, 1, 6), (0, 2), (1, 24, 1)),
        ((), None, (1, 1, 1)),
        ((4, 5), None, (1, 20, 1)),
        ((4, 0), (1,), (4, 0, 1)),
        ((4, 0), (0,), (1, 4, 0)),
    ],
)
def test_views_of_contiguous_tensors(shape, dims, want):
    assert view(shape, None, dims) == want
    assert (row_layout([[torch.ones(shape)]], [dims]) is None) == (want is None)


# -- arithmetic at its limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e100)])
@pytest.mark.parametrize("power", [1, -1])
def test_huge_and_tiny_entries(dtype, size, power):
    scale = size**power
    xs, ds, _ = drawn([(30, 40), (3, 20_000)], torch.float64)
    big = [(scale * t).to(dtype) for t in xs], [(scale * t).to(dtype) for t in ds]
    want = [GroupLasso.rows(7.0).prox(x - 0.36 * d, 0.9) for x, d in zip(xs, ds, strict=True)]
    at = Case([big[0]], [big[1]], [(1,)], l1=7.0 * scale)
    assert np.isfinite(at.known()).all()
    at._known = None
    at.step(0.9, 0.4)
    tol = 1e-5 if dtype is torch.float32 else 1e-12
    for x, y in zip(big[0], want, strict=True):
        torch.testing.assert_close(x.double() / scale, y, rtol=tol, atol=tol)


@of_both_dtypes
@pytest.mark.parametrize("place", ["x", "d"])
def test_entries_that_are_not_finite_show_in_the_sums(dtype, place):
    for shape, dims in itertools.product(((30, 40), (2, 40_000)), ((0,), (1,))):
        (x,), (d,), _ = drawn([shape], dtype)
        (x if place == "x" else d)[1, 11] = math.nan
        got = Case([[x]], [[d]], [dims]).known()
        assert not np.isfinite(got[1]).all()
        assert not np.isfinite(got[0 if place == "x" else 2]).all()


@of_both_dtypes
def test_a_norm_that_cancels_is_taken_from_the_entries(dtype):
    """x - s d is a millionth of x: the three sums leave few digits of its norm, or a negative square."""
    (noise,), (d,), _ = drawn([(50, 40)], torch.float64)
    small = 1e-6 if dtype is torch.float32 else 1e-9
    x, d = (0.5 * d + small * noise).to(dtype), d.to(dtype)
    for dims in ((0,), (1,)):
        point, z = x.clone(), x.double() - 0.5 * d.double()
        norms = GroupLasso(1.0, dims).value(z).item() / (z.numel() // z.shape[dims[0]])
        want = GroupLasso(norms / 2, dims).prox(z, 1.0)
        at = Case([[point]], [[d]], [dims], l1=norms / 2)
        at.known()
        at.step(1.0, 0.5)
        tol = 0.1 * small if dtype is torch.float32 else 1e-6 * small
        torch.testing.assert_close(point.double(), want, rtol=0, atol=tol)
        assert (want != 0).any()


# -- groups of several rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_sums", [False, True])
def test_rows_of_several_tensors_form_one_group(use_sums):
    """A unit of a network: its row of weights, its bias and its column of the next layer's weights."""
    xs, ds, _ = drawn([(30, 20), (30, 1), (15, 30)], torch.float64)
    alpha, u, lam = 0.7, 0.6, 9.0
    at = Case([[x] for x in xs], [[d] for d in ds], [(1,), (1,), (0,)], np.tile(np.arange(30), 3), l1=lam)
    joint = [torch.cat([ts[0], ts[1], ts[2].T], dim=1) for ts in (xs, ds)]
    want = GroupLasso.rows(lam).prox(joint[0] - u * alpha * joint[1], alpha)
    np.testing.assert_allclose(at.known()[1], dots(*joint, (1,)), rtol=1e-12, atol=1e-12)
    if not use_sums:
        at._known = None
    at.step(alpha, u)
    torch.testing.assert_close(torch.cat([xs[0], xs[1], xs[2].T], dim=1), want, rtol=1e-13, atol=1e-14)
    assert 0 < (want == 0).all(1).sum() < 30


def test_a_group_without_constants_takes_the_plain_step():
    xs, ds, _ = drawn([(30, 20)], torch.float64)
    plain = xs[0] - 0.3 * ds[0]
    Case([xs], [ds], [(1,)], np.arange(30) // 10, l1=np.array([1e9, 0.0, 1e9])).step(0.6, 0.5)
    torch.testing.assert_close(xs[0][10:20], plain[10:20], rtol=1e-15, atol=1e-16)
    assert (xs[0][:10] == 0).all()
    assert (xs[0][20:] == 0).all()


def test_every_row_needs_a_group():
    units = SimpleNamespace(joint_structure=lambda shapes: Units(Scalar(l1=1.0), [(1,)], np.arange(29)))
    with pytest.raises(ValueError, match="one entry per row: got 29 for 30 rows"):
        make._units(SimpleNamespace(in_metric=False, phi=units, params=[torch.ones(30, 20)]))


# -- threads, steps ---------------------------------------------------------------------------------------------------


@of_both_dtypes
@of_both_slopes
@pytest.mark.parametrize("joined", [False, True])
def test_neither_threads_nor_the_way_of_a_pass_change_a_bit(monkeypatch, joined, averaged, dtype):
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)  # threads take part from few entries on
    before, results = torch.get_num_threads(), []
    try:
        for count, backwards in ((1, False), (1, True), (2, True), (3, False)):
            torch.set_num_threads(count)
            xs, ds, gs = drawn([(300, 301), (2, 50_001), (400, 300)], dtype)
            ids, blocks = np.arange(602) % 57 if joined else None, [[[t] for t in ts] for ts in (xs, ds, gs)]
            at = Case(*blocks[:2], [(1,), (1,), (0,)], ids, blocks[2] if averaged else None, l1=9.0)
            at._turns = itertools.repeat(backwards)
            assert at._layout.chunks.threads == count
            numbers = [*map(np.array, at.sums(at.alpha(1.0), ())[0]), at._known]
            at._known = None
            numbers += at._reduce(np.full(at.count, 0.3))
            at.step(0.7, 0.5)
            results.append([*numbers, *(t.numpy() for t in (*xs, *ds))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(np.array_equal, results[0], other))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dims", [(1,), (0,), None])
def test_a_step_takes_tensors_without_entries(dims, fused):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 0), (4, 5))]
    for p in params:
        p.grad = torch.ones_like(p)
    ProxSPS(params, lr=0.1, regularizer=GroupLasso(0.1, dims), fused=fused).step(loss=1.0)
    assert (params[1] < 1).all()
