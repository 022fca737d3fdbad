"""The regulariser of units against cvxpy, finite differences and the group lasso of rows, in three array libraries."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import cvxpy as cp
import numpy as np
import pytest
import torch
from reads import Reads
from torch import nn

from proxsps import SPS, GroupLasso, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.regularizers import flatten, prox_all, value_all
from proxsps.regularizers._support import reading_numbers
from proxsps.regularizers.units import UnitLasso, UnitTensor


def random_structure(seed: int) -> UnitLasso:
    """Units of very different numbers of slices, cut along any dim, with slices that have no unit."""
    rng = np.random.default_rng(seed)
    units = int(rng.integers(1, 7))
    shapes = [tuple(rng.integers(1, 6, rng.integers(1, 4))) for _ in range(rng.integers(1, 5))]
    tensors = []
    for shape in shapes:
        dim = int(rng.integers(len(shape)))
        tensors.append(UnitTensor(shape, dim, rng.integers(-1, units, shape[dim])))
    tensors.append(UnitTensor((units, 2), 0, rng.permutation(units)))  # each unit has an entry
    weights = None if seed % 2 else rng.uniform(0, 2, units)
    return UnitLasso(float(rng.uniform(0.1, 1.0)), tuple(tensors), weights)


def draw(phi: UnitLasso, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1000 + seed)
    return [rng.standard_normal(tensor.shape) for tensor in phi.tensors]


def entry_owners(phi: UnitLasso) -> np.ndarray:
    """The unit of each entry of the joint vector, written down independently of the package's index arrays."""
    owners = []
    for tensor in phi.tensors:
        index = np.indices(tensor.shape)[tensor.dim]
        owners.append(tensor.ids[index].ravel())
    return np.concatenate(owners)


@pytest.mark.parametrize("seed", range(12))
def test_prox_is_the_minimiser_that_cvxpy_finds(seed):
    phi = random_structure(seed)
    z = flatten(draw(phi, seed))
    alpha, owners = 0.8, entry_owners(phi)
    y = cp.Variable(len(z))
    penalty = sum(w * cp.norm(y[np.flatnonzero(owners == unit)], 2) for unit, w in enumerate(phi.weights))
    problem = cp.Problem(cp.Minimize(phi.lam * penalty + cp.sum_squares(y - z) / (2 * alpha)))
    problem.solve(solver=cp.CLARABEL)
    found = phi.prox(z, alpha)
    np.testing.assert_allclose(found, y.value, atol=2e-4)
    objective = float(phi.value(found)) + np.sum((found - z) ** 2) / (2 * alpha)
    assert objective <= problem.value + 1e-7
    np.testing.assert_array_equal(found[owners < 0], z[owners < 0])


def test_structures_of_the_test_above_have_zero_units_and_live_ones():
    zero, live = 0, 0
    for seed in range(12):
        phi = random_structure(seed)
        y = phi.prox(flatten(draw(phi, seed)), 0.8)
        norms = phi.norms(y)
        zero, live = zero + int((norms == 0).sum()), live + int((norms > 0).sum())
    assert zero >= 5
    assert live >= 5


# One step size per entry, as in Adam's metric


def step_sizes(phi: UnitLasso, seed: int, spread: float = 0.5) -> np.ndarray:
    return 10 ** np.random.default_rng(seed).uniform(-spread, spread, len(entry_owners(phi)))


