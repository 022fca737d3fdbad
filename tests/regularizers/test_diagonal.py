"""One step size per entry: the minimiser of phi(y) + sum_i (y_i - z_i)^2 / (2 alpha_i), or an error."""

from __future__ import annotations

from contextlib import nullcontext

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from proxsps.regularizers import GroupLasso, Regularizer, SparseGroupLasso, group
from proxsps.regularizers._support import reading_numbers
from proxsps.regularizers.base import DIAGONAL

NAMES = set(DIAGONAL.replace(" and ", ", ").split(", "))
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10**6)
scales = st.sampled_from([0.05, 1.0, 4.0, 50.0])
spreads = st.sampled_from([0.0, 1.0, 3.0, 6.0])


def step_sizes(shape, seed, spread=1.0):
    """Between 10^-spread and 10^spread."""
    return 10 ** np.random.default_rng(seed).uniform(-spread, spread, shape)


def test_those_that_have_one_are_named(case):
    assert case.phi.has_diagonal_prox == (type(case.phi).__name__ in NAMES)
    if not case.phi.has_diagonal_prox:
        with pytest.raises(TypeError, match=f"{type(case.phi).__name__} has no exact prox.*{DIAGONAL} have one; for"):
            case.phi.prox_diagonal(case.draw(0), step_sizes(case.shape, 0))


@few
@given(seed=seeds, scale=scales, spread=spreads)
def test_fenchel_equality_certifies_the_minimiser(diagonal_case, seed, scale, spread):
    """y is the minimiser exactly when s = (z - y)/alpha has phi(y) + phi*(s) = <s, y>."""
    z, alpha = diagonal_case.draw(seed, scale), step_sizes(diagonal_case.shape, seed, spread)
    y = diagonal_case.phi.prox_diagonal(z, alpha)
    s = (z - y) / alpha
    value, violation = diagonal_case.conjugate(s)
    unit = 100 * np.finfo(float).eps * (1 + np.max(np.abs(z))) * (1 + np.max(1 / alpha))
    assert violation <= unit
    found = float(diagonal_case.phi.value(y)) + value - float(np.sum(s * y))
    assert abs(found) <= unit * (1 + np.sum(np.abs(y)) + np.sum(np.abs(s)))


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # it stops short of 1e-9; the comparison needs 1e-4
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_agrees_with_a_conic_solver(diagonal_case, scale):
    z, alpha = diagonal_case.draw(7, scale), step_sizes(diagonal_case.shape, 3, 0.5)
    y = cp.Variable((diagonal_case.shape[0], z.size // diagonal_case.shape[0]))
    phi, constraints = diagonal_case.model(y)
    distance = cp.sum_squares(cp.multiply(((2 * alpha) ** -0.5).reshape(y.shape), y - z.reshape(y.shape)))
    cp.Problem(cp.Minimize(phi + distance), constraints).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9
    )
    np.testing.assert_allclose(diagonal_case.phi.prox_diagonal(z, alpha), y.value.reshape(z.shape), atol=1e-4)


def test_one_number_for_all_entries_is_the_prox(diagonal_case):
    phi, z = diagonal_case.phi, diagonal_case.draw(0, 2.0)
    for alpha in (0.7, np.asarray(0.7), np.full(diagonal_case.shape, 0.7), np.full((1,) * z.ndim, 0.7)):
        np.testing.assert_allclose(phi.prox_diagonal(z, alpha), phi.prox(z, 0.7), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_torch_keeps_dtype_and_agrees_with_numpy(diagonal_case, dtype):
    dtype = getattr(torch, dtype)
    z, alpha = (
        torch.as_tensor(diagonal_case.draw(0, 2.0)).to(dtype),
        torch.as_tensor(step_sizes(diagonal_case.shape, 1)),
    )
    phi = diagonal_case.phi
    if getattr(phi, "center", None) is not None:
        phi = type(phi)(phi.lam, torch.as_tensor(phi.center))
    y = phi.prox_diagonal(z, alpha)
    assert (y.dtype, y.shape) == (z.dtype, z.shape)
    eps = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 40)
    exact = diagonal_case.phi.prox_diagonal(z.double().numpy(), alpha.numpy())
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=2 * eps, atol=2 * eps)
    batch = torch.func.vmap(phi.prox_diagonal)(torch.stack([z, -z]), torch.stack([alpha, alpha]))
    torch.testing.assert_close(batch[0], y)


