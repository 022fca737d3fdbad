"""The compiled passes over entries, against the regularisers' own prox in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from proxsps.optim import kernels
from proxsps.optim.kernels import entries, layout
from proxsps.optim.kernels.scalar import Psi
from proxsps.regularizers import L1, L2, Box, ElasticNet, LInfBall, NonNegative, Zero

SIZES = [1, 3, 67, 2_047, 2_049, 16_385, 40_001]
DTYPES = [torch.float32, torch.float64]
INF = math.inf
CASES = {
    "L1": (L1(0.3), (0.3, 0.0, -INF, INF)),
    "ElasticNet": (ElasticNet(0.2, 0.5), (0.2, 0.5, -INF, INF)),
    "NonNegative": (NonNegative(), (0.0, 0.0, 0.0, INF)),
    "Box": (Box(-0.4, 0.7), (0.0, 0.0, -0.4, 0.7)),
    "Box away from 0": (Box(0.3, 0.7), (0.0, 0.0, 0.3, 0.7)),
    "LInfBall": (LInfBall(0.6), (0.0, 0.0, -0.6, 0.6)),
    "L2": (L2(0.4), (0.0, 0.4, -INF, INF)),
    "Zero": (Zero(), (0.0, 0.0, -INF, INF)),
}
POINTS = np.array([0.0, 0.05, 0.6, 1.0])


def pairs(sizes, dtype, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes * 2]
    return [x.to(dtype) for x in draw[: len(sizes)]], [(scale * d).to(dtype) for d in draw[len(sizes) :]]


def memory(xs, ds):
    """The memory of tensors that are one block each."""
    return kernels.memory([[x] for x in xs], [[d] for d in ds])


def psi_of(*constants):
    return Psi(*np.array(constants, np.float64).T.copy())


class Reference:
    """h, its slope and y of one tensor, from the regulariser in double precision, with bounds for rounding."""

    def __init__(self, phi, constants, x, d, alpha, u):
        self.eps = torch.finfo(x.dtype).eps
        x, d = x.double(), d.double()
        z = x - u * alpha * d
        self.y = phi.prox(z, alpha)
        self.h = (d * (self.y - x)).sum().item()
        self.slope = -alpha * (d * phi.prox_jvp(z, self.y, d, alpha)).sum().item()
        self.move_sq = (self.y - x).square().sum().item()
        l1, l2, lower, upper = constants
        reach = x.abs() + (u * alpha * d).abs() + alpha * l1
        self.close = 8 * self.eps * (reach + sum(abs(b) for b in (lower, upper) if math.isfinite(b)))
        # Entries this near to a kink may be counted on either side of it.
        edges = [z.abs() - alpha * l1] + [z / (1 + alpha * l2) - b for b in (lower, upper) if math.isfinite(b)]
        near = torch.stack([e.abs() <= self.close for e in edges]).any(0)
        self.h_error = (d.abs() * self.close).sum().item()
        self.slope_error = alpha * (d.square() * (near + 8 * self.eps)).sum().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_h_and_its_slope_are_those_of_the_regularizer(name, dtype):
    phi, constants = CASES[name]
    xs, ds = pairs(SIZES, dtype)
    alpha = np.linspace(0.4, 1.6, len(xs))
    got = entries.reduce(memory(xs, ds), psi_of(*[constants] * len(xs)), alpha, POINTS)
    assert got.shape == (3 + 2 * len(POINTS), len(xs))
    for i, (x, d) in enumerate(zip(xs, ds, strict=True)):
        product = x.double() * d.double()
        eps = torch.finfo(dtype).eps
        np.testing.assert_allclose(got[0, i], d.double().square().sum(), rtol=40 * eps)
        np.testing.assert_allclose(got[1, i], product.sum(), atol=40 * eps * product.abs().sum().item())
        np.testing.assert_allclose(got[2, i], product.square().sum(), rtol=40 * eps)
        for p, u in enumerate(POINTS):
            want = Reference(phi, constants, x, d, alpha[i], u)
            assert abs(got[3 + p, i] - want.h) <= want.h_error
            assert abs(got[3 + len(POINTS) + p, i] - want.slope) <= want.slope_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_the_new_point_is_that_of_the_regularizer(name, dtype):
    phi, constants = CASES[name]
    xs, ds = pairs(SIZES, dtype)
    alpha = np.linspace(0.4, 1.6, len(xs))
    psi, u, kept = psi_of(*[constants] * len(xs)), 0.6, [d.clone() for d in ds]
    want = [Reference(phi, constants, x, d, a, u) for x, d, a in zip(xs, ds, alpha, strict=True)]
    moves = entries.move_sq(memory(xs, ds), psi, alpha, u)
    half = [x.clone() for x in xs]
    entries.write(memory(half, ds), psi, alpha, u, relax=0.5)
    before = [x.clone() for x in xs]
    entries.write(memory(xs, ds), psi, alpha, u)
    for x, h, b, w, m in zip(xs, half, before, want, moves, strict=True):
        assert ((x.double() - w.y).abs() <= w.close).all()
        assert ((h.double() - (b.double() + w.y) / 2).abs() <= w.close).all()
        assert abs(m - w.move_sq) <= (w.close * (4 * (w.y - b).abs() + w.close)).sum() + 40 * w.eps * w.move_sq
    assert all(map(torch.equal, ds, kept))


def test_the_kinds_of_prox_agree_where_they_overlap(monkeypatch):
    xs, ds = pairs(SIZES, torch.float64)
    constants = [CASES[name][1] for name in ("L1", "ElasticNet", "NonNegative", "Box", "LInfBall", "Zero")]
    psi, alpha = psi_of(*constants, constants[0]), np.linspace(0.4, 1.6, len(xs))
    kinds = entries._kinds(psi)
    assert set(kinds) == {entries.SOFT, entries.BOX}
    special = entries.reduce(memory(xs, ds), psi, alpha, POINTS)
    monkeypatch.setattr(entries, "_kinds", lambda psi, in_metric: np.full(len(xs), entries.GENERAL))
    np.testing.assert_allclose(special, entries.reduce(memory(xs, ds), psi, alpha, POINTS), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_constants_at_once(dtype):
    """l1, l2 and bounds together are none of the regularisers: against the prox written out."""
    (x,), (d,) = pairs([20_003], dtype)
    l1, l2, lower, upper, alpha, u = 0.3, 0.5, -0.25, 0.5, 0.8, 0.7
    z = x.double() - u * alpha * d.double()
    soft = z.sign() * (z.abs() - alpha * l1).clamp(min=0) / (1 + alpha * l2)
    y = soft.clamp(lower, upper)
    inside = (z.abs() > alpha * l1) & (soft > lower) & (soft < upper)
    psi, alphas = psi_of((l1, l2, lower, upper)), np.array([alpha])
    got = entries.reduce(memory([x], [d]), psi, alphas, np.array([u]))[:, 0]
    rtol = 1e-4 if dtype is torch.float32 else 1e-11
    np.testing.assert_allclose(got[3], (d.double() * (y - x.double())).sum(), rtol=rtol)
    np.testing.assert_allclose(got[4], -alpha / (1 + alpha * l2) * d.double()[inside].square().sum(), rtol=rtol)
    np.testing.assert_allclose(
        entries.move_sq(memory([x], [d]), psi, alphas, u), (y - x.double()).square().sum(), rtol=rtol
    )
    entries.write(memory([x], [d]), psi, alphas, u)
    torch.testing.assert_close(x.double(), y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["L1", "Box", "L2"])  # one of each kind
def test_any_number_of_points_gives_the_same_numbers(name, count):
    xs, ds = pairs(SIZES, torch.float64)
    psi, alpha, u = psi_of(*[CASES[name][1]] * len(xs)), np.full(len(xs), 0.7), np.linspace(0.1, 1, count)
    together = entries.reduce(memory(xs, ds), psi, alpha, u)
    assert len(together) == 3 + 2 * count
    for p in range(count):
        alone = entries.reduce(memory(xs, ds), psi, alpha, u[p : p + 1])
        np.testing.assert_allclose(together[[0, 1, 2, 3 + p, 3 + count + p]], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["L1", "ElasticNet", "Box", "Zero"])
def test_h_keeps_its_digits_where_the_step_is_tiny(name):
    """y then agrees with x in all but a few digits of f32, and y - x taken literally has none that are right."""
    phi, constants = CASES[name]
    x = torch.full((5_000,), 0.5) + 0.1 * torch.rand(5_000, generator=torch.Generator().manual_seed(0))
    d = 1 + torch.rand(5_000, generator=torch.Generator().manual_seed(1))
    alpha = 1e-7
    got = entries.reduce(memory([x], [d]), psi_of(constants), np.array([alpha]), np.array([1.0]))[3, 0]
    z = x.double() - alpha * d.double()
    want = (d.double() * (phi.prox(z, alpha) - x.double())).sum().item()
    literal = (d * (phi.prox(x - alpha * d, alpha) - x)).sum().item()
    assert abs(got - want) < 1e-5 * abs(want)
    assert abs(literal - want) > 1e-3 * abs(want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_exact(dtype):
    (x,), (d,) = pairs([70_001], dtype)
    z = x.double() - 0.3 * d.double()
    entries.write(memory([x], [d]), psi_of((0.5, 0.1, -INF, INF)), np.array([0.6]), 0.5)
    inner = z.abs() < 0.3 - 1e-5
    assert inner.sum() > 10_000
    assert (x[inner] == 0).all()
    assert (x[z.abs() > 0.3 + 1e-5] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(0.1, 0.7), (0.0, INF), (-0.3, -0.1), (0.3, 0.3)])
def test_bounds_hold_exactly(dtype, bounds):
    (x,), (d,) = pairs([20_003], dtype)
    entries.write(memory([x], [d]), psi_of((0.01, 0.3, *bounds)), np.array([0.6]), 0.5)
    lower, upper = torch.tensor(bounds, dtype=torch.float64).to(dtype)  # as torch.clamp rounds them
    assert (x >= lower).all()
    assert (x <= upper).all()
    assert (x == lower).any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e15), (torch.float64, 1e100)])
@pytest.mark.parametrize("power", [1, -1])
def test_huge_and_tiny_entries(dtype, size, power):
    """Scaling x, d and the constants scales h, up to where squares leave the range of the type."""
    scale = size**power
    xs, ds = pairs([5_003], torch.float64)
    big = [(scale * t).to(dtype) for t in xs], [(scale * t).to(dtype) for t in ds]
    alpha, u = np.array([0.7]), np.array([0.3, 0.9])
    want = entries.reduce(memory(xs, ds), psi_of((0.3, 0.2, -INF, INF)), alpha, u)
    got = entries.reduce(memory(*big), psi_of((0.3 * scale, 0.2, -INF, INF)), alpha, u)
    rtol = 2e-3 if dtype is torch.float32 else 1e-10  # entries next to the kink, in f32
    keep = [0, 1, 3, 4, 5, 6]  # (d x)^2 has a fourth power of the scale
    np.testing.assert_allclose(got[keep] / scale / scale, want[keep], rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["x", "d"])
def test_entries_that_are_not_finite_show_in_the_sums(dtype, bad, place):
    (x,), (d,) = pairs([20_003], dtype)
    (x if place == "x" else d)[11_111] = bad
    for constants in (CASES["L1"][1], CASES["Box"][1], CASES["L2"][1]):
        got = entries.reduce(memory([x], [d]), psi_of(constants), np.array([0.5]), POINTS)
        assert not np.isfinite(got[1]).all()
        assert place == "x" or not np.isfinite(got[0]).all()


def test_blocks_have_constants_of_their_own_and_may_be_empty():
    xs, ds = pairs([700, 33, 0, 5_000], torch.float64)
    names = ["L1", "Box", "L1", "ElasticNet"]
    psi = psi_of(*[CASES[name][1] for name in names])
    alpha, u = np.array([0.4, 0.9, 0.3, 1.2]), np.array([0.3])
    blocks = [[xs[0], xs[2]], [xs[1]], [], [xs[3]]], [[ds[0], ds[2]], [ds[1]], [], [ds[3]]]
    got = entries.reduce(kernels.memory(*blocks), psi, alpha, u)
    moves = entries.move_sq(kernels.memory(*blocks), psi, alpha, 0.3)
    entries.write(kernels.memory(*blocks), psi, alpha, 0.3)
    for i, j in ((0, 0), (1, 1), (3, 3)):
        x, d = pairs([700, 33, 0, 5_000], torch.float64)[0][j], ds[j]
        want = Reference(*CASES[names[i]], x, d, alpha[i], 0.3)
        np.testing.assert_allclose([got[3, i], got[4, i]], [want.h, want.slope], rtol=1e-11)
        np.testing.assert_allclose(moves[i], want.move_sq, rtol=1e-11)
        torch.testing.assert_close(xs[j], want.y, rtol=1e-14, atol=1e-15)
    assert (got[:, 2] == 0).all()
    assert entries.reduce(kernels.memory([[]], [[]]), psi_of(CASES["L1"][1]), np.ones(1), u).tolist() == [[0.0]] * 5


def test_channels_last_tensors_are_walked_in_their_own_order():
    (x,), (d,) = pairs([(6, 5, 4, 3)], torch.float64)
    last = [t.to(memory_format=torch.channels_last).clone(memory_format=torch.preserve_format) for t in (x, d)]
    psi, alpha = psi_of(CASES["L1"][1]), np.array([0.5])
    args = psi, alpha, POINTS
    np.testing.assert_allclose(
        entries.reduce(memory([last[0]], [last[1]]), *args), entries.reduce(memory([x], [d]), *args), rtol=1e-12
    )
    entries.write(memory([last[0]], [last[1]]), psi, alpha, 0.5)
    entries.write(memory([x], [d]), psi, alpha, 0.5)
    assert torch.equal(last[0], x)


# -- samples ----------------------------------------------------------------------------------------------------------


def test_a_sample_estimates_the_sums_of_whole_blocks():
    sizes = [16, 400, 9_000, 300_000, 1_000_000]
    xs, ds = pairs(sizes, torch.float32)
    psi, alpha = psi_of(*[CASES["L1"][1]] * 5), np.full(5, 0.5)
    at = memory(xs, ds)
    whole, sample = (entries.reduce(at, psi, alpha, POINTS, every=every) for every in (1, 16))
    assert np.array_equal(whole[:, 0], sample[:, 0])  # too small to be sampled
    spread = 6 / np.sqrt(np.array(sizes) / 16 + 256)
    for row in (0, 2, *range(4, 11)):
        assert (np.abs(sample[row] / whole[row] - 1)[1:] < 4 * spread[1:]).all()


def test_a_sample_reads_its_part_of_every_tensor():
    xs, ds = pairs([16, 5_000, 1_000_000], torch.float32)
    at = memory(xs, ds)
    taken, scale = layout.sampled(at.layout, 16)
    block, _, start, length = taken.chunks.columns
    whole_block, _, whole_start, whole_length = at.layout.chunks.columns
    assert np.array_equal(block, whole_block)
    assert (start >= whole_start).all()
    assert (start + length <= whole_start + whole_length).all()
    np.testing.assert_allclose(length * scale, whole_length)
    assert length.sum() < 1_005_016 / 15
    places = start - whole_start
    assert len(set(places)) > 0.9 * len(places) - 2  # not the same columns of a matrix in every chunk


def test_a_sample_of_a_constant_is_exact():
    x, d = torch.full((123_457,), 0.5).double(), torch.full((123_457,), 0.25).double()
    at, args = memory([x], [d]), (psi_of(CASES["L1"][1]), np.array([0.5]), POINTS)
    np.testing.assert_allclose(entries.reduce(at, *args, every=16), entries.reduce(at, *args), rtol=1e-13)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(monkeypatch, dtype):
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)
    before, results = torch.get_num_threads(), []
    sizes = [300_001, 11, 70_000]
    psi, alpha = psi_of(*[CASES[name][1] for name in ("L1", "Box", "ElasticNet")]), np.array([0.4, 0.9, 1.2])
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            xs, ds = pairs(sizes, dtype)
            at = memory(xs, ds)
            assert at.layout.chunks.threads == count
            numbers = [entries.reduce(at, psi, alpha, POINTS, every) for every in (1, 4)]
            numbers.append(entries.move_sq(at, psi, alpha, 0.5))
            entries.write(at, psi, alpha, 0.5)
            results.append((numbers, xs))
    finally:
        torch.set_num_threads(before)
    for numbers, xs in results[1:]:
        assert all(map(np.array_equal, numbers, results[0][0]))
        assert all(map(torch.equal, xs, results[0][1]))
