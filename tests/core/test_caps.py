"""The matched cap: the first zero of H by dense sampling and by breakpoints, and x+ against a conic solver.

The proximal cap in a diagonal metric is held against the same solver.
"""

from functools import partial

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from proxsps.core import caps
from proxsps.core.caps import Ray, find_matched, l2_matched, l2_ray_heights, polyak_ray, shares
from proxsps.core.dual import eager_loop, fixed_loop, height_off, search_dual, shared_loop
from proxsps.core.model import (
    RowSums,
    entry_heights,
    entry_ray_heights,
    prox_ray_heights,
    row_ray_heights,
)
from proxsps.core.rounds import refine_zero
from proxsps.core.step import l2_line, line_dual, prox_coefficients
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso, L2Ball, NonNegative, Zero
from proxsps.regularizers.structure import Scalar

EPS = float(np.finfo(np.float64).eps)
SCALARS = {
    "l1": Scalar(l1=0.3),
    "strong l1": Scalar(l1=1.0),
    "elastic net": Scalar(0.3, 0.4),
    "box": Scalar(lower=-0.5, upper=0.7),
    "all": Scalar(0.1, 0.2, -0.5, 0.7),
}


def search(gap, points=3, loop=eager_loop, slopes=True):
    """A search for `find_matched`, to the last digits."""
    gap = np.abs(np.float64(gap)) if isinstance(gap, float) else gap
    return lambda evaluate: search_dual(
        evaluate, gap, 1e-13 * gap, 1e-15, 200, loop, 1e-15, (1.0,), points, slopes, height_off, gap
    )