def test_jax_traces_it(diagonal_case):
    """In one program for two dtypes."""
    phi = diagonal_case.phi
    alpha = step_sizes(diagonal_case.shape, 1)
    zs = [jnp.asarray(diagonal_case.draw(0, 2.0), dtype) for dtype in ("bfloat16", "float32")]
    ys = jax.jit(lambda zs, alpha: [phi.prox_diagonal(z, alpha) for z in zs])(zs, jnp.asarray(alpha, "float32"))
    for z, y in zip(zs, ys, strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        eps = float(jnp.finfo(z.dtype).eps) * (1 if z.dtype.itemsize == 2 else 40)
        exact = phi.prox_diagonal(np.asarray(z, np.float64), alpha)
        np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2 * eps, atol=2 * eps)


# Groups, where the norm has to be found


def optimality(y, z, t):
    """Residual of y_i (1 + t_i / ||y||) = z_i, relative to z."""
    return np.max(np.abs(y * (1 + t / np.linalg.norm(y)) - z)) / np.max(np.abs(z))


@pytest.mark.parametrize("spread", [0.5, 3.0, 7.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_are_found_to_the_last_digits(spread, dtype):
    """Also where the step sizes differ by many orders of magnitude, and just beyond the threshold."""
    rng = np.random.default_rng(0)
    eps = np.finfo(dtype).eps
    for k in range(200):
        n = int(rng.integers(1, 80))
        t = step_sizes(n, k, spread)
        z = rng.standard_normal(n) * 10 ** rng.uniform(-2, 2)
        if k % 2:
            z *= (1 + 10 ** rng.uniform(-3, 0)) / np.linalg.norm(z / t)
        z, t = z.astype(dtype), t.astype(dtype)
        y = GroupLasso(1.0).prox_diagonal(z, t)
        if np.linalg.norm(z / t) > 1 + 10 * eps:
            assert np.all((y != 0) | (z == 0) | (np.abs(z) < 1e-30))
            assert optimality(y.astype(float), z.astype(float), t.astype(float)) < 4 * eps * np.sqrt(n) * np.max(
                1 + t / np.linalg.norm(y)
            )
        else:
            assert not y.any()


def test_ladders_of_scales_converge():
    """Every decade takes over in turn: the slowest kind of input for Newton's method."""
    for ratio in (10.0, 100.0, 1000.0):
        t = ratio ** -np.arange(10.0)
        for factor in (0.5, 0.9, 1.0, 2.0):
            z = factor * t
            y = GroupLasso(1.0).prox_diagonal(z, t)
            assert optimality(y, z, t) < 1e-13


def test_small_groups_become_exact_zeros_each_for_itself():
    z = np.array([[0.1, -0.2, 0.1], [2.0, 0.1, 0.0]])
    alpha = np.array([[1.0, 2.0, 1.0], [0.5, 4.0, 1.0]])
    y = GroupLasso.rows(1.0).prox_diagonal(z, alpha)
    np.testing.assert_array_equal(y == 0, [[True, True, True], [False, False, True]])
    y = SparseGroupLasso(0.1, 0.1, dims=(1,)).prox_diagonal(z, alpha)
    np.testing.assert_array_equal(y[1] == 0, [False, True, True])


def test_entries_without_a_step_stay():
    """alpha_i = 0 is the limit of small steps: the entry keeps its value, and its group with it."""
    z, alpha = np.array([0.1, 0.3, 0.0]), np.array([1.0, 0.0, 0.0])
    y = GroupLasso(1.0).prox_diagonal(z, alpha)
    np.testing.assert_allclose(y, GroupLasso(1.0).prox_diagonal(z, np.array([1.0, 1e-14, 1e-14])), atol=1e-12)
    assert y[1] == 0.3
    assert not GroupLasso(1.0).prox_diagonal(np.zeros(3), alpha).any()


def test_extreme_input_raises_no_warning():
    for scale in (1e-30, 1e18, 1e30):
        z = np.array([1.0, -2.0, 3.0], "float32") * np.float32(scale)
        y = GroupLasso(1.0).prox_diagonal(z, np.array([1e-3, 1.0, 1e3], "float32"))
        assert np.all(np.isfinite(y))
    assert GroupLasso(1.0).prox_diagonal(np.zeros((0, 3)), 1.0).shape == (0, 3)
    assert np.all(np.isnan(GroupLasso(1.0).prox_diagonal(np.full(2, np.nan), 1.0)))


# Refusals


@pytest.mark.parametrize("library", [np.asarray, torch.as_tensor, jnp.asarray])
def test_prox_takes_one_number(traceable_case, library):
    phi, drawn = traceable_case.phi, traceable_case.draw(0)
    z = library(drawn)
    alpha = library(np.full((traceable_case.shape[0],) + (1,) * (z.ndim - 1), 0.5))
    name = type(phi).__name__
    hint = r"call prox_diagonal\(z, alpha\)" if phi.has_diagonal_prox else "no exact prox with one step size per entry"
    with pytest.raises(ValueError, match=rf"{name}: alpha must be one number, got shape \(\d, 1.*{hint}"):
        phi.prox(z, alpha)
    with pytest.raises(ValueError, match="alpha must be one number"):
        phi.prox(z, alpha=alpha)
    if not phi.separable and phi.prox_jvp(drawn, drawn, drawn, 0.5) is not None:
        with pytest.raises(ValueError, match="alpha must be one number"):
            phi.prox_jvp(z, z, z, alpha)


def test_a_prox_of_ones_own_is_checked_too():
    class Own(Regularizer):
        def value(self, x):
            return abs(x).sum()

        def prox(self, z, step):
            return z * step

    assert Own().prox(2.0, 3.0) == 6.0
    with pytest.raises(ValueError, match=r"Own: alpha must be one number, got shape \(3,\)"):
        Own().prox(np.ones(3), np.ones(3))
    assert not Own().has_diagonal_prox


@pytest.mark.parametrize("shape", [(5, 4, 3), (5,), (4, 4)])
def test_step_sizes_that_do_not_fit(diagonal_case, shape):
    with pytest.raises(ValueError, match=r"alpha of shape \(.*\) does not broadcast to z of shape \(.*give one"):
        diagonal_case.phi.prox_diagonal(np.ones((4, 3)), np.ones(shape))


def test_derivatives_of_separable_ones_take_step_sizes(diagonal_case):
    phi = diagonal_case.phi
    if not phi.separable:
        return
    z, v, alpha = diagonal_case.draw(0, 2.0), diagonal_case.draw(1), step_sizes(diagonal_case.shape, 2)
    y, h = phi.prox_diagonal(z, alpha), 1e-7
    numeric = (phi.prox_diagonal(z + h * v, alpha) - phi.prox_diagonal(z - h * v, alpha)) / (2 * h)
    np.testing.assert_allclose(phi.prox_jvp(z, y, v, alpha), numeric, atol=1e-6)


class CountOperations(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("phi", [GroupLasso.rows(0.7), SparseGroupLasso(0.2, 0.7, dims=(1,))], ids=repr)
def test_an_iteration_whose_numbers_are_read_ends_early_at_the_same_point(phi, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(group, "threshold_segments", lambda *args: None)
    z, alpha = torch.randn(20, 70, dtype=torch.float64), torch.as_tensor(step_sizes((20, 70), 1))
    points, operations = [], []
    for reads in (nullcontext(), reading_numbers()):
        with CountOperations() as counted, reads:
            points.append(phi.prox_diagonal(z, alpha))
        operations.append(counted.total)
    torch.testing.assert_close(*points, rtol=1e-13, atol=0)
    assert operations[1] < operations[0] / (10 if compiled else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "dims"), [((67, 5), (1,)), ((5, 67), (0,)), ((131,), None), ((6, 5, 3, 3), (0, -2))])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_compiled_rows_are_those_of_double_precision(shape, dims, spread, dtype):
    rng = np.random.default_rng(0)
    z = torch.as_tensor(rng.standard_normal(shape) * step_sizes(shape, 2, spread)).to(dtype)
    alpha = torch.as_tensor(step_sizes(shape, 3, spread)).to(dtype)
    alpha[torch.as_tensor(rng.random(shape)) < 0.1] = 0  # entries without a penalty keep their group
    zeros = []
    for lam in (0.01, 0.5, 30.0):
        phi = GroupLasso(lam, dims)
        exact = phi.prox_diagonal(z.double(), alpha.double())
        with reading_numbers():
            found = phi.prox_diagonal(z, alpha)
        assert (found.dtype, found.shape) == (z.dtype, z.shape)
        # Quotients, their squares and the root have a few roundings each.
        torch.testing.assert_close(found.double(), exact, rtol=100 * torch.finfo(dtype).eps, atol=1e-30)
        zeros.append(int((found == 0).sum()))
    assert zeros[0] <= zeros[-1]


def test_groups_of_zeros_and_groups_below_their_threshold_are_zero_in_compiled_rows():
    z = torch.tensor([[0.0, 0.0], [0.3, -0.4], [3.0, 4.0]])
    with reading_numbers():
        y = GroupLasso.rows(1.0).prox_diagonal(z, torch.ones(3, 2))
    torch.testing.assert_close(y, torch.tensor([[0.0, 0.0], [0.0, 0.0], [2.4, 3.2]]))
    assert (y[:2] == 0).all()
