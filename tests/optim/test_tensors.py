"""Tensors that are more than memory: lazy signs, wrappers without storage, zeros that are not stored."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.testing._internal.two_tensor import TwoTensor

from proxsps.optim import ProxSPS
from proxsps.optim.blocks import plain
from proxsps.optim.device import searched
from proxsps.optim.vectors import host
from proxsps.regularizers import L1, Box, GroupLasso

PATHS = {"default": {}, "torch": {"fused": False}, "capturable": {"capturable": True}}
OPTIONS = {
    "none": {},
    "weight decay": {"weight_decay": 0.1},
    "L1": {"regularizer": L1(0.05)},
    "max_move": {"weight_decay": 0.1, "max_move": 0.3},
}
SHAPES = [(67,), (3, 43), (16,)]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def summed(grad):
    """The gradient as functional collectives return it: a wrapper that waits when it is read."""
    out = all_reduce(grad, "sum", dist.group.WORLD)
    assert isinstance(out, AsyncCollectiveTensor)
    return out


class Named(torch.Tensor):
    """A subclass whose operations are those of torch."""


GRADIENTS = {
    "negative bit": lambda g: torch._neg_view(-g),
    "zero that is not stored": lambda g: torch._efficientzerotensor(g.shape),
    "functional collective": summed,
    "two tensors": lambda g: TwoTensor(g, g.clone()),
    "subclass": lambda g: g.as_subclass(Named),
}


def close(got, want, searched=False):
    # The sums are added up in another order; a search stops at the square root of what it can see.
    tolerance = EPS**0.5 if searched else 256 * EPS
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_step_with_such_gradients_is_that_with_their_values(case, kit, kind, options, path):
    params, twins = (kit.drawn(*SHAPES, dtype=torch.float32) for _ in range(2))
    for p, q in zip(params[:2], twins, strict=False):  # the last one stays as it is
        p.grad = GRADIENTS[kind](p.grad)
        q.grad = torch.zeros_like(q) if kind.startswith("zero") else q.grad
    held = [p.grad for p in params]
    for group in (params, twins):
        opt = case.make(group, **OPTIONS[options], **PATHS[path])
        opt.step(loss=7.0)
    close(kit.flat(params), kit.flat(twins), searched=options == "L1")
    assert all(p.grad is g for p, g in zip(params, held, strict=True))  # the caller's gradients are left alone


@pytest.mark.parametrize("kind", ["zero that is not stored", "two tensors"])
def test_fused_is_refused_where_there_is_no_memory(kit, kind):
    pytest.importorskip("numba")
    (x,) = kit.drawn((67,), dtype=torch.float32)
    x.grad = GRADIENTS[kind](x.grad)
    with pytest.raises(RuntimeError, match="fused=True needs numba"):
        ProxSPS([x], fused=True).step(loss=1.0)


def test_fused_takes_lazy_signs_subclasses_and_empty_tensors(kit):
    pytest.importorskip("numba")
    params = kit.drawn((67,), (67,), (0,), (3, 0), dtype=torch.float32)
    twins = [kit.copied(p) for p in params]
    params[0].grad, params[1].grad = (
        GRADIENTS[kind](params[i].grad) for i, kind in enumerate(["negative bit", "subclass"])
    )
    for group in (params, twins):
        ProxSPS(group, fused=True).step(loss=1.0)
    assert torch.equal(kit.flat(params), kit.flat(twins))


def test_only_classes_with_operations_of_their_own_are_not_plain():
    x = torch.ones(3)
    assert plain([x, torch.nn.Parameter(x)], [GRADIENTS["subclass"](x)])
    assert not plain([x], [TwoTensor(x, x)])


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_wrapped_parameter_learns(case, options, path):
    torch.manual_seed(0)
    start, A = torch.randn(67), torch.randn(80, 67)
    wrapped, bare = torch.nn.Parameter(TwoTensor(start.clone(), start.clone())), torch.nn.Parameter(start.clone())
    for w in (wrapped, bare):
        other = torch.nn.Parameter(torch.ones(64))
        lr = {} if case.lr is None else {"lr": 0.1}
        opt = case.make([w, other], **lr, **OPTIONS[options], **PATHS[path])
        for _ in range(2):
            opt.zero_grad()
            loss = opt.watch((A @ w - 1).square().mean() + other.square().sum())
            loss.backward()
            opt.step()
    close(wrapped.a, bare.detach(), searched=options == "L1")
    close(wrapped.b, bare.detach(), searched=options == "L1")
    assert isinstance(wrapped, TwoTensor)
    assert not torch.equal(bare, start)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"regularizer": Box(-0.2, 1.0)}], ids=str)
def test_a_parameter_with_the_negative_bit_is_stepped_on_by_its_values(prox_case, kit, options, path):
    (p,) = kit.drawn((67,), dtype=torch.float32)
    x = torch.nn.Parameter(torch._neg_view(-p.detach()))
    x.grad = p.grad.clone()
    assert x.is_neg()
    assert torch.equal(x, p)
    for q in (x, p):
        prox_case.make([q], **options, **PATHS[path]).step(loss=7.0)
    assert x.is_neg()
    close(x.detach(), p.detach(), searched="regularizer" in options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"max_move": 0.1}], ids=str)
@pytest.mark.parametrize("lazy", ["gradient", "parameter", "both"])
def test_conjugations_are_written_out(case, lazy, options, path):
    generator = torch.Generator().manual_seed(0)
    start, target = (torch.randn(67, generator=generator, dtype=torch.complex64) for _ in range(2))
    x = torch.nn.Parameter(start.clone() if lazy == "gradient" else start.conj().clone().conj())
    twin = torch.nn.Parameter(start.clone())
    assert x.is_conj() == (lazy != "gradient")
    # Autograd leaves the conjugate bit on the gradient of a conjugated parameter.
    for q in (x, twin):
        ((q.conj() if lazy != "parameter" else q) * target).sum().abs().backward()
    assert x.grad.is_conj() == (lazy != "parameter")
    twin.grad = twin.grad.resolve_conj()
    for q in (x, twin):
        case.make([q], **options, **PATHS[path]).step(loss=7.0)
    close(x.detach().resolve_conj(), twin.detach())
    assert x.is_conj() == (lazy != "gradient")
    assert not torch.equal(twin, start)


@pytest.mark.parametrize("path", ["default", "torch"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_inside_functionalize(case, kit, options, path):
    (p,) = kit.drawn((67,), dtype=torch.float32)
    twin = kit.copied(p)

    def step(x, g):
        x.grad = g
        case.make([x], **OPTIONS[options], **PATHS[path]).step(loss=7.0)
        return x.clone()

    out = torch.func.functionalize(step)(p.detach().clone(), p.grad)
    case.make([twin], **OPTIONS[options], **PATHS[path]).step(loss=7.0)
    close(out, twin.detach(), searched=options == "L1")


LONG = {
    "transposed": lambda draw: draw(40, 60).T,
    "transposed, few rows": lambda draw: draw(1007, 2).T,
    "channels last": lambda draw: draw(16, 20, 3, 3).to(memory_format=torch.channels_last),
    "every other entry": lambda draw: draw(2002)[::2],
}


@pytest.mark.parametrize("phi", [None, L1(0.05), Box(-1.0, 1.0), GroupLasso(0.05, 0)], ids=repr)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("order", LONG)
def test_long_tensors_in_any_memory_order_are_stepped_on(monkeypatch, order, path, phi):
    for module, name in ((host, "PIECE"), (host, "SLICE"), (searched, "ROOM")):
        monkeypatch.setattr(module, name, 100)  # so that these tensors are too long for one piece
    moves = []
    for in_order in (False, True):
        generator = torch.Generator().manual_seed(0)
        x, g = (LONG[order](lambda *shape, of=generator: torch.randn(shape, generator=of)) for _ in range(2))
        assert not x.is_contiguous()
        p = torch.nn.Parameter(x.contiguous() if in_order else x)
        p.grad = g.contiguous() if in_order else g
        before = p.detach().clone()
        opt = ProxSPS([p], lr=0.1, regularizer=phi, **PATHS[path])
        opt.step(loss=torch.tensor(0.01 * x.numel()))
        assert opt.last_step.branch_name == "inside"
        moves.append(p.detach() - before)
    assert moves[1].abs().max() > 1e-3
    close(*moves, searched=phi is not None)