@pytest.mark.parametrize("seed", range(12))
def test_prox_in_a_metric_is_the_minimiser_that_cvxpy_finds(seed):
    phi = random_structure(seed)
    z, owners, alpha = flatten(draw(phi, seed)), entry_owners(phi), step_sizes(phi, seed)
    y = cp.Variable(len(z))
    penalty = sum(w * cp.norm(y[np.flatnonzero(owners == unit)], 2) for unit, w in enumerate(phi.weights))
    distance = cp.sum_squares(cp.multiply((2 * alpha) ** -0.5, y - z))
    cp.Problem(cp.Minimize(phi.lam * penalty + distance)).solve(solver=cp.CLARABEL)
    with reading_numbers():
        compiled = phi.prox_diagonal(z, alpha)
    for found in (phi.prox_diagonal(z, alpha), compiled):
        np.testing.assert_allclose(found, y.value, atol=2e-4)
        np.testing.assert_array_equal(found[owners < 0], z[owners < 0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_prox_in_a_metric_fulfils_its_optimality_condition(seed, dtype):
    """y_i (1 + t_i / ||y_g||) = z_i in live units, ||z_g / t_g|| <= 1 in dead ones; compiled or not."""
    phi = random_structure(seed)
    z, alpha = (torch.as_tensor(a).to(dtype) for a in (flatten(draw(phi, seed)), step_sizes(phi, seed, 2.0)))
    owners, limit = entry_owners(phi), 100 * torch.finfo(dtype).eps
    with reading_numbers():
        compiled = phi.prox_diagonal(z, alpha)
    for y in (phi.prox_diagonal(z, alpha), compiled):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        for unit, weight in enumerate(phi.weights):
            own = np.flatnonzero(owners == unit)
            point, start, t = y[own].double(), z[own].double(), phi.lam * weight * alpha[own].double()
            if point.any():
                assert (point * (1 + t / point.norm()) - start).abs().max() <= limit * start.abs().max()
            else:
                assert (start / t).norm() <= 1 + limit


def test_one_number_for_all_entries_is_the_prox():
    for seed in range(6):
        phi = random_structure(seed)
        z = flatten(draw(phi, seed))
        for alpha in (0.4, np.full(len(z), 0.4)):
            np.testing.assert_allclose(phi.prox_diagonal(z, alpha), phi.prox(z, 0.4), rtol=1e-13, atol=1e-15)
    phi = UnitLasso(0.7, (UnitTensor((6, 5), 0, np.arange(6)),))
    z, alpha = np.random.default_rng(0).standard_normal(30), step_sizes(phi, 1)
    rows = GroupLasso.rows(0.7, scale_by_size=True).prox_diagonal(z.reshape(6, 5), alpha.reshape(6, 5))
    np.testing.assert_allclose(phi.prox_diagonal(z, alpha), rows.ravel(), rtol=1e-13)


def test_a_tensor_without_entries_changes_nothing():
    phi, z = UnitLasso(0.7, (UnitTensor((3, 2), 0, [0, 1, 2]),)), np.arange(6.0)
    wider = UnitLasso(0.7, (*phi.tensors, UnitTensor((3, 0), 0, [0, 1, 2])))
    alpha = step_sizes(phi, 0)
    np.testing.assert_array_equal(wider.prox_diagonal(z, alpha), phi.prox_diagonal(z, alpha))


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fused", [None, False])
def test_a_step_of_adam_is_the_prox_in_its_metric(fused, capturable):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 13, dtype=torch.float64)), nn.Parameter(torch.randn(6, dtype=torch.float64))]
    phi = UnitLasso(5.0, tuple(UnitTensor(p.shape, 0, [0, 1, 2, 2, -1, 3]) for p in params))
    opt = ProxSPSAdam(params, lr=0.2, regularizer=phi, fused=fused, capturable=capturable)
    for p in params:
        p.grad = torch.randn_like(p)
    before = [p.detach().clone() for p in params]
    opt.step(loss=1e4)
    assert opt.last_step.branch_name == "capped"
    # At the first step d = g and v = g^2, so that D = |g| + eps.
    inverse = flatten([1 / (p.grad.abs() + 1e-8) for p in params])
    z = flatten(before) - 0.2 * flatten([p.grad for p in params]) * inverse
    expected = phi.prox_diagonal(z, 0.2 * inverse)
    torch.testing.assert_close(flatten([p.detach() for p in params]), expected, rtol=1e-10, atol=1e-12)
    assert (phi.norms(expected) == 0).any()
    assert (phi.norms(expected) > 0).any()


