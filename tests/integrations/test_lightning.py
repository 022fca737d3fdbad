"""Lightning with automatic optimization takes the steps of the loop by hand, bitwise."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from proxsps import L1, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS, SqrtLR

pytestmark = [
    # Advice on the number of processes that load data, for a loader that needs none.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    # Lightning 2.6 asks torch for a class that torch 2.13 has renamed.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]

DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def make_optimizer(net: nn.Module) -> ProxSPS:
    return ProxSPS(net.parameters(), lr=1.0, weight_decay=1e-3)


def module(net: nn.Module, watch: bool = True, make: Any = make_optimizer) -> Any:
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
            opt = make(self.net)
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
    Trainer(**{"max_epochs": 2, "accelerator": "cpu", "devices": 1, **quiet, **options}).fit(
        module, **loader if isinstance(loader, dict) else {"train_dataloaders": loader}
    )


def by_hand(kit: Any, precision: str, micro: int, make: Any = make_optimizer) -> tuple[nn.Module, list[float]]:
    net = kit.network()
    opt = make(net)

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
    with pytest.warns(RuntimeWarning, match=r"gradients of 2 batches, .* divided by 2.*WatchLoss\(\)") as seen:
        fit(trained, kit.loader(), accumulate_grad_batches=2)
    assert sum(found.category is RuntimeWarning for found in seen) == 1
    assert not torch.allclose(kit.weights(trained.net), kit.weights(by_hand(kit, "32-true", 2)[0]), rtol=0.01)


@pytest.mark.parametrize("watch", [False, True])
def test_clipping_without_the_callback_is_warned_of(kit: Any, watch: bool) -> None:
    with pytest.warns(RuntimeWarning, match=r"gradient_clip_val=0\.1 .*limit the move with max_move=") as seen:
        fit(module(kit.network(), watch=watch), kit.loader(), gradient_clip_val=0.1)
    assert sum(found.category is RuntimeWarning for found in seen) == 1


@pytest.mark.parametrize("make", [ProxSGD, torch.optim.SGD])
def test_optimizers_without_a_loss_are_not_warned_of(kit: Any, make: Any) -> None:
    trained = module(kit.network(), watch=False, make=lambda net: make(net.parameters(), lr=0.05))
    fit(trained, kit.loader(), accumulate_grad_batches=2, gradient_clip_val=1.0)


@pytest.mark.parametrize("way", ["watch", "loss"])
def test_a_module_that_optimizes_by_itself_passes_the_loss(kit: Any, way: str) -> None:
    """Lightning adds a closure to such a step."""
    trained = module(kit.network(), watch=False)

    class Manual(type(trained)):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            opt = self.optimizers()
            opt.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(opt.watch(loss) if way == "watch" else loss)
            opt.step() if way == "watch" else opt.step(loss=loss)
            if self.trainer.is_last_batch:
                self.lr_schedulers().step()

    trained.__class__ = Manual
    fit(trained, kit.loader())
    assert torch.equal(kit.weights(trained.net), kit.weights(by_hand(kit, "32-true", 1)[0]))


def test_a_scaled_loss_has_to_be_watched(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"loss = opt\.watch\(loss\) before loss\.backward\(\)"):
        fit(module(kit.network(), watch=False), kit.loader(), "16-mixed", accumulate_grad_batches=2)


def with_callback(kit: Any, precision: str = "32-true", **options: Any) -> Any:
    from proxsps.integrations.lightning import WatchLoss

    trained = module(kit.network(), watch=False)
    fit(trained, kit.loader(), precision, callbacks=[WatchLoss()], **options)
    return trained


@pytest.mark.parametrize("micro", [1, 2, 4], ids=["whole", "divides", "rest"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_the_callback_hands_over_the_loss_of_the_loop_by_hand(kit: Any, precision: str, micro: int) -> None:
    """Of six batches in fours, the last two are divided by four all the same, loss and gradients alike."""
    trained = with_callback(kit, precision, accumulate_grad_batches=micro)
    net, seen = by_hand(kit, precision, micro)
    assert trained.seen == seen
    assert torch.equal(kit.weights(trained.net), kit.weights(net))


def test_the_callback_refuses_clipping(kit: Any) -> None:
    with pytest.raises(ValueError, match=r"gradient_clip_val=0\.1 clips gradients.*limit the move with max_move="):
        with_callback(kit, gradient_clip_val=0.1)


def refusal(trained: Any, kit: Any, **options: Any) -> str:
    from proxsps.integrations.lightning import WatchLoss

    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at the text
        fit(trained, kit.loader(), callbacks=[WatchLoss(**options)])
    return str(error.value)


def test_the_callback_refuses_what_parts_loss_and_gradients(kit: Any) -> None:
    clips = module(kit.network(), watch=False)

    class Clips(type(clips)):
        def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
            nn.utils.clip_grad_value_(self.parameters(), 0.01)

    clips.__class__ = Clips
    assert "configure_gradient_clipping may clip gradients" in refusal(clips, kit)

    manual = module(kit.network(), watch=False)
    manual.automatic_optimization = False
    assert "call opt.step(loss=loss) there, and leave out the callback" in refusal(manual, kit)

    assert "passed twice" in refusal(module(kit.network()), kit)


def test_other_optimizers_may_clip(kit: Any) -> None:
    from proxsps.integrations.lightning import WatchLoss

    nets = []
    for kind in (ProxSGD, torch.optim.SGD):
        net = kit.network()
        trained = module(net, watch=False, make=lambda net, kind=kind: kind(net.parameters(), lr=0.05))
        fit(trained, kit.loader(), callbacks=[WatchLoss()], gradient_clip_val=1.0)
        nets.append(net)
    torch.testing.assert_close(kit.weights(nets[0]), kit.weights(nets[1]))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_callback_checks_the_first_step(kit: Any, precision: str) -> None:
    from proxsps.integrations.lightning import WatchLoss

    trained = module(kit.network(), watch=False)
    fit(trained, kit.loader(), precision, callbacks=[WatchLoss(check=True)])
    assert torch.equal(kit.weights(trained.net), kit.weights(by_hand(kit, precision, 1)[0]))


def test_the_check_of_the_callback_finds_gradients_that_were_clipped(kit: Any) -> None:
    clips = module(kit.network(), watch=False)
    clips.on_after_backward = lambda: nn.utils.clip_grad_norm_(clips.parameters(), 0.1) and None
    assert "Likely they were clipped" in refusal(clips, kit, check=True)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_step_without_a_learning_rate(kit: Any, precision: str) -> None:
    """The scheduler scales the factor; a step that the scaler leaves out leaves the state as it was."""
    trained = module(kit.network(), make=lambda net: ProxSPSAdam(net.parameters(), weight_decay=1e-3))
    fit(trained, kit.loader(), precision, accumulate_grad_batches=2)
    net, seen = by_hand(kit, precision, 2, lambda net: ProxSPSAdam(net.parameters(), weight_decay=1e-3))
    assert trained.seen == seen
    assert torch.equal(kit.weights(trained.net), kit.weights(net))
    assert not torch.equal(kit.weights(net), kit.weights(kit.network()))


def test_the_callback_adds_losses_of_bf16_in_single_precision() -> None:
    """As Lightning calls it: half of the losses are 256/64, half are 258/64."""
    pytest.importorskip("lightning")
    from proxsps.integrations.lightning import WatchLoss

    opt = ProxSPS([nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))], lr=1e-6)
    trainer: Any = SimpleNamespace(precision_plugin=None)
    callback = WatchLoss()
    for k in range(64):
        share = torch.tensor(256 + 2 * (k % 2), dtype=torch.bfloat16) / 64
        callback.on_before_backward(trainer, None, share)
    callback.on_before_optimizer_step(trainer, None, opt)
    ((total, _),) = opt._watched
    assert (total.dtype, float(total)) == (torch.float32, 257)


@pytest.mark.parametrize("make", [ProxSPSAdam, torch.optim.AdamW])
def test_the_effective_rate_is_logged(kit: Any, tmp_path: Path, make: Any) -> None:
    """By a logger that writes files, every second step; other optimizers have none."""
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from proxsps.integrations.lightning import WatchLoss

    trained, logger, steps = (
        module(kit.network(), watch=False, make=lambda net: make(net.parameters())),
        CSVLogger(tmp_path),
        [],
    )

    class Reads(WatchLoss):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            last = getattr(trainer.optimizers[0], "last_step", None)
            steps.append(last and (float(last.tau[0]), int(last.cap)))
            super().on_train_batch_end(trainer, *args, **kwargs)

    fit(trained, kit.loader(), callbacks=[Reads()], logger=logger, log_every_n_steps=2)
    assert len(steps) == 12
    file = Path(logger.log_dir) / "metrics.csv"
    if make is torch.optim.AdamW:
        assert not file.exists()
        return
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 12, 2))
    taus, caps = zip(*steps, strict=True)
    assert [float(row["tau"]) for row in rows] == pytest.approx(taus[1::2], rel=1e-6)  # written as float32
    assert [float(row["cap"]) for row in rows] == list(caps[1::2])
    assert min(taus) > 0


def free(net: nn.Module) -> ScheduleFreeSPS:
    return ScheduleFreeSPS(net.parameters(), regularizer=L1(0.1))


def averages(kit: Any) -> list[Tensor]:
    """Of each step by hand; the zeros of the regulariser are only in the averages."""
    net = kit.network()
    found = kit.averages_by_hand(net, free(net), kit.loader(), lambda batch: mse_loss(net(batch[0]), batch[1]))
    assert len(found) == 12
    assert all((x == 0).any() for x in found[2:])
    return found


def validated(kit: Any) -> Any:
    """A module that keeps the weights it is validated with."""
    trained = module(kit.network(), watch=False, make=free)

    class Validated(type(trained)):
        def configure_optimizers(self) -> Any:
            return free(self.net)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.append(kit.weights(self.net))

    trained.__class__, trained.validated = Validated, []
    return trained


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("weights_only", [False, True])
def test_validation_and_checkpoints_have_the_averages(kit: Any, tmp_path: Path, weights_only: bool) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from proxsps.integrations.lightning import WatchLoss

    trained, expected = validated(kit), averages(kit)
    options = {"save_top_k": -1, "filename": "{step}", "save_weights_only": weights_only}
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=4, **options)
    fit(
        trained,
        {"train_dataloaders": kit.loader(), "val_dataloaders": DataLoader([0])},
        callbacks=[saving, WatchLoss()],
        enable_checkpointing=True,
        num_sanity_val_steps=1,
    )
    found = [*trained.validated[1:], kit.weights(trained.net)]  # without the check before training
    for one, step in zip(found, (6, 12, 12), strict=True):
        assert torch.equal(one, expected[step - 1])
    for step in (4, 8, 12):
        content = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        saved = torch.cat(
            [content["state_dict"][f"net.{name}"].flatten() for name, _ in trained.net.named_parameters()]
        )
        assert torch.equal(saved, expected[step - 1])
    assert not trained._state_dict_pre_hooks


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_run_with_averages_goes_on_from_a_checkpoint(kit: Any, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from lightning import Trainer

    from proxsps.integrations.lightning import WatchLoss

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    first = Trainer(max_epochs=1, callbacks=[WatchLoss()], enable_checkpointing=False, **quiet)
    first.fit(validated(kit), kit.loader())
    first.save_checkpoint(tmp_path / "first.ckpt")
    trained = validated(kit)
    second = Trainer(max_epochs=2, callbacks=[WatchLoss()], enable_checkpointing=False, **quiet)
    second.fit(trained, kit.loader(), ckpt_path=tmp_path / "first.ckpt")
    assert torch.equal(kit.weights(trained.net), averages(kit)[-1])


def test_schedule_free_optimizers_of_others_are_switched_too(kit: Any) -> None:
    """They raise an error for a step outside of training mode, which they start in."""
    schedulefree = pytest.importorskip("schedulefree")
    from proxsps.integrations.lightning import WatchLoss

    nets = [kit.network(), kit.network()]
    opts = [schedulefree.AdamWScheduleFree(net.parameters(), lr=0.01) for net in nets]
    trained = module(nets[0], watch=False)
    trained.configure_optimizers = lambda: opts[0]
    fit(trained, kit.loader(), callbacks=[WatchLoss()])
    opts[1].train()
    for x, y in [*kit.loader(), *kit.loader()]:
        opts[1].zero_grad()
        mse_loss(nets[1](x), y).backward()
        opts[1].step()
    other = kit.weights(nets[1])
    opts[1].eval()
    assert torch.equal(kit.weights(nets[0]), kit.weights(nets[1]))
    assert not torch.equal(kit.weights(nets[1]), other)