def draw(seed, n=12, psi=None):
    """A point, which has zeros, a slope, a metric, a gap and the longest step."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * (rng.random(n) < 0.7)
    d = rng.standard_normal(n)
    if seed % 2:  # pulled against the regulariser, where H is not monotone
        d = -0.9 * np.sign(x) * rng.random(n) + 0.1 * d
    if psi is not None and psi.bounded:
        x = np.clip(x, psi.lower, psi.upper)
    metric = 10 ** rng.uniform(-1, 1, n)
    return x, d, metric, np.float64(10 ** rng.uniform(-2, 1)), np.float64(10 ** rng.uniform(-1, 3))


def dense(longest):
    """Points all over (0, longest], evenly and on a logarithmic scale."""
    return np.unique(np.concatenate([np.linspace(0, longest, 2001)[1:], np.geomspace(longest * 1e-8, longest, 2001)]))


# -- one block with the squared l2 norm -------------------------------------------------------------------------------

ONE = {  # gap, lam, <d, x> and the longest step
    "no gap": (-0.1, 0.5, 1.0, 3.0),
    "inside": (0.5, 0.5, 1.0, 3.0),
    "capped": (0.5, 0.5, 1.0, 0.01),
    "never": (0.5, 2.0, -2.0, 3.0),  # decay pulls against the slope, and H rises
    "no decay": (0.5, 0.0, 1.0, 3.0),
}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("diagonal", [False, True])
def test_one_block_is_the_first_zero_of_h(name, diagonal):
    gap, lam, d_dot_x, longest = ONE[name]
    rng = np.random.default_rng(0)
    metric = rng.uniform(0.5, 2, 4) if diagonal else np.ones(4)
    d = rng.standard_normal(4)
    x = d * d_dot_x / (d @ d) + np.cross(np.append(d[:2], 0), [0, 0, 1])[[0, 1, 2, 2]]  # the second is orthogonal to d

    def plus(s):
        return (x - s * d / metric) / (1 + s * lam)

    def height(s):
        return gap + d @ (plus(s) - x)

    block = (np.array([part]) for part in (d @ (d / metric), d @ x, 1.0, lam))
    found = l2_matched(np.float64(gap), *block, np.float64(longest), eager_loop)
    zero = brentq(height, 0, longest, xtol=1e-15) if gap > 0 > height(longest) else longest if gap > 0 else 0.0
    assert found.s == pytest.approx(zero, rel=1e-12)
    assert found.height == pytest.approx(height(found.s), abs=1e-13)
    inside = name in ("inside", "no decay")
    assert (0 < found.s < longest) == inside
    if inside:
        assert height(found.s) == pytest.approx(0, abs=1e-14)
    # The coefficients of the proximal step make the new point.
    keep, move, _ = prox_coefficients(1.0, found.s, lam)
    np.testing.assert_allclose(keep * x + move * d / metric, plus(found.s), rtol=1e-14)


def test_a_slope_of_zero_gives_the_prox_with_the_longest_step_or_nothing():
    zero, one = np.zeros(1), np.ones(1)
    for lam in (zero, one):
        assert l2_matched(np.float64(1.0), zero, zero, one, lam, np.float64(7.0), eager_loop).s == 7
        assert l2_matched(np.float64(-1.0), zero, zero, one, lam, np.float64(7.0), eager_loop).s == 0
    assert l2_matched(np.float64(1.0), np.full(1, 1e-300), zero, one, zero, np.float64(7.0), eager_loop).s == 7


def test_without_regulariser_it_is_the_polyak_step():
    block = (np.array([part]) for part in (4.0, 0.3, 1.0, 0.0))
    assert l2_matched(np.float64(2.0), *block, np.float64(7.0), eager_loop).s == 0.5


def test_a_block_that_rests_or_all_of_them():
    block = (np.array([part]) for part in (4.0, 0.3, 0.0, 0.1))
    assert l2_matched(np.float64(2.0), *block, np.float64(7.0), eager_loop).height == 2
    largest, share = shares(np.array([[0.5, 2.0, 0.0], [0.0, 0.0, 0.0]]))
    np.testing.assert_array_equal(largest, [2, 0])
    np.testing.assert_array_equal(share, [[0.25, 1, 0], [0, 0, 0]])


# -- several blocks ---------------------------------------------------------------------------------------------------


def several(seed, blocks=None):
    rng = np.random.default_rng(seed)
    b = blocks or int(rng.integers(2, 6))
    d_sq = 10 ** rng.uniform(-3, 2, b)
    d_dot_x = rng.standard_normal(b) * 10 ** rng.uniform(-2, 2)
    lam = 10 ** rng.uniform(-4, 1, b) * (rng.random(b) < 0.8)
    share = np.append(rng.random(b - 1), 1.0)
    return np.float64(10 ** rng.uniform(-2, 2)), d_sq, d_dot_x, share, lam, np.float64(10 ** rng.uniform(-2, 6))


def check_first_zero(gap, d_sq, d_dot_x, share, lam, longest):
    """The branch that was found."""
    found = l2_matched(gap, d_sq, d_dot_x, share, lam, longest, eager_loop)
    K = d_sq + lam * d_dot_x

    def height(s):
        tau = np.asarray(s)[..., None] * share
        return gap - (K * tau / (1 + tau * lam)).sum(-1)

    tau = found.s * share
    size = gap + np.abs(K * tau / (1 + tau * lam)).sum()
    assert found.height == pytest.approx(height(found.s), abs=1e-14 * size)
    before = dense(longest)
    before = before[before < found.s * (1 - 1e-12)]
    assert (height(before) > -1e-14 * size).all()
    if found.s < longest:
        assert abs(found.height) <= 1e-14 * size
        return "risen" if (K < 0).any() else "falling"
    assert found.height >= -1e-14 * size
    return "capped"


def test_several_blocks_stop_at_the_first_zero():
    branches = [check_first_zero(*several(seed)) for seed in range(400)]
    assert {branches.count(name) > 20 for name in ("risen", "falling", "capped")} == {True}


def test_of_two_zeros_the_first_is_taken():
    """H falls through zero, and a block whose decay pulls against the slope lifts it above zero again."""
    gap, d_sq, d_dot_x = np.float64(1.0), np.array([1.0, 0.1]), np.array([3.0, -3.0])
    lam, share = np.array([10.0, 1.0]), np.ones(2)
    longest = np.float64(100.0)
    K = d_sq + lam * d_dot_x
    assert K[0] > 0 > K[1]
    points = dense(longest)
    below = gap + l2_ray_heights(d_sq, d_dot_x, share, lam, points)[0] < 0
    assert below.any()
    assert not below[-1]  # there are two zeros
    found = l2_matched(gap, d_sq, d_dot_x, share, lam, longest, eager_loop)
    assert found.s <= points[below].min()
    assert found.height == pytest.approx(0, abs=1e-15)
    assert check_first_zero(gap, d_sq, d_dot_x, share, lam, longest) == "risen"


@given(seed=st.integers(0, 9999))
def test_splitting_a_block_changes_nothing(seed):
    gap, d_sq, d_dot_x, _, lam, longest = several(seed)
    lam = np.full_like(d_sq, lam[0])
    one = l2_matched(gap, d_sq.sum(keepdims=True), d_dot_x.sum(keepdims=True), np.ones(1), lam[:1], longest, eager_loop)
    many = l2_matched(gap, d_sq, d_dot_x, np.ones_like(d_sq), lam, longest, eager_loop)
    size = 1 + np.abs(lam * d_dot_x).sum() / abs((d_sq + lam * d_dot_x).sum() - lam[0] * gap)
    assert many.s == pytest.approx(one.s, rel=1e-12 * size)


def test_heights_of_squares_and_their_slopes():
    _, d_sq, d_dot_x, share, lam, _ = several(3)
    s = np.array([0.0, 0.1, 2.0, 30.0])
    h, slope = l2_ray_heights(d_sq, d_dot_x, share, lam, s)
    tau = s[:, None] * share
    np.testing.assert_allclose(h, -((d_sq + lam * d_dot_x) * tau / (1 + tau * lam)).sum(-1), rtol=1e-13)
    up, down = (l2_ray_heights(d_sq, d_dot_x, share, lam, s + e)[0] for e in (1e-6, -1e-6))
    np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-4)


MUTANTS = {
    "gradients alone": lambda gap, d_sq, d_dot_x, share, lam, longest: (gap, d_sq, 0 * d_dot_x, share, lam, longest),
    "no shares": lambda gap, d_sq, d_dot_x, share, lam, longest: (gap, d_sq, d_dot_x, 1 + 0 * share, lam, longest),
    "half the decay": lambda gap, d_sq, d_dot_x, share, lam, longest: (gap, d_sq, d_dot_x, share, lam / 2, longest),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_is_seen(monkeypatch, name):
    original = l2_matched
    monkeypatch.setitem(globals(), "l2_matched", lambda *args: original(*MUTANTS[name](*args[:-1]), args[-1]))
    with pytest.raises(AssertionError):
        [check_first_zero(*several(seed)) for seed in range(30)]


def test_lines_on_the_wrong_side_are_seen(monkeypatch):
    """With fewer intervals the bracket closes later and is as right; with the signs of the terms mixed up it is not."""
    with monkeypatch.context() as patch:
        patch.setattr(caps, "INTERVALS", 1)
        [check_first_zero(*several(seed)) for seed in range(100)]
    joined = caps._joined
    monkeypatch.setattr(caps, "_joined", lambda decay, push: (joined(decay, push)[0], abs(joined(decay, push)[1])))
    with pytest.raises(AssertionError):
        [check_first_zero(*several(seed)) for seed in range(100)]


def test_runs_of_several_blocks_are_independent():
    instances = [several(seed, blocks=2) for seed in range(40)]
    stacked = [np.stack(part) for part in zip(*instances, strict=True)]
    together = l2_matched(*stacked, shared_loop)
    fixed = l2_matched(*stacked, fixed_loop(8))
    for i, instance in enumerate(instances):
        alone = l2_matched(*instance, eager_loop)
        assert together.s[i] == pytest.approx(alone.s, rel=1e-14)
        assert fixed.s[i] == pytest.approx(alone.s, rel=1e-12)


def test_every_array_library_gives_the_same_steps():
    traced = jax.jit(lambda *args: l2_matched(*args, jax.lax.while_loop).s)
    for seed in range(20):
        args = several(seed, blocks=3)
        expected = l2_matched(*args, eager_loop)
        found = l2_matched(*(torch.as_tensor(part) for part in args), fixed_loop(8))
        assert float(found.s) == pytest.approx(float(expected.s), rel=1e-12)
        with jax.enable_x64(True):
            assert float(traced(*map(jnp.asarray, args))) == pytest.approx(float(expected.s), rel=1e-12)


# -- entries ----------------------------------------------------------------------------------------------------------


def l1_zeros(x, e, d, t, gap, longest):
    """The first zero of gap + <d, soft(x - s e, s t) - x> on (0, longest], by its breakpoints; None if there is none.

    An entry reaches 0 at x/(e + t sign(x)) and leaves it again at x/(e - t sign(x)); in between H is a line.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = np.concatenate([x / (e + t * np.sign(x)), x / (e - t * np.sign(x))])
    cuts = np.unique(np.append(cuts[np.isfinite(cuts) & (cuts > 0) & (cuts < longest)], [0.0, longest]))

    def height(s):
        z = x - s * e
        return gap + d @ (np.sign(z) * np.maximum(np.abs(z) - s * t, 0) - x)

    heights = [height(s) for s in cuts]
    for a, b, left, right in zip(cuts, cuts[1:], heights, heights[1:], strict=False):
        if right <= 0:
            return a + (b - a) * left / (left - right)
    return None


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("l1", [0.05, 0.3, 1.0])
def test_l1_stops_at_its_first_zero_by_breakpoints(l1, diagonal):
    seen = set()
    for seed in range(60):
        x, d, metric, gap, longest = draw(seed)
        metric = metric if diagonal else None
        D = np.ones_like(x) if metric is None else metric
        heights = partial(entry_ray_heights, x, d, Scalar(l1=l1), 1.0, metric=metric)
        found = find_matched(heights, gap, np.sum(d * d / D), longest, search(gap))
        first = l1_zeros(x, d / D, d, l1 / D, gap, longest)
        if gap + heights(longest[None])[0][0] > 0:
            assert found.s == longest  # one evaluation, even if H was below zero on the way
            assert found.evaluations == 1
            seen.add("capped")
            continue
        assert abs(found.height) <= 1e-12 * (gap + np.abs(d * x).sum())
        assert found.s == pytest.approx(first, rel=1e-9)
        seen.add("inside")
    assert seen == {"capped", "inside"}


