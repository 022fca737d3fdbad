"""Networks to make sparse: data that depends on seed and epoch alone, and the loop that trains them."""

from __future__ import annotations

import sys

import pytest
import torch

from proxsps import ProxSPS
from proxsps.problems.datasets import DataError
from proxsps.training.ranks import prepared
from proxsps.training.tasks import accuracy, digits, digits_task, fit, images_task, task_named


def test_digits_are_shuffled_by_seed_and_epoch():
    pytest.importorskip("sklearn")
    task = digits_task(batch_size=100)
    first, same, later = (list(task.batches(0, epoch)) for epoch in (0, 0, 1))
    assert len(first) == 10
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0][0], later[0][0])
    ((x, labels),) = task.test()
    assert (x.shape, labels.shape) == ((450, 64), (450,))
    assert float(x.max()) == 1


def test_no_digit_is_in_two_parts():
    pytest.importorskip("sklearn")
    parts = [{tuple(row) for row in x.tolist()} for x, _ in digits()]
    assert [len(part) for part in parts] == [1047, 300, 450]  # no digit is there twice either
    assert len(set.union(*parts)) == 1797


def test_images_to_choose_by_and_to_score_by(kit):
    problem = kit.tiny()
    task = images_task(problem)
    every = prepared(problem.validation_data(0)[0])
    chosen, scored = (torch.cat([x for x, _ in part]) for part in (task.validation(), task.test()))
    assert torch.equal(chosen, every[::2])
    assert torch.equal(scored, every[1::2])
    labels = torch.cat([labels for _, labels in task.test()])
    assert torch.equal(labels, problem.validation_data(0)[1][1::2])


def test_digits_need_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits.cache_clear()
    with pytest.raises(DataError, match=r"scikit-learn: pip install '\.\[experiments\]'"):
        digits_task().example_inputs()
    digits.cache_clear()


def test_networks_by_seed(kit):
    problem = kit.tiny()
    task = images_task(problem)
    start = problem.network().state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in task.network(0).state_dict().items())
    assert not torch.equal(task.network(1).conv.weight, start["conv.weight"])
    assert task.settings["width"] == 2


def test_the_cap_falls_and_is_put_back(kit):
    task = images_task(kit.tiny())
    model = task.network(0)
    opt = ProxSPS(model.parameters(), lr=0.5)
    caps, seen = [], []
    opt.register_step_pre_hook(lambda opt, args, kwargs: caps.append(opt.param_groups[0]["lr"]))
    fit(task, model, opt, 2, seed=0, after_backward=lambda model: seen.append(model.conv.weight.grad is not None))
    assert caps == [0.5] * 5 + [0.25] * 5
    assert seen == [True] * 10
    assert opt.param_groups[0]["lr"] == 0.5
    assert 0 <= accuracy(model, task.test()) <= 1
    assert model.training


def test_training_depends_on_seed_and_epochs_alone(kit):
    task = images_task(kit.tiny())
    ends = []
    for first in (0, 0, 1):
        model = task.network(0)
        fit(task, model, torch.optim.SGD(model.parameters(), lr=0.01), 1, seed=3, first_epoch=first)
        ends.append(model.conv.weight.detach())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_unknown_names():
    with pytest.raises(ValueError, match="Or 'digits-mlp'"):
        task_named("mnist")


def test_an_optimizer_with_two_kinds_of_weights_leaves_those_for_use(kit):
    task = images_task(kit.tiny())
    model = task.network(0)
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(model.parameters(), lr=0.01)
    fit(task, model, optimizer, 1, seed=0)
    assert not optimizer.param_groups[0]["train_mode"]
