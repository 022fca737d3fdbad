"""Compiled passes over affine blocks and entries, for all kinds of slopes, against formulas and proxes in doubles."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sampled import sample

pytest.importorskip("numba")

from proxsps.optim.kernels import layout
from proxsps.optim.kernels.entrywise import EntryPart
from proxsps.optim.kernels.heights import GENERAL
from proxsps.optim.kernels.parts import NOWHERE, Memory
from proxsps.optim.kernels.sampling import NO_START, start_of
from proxsps.regularizers import L1, L2, Box, ElasticNet, LInfBall, NonNegative, Zero
from proxsps.regularizers.structure import Scalar

EPS, LEAST = 1e-8, 1e-30  # of the metric
SIZES = {
    "odd": [[1, 3], [63, 64, 65], [1_023, 1_024, 1_025], [16_383, 16_385, 40_001]],
    "many": [[21]] * 100,
    "empty": [[0], [], [5, 0, 3]],
    "nothing": [[], [0]],
    "large": [[300_001, 11], [2 * 300_001]],
}
FUNCTIONS = {
    "L1": (L1(0.3), Scalar(l1=0.3)),
    "ElasticNet": (ElasticNet(0.2, 0.5), Scalar(l1=0.2, l2=0.5)),
    "NonNegative": (NonNegative(), Scalar(lower=0.0)),
    "Box": (Box(-0.4, 0.7), Scalar(lower=-0.4, upper=0.7)),
    "Box away from 0": (Box(0.3, 0.7), Scalar(lower=0.3, upper=0.7)),
    "LInfBall": (LInfBall(0.6), Scalar(lower=-0.6, upper=0.6)),
    "L2": (L2(0.4), Scalar(l2=0.4)),
    "Zero": (Zero(), Scalar()),
}
POINTS = [0.0, 0.05, 0.6, 1.0]

of_both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
of_all_slopes = pytest.mark.parametrize("slope", ["gradient", "average", "adam"])
of_all_functions = pytest.mark.parametrize("name", FUNCTIONS)


class Case:
    """Parameters, gradients, averages and a start, one list per block, and what they are in doubles."""

    def __init__(self, sizes, dtype, slope="gradient", psi=None, start=False, scale=1.0, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw():
            return [
                [(scale * torch.randn(n, generator=generator, dtype=torch.float64)).to(dtype) for n in block]
                for block in sizes
            ]

        self.slope, self.eps, self.metric_eps = slope, torch.finfo(dtype).eps, EPS
        self.x, self.g, self.d, v, far = (draw() for _ in range(5))
        self.v = [[t.square() for t in block] for block in v]
        self.start = [[sample(t) for t in block] for block in far] if start else None
        self.psi = [None] * len(sizes) if psi is None else psi
        self.coupling = np.zeros(len(sizes))
        count = sum(map(len, sizes))
        old, old_v = np.full(count, 0.9), np.linspace(0.5, 0.999, count)  # tensors may have their own counts
        self.weights = np.stack([old, 1 - old, old_v, 1 - old_v, 0 * old, 0 * old], axis=1)

    def lists(self):
        names = {"gradient": "xg", "average": "xgd", "adam": "xgdv"}[self.slope]
        return [list(itertools.chain(*getattr(self, name))) for name in names]

    def state(self):
        return [t.clone() for tensors in self.lists() for t in tensors]

    def part(self):
        like, at = layout.addresses(*self.lists())
        start = NO_START
        if self.start is not None:
            start = start_of(self.lists()[0], list(itertools.chain(*self.start)), like)
        d_at, v_at = [*at[2:], None, None][:2]
        numbers = (self.coupling, self.weights, self.metric_eps, LEAST)
        memory = Memory(like, at[0], at[1], d_at, v_at, None, NOWHERE, *start, *numbers)
        sizes = tuple(tuple(x.numel() for x in block) for block in self.x)
        return EntryPart(memory, layout.layout(sizes, torch.get_num_threads()), self.psi)

    def block(self, b):
        """x, g, new d, new v and r of a block, as vectors of doubles, and its ||x - x_0||^2."""
        first, columns, moved = sum(map(len, self.x[:b])), [(torch.zeros(0, dtype=torch.float64),) * 5], 0.0
        for j, x in enumerate(self.x[b]):
            old, new, old_v, new_v, *_ = self.weights[first + j]
            x, g, d, v = (t.double() for t in (x, self.g[b][j], self.d[b][j], self.v[b][j]))
            d = g + self.coupling[b] * x if self.slope == "gradient" else old * d + new * g
            v = old_v * v + new_v * g**2
            r = 1 / (v.sqrt() + self.metric_eps).clamp(min=LEAST) if self.slope == "adam" else torch.ones_like(x)
            columns.append((x, g, d, v, r))
            if self.start is not None and len(x):
                far = sample(x) - self.start[b][j].double()
                moved += (far**2).sum().item() * len(x) / len(far)
        return [torch.cat(column) for column in zip(*columns, strict=True)], moved

    def at(self, b, phi, alpha, u):
        """y, a bound for its rounding, and sum <d, y - x>, its slope and bounds for both."""
        (x, g, d, _, r), _ = self.block(b)
        z, caps = x - u * alpha * r * d, alpha * r
        y = phi.prox_diagonal(z, caps)
        l1, l2, *bounds = self.psi[b]
        bounds = [bound for bound in bounds if math.isfinite(bound)]
        size = d.abs() + g.abs()  # an average may be a small difference
        close = 16 * self.eps * (x.abs() + caps * (u * size + l1) + sum(map(abs, bounds)))
        edges = [z.abs() - caps * l1, *(z / (1 + caps * l2) - bound for bound in bounds)]
        near = torch.stack([edge.abs() <= close for edge in edges]).any(0)  # may count on either side of a kink
        slope = -(d * phi.prox_jvp(z, y, caps * d, caps)).sum().item()
        errors = size * (close + 8 * self.eps * (y - x).abs()), size**2 * caps * (near + 16 * self.eps)
        return y, close, np.array([(d * (y - x)).sum().item(), slope, *(part.sum().item() for part in errors)])


# -- sums and writes of affine blocks ------------------------------------------------------------------------------


@of_both_dtypes
@of_all_slopes
@pytest.mark.parametrize("name", SIZES)
def test_sums_agree_with_doubles_and_leave_everything_as_it_was(name, slope, dtype):
    case = Case(SIZES[name], dtype, slope, start=True)
    case.coupling[:] = np.linspace(0, 0.7, len(case.x)) * (slope == "gradient")
    case.psi = [Scalar(l1=0.1) if b % 2 else None for b in range(len(case.x))]
    before = case.state()
    got, heights = case.part().sums([0.5] * len(case.x), ())
    assert heights == ([], [])
    assert all(map(torch.equal, case.state(), before))
    for b, column in enumerate(zip(*got, strict=True)):
        (x, g, d, _, r), moved = case.block(b)
        averaged, noisy = slope != "gradient", case.psi[b] is not None
        terms = [d * r * d, d * x, noisy * (d * x) ** 2, averaged * g * x, averaged * (r * g) ** 2]
        terms += [torch.zeros(1), noisy * (r * d).abs(), x * x * bool(case.coupling[b])]
        # A run is summed in the dtype, each partial sum rounded once; the rest in doubles.
        bound = (layout.RUN + 16) * case.eps / 2
        for row, (number, term) in enumerate(zip(column, terms, strict=True)):
            assert row == 5 or abs(number - term.sum()) <= bound * term.abs().sum() + 1e-300
        assert math.isclose(column[5], moved, rel_tol=8 * case.eps)


@of_both_dtypes
@of_all_slopes
@pytest.mark.parametrize("name", SIZES)
def test_writes_agree_with_doubles(name, slope, dtype):
    case = Case(SIZES[name], dtype, slope)
    wanted, grads = [case.block(b)[0] for b in range(len(case.x))], [g.clone() for block in case.g for g in block]
    keep, move = np.linspace(0.5, 1, len(case.x)).tolist(), np.linspace(-0.3, -0.1, len(case.x)).tolist()
    case.part().write(keep, move, move, 0.7, True)
    assert all(map(torch.equal, (g for block in case.g for g in block), grads))
    for b, (x, g, d, v, r) in enumerate(wanted):
        got = [torch.cat([x[:0], *(t.double() for t in tensors[b])]) for tensors in (case.x, case.d, case.v)]
        size = d.abs() + g.abs()
        assert ((got[0] - (keep[b] * x + move[b] * r * d)).abs() <= 8 * case.eps * (x.abs() + r * size)).all()
        assert slope == "gradient" or ((got[1] - d).abs() <= 4 * case.eps * size).all()
        assert slope != "adam" or ((got[2] - v).abs() <= 4 * case.eps * v).all()


@of_both_dtypes
def test_an_average_of_one_gradient_is_bitwise_that_gradient(dtype):
    case, plain = (Case(SIZES["odd"], dtype, slope) for slope in ("average", "gradient"))
    case.weights[:, 0], case.weights[:, 1] = 0.0, 1.0
    numbers = [0.5, 0.9, 0.7, 0.97]
    averaged, simple = case.part().sums(numbers, ())[0], plain.part().sums(numbers, ())[0]
    np.testing.assert_allclose(averaged[:2], simple[:2], rtol=200 * case.eps)  # sums in another order
    assert averaged[1] == averaged[3]  # so that the averaged value is exactly the loss
    for one in (case, plain):
        one.part().write(numbers, [-0.1] * 4, numbers, 1.0, True)
    assert all(map(torch.equal, case.state(), [*plain.state(), *(g for block in plain.g for g in block)]))


# -- entries with a prox -------------------------------------------------------------------------------------------


@of_both_dtypes
@of_all_slopes
@of_all_functions
def test_heights_and_slopes_are_those_of_the_regularizer(name, slope, dtype):
    phi, psi = FUNCTIONS[name]
    case = Case([[1, 67, 2_049], [16_385, 3]], dtype, slope, [psi] * 2)
    alpha, before = [0.4, 1.3], case.state()
    part = case.part()
    sums, first = part.sums(alpha, POINTS)
    assert part.heights(alpha, POINTS) == first
    alone = part.sums(alpha, ())[0]  # in a metric by another loop, which adds up in another order
    np.testing.assert_allclose(sums, alone, rtol=200 * case.eps, atol=200 * case.eps * np.abs(sums).max())
    assert slope == "adam" or sums == alone
    rays = part.ray(alpha, [0.3, 1.0])
    assert all(map(torch.equal, case.state(), before))
    for u, h, bend in zip(POINTS, *first, strict=True):
        wanted, slopes, error, slope_error = sum(case.at(b, phi, alpha[b], u)[2] for b in (0, 1))
        assert abs(h - wanted) <= error
        assert abs(bend - slopes) <= slope_error
    for s, h in zip([0.3, 1.0], rays, strict=True):
        wanted, _, error, _ = sum(case.at(b, phi, s * alpha[b], 1.0)[2] for b in (0, 1))
        assert abs(h - wanted) <= error


@of_both_dtypes
@of_all_slopes
@of_all_functions
@pytest.mark.parametrize("moves", [True, False])
def test_the_new_point_is_that_of_the_regularizer(moves, name, slope, dtype):
    phi, psi = FUNCTIONS[name]
    case = Case([[1, 67, 2_049], [16_385, 3], [5]], dtype, slope, [psi, psi, None])
    alpha, u = [0.4, 1.3, 0.9], 0.6
    wanted = [(case.block(b)[0], case.at(b, phi, alpha[b], u)) for b in (0, 1)]
    (line, _, d, _, r), _ = case.block(2)
    case.part().write([1.0, 1.0, 0.5], [0.0, 0.0, -0.1], alpha, u, moves)
    for b, ((x, g, new, v, _), (y, close, _)) in enumerate(wanted):
        got, averages, squares = (torch.cat([t.double() for t in tensors[b]]) for tensors in (case.x, case.d, case.v))
        assert ((got - y).abs() <= close).all() if moves else torch.equal(got, x)
        assert slope == "gradient" or ((averages - new).abs() <= 4 * case.eps * (new.abs() + g.abs())).all()
        assert slope != "adam" or ((squares - v).abs() <= 4 * case.eps * v).all()
        if moves and name in ("L1", "ElasticNet"):
            assert (got[y == 0] == 0).double().mean() > 0.99  # all but those next to the kink
        if moves and psi.bounded:
            bounds = (
                torch.tensor([psi.lower, psi.upper], dtype=torch.float64).to(dtype).double()
            )  # as clamp rounds them
            assert (got >= bounds[0]).all()
            assert (got <= bounds[1]).all()
            assert ((got == bounds[0]) | (got == bounds[1])).any()
    torch.testing.assert_close(case.x[2][0].double(), 0.5 * line - 0.1 * r * d, rtol=1e-6, atol=1e-6)


@of_both_dtypes
def test_all_constants_at_once(dtype):
    """l1, l2 and bounds together are none of the regularisers: against the prox written out."""
    l1, l2, lower, upper, alpha, u = 0.3, 0.5, -0.25, 0.5, 0.8, 0.7
    case = Case([[20_003]], dtype, psi=[Scalar(l1, l2, lower, upper)])
    (x, _, d, *_), _ = case.block(0)
    z = x - u * alpha * d
    soft = z.sign() * (z.abs() - alpha * l1).clamp(min=0) / (1 + alpha * l2)
    y, inside = soft.clamp(lower, upper), (z.abs() > alpha * l1) & (soft > lower) & (soft < upper)
    wanted = [(d * (y - x)).sum(), -alpha / (1 + alpha * l2) * d[inside].square().sum()]
    (h,), (slope,) = case.part().heights([alpha], [u])
    rtol = 1e-4 if dtype is torch.float32 else 1e-11
    np.testing.assert_allclose([h, slope], wanted, rtol=rtol)
    case.part().write([1.0], [0.0], [alpha], u, True)
    torch.testing.assert_close(case.x[0][0].double(), y, rtol=1e-6, atol=1e-6)


@of_all_slopes
def test_the_special_kinds_of_prox_agree_with_the_general_one(slope):
    case = Case([[63], [1_025], [40_001]], torch.float64, slope, [FUNCTIONS[name][1] for name in ("L1", "Box", "Zero")])
    part, general = case.part(), case.part()
    assert not (part._kinds == GENERAL).any()
    general._kinds[:] = GENERAL
    alpha = [0.4, 0.9, 1.6]
    np.testing.assert_allclose(part.heights(alpha, POINTS), general.heights(alpha, POINTS), rtol=1e-12, atol=1e-10)


@of_all_slopes
@pytest.mark.parametrize("name", ["L1", "Box", "L2"])  # one of each kind
def test_any_number_of_points_gives_the_same_numbers(name, slope):
    case, alpha = Case(SIZES["odd"], torch.float64, slope, [FUNCTIONS[name][1]] * 4), [0.7] * 4
    for count in (1, 2, 3, 4, 7):
        u = np.linspace(0.1, 1, count).tolist()
        together = case.part().heights(alpha, u)
        apart = [case.part().heights(alpha, [one]) for one in u]
        np.testing.assert_allclose(together, np.concatenate(apart, axis=1), rtol=1e-12)


# -- arithmetic at its limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["L1", "ElasticNet", "Box", "Zero"])
def test_heights_keep_their_digits_where_the_step_is_tiny(name):
    """y then agrees with x in all but a few digits of f32, and y - x taken literally has none that are right."""
    phi, psi = FUNCTIONS[name]
    case, alpha = Case([[5_000]], torch.float32, psi=[psi]), 1e-7
    x, d = case.x[0][0].uniform_(0.5, 0.6), case.g[0][0].uniform_(1, 2)
    want = (d.double() * (phi.prox(x.double() - alpha * d.double(), alpha) - x.double())).sum().item()
    literal = (d * (phi.prox(x - alpha * d, alpha) - x)).sum().item()
    assert abs(case.part().heights([alpha], [1.0]).h[0] - want) < 1e-5 * abs(want)
    assert abs(literal - want) > 1e-3 * abs(want)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e15), (torch.float64, 1e100)])
@pytest.mark.parametrize("power", [1, -1])
def test_huge_and_tiny_entries(dtype, size, power):
    """Scaling x, d and the constants scales h, up to where squares leave the range of the type."""
    scale, numbers = size**power, []
    for factor, kind in ((1.0, torch.float64), (scale, dtype)):
        case = Case([[5_003]], kind, psi=[Scalar(l1=0.3 * factor, l2=0.2)], scale=factor)
        sums, heights = case.part().sums([0.7], [0.3, 0.9])
        numbers.append(np.array([sums[0][0], sums[1][0], *heights.h, *heights.slope]) / factor / factor)
    np.testing.assert_allclose(
        *numbers, rtol=2e-3 if dtype is torch.float32 else 1e-10
    )  # entries next to the kink, in f32


@of_both_dtypes
@of_all_slopes
def test_entries_that_are_not_finite_show_in_the_sums_of_their_block(slope, dtype):
    for name, bad, psi in itertools.product(
        "xg", (math.nan, math.inf, -math.inf), (None, Scalar(l1=0.3), Scalar(l2=0.1))
    ):
        case = Case([[7], [20_003, 5], [9]], dtype, slope, [psi] * 3)
        getattr(case, name)[1][0][11_111] = bad
        d_sq, d_dot_x, *_ = case.part().sums([0.5] * 3, ())[0]
        assert np.isfinite([d_sq[0], d_sq[2], d_dot_x[0], d_dot_x[2]]).all()
        assert not np.isfinite([d_sq[1], d_dot_x[1]]).all()


def test_in_adams_metric_squares_may_leave_single_precision_but_not_those_of_entries():
    case = Case(SIZES["odd"], torch.float32, "adam")
    for g in itertools.chain(*case.g):
        g *= 1e18
    wanted = [(d * r * d).sum().item() for (_, _, d, _, r), _ in map(case.block, range(4))]
    np.testing.assert_allclose(case.part().sums([1.0] * 4, ())[0][0], wanted, rtol=1e-4)
    case.g[3][2][39_999] = 1e20  # 1 / sqrt(v) is 0 then, and the sums alone would be finite
    d_sq = case.part().sums([1.0] * 4, ())[0][0]
    assert np.isfinite(d_sq[:3]).all()
    assert math.isnan(d_sq[3])


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_entries_that_never_had_a_gradient_do_not_move_in_a_metric_without_eps(eps):
    case = Case([[2_000]], torch.float32, "adam", [Scalar(l1=0.0, l2=0.1)])
    case.metric_eps = eps
    for t in (case.g, case.d, case.v):
        t[0][0][::2] = 0
    before = case.x[0][0].clone()
    assert np.isfinite(case.part().sums([1.0], [0.5, 1.0])[0]).all()
    case.psi = [None]
    case.part().write([1.0], [-0.1], [1.0], 1.0, True)
    moved = case.x[0][0] != before
    assert not moved[::2].any()
    assert moved[1::2].all()


# -- blocks, memory, samples, threads ------------------------------------------------------------------------------


@of_all_slopes
def test_channels_last_tensors_are_walked_in_their_own_order(slope):
    numbers, points = [], []
    for form in (torch.contiguous_format, torch.channels_last):
        case = Case([[360]], torch.float64, slope, [Scalar(l1=0.3)])
        for tensors in (case.x, case.g, case.d, case.v):
            tensors[0][0] = tensors[0][0].view(6, 5, 4, 3).clone(memory_format=form)
        part = case.part()
        numbers.append(np.concatenate([*part.sums([0.5], POINTS)[0], *part.heights([0.5], POINTS)]))
        part.write([1.0], [0.0], [0.5], 0.5, True)
        points.append(case.x[0][0])
        assert points[-1].is_contiguous(memory_format=form)
    np.testing.assert_allclose(*numbers, rtol=1e-12, atol=1e-12)  # in another order
    assert torch.equal(*points)


@of_all_slopes
def test_a_sample_estimates_the_sums_of_whole_blocks(slope):
    sizes = [16, 400, 9_000, 300_000, 1_000_000]
    for psi in (FUNCTIONS["L1"][1], None):
        case = Case([[n] for n in sizes], torch.float32, slope, [psi] * 5, start=True)
        before, part = case.state(), case.part()
        whole, taken = np.array(part.sums([0.5] * 5, ())[0]), np.array(part.sampled_sums(16))
        assert np.array_equal(whole[:5, 0], taken[:5, 0])  # too small to be sampled
        spread = 24 / np.sqrt(np.array(sizes) / 16 + 256)
        for row in (0, 2) if psi else (0,):
            assert (np.abs(taken[row] / whole[row] - 1)[1:] < spread[1:]).all()
        if psi:
            whole, taken = ([*part.heights([0.5] * 5, POINTS, n), part.ray([0.5] * 5, [0.2, 1.0], n)] for n in (1, 16))
            for one, other in zip(whole, taken, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=0.02 * np.abs(one).max())
        assert all(map(torch.equal, case.state(), before))


def test_a_sample_of_a_constant_is_exact():
    case = Case([[123_457]], torch.float64, psi=[Scalar(l1=0.3)])
    case.x[0][0].fill_(0.5), case.g[0][0].fill_(0.25)
    part = case.part()
    np.testing.assert_allclose(part.heights([0.5], POINTS, 16), part.heights([0.5], POINTS), rtol=1e-13)


@of_both_dtypes
@of_all_slopes
def test_neither_threads_nor_the_way_of_a_pass_change_a_bit(monkeypatch, slope, dtype):
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)  # threads take part from few entries on
    before, results = torch.get_num_threads(), []
    try:
        for threads, backwards in ((1, False), (1, True), (2, True), (3, None)):
            torch.set_num_threads(threads)
            case = Case(
                [[300_001, 11], [70_000], [40_000]], dtype, slope, [None, Scalar(l1=0.3), Scalar(lower=-0.4)], True
            )
            part, alpha = case.part(), [0.4, 0.9, 1.2]
            if backwards is not None:
                part._turns = itertools.repeat(backwards)
            numbers = [*part.sums(alpha, POINTS[:3]), part.heights(alpha, POINTS), part.heights(alpha, POINTS, 4)]
            numbers += [part.ray(alpha, [0.1, 0.5]), part.sampled_sums(16)]
            part.write([0.9] * 3, [-0.1] * 3, alpha, 0.5, True)
            results.append((numbers, case.state()))
    finally:
        torch.set_num_threads(before)
    for numbers, state in results[1:]:
        assert numbers == results[0][0]
        assert all(map(torch.equal, state, results[0][1]))
