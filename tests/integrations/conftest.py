"""A small regression problem, and the loop by hand that every trainer is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def regression() -> tuple[Tensor, Tensor]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(2))
    return x, torch.sin(x.sum(1, keepdim=True)) + 1.0


def loader() -> DataLoader[Any]:
    """Six batches of eight, in order."""
    return DataLoader(TensorDataset(*regression()), batch_size=8)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(
    opt: Any,
    batches: Any,
    loss_of: Callable[[Any], Tensor],
    *,
    epochs: int = 2,
    micro: int = 1,
    after_epoch: Callable[[], None] = lambda: None,
    scaler: GradScaler | None = None,
) -> list[float]:
    """Train with `step(loss=...)`, the loss being the mean over `micro` batches; the losses of all batches."""
    scaler = scaler or GradScaler("cpu", enabled=False)
    batches, seen = list(batches), []
    for _ in range(epochs):
        for first in range(0, len(batches), micro):
            opt.zero_grad()
            losses = []
            for batch in batches[first : first + micro]:
                loss = loss_of(batch)
                scaler.scale(loss / micro).backward()
                losses.append(loss.detach())
            scaler.step(opt, loss=torch.stack(losses).sum() / micro)
            scaler.update()
            seen += [float(loss) for loss in losses]
        after_epoch()
    return seen


def averages_by_hand(model: nn.Module, opt: Any, batches: Any, loss_of: Callable[[Any], Tensor]) -> list[Tensor]:
    """Two epochs with a schedule-free optimizer; the averaged weights after each step."""
    found = []

    def note() -> None:
        opt.eval()
        found.append(weights(model))
        opt.train()

    for _ in range(2):
        for batch in batches:
            by_hand(opt, [batch], loss_of, epochs=1, after_epoch=note)
    return found


class Kit:
    """The helpers above."""

    averages_by_hand = staticmethod(averages_by_hand)
    network = staticmethod(network)
    regression = staticmethod(regression)
    loader = staticmethod(loader)
    weights = staticmethod(weights)
    by_hand = staticmethod(by_hand)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
