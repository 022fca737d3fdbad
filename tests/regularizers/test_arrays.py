"""One formula for every array library: dtype, shape, exact zeros, tracing, and no traffic with the host."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from reads import Reads

from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso, L2Ball, NuclearNorm, SparseGroupLasso

NUMPY = [np.float32, np.float64]
TORCH = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALPHAS = [0.7, 1, np.float64(0.7), np.float32(0.7), np.asarray(0.7)]


def in_dtype(phi, dtype):
    """The same regulariser, its centre as a torch tensor."""
    return (
        L2(phi.lam, torch.as_tensor(phi.center, dtype=dtype)) if isinstance(phi, L2) and phi.center is not None else phi
    )


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("alpha", ALPHAS, ids=lambda a: f"{type(a).__name__}-{a}")
def test_numpy_keeps_dtype_and_shape(case, dtype, alpha):
    z = case.draw(0).astype(dtype)
    before = z.copy()
    y = case.phi.prox(z, alpha)
    assert (y.dtype, y.shape) == (z.dtype, z.shape)
    assert case.phi.value(z).dtype == dtype
    assert case.phi.value(z).shape == ()
    np.testing.assert_array_equal(z, before)
    if not isinstance(alpha, np.float32):
        # The library of alpha must not change the precision of the calculation.
        np.testing.assert_array_equal(y, case.phi.prox(z, float(alpha)))
    jvp = case.phi.prox_jvp(z, y, z, alpha)
    assert jvp is None or (jvp.dtype, jvp.shape) == (z.dtype, z.shape)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize(
    "alpha", [0.7, torch.tensor(0.7), torch.tensor(0.7, dtype=torch.float64)], ids=["float", "f32", "f64"]
)
def test_torch_keeps_dtype_and_agrees_with_numpy(case, dtype, alpha):
    phi = in_dtype(case.phi, dtype)
    z = torch.as_tensor(case.draw(0)).to(dtype)
    before = z.clone()
    y = phi.prox(z, alpha)
    assert isinstance(y, torch.Tensor)
    assert (y.dtype, y.shape) == (z.dtype, z.shape)
    assert torch.equal(z, before)
    exact = case.phi.prox(z.double().numpy(), 0.7)
    # 16-bit tensors are calculated in float32 and rounded once; the centre is given in the tensor's dtype.
    eps = (
        torch.finfo(dtype).eps
        if dtype.itemsize == 2
        else 40 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    )
    np.testing.assert_allclose(y.double().numpy(), exact, rtol=2 * eps, atol=2 * eps)
    value = phi.value(z)
    assert value.shape == ()
    assert value.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    jvp = phi.prox_jvp(z, y, z, alpha)
    assert jvp is None or (jvp.dtype, jvp.shape) == (z.dtype, z.shape)


def test_jax_keeps_dtype_and_agrees_with_numpy(traceable_case):
    """Compiled, with a traced step, in one program for two dtypes."""
    jax = pytest.importorskip("jax")
    phi = traceable_case.phi
    zs = [jax.numpy.asarray(traceable_case.draw(0), dtype) for dtype in ("bfloat16", "float32")]

    def calculate(z, alpha):
        y = phi.prox(z, alpha)
        slope = phi.subgradient(z) if traceable_case.finite else None
        return y, phi.value(z), phi.prox_jvp(z, y, z, alpha), slope

    results = jax.jit(lambda zs, alpha: [calculate(z, alpha) for z in zs])(zs, 0.7)
    for z, (y, value, jvp, slope) in zip(zs, results, strict=True):
        exact = np.asarray(z, np.float64)
        eps = float(jax.numpy.finfo(z.dtype).eps) * (1 if z.dtype.itemsize == 2 else 40)
        for got, expected in ((y, phi.prox(exact, 0.7)), (slope, slope is not None and phi.subgradient(exact))):
            if got is not None:
                assert (got.dtype, got.shape) == (z.dtype, z.shape)
                np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2 * eps, atol=2 * eps)
        np.testing.assert_allclose(value, phi.value(exact), rtol=1e-5)
        assert (value.dtype, value.shape) == (np.float32, ())
        assert jvp is None or (jvp.dtype, jvp.shape) == (z.dtype, z.shape)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_projections_are_feasible_in_every_precision(set_case, dtype, scale):
    for seed in range(5):
        y = set_case.phi.prox(torch.as_tensor(set_case.draw(seed, scale)).to(dtype), 1.0)
        assert float(set_case.phi.value(y)) == 0


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_sums_do_not_overflow_in_half_precision(dtype):
    x = torch.full((100_000,), 2.0, dtype=dtype)
    assert float(L1(1.0).value(x)) == 200_000
    assert float(L2Ball(1.0).prox(x, 1.0)[0]) == pytest.approx(100_000**-0.5, rel=torch.finfo(dtype).eps + 1e-6)


def test_subgradient_keeps_dtype_and_shape(finite_case):
    for dtype in TORCH:
        x = torch.as_tensor(finite_case.draw(0)).to(dtype)
        s = in_dtype(finite_case.phi, dtype).subgradient(x)
        assert (s.dtype, s.shape) == (x.dtype, x.shape)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_small_entries_become_exact_zeros(library):
    z = np.array([[0.2, -0.1, 3.0], [0.1, 0.2, -0.1]])
    z = z if library == "numpy" else torch.as_tensor(z)
    zeros = {
        L1(0.3): [[True, True, False], [True, True, True]],
        ElasticNet(0.3, 1.0): [[True, True, False], [True, True, True]],
        GroupLasso.rows(0.3): [[False, False, False], [True, True, True]],
        SparseGroupLasso(0.15, 0.1, dims=(1,)): [[False, True, False], [True, True, True]],
        NuclearNorm(10.0): [[True] * 3] * 2,
    }
    for phi, expected in zeros.items():
        np.testing.assert_array_equal(np.asarray(phi.prox(z, 1.0)) == 0.0, expected)


def test_zero_input_raises_no_warning(case):
    """A zero tensor divides nothing by zero; -0.0 passes."""
    for zero in (np.zeros(case.shape), -np.zeros(case.shape)):
        y = case.phi.prox(zero, 1.0)
        jvp = case.phi.prox_jvp(zero, y, case.draw(0), 1.0)
        assert np.all(np.isfinite(y))
        assert jvp is None or np.all(np.isfinite(jvp))


def test_non_contiguous_input(case):
    z = case.draw(0)
    strided = np.repeat(z, 2, axis=-1)[..., ::2]
    # Sums over strided memory run in another order.
    np.testing.assert_allclose(case.phi.prox(strided, 0.7), case.phi.prox(z, 0.7), rtol=1e-12, atol=1e-14)
    turned = torch.as_tensor(z).movedim(0, -1).contiguous().movedim(-1, 0)
    y = in_dtype(case.phi, torch.float64).prox(turned, 0.7)
    np.testing.assert_allclose(y.numpy(), case.phi.prox(z, 0.7), rtol=1e-12, atol=1e-14)


def test_vmap_over_a_batch(traceable_case):
    phi = in_dtype(traceable_case.phi, torch.float64)
    batch = torch.stack(
        [torch.as_tensor(traceable_case.draw(seed, scale)) for seed, scale in enumerate([0.1, 1.0, 5.0])]
    )
    alpha = torch.tensor([0.3, 0.7, 1.1], dtype=torch.float64)
    ys = torch.func.vmap(phi.prox)(batch, alpha)
    singly = torch.stack([phi.prox(z, a) for z, a in zip(batch, alpha, strict=True)])
    torch.testing.assert_close(ys, singly, rtol=1e-12, atol=1e-13)
    values = torch.func.vmap(phi.value)(ys)
    torch.testing.assert_close(values, torch.stack([phi.value(y) for y in singly]), rtol=1e-12, atol=1e-13)
    jvps = [phi.prox_jvp(z, y, z, a) for z, y, a in zip(batch, singly, alpha, strict=True)]
    if jvps[0] is not None:
        mapped = torch.func.vmap(phi.prox_jvp)(batch, ys, batch, alpha)
        torch.testing.assert_close(mapped, torch.stack(jvps), rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_without_graph_breaks(traceable_case):
    phi = in_dtype(traceable_case.phi, torch.float64)
    z = torch.as_tensor(traceable_case.draw(0))
    torch.compiler.reset()
    compiled = torch.compile(phi.prox, fullgraph=True, backend="eager")
    for alpha in (torch.tensor(0.3, dtype=torch.float64), 0.3, 0.7):
        torch.testing.assert_close(compiled(z, alpha), phi.prox(z, alpha), rtol=1e-12, atol=1e-14)


def test_no_host_syncs(traceable_case):
    phi = in_dtype(traceable_case.phi, torch.float64)
    z, alpha = torch.as_tensor(traceable_case.draw(0)), torch.tensor(0.7)
    with Reads() as counter:
        y = phi.prox(z, alpha)
        phi.value(y)
        phi.prox_jvp(z, y, z, alpha)
        if traceable_case.finite:
            phi.subgradient(z)
    assert counter.seen == []


def test_the_sync_counter_counts():
    x = torch.ones(3)
    with Reads() as counter:
        float(x[0])
        x[x > 2] = 1.0
    assert len(counter.seen) == 2


def test_gradients_flow_through_the_torch_prox(traceable_case):
    """Autograd through the formula agrees with prox_jvp, which is symmetric."""
    phi = in_dtype(traceable_case.phi, torch.float64)
    z = torch.as_tensor(traceable_case.draw(0)).requires_grad_()
    v = torch.as_tensor(traceable_case.draw(1))
    y = phi.prox(z, 0.7)
    jvp = phi.prox_jvp(z.detach(), y.detach(), v, 0.7)
    if jvp is not None:
        (vjp,) = torch.autograd.grad(y, z, v)
        torch.testing.assert_close(vjp, jvp, rtol=1e-10, atol=1e-12)


def test_frozen_equal_hashable_and_copied(case):
    phi = case.phi
    assert phi == copy.deepcopy(phi) == pickle.loads(pickle.dumps(phi))
    assert hash(phi) == hash(copy.deepcopy(phi))
    assert repr(phi).startswith(type(phi).__name__ + "(")
    with pytest.raises(AttributeError):
        phi.new_field = 1


def test_box_with_one_side_open():
    z = np.array([-2.0, 0.0, 2.0])
    np.testing.assert_array_equal(Box(-np.inf, 1.0).prox(z, 1.0), [-2, 0, 1])
    np.testing.assert_array_equal(Box(-1.0, np.inf).prox(z, 1.0), [-1, 0, 2])
    assert float(Box(-1.0, np.inf).value(z)) == np.inf
