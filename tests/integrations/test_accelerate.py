"""Accelerate wraps the optimizer; watched through the wrapping, its steps are those of the loop by hand, bitwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from proxsps import L1, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS, SqrtLR


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process, and refuses others."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def make_optimizer(net: nn.Module) -> ProxSPS:
    return ProxSPS(net.parameters(), lr=1.0, regularizer=L1(1e-3))


def accelerated(
    net: nn.Module, loader: Any, schedule: bool = True, make: Any = make_optimizer, **options: Any
) -> list[float]:
    """Two epochs as in Accelerate's own examples, with one line more; the losses of all batches."""
    from accelerate import Accelerator

    accelerator, opt = Accelerator(cpu=True, **options), make(net)
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


def train_with(accelerator: Any, net: nn.Module, loader: Any, make: Any = make_optimizer, clip: str = "") -> None:
    """Two epochs as in Accelerate's own examples, without a change."""
    net, opt, loader = accelerator.prepare(net, make(net), loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                with accelerator.autocast():
                    loss = mse_loss(net(x), y)
                accelerator.backward(loss)
                if clip:
                    getattr(accelerator, clip)(net.parameters(), 0.1)
                opt.step()
                opt.zero_grad()


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("micro", [1, 2, 4], ids=["whole", "divides", "rest"])
def test_the_accelerator_hands_over_the_loss_of_the_loop_by_hand(kit: Any, precision: str, micro: int) -> None:
    """Of six batches in fours, the last two are divided by four all the same, loss and gradients alike."""
    from proxsps.integrations.accelerate import Accelerator

    trained, net = kit.network(), kit.network()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro, mixed_precision=precision)
    train_with(accelerator, trained, kit.loader())

    def loss_of(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            return mse_loss(net(batch[0]), batch[1])

    kit.by_hand(make_optimizer(net), kit.loader(), loss_of, micro=micro)
    assert torch.equal(kit.weights(trained), kit.weights(net))
    assert not torch.equal(kit.weights(net), kit.weights(kit.network()))


def test_a_step_that_the_scaler_leaves_out_takes_its_loss_along(kit: Any) -> None:
    """A scale at the end of float32 makes the first update overflow."""
    from proxsps.integrations.accelerate import Accelerator

    trained, net = kit.network(), kit.network()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    x, y = kit.regression()
    batches = list(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 10 * y), batch_size=8))
    net_, opt = accelerator.prepare(trained, make_optimizer(trained))
    for k, (x, y) in enumerate(batches):
        accelerator.gradient_state._set_sync_gradients(k % 2 == 1)
        accelerator.backward(mse_loss(net_(x), y))
        opt.step()
        opt.zero_grad()
    kit.by_hand(make_optimizer(net), batches[2:], lambda batch: mse_loss(net(batch[0]), batch[1]), epochs=1, micro=2)
    assert torch.equal(kit.weights(trained), kit.weights(net))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_accelerator_checks_a_step(kit: Any, precision: str) -> None:
    from proxsps.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    net = kit.network()
    net, _, loader = accelerator.prepare(net, make_optimizer(net), kit.loader())
    batches = list(loader)[:2]

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.autocast():
            return mse_loss(net(x), y)

    for batch in batches:
        accelerator.backward(loss_of(*batch))
    accelerator.check_loss(lambda: sum(loss_of(*batch) for batch in batches) / 2)
    with pytest.raises(ValueError, match=r"no simple factor|another direction"):
        accelerator.check_loss(lambda: loss_of(batches[0][0], -batches[0][1]))
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="Likely they were clipped"):
        accelerator.check_loss(lambda: sum(loss_of(*batch) for batch in batches) / 2)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_the_accelerator_refuses_clipping(kit: Any, clip: str) -> None:
    from proxsps.integrations.accelerate import Accelerator

    with pytest.raises(ValueError, match=rf"accelerator\.{clip} clips gradients.*limit the move with max_move="):
        train_with(Accelerator(cpu=True), kit.network(), kit.loader(), clip=clip)


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_other_optimizers_may_clip(kit: Any, clip: str) -> None:
    from proxsps.integrations.accelerate import Accelerator

    nets = [kit.network(), kit.network()]
    for net, kind in zip(nets, (ProxSGD, torch.optim.SGD), strict=True):
        train_with(
            Accelerator(cpu=True), net, kit.loader(), lambda net, kind=kind: kind(net.parameters(), lr=0.1), clip
        )
    torch.testing.assert_close(kit.weights(nets[0]), kit.weights(nets[1]))


