"""Groups of sparse networks under the optimizers with momentum, without a learning rate, and in Adam's metric."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from proxsps import L1, ProxSPS, ProxSPSAdam
from proxsps.sparsity import rows, shrink, sparse_groups, unit_groups

PLAIN = {
    "momentum": partial(ProxSPS, momentum=0.9),
    "no learning rate": partial(ProxSPS, lr=None),
    "no learning rate, momentum": partial(ProxSPS, lr=None, momentum=0.9),
}
ADAM = {"Adam": partial(ProxSPSAdam, lr=0.01), "Adam, no learning rate": partial(ProxSPSAdam, lr=None)}

X = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] * X[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))


def train(model, opt, steps=150):
    for _ in range(steps):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(X), LABELS)
        loss.backward()
        opt.step(loss=loss)
    return float(loss.detach())


@pytest.mark.parametrize("kind", [*PLAIN, *ADAM])
def test_single_weights_become_zero_and_norms_stay(kind):
    model = network()
    groups = sparse_groups(model, L1(0.01))
    assert train(model, {**PLAIN, **ADAM}[kind](groups)) < 0.6
    assert 10 < (model[0].weight == 0).sum() < model[0].weight.numel()
    assert (model[1].weight != 0).all()


@pytest.mark.parametrize("kind", [*PLAIN, *ADAM])
def test_units_die_as_a_whole_and_are_removed(kind):
    model = network()
    groups = unit_groups(model, X[:2], 0.02 if kind in PLAIN else 0.01)
    assert train(model, {**PLAIN, **ADAM}[kind](groups)) < 0.65
    (dead,), (by_weights,) = groups.units.dead(model), groups.units.dead(model, weights_only=True)
    np.testing.assert_array_equal(dead, by_weights)
    assert 0 < dead.sum() < 24
    assert shrink(model, X[:2], timing_seconds=0).model[0].out_features == 24 - dead.sum()


@pytest.mark.parametrize("kind", ADAM)
def test_rows_become_zero_in_the_metric_of_adam(kind):
    model = network()
    train(model, ADAM[kind](sparse_groups(model, rows(0.02), exclude="3")))
    assert 0 < (model[0].weight == 0).all(1).sum() < 24