def test_one_missed_breakpoint_is_a_wrong_height():
    """What the sum over entries is for: without the second breakpoints, entries that reach 0 would stay there."""
    x, d, _, _, _ = draw(2)
    s = np.array([50.0])
    right = entry_ray_heights(x, d, Scalar(l1=0.3), 1.0, s)[0]
    stays = d @ (np.where(np.sign(x - s * d) == np.sign(x), x - s * d, 0) - x)
    assert abs(right - stays) > 1


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", SCALARS)
def test_entries_by_their_prox_and_by_differences(name, diagonal):
    psi = SCALARS[name]
    x, d, metric, *_ = draw(4, psi=psi)
    metric = metric if diagonal else None
    share, s = 0.7, np.array([0.0, 0.01, 0.3, 2.0, 40.0])
    h, slope = entry_ray_heights(x, d, psi, share, s, metric)
    for i, point in enumerate(s):
        tau = share * point / (np.ones_like(x) if metric is None else metric)
        z = x - tau * d
        y = np.sign(z) * np.maximum(np.abs(z) - tau * psi.l1, 0) / (1 + tau * psi.l2)
        y = np.clip(y, psi.lower, psi.upper)
        assert h[i] == pytest.approx(d @ (y - x), rel=1e-12, abs=1e-14)
    up, down = (entry_ray_heights(x, d, psi, share, s[1:] * e, metric)[0] for e in (1 + 1e-7, 1 - 1e-7))
    np.testing.assert_allclose(slope[1:], (up - down) / (2e-7 * s[1:]), rtol=1e-5, atol=1e-6)
    assert np.isnan(slope[0])


