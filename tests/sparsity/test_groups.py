"""Parameter groups in one line: who gets the regulariser, at which strength, and the table that says so."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from proxsps import L1, L2, SPS, Box, GroupLasso, ProxSGD, ProxSPS, Regularizer, SparseGroupLasso
from proxsps.sparsity import rows, sparse_groups


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.layer_norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(4, 2)

    def forward(self, words):
        x = self.norm(self.conv(self.embed(words).transpose(1, 2)))
        return self.head(self.layer_norm(x.mean(2)) * self.scale)


def regularised(groups):
    return {name: group["regularizer"] for group in groups for name, _ in group["params"] if group["regularizer"]}


def test_weights_get_it_and_biases_and_norms_do_not():
    groups = sparse_groups(Net(), L1(0.1))
    assert set(regularised(groups)) == {"embed.weight", "conv.weight", "head.weight"}
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in Net().named_parameters())
    assert len(groups) == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exclude": "head"}, {"embed.weight", "conv.weight"}),
        ({"exclude": "head.*"}, {"embed.weight", "conv.weight"}),
        ({"exclude": nn.Embedding}, {"conv.weight", "head.weight"}),
        ({"exclude": [nn.Embedding, "he*"]}, {"conv.weight"}),
        ({"include": nn.Linear}, {"head.weight"}),
        (
            {"include": ["*.weight"], "exclude": nn.Conv1d},
            {"embed.weight", "norm.weight", "layer_norm.weight", "head.weight"},
        ),
        ({"include": "*.bias"}, {"conv.bias", "norm.bias", "layer_norm.bias", "head.bias"}),
        ({"include": nn.modules.batchnorm._BatchNorm}, {"norm.weight"}),
        ({"include": ["scale", nn.Linear]}, {"scale", "head.weight"}),
    ],
)
def test_patterns(options, expected):
    assert set(regularised(sparse_groups(Net(), L1(0.1), **options))) == expected


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("pattern", ["heads", nn.Conv2d, "*.wieght"])
def test_a_pattern_that_matches_nothing_is_an_error(option, pattern):
    with pytest.raises(ValueError, match=rf"{option}=.* matches no trained parameter.*embed \(Embedding\), conv"):
        sparse_groups(Net(), L1(0.1), **{option: pattern})


def test_a_model_without_weights_is_an_error():
    with pytest.raises(ValueError, match="no trained weights"):
        sparse_groups(nn.Sequential(nn.BatchNorm1d(3)), L1(0.1))


@pytest.mark.parametrize("phi", [L1(0.0), SparseGroupLasso(0.0, 0.0), GroupLasso(0.0)], ids=repr)
def test_strength_zero_is_an_error(phi):
    with pytest.raises(ValueError, match="has strength 0 and gives no zeros"):
        sparse_groups(Net(), phi)


@pytest.mark.parametrize("lam", [float("inf"), float("nan"), -1.0])
def test_strength_must_be_finite(lam):
    for make in (L1, GroupLasso, rows):
        with pytest.raises(ValueError, match="must be a finite number >= 0"):
            sparse_groups(Net(), make(lam))


def test_frozen_parameters_are_left_out():
    model = Net()
    model.embed.requires_grad_(False)
    groups = sparse_groups(model, L1(0.1))
    assert "embed.weight" not in [name for group in groups for name, _ in group["params"]]
    with pytest.raises(ValueError, match="matches no trained parameter"):
        sparse_groups(model, L1(0.1), include="embed")


def test_shared_parameters_come_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert set(regularised(sparse_groups(model, L1(0.1)))) == {"0.weight"}


def test_strength_by_layer():
    by_fan = regularised(sparse_groups(Net(), L1(0.1), scale="fan-in"))
    assert by_fan["conv.weight"].lam == pytest.approx(0.1 / math.sqrt(18))
    assert by_fan["head.weight"].lam == pytest.approx(0.05)
    by_name = regularised(sparse_groups(Net(), L1(0.1), scale=lambda name, p: 2.0 if name == "conv.weight" else 1.0))
    assert (by_name["conv.weight"], by_name["head.weight"]) == (L1(0.2), L1(0.1))
    by_size = regularised(sparse_groups(Net(), rows(0.1, scale_by_size=False), scale="group-size"))
    assert by_size["conv.weight"] == GroupLasso(0.1 * math.sqrt(18), (1, 2))
    assert by_size["embed.weight"] == GroupLasso(0.1 * math.sqrt(6), (1,))
    both = regularised(sparse_groups(Net(), SparseGroupLasso(0.1, 0.2, (1,)), include="head", scale="group-size"))
    assert both["head.weight"] == SparseGroupLasso(0.2, 0.4, (1,))
    assert regularised(sparse_groups(Net(), L1(0.1), scale="group-size"))["head.weight"] == L1(0.1)


@pytest.mark.parametrize(
    ("phi", "scale", "message"),
    [
        (L1(0.1), "size", "scale must be 'group-size', 'fan-in', a function"),
        (L1(0.1), lambda name, p: float("inf"), "scale gave the factor inf for embed.weight"),
        (Box(-1, 1), "fan-in", "has no strength that could be scaled"),
        (rows(0.1), "group-size", "scales by the size of its groups already"),
        (lambda param: 0.1, None, "a function that returns one for a tensor; for embed.weight it gave 0.1"),
    ],
)
def test_errors_of_strengths(phi, scale, message):
    with pytest.raises(ValueError, match=message):
        sparse_groups(Net(), phi, scale=scale)


def test_rows_norm_everything_but_the_first_dim():
    found = regularised(sparse_groups(Net(), rows(0.1)))
    assert found["conv.weight"] == GroupLasso(0.1, (1, 2), True)
    assert found["head.weight"] == GroupLasso(0.1, (1,), True)


@pytest.mark.parametrize("kind", [ProxSPS, ProxSGD, SPS])
def test_optimizers_train_on_them(kind):
    torch.manual_seed(0)
    model = Net()
    opt = kind(sparse_groups(model, L1(0.02)), lr=0.1)
    words, labels = torch.randint(7, (16, 9)), torch.randint(2, (16,))
    for _ in range(30):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        opt.step(loss=loss)
    if kind is not SPS:  # which has the penalty inside the loss, and makes no exact zeros
        assert (model.conv.weight == 0).any()
    assert (model.norm.weight != 0).all()
    assert opt.param_groups[0]["param_names"] == ["embed.weight", "conv.weight", "head.weight"]


def test_table_prints_without_rich(forked):
    code = (
        "import sys; sys.modules['rich'] = None\n"
        "from torch import nn; from proxsps import L1; from proxsps.sparsity import sparse_groups\n"
        "sparse_groups(nn.Linear(3, 2), L1(0.5)).table.show()"
    )
    with forked([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.splitlines() == [
        "parameter  shape  entries  regularizer",
        "---------  -----  -------  -----------",
        "weight     2x3          6  L1(lam=0.5)",
        "bias       2            2  none",
    ]


def test_table_prints_with_rich_and_is_a_frame(capsys):
    pytest.importorskip("rich")
    table = sparse_groups(nn.Linear(3, 2), L1(0.5)).table
    table.show()
    assert "L1(lam=0.5)" in capsys.readouterr().out
    frame = table.frame()
    assert frame["entries"].tolist() == [6, 2]


@pytest.mark.parametrize("cls", [ProxSPS, ProxSGD])
def test_groups_can_be_used_again(cls):
    groups = sparse_groups(Net(), L1(0.1))
    before = str(groups)
    first, second = cls(groups, lr=1.0), cls(groups, lr=0.1)
    assert [group["lr"] for group in first.param_groups] == [1.0, 1.0]
    assert [group["lr"] for group in second.param_groups] == [0.1, 0.1]  # not what the first one filled in
    assert str(groups) == before
    for group in first.param_groups:
        group["lr"] = 0.5
    assert [group["lr"] for group in second.param_groups] == [0.1, 0.1]


def test_the_table_of_groups_that_torch_has_filled_in():
    groups = sparse_groups(Net(), L1(0.1))
    before = str(groups)
    torch.optim.SGD(groups, lr=0.1)  # replaces pairs of names and tensors by tensors
    assert str(groups) == before


def test_equal_centres_share_a_group_and_others_do_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    zeros = sparse_groups(model, lambda param: L2(0.1, center=torch.zeros_like(param)))
    assert [len(group["params"]) for group in zeros] == [3, 3]
    own = sparse_groups(model, lambda param: L2(0.1, center=param.detach().clone()))
    assert [len(group["params"]) for group in own] == [1, 1, 1, 3]


@pytest.mark.parametrize(("phi", "scale"), [(L1(3.0), None), (rows(2.0), None), (L1(1.0), "fan-in")])
def test_the_strength_that_is_computed_gives_a_penalty_of_one(phi, scale):
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    groups = sparse_groups(model, phi, scale=scale, lam="auto")
    total = 0.0
    for param in (model[0].weight.detach(), model[2].weight.detach()):
        width = param.shape[1]
        plain = param.norm(dim=1).sum() * width**0.5 if callable(phi) else param.abs().sum()
        total += float(plain) / (width**0.5 if scale else 1)
    penalties = [
        g["regularizer"].lam * (1 if scale is None else p.shape[1] ** 0.5) for g in groups[:-1] for _, p in g["params"]
    ]
    assert penalties == pytest.approx([1 / total] * len(penalties), rel=1e-5)


class MyNorm(Regularizer):
    def value(self, x):
        return abs(x).sum()

    def prox(self, z, alpha):
        return L1(1.0).prox(z, alpha)


def test_errors_of_the_strength_that_is_computed():
    model = nn.Linear(3, 2)
    with pytest.raises(
        ValueError, match=r"lam must be 'auto' or None, got 0\.1; a strength belongs into the regularizer"
    ):
        sparse_groups(model, L1(1.0), lam=0.1)
    with pytest.raises(ValueError, match="has no strength that could be scaled"):
        sparse_groups(model, MyNorm(), lam="auto")
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match=r"The penalty of the present weights is 0\.0, so that no strength makes it 1"):
        sparse_groups(model, L1(1.0), lam="auto")
