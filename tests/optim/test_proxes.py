"""Blocks of which only the prox is known: tensors of one shape in one call take the step of one call for each."""

from __future__ import annotations

import pytest
import torch

from proxsps.optim import ProxSGD, ProxSPS
from proxsps.regularizers import L1Ball, NuclearNorm, Simplex, SparseGroupLasso

REGULARISERS = {
    "NuclearNorm": NuclearNorm(0.4),
    "SparseGroupLasso": SparseGroupLasso(0.1, 0.3, dims=(1,)),
    "SparseGroupLasso, all": SparseGroupLasso(0.1, 0.3, scale_by_size=True),
    "L1Ball": L1Ball(2.0),
    "L1Ball, joint": L1Ball(2.0, joint=True),
    "Simplex": Simplex(1.5),
}
SHAPES = [(4, 3), (5, 2), (4, 3), (2, 3, 2), (4, 3)]
PATHS = {"host": {}, "capturable": {"capturable": True}}


def stepped(kit, phi, dtype, path, cls=ProxSPS, loss=1.0):
    params = kit.drawn(*SHAPES, dtype=dtype)
    opt = cls(params, lr=0.4, regularizer=phi, **PATHS[path])
    for _ in range(2):
        opt.step(loss=loss)
    return kit.flat(params), opt.last_step


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REGULARISERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_call_for_equal_shapes_takes_the_same_step(kit, monkeypatch, name, dtype, path):
    phi = REGULARISERS[name]
    together, report = stepped(kit, phi, dtype, path)
    monkeypatch.setattr(type(phi), "batches", False)
    apart, other = stepped(kit, phi, dtype, path)
    tolerance = (
        1e-6 if dtype is torch.float64 else 20 * torch.finfo(dtype).eps ** (0.5 if dtype is torch.float32 else 1)
    )
    torch.testing.assert_close(together, apart, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(report.u, other.u, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", REGULARISERS)
def test_the_proximal_gradient_step_is_the_same_to_the_last_digits(kit, monkeypatch, name, path):
    phi = REGULARISERS[name]
    together, _ = stepped(kit, phi, torch.float64, path, ProxSGD)
    monkeypatch.setattr(type(phi), "batches", False)
    apart, _ = stepped(kit, phi, torch.float64, path, ProxSGD)
    torch.testing.assert_close(together, apart, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", REGULARISERS)
def test_equal_shapes_share_a_call(kit, monkeypatch, name):
    phi, calls = REGULARISERS[name], []
    prox = type(phi).prox
    monkeypatch.setattr(type(phi), "prox", lambda self, z, alpha: calls.append(z.shape) or prox(self, z, alpha))
    ProxSGD(kit.drawn(*SHAPES), lr=0.4, regularizer=phi).step()
    shapes = 1 if phi.joint else len(set(SHAPES))
    assert len(calls) % shapes == 0
    assert len(calls) // shapes <= 2  # the search's own evaluation, and that of the write


def test_tensors_with_a_regulariser_of_their_own_stay_apart(kit):
    class Own(NuclearNorm):
        def at(self, index):
            return NuclearNorm(0.1 * (index + 1))

    params = kit.drawn((3, 3), (3, 3))
    want = [NuclearNorm(0.1 * (i + 1)).prox(p.detach() - 0.5 * p.grad, 0.5) for i, p in enumerate(params)]
    ProxSGD(params, lr=0.5, regularizer=Own(0.1)).step()
    for p, y in zip(params, want, strict=True):
        torch.testing.assert_close(p.detach(), y, rtol=1e-13, atol=1e-13)
