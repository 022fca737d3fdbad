"""The smaller model has the output of the large one, trains on, and goes through checkpoints and export."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

from proxsps import ProxSPS
from proxsps.sparsity import (
    ShrinkError,
    TraceError,
    Units,
    clear_dead,
    find_units,
    load_shrunk,
    shrink,
    sparsity_report,
    unit_groups,
)


def apart(large, small, x):
    with torch.no_grad():
        one, other = large(x), small(x)
    return float((one - other).abs().max() / one.abs().max())


@pytest.fixture
def shrunk(kit, case):
    model, x = case.model(), case.inputs()
    units = find_units(model, x)
    dead = kit.kill(model, units)
    before = copy.deepcopy(model.state_dict())
    small, report = shrink(model, x, units=units, timing_seconds=0.01)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return model, small, report, dead, units


def test_output_stays_and_dead_units_go(case, shrunk):
    model, small, report, dead, units = shrunk
    assert apart(model, small, case.inputs()) < 1e-6
    other = case.inputs()
    other = other.flip(0) if not other.is_floating_point() else 3 * other + 1
    assert apart(model, small, other) < 1e-6
    assert report.difference < 1e-6
    assert [report.removed[one.name] for one in units.sets] == [
        (len(gone), len(one)) for one, gone in zip(units.sets, dead, strict=True)
    ]
    count = sum(p.numel() for p in small.parameters())
    assert (report.after.parameters, report.before.parameters) == (count, sum(p.numel() for p in model.parameters()))
    assert report.after.parameters < 0.85 * report.before.parameters
    assert report.after.multiply_adds < report.before.multiply_adds
    assert report.before.milliseconds > 0
    assert report.after.milliseconds > 0
    again = shrink(small, case.inputs(), timing_seconds=0).report  # nothing is left to remove
    assert not any(gone for gone, _ in again.removed.values())
    assert "parameters" in str(report)


def test_train_mode_agrees_too(case, shrunk):
    """Batch normalisation by the statistics of the batch, without dropout."""
    model, small, *_ = shrunk
    for one in (model, small):
        one.train()
        for module in one.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
    assert apart(model, small, case.inputs()) < 1e-5


def test_checkpoints_and_export(case, shrunk, tmp_path):
    small, x = shrunk[1], case.inputs()
    torch.save(small.state_dict(), tmp_path / "small.pt")
    state = torch.load(tmp_path / "small.pt", weights_only=True)
    loaded = load_shrunk(case.model(seed=5), state)
    assert apart(small, loaded, x) == 0
    assert str(loaded) == str(small)
    exported = torch.export.export(small, (x,)).module()
    assert apart(small, exported, x) < 1e-6


def test_tracing(kit):
    """As for ONNX."""
    case = kit.cases["resnet-bn"]
    model, x = case.model(), case.inputs()
    kit.kill(model, find_units(model, x))
    small = shrink(model, x, timing_seconds=0).model
    assert apart(small, torch.fx.symbolic_trace(small), x) == 0
    graph = torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    assert apart(small, graph, torch.cat([x, x])) < 1e-6


def test_training_goes_on_and_stays_the_same_as_that_of_the_large_model(kit):
    """Dead rows get no gradient through dead channels, so one step of both is the same step."""
    case = kit.cases["mlp"]
    model, x = case.model().double(), case.inputs().double()
    units = find_units(model, x)
    kit.kill(model, units)
    small = shrink(model, x, timing_seconds=0).model
    labels = torch.arange(5) % 3
    for one in (model, small):
        opt = ProxSPS(one.parameters(), lr=0.1)
        loss = nn.functional.cross_entropy(one(x), labels)
        loss.backward()
        # Biases of dead ReLU units have no gradient at 0; tanh has one, which the small model does not know.
        with torch.no_grad():
            for param in one.parameters():
                if one is model:
                    param.grad[param == 0] = 0
        opt.step(loss=loss)
    assert apart(model, small, x) < 1e-12


def test_weights_that_multiply_dead_units_can_be_cleared(kit, case):
    model, x = case.model(), case.inputs()
    units = find_units(model, x)
    dead = kit.kill(model, units)
    with torch.no_grad():
        before = model(x)
        clear_dead(model, units)
        assert torch.equal(model(x), before)
    # Every weight that shrinking takes away is zero now, and none besides.
    kept = sum(int((p != 0).sum()) for name, p in model.named_parameters() if p.ndim > 1)
    small = shrink(model, x, units=units, timing_seconds=0).model
    assert kept == sum(p.numel() for name, p in small.named_parameters() if p.ndim > 1)
    assert sum(map(len, dead)) > 0


def test_modes_flags_and_gradients(kit):
    case = kit.cases["conv-bn"]
    model, x = case.model(), case.inputs()
    kit.kill(model, find_units(model, x))
    model.train()
    model[1].eval()
    model[-1].weight.requires_grad_(False)
    small = shrink(model, x, timing_seconds=0.01).model
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [m.training for m in model.modules()].count(False) == 1
    assert all(p.grad is None for p in small.parameters())


def test_channels_that_are_dead_but_not_zero_are_named_and_left(kit):
    """A bias, or a shift behind batch normalisation, that was left out of the groups."""
    case = kit.cases["conv-bn"]
    model, x = case.model(), case.inputs()
    with torch.no_grad():
        model[0].weight[:3] = 0
        model[0].bias[:3] = 0
        model[1].weight[:3] = 0
        model[1].bias[0] = 0  # of the other two the shift is left
    small, report = shrink(model, x, timing_seconds=0)
    assert report.removed["0"] == (1, 8)
    left = next(one for one in report.left if "0" in one.layers)
    assert "their weights are zero, but not 1.bias (units 1, 2)" in left.reason
    assert apart(model, small, x) < 1e-6
    assert "Kept: 2 units of layers 0, 1, because their weights are zero" in str(report)


def test_of_a_set_without_live_units_one_stays(kit):
    case = kit.cases["resnet-bn"]
    model, x = case.model(), case.inputs()
    kit.kill(model, find_units(model, x), share=1.0)
    with pytest.warns(RuntimeWarning, match="Everything is dead"):
        small, report = shrink(model, x, timing_seconds=0)
    assert all(gone == total - 1 for gone, total in report.removed.values())
    with torch.no_grad():
        torch.testing.assert_close(small(x), model(x))


def test_nothing_dead_gives_a_copy(kit):
    case = kit.cases["mlp"]
    model, x = case.model(), case.inputs()
    small, report = shrink(model, x, timing_seconds=0)
    assert small is not model
    assert report.before[:2] == report.after[:2]
    assert apart(model, small, x) == 0
    assert np.isnan(report.after.milliseconds)
    assert "milliseconds" not in str(report)
    assert "milliseconds" in str(shrink(model, x, timing_seconds=0.01).report)


def test_a_frozen_model_without_gradients(kit):
    """As it is loaded to be used, not trained."""
    case = kit.cases["resnet-bn"]
    model, x = case.model(), case.inputs()
    kit.kill(model, find_units(model, x))
    model.requires_grad_(False)
    with torch.no_grad():
        small, report = shrink(model, x, timing_seconds=0)
    assert report.after.parameters < report.before.parameters
    assert apart(model, small, x) < 1e-6
    assert not any(param.requires_grad for param in small.parameters())


def test_a_model_that_cannot_be_traced():
    class NoGradient(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    with pytest.raises(TraceError, match="No gradient flows"):
        shrink(NoGradient(3, 2), torch.randn(2, 3))


def test_units_of_another_state_that_no_longer_hold_are_refused(kit):
    """A model that reads the number of its channels: here, the trial is left out on purpose."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.b(self.a(x).relu()) * self.a.out_features

    model, x = Scaled(), torch.randn(4, 3)
    assert not find_units(model, x).sets
    like = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    (one,) = find_units(like, x).sets
    members = tuple(type(m)(m.name.replace("0.", "a."), m.dim, m.ids) for m in one.members)
    forced = Units((type(one)("a", one.roots, members, ("a",), ("b",)),), ())
    kit.kill(model, forced)
    with pytest.raises(ShrinkError, match="output differs by"):
        shrink(model, x, units=forced)
    assert model.a.out_features == 6


