"""The search for the dual variable: the root, few evaluations, and the certificate it stops on."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from proxsps.core.dual import fixed_loop, search_dual, stopping, unclipped_root


def eager(condition, body, state):
    while np.any(condition(state)):
        state = body(state)
    return state


def find(h, slope=None, tolerance=1e-12, limit=64, loop=eager, resolution=0.0):
    def evaluate(u):
        return h(u), (u * math.nan if slope is None else slope(u))

    return search_dual(evaluate, np.float64(1.0), tolerance, resolution, limit, loop)


SHAPES = {
    "line": (lambda u: 0.3 - u, lambda u: -np.ones_like(u)),
    "convex": (lambda u: np.exp(-5 * u) - 0.2, lambda u: -5 * np.exp(-5 * u)),
    "concave": (lambda u: 0.5 - u**4, lambda u: -4 * u**3),
    "kink": (lambda u: np.where(u < 0.4, 1 - u, 0.6 - 20 * (u - 0.4)), lambda u: np.where(u < 0.4, -1.0, -20.0)),
    "plateau": (lambda u: np.where(u > 0.1, -1.0, 0.05 - 10.5 * u), lambda u: np.where(u > 0.1, 0.0, -10.5)),
    "steep at zero": (lambda u: 1e-3 - np.sqrt(u), lambda u: -0.5 / np.sqrt(np.maximum(u, 1e-300))),
}


@pytest.mark.parametrize("with_slope", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_finds_the_root(name, with_slope):
    h, slope = SHAPES[name]
    found = find(h, slope if with_slope else None)
    root = brentq(h, 0, 1, xtol=1e-16)
    assert found.done
    assert 0 < found.u < 1
    # The certificate bounds h, and h moves at least as fast as its slope at the root.
    assert abs(found.u - root) <= 1e-12 / min(1 - root, root) / abs(float(slope(root))) * 4 + 1e-15
    assert found.h == h(found.u)


def test_rounding_of_h_ends_a_search():
    def evaluate(u):
        return 1e-6 - u - u**2, -1 - 2 * u

    tolerance, noise = stopping(np.float64(1e-6), np.float64(1e4), eps=1e-12)
    np.testing.assert_allclose((tolerance, noise), (1e-18, 2e-8), rtol=1e-15)
    found = search_dual(evaluate, np.float64(1.0), tolerance, 0.0, 64, eager, noise)
    exact = search_dual(evaluate, np.float64(1.0), tolerance, 0.0, 64, eager)
    assert 0 < abs(found.h) <= noise
    assert found.evaluations < exact.evaluations


def test_rounding_of_h_does_not_excuse_a_step_that_is_too_long():
    """Where the root is near zero, u h(u) is far below the rounding of h at points that are many times the root."""

    def evaluate(u):
        return 1e-6 - np.sqrt(u), u * math.nan

    tolerance, noise = 1e-18, 2e-8
    assert 1e-6 * abs(float(evaluate(1e-6)[0])) < noise  # a million times the root, 1e-12
    found = search_dual(evaluate, np.float64(1.0), tolerance, 0.0, 64, eager, noise)
    assert 0 < found.u < 3e-12


def test_a_line_takes_two_evaluations():
    assert find(*SHAPES["line"]).evaluations == 2


def test_ends_are_answers_without_a_root():
    capped = find(lambda u: 3.0 - u, lambda u: -1.0 + 0 * u)
    assert (capped.u, capped.evaluations) == (1.0, 1)
    assert unclipped_root(capped) == pytest.approx(3.0)  # where the line would reach zero
    truncated = find(lambda u: -0.5 - u, lambda u: -1.0 + 0 * u)
    assert (truncated.u, truncated.evaluations) == (0.0, 2)
    assert unclipped_root(truncated) == pytest.approx(-0.5)
    unknown = find(lambda u: 3.0 - u)
    assert unclipped_root(unknown) == 1.0  # no slope: no guess beyond the end


@given(
    knots=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=8, unique=True),
    falls=st.lists(st.floats(0, 10), min_size=9, max_size=9),
    level=st.floats(0.05, 0.95),
)
def test_piecewise_linear_functions_are_solved_to_the_certificate(knots, falls, level):
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
        found = find(h, derivative, tolerance)
        assert found.done
        gap = (1 - found.u) * found.h if found.h > 0 else -found.u * found.h
        assert gap <= tolerance


def test_fixed_loop_gives_the_same_answer_as_the_eager_one():
    for h, slope in SHAPES.values():
        eager_result, fixed = find(h, slope), find(h, slope, limit=64, loop=fixed_loop(64))
        assert eager_result == fixed


def test_limit_is_kept_and_the_answer_was_evaluated():
    seen = []

    def h(u):
        seen.append(float(u))
        return 1e-3 - np.sqrt(u)

    found = find(h, tolerance=0.0, limit=5)
    assert len(seen) == found.evaluations == 5
    assert not found.done
    assert found.u == seen[-1]


def test_a_jump_is_located_to_the_resolution():
    """Rounding makes steps of h; where none of its values is small, the bracket ends the search."""
    found = find(lambda u: np.where(u < 0.3, 1.0, -1.0), resolution=1e-6)
    assert found.done
    assert abs(found.u - 0.3) <= 1e-6
    assert found.high - found.low <= 1e-6 * found.high
    assert found.evaluations <= 24  # bisection from 1 to 1e-6 takes 20


def test_runs_are_independent():
    roots = np.array([0.1, 0.5, 0.9, 2.0, -1.0])

    def evaluate(u):
        return roots - u**3, -3 * u**2

    found = search_dual(evaluate, roots, 1e-13, 0.0, 64, eager)
    np.testing.assert_allclose(found.u, np.clip(roots, 0, 1) ** (1 / 3), atol=1e-11)
    assert found.evaluations.min() < found.evaluations.max()  # finished runs wait, they are not counted on
