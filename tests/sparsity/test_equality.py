"""Models that branch on data never give a wrong smaller model; models that take only some inputs are still shrunk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from proxsps.sparsity import ShrinkError, TraceError, find_units, shrink, strength_path
from proxsps.sparsity.equality import expected_outputs

REALS = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([[1, 5, 2, 7], [3, 3, 0, 2]])


class Net(nn.Module):
    """Two linear layers, with a function from inputs to real numbers before and one of the hidden layer between."""

    def __init__(self, before: Callable, between: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.words = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2), nn.Embedding(8, 4)
        self.before, self.between = before, between

    def forward(self, *args: Any, **named: Any) -> Tensor:
        x = self.before(self, *args, **named)
        return self.between(self, self.a(x), x)


def killed(model: Net) -> Net:
    """The first half of the hidden units is zero."""
    with torch.no_grad():
        for tensor in model.a.parameters():
            tensor[:4] = 0.0
    return model


def plain(net: Net, h: Tensor, _: Tensor) -> Tensor:
    return net.b(h.relu())


BRANCHES = {
    "sign": lambda net, h, x: net.b(h.relu() if x.sum() > 0 else h.sigmoid()),
    "size": lambda net, h, x: net.b(h.relu() if x.abs().max() < 2 else h.sigmoid()),
    "small": lambda net, h, x: net.b(h.relu() if x.abs().max() > 0.2 else h.cos()),
    "layer": lambda net, h, x: net.b(h.relu()) if x.sum() > 0 else net.c(h.relu()),
    "shape": lambda net, h, x: net.b(h.relu()) if x.sum() > 0 else net.b(h.relu())[:, :1],
    "fails": lambda net, h, x: net.b(h.relu()) if x.sum() > 0 else net.b((h + torch.ones(8)).relu()),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_data_gives_no_wrong_model(name):
    model = killed(Net(lambda net, x: x, BRANCHES[name]))
    small, report = shrink(model, REALS, timing_seconds=0)
    others = [REALS, -REALS, 16 * REALS, REALS / 16, torch.randn(3, 4)]
    assert all(torch.allclose(small(x), model(x), atol=1e-6) for x in others)
    if name == "shape":  # the units are zero on both paths
        assert small.a.out_features == 4
        return
    assert small.a.out_features == 8
    assert any("the forward pass takes another path for other inputs" in note for note in report.notes)


def test_a_branch_on_words():
    class Branching(Net):
        def forward(self, words):
            h = self.a(self.words(words).mean(1))
            return self.b(h.relu() if words[0, 0] == 1 else h.sigmoid())

    model = killed(Branching(None, None))
    small, report = shrink(model, WORDS, timing_seconds=0)
    assert torch.equal(small(WORDS.flip(1)), model(WORDS.flip(1)))
    assert any("for the shuffled example inputs the output differs" in note for note in report.notes)


@pytest.mark.parametrize(("name", "said"), [("sign", "differs by "), ("layer", "cannot be computed (RuntimeError")])
def test_a_branch_that_the_trial_did_not_take_is_refused(name, said):
    """Units that were found before the model had its branch, as if its weights led to it."""
    model = killed(Net(lambda net, x: x, plain))
    units = find_units(model, REALS)
    model.between = BRANCHES[name]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ShrinkError, match="a model must not branch on data") as caught:
        shrink(model, REALS, units=units)
    assert said in str(caught.value)
    assert "find_units(..., exclude=...)" in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert shrink(model, REALS, units=find_units(model, REALS, exclude="a"), timing_seconds=0).model.a.out_features == 8


def test_a_path_is_not_begun_with_a_model_that_branches():
    def train(model, groups):
        raise AssertionError

    with pytest.raises(ValueError, match=r"no units that could be removed.* takes another path for other inputs"):
        strength_path(Net(lambda net, x: x, BRANCHES["sign"]), train, lambda model: 1.0, REALS)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def padded(net: Net, words: Tensor, lengths: Tensor) -> Tensor:
    packed = nn.utils.rnn.pack_padded_sequence(net.words(words), lengths, batch_first=True)  # lengths must fall
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0].sum(1)


def attended(net: Net, words: Tensor, mask: Tensor) -> Tensor:
    scores = torch.where(mask, 0.0, -math.inf).softmax(1)
    return (scores[..., None] * net.words(words)).sum(1)


def in_range(net: Net, x: Tensor) -> Tensor:
    if x.min() < 0 or x.max() > 1:
        raise ValueError("pixels are between 0 and 1")
    return x


def routed(net: Net, x: Tensor) -> Tensor:
    return x * (x == x.max(1, keepdim=True).values)


TAKEN = {
    "words": (lambda net, words: net.words(words).mean(1), (WORDS,)),
    "lengths": (padded, (WORDS, torch.tensor([4, 2]))),
    "mask": (attended, (WORDS, torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]).bool())),
    "additive mask": (lambda net, x, mask: (x + mask).softmax(1), (REALS[:2], torch.tensor([0, 0, -math.inf, 0]))),
    "keywords": (lambda net, x, scale: scale * x, {"x": REALS, "scale": 2}),
    "named tuple": (lambda net, pair: pair.first + pair.second, (Pair(REALS, REALS),)),
    "logarithm": (lambda net, x: x.log(), REALS),
    "range": (in_range, REALS),
    "codes as reals": (lambda net, x: net.words(x[:, 0].long()) + x, torch.tensor([[3.0, 0, 1, 1], [7, 1, 2, 3]])),
    "zeros": (lambda net, x: x, torch.zeros(1, 4)),
    "routing": (routed, REALS),
    "overflow": (lambda net, x: x.mul(80).exp(), REALS),
    "single precision": (lambda net, x: x @ torch.eye(4), REALS),
    "half precision": (lambda net, x: x @ torch.eye(4, dtype=torch.bfloat16), REALS.bfloat16()),
}


@pytest.mark.parametrize("name", TAKEN)
def test_models_that_take_only_some_inputs_are_shrunk(name):
    before, inputs = TAKEN[name]
    model = killed(Net(before, plain))
    model = model.bfloat16() if name == "half precision" else model
    small, report = shrink(model, inputs, timing_seconds=0)
    assert small.a.out_features == 4, report.notes


def test_rounding_in_single_precision_is_no_difference():
    """For 16 times the inputs, rounding moves this output by 5e-4, more than outputs may differ by themselves."""
    model = Net(lambda net, x: x @ torch.eye(4), plain)
    model.a, model.b = nn.Linear(4, 64), nn.Linear(64, 2)
    for tensor in model.a.parameters():
        tensor.data[::3] = 0.0
    units = find_units(model, REALS)
    model.between = lambda net, h, x: (100 * net.b(h.relu()) ** 3).sin()
    assert shrink(model, REALS, units=units, timing_seconds=0).model.a.out_features == 42


def test_what_is_compared():
    model = Net(lambda net, x, words: x + net.words(words).mean(1), plain)
    state = torch.random.get_rng_state()
    found = [one.name for one in expected_outputs(model, (REALS[:2], WORDS))]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert found == [
        "the example inputs",
        "random inputs",
        "the negated example inputs",
        "16 times the example inputs",
        "1/16 of the example inputs",
        "the shuffled example inputs",
        "values drawn from the example inputs",
    ]
    only = [one.name for one in expected_outputs(Net(in_range, plain), REALS)]
    assert only == ["the example inputs", "1/16 of the example inputs"]


def test_an_output_that_is_not_finite_is_said():
    model = killed(Net(lambda net, x: x, plain))
    model.b.bias.data[0] = math.nan
    with pytest.raises(TraceError, match="output is not finite for the example inputs"):
        shrink(model, REALS)