def test_depthwise_transposed_and_embedding_layers():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.expand = nn.Conv1d(6, 10, 1)
            self.depthwise = nn.Conv1d(10, 10, 3, padding=1, groups=10)
            self.up = nn.ConvTranspose1d(10, 7, 2, stride=2)
            self.slope = nn.PReLU(7)
            self.head = nn.Conv1d(7, 2, 1)

        def forward(self, words):
            x = self.depthwise(self.expand(self.embed(words).transpose(1, 2)).relu())
            return self.head(self.slope(self.up(x.relu())))

    torch.manual_seed(0)
    model, words = Net(), torch.randint(9, (2, 5))
    groups = unit_groups(model, words, 0.1)
    assert sorted(map(len, groups.units.sets)) == [6, 7, 10]
    params = dict(model.named_parameters())
    with torch.no_grad():
        for member in groups.units.members.values():
            params[member.name].index_fill_(member.dim, torch.tensor([1, 3]), 0.0)
    small = shrink(model, words, timing_seconds=0).model
    assert (small.embed.embedding_dim, small.depthwise.groups, small.up.out_channels) == (4, 8, 5)
    assert apart(model, small, words) < 1e-6
    assert apart(small, load_shrunk(Net(), small.state_dict()), words) == 0


def test_a_dead_network_is_said(kit):
    case = kit.cases["mlp"]
    model, x = case.model(), case.inputs()
    units = find_units(model, x)
    kit.kill(model, units)
    for report in (shrink(model, x, timing_seconds=0).report, sparsity_report(model, units)):  # without a warning
        assert "are dead" not in str(report)
        assert "is dead" not in str(report)
    kit.kill(model, units, share=1.0)
    text = "Everything is dead: the output no longer depends on the input. Train again with a smaller strength"
    with pytest.warns(RuntimeWarning, match=text):
        report = shrink(model, x, timing_seconds=0).report
    assert report.collapsed
    assert text in str(report)
    with pytest.warns(RuntimeWarning, match='all 32 units are zero. .*start with lam="auto"'):
        assert "Everything is dead: all 32 units are zero. Train again" in str(sparsity_report(model, units))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    with pytest.warns(RuntimeWarning, match="all weights are zero"):
        assert "Everything is dead: all weights are zero." in str(sparsity_report(model))


def test_a_layer_that_is_nearly_dead_is_said(kit):
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))
    units = find_units(model, torch.zeros(2, 6))
    kit.kill(model, Units(units.sets[:1], ()), share=0.9)
    assert (
        sparsity_report(model, units).notes
        == shrink(model, torch.randn(4, 6), timing_seconds=0).report.notes[:-1]
        == []
    )
    kit.kill(model, Units(units.sets[1:], ()), share=0.95)
    text = "More than 90% of the units are dead in 2.weight (19 of 20). Check the accuracy. If it fell: Train again"
    with pytest.warns(RuntimeWarning, match=re.escape(text)):
        report = sparsity_report(model, units)
    assert text in str(report)
    assert text.replace("2.weight", "2") in str(shrink(model, torch.randn(4, 6), timing_seconds=0).report)


def test_a_dead_block_of_a_residual_network_is_no_dead_network(kit):
    case = kit.cases["resnet20"]
    model, x = case.model(), case.inputs()
    units = find_units(model, x)
    kit.kill(model, units, share=1.0)  # the shortcuts stay
    report = shrink(model, x, timing_seconds=0).report
    assert not report.collapsed
    assert "is dead" not in str(report)