@pytest.mark.parametrize("slopes", [True, False])
@pytest.mark.parametrize("name", SCALARS)
def test_entries_stop_where_the_model_meets_its_bound(name, slopes):
    """No earlier zero by dense sampling, except where H(longest) > 0 was accepted at once."""
    psi, inside = SCALARS[name], 0
    for seed in range(40):
        x, d, metric, gap, longest = draw(seed, psi=psi)
        heights = partial(entry_ray_heights, x, d, psi, 1.0, metric=metric)
        evaluate = heights if slopes else lambda s, heights=heights: (heights(s)[0], s * np.nan)
        found = find_matched(evaluate, gap, np.sum(d * d / metric), longest, search(gap, slopes=slopes))
        points = dense(longest)
        values = gap + heights(points)[0]
        if values[-1] > 0:
            assert found.s == longest
            continue
        inside += 1
        assert abs(gap + heights(found.s[None])[0][0]) <= 1e-11 * gap
        assert (values[points < found.s * (1 - 1e-9)] > -1e-9 * gap).all()
    assert inside > 10


def test_nothing_is_searched_where_there_is_no_gap():
    x, d, *_ = draw(0)
    found = find_matched(
        partial(entry_ray_heights, x, d, SCALARS["l1"], 1.0), np.float64(-0.5), d @ d, np.float64(3.0), search(0.1)
    )
    assert (found.s, found.height, found.evaluations) == (0, -0.5, 1)


def test_a_function_that_rises_first():
    """All entries are pulled against their slopes: H rises from the gap, and the longest step is taken at once."""
    x, gap = np.array([2.0, -1.0, 3.0]), np.float64(0.3)
    d = -0.5 * np.sign(x)
    heights = partial(entry_ray_heights, x, d, Scalar(l1=1.0), 1.0)
    points = dense(100.0)
    assert (heights(points)[0] > 0).all()
    found = find_matched(heights, gap, d @ d, np.float64(100.0), search(gap))
    assert (found.s, found.evaluations) == (100, 1)
    assert found.height > gap


# -- rows and any prox ------------------------------------------------------------------------------------------------


def row_sums(x, d):
    return RowSums(*(np.sum(a * b, axis=-1) for a, b in ((x, x), (d, x), (d, d))))