def test_a_step_without_a_learning_rate(kit: Any) -> None:
    trained, net = kit.network(), kit.network()
    seen = accelerated(trained, kit.loader(), make=lambda net: ProxSPSAdam(net.parameters()))
    opt = ProxSPSAdam(net.parameters())
    by_hand = kit.by_hand(
        opt, kit.loader(), lambda batch: mse_loss(net(batch[0]), batch[1]), after_epoch=SqrtLR(opt).step
    )
    assert seen == by_hand
    assert torch.equal(kit.weights(trained), kit.weights(net))
    assert seen[-1] < seen[0]


def test_losses_of_bf16_are_added_in_single_precision() -> None:
    """Half of the losses are 256, half are 258; next to 256, bf16 has steps of two."""
    from proxsps.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=64)
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = accelerator.prepare(ProxSPS([param], lr=1e-6)).optimizer
    for k in range(64):
        accelerator.backward((param + 256 + 2 * (k % 2)).sum())
    ((total, _),) = opt._watched
    assert (total.dtype, float(total)) == (torch.float32, 257)


def test_the_effective_rate_is_logged(kit: Any) -> None:
    from accelerate.tracking import GeneralTracker

    from proxsps.integrations.accelerate import Accelerator

    class Memory(GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None

        def __init__(self) -> None:
            self.rows: list[Any] = []

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
            self.rows.append((step, values))

    def logged(make: Any) -> tuple[list[Any], Any]:
        memory, net = Memory(), kit.network()
        accelerator = Accelerator(cpu=True, log_with=memory)
        accelerator.init_trackers("steps")
        accelerator.log({"loss": 7.0}, step=0)
        opt = accelerator.prepare(make(net))
        accelerator.backward(mse_loss(net(kit.regression()[0]), kit.regression()[1]))
        opt.step()
        accelerator.log({"loss": 2.0}, step=1)
        accelerator.log({"loss": 1.0, "tau": 3.0}, step=2)
        return memory.rows, opt.optimizer

    rows, opt = logged(lambda net: ProxSPSAdam(net.parameters()))
    last = {"tau": float(opt.last_step.tau[0]), "cap_name": "distance"}
    own = {"loss": 1.0, "tau": 3.0, "cap_name": "distance"}
    assert rows == [(0, {"loss": 7.0}), (1, {"loss": 2.0, **last}), (2, own)]
    assert last["tau"] > 0
    rows, _ = logged(lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
    assert rows[1] == (1, {"loss": 2.0})


def test_averages_by_the_modes_of_the_wrapped_optimizer(kit: Any, tmp_path: Path) -> None:
    """And a state that is saved while the averages are shown goes on bitwise."""
    from proxsps.integrations.accelerate import Accelerator

    def make(net: nn.Module) -> ScheduleFreeSPS:
        return ScheduleFreeSPS(net.parameters(), regularizer=L1(0.1))

    net, found = kit.network(), []
    expected = kit.averages_by_hand(net, make(net), kit.loader(), lambda batch: mse_loss(net(batch[0]), batch[1]))
    accelerator = Accelerator(cpu=True)
    trained = kit.network()
    trained, opt = accelerator.prepare(trained, make(trained))
    for k, (x, y) in enumerate([*kit.loader(), *kit.loader()]):
        opt.train()
        accelerator.backward(mse_loss(trained(x), y))
        opt.step()
        opt.zero_grad()
        opt.eval()
        found.append(kit.weights(trained))
        if k == 5:
            accelerator.save_state(str(tmp_path / "state"))
            nn.init.zeros_(trained[0].weight)
            accelerator.load_state(str(tmp_path / "state"))
    assert all(map(torch.equal, found, expected))
    assert (found[-1] == 0).any()
