"""torch.compile of a step: one graph, and the same step."""

from __future__ import annotations

import shutil

import pytest
import torch

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.regularizers import L1, L2, GroupLasso

# Dynamo warns of caches in array_api_compat, which it traces through.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
SHAPES = [(4, 3), (7,)]


def check(kit, optimizers, backend, dtype, tolerance, once=True, begun=False):
    """Steps of all optimizers in one graph, compiled `once` or twice, against the same steps without the compiler.

    If they have `begun`, their state exists.
    """
    torch._dynamo.reset()
    plain, traced = ([cls(kit.drawn(*SHAPES, dtype=dtype), **options) for cls, options in optimizers] for _ in range(2))
    for opt in (*plain, *traced) if begun else ():
        opt.step(loss=1.0)

    def step(loss):
        for opt in traced:
            opt.step(loss=loss)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for k, value in enumerate((0.7, 40.0) if once else (0.7, 40.0, 0.5)):
        loss = torch.tensor(value, dtype=dtype)
        for opt in plain:
            opt.step(loss=loss)
        with torch._dynamo.config.patch(error_on_recompile=once or k > 1):
            compiled(loss)
    for one, two in zip(plain, traced, strict=True):
        got, want = (kit.flat([p for group in opt.param_groups for p in group["params"]]) for opt in (two, one))
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        assert one.last_step.branch_name == two.last_step.branch_name


def test_closed_forms(kit):
    limit = {"max_move": 0.1}
    optimizers = [
        (ProxSPS, {"lr": 0.5, "weight_decay": 0.3, **limit}),
        (SPS, {"lr": 0.5, "weight_decay": 0.3, **limit}),
        (ProxSGD, {"lr": 0.05, "regularizer": L1(0.1), **limit}),
    ]
    check(kit, optimizers, "aot_eager", torch.float64, 1e-13)


def test_a_method_with_memory_is_compiled_once_more(kit):
    # DecSPS has nothing to remember at its first step.
    check(kit, [(DecSPS, {"lr": 0.5, "weight_decay": 0.3})], "eager", torch.float64, 1e-13, once=False)


def test_averaged_models_are_compiled_once_more(kit):
    # Their state does not exist at the first step.
    optimizers = [(ProxSPS, {"lr": None, "momentum": 0.9, "weight_decay": 0.3}), (ProxSPSAdam, {"weight_decay": 0.3})]
    check(kit, optimizers, "eager", torch.float64, 1e-13, once=False)


def both_metrics(params, **options):
    return ScheduleFreeSPS([{"params": params[:1], "metric": "spectral"}, {"params": params[1:]}], **options)


def test_the_schedule_free_form_is_compiled_once_more(kit):
    check(kit, [(both_metrics, {"weight_decay": 0.3})], "eager", torch.float64, 1e-13, once=False)


@pytest.mark.parametrize("phi", [L1(0.1), GroupLasso(0.1, 0)], ids=repr)
def test_the_search_for_the_dual_variable(kit, phi):
    # The host stops at a duality gap of 1e-6 of the loss in single precision: points differ by its square root.
    check(kit, [(ProxSPS, {"lr": 0.5, "regularizer": phi})], "eager", torch.float32, 1e-4)


@pytest.mark.parametrize("phi", [L2(0.1), L1(0.1), GroupLasso(0.1, 1)], ids=repr)
def test_many_tensors_are_few_operations_for_the_compiler(phi):
    # Code for each of hundreds of tensors that are copied into one vector takes the default backend minutes.
    sizes = []

    def count(graph, inputs):
        sizes.append(len([node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]))
        return graph.forward

    for tensors in (3, 12):
        torch._dynamo.reset()
        params = [torch.nn.Parameter(torch.ones(5, 2)) for _ in range(tensors)]
        for p in params:
            p.grad = torch.full((5, 2), 0.5)
        opt = ProxSPS(params, lr=0.5, regularizer=phi, capturable=True)
        torch.compile(lambda loss, opt=opt: opt.step(loss=loss), backend=count, fullgraph=True)(torch.tensor(0.7))
        assert all((p < 1).all() for p in params)
    assert sizes[1] - sizes[0] <= 9  # at most one view for each tensor
    assert sizes[1] < 500


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, when the backend is loaded
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
def test_the_default_backend(kit):
    optimizers = [
        (ProxSPS, {"lr": 0.5, "weight_decay": 0.3, "max_move": 0.1}),
        (both_metrics, {"weight_decay": 0.3, "capturable": True}),
    ]
    check(kit, optimizers, "inductor", torch.float64, 1e-13, begun=True)
