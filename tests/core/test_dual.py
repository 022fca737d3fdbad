"""The search for the dual variable: the root, few evaluations, and the certificate it stops on."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from proxsps.core.dual import (
    eager_loop,
    fixed_loop,
    geometric,
    search_dual,
    shared_loop,
    stopping,
    unclipped_root,
)

POINTS = (1, 2, 3, 8)


def find(h, slope=None, tolerance=1e-12, limit=64, loop=eager_loop, resolution=0.0, seen=None, **options):
    """A search of one run; `seen` gets the points of every round."""

    def evaluate(u):
        if seen is not None:
            seen.append(u.tolist())
        return h(u), (u * math.nan if slope is None else slope(u))

    return search_dual(evaluate, np.float64(1.0), tolerance, resolution, limit, loop, **options)


def duality_gap(found):
    return np.where(found.h > 0, (1 - found.u) * found.h, -found.u * found.h)


SHAPES = {
    "line": (lambda u: 0.3 - u, lambda u: -np.ones_like(u)),
    "convex": (lambda u: np.exp(-5 * u) - 0.2, lambda u: -5 * np.exp(-5 * u)),
    "concave": (lambda u: 0.5 - u**4, lambda u: -4 * u**3),
    "kink": (lambda u: np.where(u < 0.4, 1 - u, 0.6 - 20 * (u - 0.4)), lambda u: np.where(u < 0.4, -1.0, -20.0)),
    "plateau": (lambda u: np.where(u > 0.1, -1.0, 0.05 - 10.5 * u), lambda u: np.where(u > 0.1, 0.0, -10.5)),
    "steep at zero": (lambda u: 1e-3 - np.sqrt(u), lambda u: -0.5 / np.sqrt(np.maximum(u, 1e-300))),
}


# -- the root ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("with_slope", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_finds_the_root(name, with_slope, points):
    h, slope = SHAPES[name]
    root = brentq(h, 0, 1, xtol=1e-16)
    for start in ((1.0,), geometric(points), (0.9, 0.2)):
        found = find(h, slope if with_slope else None, start=start, points=points, slopes=with_slope, limit=200)
        assert found.done
        assert 0 < found.u < 1
        # The certificate bounds h, and h moves at least as fast as its slope at the root.
        assert abs(found.u - root) <= 1e-12 / min(1 - root, root) / abs(float(slope(root))) * 4 + 1e-15
        assert found.h == h(found.u)
        assert found.low <= root <= found.high
        assert found.slope == slope(found.u) if with_slope else math.isnan(found.slope)


def test_a_line_takes_two_evaluations():
    assert find(*SHAPES["line"]).evaluations == 2


def test_smooth_functions_take_few_rounds():
    """More points make fewer rounds, and so do slopes; bisection to 1e-12 takes 40."""
    for name in ("convex", "concave"):
        rounds = {}
        for points, slopes in ((1, True), (1, False), (8, True), (8, False)):
            seen = []
            h, slope = SHAPES[name]
            options = {"start": geometric(points), "points": points, "slopes": slopes}
            assert find(h, slope if slopes else None, seen=seen, **options).done
            rounds[points, slopes] = len(seen)
        assert rounds[1, True] <= 9
        assert rounds[1, False] <= 11
        assert rounds[8, True] <= 4
        assert rounds[8, False] <= 4


def test_points_of_a_round_are_evaluated_together():
    seen = []
    found = find(*SHAPES["convex"], seen=seen, start=(1.0, 0.5), points=3)
    assert [len(u) for u in seen] == [2] + [3] * (len(seen) - 1)
    assert found.evaluations == sum(map(len, seen))
    assert all(0 <= u <= 1 for points in seen for u in points)


def test_the_first_points_may_be_an_array():
    """Such as a guess that somebody has calculated."""
    h, slope = SHAPES["convex"]
    root = math.log(5) / 5
    seen = []
    found = find(h, slope, seen=seen, start=np.array([0.99 * root, root, 1.01 * root]), points=3)
    assert seen[0] == [0.99 * root, root, 1.01 * root]
    assert found.done
    assert len(seen) == 1


@given(
    knots=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8, unique=True),
    falls=st.lists(st.floats(0, 10), min_size=9, max_size=9),
    level=st.floats(0.05, 0.95),
    points=st.sampled_from(POINTS),
)
def test_piecewise_linear_functions_are_solved_to_the_certificate(knots, falls, level, points):
    """What l1 and its kin give: every prefix of slopes, flat pieces included."""
    x = np.array([0.0, *sorted(knots), 1.0])
    drop = np.cumsum([0.0, *(fall * width for fall, width in zip(falls, np.diff(x), strict=False))])
    if drop[-1] == 0:
        return
    heights = level * drop[-1] - drop

    def h(u):
        return np.interp(u, x, heights)

    def slope(u):
        i = np.clip(np.searchsorted(x, u, side="right") - 1, 0, len(x) - 2)
        return (heights[i + 1] - heights[i]) / (x[i + 1] - x[i])

    tolerance = 1e-12 * drop[-1]
    for derivative in (slope, None):
        found = find(h, derivative, tolerance, 400, points=points, start=geometric(points), slopes=derivative is slope)
        assert found.done
        assert duality_gap(found) <= tolerance


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", POINTS)
def test_ends_are_answers_without_a_root(points):
    """A first round with both ends is the only one; without, one more is."""
    options = {"points": points, "start": geometric(points)}
    capped = find(lambda u: 3.0 - u, lambda u: -1.0 + 0 * u, **options)
    assert (capped.u, capped.evaluations) == (1.0, points)
    assert unclipped_root(capped) == pytest.approx(3.0)  # where the line would reach zero
    truncated = find(lambda u: -0.5 - u, lambda u: -1.0 + 0 * u, **options)
    assert (truncated.u, truncated.evaluations) == (0.0, 2 if points == 1 else points)
    assert unclipped_root(truncated) == pytest.approx(-0.5)
    unknown = find(lambda u: 3.0 - u, slopes=False, **options)
    assert unclipped_root(unknown) == 1.0  # no slope: no guess beyond the end


@pytest.mark.parametrize("start", [(1.0,), (0.5,), (1.0, 0.25, 0.0)])
@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_of_a_flat_function_does_not_hide_an_end(sign, points, start):
    """Where no entry moves, h is constant up to rounding, and need not be smallest in size at the end that it is."""
    end = 1.0 if sign > 0 else 0.0
    found = find(
        lambda u: sign * np.where(u == end, 0.5 + 1e-15, 0.5), lambda u: 0 * u - 1e-18, points=points, start=start
    )
    assert found.done
    assert found.u == end
    assert found.evaluations <= len(start) + 2 * points


# -- never much worse than bisection ----------------------------------------------------------------------------------


def staircase(kind, root):
    """Functions that make interpolation useless: where they are not flat, they jump."""
    if kind == "one jump":
        return lambda u: np.where(u < root, 1.0, -1.0)
    if kind == "far above":
        return lambda u: np.where(u < root, 1e9, -1e-9)
    if kind == "far below":
        return lambda u: np.where(u < root, 1e-9, -1e9)
    if kind == "root of high order":
        return lambda u: np.sign(root - u) * np.abs(u - root) ** 0.05

    def steps(u):  # each step half as high as the one before, so that progress seems to be made
        order = np.ceil(np.log2(np.maximum(np.abs(u - root), 1e-300)) / 3)
        return np.where(u < root, 1.0, -1.0) * np.exp2(np.maximum(order, -300))

    return steps


@pytest.mark.parametrize("slope", [None, 0.0, -1e6], ids=["no slope", "flat", "steep"])
@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("kind", ["one jump", "far above", "far below", "root of high order", "steps"])
def test_rounds_on_staircases_are_bounded_by_those_of_bisection(kind, points, slope):
    resolution = 1e-9
    for root in (0.3, 0.999999, 1e-6, 0.0101):
        seen = []
        derivative = None if slope is None else (lambda u: slope + 0 * u)
        options = {"points": points, "start": geometric(points), "slopes": slope is not None}
        found = find(staircase(kind, root), derivative, 0.0, 10**6, resolution=resolution, seen=seen, **options)
        assert found.done
        assert found.low <= root <= found.high
        assert found.high - found.low <= resolution * found.high
        bisection = math.log(1 / (resolution * root)) / math.log(points + 1)
        assert len(seen) <= (2 if kind == "steps" else 1.2) * bisection + 3


def test_progress_that_is_too_slow_is_progress_no_longer():
    """Where h has a root of high order, interpolation gains a constant factor a round: it may halve |h|, no more."""
    for points in POINTS:
        seen = []
        h, slope = lambda u: (0.3 - u) ** 9, lambda u: -9 * (0.3 - u) ** 8
        found = find(h, slope, 1e-12, 10**6, seen=seen, points=points, start=geometric(points))
        assert found.done
        assert len(seen) <= 2 * math.log2(0.7**9 / 1e-12) + 4


def test_a_jump_is_located_to_the_resolution():
    """Rounding makes steps of h; where none of its values is small, the bracket ends the search."""
    found = find(lambda u: np.where(u < 0.3, 1.0, -1.0), resolution=1e-6)
    assert found.done
    assert abs(found.u - 0.3) <= 1e-6
    assert found.high - found.low <= 1e-6 * found.high
    assert found.evaluations <= 24  # bisection from 1 to 1e-6 takes 20


# -- when to stop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 3])
def test_rounding_of_h_ends_a_search(points):
    def h(u):
        return 1e-6 - u - u**2

    tolerance, noise = stopping(np.float64(1e-6), np.float64(1e4), eps=1e-12)
    np.testing.assert_allclose((tolerance, noise), (1e-18, 2e-8), rtol=1e-15)
    found, exact = (find(h, lambda u: -1 - 2 * u, tolerance, points=points, noise=size) for size in (noise, 0.0))
    assert 0 < abs(found.h) <= noise
    assert found.evaluations < exact.evaluations


def test_rounding_of_h_does_not_excuse_a_step_that_is_too_long():
    """Where the root is near zero, u h(u) is far below the rounding of h at points that are many times the root."""

    def h(u):
        return 1e-6 - np.sqrt(u)

    tolerance, noise = 1e-18, 2e-8
    assert 1e-6 * abs(float(h(1e-6))) < noise  # a million times the root, 1e-12
    found = find(h, None, tolerance, noise=noise)
    assert 0 < found.u < 3e-12


@pytest.mark.parametrize("points", POINTS)
def test_limit_is_kept_and_the_answer_was_evaluated(points):
    """No round begins once so many points were evaluated."""
    seen = []
    h = SHAPES["convex"][0]
    found = find(h, tolerance=0.0, limit=5, points=points, slopes=False, start=geometric(points), seen=seen)
    assert found.evaluations == sum(map(len, seen))
    assert 5 <= found.evaluations < 5 + points
    assert not found.done
    assert found.u in [u for points in seen for u in points]


def test_the_estimate_is_nearer_than_what_was_evaluated():
    """For searches that are ended early, as on a sample."""
    h, slope = SHAPES["convex"]
    root = math.log(5) / 5
    for points, slopes in ((1, True), (1, False), (3, True), (3, False)):
        options = {"points": points, "slopes": slopes, "start": geometric(points)}
        found = find(h, slope if slopes else None, 0.0, 2 * points + 3, **options)
        assert not found.done
        assert 0 < abs(found.estimate - root) < abs(found.u - root) / 2


# -- loops and runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 3])
def test_loops_give_the_same_answer(points):
    options = {"points": points, "start": geometric(points), "limit": 64}
    for h, slope in SHAPES.values():
        eager = find(h, slope, **options)
        assert eager == find(h, slope, loop=shared_loop, **options)
        assert eager == find(h, slope, loop=fixed_loop(64), **options)


def test_a_fixed_loop_looks_at_no_number():
    import torch

    with torch.device("meta"):  # tensors without numbers
        found = search_dual(
            lambda u: (0.3 - u, -1 + 0 * u), torch.ones(()), 1e-6, 0.0, 64, fixed_loop(3), start=geometric(3), points=3
        )
    assert found.u.shape == ()


@pytest.mark.parametrize("points", [1, 3])
def test_a_traced_loop_gives_the_same_answer(points):
    jax = pytest.importorskip("jax")

    @jax.jit
    def search(level):
        def evaluate(u):
            return level - u**3, -3 * u**2

        loop = jax.lax.while_loop
        return search_dual(evaluate, level, 1e-6, 1e-6, 64, loop, start=geometric(points), points=points)

    for level in (0.2, 0.9, 1.5, -0.5):
        found = search(np.float32(level))
        assert found.done
        assert float(found.u) == pytest.approx(np.clip(level, 0, 1) ** (1 / 3), abs=1e-5)


@pytest.mark.parametrize("loop", [shared_loop, fixed_loop(20)], ids=["shared", "fixed"])
@pytest.mark.parametrize("points", [1, 3])
def test_runs_are_independent(points, loop):
    roots = np.array([[0.1, 0.5, 0.9], [2.0, -1.0, 1e-9]])

    def evaluate(u, roots=roots):
        return roots[..., None] - u**3, -3 * u**2

    options = {"start": geometric(points), "points": points}
    found = search_dual(evaluate, roots, 1e-13, 0.0, 64, loop, **options)
    np.testing.assert_allclose(found.u, np.clip(roots, 0, 1) ** (1 / 3), atol=1e-4)  # flat at 0: the certificate is h
    assert np.all(duality_gap(found) <= 1e-13)
    assert found.evaluations.min() < found.evaluations.max()  # finished runs wait, they are not counted on
    for index, root in np.ndenumerate(roots):
        alone = search_dual(
            lambda u, root=root: evaluate(u, np.asarray(root)), root, 1e-13, 0.0, 64, eager_loop, **options
        )
        assert alone[:8] == tuple(part[index] for part in found[:8])  # bitwise, from u to the bracket


def test_each_run_may_have_its_own_first_points_and_tolerance():
    roots = np.array([0.2, 0.7])
    start = np.stack([roots - 0.01, roots, roots + 0.01], axis=-1)
    seen = []

    def evaluate(u):
        seen.append(u)
        return roots[:, None] - u, -1 + 0 * u

    found = search_dual(evaluate, roots, np.array([1e-12, 1e-9]), 0.0, 64, shared_loop, start=start, points=3)
    assert len(seen) == 1
    np.testing.assert_array_equal(found.u, roots)


def test_every_array_library_gives_the_same_numbers():
    import torch

    levels = np.array([0.1, 0.9, 1.5, -1.0])

    def search(levels, exp):
        def evaluate(u):
            return levels[..., None] * exp(-u) - 0.5, -levels[..., None] * exp(-u)

        return search_dual(evaluate, levels, 1e-13, 0.0, 64, shared_loop, start=geometric(3), points=3)

    mine, theirs = search(levels, np.exp), search(torch.as_tensor(levels), torch.exp)
    np.testing.assert_allclose(theirs.u.numpy(), mine.u, rtol=1e-12)
    np.testing.assert_array_equal(theirs.evaluations.numpy(), mine.evaluations)


def test_first_points_for_who_knows_nothing():
    assert geometric(1) == (1.0,)
    assert geometric(2) == (1.0, 0.0)
    assert geometric(4) == (1.0, 0.25, 0.0625, 0.0)
