"""Validation loss of a small transformer on characters, over lr: the table of docs/choosing-lr.md.

The text is the reference of the language that ships with Python (pydoc_data.topics). Takes about five minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from proxsps import CoolDown, DecSPS, PolyakOptimizer, ProxSPS, ProxSPSAdam

STEPS, LENGTH, WIDTH = 600, 64, 64


class Transformer(nn.Module):
    """Two layers, four heads."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character at every position."""
        hidden = self.layers(self.embedding(x) + self.position, mask=self.mask, is_causal=True)
        return self.output(self.norm(hidden))


def batches(text: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Random pieces of the text, without an end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH - 1, (size,), generator=generator)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the next character."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(
    text: Tensor, make: Callable[[Iterable[Tensor]], Optimizer], schedule: type[LRScheduler] | None
) -> tuple[float, float | None]:
    """Validation loss, and the share of capped steps."""
    torch.manual_seed(0)
    model = Transformer(int(text.max()) + 1)
    opt = make(model.parameters())
    scheduler = None if schedule is None else schedule(opt, STEPS)
    branches: Counter[str] = Counter()
    cut = int(0.9 * len(text))
    for _, batch in zip(range(STEPS), batches(text[:cut], 16, seed=0), strict=False):
        opt.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if isinstance(opt, PolyakOptimizer):
            opt.step(loss=loss)
            branches[opt.last_step.branch_name] += 1
        else:
            opt.step()
        if scheduler is not None:
            scheduler.step()
    model.eval()
    with torch.no_grad():
        parts = zip(range(6), batches(text[cut:], 64, seed=99), strict=False)
        value = sum(loss_of(model, batch).item() for _, batch in parts) / 6
    return value, branches["capped"] / STEPS if branches else None


def main() -> None:
    """Print one line per setting."""
    text = "".join(topics[name] for name in sorted(topics))
    place = {character: index for index, character in enumerate(sorted(set(text)))}
    encoded = torch.tensor([place[character] for character in text])
    settings: list[tuple[type[Optimizer], float | None, type[LRScheduler] | None]] = [
        *((ProxSPS, lr, None) for lr in (0.1, 0.3, 1.0, 3.0, 10.0)),
        *((ProxSPS, lr, CosineAnnealingLR) for lr in (1.0, 3.0)),
        (DecSPS, 10.0, None),
        *((AdamW, lr, None) for lr in (1e-3, 3e-3, 1e-2)),
        *((ProxSPSAdam, None, schedule) for schedule in (None, CoolDown)),
    ]
    print("| optimizer | lr | validation loss | capped |\n| --- | --- | ---: | ---: |")
    for kind, lr, schedule in settings:
        value, capped = train(encoded, lambda params, kind=kind, lr=lr: kind(params, lr=lr), schedule)
        setting = " ".join(str(part) for part in (lr, getattr(schedule, "__name__", None)) if part is not None)
        share = "" if capped is None else f"{capped:.0%}"
        print(f"| {kind.__name__} | {setting} | {value:.2f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
