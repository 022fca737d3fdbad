"""Counts by layer against counts by hand, and the same numbers in the logs of two trainers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from proxsps import L1, ProxSPS
from proxsps.sparsity import find_units, sparse_groups, sparsity_report, unit_groups


def test_counts_are_those_by_hand(kit, case):
    model, x = case.model(), case.inputs()
    units = find_units(model, x)
    dead = kit.kill(model, units)
    report = sparsity_report(model, units)
    weights = {name: param for name, param in model.named_parameters() if param.ndim > 1}
    assert [layer.name for layer in report.layers] == list(weights)
    for layer in report.layers:
        param = weights[layer.name].detach().numpy()
        assert (layer.entries, layer.zeros) == (param.size, int((param == 0).sum()))
        assert layer.dead_rows == sum(not row.any() for row in param)
    assert report.dead_units == sum(map(len, dead)) == sum(int(flags.sum()) for flags in units.dead(model))
    assert report.units == len(units)
    produced = {member.name: (one, gone) for one, gone in zip(units.sets, dead, strict=True) for member in one.members}
    for layer in report.layers:
        one, gone = produced.get(layer.name, ((), ()))
        assert (layer.units, layer.dead_units) == (len(one), len(gone))


def test_table_frame_and_shares():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].weight[:2] = 0
        model[2].weight[0, 0] = 0
    report = sparsity_report(model)
    assert report.zeros == pytest.approx(9 / 30)
    assert report.dead_rows == pytest.approx(2 / 7)
    assert np.isnan(report.dead_channels)
    assert set(report.summary()) == {"zeros", "dead_rows"}
    frame = report.frame
    assert frame["zeros"].tolist() == [8, 1]
    assert frame["dead_rows"].tolist() == [2, 0]
    assert "2/5" in str(report)
    units = find_units(model, torch.zeros(1, 4))
    assert sparsity_report(model, units).dead_units == 0  # the biases are not zero


def test_a_model_without_weights():
    assert sparsity_report(nn.BatchNorm1d(3)).zeros == 0


def check_logs(found):
    """What each trainer must have logged for the last epoch."""
    for name in ("zeros", "dead_rows", "tau", "zeta", "truncated", "inside", "capped", "skipped"):
        assert f"sparsity/{name}" in found, name
    assert found["sparsity/zeros"] > 0
    assert found["sparsity/tau"] > 0
    branches = sum(found[f"sparsity/{name}"] for name in ("truncated", "inside", "capped", "skipped"))
    assert branches == pytest.approx(1)


# Lightning's advice on the number of processes that load data, and its use of a class that torch has renamed.
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_lightning_logs_every_epoch(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from proxsps.sparsity.callbacks.lightning import SparsityCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
            self.automatic_optimization = False

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            opt = self.optimizers().optimizer
            opt.zero_grad()
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            opt.step(loss=loss)

        def configure_optimizers(self):
            return ProxSPS(unit_groups(self, torch.zeros(1, 6), 0.05), lr=0.5)

    torch.manual_seed(0)
    module = Module()
    callback = SparsityCallback(find_units(module, torch.zeros(1, 6)))
    trainer = lightning.Trainer(
        max_epochs=3,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    x = torch.randn(40, 6)
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8))
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    check_logs(logged)
    assert logged["sparsity/dead_units"] == pytest.approx(sparsity_report(module, callback.journal.units).dead_channels)


class Rows(Dataset):
    def __init__(self) -> None:
        self.x = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index, :1].sin()}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x, labels):
        outputs = self.net(x)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def test_transformers_log_every_epoch(tmp_path):
    pytest.importorskip("transformers")
    from transformers import TrainingArguments

    from proxsps.integrations.transformers import Trainer
    from proxsps.sparsity.callbacks.transformers import SparsityCallback

    torch.manual_seed(0)
    model = Regression()
    opt = ProxSPS(sparse_groups(model, L1(0.02)), lr=0.5)
    arguments = TrainingArguments(
        str(tmp_path),
        max_grad_norm=0,
        num_train_epochs=2,
        per_device_train_batch_size=6,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(), optimizers=(opt, None))
    trainer.add_callback(SparsityCallback(trainer))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "sparsity/zeros" in row]
    assert [row["epoch"] for row in rows] == [1.0, 2.0]
    check_logs(rows[-1])
    assert rows[-1]["sparsity/zeros"] == pytest.approx(sparsity_report(model).zeros)
