"""Transformers' Trainer takes the steps of a loop by hand over whole batches, also from unequal micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from proxsps import L1, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS, SqrtLR

# A few steps, each of which rounds sums of some hundred terms in another order.
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


class Rows(Dataset):
    """Samples as the Trainer wants them: dictionaries of tensors."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: Any) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def sentences() -> Rows:
    """Ten sentences of up to eight words; what lies behind their ends has no label."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(20, (10, 8), generator=generator)
    lengths = torch.tensor([8, 3, 2, 4, 8, 8, 5, 2, 7, 3])
    return Rows(input_ids=words, labels=words.where(torch.arange(8) < lengths[:, None], -100))


def language_model() -> nn.Module:
    """A Llama of two layers. Its loss is the mean over the tokens of a batch, of however many it is told."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=8))


class Regression(nn.Module):
    """A model of one's own, which knows nothing of other micro-batches: the mean over samples."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.net(x)
        return {"loss": mse_loss(outputs, labels), "logits": outputs}


def make_optimizer(model: nn.Module, **options: Any) -> ProxSPS:
    return ProxSPS(model.parameters(), **{"lr": 0.5, "weight_decay": 1e-3, **options})


def trainer_of(model: nn.Module, data: Rows, opt: Any, folder: Path, micro: int, **options: Any) -> Any:
    """A trainer for one epoch of updates from `micro` micro-batches of two samples each."""
    from transformers import TrainingArguments

    from proxsps.integrations.transformers import Trainer

    arguments = {
        "max_grad_norm": 0,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": micro,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    size = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4}
    return Trainer(
        model,
        TrainingArguments(str(folder), **size, **arguments),
        train_dataset=data,
        eval_dataset=data,
        optimizers=(opt, SqrtLR(opt)),
    )


def train(*args: Any, **options: Any) -> Any:
    trainer = trainer_of(*args, **options)
    trainer.train()
    return trainer


def by_hand(model: nn.Module, data: Rows, batch_size: int, opt: Any = None) -> list[float]:
    """One epoch of whole batches, none of them cut up; the loss of each."""
    opt = opt or make_optimizer(model)
    scheduler, seen = SqrtLR(opt), []
    for first in range(0, len(data), batch_size):
        opt.zero_grad()
        loss = model(**data[first : first + batch_size])["loss"]
        loss.backward()
        opt.step(loss=loss)
        scheduler.step()
        seen.append(loss.item())
    return seen


def close(kit: Any, one: nn.Module, other: nn.Module) -> bool:
    x, y = kit.weights(one), kit.weights(other)
    return torch.allclose(x, y, rtol=ROUNDING[x.dtype], atol=ROUNDING[x.dtype])


@pytest.mark.parametrize("micro", [1, 2, 3], ids=["whole", "divides", "rest"])
def test_a_language_model(kit: Any, tmp_path: Path, micro: int) -> None:
    """Five micro-batches with 11 to 16 tokens: of two or three, the last update has fewer."""
    trained, model = language_model(), language_model()
    opt = make_optimizer(trained)
    trainer = train(trained, sentences(), opt, tmp_path, micro)
    assert trainer.model_accepts_loss_kwargs
    seen = by_hand(model, sentences(), 2 * micro)
    assert trainer.state.global_step == len(seen)
    assert close(kit, trained, model)
    assert not torch.allclose(kit.weights(model), kit.weights(language_model()), rtol=0.01)
    assert float(opt.last_step.gap) == pytest.approx(seen[-1], rel=1e-6)


@pytest.mark.parametrize("micro", [1, 4], ids=["whole", "micro-batches"])
def test_a_model_of_ones_own(kit: Any, tmp_path: Path, micro: int) -> None:
    x, y = (part[:20].double() for part in kit.regression())
    data, trained, model = Rows(x=x, labels=y), Regression(kit.network().double()), Regression(kit.network().double())
    trainer = train(trained, data, make_optimizer(trained), tmp_path, micro)
    assert not trainer.model_accepts_loss_kwargs
    by_hand(model, data, 2 * micro)
    assert close(kit, trained, model)


def test_evaluation_in_between_changes_nothing(kit: Any, tmp_path: Path) -> None:
    trained, model = language_model(), language_model()
    trainer = train(trained, sentences(), make_optimizer(trained), tmp_path, 2, eval_strategy="steps", eval_steps=1)
    assert len(trainer.state.log_history) > 2
    by_hand(model, sentences(), 4)
    assert close(kit, trained, model)


def test_losses_of_a_step_that_was_left_out_are_forgotten(kit: Any, tmp_path: Path) -> None:
    """A scale at the end of float32 makes the first update overflow; the Trainer clears gradients by the model."""
    x, y = kit.regression()
    trained, model = Regression(kit.network()), Regression(kit.network())
    trainer = trainer_of(trained, Rows(x=x[:12], labels=10 * y[:12]), make_optimizer(trained), tmp_path, 2)
    trainer.accelerator.scaler = GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    trainer.train()
    by_hand(model, Rows(x=x[4:12], labels=10 * y[4:12]), 4)
    assert close(kit, trained, model)


def test_clipping_is_refused(tmp_path: Path) -> None:
    model = language_model()
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 clips gradients.*pass max_grad_norm=0"):
        train(model, sentences(), make_optimizer(model), tmp_path, 1, max_grad_norm=1.0)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_step_can_be_checked(kit: Any, tmp_path: Path, bf16: bool) -> None:
    models = [language_model(), language_model()]
    for model, check in zip(models, (True, False), strict=True):
        trainer = trainer_of(model, sentences(), make_optimizer(model), tmp_path, 1, bf16=bf16)
        trainer.check_first_step = check
        trainer.train()
        assert not trainer.check_first_step
    assert torch.equal(kit.weights(models[0]), kit.weights(models[1]))


def test_the_check_finds_gradients_that_were_clipped(tmp_path: Path) -> None:
    model = language_model()
    for p in model.parameters():
        p.register_hook(lambda grad: grad / 8)
    trainer = trainer_of(model, sentences(), make_optimizer(model), tmp_path, 1)
    trainer.check_first_step = True
    with pytest.raises(ValueError, match=r"8 times too short\. Likely they were clipped, or divided by 8"):
        trainer.train()


def test_the_check_needs_a_whole_batch(tmp_path: Path) -> None:
    model = language_model()
    trainer = trainer_of(model, sentences(), make_optimizer(model), tmp_path, 2)
    trainer.check_first_step = True
    with pytest.raises(ValueError, match="leave out gradient_accumulation_steps"):
        trainer.train()


def test_other_optimizers_are_left_alone(kit: Any, tmp_path: Path) -> None:
    """Neither needs the loss, and clipping is their own affair."""
    for kind in (ProxSGD, torch.optim.SGD):
        trained, model = language_model(), language_model()
        train(trained, sentences(), kind(trained.parameters(), lr=0.1), tmp_path, 1, max_grad_norm=1e9)
        opt = ProxSGD(model.parameters(), lr=0.1)
        by_hand(model, sentences(), 2, opt)
        assert close(kit, trained, model)


def test_a_step_without_a_learning_rate(kit: Any, tmp_path: Path) -> None:
    trained, model = language_model(), language_model()
    opt = ProxSPSAdam(trained.parameters(), weight_decay=1e-3)
    train(trained, sentences(), opt, tmp_path, 1)
    by_hand(model, sentences(), 2, ProxSPSAdam(model.parameters(), weight_decay=1e-3))
    assert close(kit, trained, model)
    assert opt.last_step.cap_name in ("polyak", "distance")


def test_the_effective_rate_is_logged_beside_the_learning_rate(tmp_path: Path) -> None:
    def rows(make: Any) -> list[Any]:
        model = language_model()
        steps = {"logging_strategy": "steps", "logging_steps": 1, "eval_strategy": "epoch"}
        return train(model, sentences(), make(model.parameters()), tmp_path, 1, **steps).state.log_history

    found = rows(ProxSPSAdam)
    trained = [row for row in found if "learning_rate" in row]
    assert len(trained) == 5 < len(found)
    assert all(row["tau"] > 0 and row["cap_name"] in ("polyak", "distance") for row in trained)
    assert not any("tau" in row for row in found if row not in trained)
    assert not any("tau" in row for row in rows(lambda params: torch.optim.SGD(params, lr=0.1)))


def free(model: nn.Module) -> ScheduleFreeSPS:
    return ScheduleFreeSPS(model.parameters(), regularizer=L1(0.02))


class Watched(Regression):
    """Keeps the weights that it is evaluated with."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.evaluated: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if not self.training:
            self.evaluated.append(torch.cat([p.detach().flatten() for p in self.parameters()]))
        return super().forward(x, labels)