@pytest.mark.parametrize("seed", range(6))
def test_derivative_is_that_of_finite_differences(seed):
    phi = random_structure(seed)
    z, v = flatten(draw(phi, seed)), flatten(draw(phi, seed + 50))
    step = 1e-6
    numeric = (phi.prox(z + step * v, 0.3) - phi.prox(z - step * v, 0.3)) / (2 * step)
    np.testing.assert_allclose(phi.prox_jvp(z, phi.prox(z, 0.3), v, 0.3), numeric, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_subgradient_is_the_gradient_where_no_unit_is_zero(seed):
    phi = random_structure(seed)
    x, v = flatten(draw(phi, seed)), flatten(draw(phi, seed + 50))
    numeric = (phi.value(x + 1e-6 * v) - phi.value(x - 1e-6 * v)) / 2e-6
    assert float(phi.subgradient(x) @ v) == pytest.approx(float(numeric), abs=1e-7)
    assert not phi.subgradient(0 * x).any()


def test_rows_of_one_matrix_are_the_group_lasso():
    z = np.random.default_rng(0).standard_normal((6, 5))
    phi = UnitLasso(0.7, (UnitTensor((6, 5), 0, np.arange(6)),))
    rows = GroupLasso.rows(0.7, scale_by_size=True)
    np.testing.assert_allclose(prox_all(phi, [z], 0.5)[0], rows.prox(z, 0.5), rtol=1e-14)
    assert float(value_all(phi, [z])) == pytest.approx(float(rows.value(z)))
    assert (prox_all(phi, [z], 5.0)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_torch_agrees_with_numpy(dtype):
    phi = random_structure(3)
    xs = [torch.as_tensor(x).to(dtype) for x in draw(phi, 3)]
    before = [x.clone() for x in xs]
    exact = prox_all(phi, [x.double().numpy() for x in xs], 0.4)
    found = prox_all(phi, xs, torch.tensor(0.4, dtype=torch.float64))
    eps = torch.finfo(dtype).eps
    for x, y, z, kept in zip(xs, found, exact, before, strict=True):
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert torch.equal(x, kept)
        np.testing.assert_allclose(y.double().numpy(), z, rtol=4 * eps, atol=4 * eps)
    assert value_all(phi, xs).dtype == (torch.float32 if dtype is torch.bfloat16 else dtype)


def test_jax_compiles_it_with_the_regulariser_as_a_static_argument():
    jax = pytest.importorskip("jax")
    traces = []

    def calculate(phi, z, v, alpha):
        traces.append(phi)
        y = phi.prox(z, alpha)
        diagonal = phi.prox_diagonal(z, alpha * (1 + v**2))
        return y, phi.value(z), phi.prox_jvp(z, y, v, alpha), phi.subgradient(z), diagonal

    compiled = jax.jit(calculate, static_argnums=0)
    for phi in (random_structure(3), random_structure(3), random_structure(4)):
        z, v = (flatten(draw(phi, seed)) for seed in (3, 4))
        y = phi.prox(z, 0.4)
        exact = y, phi.value(z), phi.prox_jvp(z, y, v, 0.4), phi.subgradient(z), phi.prox_diagonal(z, 0.4 * (1 + v**2))
        found = compiled(phi, jax.numpy.asarray(z, "float32"), jax.numpy.asarray(v, "float32"), 0.4)
        for got, expected in zip(found, exact, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)
    assert len(traces) == 2  # equal regularisers share a program, different ones do not


def test_identity_covers_every_part():
    phi = random_structure(2)
    same = UnitLasso(phi.lam, tuple(UnitTensor(t.shape, t.dim, t.ids.copy()) for t in phi.tensors), phi.weights.copy())
    assert (phi, hash(phi), repr(phi)) == (same, hash(same), repr(same))
    moved = [*phi.tensors]
    moved[-1] = UnitTensor(moved[-1].shape, 0, np.roll(moved[-1].ids, 1))
    doubled = dataclasses.replace(phi, weights=2 * phi.weights)
    for other in (dataclasses.replace(phi, lam=2 * phi.lam), UnitLasso(phi.lam, tuple(moved), phi.weights), doubled):
        assert other != phi
        assert repr(other) != repr(phi)
    for copied in (copy.deepcopy(phi), pickle.loads(pickle.dumps(phi))):
        assert copied == phi
        np.testing.assert_array_equal(copied.weights, phi.weights)
    assert phi != 3
    with pytest.raises(ValueError, match="read-only"):
        phi.weights[0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        phi.tensors[0].ids[0] = 1


def test_overlapping_groups_are_refused():
    shapes = [(4, 3), (4,)]
    fine = [[(0, 0, 0), (1, 0, 0)], [(0, 0, 1), (0, 0, 2), (1, 0, 3)]]
    phi = UnitLasso.from_units(0.1, shapes, fine)
    np.testing.assert_array_equal(phi.sizes, [4, 7])
    np.testing.assert_array_equal(phi.tensors[0].ids, [0, 1, 1, -1])
    with pytest.raises(ValueError, match=r"slice 0 along dim 0 of tensor 1 is in unit 1 and shares .* with unit 0"):
        UnitLasso.from_units(0.1, shapes, [fine[0], [(0, 0, 1), (1, 0, 0)]])
    with pytest.raises(ValueError, match=r"overlap.*another dim"):
        UnitLasso.from_units(0.1, shapes, [fine[0], [(0, 1, 2), (1, 0, 1)]])
    with pytest.raises(ValueError, match=r"tensors \[1\] have no unit"):
        UnitLasso.from_units(0.1, shapes, [[(0, 0, 0)]])


@pytest.mark.parametrize("lam", [-1.0, float("inf"), float("nan")])
def test_strength_must_be_a_number(lam):
    with pytest.raises(ValueError, match="lam must be a finite number >= 0"):
        UnitLasso(lam, (UnitTensor((2,), 0, [0, 1]),))


def test_other_errors():
    with pytest.raises(ValueError, match="dim=2 is not a dim"):
        UnitTensor((2, 3), 2, [0, 1])
    with pytest.raises(ValueError, match="ids must be 3 integers"):
        UnitTensor((2, 3), 1, [0, 1])
    with pytest.raises(ValueError, match="ids must be 2 integers"):
        UnitTensor((2,), 0, [0.0, 1.0])
    with pytest.raises(ValueError, match=r"without gaps, but \[0, 2\] have no entry"):
        UnitLasso(0.1, (UnitTensor((2,), 0, [1, 3]),))
    with pytest.raises(ValueError, match="weights must be 2 finite numbers"):
        UnitLasso(0.1, (UnitTensor((2,), 0, [0, 1]),), np.array([1.0, np.inf]))
    phi = UnitLasso(0.1, (UnitTensor((2, 3), 0, [0, 1]), UnitTensor((2,), 0, [0, 1])))
    with pytest.raises(ValueError, match="have 8 entries, got an array of shape"):
        phi.prox(np.zeros(6), 1.0)
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"tensor 0 of the group must have shape \(2, 3\), got \(2,\)"):
        ProxSPS([layer.bias, layer.weight], regularizer=phi)


@pytest.mark.parametrize("kind", [ProxSPS, ProxSGD, SPS])
def test_optimizers_take_it(kind):
    """In a step at the cap, ProxSPS is prox(x - alpha g): the units' rows of two layers die together."""
    torch.manual_seed(0)
    one, two = nn.Linear(3, 4).double(), nn.Linear(5, 4).double()
    params = [one.weight, one.bias, two.weight, two.bias]
    phi = UnitLasso(0.3, tuple(UnitTensor(p.shape, 0, np.arange(4)) for p in params))
    opt = kind(params, lr=0.5, regularizer=phi)
    loss = 100 + sum((p - 0.1).square().sum() for p in params)
    loss.backward()
    before = [p.detach().clone() for p in params]
    opt.step(loss=loss)
    if kind is SPS:
        assert any(not torch.equal(p, b) for p, b in zip(params, before, strict=True))
        return
    expected = prox_all(phi, [b - 0.5 * p.grad for p, b in zip(params, before, strict=True)], 0.5)
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e)
    dead = (torch.cat([p.detach().reshape(4, -1) for p in params], 1) == 0).all(1)
    assert dead.any()
    assert opt.state_dict()["param_groups"][0]["regularizer"] == repr(phi)


def test_a_step_inside_lands_on_the_lower_bound():
    """Between the cap and zero the step is prox(x - tau g) with the tau at which the linear model reaches the bound."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 3, dtype=torch.float64)), nn.Parameter(torch.randn(6, dtype=torch.float64))]
    phi = UnitLasso(0.05, tuple(UnitTensor(p.shape, 0, np.arange(6)) for p in params))
    opt = ProxSPS(params, lr=2.0, regularizer=phi)
    loss = sum((p - 0.3).square().sum() for p in params)
    loss.backward()
    before = [p.detach().clone() for p in params]
    opt.step(loss=loss)
    last = opt.last_step
    assert last.branch_name == "inside"
    tau = float(last.tau[0])
    expected = prox_all(phi, [b - tau * p.grad for p, b in zip(params, before, strict=True)], 2.0)
    for p, e in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), e)
    model = loss.detach() + sum(((p - b) * p.grad).sum() for p, b in zip(params, before, strict=True))
    assert abs(model.item()) < 1e-9 * loss.item()


def test_a_capturable_step_reads_nothing():
    params = [nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(6))]
    phi = UnitLasso(0.05, tuple(UnitTensor(p.shape, 0, [0, 1, 2, 2, -1, 3]) for p in params))
    opt = ProxSPS(params, regularizer=phi, capturable=True)
    for param in params:
        param.grad = torch.randn_like(param)
    opt.step(loss=1.0)
    with Reads() as reads:
        opt.step(loss=1.0)
    assert reads.seen == []


def test_jax_front_end_takes_it():
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from proxsps.jax import prox_sps

    phi = UnitLasso(0.3, (UnitTensor((4, 3), 0, np.arange(4)), UnitTensor((4,), 0, np.arange(4))))
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((4, 3)).astype("float32"), "b": rng.standard_normal(4).astype("float32")}
    grads = {name: 0.1 * value for name, value in params.items()}
    method = prox_sps(0.5, regularizer=phi)
    update = jax.jit(lambda g, s, p: method.update(g, s, p, value=100.0))
    moves, _ = update(grads, method.init(params), params)
    found = optax.apply_updates(params, moves)
    expected = prox_all(phi, [params[name] - 0.5 * grads[name] for name in params], 0.5)
    for name, e in zip(params, expected, strict=True):
        np.testing.assert_allclose(found[name], e, rtol=1e-5, atol=1e-6)


def test_jax_takes_the_step_of_torch_in_the_metric_of_adam():
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from proxsps.jax import prox_sps_adam

    phi = UnitLasso(0.5, (UnitTensor((4, 17), 0, np.arange(4)), UnitTensor((4,), 0, [0, 1, 2, -1])))
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape).astype("float32") for shape in ((4, 17), (4,))]
    grads = [rng.standard_normal(p.shape).astype("float32") for p in params]
    method = prox_sps_adam(regularizer=phi)
    moves, _ = jax.jit(lambda g, s, p: method.update(g, s, p, value=30.0))(grads, method.init(params), params)
    found = optax.apply_updates(params, moves)
    ours = [nn.Parameter(torch.tensor(p)) for p in params]
    for p, g in zip(ours, grads, strict=True):
        p.grad = torch.tensor(g)
    ProxSPSAdam(ours, regularizer=phi).step(loss=30.0)
    for a, b, start in zip(found, ours, params, strict=True):
        np.testing.assert_allclose(a, b.detach(), rtol=1e-5, atol=1e-6)
        assert np.abs(a - start).max() > 1e-3
