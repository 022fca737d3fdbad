"""skorch hands over a closure: nothing has to be changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from proxsps import L1, ProxSPS, ProxSPSAdam, ScheduleFreeSPS, SqrtLR

OPTIONS = {"max_epochs": 2, "batch_size": 8, "train_split": None, "iterator_train__shuffle": False, "verbose": 0}


@pytest.mark.parametrize("optimizer", [ProxSPS, ProxSPSAdam])
def test_the_default_of_skorch_as_lr_is_a_warning(optimizer: Any) -> None:
    """But not where a user gave an lr (warnings are errors), and not outside of skorch."""
    skorch = pytest.importorskip("skorch")

    def make(**options: Any) -> None:
        skorch.NeuralNetRegressor(nn.Linear(6, 1), optimizer=optimizer, **options, **OPTIONS).initialize()

    with pytest.warns(UserWarning, match=rf"{optimizer.__name__}: lr=0\.01 is skorch's default.*lr=None to the net"):
        make()
    for given in ({"lr": None}, {"lr": 0.02}, {"optimizer__lr": 0.01}):
        make(**given)
    optimizer(nn.Linear(6, 1).parameters(), lr=0.01)


def losses(net: Any) -> list[float]:
    return [row["train_loss"] for epoch in net.history for row in epoch["batches"]]


def test_a_regressor(kit: Any) -> None:
    skorch = pytest.importorskip("skorch")
    x, y = kit.regression()
    net = skorch.NeuralNetRegressor(kit.network(), optimizer=ProxSPS, lr=1.0, optimizer__weight_decay=1e-3, **OPTIONS)
    net.fit(x.numpy(), y.numpy())
    model = kit.network()
    opt = ProxSPS(model.parameters(), lr=1.0, weight_decay=1e-3)
    assert losses(net) == kit.by_hand(opt, kit.loader(), lambda batch: mse_loss(model(batch[0]), batch[1]))
    assert torch.equal(kit.weights(net.module_), kit.weights(model))


def test_a_classifier_with_a_schedule(kit: Any) -> None:
    skorch = pytest.importorskip("skorch")
    x, y = kit.regression()
    labels = (y[:, 0] > 1).long()
    start = nn.Linear(6, 2)
    nn.init.zeros_(start.weight)
    nn.init.zeros_(start.bias)
    net = skorch.NeuralNetClassifier(
        copy.deepcopy(start),
        criterion=nn.CrossEntropyLoss,
        optimizer=ProxSPS,
        lr=1.0,
        optimizer__regularizer=L1(1e-3),
        callbacks=[skorch.callbacks.LRScheduler(policy=SqrtLR)],
        **OPTIONS,
    )
    net.fit(x.numpy(), labels.numpy())
    opt = ProxSPS(start.parameters(), lr=1.0, regularizer=L1(1e-3))
    batches = zip(x.split(8), labels.split(8), strict=True)
    seen = kit.by_hand(opt, batches, lambda b: cross_entropy(start(b[0]), b[1]), after_epoch=SqrtLR(opt).step)
    assert losses(net) == seen
    assert torch.equal(kit.weights(net.module_), kit.weights(start))
    assert seen[-1] < seen[0]


def test_a_step_without_a_learning_rate(kit: Any) -> None:
    skorch = pytest.importorskip("skorch")
    x, y = kit.regression()
    net = skorch.NeuralNetRegressor(kit.network(), optimizer=ProxSPSAdam, lr=None, **OPTIONS)
    net.fit(x.numpy(), y.numpy())
    model = kit.network()
    opt = ProxSPSAdam(model.parameters())
    seen = kit.by_hand(opt, kit.loader(), lambda batch: mse_loss(model(batch[0]), batch[1]))
    assert losses(net) == seen
    assert torch.equal(kit.weights(net.module_), kit.weights(model))
    assert seen[-1] < seen[0]


def test_averages_where_the_optimizer_follows_the_module(kit: Any) -> None:
    """skorch switches the module for every batch, and with it the optimizer."""
    skorch = pytest.importorskip("skorch")
    from skorch.dataset import Dataset
    from skorch.helper import predefined_split

    class Follow(skorch.callbacks.Callback):
        def on_train_begin(self, net: Any, **kwargs: Any) -> None:
            net.optimizer_.follow(net.module_)

        def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
            evaluated.append(kit.weights(net.module_))

    x, y = kit.regression()
    evaluated: list[Any] = []
    split = predefined_split(Dataset(x[:8].numpy(), y[:8].numpy()))
    options = {**OPTIONS, "optimizer__regularizer": L1(0.1), "callbacks": [Follow()], "train_split": split}
    net = skorch.NeuralNetRegressor(kit.network(), optimizer=ScheduleFreeSPS, lr=None, **options)
    net.fit(x.numpy(), y.numpy())
    model = kit.network()
    opt = ScheduleFreeSPS(model.parameters(), regularizer=L1(0.1))
    expected = kit.averages_by_hand(model, opt, kit.loader(), lambda batch: mse_loss(model(batch[0]), batch[1]))
    assert torch.equal(evaluated[0], expected[5])
    net.predict(x.numpy())
    assert torch.equal(kit.weights(net.module_), expected[-1])
    assert (expected[-1] == 0).any()
