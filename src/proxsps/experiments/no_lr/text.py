"""Networks that predict the next letter of a text that comes with Python, `help("topics")`: transformers and a GRU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from proxsps.problems.base import BASE_SEED, seeded
from proxsps.sweep.trials import Batch, TrialTask

LETTERS = "\n" + "".join(map(chr, range(32, 127)))  # all that is printed; anything else counts as a blank
HELD_OUT = 0.1  # the last part of the text, for validation
VALIDATED = 128  # pieces of it


@lru_cache(maxsize=1)
def language_reference() -> Tensor:
    """The text of Python's language reference as numbers of letters, shape (n,): topics in the order of their names.

    It comes with Python (`pydoc_data.topics`), and differs a little from one minor version to the next.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    places = {letter: place for place, letter in enumerate(LETTERS)}
    return torch.tensor([places.get(letter, places[" "]) for letter in text])


class _Block(nn.Module):
    """Causal attention and a perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, letters, width) to the same."""
        batch, letters, width = x.shape
        parts = self.mix(self.norm1(x)).view(batch, letters, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.inner(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Scores of the next letter, (batch, letters, kinds of letters), at every place of a piece of text."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        for part in (self.letters, self.places):
            nn.init.normal_(part.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """(batch, letters) to the scores."""
        x = self.letters(text) + self.places.weight[: text.shape[1]]
        scores: Tensor = self.scores(self.norm(self.blocks(x)))
        return scores


@dataclass(frozen=True)
class TextTask(TrialTask):
    """The next letter of Python's language reference, by a transformer; validation loss on the last tenth of it."""

    metric: ClassVar[str] = "loss"

    name: str = "transformer"
    title: str = "transformer, validation loss"
    steps: int = 300
    weight_decay: float = 0.0
    width: int = 48
    layers: int = 2
    heads: int = 4
    context: int = 32
    batch_size: int = 16

    def model(self, seed: int) -> nn.Module:
        """A fresh transformer."""
        with seeded(BASE_SEED + seed):
            return Transformer(self.width, self.layers, self.heads, self.context)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Pieces from random places of the first nine tenths."""
        text = language_reference()
        last = int((1 - HELD_OUT) * len(text)) - self.context - 1
        rng = np.random.default_rng(seed)
        while True:
            yield self._pieces(torch.from_numpy(rng.integers(0, last, self.batch_size)))

    def _pieces(self, starts: Tensor) -> Batch:
        pieces = language_reference()[starts[:, None] + torch.arange(self.context + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of the next letters."""
        text, following = batch
        return cross_entropy(model(text).flatten(0, 1), following.flatten())

    def measure(self, model: nn.Module) -> float:
        """The loss on pieces that are spread evenly over the last tenth."""
        text = language_reference()
        first, last = int((1 - HELD_OUT) * len(text)), len(text) - self.context - 1
        starts = torch.linspace(first, last, VALIDATED, dtype=torch.float64).long()
        return float(self.loss(model, self._pieces(starts)))

    def data_digest(self) -> str:
        """A digest of the text."""
        return hashlib.sha256(language_reference().numpy().tobytes()).hexdigest()[:16]


class Recurrent(nn.Module):
    """The same scores by a gated recurrent unit that reads the letters one by one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters, self.cell = nn.Embedding(len(LETTERS), width), nn.GRU(width, width, batch_first=True)
        self.scores = nn.Linear(width, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        """(batch, letters) to the scores."""
        scores: Tensor = self.scores(self.cell(self.letters(text))[0])
        return scores


@dataclass(frozen=True)
class RecurrentTask(TextTask):
    """The same text by a recurrent network of one layer; `layers` and `heads` are not used."""

    name: str = "gru"
    title: str = "GRU, validation loss"
    steps: int = 600
    width: int = 128
    context: int = 64

    def model(self, seed: int) -> nn.Module:
        """A fresh recurrent network."""
        with seeded(BASE_SEED + seed):
            return Recurrent(self.width)
