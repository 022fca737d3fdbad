"""Groups from a model: which parameters are hidden matrices, and which groups ScheduleFreeSPS refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from proxsps import L1, model_groups, roles
from proxsps.optim import ScheduleFreeSPS
from proxsps.problems.resnet import ResNet

MATRICES, REST = "matrices", "rest"


def matrices(model, **options):
    return {role.name for role in roles(model, **options) if role.set == MATRICES}


def trained(model, inputs, metric="spectral", steps=3, **options):
    """A few steps, after which all parameters with a gradient have moved and are finite."""
    opt = ScheduleFreeSPS(model, metric=metric, **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(steps):
        opt.zero_grad()
        out = model(*inputs)
        loss = (out[0] if isinstance(out, tuple) else out).square().mean() + 0.1
        loss.backward()
        opt.step(loss=loss)
    for name, p in model.named_parameters():
        assert p.isfinite().all()
        if p.grad is not None and p.grad.abs().max() > 1e-6:
            assert not torch.equal(p, before[name]), name
    return opt


def test_a_perceptron():
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    assert matrices(model) == {"0.weight", "3.weight"}
    why = {role.name: role.why for role in roles(model)}
    assert why["5.weight"] == "last layer, Linear"
    assert why["1.weight"] == "vector of LayerNorm"
    assert str(roles(model)[0]) == "matrices  0.weight  (8 x 5): weights of Linear"
    trained(model, [torch.randn(16, 5)])


def test_a_residual_network():
    model = ResNet(8, 3)
    found = matrices(model)
    filters = {name for name, p in model.named_parameters() if p.dim() == 4}
    assert found == filters
    assert filters
    opt = trained(model, [torch.randn(4, 3, 16, 16)], steps=2)
    assert {group["metric"] for group in opt.param_groups} == {"adam", "spectral"}


class Attention(nn.Module):
    def __init__(self, width=8, tokens=11):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Parameter(torch.zeros(1, 6, width))
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, x):
        return self.head(self.block(self.tokens(x) + self.positions))


def test_a_transformer_with_packed_attention():
    model = Attention()
    ends = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert matrices(model) == {f"block.{end}" for end in ends}
    packed = {role.name: role.packed for role in roles(model) if role.packed > 1}
    assert packed == {"block.self_attn.in_proj_weight": 3}
    opt = trained(model, [torch.randint(0, 11, (4, 6))])
    assert sorted(group["packed"] for group in opt.param_groups) == [1, 1, 3]
    assert all(group["packed"] == 1 for group in model_groups(model, "adam"))


def test_a_packed_tensor_steps_like_its_three_matrices(kit):
    (whole,) = kit.drawn((24, 8))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(3)]
    one = ScheduleFreeSPS([{"params": [whole], "metric": "spectral", "packed": 3}])
    three = ScheduleFreeSPS(parts, metric="spectral")
    for k in range(4):
        (g,) = kit.drawn((24, 8), seed=k + 1)
        whole.grad = g.detach().clone()
        for p, own in zip(parts, whole.grad.chunk(3), strict=True):
            p.grad = own.clone()
        for opt in (one, three):
            opt.step(loss=9.0)
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="10 rows, which are not 3 matrices"):
        ScheduleFreeSPS([{"params": [torch.ones(10, 4, requires_grad=True)], "metric": "spectral", "packed": 3}])


def test_biases_of_attention_are_no_matrices():
    layer = nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=True), nn.Linear(8, 2))
    assert not matrices(layer) & {"0.bias_k", "0.bias_v"}


def test_a_recurrent_network():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.layer, self.head = nn.Embedding(7, 5), nn.GRU(5, 6, 2), nn.Linear(6, 7)

        def forward(self, x):
            return self.head(self.layer(self.tokens(x))[0])

    model = Recurrent()
    assert matrices(model) == {f"layer.weight_{side}_l{i}" for side in ("ih", "hh") for i in (0, 1)}
    trained(model, [torch.randint(0, 7, (9, 4))])


def test_tied_weights_are_one_parameter_of_the_rest():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 11, bias=False))
    model[3].weight = model[0].weight
    assert matrices(model) == {"1.weight"}
    assert len(roles(model)) == 3
    trained(model, [torch.randint(0, 11, (5,))])
    inner = nn.Sequential(nn.Linear(8, 11, bias=False), nn.Linear(11, 8), nn.Embedding(11, 8), nn.Linear(8, 2))
    inner[2].weight = inner[0].weight  # seen as a matrix first
    assert matrices(inner) == {"1.weight"}
    assert "also 2.weight" in next(role.why for role in roles(inner) if role.name == "0.weight")


class Adapted(nn.Module):
    """A frozen layer with a low-rank correction that starts at 0."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("metric", ["adam", "spectral"])
