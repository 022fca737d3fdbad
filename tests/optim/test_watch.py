"""Which watched losses belong to the gradients: after skipped steps, over micro-batches, cleared in any way."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from reads import Reads
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from proxsps.optim import ProxSPS

SCALE = 2.0**14  # a power of two: scaling up and down again is exact


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(k):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(12, 5, generator=generator)
    return x, x[:, :2].sin()


def points(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def zero_by_hand(model, opt):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


CLEAR = {
    "model, in place": lambda model, opt: model.zero_grad(set_to_none=False),
    "model": lambda model, opt: model.zero_grad(),
    "optimizer, in place": lambda model, opt: opt.zero_grad(set_to_none=False),
    "optimizer": lambda model, opt: opt.zero_grad(),
    "by hand": zero_by_hand,
}


def values(opt):
    return [float(value) for value, _ in opt._watched]


def test_a_loss_that_is_watched_after_backward_is_an_error_that_says_so():
    model = network()
    opt = ProxSPS(model.parameters())
    for _ in range(2):
        loss = model(batch(0)[0]).square().mean()
        loss.backward()
        opt.watch(loss)
        with pytest.raises(
            ValueError, match=r"watched, but backward\(\) has not run.*watch\(loss\) before loss\.backward"
        ):
            opt.step()
        opt.zero_grad()
    opt.watch(model(batch(0)[0]).square().mean()).backward()
    opt.step()
    with pytest.raises(ValueError, match="needs the loss value"):
        opt.step()


@pytest.mark.parametrize("place", ["before watch", "after watch", "after step"])
@pytest.mark.parametrize("clear", CLEAR)
def test_the_loss_of_a_step_that_a_scaler_skips_is_forgotten(case, clear, place):
    model, twin = network(), network()
    opt, other = case.make(model.parameters()), case.make(twin.parameters())
    scaler = GradScaler("cpu", init_scale=SCALE)
    for k in range(4):
        x, y = batch(k)
        if place == "before watch":
            CLEAR[clear](model, opt)
        loss = opt.watch(mse_loss(model(x), y) * (1000.0 if k == 1 else 1.0))
        if place == "after watch":
            CLEAR[clear](model, opt)
        scaler.scale(loss * (math.inf if k == 1 else 1.0)).backward()
        scaler.step(opt)
        scaler.update()
        if place == "after step":
            CLEAR[clear](model, opt)
        if k != 1:
            other.zero_grad()
            loss = mse_loss(twin(x), y)
            loss.backward()
            other.step(loss=loss)
            assert float(opt.last_step.gap) == float(other.last_step.gap)
        assert torch.equal(points(model), points(twin))
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("clear", CLEAR)
def test_micro_batches_after_a_skipped_step_are_one_batch(case, clear, unscaled):
    model, twin = network(), network()
    opt, other = case.make(model.parameters()), case.make(twin.parameters())
    scaler = GradScaler("cpu", init_scale=SCALE)
    for k in range(3):
        x, y = batch(k)
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            loss = opt.watch(mse_loss(model(xs), ys) * (1000.0 if k == 1 else 1.0), weight=4)
            scaler.scale(loss * (math.inf if k == 1 else 1.0) / 3).backward()
        assert len(opt._watched) == 3
        if unscaled:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        CLEAR[clear](model, opt)
        if k != 1:
            other.zero_grad()
            loss = mse_loss(twin(x), y)
            loss.backward()
            other.step(loss=loss)
        torch.testing.assert_close(points(model), points(twin), rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", ["none", "zeros"])
def test_a_micro_batch_whose_gradient_is_zero_counts(case, start):
    w = torch.nn.Parameter(torch.full((6,), 0.5))
    opt = case.make([w])
    if start == "zeros":
        w.grad = torch.zeros(6)
    for target in (0.5, 1.0, 1.5):  # at the first one w is a solution
        opt.watch((w - target).square().mean()).backward()
    assert values(opt) == [0.0, 0.25, 1.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.grad.mul_(0.5),
        lambda w: torch.nn.utils.clip_grad_norm_([w], 0.1),
        lambda w: setattr(w, "grad", w.grad / 2),
        lambda w: (w * 3).sum().backward(),
        lambda w: w.grad[1:].zero_(),
    ],
    ids=["scaled", "clipped", "replaced", "another loss", "partly zeroed"],
)
def test_gradients_that_are_changed_but_not_cleared_keep_their_losses(case, change):
    w = torch.nn.Parameter(torch.zeros(6))
    opt = case.make([w])
    opt.watch((w - 1).square().mean()).backward()
    change(w)
    opt.watch((w - 2).square().mean()).backward()
    assert values(opt) == [1.0, 4.0]


def test_a_backward_that_fails_leaves_nothing_behind_once_gradients_are_cleared(case):
    w = torch.nn.Parameter(torch.zeros(6))
    w.grad = torch.zeros(6)
    opt = case.make([w])
    opt.watch((w - 1).square().mean()).backward()
    w.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        opt.watch((w - 2).square().mean()).backward()
    w._backward_hooks.clear()
    w.grad.zero_()
    opt.watch((w - 3).square().mean()).backward()
    assert values(opt) == [9.0]


def test_plain_accumulation_does_not_look_at_gradients(case):
    model = network()
    opt = case.make(model.parameters(), capturable=True)
    with Reads("any") as reads:
        for k in range(2):
            for _ in range(3):
                x, y = batch(k)
                opt.watch(mse_loss(model(x), y)).backward()
            assert len(opt._watched) == 3
            opt.step()
            model.zero_grad(set_to_none=False)
        assert reads.seen == []
        opt.watch(mse_loss(model(x), y)).backward()
        model.zero_grad(set_to_none=False)
        opt.watch(mse_loss(model(x), y)).backward()
    assert reads.seen  # only now, as the gradients were written to and no step was taken
    assert len(opt._watched) == 1


def test_sparse_gradients_do_not_stop_the_watch(case):
    table = torch.nn.Embedding(5, 2, sparse=True)
    opt = case.make(table.parameters())
    for _ in range(2):
        opt.watch(table(torch.tensor([1, 3])).sum()).backward()
        table.weight.grad = table.weight.grad.clone()
    assert len(opt._watched) == 2


def test_gradients_are_not_kept_alive(case):
    w = torch.nn.Parameter(torch.zeros(6))
    opt = case.make([w])
    opt.watch((w - 1).square().mean()).backward()
    grad = weakref.ref(w.grad)
    w.grad = None
    assert grad() is None


def test_an_optimizer_is_freed_at_once(case):
    w = torch.nn.Parameter(torch.zeros(6))
    opt = case.make([w])
    opt.watch((w - 1).square().mean()).backward()
    opt.step()
    gone = weakref.ref(opt)
    gc.disable()
    try:
        del opt
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, as it traces
def test_compiled_autograd_runs_the_watch():
    w = torch.nn.Parameter(torch.zeros(6))
    opt = ProxSPS([w])
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for target in (1, 2, 3):
            opt.watch((w - target).square().mean()).backward()
            if target == 1:
                w.grad = None
    assert values(opt) == [4.0, 9.0]


# -- wrappers that write gradients at the end of a backward -----------------------------------------------------------


@pytest.fixture
def group():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("views", [False, True])
def test_micro_batches_of_data_parallel_models_count_without_a_look_at_gradients(views):
    model = torch.nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=views)
    opt = ProxSPS(model.parameters())
    for k in range(3):
        x, y = batch(k)
        with Reads("any") as reads:
            for _ in range(3):
                opt.watch(mse_loss(model(x), y)).backward()
        assert reads.seen == [] or k == 0  # DistributedDataParallel moves gradients to other buckets once
        assert len(opt._watched) == 3
        opt.step()
        model.zero_grad(set_to_none=False)
    opt.watch(mse_loss(model(x), y)).backward()
    model.zero_grad(set_to_none=False)
    opt.watch(mse_loss(model(x), y)).backward()
    assert len(opt._watched) == 1


@pytest.mark.usefixtures("group")
def test_micro_batches_of_fully_shard_without_synchronisation_all_count():
    # Until the last micro-batch their gradients are not in `.grad`, which stays None.
    model, twin = network(), network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    opt, other = ProxSPS(model.parameters()), ProxSPS(twin.parameters())
    for k in range(2):
        x, y = batch(k)
        for i, (xs, ys) in enumerate(zip(x.split(4), y.split(4), strict=True)):
            model.set_requires_gradient_sync(i == 2)
            (opt.watch(mse_loss(model(xs), ys)) / 3).backward()
            assert len(opt._watched) == i + 1
        opt.step()
        opt.zero_grad()
        loss = mse_loss(twin(x), y)
        loss.backward()
        other.step(loss=loss)
        other.zero_grad()
        assert float(opt.last_step.gap) == pytest.approx(float(other.last_step.gap), rel=1e-5)


@pytest.mark.parametrize("grad", [True, False], ids=["by backward", "at once"])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 704.0), (torch.bfloat16, 257.0)])
def test_losses_of_half_precision_are_added_in_single_precision(dtype, value, grad):
    """704 times 128 is beyond f16; in bf16, 64 losses of 256 and 64 of 258 have the mean 256 or 258."""
    opt = ProxSPS([torch.nn.Parameter(torch.ones(64, dtype=dtype))], lr=1.0)
    reads = Reads("any")
    for k in range(128):
        own = value if dtype is torch.float16 else 256.0 + 2 * (k % 2)
        loss = torch.full((), own, dtype=dtype, requires_grad=grad)
        with reads:
            opt.watch(loss, weight=128)
            if grad:
                loss.backward()
    with reads:
        mean, weight = opt._watched_mean()
    assert mean.dtype is torch.float32
    assert (float(mean), weight) == (value, 128 * 128)
    assert reads.seen == []