@pytest.mark.parametrize("phi", [GroupLasso.rows(0.9), GroupLasso.rows(0.3, scale_by_size=True), GroupLasso(2.0)])
def test_rows_are_the_prox_of_whole_tensors(phi):
    x, d = np.random.default_rng(1).standard_normal((2, 5, 7))
    x[2] = 0
    matrix = (1, 35) if phi.dims is None else (5, 7)
    rows, psi = row_sums(x.reshape(matrix), d.reshape(matrix)), phi.structure(x.shape).psi
    s = np.array([0.02, 0.4, 3.0, 20.0])
    h, slope = row_ray_heights(rows, psi, 0.6, s)
    expected, expected_slope = prox_ray_heights(x, d, phi.prox, phi.prox_jvp, 0.6, s)
    np.testing.assert_allclose(h, expected, rtol=1e-11)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-9, atol=1e-10)
    up, down = (row_ray_heights(rows, psi, 0.6, s * e)[0] for e in (1 + 1e-6, 1 - 1e-6))
    np.testing.assert_allclose(slope, (up - down) / (2e-6 * s), rtol=1e-4, atol=1e-6)


def test_rows_with_shares_and_constants_of_their_own_and_runs():
    rng = np.random.default_rng(3)
    x, d = rng.standard_normal((2, 2, 4, 6))  # runs, rows, entries
    share, l1, s = rng.random((2, 4)), rng.random(4), np.array([[0.1, 2.0], [0.3, 1.0]])
    h, slope = row_ray_heights(row_sums(x, d), Scalar(l1=l1), share, s)
    for run in range(2):
        parts = [
            prox_ray_heights(
                x[run, g], d[run, g], GroupLasso(l1[g]).prox, GroupLasso(l1[g]).prox_jvp, share[run, g], s[run]
            )
            for g in range(4)
        ]
        np.testing.assert_allclose(h[run], sum(part[0] for part in parts), rtol=1e-12)
        np.testing.assert_allclose(slope[run], sum(part[1] for part in parts), rtol=1e-10)


PROXES = {
    "ball": L2Ball(1.5),
    "group lasso": GroupLasso.rows(0.4),
    "elastic net": ElasticNet(0.2, 0.3),
    "box": Box(-1, 1),
}


@pytest.mark.parametrize("name", PROXES)
def test_the_derivative_along_the_ray_holds_for_any_prox(name):
    x, d = 0.3 * np.random.default_rng(2).standard_normal((2, 4, 5))
    phi, s = PROXES[name], np.array([0.1, 1.3, 9.0])
    slope = prox_ray_heights(x, d, phi.prox, phi.prox_jvp, 0.8, s)[1]
    up, down = (prox_ray_heights(x, d, phi.prox, None, 0.8, s * e)[0] for e in (1 + 1e-6, 1 - 1e-6))
    np.testing.assert_allclose(slope, (up - down) / (2e-6 * s), rtol=1e-4, atol=1e-7)
    assert np.isnan(prox_ray_heights(x, d, phi.prox, None, 0.8, s)[1]).all()


# -- against a conic solver -------------------------------------------------------------------------------------------

