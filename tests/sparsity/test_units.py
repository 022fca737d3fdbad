"""Which channels belong together, that their zeros are exact, and what is left alone with a reason."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from proxsps import ProxSGD, ProxSPS
from proxsps.problems.resnet import ResNet
from proxsps.sparsity import TraceError, UnitLasso, find_units, shrink, unit_groups


def reasons(units):
    return {one.layers[0]: one.reason for one in units.left}


def test_sets_of_all_networks(case):
    model = case.model()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    model.train()
    units = find_units(model, case.inputs())
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert tuple(map(len, units.sets)) == case.sets
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    for one in units.sets:
        for member in one.members:
            assert sorted(set(member.ids) - {-1}) == list(range(len(one)))


def test_residual_branches_share_their_channels(kit):
    units = find_units(kit.Residual(), torch.zeros(1, 3, 8, 8))
    second = next(one for one in units.sets if len(one) == 10)
    assert set(second.layers) == {f"{name}.{i}" for name in ("project", "b2", "c2") for i in (0, 1)}
    assert {member.name for member in second.members} == {
        f"{name}.{key}" for name in ("project", "b2", "c2") for key in ("0.weight", "1.weight", "1.bias")
    }
    assert set(second.consumers) == {"c1.0", "head"}
    assert reasons(units) == {"head": "the channels are the model's output"}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["conv-bn", "resnet-bn", "resnet", "transformer"])
def test_dead_units_are_exactly_zero_where_they_are_read(kit, name, training):
    """Behind batch normalisation, in both of its modes, and behind residual sums: not small, but zero."""
    case = kit.cases[name]
    model = case.model()
    units = find_units(model, case.inputs())
    dead = kit.kill(model, units)
    seen = {}
    consumers = {layer: (one, gone) for one, gone in zip(units.sets, dead, strict=True) for layer in one.consumers}
    for layer in consumers:
        model.get_submodule(layer).register_forward_pre_hook(lambda _, args, layer=layer: seen.update({layer: args[0]}))
    model.train(training)
    model(case.inputs())
    assert set(seen) == set(consumers)
    for layer, (one, gone) in consumers.items():
        x = seen[layer]
        x = x if x.ndim == 4 else x.reshape(-1, len(one), x.shape[-1] // len(one))  # a channel may be several inputs
        assert (x[:, torch.from_numpy(gone)] == 0).all()
    assert sum(bool((x != 0).any()) for x in seen.values()) > 1


def test_activations_that_do_not_keep_zero_are_found_by_trial():
    model = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    units = find_units(model, torch.randn(2, 4))
    assert [one.name for one in units.sets] == ["2"]
    assert "zero units change the output" in reasons(units)["0"]


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("batch_norm", [True, False], ids=["bn", "plain"])
def test_padded_shortcuts_are_never_taken_for_straight_ones(width, batch_norm):
    """With two channels, removing the first one happens to be right: a trial has to remove each unit once."""
    for depth in (8, 14):
        units = find_units(ResNet(depth, width, batch_norm=batch_norm), torch.randn(2, 3, 8, 8))
        assert all(one.name.endswith("conv1") for one in units.sets)
        assert any("a shortcut pads or shifts the channels" in left.reason for left in units.left)


class Odd(nn.Module):
    """Several things that a rule would have to know of."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(4, 12)
        self.back = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(4, 8)
        self.grouped = nn.Conv1d(8, 8, 1, groups=2)
        self.plain = nn.Linear(8, 6)
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 4)
        self.joined = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 2)

    def forward(self, x):
        a, b = self.gates(x).chunk(2, -1)
        x = x + self.back(a + b.relu())  # channels of the input itself
        x = self.norm(self.wide(x))
        x = self.plain(self.grouped(x.unsqueeze(2)).squeeze(2)).relu()
        return self.head(self.joined(torch.cat([self.left(x), self.right(x)], 1)).relu())


def test_splits_concatenations_and_what_mixes_channels():
    model = Odd()
    units = find_units(model, torch.randn(3, 4))
    sets = {one.name: one for one in units.sets}
    assert set(sets) == {"gates", "plain", "left", "right"}
    # The two halves of a split tensor are added, so a unit has a row of each.
    gates = next(member for member in sets["gates"].members if member.name == "gates.weight")
    np.testing.assert_array_equal(gates.ids, [*range(6), *range(6)])
    # Behind a concatenation one normalisation serves both layers.
    joined = units.members["joined.weight"].ids
    assert sorted(joined) == list(range(len(sets["gates"]) + 6, len(units)))
    why = reasons(units)
    assert "does not run with fewer" in why["back"]
    assert "layer normalisation" in why["wide"] or "grouped" in why["wide"]
    assert "grouped convolution" in why["grouped"]


