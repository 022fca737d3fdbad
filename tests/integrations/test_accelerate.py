"""Accelerate wraps the optimizer; watched through the wrapping, its steps are those of the loop by hand, bitwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from proxsps import L1, ProxSPS, SqrtLR


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process, and refuses others."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def make_optimizer(net: nn.Module) -> ProxSPS:
    return ProxSPS(net.parameters(), lr=1.0, regularizer=L1(1e-3))


def accelerated(net: nn.Module, loader: Any, schedule: bool = True, **options: Any) -> list[float]:
    """Two epochs as in Accelerate's own examples, with one line more; the losses of all batches."""
    from accelerate import Accelerator

    accelerator, opt = Accelerator(cpu=True, **options), make_optimizer(net)
    scheduler, seen = SqrtLR(opt), []
    net, opt, loader = accelerator.prepare(net, opt, loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                with accelerator.autocast():
                    loss = mse_loss(net(x), y)
                opt.optimizer.watch(loss)
                accelerator.backward(loss)
                opt.step()
                opt.zero_grad()
            seen.append(loss.item())
        if schedule:
            scheduler.step()
    return seen


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_watched_losses_give_the_steps_of_the_loop_by_hand(kit: Any, precision: str, micro: int) -> None:
    trained, net = kit.network(), kit.network()
    seen = accelerated(trained, kit.loader(), gradient_accumulation_steps=micro, mixed_precision=precision)
    opt = make_optimizer(net)

    def loss_of(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            return mse_loss(net(batch[0]), batch[1])

    assert seen == kit.by_hand(opt, kit.loader(), loss_of, micro=micro, after_epoch=SqrtLR(opt).step)
    assert torch.equal(kit.weights(trained), kit.weights(net))


def test_an_incomplete_group_may_wait_for_the_next_epoch(kit: Any) -> None:
    """Six batches in fours: gradients are divided by four, so that a step from the last two would not fit its loss."""
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    trained, net = kit.network(), kit.network()
    seen = accelerated(trained, kit.loader(), schedule=False, gradient_accumulation_plugin=plugin)
    batches = [*kit.loader(), *kit.loader()]
    opt = make_optimizer(net)
    assert seen == kit.by_hand(opt, batches, lambda batch: mse_loss(net(batch[0]), batch[1]), epochs=1, micro=4)
    assert torch.equal(kit.weights(trained), kit.weights(net))