def test_adapters_that_start_at_zero_learn(metric):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(6, 8), nn.ReLU(), Adapted(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert matrices(model) == {f"{i}.{side}.weight" for i in (0, 2) for side in ("down", "up")}
    frozen = model[0].base.weight.detach().clone()
    opt, inputs = ScheduleFreeSPS(model, metric=metric), torch.randn(64, 6)
    losses = []
    for _ in range(150):
        opt.zero_grad()
        loss = (model(inputs) - inputs[:, :2] * inputs[:, 2:4]).square().mean()
        loss.backward()
        opt.step(loss=loss)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model[0].base.weight, frozen)
    assert all(part.weight.abs().max() > 1e-3 for part in (model[0].up, model[2].up))


def test_filters_of_single_channels_are_no_matrices():
    model = nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten())
    model.append(nn.Linear(8 * 4 * 4, 2))
    assert matrices(model) == {"1.weight", "2.weight"}
    trained(model, [torch.randn(3, 6, 8, 8)])


def test_patterns_include_and_exclude():
    model = Attention()
    assert matrices(model, exclude=["attn"]) == {"block.linear1.weight", "block.linear2.weight"}
    assert matrices(model, include=["positions", "head"]) >= {"positions", "head.weight"}
    assert "head.bias" not in matrices(model, include=["head"])  # a vector is never a matrix
    assert "head.weight" not in matrices(model, include=["head"], exclude=["head"])
    groups = model_groups(model, include=["^head"], exclude=["linear1"])
    opt = ScheduleFreeSPS(groups)
    sets = {name: group["set"] for group in opt.param_groups for name in group["param_names"]}
    assert sets["head.weight"] == MATRICES
    assert sets["block.linear1.weight"] == REST
    assert sets.keys() == dict(model.named_parameters()).keys()


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert {role.name for role in roles(model)} == {"1.weight", "1.bias", "2.weight", "2.bias"}


# Groups that users make


@pytest.mark.parametrize("shape", [(), (7,)], ids=str)
def test_a_spectral_group_with_vectors_raises(shape, kit):
    params = kit.drawn((3, 4), shape)
    with pytest.raises(ValueError, match=r'metric="spectral" is for real matrices.*parameter 1.*model_groups'):
        ScheduleFreeSPS(params, metric="spectral")
    opt = ScheduleFreeSPS(params[:1], metric="spectral")
    with pytest.raises(ValueError, match="is for real matrices"):
        opt.add_param_group({"params": params[1:], "metric": "spectral"})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="is for real matrices"):
        ScheduleFreeSPS(kit.drawn((3, 4), dtype=torch.complex64), metric="spectral")


def test_a_spectral_group_with_a_regularizer_raises(kit):
    params = kit.drawn((3, 4))
    with pytest.raises(ValueError, match=r"L1.*not exact in this metric.*Use weight_decay"):
        ScheduleFreeSPS(params, metric="spectral", regularizer=L1(0.1))
    with pytest.raises(ValueError, match="not exact in this metric"):
        ScheduleFreeSPS(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), metric="spectral", regularizer=L1(0.1))
    with pytest.raises(ValueError, match='must be "adam" or "spectral"'):
        ScheduleFreeSPS(params, metric="muon")
    with pytest.raises(ValueError, match='must be "adam" or "spectral"'):
        ScheduleFreeSPS(nn.Linear(2, 2), metric="muon")
    with pytest.raises(ValueError, match=r"regularizer must be"):
        ScheduleFreeSPS(params, regularizer=0.1)


def test_groups_are_divided_into_matrices_and_others_with_their_names(kit):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = ScheduleFreeSPS([{"params": list(model.named_parameters()), "weight_decay": 0.1}])
    assert [group["set"] for group in opt.param_groups] == [MATRICES, REST]
    assert [group["param_names"] for group in opt.param_groups] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    assert all(group["weight_decay"] == 0.1 for group in opt.param_groups)
    (lone,) = kit.drawn((5,))
    opt.add_param_group({"params": [("lone", lone)]})
    assert opt.param_groups[-1]["set"] == REST
    single = ScheduleFreeSPS(kit.drawn((1,)))
    single.add_param_group({"params": lone})  # a tensor, as torch takes it
    assert single.param_groups[-1]["params"] == [lone]