def test_shared_tensors_would_overlap():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    units = find_units(model, torch.randn(2, 4))
    assert not units.sets
    assert "one tensor is used as 0.weight and as 2.weight, so that groups would overlap" in reasons(units)["0"]
    with pytest.raises(ValueError, match=r"has no units that could be removed.*groups would overlap"):
        unit_groups(model, torch.randn(2, 4), 0.1)


def test_frozen_and_excluded_layers():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    model[0].bias.requires_grad_(False)
    units = find_units(model, torch.randn(2, 4))
    assert [one.name for one in units.sets] == ["2"]
    assert reasons(units)["0"] == "some of the parameters are frozen"
    assert not model[0].bias.requires_grad
    model.requires_grad_(True)
    assert reasons(find_units(model, torch.randn(2, 4), exclude="2"))["2"] == "exclude='2' names it"
    with pytest.raises(ValueError, match=r"exclude='conv\*' matches no layer of the model. Layers with units: 0, 2"):
        find_units(model, torch.randn(2, 4), exclude=["2", "conv*"])


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x):
        return self.one(x)


def test_models_that_cannot_be_traced():
    with pytest.raises(TraceError, match=r"No gradient flows.*torch\.no_grad, detach or argmax"):
        find_units(Untraceable(), torch.randn(2, 4))
    with pytest.raises(TraceError, match="cannot be called with these example inputs: RuntimeError"):
        find_units(nn.Linear(3, 2), torch.randn(2, 4))
    with pytest.raises(TraceError, match="returns no floating-point tensor"):
        find_units(nn.Identity(), torch.zeros(3, dtype=torch.long))


def test_inputs_by_keyword_and_several_outputs(kit):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)

        def forward(self, x, shift):
            inner = self.a((self.shared(x) + 0 * shift).relu())
            return {"features": inner, "score": self.b(inner.relu()), "steps": 3}

    units = find_units(Two(), {"x": torch.randn(2, 4), "shift": torch.ones(1)})
    assert [one.name for one in units.sets] == ["shared"]
    assert reasons(units)["a"] == "the channels are the model's output"
    assert len(find_units(Two(), (torch.randn(2, 4), torch.ones(1)))) == 6


@pytest.mark.parametrize("kind", [ProxSPS, ProxSGD])
def test_training_with_a_unit_lasso_kills_whole_units(kit, kind):
    torch.manual_seed(0)
    model = kit.cases["resnet-bn"].model().train()
    x = torch.randn(16, 3, 8, 8)
    groups = unit_groups(model, x[:1], 0.1)
    assert isinstance(groups[0]["regularizer"], UnitLasso)
    assert [name for name, _ in groups[1]["params"]] == ["head.weight", "head.bias"]
    opt = kind(groups, lr=0.05)
    for _ in range(40):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.arange(16) % 4)
        loss.backward()
        opt.step(loss=loss)
    dead = np.concatenate(groups.units.dead(model))
    assert 0 < dead.sum() < len(dead)
    # No unit is dead in one of its layers only: that is what the joint group is for.
    by_weights = np.concatenate(groups.units.dead(model, weights_only=True))
    np.testing.assert_array_equal(dead, by_weights)
    stage = next(one for one in groups.units.sets if len(one) == 10)
    gone = groups.units.dead(model)[groups.units.sets.index(stage)]
    for member in stage.members:
        param = dict(model.named_parameters())[member.name].detach()
        np.testing.assert_array_equal((param.reshape(len(gone), -1) == 0).all(1).numpy(), gone)


def test_options_of_groups(kit):
    case = kit.cases["mlp"]
    model, x = case.model(), case.inputs()
    units = find_units(model, x)
    sized, plain = (unit_groups(model, x, 0.1, weights=kind, units=units)[0]["regularizer"] for kind in ("size", "one"))
    np.testing.assert_allclose(sized.weights, np.sqrt([7] * 20 + [21] * 12))
    np.testing.assert_array_equal(plain.weights, np.ones(32))
    with pytest.raises(ValueError, match="weights must be 'size' or 'one', got 'two'"):
        unit_groups(model, x, 0.1, weights="two")
    for lam in (0.0, -1.0, float("inf"), float("nan"), "strong"):
        with pytest.raises(ValueError, match="the strength lam must be a finite number > 0 or 'auto', got"):
            unit_groups(model, x, lam, units=units)
    assert "20  0" in str(units)