SAVED = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 2}


def test_evaluations_and_checkpoints_have_the_averages(kit: Any, tmp_path: Path) -> None:
    """Eight steps by the trainer; checkpoints are also written where nothing was evaluated before."""
    from safetensors.torch import load_file

    x, y = (part[:16].double() for part in kit.regression())
    net, trained = kit.network().double(), Watched(kit.network().double())
    batches = list(zip(x.split(2), y.split(2), strict=True))
    expected = kit.averages_by_hand(net, free(net), batches, lambda batch: mse_loss(net(batch[0]), batch[1]))[:8]
    assert (expected[7] == 0).any()
    opt = free(trained)
    trainer = trainer_of(trained, Rows(x=x, labels=y), opt, tmp_path, 1, **SAVED)
    trainer.lr_scheduler = LambdaLR(opt, lambda step: 1.0)
    trainer.train()
    for found, step in zip((trained.evaluated[0], trained.evaluated[-1], kit.weights(trained)), (4, 8, 8), strict=True):
        torch.testing.assert_close(found, expected[step - 1], rtol=1e-14, atol=1e-14)
    for step in (2, 4, 6, 8):
        state = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        saved = torch.cat([state[name].flatten() for name, _ in trained.named_parameters()])
        torch.testing.assert_close(saved, expected[step - 1], rtol=1e-14, atol=1e-14)

    again = Watched(kit.network().double())
    other = trainer_of(again, Rows(x=x, labels=y), free(again), tmp_path, 1, **SAVED)
    other.lr_scheduler = LambdaLR(other.optimizer, lambda step: 1.0)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    torch.testing.assert_close(kit.weights(again), expected[7], rtol=1e-14, atol=1e-14)


def test_the_best_model_that_is_loaded_stays_as_it_is(kit: Any, tmp_path: Path) -> None:
    """Training is stopped where nothing is evaluated or saved, and the weights of step 4 are loaded."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    x, y = (part[:16].double() for part in kit.regression())
    trained = Watched(kit.network().double())
    opt = free(trained)
    options = {**SAVED, "save_steps": 4, "load_best_model_at_end": True}
    trainer = trainer_of(trained, Rows(x=x, labels=y), opt, tmp_path, 1, **options)
    trainer.add_callback(Stop())
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-4")
    trainer.evaluate()
    for found in (kit.weights(trained), trained.evaluated[-1]):
        assert torch.equal(found, trained.evaluated[0])