SOLVER = {"solver": cp.CLARABEL, "tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}
PHIS = {  # what it is in the solver: (its value, its constraints) at a matrix y
    "none": (Zero(), lambda y: (0, [])),
    "l2": (L2(0.7), lambda y: (0.35 * cp.sum_squares(y), [])),
    "l1": (L1(0.4), lambda y: (0.4 * cp.norm1(y), [])),
    "elastic net": (ElasticNet(0.3, 0.5), lambda y: (0.3 * cp.norm1(y) + 0.25 * cp.sum_squares(y), [])),
    "box": (Box(-0.6, 0.8), lambda y: (0, [y >= -0.6, y <= 0.8])),
    "non-negative": (NonNegative(), lambda y: (0, [y >= 0])),
    "group lasso": (GroupLasso.rows(0.6), lambda y: (0.6 * cp.sum(cp.norm(y, 2, axis=1)), [])),
}
MIXED = (("l1", 1.0), ("group lasso", 0.3), ("l2", 0.6))


def tensors(seed, phi):
    rng = np.random.default_rng(seed)
    x, d = rng.standard_normal((2, 4, 3))
    return phi.prox(x, 1e-3), d, 10 ** rng.uniform(-0.7, 0.7, x.shape)


def objective(blocks, m, C, ys, steps):
    """The truncated model plus regularisers plus proximity in the metric."""
    linear = m + sum(np.sum(d * (y - x)) for (_, x, d, _), y in zip(blocks, ys, strict=True))
    rest = sum(
        float(phi.value(y)) + np.sum(metric * (y - x) ** 2) / (2 * step)
        for (phi, x, _, metric), y, step in zip(blocks, ys, steps, strict=True)
    )
    return max(linear, C) + rest


def solved(names, blocks, m, C, steps):
    """The minimum, by a conic solver."""
    linear, rest, constraints = m, 0, []
    for name, (_, x, d, metric), step in zip(names, blocks, steps, strict=True):
        y = cp.Variable(x.shape)
        value, own = PHIS[name][1](y)
        linear = linear + cp.sum(cp.multiply(d, y - x))
        rest = rest + value + cp.sum_squares(cp.multiply(np.sqrt(metric / (2 * step)), y - x))
        constraints += own
    problem = cp.Problem(cp.Minimize(cp.maximum(linear, C) + rest), constraints)
    return problem.solve(**SOLVER)


def plus(block, step, tau):
    phi, x, d, metric = block
    return phi.prox_diagonal(x - tau * d / metric, step / metric)


def blocks_of(names, diagonal, seed):
    blocks = []
    for i, name in enumerate(names):
        phi = PHIS[name][0]
        x, d, metric = tensors(seed + i, phi)
        blocks.append((phi, x, d, metric if diagonal else np.ones_like(x)))
    return blocks


def ray_heights(blocks, shares):
    def heights(s):
        parts = [
            prox_ray_heights(x, d, phi.prox_diagonal, None, share, s, metric)
            for (phi, x, d, metric), share in zip(blocks, shares, strict=True)
        ]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    return heights


def check_matched(names, shares, diagonal, gap, longest, seed):
    """x+ has the model's least value, and the model meets C there if the cap is inside; s."""
    blocks = blocks_of(names, diagonal, seed)
    heights, C = ray_heights(blocks, shares), 0.4
    d_sq = sum(w * np.sum(d * d / metric) for w, (_, _, d, metric) in zip(shares, blocks, strict=True))
    gap, longest = np.float64(gap), np.float64(longest)
    found = find_matched(heights, gap, d_sq, longest, search(gap, slopes=False))
    steps = [found.s * w for w in shares]
    ys = [plus(block, tau, tau) for block, tau in zip(blocks, steps, strict=True)]
    value = objective(blocks, gap + C, C, ys, steps)
    least = solved(names, blocks, gap + C, C, steps)
    assert value <= least + 1e-8 * (1 + abs(least))
    linear = gap + sum(np.sum(d * (y - x)) for (_, x, d, _), y in zip(blocks, ys, strict=True))
    assert linear >= -1e-11 * gap
    if found.s < longest:
        assert linear == pytest.approx(0, abs=1e-11 * gap)
        points = dense(found.s * (1 - 1e-9))
        assert (gap + heights(points[::40])[0] > -1e-9 * gap).all()
    return found.s / longest


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # the comparison decides
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", PHIS)
def test_matched_steps_minimise_the_model(name, diagonal):
    parts = {check_matched([name], [1.0], diagonal, 0.6, longest, 5) < 1 for longest in (0.02, 50.0)}
    assert parts == ({True, False} if name != "box" or diagonal else parts)


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("diagonal", [False, True])
def test_matched_steps_of_mixed_groups_minimise_the_model(diagonal):
    names, share = zip(*MIXED, strict=True)
    assert check_matched(names, share, diagonal, 1.5, 0.01, 7) == 1
    assert check_matched(names, share, diagonal, 1.5, 30.0, 7) < 1


def check_proximal(names, alphas, diagonal, gap, seed):
    """The paper's step in the metric, from heights of entries or of proxes; u."""
    blocks, C, gap = blocks_of(names, diagonal, seed), 0.4, np.float64(gap)

    def evaluate(u):
        height, slope = gap + 0 * u, 0 * u
        for (phi, x, d, metric), alpha in zip(blocks, alphas, strict=True):
            psi = getattr(phi.structure(x.shape), "psi", None)
            if isinstance(psi, Scalar) and phi.separable:
                own, bend = entry_heights(x.ravel(), d.ravel(), psi, alpha, u, metric.ravel())
            else:
                ys = [phi.prox_diagonal(x - v * alpha * d / metric, alpha / metric) for v in u]
                own, bend = np.array([np.sum(d * (y - x)) for y in ys]), u * np.nan
            height, slope = height + own, slope + bend
        return height, slope

    u = search_dual(evaluate, gap, 1e-13 * gap, 1e-15, 200, eager_loop, 1e-15).u
    ys = [plus(block, alpha, u * alpha) for block, alpha in zip(blocks, alphas, strict=True)]
    value, least = objective(blocks, gap + C, C, ys, alphas), solved(names, blocks, gap + C, C, alphas)
    assert value <= least + 1e-8 * (1 + abs(least))
    return float(u)


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
@pytest.mark.parametrize("name", PHIS)
def test_proximal_steps_in_a_metric_minimise_the_model(name):
    assert check_proximal([name], [0.02], True, 0.6, 5) == 1
    assert check_proximal([name], [2.0], True, 0.6, 5) < 1


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_proximal_steps_of_mixed_groups_in_a_metric_minimise_the_model():
    names = [name for name, _ in MIXED]
    assert 0 < check_proximal(names, [1.0, 0.3, 0.6], True, 6.0, 7) < 1


@pytest.mark.parametrize("name", SCALARS)
def test_entries_in_a_metric_by_their_prox_and_by_differences(name):
    psi = SCALARS[name]
    x, d, metric, *_ = draw(4, psi=psi)
    alpha, u = 0.8, np.array([0.0, 0.2, 0.6, 1.0])
    h, slope = entry_heights(x, d, psi, alpha, u, metric)
    for i, point in enumerate(u):
        z, t = x - point * alpha * d / metric, alpha / metric
        y = np.clip(np.sign(z) * np.maximum(np.abs(z) - t * psi.l1, 0) / (1 + t * psi.l2), psi.lower, psi.upper)
        assert h[i] == pytest.approx(d @ (y - x), rel=1e-12, abs=1e-14)
    up, down = (entry_heights(x, d, psi, alpha, u + e, metric)[0] for e in (1e-7, -1e-7))
    np.testing.assert_allclose(slope[1:], ((up - down) / 2e-7)[1:], rtol=1e-5, atol=1e-6)
    unit = entry_heights(x, d, psi, alpha, u, np.ones_like(x))
    np.testing.assert_array_equal(unit, entry_heights(x, d, psi, alpha, u))


def test_entries_in_a_metric_have_runs():
    psi, alpha = SCALARS["elastic net"], np.array([0.3, 2.0])
    (x, d), metric = (
        np.random.default_rng(0).standard_normal((2, 2, 6)),
        np.random.default_rng(1).uniform(0.2, 3, (2, 6)),
    )
    u = np.array([[0.1, 0.7], [0.4, 1.0]])
    both = entry_heights(x, d, psi, alpha, u, metric)
    rays = entry_ray_heights(x, d, psi, alpha, u, metric)
    for i in range(2):
        np.testing.assert_allclose(
            [part[i] for part in both], entry_heights(x[i], d[i], psi, alpha[i], u[i], metric[i]), rtol=1e-14
        )
        np.testing.assert_allclose(
            [part[i] for part in rays], entry_ray_heights(x[i], d[i], psi, alpha[i], u[i], metric[i]), rtol=1e-14
        )


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")
def test_decoupled_decay_in_a_metric_is_a_line_and_plain_decay_one_of_entries():
    x, d, metric = tensors(9, Zero())
    alpha, lam, gap, C = 0.5, 0.3, np.float64(3.0), 0.3
    y = cp.Variable(x.shape)
    proximity = cp.sum_squares(cp.multiply(np.sqrt(metric / (2 * alpha)), y - x))
    model = cp.maximum(gap + C + cp.sum(cp.multiply(d, y - x)), C)
    decays = {
        "decoupled": lam / 2 * cp.sum_squares(cp.multiply(np.sqrt(metric), y)),
        "plain": lam / 2 * cp.sum_squares(y),
    }
    sums = (np.array([np.sum(d * d / metric)]), np.array([np.sum(d * x)]), np.array([alpha]), np.array([lam]))
    entries = [part.ravel() for part in (d * d, d * x, alpha / metric, lam + 0 * x)]
    duals = {name: line_dual(l2_line(gap, *own)).u for name, own in (("decoupled", sums), ("plain", entries))}
    shrunk = {"decoupled": alpha * lam, "plain": alpha * lam / metric}
    for name, decay in decays.items():
        assert 0 < duals[name] < 1
        new = (x - duals[name] * alpha * d / metric) / (1 + shrunk[name])
        least = cp.Problem(cp.Minimize(model + decay + proximity)).solve(**SOLVER)
        y.value = new
        assert (model + decay + proximity).value <= least + 1e-8


# -- the search -------------------------------------------------------------------------------------------------------


def test_a_ray_covers_all_steps_and_ends_exactly_at_the_longest():
    v = np.array([0.0, 0.25, 0.5, 0.99, 1.0])
    for gap, d_sq, longest in ((1.0, 4.0, 1e6), (1.0, 1e-9, 3.0), (2.0, 0.0, 3.0), (1.0, 1e300, 1e6), (1e-9, 1.0, 0.0)):
        ray = polyak_ray(np.float64(gap), np.float64(d_sq), np.float64(longest))
        s = ray.s(v)
        assert (s[0], s[-1]) == (0, longest)
        assert (np.diff(s) > 0).all() or longest == 0
        up, down = (ray.s(v[1:4] + e) for e in (1e-7, -1e-7))
        np.testing.assert_allclose(ray.rate(v[1:4]), (up - down) / 2e-7, rtol=1e-4)
    middle = polyak_ray(np.float64(1.0), np.float64(4.0), np.float64(1e6)).s(np.float64(0.5))
    assert middle == pytest.approx(0.25, rel=1e-6)  # the Polyak step
    assert Ray(np.float64(2.0), np.float64(1.0)).s(np.float64(0.3)) == pytest.approx(0.6)


def test_runs_are_searched_together():
    psi = SCALARS["elastic net"]
    cases = [draw(seed) for seed in range(12)]
    x, d, metric, gap, longest = (np.stack(part) for part in zip(*cases, strict=True))
    gap[3] = -1.0
    heights = partial(entry_ray_heights, x, d, psi, 1.0, metric=metric)
    together = find_matched(heights, gap, np.sum(d * d / metric, -1), longest, search(gap, loop=shared_loop))
    for i in range(len(cases)):
        own = partial(entry_ray_heights, x[i], d[i], psi, 1.0, metric=metric[i])
        alone = find_matched(own, gap[i], np.sum(d[i] * d[i] / metric[i]), longest[i], search(abs(gap[i])))
        assert together.s[i] == pytest.approx(alone.s, rel=1e-9)
    assert together.s[3] == 0


@pytest.mark.parametrize("points", [1, 3, 8])
def test_few_evaluations_are_enough(points):
    psi, counts = SCALARS["l1"], []
    for seed in range(40):
        x, d, metric, gap, longest = draw(seed, n=200)
        heights = partial(entry_ray_heights, x, d, psi, 1.0, metric=metric)
        counts.append(find_matched(heights, gap, np.sum(d * d / metric), longest, search(gap, points)).evaluations)
    assert np.mean(counts) < {1: 9, 3: 16, 8: 32}[points]


@pytest.mark.parametrize("name", SCALARS)
def test_a_fixed_number_of_rounds_finds_the_same_steps(name):
    """Where it has not come to an end, its step is shorter, not longer."""
    psi, off = SCALARS[name], []
    for seed in range(60):
        x, d, metric, gap, longest = draw(seed, psi=psi)
        heights = partial(entry_ray_heights, x, d, psi, 1.0, metric=metric)
        d_sq = np.sum(d * d / metric)
        found = refine_zero(lambda s, heights=heights: heights(s)[0], gap, d_sq, longest, 7, EPS)
        exact = find_matched(heights, gap, d_sq, longest, search(gap))
        height = gap + heights(found.s[None])[0][0]
        assert found.height == pytest.approx(height, rel=1e-12)
        assert height >= 0
        if exact.s == longest:
            assert found.s == longest
        else:
            off.append(height > 1e-9 * gap)
    assert np.mean(off) <= 0.05


def test_torch_and_jax_search_as_numpy_does():
    psi = SCALARS["elastic net"]

    @jax.jit
    def traced(x, d, metric, gap, longest):
        heights = partial(entry_ray_heights, x, d, psi, 1.0, metric=metric)
        find = search(gap, points=1, loop=jax.lax.while_loop)
        return find_matched(heights, gap, (d * d / metric).sum(), longest, find).s

    for seed in range(6):
        case = draw(seed)
        x, d, metric, gap, longest = case
        d_sq = np.sum(d * d / metric)
        exact = find_matched(partial(entry_ray_heights, x, d, psi, 1.0, metric=metric), gap, d_sq, longest, search(gap))
        x, d, metric, gap, longest = (torch.as_tensor(part) for part in case)
        heights = partial(entry_ray_heights, x, d, psi, 1.0, metric=metric)
        d_sq = (d * d / metric).sum()
        rounds = refine_zero(lambda s, heights=heights: heights(s)[0], gap, d_sq, longest, 8, EPS)
        for found in (
            find_matched(heights, gap, d_sq, longest, search(gap)),
            find_matched(heights, gap, d_sq, longest, search(gap, loop=fixed_loop(20))),
            rounds,
        ):
            assert float(found.s) == pytest.approx(float(exact.s), rel=1e-8)
        with jax.enable_x64(True):
            assert float(traced(*map(jnp.asarray, case))) == pytest.approx(float(exact.s), rel=1e-8)
