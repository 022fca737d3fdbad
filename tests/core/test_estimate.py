"""Averaged models and Adam's metric: against sums written out, and against torch's Adam."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from proxsps.core import estimate
from proxsps.core.array import chosen
from proxsps.core.estimate import (
    Averages,
    averaged,
    averaged_value,
    corrected_weights,
    metric,
    momentum_weights,
    start_averages,
    update_averages,
)

STEPS, SIZE = 7, 5
LIBRARIES = {"numpy": np.asarray, "torch": torch.as_tensor, "jax": jnp.asarray}


def history(seed=0, steps=STEPS, shape=(SIZE,)):
    """Losses f_k, gradients g_k and points x_k."""
    rng = np.random.default_rng(seed)
    return rng.uniform(0.5, 3, (steps, *shape[:-1])), *rng.standard_normal((2, steps, *shape))


def run(weights, beta, f, g, x, start=None):
    """The functions under test over a history: the last d and m."""
    d = np.full_like(g[0], 0.0 if start is None else start)
    numbers = start_averages(f[0])
    for k in range(len(f)):
        w = weights(numbers.taken, beta)
        assert w.old + w.new == pytest.approx(1, abs=1e-15)
        column = estimate.Weights(w.old[..., None], w.new[..., None])
        d = averaged(d, g[k], column)
        numbers = update_averages(numbers, f[k], (g[k] * x[k]).sum(-1), w)
    return d, averaged_value(f[-1], numbers, (d * x[-1]).sum(-1))


def linearisations(f, g, x, shares):
    """Slope and value at the last point of the weighted mean of f_k + <g_k, . - x_k>."""
    values = f + (g * (x[-1] - x)).sum(-1)
    return np.tensordot(shares, g, 1), np.tensordot(shares, values, 1)


def shares_of(kind, beta, steps=STEPS):
    k = np.arange(steps)
    if kind == "corrected":
        return (1 - beta) * beta ** (steps - 1 - k) / (1 - beta**steps)
    first = np.where(k == 0, 1.0, 1 - beta)
    return first * beta ** (steps - 1 - k)


WEIGHTS = {"momentum": momentum_weights, "corrected": corrected_weights}


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_the_model_is_the_mean_of_all_linearisations(kind, beta):
    f, g, x = history()
    d, m = run(WEIGHTS[kind], beta, f, g, x)
    expected = linearisations(f, g, x, shares_of(kind, beta))
    np.testing.assert_allclose(d, expected[0], rtol=1e-12)
    np.testing.assert_allclose(m, expected[1], rtol=1e-12)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_was_there_before_the_first_step_does_not_matter(kind):
    f, g, x = history()
    np.testing.assert_array_equal(run(WEIGHTS[kind], 0.9, f, g, x, start=1e30)[0], run(WEIGHTS[kind], 0.9, f, g, x)[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_without_momentum_the_model_is_bitwise_the_plain_one(kind, library, dtype):
    as_array = LIBRARIES[library]
    f, g, x = (as_array(part.astype(dtype)) for part in history(3))
    d, numbers = g[0] * 0 + 5, start_averages(f[0])
    for k in range(STEPS):
        w = WEIGHTS[kind](numbers.taken, 0.0)
        d = averaged(d, g[k], w)
        numbers = update_averages(numbers, f[k], (g[k] * x[k]).sum(), w)
        assert (d == g[k]).all()
        assert averaged_value(f[k], numbers, (d * x[k]).sum()) == f[k]
    # And with momentum it is not: the test would see a difference.
    w = WEIGHTS[kind](numbers.taken, 0.9)
    assert (averaged(d, g[0], w) != g[0]).any()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_moments_are_those_of_adam(betas):
    eps, lr = 1e-8, 0.1
    x = torch.tensor(np.random.default_rng(0).standard_normal(SIZE), requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=lr, betas=betas, eps=eps)
    d = v = np.zeros(SIZE)
    for k in range(STEPS):
        before = x.detach().numpy().copy()
        x.grad = torch.sin(3 * x.detach()) + k
        g = x.grad.numpy()
        d = averaged(d, g, corrected_weights(np.float64(k), betas[0]))
        v = averaged(v, g * g, corrected_weights(np.float64(k), betas[1]))
        optimizer.step()
        np.testing.assert_allclose(x.detach().numpy(), before - lr * d / metric(v, eps), rtol=1e-12)
        state = optimizer.state[x]
        np.testing.assert_allclose(d, state["exp_avg"].numpy() / (1 - betas[0] ** (k + 1)), rtol=1e-12)
        np.testing.assert_allclose(v, state["exp_avg_sq"].numpy() / (1 - betas[1] ** (k + 1)), rtol=1e-12)


def test_single_precision_keeps_its_digits_in_the_first_steps():
    """1 - .999^2 in single precision has four digits less."""
    for k in (1, 5, 100):
        exact = (1 - 0.999) / (1 - 0.999 ** (k + 1))
        assert float(corrected_weights(jnp.float32(k), 0.999).new) == pytest.approx(exact, rel=1e-6)
        assert float(corrected_weights(torch.tensor(float(k)), 0.999).new) == pytest.approx(exact, rel=1e-6)


def test_beta_may_be_an_array():
    for beta in (0.0, 0.9):
        for weights in WEIGHTS.values():
            for k in (0.0, 4.0):
                found = weights(jnp.float32(k), jnp.float32(beta))
                np.testing.assert_allclose(found, weights(np.float64(k), beta), rtol=1e-6)


def test_a_tensor_without_gradients_takes_part_with_zeros():
    """Its slope decays, and it adds nothing to <g, x>: the same model as with gradients of zero."""
    f, g, x = history(1)
    g[2:5, 3:] = 0
    d, m = run(momentum_weights, 0.9, f, g, x)
    seen = g.copy()
    expected = linearisations(f, seen, x, shares_of("momentum", 0.9))
    np.testing.assert_allclose(m, expected[1], rtol=1e-12)
    np.testing.assert_allclose(d[3:], expected[0][3:], rtol=1e-12)


def test_a_convex_loss_is_never_below_its_averaged_model():
    """Each linearisation is below f, and so is their mean."""
    rng = np.random.default_rng(5)
    A = rng.standard_normal((SIZE, SIZE))
    x = rng.standard_normal((STEPS, SIZE))
    f, g = 0.5 * ((x @ A) ** 2).sum(-1), x @ A @ A.T
    for kind, weights in WEIGHTS.items():
        _, m = run(weights, 0.8, f, g, x)
        assert m <= f[-1], kind


def test_runs_are_independent():
    f, g, x = history(2, shape=(3, SIZE))
    for weights in WEIGHTS.values():
        d, m = run(weights, 0.7, f, g, x)
        for i in range(3):
            alone = run(weights, 0.7, f[:, i], g[:, i], x[:, i])
            np.testing.assert_array_equal(d[i], alone[0])
            np.testing.assert_allclose(m[i], alone[1], rtol=1e-15)


def test_a_skipped_step_leaves_all_numbers_as_they_were():
    old = Averages(np.array([1.0, 1.0]), np.array([2.0, 2.0]), np.array([3.0, 3.0]))
    new = update_averages(old, np.array([5.0, np.nan]), np.array([7.0, np.inf]), momentum_weights(old.taken, 0.9))
    found = chosen(np.array([True, False]), new, old)
    for part, after, before in zip(found, new, old, strict=True):
        assert part[0] == after[0] != before[0]
        assert part[1] == before[1]


MUTANTS = {
    "sign of the offset": lambda f, a, dx: f + ((a.value - f) + (a.offset - dx)),
    "no offset": lambda f, a, dx: a.value + 0 * dx,
    "loss not averaged": lambda f, a, dx: f - (a.offset - dx),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_formula_is_seen(monkeypatch, name):
    monkeypatch.setitem(globals(), "averaged_value", MUTANTS[name])
    with pytest.raises(AssertionError):
        test_the_model_is_the_mean_of_all_linearisations("momentum", 0.9)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_array_library_gives_the_same_numbers(library):
    as_array = LIBRARIES[library]
    f, g, x = history(4)
    expected = {kind: run(weights, 0.9, f, g, x) for kind, weights in WEIGHTS.items()}
    f, g, x = (as_array(part) for part in (f, g, x))
    for kind, weights in WEIGHTS.items():
        d, numbers = g[0] * 0, start_averages(f[0])
        for k in range(STEPS):
            w = weights(numbers.taken, 0.9)
            d = averaged(d, g[k], w)
            numbers = update_averages(numbers, f[k], (g[k] * x[k]).sum(), w)
        precision = 1e-12 if d.dtype in (np.float64, torch.float64) else 1e-5
        np.testing.assert_allclose(np.asarray(d), expected[kind][0], rtol=precision, atol=precision)
        m = averaged_value(f[-1], numbers, (d * x[-1]).sum())
        assert float(m) == pytest.approx(float(expected[kind][1]), rel=precision)
