"""The distance cap: against its sums written out."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from proxsps.core import distance
from proxsps.core.array import chosen
from proxsps.core.distance import Travel, distance_cap, start_travel, update_travel

LIBRARIES = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}
STEPS = 12


def walk(seed=0, runs=()):
    """||x_0||^2, and ||x_k - x_0||^2 and ||D^-1 g_k||^2 of a walk that goes to and fro."""
    rng = np.random.default_rng(seed)
    moved = np.concatenate([np.zeros((1, *runs)), 0.1 * rng.random((STEPS - 1, *runs))])
    return 4.0 * rng.random(runs), moved, rng.uniform(0.1, 9, (STEPS, *runs))


def caps(x_sq, moved_sq, g_sq, **options):
    travel, found = start_travel(x_sq), []
    for k in range(len(moved_sq)):
        travel = update_travel(travel, moved_sq[k], g_sq[k])
        found.append(distance_cap(travel, **options))
    return found


def written_out(x_sq, moved_sq, g_sq, c=0.85, b=0.99, r0=1e-2):
    """A_k = c rbar / sqrt((k + 1) G / (1 - b^(k+1))), with G from zero."""
    G, out = 0.0, []
    for k in range(len(moved_sq)):
        G = b * G + (1 - b) * g_sq[k]
        reach = max([r0 * (1 + x_sq**0.5), *(m**0.5 for m in moved_sq[: k + 1])])
        out.append(c * reach / ((k + 1) * G / (1 - b ** (k + 1))) ** 0.5)
    return out


def test_the_cap_is_the_published_recursion():
    x_sq, moved, g_sq = walk()
    np.testing.assert_allclose(caps(np.float64(x_sq), moved, g_sq), written_out(x_sq, moved, g_sq), rtol=1e-12)
    np.testing.assert_allclose(
        caps(np.float64(x_sq), moved, g_sq, c=0.4), written_out(x_sq, moved, g_sq, c=0.4), rtol=1e-12
    )


@pytest.mark.parametrize(("name", "factor"), [("SCALE", 2.0), ("FORGETTING", 0.9), ("START", 0.5)])
def test_a_wrong_constant_is_seen(monkeypatch, name, factor):
    x_sq, moved, g_sq = walk()
    right = {"c": 0.85, "b": 0.99, "r0": 1e-2}
    key = {"SCALE": "c", "FORGETTING": "b", "START": "r0"}[name]
    wrong = written_out(x_sq, moved, g_sq, **right | {key: factor * right[key]})
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(caps(np.float64(x_sq), moved, g_sq), wrong, rtol=1e-6)
    assert getattr(distance, name) == right[key]


def test_almost_without_forgetting_it_is_the_step_of_dog():
    """The largest distance over the root of the sum of all squared gradients."""
    x_sq, moved, g_sq = walk(1)
    travel = start_travel(np.float64(x_sq))
    for k in range(STEPS):
        travel = update_travel(travel, moved[k], g_sq[k], b=1 - 1e-9)
    dog = max(1e-2 * (1 + x_sq**0.5), moved.max() ** 0.5) / g_sq.sum() ** 0.5
    assert distance_cap(travel, c=1.0) == pytest.approx(dog, rel=1e-6)


def test_the_first_step_is_as_long_as_the_first_estimate():
    travel = update_travel(start_travel(np.float64(9.0)), np.float64(0.0), np.float64(25.0))
    assert distance_cap(travel, c=1.0) * 5.0 == pytest.approx(1e-2 * (1 + 3.0), rel=1e-14)


def test_a_constant_number_of_squares_needs_no_sum():
    """In Adam's metric ||D^-1 g||^2 is about n, and Ghat then n (k + 1)."""
    n, travel = 50.0, start_travel(np.float64(1.0))
    for k in range(STEPS):
        travel = update_travel(travel, np.float64(k), np.float64(n))
        assert distance_cap(travel) == pytest.approx(0.85 * max(0.02, k**0.5) / (n * (k + 1)) ** 0.5, rel=1e-12)


def test_without_gradients_there_is_no_step():
    travel = update_travel(start_travel(np.float64(1.0)), np.float64(0.0), np.float64(0.0))
    assert distance_cap(travel) == 0
    assert distance_cap(start_travel(np.float64(1.0))) == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_cap_stays_in_the_range_of_f32(dtype):
    """In doubles also where squares of gradients leave it; as long as it is inside, it is the formula."""
    for size in 10.0 ** np.arange(-45, 19):
        g_sq = (np.float64(size) ** 2).astype(dtype)
        for x_sq in (1.0, 1e20):
            travel = update_travel(start_travel(dtype(x_sq)), dtype(0.0), g_sq)
            cap, exact = distance_cap(travel), 0.85e-2 * (1 + x_sq**0.5) / size
            assert np.isfinite(np.float32(cap))
            if exact < 1e37 and g_sq > 1e-37:
                assert cap == pytest.approx(exact, rel=1e-6)


def test_the_reach_never_shrinks_and_skipped_steps_change_nothing():
    old = Travel(*(np.full(2, number) for number in (2.0, 1.0, 4.0, 0.5, 3.0)))
    new = update_travel(old, np.array([1.0, np.nan]), np.array([9.0, np.inf]))
    assert new.reach[0] == 2
    found = chosen(np.array([True, False]), new, old)
    assert [part[1] for part in found] == [2, 1, 4, 0.5, 3]
    assert [part[0] for part in found] == [part[0] for part in new]


def test_runs_are_independent():
    x_sq, moved, g_sq = walk(2, (3,))
    together = np.stack(caps(x_sq, moved, g_sq))
    for i in range(3):
        np.testing.assert_array_equal(together[:, i], caps(x_sq[i], moved[:, i], g_sq[:, i]))


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_array_library_gives_the_same_numbers(library):
    x_sq, moved, g_sq = walk(3)
    as_array = LIBRARIES[library]
    found = caps(as_array(x_sq), as_array(moved), as_array(g_sq))
    precision = 1e-6 if library == "jax" else 1e-13
    np.testing.assert_allclose([float(a) for a in found], written_out(x_sq, moved, g_sq), rtol=precision)
