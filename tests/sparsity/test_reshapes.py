"""Channels that a view regroups: torch-pruning does not follow them, and the other units of the network are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from proxsps.sparsity import find_units, shrink, unit_groups


class Attention(nn.Module):
    """Heads by hand, as in nanoGPT."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = torch.softmax(q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5, -1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, time, width))


class GPT(nn.Module):
    def __init__(self, width=16, blocks=2, tied=False):
        super().__init__()
        self.words, self.places = nn.Embedding(13, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList()
        for _ in range(blocks):
            mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            norms = nn.LayerNorm(width), nn.LayerNorm(width)
            self.blocks.append(nn.ModuleList([norms[0], Attention(width, 4), norms[1], mlp]))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 13, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for first, attention, second, mlp in self.blocks:
            x = x + attention(first(x))
            x = x + mlp(second(x))
        return self.head(self.norm(x))


class Upscaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((3, 8), (8, 16), (4, 3)))

    def forward(self, x):
        return self.c(nn.functional.pixel_shuffle(self.b(self.a(x).relu()), 2).relu())


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 12), nn.Linear(12, 32), nn.Linear(8, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu().view(-1, 4, 8)).mean(1)


class Recurrent(nn.Module):
    """Here torch-pruning itself raises an IndexError."""

    def __init__(self):
        super().__init__()
        self.b, self.gru = nn.Linear(10, 32), nn.GRU(8, 6, batch_first=True)
        self.a, self.c = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.c(self.a(self.gru(self.b(x).view(-1, 4, 8))[0]).relu())


MLPS = ("blocks.0.3.0", "blocks.1.3.0")
QKV = "blocks.0.1.qkv"


@pytest.mark.parametrize(
    ("make", "x", "sets", "reshaped"),
    [
        (GPT, torch.arange(12).reshape(2, 6), MLPS, QKV),
        (lambda: GPT(tied=True), torch.arange(12).reshape(2, 6), MLPS, QKV),
        (Upscaling, torch.randn(2, 3, 6, 6), ("a",), "b"),
        (Heads, torch.randn(3, 10), ("a",), "b"),
        (Recurrent, torch.randn(3, 10), ("a",), "b"),
    ],
    ids=["gpt", "gpt-tied", "pixel-shuffle", "heads", "recurrent"],
)
def test_units_that_no_view_regroups_are_found_and_removed(kit, make, x, sets, reshaped):
    torch.manual_seed(0)
    model = make().eval()
    units = find_units(model, x)
    assert tuple(one.name for one in units.sets) == sets
    assert reshaped in {left.layers[0] for left in units.left if "cannot" in left.reason and "follow" in left.reason}
    dead = kit.kill(model, units)
    small, report = shrink(model, x, timing_seconds=0)
    assert [gone for gone, _ in report.removed.values()] == list(map(len, dead))
    with torch.no_grad():
        torch.testing.assert_close(small(x), model(x))
    assert tuple(one.name for one in find_units(model, x, exclude=reshaped).sets) == sets


def test_a_model_whose_only_units_are_regrouped_says_why():
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(10, 32), nn.Linear(8, 4)

        def forward(self, x):
            return self.b(self.a(x).relu().view(-1, 4, 8)).mean(1)

    with pytest.raises(ValueError, match=r"no units that could be removed.*cannot be followed through a reshape"):
        unit_groups(View(), torch.randn(2, 10), lam=0.1)