@pytest.mark.parametrize("weights", ["size", "one"])
def test_the_strength_that_is_computed_gives_a_penalty_of_one(kit, case, weights):
    model, x = case.model(), case.inputs()
    groups = unit_groups(model, x, weights=weights)
    assert groups[0]["regularizer"].lam == unit_groups(model, x, "auto", weights=weights)[0]["regularizer"].lam
    # By hand: the norm of each unit over all its tensors, times the root of its size.
    squares, sizes, params = np.zeros(len(groups.units)), np.zeros(len(groups.units)), dict(model.named_parameters())
    for name, member in groups.units.members.items():
        slices = params[name].detach().double().movedim(member.dim, 0).flatten(1 if params[name].ndim > 1 else 0)
        for unit, entries in zip(member.ids, slices, strict=True):
            if unit >= 0:
                squares[unit] += float(entries.square().sum())
                sizes[unit] += entries.numel()
    norms = np.sqrt(squares) * (np.sqrt(sizes) if weights == "size" else 1)
    assert groups[0]["regularizer"].lam * norms.sum() == pytest.approx(1, rel=1e-5)
    params[next(iter(groups.units.members))].data.fill_(float("nan"))
    with pytest.raises(ValueError, match="The penalty of the present weights is nan"):
        unit_groups(model, x, units=groups.units)


def test_a_llama_of_transformers(kit):
    """Rotary embeddings make torch-pruning walk for ever; the walk ends, and the gated MLP blocks are found."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=8)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    words = {"input_ids": torch.randint(20, (2, 6))}
    units = find_units(model, words)
    assert [set(one.layers) for one in units.sets] == [
        {f"model.layers.{i}.mlp.{name}" for name in ("gate_proj", "up_proj")} for i in (0, 1)
    ]
    assert any("torch-pruning cannot follow" in left.reason for left in units.left)
    dead = kit.kill(model, units)
    small, report = shrink(model, words, units=units, timing_seconds=0)
    assert small.model.layers[0].mlp.gate_proj.out_features == 16 - len(dead[0])
    assert report.difference < 1e-6


class Functional(nn.Module):
    """Layers whose weights are used without a call of the layer; one is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.unused = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(2, 2)
        self.attention = nn.MultiheadAttention(2, 1)  # its output layer is not called as a module either

    def forward(self, x):
        x = nn.functional.linear(x, self.a.weight, self.a.bias).relu()
        x = self.c(self.b(x).relu())
        return self.attention(x, x, x)[0]


def test_layers_that_are_not_called_are_named(kit):
    model, x = Functional().eval(), torch.randn(3, 4)
    units = find_units(model, x)
    assert [one.name for one in units.sets] == ["b"]
    called = {one.layers for one in units.left if "not called as a module" in one.reason}
    assert called == {("a",), ("unused",)}
    kit.kill(model, units)
    text = str(shrink(model, x, timing_seconds=0).report)
    assert "Kept: layer a, because it is not called as a module" in text


class FixedSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 6 * 6, 5)

    def forward(self, x):
        return self.head(self.conv(x).relu().view(-1, 8 * 6 * 6))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_are_named_among_those_left_alone(kind):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.recurrent = nn.Embedding(11, 8), kind(8, 10, batch_first=True)
            self.hidden, self.head = nn.Linear(10, 7), nn.Linear(7, 3)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.hidden(self.recurrent(self.words(words))[0][:, -1]).relu())

    units = find_units(Reader(), torch.randint(11, (3, 5)))
    assert ("hidden",) in [one.layers for one in units.sets]
    assert ("recurrent",) in [left.layers for left in units.left if "recurrent layer" in left.reason]
    assert not any(name.startswith("recurrent.") for name in units.members)


def test_a_fixed_size_in_the_forward_pass_gets_advice():
    with pytest.raises(ValueError, match=r"instead of x\.view\(-1, n\) write x\.flatten\(1\)"):
        unit_groups(FixedSize(), torch.randn(2, 3, 6, 6), 0.1)


def test_reasons_are_sentences():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    assert [str(one) for one in find_units(model, torch.randn(2, 4)).left] == [
        "Kept: layer 2, because the channels are the model's output."
    ]
