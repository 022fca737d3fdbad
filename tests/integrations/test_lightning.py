"""Lightning with automatic optimization takes the steps of the loop by hand, bitwise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss

from proxsps import ProxSPS, SqrtLR

pytestmark = [
    # Advice on the number of processes that load data, for a loader that needs none.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    # Lightning 2.6 asks torch for a class that torch 2.13 has renamed.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def make_optimizer(net: nn.Module) -> ProxSPS:
    return ProxSPS(net.parameters(), lr=1.0, weight_decay=1e-3)


def module(net: nn.Module, watch: bool = True) -> Any:
    """A module as in the documentation; it also keeps the losses it saw."""
    lightning = pytest.importorskip("lightning")

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = net, []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = mse_loss(self.net(x), y)
            self.seen.append(loss.item())
            return self.optimizers().watch(loss) if watch else loss

        def configure_optimizers(self) -> Any:
            opt = make_optimizer(self.net)
            return [opt], [SqrtLR(opt)]

    return Regression()


def fit(module: Any, loader: Any, precision: str = "32-true", **options: Any) -> None:
    from lightning import Trainer
    from lightning.pytorch.plugins import MixedPrecision

    if precision == "16-mixed":  # by name Lightning takes it on accelerators only
        options["plugins"] = MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))
    else:
        options["precision"] = precision
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    Trainer(max_epochs=2, accelerator="cpu", devices=1, **quiet, **options).fit(module, loader)


def by_hand(kit: Any, precision: str, micro: int) -> tuple[nn.Module, list[float]]:
    net = kit.network()
    opt = make_optimizer(net)

    def loss_of(batch: Any) -> Tensor:
        with torch.autocast("cpu", DTYPES[precision]) if precision in DTYPES else nullcontext():
            return mse_loss(net(batch[0]), batch[1])

    scaler = GradScaler("cpu") if precision == "16-mixed" else None
    seen = kit.by_hand(opt, kit.loader(), loss_of, micro=micro, after_epoch=SqrtLR(opt).step, scaler=scaler)
    return net, seen


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_watched_losses_give_the_steps_of_the_loop_by_hand(kit: Any, precision: str, micro: int) -> None:
    trained = module(kit.network())
    fit(trained, kit.loader(), precision, accumulate_grad_batches=micro)
    net, seen = by_hand(kit, precision, micro)
    assert trained.seen == seen
    assert torch.equal(kit.weights(trained.net), kit.weights(net))
    assert not torch.equal(kit.weights(net), kit.weights(kit.network()))


def test_an_overflow_is_among_the_steps_above(kit: Any) -> None:
    """The first scale is too large for the first batch: the second is met with the weights of the start."""
    _, seen = by_hand(kit, "16-mixed", 1)
    net, batches = kit.network(), list(kit.loader())
    with torch.autocast("cpu", torch.float16):
        assert seen[1] == mse_loss(net(batches[1][0]), batches[1][1]).item()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_without_accumulation_the_closure_is_enough(kit: Any, precision: str) -> None:
    trained = module(kit.network(), watch=False)
    fit(trained, kit.loader(), precision)
    assert torch.equal(kit.weights(trained.net), kit.weights(by_hand(kit, precision, 1)[0]))


def test_with_accumulation_the_closure_is_not(kit: Any) -> None:
    """Its loss is that of the last micro-batch, divided."""
    trained = module(kit.network(), watch=False)
    fit(trained, kit.loader(), accumulate_grad_batches=2)
    assert not torch.allclose(kit.weights(trained.net), kit.weights(by_hand(kit, "32-true", 2)[0]), rtol=0.01)


def test_a_scaled_loss_has_to_be_watched(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"loss = opt\.watch\(loss\) before loss\.backward\(\)"):
        fit(module(kit.network(), watch=False), kit.loader(), "16-mixed", accumulate_grad_batches=2)
