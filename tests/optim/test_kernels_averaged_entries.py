"""The compiled passes over entries with averaged slopes, in both metrics, against the regularisers' own prox."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampled import sample

pytest.importorskip("numba")

from proxsps.optim import kernels
from proxsps.optim.kernels import entries, layout, moments
from proxsps.optim.kernels.scalar import Psi
from proxsps.regularizers import L1, L2, Box, ElasticNet, NonNegative

INF, EPS = math.inf, 1e-8
# One block for each: a function, its constants, and the sizes of the tensors.
BLOCKS = [
    (L1(0.3), (0.3, 0.0, -INF, INF), [63, 64, 65]),
    (ElasticNet(0.2, 0.5), (0.2, 0.5, -INF, INF), [16_385, 0]),
    (NonNegative(), (0.0, 0.0, 0.0, INF), [2_049]),
    (Box(-0.4, 0.7), (0.0, 0.0, -0.4, 0.7), [40_001]),
    (L2(0.4), (0.0, 0.4, -INF, INF), [1]),
]
PSI = Psi(*np.array([constants for _, constants, _ in BLOCKS]).T.copy())
ALPHA = np.linspace(0.4, 1.6, len(BLOCKS))
POINTS = np.array([0.0, 0.05, 0.6, 1.0])

in_both_metrics = pytest.mark.parametrize("adam", [False, True], ids=["identity", "adam"])
of_both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


class Case:
    """Parameters, gradients, averages and a start of the blocks, and what a step makes of them in doubles."""

    def __init__(self, dtype, adam, scale=1):
        generator = torch.Generator().manual_seed(0)

        def draw():
            return [
                [torch.randn(scale * n, generator=generator, dtype=torch.float64).to(dtype) for n in sizes]
                for *_, sizes in BLOCKS
            ]

        self.x, self.g, self.d, v, far = (draw() for _ in range(5))
        self.v = [[t.square() for t in block] for block in v] if adam else None
        self.start = [[sample(t).clone() for t in block] for block in far]
        count = sum(len(sizes) for *_, sizes in BLOCKS)
        old, old_v = np.full(count, 0.9), np.linspace(0.5, 0.999, count)  # tensors may have a count of their own
        self.weights = np.array([old, 1 - old, old_v, 1 - old_v])
        self.eps = torch.finfo(dtype).eps

    def memory(self):
        at = moments.averages(self.x, self.g, self.d, self.v, self.weights, EPS)
        return at._replace(start=kernels.start_of(self.x, self.start, at.like))

    def state(self):
        return [t.clone() for lists in (self.x, self.g, self.d, self.v or []) for block in lists for t in block]

    def block(self, b):
        """x, g, new d, new v and r = 1/D of a block, as vectors of doubles."""
        first, columns = sum(len(block) for block in self.x[:b]), []
        for j, x in enumerate(self.x[b]):
            old, new, old_v, new_v = self.weights[:, first + j]
            x, g, d = x.double(), self.g[b][j].double(), self.d[b][j].double()
            v = torch.ones_like(x) if self.v is None else old_v * self.v[b][j].double() + new_v * g**2
            r = torch.ones_like(x) if self.v is None else 1 / (v.sqrt() + EPS)
            columns.append((x, g, old * d + new * g, v, r))
        return [torch.cat(column) for column in zip(*columns, strict=True)]


@of_both_dtypes
@in_both_metrics
def test_a_pass_makes_the_sums_of_the_new_averages_and_leaves_everything_as_it_was(adam, dtype):
    case = Case(dtype, adam)
    before = case.state()
    got, further = entries.first_reduce(case.memory(), PSI, ALPHA, POINTS)
    again = entries.reduce(case.memory(), PSI, ALPHA, POINTS)
    along = entries.ray(case.memory(), PSI, np.multiply.outer([0.3, 1.0], ALPHA))
    assert all(map(torch.equal, case.state(), before))
    assert np.array_equal(got, again)
    np.testing.assert_array_equal(along[1], entries.reduce(case.memory(), PSI, ALPHA, np.ones(1))[3])
    for b, (phi, *_) in enumerate(BLOCKS):
        x, g, d, _, r = case.block(b)
        size = 400 * case.eps * (d.abs() * (x.abs() + r * d.abs() + r)).sum().item() + 1e-300
        wanted = [(d * r * d).sum(), (d * x).sum(), (d * x).square().sum()]
        np.testing.assert_allclose(got[:3, b], wanted, rtol=400 * case.eps, atol=size)
        np.testing.assert_allclose(
            [part[b] for part in further[:3]],
            [(d * x).sum(), (g * x).sum(), (r * g).square().sum()],
            rtol=400 * case.eps,
            atol=size,
        )
        heights = [_height(phi, x, d, r, ALPHA[b], u) for u in POINTS]
        np.testing.assert_allclose(got[3:7, b], heights, rtol=0, atol=size)
        np.testing.assert_allclose(along[0, b], _height(phi, x, d, r, 0.3 * ALPHA[b], 1.0), rtol=0, atol=size)
        for row, u in zip(got[7:, b], POINTS, strict=True):  # between two points on either side, where h is smooth
            z = x - u * ALPHA[b] * r * d
            y = phi.prox_diagonal(z, ALPHA[b] * r)
            slope = -ALPHA[b] * (d * phi.prox_jvp(z, y, r * d, ALPHA[b] * r)).sum().item()
            np.testing.assert_allclose(row, slope, rtol=3e-3 if dtype is torch.float32 else 1e-9)
    measured = kernels.sums(kernels.memory(case.x, case.g), np.zeros(len(BLOCKS)), False, case.memory().start)[3]
    np.testing.assert_allclose(further.moved_sq, measured, rtol=1e-12)


def _height(phi, x, d, r, alpha, u):
    return (d * (phi.prox_diagonal(x - u * alpha * r * d, alpha * r) - x)).sum().item()


@of_both_dtypes
@in_both_metrics
@pytest.mark.parametrize("relax", [1.0, 0.5])
def test_a_write_stores_the_averages_and_the_prox_of_the_new_point(relax, adam, dtype):
    case, u = Case(dtype, adam), 0.6
    wanted, grads = [case.block(b) for b in range(len(BLOCKS))], [g.clone() for block in case.g for g in block]
    moves = entries.move_sq(case.memory(), PSI, ALPHA, u)
    entries.write(case.memory(), PSI, ALPHA, u, relax)
    assert all(map(torch.equal, (g for block in case.g for g in block), grads))
    for b, (phi, *_) in enumerate(BLOCKS):
        x, g, d, v, r = wanted[b]
        y = phi.prox_diagonal(x - u * ALPHA[b] * r * d, ALPHA[b] * r)
        close = 16 * case.eps * (x.abs() + r * (d.abs() + g.abs()) + r + 1)
        got = torch.cat(case.x[b]).double()
        assert ((got - (x + relax * (y - x))).abs() <= close).all()
        assert ((torch.cat(case.d[b]).double() - d).abs() <= 4 * case.eps * (d.abs() + g.abs())).all()
        assert not adam or ((torch.cat(case.v[b]).double() - v).abs() <= 4 * case.eps * v).all()
        np.testing.assert_allclose(moves[b], (y - x).square().sum(), rtol=1000 * case.eps)
        if relax == 1 and b == 0:
            zero = y == 0
            assert zero.any()
            assert (got[zero & ((x - u * ALPHA[b] * r * d).abs() < 0.99 * ALPHA[b] * 0.3 * r)] == 0).all()


@in_both_metrics
def test_the_number_of_threads_does_not_change_a_bit(monkeypatch, adam):
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            case = Case(torch.float32, adam, scale=7)
            numbers, further = entries.first_reduce(case.memory(), PSI, ALPHA, POINTS)
            sampled = entries.reduce(case.memory(), PSI, ALPHA, POINTS, every=4)
            entries.write(case.memory(), PSI, ALPHA, 0.5)
            results.append(([numbers, np.array(further), sampled], case.state()))
    finally:
        torch.set_num_threads(before)
    assert all(map(np.array_equal, results[0][0], results[1][0]))
    assert all(map(torch.equal, results[0][1], results[1][1]))


@in_both_metrics
@pytest.mark.parametrize("place", ["x", "g"])
def test_entries_that_are_not_finite_show_in_the_sums(place, adam):
    for bad in (math.nan, math.inf):
        case = Case(torch.float32, adam)
        getattr(case, place)[3][0][33_333] = bad
        got, _ = entries.first_reduce(case.memory(), PSI, ALPHA, POINTS)
        assert not np.isfinite(got[:2, 3]).all()
        assert np.isfinite(got[:, :3]).all()
